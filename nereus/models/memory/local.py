"""How many elements of a model lie on one rank, per pipeline stage: exact, from the logical tensors.

Tensor-parallel cuts give every tp rank the same number of elements, so the pipeline coordinate alone decides. Along
data parallelism the largest shard stands for all: the allocation that must fit is the largest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from nereus.ir.arch import Arch, Lora
from nereus.ir.layout import SHARD_NONE, Layout, layout_of
from nereus.ir.plan import Stage
from nereus.ir.tensor import LogicalTensor
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
    return _local_shapes(arch, head, lora, _alike(slot, optimizer), layout)


def _alike(slot: str, optimizer: str | None) -> tuple[str, str | None]:
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
    by_layer = _by_layer(arch, head, lora, slot)
    held: list[list[int]] = [[] for _ in range(layout.pp)]
    for layer in range(arch.num_layers):
        held[layout.pipeline_stage_of_layer(layer)].append(layer)
    for index, layers in enumerate(held):
        dense: dict[tuple[int, int], int] = {}
        expert: dict[tuple[int, int], int] = {}
        sizes, num_expert_layers = [], 0
        for layer in layers:
            size, has_experts = 0, False
            for tensor in by_layer.get(layer, ()):
                rows, cols = _box(tensor, layout)
                # Experts are numbered globally and divided over ep in equal runs; the fullest rank has the first run.
                if tensor.expert is None:
                    _count(dense, rows, cols)
                elif tensor.expert < -(-_num_experts(arch) // layout.ep):
                    _count(expert, rows, cols)
                    has_experts = True
                else:
                    continue
                size += rows * cols
            sizes.append(size)
            num_expert_layers += has_experts
        ends = 0
        for tensor in by_layer[None]:
            if (tensor.first and index == 0) or (tensor.last and index == layout.pp - 1):
                rows, cols = _box(tensor, layout)
                _count(dense, rows, cols)
                ends += rows * cols
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


@lru_cache(maxsize=64)
def _by_layer(
    arch: Arch, head: str, lora: Lora | None, slot: tuple[str, str | None]
) -> dict[int | None, tuple[LogicalTensor, ...]]:
    grouped: dict[int | None, list[LogicalTensor]] = {None: []}
    for tensor in logical_tensors(arch, head, lora):
        if slot_applies(slot[0], tensor, slot[1]):
            grouped.setdefault(tensor.layer, []).append(tensor)
    return {layer: tuple(tensors) for layer, tensors in grouped.items()}


def _num_experts(arch: Arch) -> int:
    assert arch.moe is not None
    return arch.moe.num_experts


def _count(counts: dict[tuple[int, int], int], rows: int, cols: int) -> None:
    counts[rows, cols] = counts.get((rows, cols), 0) + 1


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
