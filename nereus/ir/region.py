"""Regions of a logical tensor: axis-aligned boxes, and the boxes that a range of the flattened tensor covers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """Half-open ``[lo, hi)`` per dimension. Empty where any extent is zero."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi) or any(a > b for a, b in zip(self.lo, self.hi, strict=True)):
            raise ValueError(f"not a box: {self.lo}..{self.hi}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls(tuple(0 for _ in shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.lo, self.hi, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True)) + "]"

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when nothing is shared."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        if any(a >= b for a, b in zip(lo, hi, strict=True)):
            return None
        return Box(lo, hi)

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """Disjoint boxes that cover ``self`` minus ``other`` (at most two per dimension)."""
        common = self.intersect(other)
        if common is None:
            return (self,) if self.numel else ()
        pieces: list[Box] = []
        lo, hi = list(self.lo), list(self.hi)
        for dim in range(len(lo)):
            if lo[dim] < common.lo[dim]:
                pieces.append(Box(tuple(lo), (*hi[:dim], common.lo[dim], *hi[dim + 1 :])))
            if common.hi[dim] < hi[dim]:
                pieces.append(Box((*lo[:dim], common.hi[dim], *lo[dim + 1 :]), tuple(hi)))
            lo[dim], hi[dim] = common.lo[dim], common.hi[dim]
        return tuple(pieces)


def subtract_all(box: Box, others: Iterable[Box]) -> tuple[Box, ...]:
    """Disjoint boxes that cover ``box`` minus the union of ``others``."""
    rest: tuple[Box, ...] = (box,) if box.numel else ()
    for other in others:
        rest = tuple(piece for part in rest for piece in part.subtract(other))
    return rest


def covers(box: Box, others: Iterable[Box]) -> bool:
    return not subtract_all(box, others)


def disjoint(boxes: Sequence[Box]) -> bool:
    return all(boxes[i].intersect(boxes[j]) is None for i in range(len(boxes)) for j in range(i))


def flat_range_to_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Boxes, in flat order, that hold elements ``start..stop`` of a row-major tensor; at most ``2 * ndim - 1`` of
    them."""
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"range [{start}, {stop}) outside a tensor of {prod(shape)} elements")
    if start == stop:
        return ()
    if len(shape) == 1:
        return (Box((start,), (stop,)),)
    inner = prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        return _under(first, flat_range_to_boxes(shape[1:], start - first * inner, stop - first * inner))
    boxes: list[Box] = []
    full_from, full_to = first, last + 1
    if start % inner:
        boxes += _under(first, flat_range_to_boxes(shape[1:], start - first * inner, inner))
        full_from = first + 1
    tail: tuple[Box, ...] = ()
    if stop % inner:
        tail = _under(last, flat_range_to_boxes(shape[1:], 0, stop - last * inner))
        full_to = last
    if full_from < full_to:
        boxes.append(Box((full_from, *(0 for _ in shape[1:])), (full_to, *shape[1:])))
    return (*boxes, *tail)


def _under(index: int, boxes: Iterable[Box]) -> tuple[Box, ...]:
    return tuple(Box((index, *b.lo), (index + 1, *b.hi)) for b in boxes)
