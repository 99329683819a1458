"""The model of a live vLLM worker: its weights as storages with fragments, filled in place.

A weight whose memory has the loader's layout is bound as it is. Others (see ``vllm_layout``) are refused, or with
``stage=True`` bound as memory beside the engine, of the loader's layout, which ``finish`` brings in through the
engine's own loading. Staged memory can be filled, not read: an engine with such weights is no source.

Everything is written into the memory that captured graphs use. The scheduler's prefix cache is not in a worker's
reach: ``vllm_worker.update`` resets it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nereus.ir.fragment import fragments_of
from nereus.ir.tensor import CutError
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.naming.vllm import VllmNaming, canonical
from nereus.runtime.adapters.base import BindError, Binding, BindingBuilder, PostCondition
from nereus.runtime.adapters.vllm_layout import Held, Reached, require_vllm, walk, where_of
from nereus.runtime.adapters.vllm_reload import refresh_attention, refresh_copies, reload_module

#: Names in one error; the rest are counted.
_MAX_NAMED = 8


class VllmAdapter:
    """``Adapter`` (builder mode: fill) of ``model_runner.model`` in a worker process, at rest.

    ``model_config``: vLLM's. ``stage``: weights that kernels rearranged are filled beside the engine. ``experts``:
    global expert numbers by name of the ``routed_experts`` module, where vLLM's own map does not tell (EPLB).
    ``after``: called at the end of ``finish`` (a model runner's caches).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        naming: VllmNaming,
        model_config: Any,
        *,
        rank: int = 0,
        stage: bool = False,
        experts: Mapping[str, Sequence[int]] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        require_vllm()
        self.model = model
        self.naming = naming
        self.model_config = model_config
        self.rank = rank
        self.stage = stage
        self.experts = experts
        self.after = after
        self._staged: dict[str, tuple[Held, torch.Tensor]] = {}
        self._reached: Reached | None = None
        self._addresses: dict[str, int] = {}

    def bind(self) -> Binding:
        """Raises BindError naming every tensor that is not understood, is missing, or has a kernel's layout."""
        reached = walk(self.model)
        where = where_of(self.model, self.experts)
        builder = BindingBuilder(rank=self.rank, derived=list(reached.derived), caches=list(reached.caches))
        problems = [f"{name}: a tensor of no known kind" for name in reached.unknown]
        problems += self._missing(reached, where)
        packed: list[str] = []
        staged: dict[str, tuple[Held, torch.Tensor]] = {}
        for held in reached.held:
            try:
                segments = self.naming.segments(held.name, held.shape, _where(where, held.name))
            except UnknownParameter as error:
                problems.append(str(error))
                continue
            memory = held.live.data
            if held.packed is not None and not self.stage:
                packed.append(f"{held.name} ({held.packed})")
                continue
            if held.packed is not None:
                memory = torch.zeros(held.shape, dtype=held.dtype, device=held.live.device)
                staged[held.name] = (held, memory)
            number = builder.storage(held.name, memory)
            width = held.shape[-1] if len(held.shape) > 1 else 1
            builder.fragments += fragments_of(segments, num_cols=width, slot="weight", storage=number)
        if packed:
            problems.append(
                f"{len(packed)} weights lie in a kernel's layout: {_listed(packed)}; bind with stage=True to fill them "
                "through the engine's own loading (this engine cannot be read from)"
            )
        if problems:
            raise BindError(f"this vLLM model cannot be bound: {_listed(problems)}")
        self._staged, self._reached = staged, reached
        self._addresses = {name: p.data_ptr() for name, p in self.model.named_parameters()}
        return builder.finish()

    def job_state(self) -> dict[str, object]:
        """A generation engine has no state beside weights: its requests and caches are the scheduler's."""
        return {}

    def finish(self, job_state: dict[str, object] | None = None) -> None:
        """After the storages were written: staged weights through the engine's loading, kernels' copies and derived
        tensors made again. Frees the staged memory on this side."""
        if self._reached is None:
            raise BindError("finish before bind: nothing was filled")
        by_module: dict[int, tuple[str, torch.nn.Module, dict[str, torch.Tensor]]] = {}
        for name, (held, memory) in self._staged.items():
            prefix = name.rpartition(".")[0]
            by_module.setdefault(id(held.module), (prefix, held.module, {}))[2][held.leaf] = memory
        for held in self._reached.held:  # the rest of such a module travels along
            if id(held.module) in by_module and held.name not in self._staged:
                by_module[id(held.module)][2][held.leaf] = held.live.data
        for prefix, module, shards in by_module.values():
            reload_module(prefix, module, shards, self.model_config)
        for _, module in self._reached.copied:
            refresh_copies(module)
        refresh_attention(self.model, self.model_config.dtype)
        self._staged = {}
        if self.after is not None:
            self.after()

    def checklist(self) -> tuple[PostCondition, ...]:
        return (
            PostCondition("parameters are real memory", self._check_real),
            PostCondition("captured graphs see the new weights: no parameter moved", self._check_addresses),
            PostCondition("nothing is staged", self._check_staged),
            PostCondition("absorbed projections follow kv_b_proj", self._check_absorbed),
        )

    def version(self) -> int:
        return int(getattr(self.model, "_nereus_version", 0))

    def set_version(self, version: int) -> None:
        self.model._nereus_version = version  # type: ignore[assignment]

    def _missing(self, reached: Reached, where: Mapping[str, Where]) -> list[str]:
        """Parameters that the architecture has on this process, and the model has not."""
        known = {canonical(held.name) for held in reached.held}
        try:
            wanted = self.naming.parameters(where[""])
        except (CutError, UnknownParameter) as error:
            return [str(error)]
        return [f"{name}: this architecture has it here, the model has not" for name in wanted if name not in known]

    def _check_real(self) -> str | None:
        unreal = [name for name, p in self.model.named_parameters() if p.is_meta]
        return f"still without memory: {_listed(unreal)}" if unreal else None

    def _check_addresses(self) -> str | None:
        moved = [n for n, p in self.model.named_parameters() if self._addresses.get(n, p.data_ptr()) != p.data_ptr()]
        return f"moved: {_listed(moved)}" if moved else None

    def _check_staged(self) -> str | None:
        return f"{len(self._staged)} weights are staged: call finish" if self._staged else None

    def _check_absorbed(self) -> str | None:
        wrong = [name for name, module in self.model.named_modules() if not _absorbed(module)]
        return f"W_UV of {_listed(wrong)} is not that of kv_b_proj" if wrong else None


def checksums(binding: Binding) -> dict[str, int]:
    """CRC-32 of every storage's bytes, by name."""
    found = {}
    for storage, data in zip(binding.state.storages, binding.memory, strict=True):
        found[storage.name] = zlib.crc32(data.cpu().view(torch.uint8).numpy().tobytes())
    return found


def _where(where: Mapping[str, Where], parameter: str) -> Where:
    return where.get(parameter.rpartition(".")[0], where[""])


def _absorbed(module: Any) -> bool:
    value, source = getattr(module, "W_UV", None), getattr(module, "kv_b_proj", None)
    weight = getattr(source, "weight", None)
    if value is None or weight is None or weight.dtype != value.dtype or weight.ndim != 2 or not weight.numel():
        return True  # another form of it, which only its kernels read
    heads, nope = module.num_heads, module.qk_nope_head_dim
    whole = weight.T.view(module.kv_lora_rank, heads, nope + module.v_head_dim)
    return bool(torch.equal(value, whole[..., nope:].transpose(0, 1)))


def _listed(lines: Sequence[str]) -> str:
    rest = len(lines) - _MAX_NAMED
    return "; ".join(lines[:_MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
