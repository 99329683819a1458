"""Reading and writing the regions of a binding against whole logical tensors: what a checkpoint needs, and the oracle
of every move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from nereus.ir.fragment import Fragment
from nereus.runtime.adapters.base import Binding

#: (logical tensor, slot) -> elements as a matrix (dim 0 by the rest; a vector is n x 1).
Whole = dict[tuple[str, str], torch.Tensor]


def rectangles(fragment: Fragment) -> Iterator[tuple[int, int, int, int]]:
    """(first row, rows, first column, columns) inside the fragment's rectangle, in order: the rest of a row, full
    rows, the start of a row; each may be missing."""
    width = fragment.num_cols
    row, col = divmod(fragment.start, width)
    last_row, last_col = divmod(fragment.stop, width)
    if row == last_row:
        yield row, 1, col, last_col - col
        return
    if col:
        yield row, 1, col, width - col
        row += 1
    if last_row > row:
        yield row, last_row - row, 0, width
    if last_col:
        yield last_row, 1, 0, last_col


def pieces(binding: Binding) -> Iterator[tuple[Fragment, tuple[int, int, int, int], torch.Tensor]]:
    """(fragment, rectangle in its logical tensor, live view of those elements, rows x columns)."""
    for fragment in binding.state.fragments:
        memory = binding.memory[fragment.storage]
        for row, num_rows, col, num_cols in rectangles(fragment):
            offset = fragment.origin + row * fragment.stride + col
            view = memory.as_strided((num_rows, num_cols), (fragment.stride, 1), memory.storage_offset() + offset)
            place = (fragment.row_lo + row, num_rows, fragment.col_lo + col, num_cols)
            yield fragment, place, view


def gather(bindings: Iterable[Binding], shapes: Mapping[str, tuple[int, int]]) -> Whole:
    """Whole tensors from the bindings of all ranks. ValueError where an element is on no rank, or replicas differ.

    ``shapes``: rows and columns of every logical tensor.
    """
    whole: Whole = {}
    seen: dict[tuple[str, str], torch.Tensor] = {}
    for binding in bindings:
        for fragment, (row, num_rows, col, num_cols), view in pieces(binding):
            key = (fragment.tensor, fragment.slot)
            if key not in whole:
                whole[key] = torch.zeros(shapes[fragment.tensor], dtype=view.dtype)
                seen[key] = torch.zeros(shapes[fragment.tensor], dtype=torch.bool)
            target = whole[key][row : row + num_rows, col : col + num_cols]
            known = seen[key][row : row + num_rows, col : col + num_cols]
            if bool((known & (target != view) & ~(target.isnan() & view.isnan())).any()):
                raise ValueError(f"rank {binding.state.rank}: {fragment.tensor} {fragment.slot} differs from a replica")
            target.copy_(view)
            known.fill_(True)
    for key, known in seen.items():
        if not bool(known.all()):
            raise ValueError(f"{key[0]} {key[1]}: {int((~known).sum())} elements are on no rank")
    return whole


def scatter(whole: Mapping[tuple[str, str], torch.Tensor], binding: Binding) -> None:
    """Write a binding's regions from whole tensors (matrices of the storages' dtypes)."""
    for fragment, (row, num_rows, col, num_cols), view in pieces(binding):
        view.copy_(whole[fragment.tensor, fragment.slot][row : row + num_rows, col : col + num_cols])
