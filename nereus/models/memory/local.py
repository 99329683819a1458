"""How many elements of a model lie on one rank, per pipeline stage: exact, from the logical tensors.

Tensor-parallel cuts give every tp rank the same number of elements, so the pipeline coordinate alone decides. Along
data parallelism the largest shard stands for all: the allocation that must fit is the largest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

from nereus.ir.arch import Arch, Lora
from nereus.ir.layout import SHARD_NONE, Layout, layout_of
from nereus.ir.plan import Stage
from nereus.ir.tensor import Cut, LogicalTensor
from nereus.models.slots import slot_applies
from nereus.models.tensors import logical_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShapes:
    """The tensors of one pipeline coordinate after tensor and expert parallelism, as (rows, cols, how many of them):
    all of them, or those that have a certain slot."""

    dense: tuple[tuple[int, int, int], ...]
    expert: tuple[tuple[int, int, int], ...]
    num_layers: int
    num_expert_layers: int
    #: Elements of the largest layer, and of everything that belongs to no layer (embedding, norm, head).
    largest_layer: int
    ends: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a slot is spread over the ranks of dp x cp. ``rule``: none, flat, param or dim0, as in ``ir.layout``."""

    rule: str
    num_dense: int
    num_expert: int


def expert_tp(stage: Stage) -> int:
    """Tensor parallelism inside an expert. An engine without expert parallelism cuts experts like everything else."""
    if stage.kind == "generate" and stage.ep == 1 and stage.etp == 1:
        return stage.tp
    return stage.etp


def expert_dp(stage: Stage) -> int:
    """Ranks that hold the same experts: devices / (pp ep etp)."""
    return max(1, stage.tp * stage.cp * stage.dp // (stage.ep * expert_tp(stage)))


def sharding(stage: Stage, slot: str) -> Sharding:
    """``slot`` may be ``gradients``, which follow the weights under ZeRO-3 and FSDP, the optimizer under ZeRO-2."""
    if stage.fsdp > 1:
        return Sharding(rule="dim0", num_dense=stage.fsdp, num_expert=min(stage.fsdp, expert_dp(stage)))
    if stage.zero >= 3:
        return Sharding(rule="param", num_dense=stage.num_shards, num_expert=expert_dp(stage))
    replicated = slot == "weight" or (slot == "gradients" and stage.zero < 2)
    if stage.zero == 0 or replicated:
        return Sharding(rule="none", num_dense=1, num_expert=1)
    return Sharding(rule="flat", num_dense=stage.num_shards, num_expert=expert_dp(stage))


def local_shapes(
    arch: Arch,
    head: str,
    stage: Stage,
    *,
    lora: Lora | None = None,
    slot: str = "weight",
    optimizer: str | None = None,
) -> tuple[LocalShapes, ...]:
    """One per pipeline coordinate of ``stage``: the tensors that have ``slot``. ``gradients``: those that train."""
    if not stage.pp_split:
        stage = replace(stage, pp_split=_even(arch, stage.pp))
    layout = layout_of(stage, experts=arch.moe is not None)
    # What a rank holds before anything is sharded over dp: alike for every dp and shard rule.
    layout = replace(layout, dp=1, cp=1, num_shards=1, weight_shards=SHARD_NONE, optimizer_shards=SHARD_NONE, order="")
    return _local_shapes(arch, head, lora, alike(slot, optimizer), layout)


def alike(slot: str, optimizer: str | None) -> tuple[str, str | None]:
    """One pair for all slots that the same tensors have, so that shapes are counted once for them."""
    if slot == "weight":
        return "weight", None
    if (optimizer or "").lower() == "muon" and slot in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        return ("momentum_buffer" if slot == "momentum_buffer" else "exp_avg"), "muon"
    return "master", None


def local_numel(shapes: LocalShapes, shards: Sharding) -> int:
    """Elements on the fullest rank of the shard group."""
    return sum(dense_and_expert(shapes, shards))


def largest_part(shapes: LocalShapes, shards: Sharding) -> tuple[int, int]:
    """Most elements that a rank holds of one tensor that is no expert's, and of one that is."""
    dense = max((_part(rows, cols, shards.rule, shards.num_dense) for rows, cols, _ in shapes.dense), default=0)
    expert = max((_part(rows, cols, shards.rule, shards.num_expert) for rows, cols, _ in shapes.expert), default=0)
    return dense, expert


def _part(rows: int, cols: int, rule: str, num_shards: int) -> int:
    if rule == "param":
        return -(-rows * cols // num_shards)
    if rule == "dim0":
        return -(-rows // num_shards) * cols
    return rows * cols  # a range of boxes laid end to end may have one of them whole


def dense_and_expert(shapes: LocalShapes, shards: Sharding) -> tuple[int, int]:
    """``local_numel`` in its two parts."""
    return _sharded(shapes.dense, shards.rule, shards.num_dense), _sharded(
        shapes.expert, shards.rule, shards.num_expert
    )


def _sharded(shapes: tuple[tuple[int, int, int], ...], rule: str, num_shards: int) -> int:
    if rule == "flat":  # one range of all boxes laid end to end
        return -(-sum(rows * cols * count for rows, cols, count in shapes) // num_shards)
    if rule == "param":
        return sum(-(-rows * cols // num_shards) * count for rows, cols, count in shapes)
    if rule == "dim0":
        return sum(-(-rows // num_shards) * cols * count for rows, cols, count in shapes)
    return sum(rows * cols * count for rows, cols, count in shapes)


def _even(arch: Arch, pp: int) -> tuple[int, ...]:
    return tuple(arch.num_layers // pp + (stage < arch.num_layers % pp) for stage in range(pp))


@lru_cache(maxsize=512)
def _local_shapes(
    arch: Arch, head: str, lora: Lora | None, slot: tuple[str, str | None], layout: Layout
) -> tuple[LocalShapes, ...]:
    pipeline = []
    by_layer, at_ends = _by_layer(arch, head, lora, slot)
    held: list[list[int]] = [[] for _ in range(layout.pp)]
    for layer in range(arch.num_layers):
        held[layout.pipeline_stage_of_layer(layer)].append(layer)
    # Experts are numbered globally and divided over ep in equal runs; the fullest rank has the first run.
    num_experts = -(-_num_experts(arch) // layout.ep) if arch.moe is not None else 0
    known: dict[int, tuple[_Boxes, _Boxes, int]] = {}  # by the groups' identity
    for index, layers in enumerate(held):
        dense: _Boxes = {}
        expert: _Boxes = {}
        sizes, num_expert_layers = [], 0
        for layer in layers:
            groups = by_layer.get(layer, ())
            if id(groups) not in known:
                known[id(groups)] = _layer(groups, layout, num_experts)
            of_dense, of_expert, size = known[id(groups)]
            for counts, more in ((dense, of_dense), (expert, of_expert)):
                for box, count in more.items():
                    counts[box] = counts.get(box, 0) + count
            sizes.append(size)
            num_expert_layers += bool(of_expert)
        ends = 0
        for tensor in at_ends:
            if (tensor.first and index == 0) or (tensor.last and index == layout.pp - 1):
                box = _box(tensor, layout)
                dense[box] = dense.get(box, 0) + 1
                ends += box[0] * box[1]
        pipeline.append(
            LocalShapes(
                dense=tuple((rows, cols, count) for (rows, cols), count in dense.items()),
                expert=tuple((rows, cols, count) for (rows, cols), count in expert.items()),
                num_layers=len(layers),
                num_expert_layers=num_expert_layers,
                largest_layer=max(sizes, default=0),
                ends=ends,
            )
        )
    return tuple(pipeline)


#: How many tensors are cut to (rows, cols).
_Boxes: TypeAlias = dict[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of a layer that are cut alike: one of them, and the expert that each belongs to (-1: none)."""

    shape: tuple[int, ...]
    cut: Cut | None
    experts: tuple[int, ...]
    tensor: LogicalTensor = field(compare=False)


def _layer(groups: tuple[_Group, ...], layout: Layout, num_experts: int) -> tuple[_Boxes, _Boxes, int]:
    """(what is no expert's, what is one's, elements of both) with so many experts."""
    dense: _Boxes = {}
    expert: _Boxes = {}
    for group in groups:
        counts, number = dense, len(group.experts)
        if group.tensor.expert is not None:
            counts, number = expert, sum(n < num_experts for n in group.experts)
        if number:
            box = _box(group.tensor, layout)
            counts[box] = counts.get(box, 0) + number
    size = sum(rows * cols * number for counts in (dense, expert) for (rows, cols), number in counts.items())
    return dense, expert, size


@lru_cache(maxsize=64)
def _by_layer(
    arch: Arch, head: str, lora: Lora | None, slot: tuple[str, str | None]
) -> tuple[dict[int, tuple[_Group, ...]], tuple[LogicalTensor, ...]]:
    """(groups of each layer, tensors of no layer). Layers that are alike have one and the same tuple."""
    found: dict[int, dict[tuple[object, ...], list[LogicalTensor]]] = {}
    ends = []
    for tensor in logical_tensors(arch, head, lora):
        if not slot_applies(slot[0], tensor, slot[1]):
            continue
        if tensor.layer is None:
            ends.append(tensor)
        else:
            key = (tensor.shape, tensor.cut, tensor.expert is None)
            found.setdefault(tensor.layer, {}).setdefault(key, []).append(tensor)
    same: dict[tuple[_Group, ...], tuple[_Group, ...]] = {}
    by_layer = {}
    for layer, groups in found.items():
        of_layer = tuple(
            _Group(of[0].shape, of[0].cut, tuple(-1 if t.expert is None else t.expert for t in of), of[0])
            for of in groups.values()
        )
        by_layer[layer] = same.setdefault(of_layer, of_layer)
    return by_layer, tuple(ends)


def _num_experts(arch: Arch) -> int:
    assert arch.moe is not None
    return arch.moe.num_experts


def _box(tensor: LogicalTensor, layout: Layout) -> tuple[int, int]:
    """(rows, cols) of the part on the fullest rank, padding of the vocabulary included; a vector is n x 1."""
    rows, cols = tensor.shape[0], tensor.numel // tensor.shape[0]
    if tensor.cut is None:
        return rows, cols
    degree = layout.expert_tp if tensor.expert is not None else layout.tp
    extent = tensor.shape[tensor.cut.dim]
    if tensor.cut.vocab and layout.vocab_multiple:
        size = -(-extent // layout.vocab_multiple) * layout.vocab_multiple // degree
    elif tensor.cut.fused is not None and layout.raw_rows:  # of the fused rows all ranks have as many
        size = -(-extent // degree)
    else:
        start, stop = tensor.cut.interval(extent, degree, 0)
        size = stop - start
    return (size, cols) if tensor.cut.dim == 0 else (rows, cols // extent * size)
