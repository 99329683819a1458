"""What arrived: one number for each logical tensor of a binding, the same whatever the layout.

A sender and a receiver that hold a model in different layouts compare these numbers, so an adapter that was never
delivered, or a factor that came in another order, is seen at once. Each rank counts the rectangles that it holds
(``held``), small enough to send to one place, where ``arrived`` joins them: copies must agree, and every element of a
tensor must be there. A tensor's number is the sum of its elements' checksums (``nereus.kernels.checksum``), which knows
where every element belongs and not who holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from nereus.kernels.checksum import checksum, tensor_key
from nereus.kernels.pack import packing
from nereus.runtime.adapters.base import Binding
from nereus.runtime.adapters.whole import pieces

_MASK = (1 << 64) - 1


class ArrivalError(RuntimeError):
    """Copies that differ, or elements that are nowhere; the text says of which tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Checksum of rows ``row .. row + num_rows`` x columns ``col .. col + num_cols`` of (``tensor``, ``slot``)."""

    tensor: str
    slot: str
    row: int
    num_rows: int
    col: int
    num_cols: int
    total: int


def held(binding: Binding, model: str, shapes: Mapping[str, tuple[int, int]]) -> tuple[Held, ...]:
    """The rectangles of one rank. ``shapes``: rows and columns of the tensors that are asked for, others are left
    out."""
    found = []
    for fragment, (row, num_rows, col, num_cols), view in pieces(binding):
        if fragment.tensor not in shapes:
            continue
        cols = shapes[fragment.tensor][1]
        # One packed buffer per rectangle: dense rows, numbered by their place in the whole tensor.
        data = view.contiguous().cpu()
        table = np.array([[0, 0, num_rows, num_cols, num_cols, row * cols + col, cols]], dtype=np.int64)
        packed = packing(table, np.array([data.element_size()], dtype=np.int64))
        keys = np.array([tensor_key(model, fragment.tensor, fragment.slot)], dtype=np.uint64)
        total = checksum(data.view(-1).view(torch.uint8), packed, keys)
        found.append(
            Held(
                tensor=fragment.tensor,
                slot=fragment.slot,
                row=row,
                num_rows=num_rows,
                col=col,
                num_cols=num_cols,
                total=total,
            )
        )
    return tuple(found)


def arrived(
    ranks: Iterable[Iterable[Held]], shapes: Mapping[str, tuple[int, int]], slots: Iterable[str] = ("weight",)
) -> dict[tuple[str, str], int]:
    """(tensor, slot) -> checksum of the whole tensor, from the rectangles of all ranks.

    Raises ArrivalError where copies of one rectangle differ, or ``slots`` of a tensor are not there whole. Rectangles
    that overlap without being equal (replicas cut in other places) are taken from the first rank that has them.
    """
    found: dict[tuple[str, str], dict[tuple[int, int, int, int], int]] = {}
    for rank in ranks:
        for part in rank:
            boxes = found.setdefault((part.tensor, part.slot), {})
            box = (part.row, part.row + part.num_rows, part.col, part.col + part.num_cols)
            if boxes.setdefault(box, part.total) != part.total:
                rows, cols = f"{box[0]} .. {box[1]}", f"{box[2]} .. {box[3]}"
                raise ArrivalError(f"{part.tensor} {part.slot}: copies of rows {rows}, columns {cols} differ")
    missing = [f"{t} {s}" for t in shapes for s in slots if (t, s) not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ArrivalError(f"{missing[0]}{more} did not arrive: no rank holds any of it")
    return {key: _whole(key, boxes, shapes[key[0]]) for key, boxes in found.items()}


def _whole(key: tuple[str, str], boxes: Mapping[tuple[int, int, int, int], int], shape: tuple[int, int]) -> int:
    # On the grid of all borders a rectangle is a block of cells, however large the tensor is.
    rows = sorted({0, shape[0], *(b for box in boxes for b in box[:2])})
    cols = sorted({0, shape[1], *(b for box in boxes for b in box[2:])})
    taken = np.zeros((len(rows) - 1, len(cols) - 1), dtype=bool)
    total = 0
    for box, part in boxes.items():
        lo, hi = np.searchsorted(rows, box[:2]).tolist()
        left, right = np.searchsorted(cols, box[2:]).tolist()
        cells = taken[lo:hi, left:right]
        if not cells.any():
            cells[:] = True
            total += part
    if not bool(taken.all()):
        sizes = np.outer(np.diff(rows), np.diff(cols))
        absent = int(sizes[~taken].sum())
        raise ArrivalError(f"{key[0]} {key[1]}: {absent:,} of {shape[0] * shape[1]:,} elements did not arrive")
    return total & _MASK
