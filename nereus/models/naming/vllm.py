"""Names and local shapes of vLLM's parameters (0.8 to 0.32): Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE,
DeepSeek-V2/V3.

``qkv_proj``: this rank's q rows, then k, then v (where tp > kv heads each rank holds one whole kv head).
``gate_up_proj``: this rank's gate rows, then up. Experts are stacked: ``w13_weight`` [experts, 2 x ffn, hidden] with
gate (w1) before up (w3) in each, ``w2_weight`` [experts, hidden, ffn]. The vocabulary is padded to a multiple of 64;
padding rows are no segment. These are the layouts of vLLM's loaders: what its kernels make of them afterwards is the
adapter's matter.

``Where`` for an engine with attention data parallelism: ``tp`` of one attention replica; ``experts`` those of this
process under expert parallelism, else ``etp`` = tp x dp, since vLLM cuts experts over all replicas. Layer numbers in
names are global.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nereus.ir.arch import Arch, Mla, Moe
from nereus.ir.fragment import Segment
from nereus.ir.tensor import CutError, LogicalTensor, matrix_shape
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.tensors import logical_tensors

#: ``VocabParallelEmbedding`` pads to this.
VOCAB_MULTIPLE = 64
#: A scale of block-quantised weights serves this many rows x columns.
FP8_BLOCK = (128, 128)
#: Logical scale tensors are called as their weight, with this behind.
SCALE_SUFFIX = "_scale_inv"

#: Families whose pipeline stages all hold the embedding and the head, used or not.
_EMBEDDING_EVERYWHERE = ("mixtral", "qwen3_moe")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class _Local:
    """A local parameter: its shape, and what lies in it."""

    shape: tuple[int, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class _Key:
    """``Where`` without its layers, hashable."""

    tp: int
    tp_rank: int
    etp: int
    etp_rank: int
    experts: tuple[int, ...] | None

    @classmethod
    def of(cls, where: Where) -> _Key:
        experts = None if where.experts is None else tuple(where.experts)
        return cls(where.tp, where.tp_rank, where.etp, where.etp_rank, experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmNaming:
    """``Naming`` of vLLM's models. ``fp8``: ``parameters`` lists the block scales of the layers' linears as well;
    ``segments`` always knows them."""

    arch: Arch
    head: str = "lm"
    fp8: bool = False

    def segments(self, parameter: str, shape: Sequence[int], where: Where) -> tuple[Segment, ...]:
        """Segments of ``parameter`` seen as a matrix (all dims but the last by the last). UnknownParameter where the
        name is not this model's, its shape is another one, or ``where`` cannot cut it."""
        name = canonical(parameter)
        weight = _weight_of_scale(name)
        try:
            found = self._find(weight or name, where)
            if found is None:
                raise UnknownParameter(
                    f"vLLM parameter '{parameter}' {tuple(shape)} is none of a {self.arch.family} model with head "
                    f"'{self.head}'{_layers_text(where)}; declare what it is, or leave it out of the model"
                )
            if weight is not None:
                found = tuple(self._scales(parameter, local) for local in found)
        except CutError as error:
            raise UnknownParameter(f"vLLM parameter '{parameter}': {error}") from None
        for local in found:
            if local.shape == tuple(shape):
                return local.segments
        raise UnknownParameter(
            f"vLLM parameter '{parameter}' has shape {tuple(shape)}; at tp {where.tp_rank} of {where.tp}, etp "
            f"{where.etp_rank} of {where.etp}, this {self.arch.family} model has {found[0].shape}: a kernel has "
            "rearranged it, or the architecture or the coordinates are others"
        )

    def parameters(self, where: Where) -> dict[str, tuple[int, ...]]:
        """Names and local shapes as vLLM registers them; a tied head is not listed (it is the embedding). Raises
        CutError where ``where`` cannot cut the model."""
        key = _Key.of(where)
        layers = tuple(range(self.arch.num_layers)) if where.layers is None else tuple(where.layers)
        everywhere = self.arch.family in _EMBEDDING_EVERYWHERE
        first = everywhere or 0 in layers
        last = everywhere or self.arch.num_layers - 1 in layers
        found: dict[str, tuple[int, ...]] = {}
        ends = _ends(self.arch, self.head, key)
        if first or (self._tied and last):
            found["model.embed_tokens.weight"] = ends["model.embed_tokens.weight"].shape
        for layer in layers:
            for name, local in _layer(self.arch, layer, key).items():
                found[name] = local.shape
                if self.fp8 and is_quantised(name):
                    found[_scale_name(name)] = self._scales(name, local).shape
        if self.arch.num_layers - 1 in layers:
            found["model.norm.weight"] = ends["model.norm.weight"].shape
        head = "score.weight" if self.head == "value" else "lm_head.weight"
        if last and not self._tied:
            found[head] = ends[head].shape
        return found

    def legal_tp(self, *, scales: bool = False, limit: int = 64) -> tuple[int, ...]:
        """Degrees up to ``limit`` that cut every parameter, and with ``scales`` only on block borders. Experts are
        left whole (expert parallelism)."""
        return tuple(tp for tp in range(1, limit + 1) if self._allows(tp, scales=scales))

    @property
    def _tied(self) -> bool:
        return self.arch.tied_embeddings and self.head == "lm"

    def _allows(self, tp: int, *, scales: bool, etp: int = 1) -> bool:
        moe = self.arch.moe
        layers = {0, self.arch.num_layers - 1} if moe is None else {0, moe.first_dense_layers, self.arch.num_layers - 1}
        try:
            for rank in range(tp):
                key = _Key(tp, rank, etp, rank % etp, (0,) if moe is not None else None)
                _ends(self.arch, self.head, key)
                for layer in layers:
                    for name, local in _layer(self.arch, min(layer, self.arch.num_layers - 1), key).items():
                        if scales and is_quantised(name):
                            _scaled(local, _extents(self.arch, self.head))
        except (CutError, _OffBorder):
            return False
        return True

    def _find(self, name: str, where: Where) -> tuple[_Local, ...] | None:
        """Possible local forms of a parameter, the usual one first."""
        key = _Key.of(where)
        matched = _LAYER.fullmatch(name)
        if matched is None:
            local = _ends(self.arch, self.head, key).get(name)
            return None if local is None else (local,)
        layer = int(matched[1])
        if layer >= self.arch.num_layers or (where.layers is not None and layer not in where.layers):
            return None
        local = _layer(self.arch, layer, key).get(name)
        if local is None:
            return None
        if ".shared_experts." in name and where.tp > 1:
            # Where vLLM cuts tokens instead (sequence-parallel experts), every rank holds all of them.
            whole = _layer(self.arch, layer, _Key(1, 0, key.etp, key.etp_rank, key.experts))[name]
            return local, whole
        return (local,)

    def _scales(self, parameter: str, local: _Local) -> _Local:
        try:
            return _scaled(local, _extents(self.arch, self.head))
        except _OffBorder as error:
            expert = "w13_weight" in parameter or "w2_weight" in parameter
            if expert and self.arch.moe is not None:
                legal = tuple(
                    n for n in range(1, 65) if _expert_allows(self.arch.moe, n)
                )  # expert tensor parallelism has degrees of its own
                which = "expert tensor-parallel degrees"
            else:
                legal, which = self.legal_tp(scales=True), "tensor-parallel degrees"
            raise UnknownParameter(
                f"vLLM parameter '{parameter}': {error}; legal {which}: {', '.join(map(str, legal)) or 'none'}"
            ) from None


def canonical(parameter: str) -> str:
    """The name without what LoRA wrappers put in, and with ``routed_experts``, which older versions lack."""
    name = parameter.replace(".base_layer.", ".")
    return re.sub(r"\.experts\.(w\d+_)", r".experts.routed_experts.\1", name)


def is_quantised(name: str) -> bool:
    """Whether block quantisation stores this weight of a layer in FP8: its linears, not norms, biases or the router."""
    return name.endswith(("w13_weight", "w2_weight")) or (
        name.endswith("_proj.weight") or name.endswith("kv_a_proj_with_mqa.weight")
    )


def _scale_name(weight: str) -> str:
    return weight + SCALE_SUFFIX


def _weight_of_scale(name: str) -> str | None:
    weight = name.removesuffix(SCALE_SUFFIX)
    return weight if weight != name and is_quantised(weight) else None


def _layers_text(where: Where) -> str:
    return "" if where.layers is None else f" on a process with layers {list(where.layers)}"


# -- parameters -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _tensors(arch: Arch, head: str) -> dict[str, LogicalTensor]:
    return {t.name: t for t in logical_tensors(arch, head)}


@lru_cache(maxsize=8)
def _extents(arch: Arch, head: str) -> dict[str, tuple[int, int]]:
    return {name: matrix_shape(t.shape) for name, t in _tensors(arch, head).items()}


@lru_cache(maxsize=64)
def _ends(arch: Arch, head: str, key: _Key) -> dict[str, _Local]:
    tensors = _tensors(arch, head)
    embedding = _vocabulary(tensors["model.embed_tokens.weight"], key)
    found = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": _whole(tensors["model.norm.weight"]),
    }
    if head == "value":
        found["score.weight"] = _whole(tensors["score.weight"])
    elif arch.tied_embeddings:
        found["lm_head.weight"] = embedding
    else:
        found["lm_head.weight"] = _vocabulary(tensors["lm_head.weight"], key)
    return found


@lru_cache(maxsize=1024)
def _layer(arch: Arch, layer: int, key: _Key) -> dict[str, _Local]:
    prefix = f"model.layers.{layer}"
    tensors = _tensors(arch, "lm")

    def rows(*names: str, tp: int = key.tp) -> _Local:
        return _stacked([tensors[f"{prefix}.{name}"] for name in names], tp, key.tp_rank if tp > 1 else 0)

    def cols(name: str) -> _Local:
        return _beside(tensors[f"{prefix}.{name}"], key.tp, key.tp_rank)

    found: dict[str, _Local] = {}
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        found[norm] = rows(norm)
    found |= _latent(arch.mla, rows) if arch.mla is not None else _attention(arch, rows)
    found["self_attn.o_proj.weight"] = cols("self_attn.o_proj.weight")
    moe = arch.moe
    if moe is None or layer < moe.first_dense_layers:
        found |= _mlp("mlp", rows, cols)
    else:
        block = "block_sparse_moe" if arch.family == "mixtral" else "mlp"
        found[f"{block}.gate.weight"] = rows(f"{block}.gate.weight")
        if moe.router_bias:
            found[f"{block}.gate.e_score_correction_bias"] = rows(f"{block}.gate.e_score_correction_bias")
        found |= _experts(arch, moe, prefix, block, key)
        if moe.num_shared_experts:
            found |= _mlp(f"{block}.shared_experts", rows, cols)
    return {f"{prefix}.{name}": local for name, local in found.items()}


def _attention(arch: Arch, rows: Callable[..., _Local]) -> dict[str, _Local]:
    found = {}
    for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
        found[f"self_attn.qkv_proj.{kind}"] = rows(*(f"self_attn.{n}_proj.{kind}" for n in "qkv"))
    for norm in ("q_norm", "k_norm") if arch.qk_norm else ():
        found[f"self_attn.{norm}.weight"] = rows(f"self_attn.{norm}.weight")
    return found


def _latent(mla: Mla, rows: Callable[..., _Local]) -> dict[str, _Local]:
    found = {}
    if mla.q_lora_rank is None:
        found["self_attn.kv_a_proj_with_mqa.weight"] = rows("self_attn.kv_a_proj_with_mqa.weight")
        found["self_attn.q_proj.weight"] = rows("self_attn.q_proj.weight")
    else:
        down = ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
        found["self_attn.fused_qkv_a_proj.weight"] = rows(*down)
        found["self_attn.q_a_layernorm.weight"] = rows("self_attn.q_a_layernorm.weight")
        found["self_attn.q_b_proj.weight"] = rows("self_attn.q_b_proj.weight")
    found["self_attn.kv_a_layernorm.weight"] = rows("self_attn.kv_a_layernorm.weight")
    found["self_attn.kv_b_proj.weight"] = rows("self_attn.kv_b_proj.weight")
    return found


def _mlp(block: str, rows: Callable[..., _Local], cols: Callable[[str], _Local]) -> dict[str, _Local]:
    return {
        f"{block}.gate_up_proj.weight": rows(f"{block}.gate_proj.weight", f"{block}.up_proj.weight"),
        f"{block}.down_proj.weight": cols(f"{block}.down_proj.weight"),
    }


def _experts(arch: Arch, moe: Moe, prefix: str, block: str, key: _Key) -> dict[str, _Local]:
    experts = tuple(range(moe.num_experts)) if key.experts is None else key.experts
    wrong = [e for e in experts if not 0 <= e < moe.num_experts]
    if wrong:
        raise CutError(f"experts {wrong} do not exist: this model has {moe.num_experts}")
    gate, up, down = ("w1", "w3", "w2") if block == "block_sparse_moe" else ("gate_proj", "up_proj", "down_proj")
    tensors = _tensors(arch, "lm")
    ffn = moe.expert_ffn // key.etp
    w13: list[Segment] = []
    w2: list[Segment] = []
    for local, expert in enumerate(experts):
        names = [f"{prefix}.{block}.experts.{expert}.{n}.weight" for n in (gate, up, down)]
        w13 += _at(_stacked([tensors[n] for n in names[:2]], key.etp, key.etp_rank), local * 2 * ffn)
        w2 += _at(_beside(tensors[names[2]], key.etp, key.etp_rank), local * arch.hidden)
    where = f"{block}.experts.routed_experts"
    return {
        f"{where}.w13_weight": _Local((len(experts), 2 * ffn, arch.hidden), tuple(w13)),
        f"{where}.w2_weight": _Local((len(experts), arch.hidden, ffn), tuple(w2)),
    }


# -- local forms of logical tensors -----------------------------------------------------------------------------------


def _whole(tensor: LogicalTensor) -> _Local:
    return _stacked([tensor], 1, 0)


def _vocabulary(tensor: LogicalTensor, key: _Key) -> _Local:
    assert tensor.cut is not None
    vocab, hidden = tensor.shape
    lo, hi = tensor.cut.padded_interval(vocab, VOCAB_MULTIPLE, key.tp, key.tp_rank)
    padded = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    segment = Segment(tensor=tensor.name, row_lo=lo, row_hi=hi, col_lo=0, col_hi=hidden, at_row=0)
    return _Local((padded // key.tp, hidden), (segment,) if lo < hi else ())


def _stacked(tensors: Sequence[LogicalTensor], degree: int, rank: int) -> _Local:
    """Each tensor's rows of ``rank``, one tensor below the other. What is not cut is whole on every rank."""
    at, found = 0, []
    for tensor in tensors:
        rows, cols = matrix_shape(tensor.shape)
        lo, hi = (0, rows) if tensor.cut is None else _interval(tensor, rows, degree, rank)
        found.append(Segment(tensor=tensor.name, row_lo=lo, row_hi=hi, col_lo=0, col_hi=cols, at_row=at))
        at += hi - lo
    shape = (at,) if len(tensors[0].shape) == 1 else (at, matrix_shape(tensors[0].shape)[1])
    return _Local(shape, tuple(found))


def _beside(tensor: LogicalTensor, degree: int, rank: int) -> _Local:
    """The columns of ``rank``."""
    rows, cols = tensor.shape
    lo, hi = _interval(tensor, cols, degree, rank)
    segment = Segment(tensor=tensor.name, row_lo=0, row_hi=rows, col_lo=lo, col_hi=hi, at_row=0)
    return _Local((rows, hi - lo), (segment,))


def _interval(tensor: LogicalTensor, extent: int, degree: int, rank: int) -> tuple[int, int]:
    assert tensor.cut is not None
    try:
        return tensor.cut.interval(extent, degree, rank)
    except CutError as error:
        raise CutError(f"{tensor.name}: {error}") from None


def _at(local: _Local, row: int) -> Iterator[Segment]:
    for s in local.segments:
        yield Segment(
            tensor=s.tensor, row_lo=s.row_lo, row_hi=s.row_hi, col_lo=s.col_lo, col_hi=s.col_hi, at_row=s.at_row + row
        )


# -- block scales -----------------------------------------------------------------------------------------------------


class _OffBorder(Exception):
    """A cut runs through a block: one scale would serve two owners."""


def _scaled(local: _Local, extents: dict[str, tuple[int, int]]) -> _Local:
    """The local scales of a local block-quantised weight."""
    block_rows, block_cols = FP8_BLOCK
    period = local.shape[-2]  # rows of one expert, or of the matrix
    period_blocks = -(-period // block_rows)
    found = []
    for s in local.segments:
        expert, at_row = divmod(s.at_row, period)
        rows, cols = extents[s.tensor]
        row_lo, row_hi = _blocks(s.tensor, "row", s.row_lo, s.row_hi, rows, block_rows)
        col_lo, col_hi = _blocks(s.tensor, "column", s.col_lo, s.col_hi, cols, block_cols)
        if at_row % block_rows:
            raise _OffBorder(f"{s.tensor} starts at row {at_row} of the fused matrix, inside a {block_rows}-row block")
        found.append(
            Segment(
                tensor=s.tensor + SCALE_SUFFIX,
                row_lo=row_lo,
                row_hi=row_hi,
                col_lo=col_lo,
                col_hi=col_hi,
                at_row=expert * period_blocks + at_row // block_rows,
                at_col=s.at_col // block_cols,
            )
        )
    return _Local((*local.shape[:-2], period_blocks, -(-local.shape[-1] // block_cols)), tuple(found))


def _blocks(tensor: str, dim: str, lo: int, hi: int, extent: int, block: int) -> tuple[int, int]:
    if lo % block or (hi % block and hi != extent):
        raise _OffBorder(f"{tensor} is cut at {dim}s {lo} .. {hi} of {extent}, inside a block of {block}")
    return lo // block, -(-hi // block)


def _expert_allows(moe: Moe, degree: int) -> bool:
    return moe.expert_ffn % degree == 0 and moe.expert_ffn // degree % FP8_BLOCK[0] == 0
