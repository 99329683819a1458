"""FP8 weights with block scales, as in DeepSeek-V3 checkpoints: which tensors have scales, and which degrees cut them.

A block of 128 x 128 elements shares one fp32 scale, so a matrix of e4m3 values has a second tensor,
``<linear>.weight_scale_inv`` [ceil(rows / 128), ceil(cols / 128)]; a block at the lower or right edge may be smaller.
Linears of layers have scales; norms, biases, the router, the embedding and the head stay in bf16.

A cut inside a block would leave two ranks with one scale and no way to make it again from either half, so a shard
begins and ends on block borders. Where a framework fuses matrices, one matrix may not share a block with the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import lcm

from nereus.ir.arch import Arch
from nereus.ir.tensor import Cut, LogicalTensor
from nereus.models.legality import legal_tp
from nereus.models.lora import is_linear, kind
from nereus.models.tensors import logical_tensors

BLOCK = 128
SUFFIX = "_scale_inv"

#: How q, k, v (and gate, up) lie: ``separate`` matrices as in checkpoints; ``segments`` [q | k | v] and [gate | up] as
#: in vLLM; ``stripes`` q..q k v for each kv head, cut by raw rows, as in Megatron (gate and up as in ``segments``).
FORMS = ("separate", "segments", "stripes")


def scale_name(weight: str) -> str:
    return weight + SUFFIX


def scale_shape(rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // BLOCK), -(-cols // BLOCK)


def has_scale(tensor: LogicalTensor) -> bool:
    return is_linear(tensor)


@lru_cache(maxsize=64)
def scale_tensors(arch: Arch, head: str = "lm") -> tuple[LogicalTensor, ...]:
    """The scale tensors in model order. Each cut allows exactly the degrees whose shards of the weight end on block
    borders, and gives every rank the scales of its own blocks."""
    return tuple(_scale(t) for t in logical_tensors(arch, head) if has_scale(t))


def fp8_refusals(arch: Arch, *, tp: int, etp: int | None = None, form: str = "segments") -> tuple[str, ...]:
    """Why these degrees cut a block, a sentence for each matrix; empty if they do not. ``etp``: tensor parallelism
    inside an expert, None where experts are cut like everything else. Degrees that the model itself does not allow are
    refused elsewhere (``tp_refusals``)."""
    if form not in FORMS:
        raise ValueError(f"matrices lie {', '.join(FORMS)}, not '{form}'")
    found: list[str] = []
    for tensor in _kinds(arch):
        degree, axis = (tp, "tp") if tensor.expert is None or etp is None else (etp, "etp")
        if form == "stripes" and kind(tensor) in ("q_proj", "k_proj", "v_proj") and arch.mla is None:
            continue
        found.extend(_cut_inside(tensor, degree, axis))
    if form != "separate":
        found.extend(_fused_inside(arch, tp, tp if etp is None else etp))
    if form == "stripes" and arch.mla is None:
        found.extend(_stripes(arch, tp))
    return tuple(dict.fromkeys(found))


def legal_fp8_tp(
    arch: Arch,
    *,
    head: str = "lm",
    etp: int | None = None,
    form: str = "segments",
    backend: str | None = None,
    limit: int = 64,
) -> tuple[int, ...]:
    """Degrees that the model and its blocks allow. ``etp`` None: experts are cut like everything else. ``backend``: as
    in ``tp_refusals``."""
    return tuple(
        tp
        for tp in legal_tp(arch, head=head, limit=limit, backend=backend)
        if (etp is not None or arch.moe is None or arch.moe.expert_ffn % tp == 0)
        and not fp8_refusals(arch, tp=tp, etp=etp, form=form)
    )


def legal_fp8_etp(arch: Arch, *, form: str = "segments", limit: int = 64) -> tuple[int, ...]:
    """Degrees that an expert's width and its blocks allow; only 1 for a model without experts."""
    if arch.moe is None:
        return (1,)
    width, seams = arch.moe.expert_ffn, form != "separate"
    return tuple(
        d for d in range(1, limit + 1) if width % d == 0 and (width // d % BLOCK == 0 or (d == 1 and not seams))
    )


def _scale(tensor: LogicalTensor) -> LogicalTensor:
    shape = scale_shape(*tensor.shape)
    cut = None if tensor.cut is None else _scale_cut(tensor.cut, tensor.shape[tensor.cut.dim])
    return replace(tensor, name=scale_name(tensor.name), shape=shape, cut=cut, trainable=False)


def _scale_cut(cut: Cut, extent: int) -> Cut:
    unit = extent // cut.groups
    if extent % BLOCK:
        return Cut(dim=cut.dim, groups=1, replicate=cut.replicate and cut.groups == 1)
    groups = extent // lcm(unit, BLOCK)
    # Copies of one unit (a kv head) need the unit itself to be whole blocks.
    return Cut(dim=cut.dim, groups=groups, replicate=cut.replicate and groups == cut.groups)


@lru_cache(maxsize=64)
def _kinds(arch: Arch) -> tuple[LogicalTensor, ...]:
    """One matrix of every kind that has scales: expert 0 stands for all experts, and one layer for those like it."""
    found: dict[tuple[str, tuple[int, ...], bool], LogicalTensor] = {}
    for tensor in logical_tensors(arch):
        if has_scale(tensor) and tensor.expert in (None, 0):
            found.setdefault((kind(tensor), tensor.shape, tensor.expert is None), tensor)
    return tuple(found.values())


def _cut_inside(tensor: LogicalTensor, degree: int, axis: str) -> Iterator[str]:
    cut = tensor.cut
    if cut is None or degree == 1 or not cut.allows(degree):
        return
    extent = tensor.shape[cut.dim]
    start, stop = cut.interval(extent, degree, 0)
    if stop - start != extent and (stop - start) % BLOCK:
        what = "rows" if cut.dim == 0 else "columns"
        yield (
            f"{_name(tensor)}: {extent} {what} over {axis} {degree} are {stop - start} on a rank, "
            f"no multiple of {BLOCK}"
        )


def _fused_inside(arch: Arch, tp: int, etp: int) -> Iterator[str]:
    """Seams between fused matrices, which are there at degree 1 too."""
    kinds = {(kind(t), t.expert is None, t.shape): t for t in _kinds(arch)}
    followed = {"q_proj": "k_proj", "k_proj": "v_proj", "gate_proj": "up_proj", "w1": "w3"}
    if arch.mla is not None:
        followed = {"q_a_proj": "kv_a_proj_with_mqa", "gate_proj": "up_proj"}
    for (name, dense, _), tensor in kinds.items():
        if name not in followed:
            continue
        degree = tp if dense else etp
        rows = tensor.shape[0]
        if tensor.cut is not None:
            if not tensor.cut.allows(degree):
                continue
            start, stop = tensor.cut.interval(rows, degree, 0)
            rows = stop - start
        if rows % BLOCK and (tensor.cut is None or degree == 1 or rows == tensor.shape[0]):
            yield f"{_name(tensor)}: {rows} rows end inside a block that {followed[name]} begins in"


def _stripes(arch: Arch, tp: int) -> Iterator[str]:
    """[q..q k v] for each kv head. A block that holds rows of two of them belongs to neither."""
    per_group = arch.num_heads // arch.num_kv_heads * arch.head_dim
    rows = (per_group + 2 * arch.head_dim) * arch.num_kv_heads
    if per_group % BLOCK or arch.head_dim % BLOCK:
        yield (f"fused q, k, v: stripes of {per_group} q, {arch.head_dim} k and {arch.head_dim} v rows share blocks")
    elif rows % tp or rows // tp % BLOCK:
        each = f"{rows / tp:g}"
        yield f"fused q, k, v: {rows} rows over tp {tp} are {each} on a rank, no multiple of {BLOCK}"


def _name(tensor: LogicalTensor) -> str:
    return f"{kind(tensor)} of an expert" if tensor.expert is not None else kind(tensor)
