"""Layouts read from a framework's objects: what every rank holds, whatever rule made it so.

Each rank is a coordinate of its own. Per logical tensor it has one box, and of every slot one range of that box's
row-major order: true of tensor, expert and pipeline parallelism, of flat partitions and of FSDP's rows, since all of
them keep the order of elements. A description that breaks it is refused, not guessed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import numpy.typing as npt

from nereus.ir.fragment import Fragment, RankState, Rectangle
from nereus.ir.tensor import LogicalTensor, matrix_shape

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class DescriptionError(ValueError):
    """What a rank says it holds cannot be: the text names rank, tensor and numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class DescribedLayout:
    """Arrays ``[ranks, tensors]``. ``starts[slot], stops[slot]``: held range of the box, empty where it has none;
    ``host[slot]``: whether that lies in host memory."""

    num_ranks: int
    row_lo: IntArray
    row_hi: IntArray
    col_lo: IntArray
    col_hi: IntArray
    starts: Mapping[str, IntArray]
    stops: Mapping[str, IntArray]
    host: Mapping[str, BoolArray]
    cut_tensor: IntArray
    cut_row: IntArray
    name: str = "described"

    @property
    def num_coords(self) -> int:
        return self.num_ranks

    def shard_rule(self, slot: str) -> str:
        """Slots of one description are laid out slot by slot."""
        return f"{self.name}:{slot}"

    def coord_of_rank(self) -> IntArray:
        return np.arange(self.num_ranks, dtype=np.int64)

    def shard_of_rank(self) -> IntArray:
        return np.zeros(self.num_ranks, dtype=np.int64)

    def held(self, slot: str) -> tuple[IntArray, IntArray]:
        """(start, stop) of ``slot``, ``[ranks, tensors]``."""
        return self.starts[slot], self.stops[slot]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part(Rectangle):
    """A rank's part of one (tensor, slot), elements ``start .. stop`` of it: its fragments joined."""

    start: int
    stop: int
    host: bool


def describe_layout(
    tensors: Sequence[LogicalTensor], states: Sequence[RankState], *, name: str = "described"
) -> DescribedLayout:
    """``states``: one for every rank, rank r at index r. Raises DescriptionError."""
    index = {tensor.name: i for i, tensor in enumerate(tensors)}
    shapes = [matrix_shape(t.shape) for t in tensors]
    slots = tuple(dict.fromkeys(slot for state in states for slot in state.slots()))
    shape = (len(states), len(tensors))
    row_lo, row_hi, col_lo, col_hi = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    starts = {slot: np.zeros(shape, dtype=np.int64) for slot in slots}
    stops = {slot: np.zeros(shape, dtype=np.int64) for slot in slots}
    host = {slot: np.zeros(shape, dtype=bool) for slot in slots}
    cuts: set[tuple[int, int]] = set()
    for rank, state in enumerate(states):
        parts = _parts(rank, state, index, shapes)
        by_tensor: dict[int, list[tuple[str, _Part]]] = {}
        for (tensor, slot), part in parts.items():
            by_tensor.setdefault(tensor, []).append((slot, part))
        for tensor, found in by_tensor.items():
            columns = {(p.col_lo, p.col_hi) for _, p in found}
            if len(columns) > 1:
                text = f"rank {rank}: slots of {tensors[tensor].name} have different columns {sorted(columns)}"
                raise DescriptionError(text)
            low, high = min(p.row_lo for _, p in found), max(p.row_hi for _, p in found)
            row_lo[rank, tensor], row_hi[rank, tensor] = low, high
            (col_lo[rank, tensor], col_hi[rank, tensor]) = next(iter(columns))
            for slot, part in found:
                shift = (part.row_lo - low) * part.num_cols
                starts[slot][rank, tensor], stops[slot][rank, tensor] = part.start + shift, part.stop + shift
                host[slot][rank, tensor] = part.host
        for fragment in state.fragments:
            cuts.add((index[fragment.tensor], fragment.row_lo))
            cuts.add((index[fragment.tensor], fragment.row_hi))
    ordered = np.array(sorted(cuts), dtype=np.int64).reshape(-1, 2)
    return DescribedLayout(
        num_ranks=len(states),
        row_lo=row_lo,
        row_hi=row_hi,
        col_lo=col_lo,
        col_hi=col_hi,
        starts=starts,
        stops=stops,
        host=host,
        cut_tensor=ordered[:, 0],
        cut_row=ordered[:, 1],
        name=name,
    )


def primary_fragments(state: RankState) -> tuple[tuple[Fragment, ...], tuple[tuple[Fragment, Fragment], ...]]:
    """Fragments without repeats, and (repeat, the one it repeats): a tied matrix that a process holds twice."""
    seen: dict[tuple[object, ...], Fragment] = {}
    repeats = []
    for f in state.fragments:
        key = (f.tensor, f.slot, f.row_lo, f.row_hi, f.col_lo, f.col_hi, f.start, f.stop)
        if key in seen:
            repeats.append((f, seen[key]))
        else:
            seen[key] = f
    return tuple(seen.values()), tuple(repeats)


def _parts(
    rank: int, state: RankState, index: Mapping[str, int], shapes: Sequence[tuple[int, int]]
) -> dict[tuple[int, str], _Part]:
    grouped: dict[tuple[int, str], list[Fragment]] = {}
    for f in primary_fragments(state)[0]:
        if f.tensor not in index:
            wrapped = [name for name in index if name.endswith(f".{f.tensor}")]
            close = wrapped or get_close_matches(f.tensor, index, n=1)
            hint = f"; it has '{close[0]}': names are those that the naming gives, without wrappers" if close else ""
            raise DescriptionError(f"rank {rank}: the model has no tensor {f.tensor}{hint}")
        rows, cols = shapes[index[f.tensor]]
        inside = 0 <= f.row_lo < f.row_hi <= rows and 0 <= f.col_lo < f.col_hi <= cols
        if not inside or not 0 <= f.start < f.stop <= f.area:
            box = f"rows {f.row_lo}..{f.row_hi}, columns {f.col_lo}..{f.col_hi}, elements {f.start}..{f.stop}"
            raise DescriptionError(
                f"rank {rank}: {f.tensor} {f.slot}: {box} of {rows} x {cols}; a logical tensor is dim 0 by the rest, "
                "and a part of it must lie inside"
            )
        storage = state.storages[f.storage]
        if f.offset(f.start) < 0 or f.offset(f.stop - 1) >= storage.numel:
            raise DescriptionError(f"rank {rank}: {f.tensor} {f.slot} leaves its storage {storage.name}")
        grouped.setdefault((index[f.tensor], f.slot), []).append(f)
    return {key: _join(rank, fragments, state) for key, fragments in grouped.items()}


def _join(rank: int, fragments: list[Fragment], state: RankState) -> _Part:
    ordered = sorted(fragments, key=lambda f: f.row_lo)
    first, last = ordered[0], ordered[-1]
    for above, below in itertools.pairwise(ordered):
        same = (above.col_lo, above.col_hi) == (below.col_lo, below.col_hi)
        if not same or above.row_hi != below.row_lo or above.stop != above.area or below.start != 0:
            text = f"rows {above.row_lo}..{above.row_hi} and {below.row_lo}..{below.row_hi} do not join"
            raise DescriptionError(f"rank {rank}: {first.tensor} {first.slot}: {text}")
    homes = {state.storages[f.storage].host for f in ordered}
    if len(homes) > 1:
        text = (
            "a part of it lies in host memory and a part on the GPU; a rank's part of a tensor lies whole in one memory"
        )
        raise DescriptionError(f"rank {rank}: {first.tensor} {first.slot}: {text}")
    before_last = (last.row_lo - first.row_lo) * first.num_cols
    return _Part(
        row_lo=first.row_lo,
        row_hi=last.row_hi,
        col_lo=first.col_lo,
        col_hi=first.col_hi,
        start=first.start,
        stop=before_last + last.stop,
        host=homes.pop(),
    )
