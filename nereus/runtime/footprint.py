"""Which bytes of a process are state: what a move reads and writes must not meet, and what is left over is padding.

Everything here is by address, since two storages of a framework may be views of one allocation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nereus.ir.described import primary_fragments
from nereus.ir.fragment import Fragment
from nereus.ir.layout import IntArray
from nereus.runtime.adapters.base import DTYPE_NAMES, BindError, Binding


def check_memory(old: Sequence[Binding], new: Sequence[Binding]) -> None:
    """BindError where a binding of this process is not what it says, or where a move would overwrite something."""
    for binding in (*old, *new):
        _check_storages(binding)
        _check_fragments(binding)
    _check_apart(old, new)
    _check_written_once(new)


def zero_padding(new: Sequence[Binding]) -> None:
    """Zeros in every byte of the storages that no fragment covers."""
    spans = [_addresses(b, f) for b in new for f in b.state.fragments]
    covered = np.concatenate(spans) if spans else np.zeros((0, 2), dtype=np.int64)
    covered = covered[np.argsort(covered[:, 0], kind="stable")]
    reached = np.maximum.accumulate(covered[:, 1])
    for binding in new:
        for data in binding.memory:
            if data.numel():
                _zero_gaps(data, covered[:, 0], reached)


def row_starts(fragment: Fragment) -> list[tuple[int, int]]:
    """(first element, how many) of every row of the fragment's clip."""
    width, found, position = fragment.num_cols, [], fragment.start
    while position < fragment.stop:
        count = min(width - position % width, fragment.stop - position)
        found.append((position, count))
        position += count
    return found


def _zero_gaps(data: torch.Tensor, begins: IntArray, reached: IntArray) -> None:
    base = data.data_ptr()
    size = data.numel() * data.element_size()
    content = data.view(torch.uint8)  # not every dtype has a fill
    # From the first span that ends inside; spans are ascending, and so is what they have reached.
    first, last = np.searchsorted(reached, base, side="right"), np.searchsorted(begins, base + size, side="left")
    gap_lo = np.concatenate(([0], np.clip(reached[first:last] - base, 0, size)))
    gap_hi = np.concatenate((np.clip(begins[first:last] - base, 0, size), [size]))
    for at in np.flatnonzero(gap_lo < gap_hi):
        content[int(gap_lo[at]) : int(gap_hi[at])].zero_()


def _check_storages(binding: Binding) -> None:
    for storage, data in zip(binding.state.storages, binding.memory, strict=True):
        if data.device.type != "cpu":
            raise BindError(f"{storage.name} is on {data.device}: moving live objects works on CPU memory today")
        if data.dim() != 1 or not data.is_contiguous():
            raise BindError(f"{storage.name}: its memory of shape {tuple(data.shape)} is no run of elements")
        found = (DTYPE_NAMES.get(data.dtype, str(data.dtype)), data.numel())
        if found != (storage.dtype, storage.numel):
            raise BindError(
                f"{storage.name} is said to be {storage.numel} x {storage.dtype}; it is {found[1]} x {found[0]}"
            )


def _check_fragments(binding: Binding) -> None:
    state = binding.state
    for f in state.fragments:
        named = f"rank {state.rank}: {f.tensor} {f.slot}"
        if not 0 <= f.storage < len(state.storages):
            raise BindError(f"{named} lies in storage {f.storage} of {len(state.storages)}")
        if f.num_cols <= 0 or not 0 <= f.start < f.stop <= f.area:
            box = f"rows {f.row_lo}..{f.row_hi}, columns {f.col_lo}..{f.col_hi}"
            raise BindError(f"{named}: elements {f.start}..{f.stop} of {box}")
        storage = state.storages[f.storage]
        if f.num_rows > 1 and f.stride < f.num_cols:
            raise BindError(f"{named}: rows of {f.num_cols} elements, {f.stride} apart, overlap in {storage.name}")
        if f.offset(f.start) < 0 or f.offset(f.stop - 1) >= storage.numel:
            raise BindError(f"{named} leaves its storage {storage.name}")
    home: dict[tuple[str, str, str], int] = {}
    for f in primary_fragments(state)[0]:
        first = home.setdefault((f.tensor, f.slot, state.storages[f.storage].dtype), f.storage)
        if first != f.storage:
            names = f"{state.storages[first].name} and {state.storages[f.storage].name}"
            raise BindError(f"rank {state.rank}: {f.tensor} {f.slot} lies in parts in {names}; a part has one storage")


def _check_apart(old: Sequence[Binding], new: Sequence[Binding]) -> None:
    spans = sorted(
        (data.data_ptr(), data.data_ptr() + data.numel() * data.element_size(), side, storage.name)
        for side, bindings in (("old", old), ("new", new))
        for binding in bindings
        for storage, data in zip(binding.state.storages, binding.memory, strict=True)
        if data.numel()
    )
    reach: dict[str, tuple[int, str]] = {}
    for begin, end, side, name in spans:
        other = reach.get("new" if side == "old" else "old")
        if other is not None and other[0] > begin:
            raise BindError(f"{name} ({side}) shares memory with {other[1]}: what is read must not be written")
        if side not in reach or reach[side][0] < end:
            reach[side] = (end, name)


def _check_written_once(new: Sequence[Binding]) -> None:
    """Two things in one place would overwrite each other; one thing under two names is fine."""
    seen: set[tuple[object, ...]] = set()
    fragments: list[Fragment] = []
    spans: list[IntArray] = []
    for binding in new:
        for f in binding.state.fragments:
            rows = _addresses(binding, f)
            place = (int(rows[0, 0]), int(rows[-1, 1]), f.stride if len(rows) > 1 else 0)
            key = (f.tensor, f.slot, f.row_lo, f.row_hi, f.col_lo, f.col_hi, f.start, f.stop, place)
            if key not in seen:
                seen.add(key)
                fragments.append(f)
                spans.append(rows)
    if not spans:
        return
    owner = np.repeat(np.arange(len(spans)), [len(rows) for rows in spans])
    table = np.concatenate(spans)
    order = np.argsort(table[:, 0], kind="stable")
    table, owner = table[order], owner[order]
    met = np.flatnonzero(table[1:, 0] < table[:-1, 1])
    if len(met):
        a, b = fragments[owner[met[0]]], fragments[owner[met[0] + 1]]
        raise BindError(
            f"{a.tensor} {a.slot} (rows {a.row_lo}..{a.row_hi}) and {b.tensor} {b.slot} (rows {b.row_lo}..{b.row_hi}) "
            "are wanted in the same memory: one would overwrite the other"
        )


def _addresses(binding: Binding, f: Fragment) -> IntArray:
    """[rows, 2]: first byte and end of every contiguous run of the fragment."""
    data = binding.memory[f.storage]
    if f.stride == f.num_cols:
        begin = np.array([f.offset(f.start)], dtype=np.int64)
        end = begin + f.numel
    else:
        rows = np.arange(f.start // f.num_cols, (f.stop - 1) // f.num_cols + 1, dtype=np.int64)
        begin = f.origin + rows * f.stride
        end = begin + f.num_cols
        begin[0], end[-1] = f.offset(f.start), f.offset(f.stop - 1) + 1
    spans: IntArray = data.data_ptr() + np.stack((begin, end), axis=1) * data.element_size()
    return spans
