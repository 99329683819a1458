"""Names of peft: LoRA adapters in a live module and in ``adapter_model.safetensors``, and ``adapter_config.json``.

In a module that peft has wrapped, ``model.layers.0.self_attn.q_proj.weight`` is called
``base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight`` where it is adapted, its factors are
``...q_proj.lora_A.<adapter>.weight`` and ``...lora_B.<adapter>.weight``; a file has the factors only, without the
adapter's name. A module that is trained whole (a value head) is ``...score.modules_to_save.<adapter>.weight``, in a
file ``...score.weight``. What else peft can do (DoRA, biases, a rank for each module, ...) has state that is not
described here, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

from nereus.ir.arch import Arch, Lora
from nereus.ir.fragment import Segment
from nereus.models.lora import linear_kinds
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.naming.hf import HfNaming, unwrapped
from nereus.models.tensors import logical_tensors

PREFIX = "base_model.model."
_FACTORS = ("lora_A", "lora_B")


class UnknownAdapter(ValueError):
    """An adapter whose state is not described here; the text says which setting, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftNaming:
    """``Naming`` of a module wrapped by ``peft.get_peft_model``, or (its factors only) of an adapter file."""

    arch: Arch
    lora: Lora
    head: str = "lm"
    adapter: str = "default"
    fused_experts: bool = True

    def segments(self, parameter: str, shape: Sequence[int], where: Where) -> tuple[Segment, ...]:
        logical = self.logical_name(parameter)
        try:
            return self._inner().segments(logical, shape, where)
        except UnknownParameter as error:
            text = str(error).replace(f"'{logical}'", f"'{parameter}'", 1)
            raise UnknownParameter(text) from None

    def parameters(self, where: Where) -> dict[str, tuple[int, ...]]:
        return {self.module_name(name): shape for name, shape in self._inner().parameters(where).items()}

    def logical_name(self, parameter: str) -> str:
        """The name without what peft adds. Raises UnknownParameter for the state of another adapter."""
        name = unwrapped(parameter).removeprefix(PREFIX)
        parts = name.split(".")
        if "original_module" in parts:
            raise UnknownParameter(
                f"parameter '{parameter}' is the untrained copy that peft keeps of a module trained whole: "
                "nothing reads it while the adapter is active; leave it out"
            )
        found: list[str] = []
        i = 0
        while i < len(parts):
            part, after = parts[i], parts[i + 1 : i + 3]
            if part == "base_layer":
                i += 1
                continue
            if part in (*_FACTORS, "modules_to_save") and len(after) == 2:  # <adapter>.weight
                if after[0] != self.adapter:
                    raise UnknownParameter(
                        f"parameter '{parameter}' belongs to adapter '{after[0]}', and '{self.adapter}' is described: "
                        "a second adapter is a model of its own"
                    )
                found += [part] if part in _FACTORS else []
                found.append(after[1])
                i += 3
                continue
            found.append(part)
            i += 1
        return ".".join(found)

    def module_name(self, logical: str) -> str:
        """The parameter of the live module."""
        module, _, last = logical.rpartition(".")
        if module.rpartition(".")[2] in _FACTORS:
            return f"{PREFIX}{module}.{self.adapter}.{last}"
        if self.head == "value" and logical == "score.weight":
            return f"{PREFIX}{module}.modules_to_save.{self.adapter}.{last}"
        known = module.replace(".mlp.", ".block_sparse_moe.") if self.arch.family == "mixtral" else module
        adapted = f"{known}.lora_A.weight" in self._factor_names()
        return f"{PREFIX}{module}.base_layer.{last}" if adapted else f"{PREFIX}{logical}"

    def file_names(self) -> dict[str, str]:
        """Key in ``adapter_model.safetensors`` -> logical tensor, of everything that the file has."""
        tensors = logical_tensors(self.arch, self.head, self.lora)
        return {f"{PREFIX}{tensor.name}": tensor.name for tensor in tensors if tensor.trainable}

    def _factor_names(self) -> frozenset[str]:
        return _trained(self.arch, self.head, self.lora)

    def _inner(self) -> HfNaming:
        # A factor stands beside a linear, so experts that are adapted are linears each, not slices of one parameter.
        apart = any(".experts." in name for name in self._factor_names())
        fused = self.fused_experts and not apart
        return HfNaming(arch=self.arch, head=self.head, lora=self.lora, fused_experts=fused)


@lru_cache(maxsize=32)
def _trained(arch: Arch, head: str, lora: Lora) -> frozenset[str]:
    return frozenset(t.name for t in logical_tensors(arch, head, lora) if t.trainable)


#: Settings that give an adapter more or other state than two factors of one rank, or change how W and they are joined.
_REFUSED: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": ([], None),
    "layer_replication": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], None),
    "exclude_modules": ([], None),
    "use_bdlora": ({}, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": ([], None),
}
#: Starts that change the base weights, so that the checkpoint's are no longer those that the adapter stands beside.
_REFUSED_STARTS = ("pissa", "olora", "corda", "loftq")


def lora_from_config(config: object, arch: Arch, *, head: str = "lm") -> Lora:
    """``adapter_config.json`` -> ``Lora``. Raises UnknownAdapter for what has other state than that."""
    if not isinstance(config, Mapping) or config.get("peft_type", "LORA") != "LORA":
        raise UnknownAdapter("an adapter is described by a JSON object with peft_type LORA")
    for key, plain in _REFUSED.items():
        if config.get(key) not in plain:
            raise UnknownAdapter(f"{key} = {config[key]!r} has state, or a rule, that is not described: use plain LoRA")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_REFUSED_STARTS):
        raise UnknownAdapter(f"init_lora_weights = {start!r} changes the base weights: convert it to plain LoRA")
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or not set(saved) <= ({"score", "classifier"} if head == "value" else set()):
        raise UnknownAdapter(f"modules_to_save = {saved!r}: only a value head may be trained whole")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise UnknownAdapter(f"r = {rank!r} is no rank")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not alpha > 0:
        raise UnknownAdapter(f"lora_alpha = {alpha!r} is no scale")
    # Rank-stabilised: alpha / sqrt(r), written here as (alpha sqrt(r)) / r.
    scaled = float(alpha) * sqrt(rank) if config.get("use_rslora") else float(alpha)
    return Lora(rank=rank, alpha=scaled, targets=_targets(config.get("target_modules"), arch))


def config_of(lora: Lora, arch: Arch, *, head: str = "lm") -> dict[str, object]:
    """The ``adapter_config.json`` that goes with the adapter's file."""
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "TOKEN_CLS",
        "r": lora.rank,
        "lora_alpha": alpha,
        "target_modules": list(lora.targets or linear_kinds(logical_tensors(arch))),
        "modules_to_save": ["score"] if head == "value" else None,
        "bias": "none",
    }


def _targets(given: object, arch: Arch) -> tuple[str, ...]:
    known = linear_kinds(logical_tensors(arch))
    if given == "all-linear":
        if arch.moe is not None:
            raise UnknownAdapter(
                f"target_modules = 'all-linear' depends on how the module stores its experts: name them, known are "
                f"{', '.join(known)}"
            )
        return ()
    if not isinstance(given, (list, tuple, set)) or not given or not all(isinstance(word, str) for word in given):
        raise UnknownAdapter(f"target_modules = {given!r}: a list of module names is needed, a pattern is not read")
    unknown = sorted(str(word) for word in given if word not in known)
    if unknown:
        raise UnknownAdapter(f"target_modules names {', '.join(unknown)}; this model has {', '.join(known)}")
    # In model order; all of them is the same adapter as no choice.
    chosen = tuple(word for word in known if word in given)
    return () if chosen == known else chosen
