"""Names of Hugging Face models: the published names, and the parameters of the modules that transformers builds.

transformers 5 stores a layer's experts in two parameters, which no checkpoint has: ``mlp.experts.gate_up_proj``
[experts, 2 x ffn, hidden] (each expert: gate rows, then up rows) and ``mlp.experts.down_proj`` [experts, hidden, ffn].
Mixtral's modules are also called ``mlp`` where its checkpoints say ``block_sparse_moe``. Layer and expert numbers in
names are global.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from nereus.ir.arch import Arch, Lora
from nereus.ir.fragment import Segment
from nereus.ir.tensor import CutError, LogicalTensor, matrix_shape
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.tensors import logical_tensors

#: Path components that wrappers put anywhere into a name (DDP and DeepSpeed, torch.compile, FSDP, activation
#: checkpointing).
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

_FUSED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")


def unwrapped(parameter: str) -> str:
    """The name without the components that wrappers add."""
    return ".".join(part for part in parameter.split(".") if part not in WRAPPERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfNaming:
    """``Naming`` of transformers modules, plain, wrapped, or cut by tensor parallelism the way of transformers' own
    plans: rows of q, k, v, gate, up and vocabulary, columns of o and down, a fused gate | up cut in both halves. A
    tensor that a plan leaves whole (its shape says so) is known as well.

    ``fused_experts`` chooses what ``parameters`` lists: modules of transformers 5, or the names of a checkpoint;
    ``segments`` knows both. ``lora``: with the factors under their logical names (``PeftNaming`` knows peft's own).
    """

    arch: Arch
    head: str = "lm"
    lora: Lora | None = None
    fused_experts: bool = True

    def segments(self, parameter: str, shape: Sequence[int], where: Where) -> tuple[Segment, ...]:
        """Segments of ``parameter`` seen as a matrix (all dims but the last by the last). Raises UnknownParameter."""
        name = unwrapped(parameter)
        try:
            fused = _FUSED.fullmatch(name)
            if fused is not None and self.arch.moe is not None:
                layer = int(fused[1])
                self._refuse_absent_layer(parameter, layer, where)
                return self._fused(parameter, layer, fused[2], tuple(shape), where)
            tensor = self._tensors().get(self._logical_name(name))
            if tensor is None:
                raise UnknownParameter(
                    f"parameter '{parameter}' is none of a {self.arch.family} model with head '{self.head}'; "
                    "declare what it is, or leave it out of the module"
                )
            if tensor.layer is not None:
                self._refuse_absent_layer(parameter, tensor.layer, where)
            return self._plain(parameter, tensor, tuple(shape), where)
        except CutError as error:
            raise UnknownParameter(f"parameter '{parameter}': {error}") from None

    def parameters(self, where: Where) -> dict[str, tuple[int, ...]]:
        """Names as the module has them, with local shapes, persistent buffers included; a tied head is not listed
        (it is the embedding). Raises CutError where ``where`` cannot cut the model."""
        held = None if where.layers is None else set(where.layers)
        found: dict[str, tuple[int, ...]] = {}
        for tensor in self._tensors().values():
            if tensor.layer is not None and held is not None and tensor.layer not in held:
                continue
            if tensor.expert is not None and self._fuses(tensor):
                for fused in ("gate_up_proj", "down_proj"):
                    name = f"model.layers.{tensor.layer}.mlp.experts.{fused}"
                    if name not in found:
                        found[name] = self._fused_shape(fused, where)
                continue
            if tensor.expert is not None and where.experts is not None and tensor.expert not in where.experts:
                continue
            rows, cols = _box(tensor, where)
            sizes = (rows[1] - rows[0], cols[1] - cols[0])
            found[self._module_name(tensor.name)] = sizes[: len(tensor.shape)]
        return found

    def _tensors(self) -> dict[str, LogicalTensor]:
        return _by_name(self.arch, self.head, self.lora)

    def _fuses(self, tensor: LogicalTensor) -> bool:
        # An adapted expert is a module of its own: peft cannot put factors beside a slice of a parameter.
        adapted = f"{tensor.name.removesuffix('.weight')}.lora_A.weight" in self._tensors()
        return self.fused_experts and tensor.expert is not None and not adapted and ".lora_" not in tensor.name

    def _logical_name(self, name: str) -> str:
        if name == "lm_head.weight" and self.arch.tied_embeddings and self.head == "lm":
            return "model.embed_tokens.weight"
        if self.arch.family == "mixtral":
            return name.replace(".mlp.", ".block_sparse_moe.")
        return name

    def _module_name(self, name: str) -> str:
        fused = self.arch.family == "mixtral" and self.fused_experts
        return name.replace(".block_sparse_moe.", ".mlp.") if fused else name

    def _refuse_absent_layer(self, parameter: str, layer: int, where: Where) -> None:
        if where.layers is not None and layer not in where.layers:
            raise UnknownParameter(f"parameter '{parameter}': layer {layer} is none of this process's layers")

    def _plain(
        self, parameter: str, tensor: LogicalTensor, shape: tuple[int, ...], where: Where
    ) -> tuple[Segment, ...]:
        whole_rows, whole_cols = matrix_shape(tensor.shape)
        if shape == tensor.shape:  # left whole, whatever the degree
            rows, cols = (0, whole_rows), (0, whole_cols)
        else:
            rows, cols = _box(tensor, where)
            expected = (rows[1] - rows[0], cols[1] - cols[0])[: len(tensor.shape)]
            if shape != expected:
                cut = "" if expected == tensor.shape else f", or {list(expected)} on this rank"
                raise UnknownParameter(f"parameter '{parameter}' is {list(shape)}, not {list(tensor.shape)}{cut}")
        return (Segment(tensor=tensor.name, row_lo=rows[0], row_hi=rows[1], col_lo=cols[0], col_hi=cols[1], at_row=0),)

    def _fused_shape(self, kind: str, where: Where) -> tuple[int, int, int]:
        moe = self.arch.moe
        assert moe is not None
        count = moe.num_experts if where.experts is None else len(where.experts)
        if moe.expert_ffn % where.etp:
            raise CutError(f"expert ffn width {moe.expert_ffn} cannot be cut over {where.etp} ranks")
        ffn = moe.expert_ffn // where.etp
        return (count, 2 * ffn, self.arch.hidden) if kind == "gate_up_proj" else (count, self.arch.hidden, ffn)

    def _fused(
        self, parameter: str, layer: int, kind: str, shape: tuple[int, ...], where: Where
    ) -> tuple[Segment, ...]:
        moe = self.arch.moe
        assert moe is not None
        if layer >= self.arch.num_layers or layer < moe.first_dense_layers:
            raise UnknownParameter(f"parameter '{parameter}': layer {layer} has no experts in this model")
        expected = self._fused_shape(kind, where)
        if shape != expected:
            raise UnknownParameter(f"parameter '{parameter}' is {list(shape)}, not {list(expected)}")
        experts = range(moe.num_experts) if where.experts is None else where.experts
        block = f"model.layers.{layer}." + ("block_sparse_moe" if self.arch.family == "mixtral" else "mlp")
        gate, up, down = ("w1", "w3", "w2") if self.arch.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        parts = (gate, up) if kind == "gate_up_proj" else (down,)
        tensors, found, at_row = self._tensors(), [], 0
        for expert in experts:
            for part in parts:
                tensor = tensors.get(f"{block}.experts.{expert}.{part}.weight")
                if tensor is None:
                    raise UnknownParameter(f"parameter '{parameter}': this model has no expert {expert}")
                rows, cols = _box(tensor, where)
                found.append(
                    Segment(
                        tensor=tensor.name,
                        row_lo=rows[0],
                        row_hi=rows[1],
                        col_lo=cols[0],
                        col_hi=cols[1],
                        at_row=at_row,
                    )
                )
                at_row += rows[1] - rows[0]
        return tuple(found)


@lru_cache(maxsize=32)
def _by_name(arch: Arch, head: str, lora: Lora | None) -> dict[str, LogicalTensor]:
    return {tensor.name: tensor for tensor in logical_tensors(arch, head, lora)}


def _box(tensor: LogicalTensor, where: Where) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of ``tensor`` that a process at ``where`` holds. Raises CutError."""
    degree, rank = (where.tp, where.tp_rank) if tensor.expert is None else (where.etp, where.etp_rank)
    bounds = [(0, extent) for extent in matrix_shape(tensor.shape)]
    if tensor.cut is not None:
        bounds[tensor.cut.dim] = tensor.cut.interval(tensor.shape[tensor.cut.dim], degree, rank)
    return bounds[0], bounds[1]
