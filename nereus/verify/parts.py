"""What each rank of a stage holds, from the stage's own words: coordinates, boxes of tensors, ranges of boxes.

Written from the meaning of the language (docs/language.md), not from the code that the compiler uses, so that a mistake
in either shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus.ir.layout import ENGINE_VOCAB_MULTIPLE, MEGATRON_VOCAB_MULTIPLE
from nereus.ir.plan import Stage
from nereus.ir.tensor import Cut, LogicalTensor, matrix_shape
from nereus.verify.segments import BoolArray, IntArray, ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Per tensor: rows and columns that a rank's coordinate gives it, before anything is sharded; empty where none."""

    row_lo: IntArray
    row_hi: IntArray
    col_lo: IntArray
    col_hi: IntArray

    @property
    def rows(self) -> IntArray:
        return self.row_hi - self.row_lo

    @property
    def cols(self) -> IntArray:
        return self.col_hi - self.col_lo

    @property
    def numel(self) -> IntArray:
        return self.rows * self.cols


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that hold the same of every slot. ``shard``: their number among those that share a box; ``expert_shard``:
    the same for experts."""

    boxes: Boxes
    shard: int
    expert_shard: int
    ranks: IntArray


def coordinates(stage: Stage) -> dict[str, IntArray]:
    """Coordinate of every rank per axis; ``order`` names the fastest axis first."""
    axes = [axis for axis in stage.order.split("-") if axis in ("tp", "cp", "pp", "dp")]
    grid = np.indices([getattr(stage, axis) for axis in reversed(axes)]).reshape(len(axes), -1)
    return {axis: ints(grid[len(axes) - 1 - i]) for i, axis in enumerate(axes)}


class Parts:
    """``classes``: all ranks of the stage, by what they hold."""

    def __init__(self, stage: Stage, tensors: Sequence[LogicalTensor], *, has_experts: bool) -> None:
        self.stage, self.tensors = stage, tensors
        self.is_expert: BoolArray = np.array([t.expert is not None for t in tensors], dtype=bool)
        self.num_alike = stage.dp * stage.cp
        # Experts are cut by tp as everything else unless the stage gives them degrees of their own.
        apart = has_experts and not (stage.kind == "generate" and stage.ep == 1 and stage.etp == 1)
        self.expert_tp = stage.etp if apart else stage.tp
        self.expert_dp = max(1, stage.tp * self.num_alike // (stage.ep * self.expert_tp))
        self.own_expert_axes = stage.ep > 1 or self.expert_tp != stage.tp
        self.num_shards = stage.fsdp or (self.num_alike if stage.zero else 1)
        self.num_expert_shards = self.num_shards
        if self.own_expert_axes and stage.fsdp:
            self.num_expert_shards = min(stage.fsdp, self.expert_dp)
        elif self.own_expert_axes and stage.zero:
            self.num_expert_shards = self.expert_dp
        self.classes = self._classes()

    # Who is where

    def _expert_axes(self, coords: dict[str, IntArray]) -> tuple[IntArray, IntArray]:
        """(ep, etp) coordinate of every rank: the ranks of a pipeline stage in their order, cut anew, etp in the place
        of tp and expert dp in that of dp."""
        stage = self.stage
        order = stage.order.split("-")
        sizes = {"tp": self.expert_tp, "ep": stage.ep, "dp": self.expert_dp}
        axes = [axis for axis in order if axis in sizes]
        if "ep" not in axes:
            axes.insert(axes.index("dp"), "ep")
        grid = np.indices([sizes[axis] for axis in reversed(axes)]).reshape(3, -1)
        of_axis = {axis: grid[2 - i] for i, axis in enumerate(axes)}
        ep, etp = np.zeros_like(coords["pp"]), np.zeros_like(coords["pp"])
        for pipeline in range(stage.pp):
            ranks = np.flatnonzero(coords["pp"] == pipeline)
            ep[ranks], etp[ranks] = of_axis["ep"], of_axis["tp"]
        return ep, etp

    def _classes(self) -> tuple[RankClass, ...]:
        coords = coordinates(self.stage)
        if self.own_expert_axes:
            ep, etp = self._expert_axes(coords)
        else:
            ep, etp = np.zeros_like(coords["pp"]), coords["tp"]
        shard = _place_among_equals(np.stack((coords["pp"], coords["tp"]), axis=1)) % self.num_shards
        expert_shard = _place_among_equals(np.stack((coords["pp"], ep, etp), axis=1)) % self.num_expert_shards
        if not self.own_expert_axes:
            expert_shard = shard
        rows = np.stack((coords["pp"], coords["tp"], ep, etp, shard, expert_shard), axis=1)
        found, of_rank = np.unique(rows, axis=0, return_inverse=True)
        order = np.argsort(of_rank.reshape(-1), kind="stable")
        bounds = np.searchsorted(of_rank.reshape(-1)[order], np.arange(len(found) + 1))
        boxes: dict[tuple[int, ...], Boxes] = {}
        classes = []
        for i, row in enumerate(found.tolist()):
            key = tuple(row[:4])
            if key not in boxes:
                boxes[key] = self._boxes(*key)
            ranks = ints(order[bounds[i] : bounds[i + 1]])
            classes.append(RankClass(boxes=boxes[key], shard=row[4], expert_shard=row[5], ranks=ranks))
        return tuple(classes)

    # Boxes

    def _boxes(self, pp: int, tp: int, ep: int, etp: int) -> Boxes:
        shapes = ints([matrix_shape(t.shape) for t in self.tensors]).reshape(-1, 2)
        row_lo, col_lo = np.zeros_like(shapes[:, 0]), np.zeros_like(shapes[:, 0])
        row_hi, col_hi = shapes[:, 0].copy(), shapes[:, 1].copy()
        held = self._on_pipeline_stage(pp) & self._on_expert_rank(ep)
        ranges: dict[tuple[Cut, int, bool], tuple[int, int]] = {}
        for index in np.flatnonzero(held).tolist():
            tensor = self.tensors[index]
            if tensor.cut is None:
                continue
            extent, expert = tensor.shape[tensor.cut.dim], tensor.expert is not None
            key = (tensor.cut, extent, expert)
            if key not in ranges:
                degree, rank = (self.expert_tp, etp) if expert else (self.stage.tp, tp)
                ranges[key] = self._range(tensor.cut, extent, degree, rank)
            lo, hi = (row_lo, row_hi) if tensor.cut.dim == 0 else (col_lo, col_hi)
            lo[index], hi[index] = ranges[key]
        held &= (row_hi > row_lo) & (col_hi > col_lo)
        for bound in (row_lo, row_hi, col_lo, col_hi):
            bound[~held] = 0
        return Boxes(row_lo=row_lo, row_hi=row_hi, col_lo=col_lo, col_hi=col_hi)

    def _on_pipeline_stage(self, pp: int) -> BoolArray:
        stage = self.stage
        layers = [i % stage.pp for i, count in enumerate(stage.chunks or stage.pp_split) for _ in range(count)]

        def there(tensor: LogicalTensor) -> bool:
            if tensor.layer is not None:
                return layers[tensor.layer] == pp
            return (tensor.first and pp == 0) or (tensor.last and pp == stage.pp - 1)

        return np.array([there(t) for t in self.tensors], dtype=bool)

    def _on_expert_rank(self, ep: int) -> BoolArray:
        if not self.own_expert_axes or self.stage.ep == 1:
            return np.ones(len(self.tensors), dtype=bool)
        experts = ints([-1 if t.expert is None else t.expert for t in self.tensors])
        per_rank = max(1, (int(experts.max(initial=-1)) + 1) // self.stage.ep)
        held: BoolArray = (experts < 0) | (experts // per_rank == ep)
        return held

    def _range(self, cut: Cut, extent: int, degree: int, rank: int) -> tuple[int, int]:
        stage = self.stage
        megatron = stage.backend == "megatron"
        multiple = MEGATRON_VOCAB_MULTIPLE * stage.tp if megatron else 0
        if not megatron and stage.engine in ("vllm", "sglang"):
            multiple = ENGINE_VOCAB_MULTIPLE
        if cut.vocab and multiple:  # padded rows are cut evenly; what is past the true rows is nobody's
            size = -(-extent // multiple) * multiple // degree
            return min(rank * size, extent), min(rank * size + size, extent)
        if cut.fused is not None and megatron:
            lo, hi, period, count = cut.fused
            own = [r * period * count // degree for r in (rank, rank + 1)]
            before = [row // period * (hi - lo) + max(0, min(row % period, hi) - lo) for row in own]
            return before[0], before[1]
        if cut.groups % degree == 0:
            size = extent // cut.groups * (cut.groups // degree)
            return rank * size, rank * size + size
        size = extent // cut.groups  # more ranks than units: each holds one, some the same
        unit = rank // (degree // cut.groups)
        return unit * size, unit * size + size

    # Shares

    def rule(self, slot: str) -> str:
        """How a slot is spread over ranks with equal boxes: whole, rows (FSDP), each (ZeRO-3) or joined (ZeRO-1, 2)."""
        if self.stage.fsdp:
            return "rows"
        if self.stage.zero >= 3:
            return "each"
        return "joined" if self.stage.zero and slot != "weight" else "whole"

    def share(self, rank_class: RankClass, slot: str, present: BoolArray) -> tuple[IntArray, IntArray]:
        """(start, stop) per tensor: the range of its box, row by row, that the class's ranks hold of ``slot``.
        ``present``: tensors that have it."""
        boxes, rule = rank_class.boxes, self.rule(slot)
        numel = np.where(present, boxes.numel, 0)
        if rule == "whole":
            return np.zeros_like(numel), numel
        start, stop = np.zeros_like(numel), np.zeros_like(numel)
        groups = [(~self.is_expert, self.num_shards, rank_class.shard)]
        if self.own_expert_axes:
            groups.append((self.is_expert, self.num_expert_shards, rank_class.expert_shard))
        else:
            groups[0] = (np.ones_like(self.is_expert), self.num_shards, rank_class.shard)
        for mine, count, shard in groups:
            if rule == "joined":
                sizes = numel[mine]
                begin = np.cumsum(sizes) - sizes
                step = -(-int(sizes.sum()) // count)
                lo, hi = shard * step - begin, (shard + 1) * step - begin
            else:
                unit = boxes.cols[mine] if rule == "rows" else 1
                whole = boxes.rows[mine] if rule == "rows" else numel[mine]
                step_each = -(-whole // count) * unit
                lo, hi = shard * step_each, (shard + 1) * step_each
            start[mine], stop[mine] = np.clip(lo, 0, numel[mine]), np.clip(hi, 0, numel[mine])
        return start, stop

    def in_host(self, numel: IntArray, share: float) -> BoolArray:
        """Which parts of a rank (``numel`` per tensor) lie in host memory where ``share`` of them do: in the order of
        the model, each for as long as those before it are fewer elements than the share. Experts with an optimizer of
        their own are counted for themselves."""
        found = numel > 0
        if share in (0.0, 1.0):
            return found & (share == 1.0)
        for mine in (self.is_expert, ~self.is_expert) if self.own_expert_axes else (np.ones_like(self.is_expert),):
            parts = numel[mine]
            found[mine] &= np.concatenate(([0], np.cumsum(parts)))[:-1] < share * int(parts.sum())
        return found


def _place_among_equals(rows: IntArray) -> IntArray:
    """How many earlier rows are equal to each row."""
    _, group = np.unique(rows, axis=0, return_inverse=True)
    group = group.reshape(-1)
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    first = np.searchsorted(ordered, ordered, side="left")
    place = np.empty(len(group), dtype=np.int64)
    place[order] = np.arange(len(group)) - first
    return place
