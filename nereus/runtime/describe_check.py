"""A placed plan against what the processes' tensors hold, element by element."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nereus.ir.cells import local_boxes, shares_of
from nereus.ir.described import DescribedLayout
from nereus.ir.holdings import StateSet
from nereus.ir.layout import IntArray, Layout
from nereus.ir.plan import Stage


class DescribeError(ValueError):
    """The processes contradict each other, or their tensors the plan that would follow: ranks and numbers are named."""


def differences(stage: Stage, state_set: StateSet, described: DescribedLayout) -> list[str]:
    """Notes on what lies otherwise than the plan's rules say, and may. DescribeError where weights do, or where the
    ranks hold another number of copies of a slot: then a degree is wrong."""
    planned_layout = state_set.bound.layout
    assert isinstance(planned_layout, Layout)
    layout = _padded_as_held(planned_layout, state_set, described)
    boxes = local_boxes(state_set.tensors, layout)
    coord, shard = layout.coord_of_rank(), layout.shard_of_rank()
    size = np.array([t.numel for t in state_set.tensors], dtype=np.int64)
    notes = []
    for slot in state_set.slots:
        starts, stops = described.held(slot.name)
        other: list[tuple[int, int]] = []
        elsewhere: set[int] = set()
        copies = np.zeros((2, len(size)), dtype=np.int64)
        for rank in range(layout.num_ranks):
            shares = shares_of(
                state_set.tensors, boxes, layout, slot.name, int(coord[rank]), state_set.absent_mask(slot.name)
            )
            row = 0 if shares.share[0] < 0 else shares.share.tolist().index(int(shard[rank]))
            at = coord[rank]
            planned = _elements(boxes.row_lo[at], boxes.col_lo[at], boxes.cols[at], shares.start[row], shares.stop[row])
            cols = described.col_hi[rank] - described.col_lo[rank]
            live = _elements(described.row_lo[rank], described.col_lo[rank], cols, starts[rank], stops[rank])
            other += [(rank, int(t)) for t in np.flatnonzero((planned != live).any(axis=1))]
            copies += (shares.stop[row] - shares.start[row], stops[rank] - starts[rank])
            if slot.is_split:
                in_host = state_set.host_mask(slot.name, int(at), shares.stop - shares.start)[row]
                held = stops[rank] > starts[rank]
                elsewhere |= set(np.flatnonzero(held & (in_host != described.host[slot.name][rank])).tolist())
        if elsewhere:
            notes.append(
                f"{state_set.stage}: {slot.name} of {len(elsewhere)} tensors, {state_set.tensors[min(elsewhere)].name} "
                f"the first, lies in another memory than a plan's {slot.text} means; moves follow the framework's own "
                "choice"
            )
        if not other:
            continue
        rank, tensor = other[0]
        name = state_set.tensors[tensor].name
        text = (
            f"{state_set.stage}: {slot.name} of {len({t for _, t in other})} tensors lies otherwise than the plan's "
            f"rule says, first {name} on rank {rank}"
        )
        if slot.name == "weight":
            raise DescribeError(text)
        miscounted = np.flatnonzero(copies[0] != copies[1])
        if len(miscounted):
            first = miscounted[0]
            wanted, found = (int(c) / int(size[first]) for c in copies[:, first])
            rule = f"zero {stage.zero}" if not stage.fsdp else f"fsdp {stage.fsdp}"
            raise DescribeError(
                f"{state_set.stage}: the processes together hold {slot.name} of {state_set.tensors[first].name} "
                f"{found:g} times, and {rule} over dp {stage.dp} means {wanted:g} times"
            )
        notes.append(f"{text}; moves follow the framework's own shards")
    if layout != planned_layout:
        notes.append(
            f"{state_set.stage}: the vocabulary is padded to a multiple of {layout.vocab_multiple}, not of "
            f"{planned_layout.vocab_multiple}; moves follow the framework's own rows"
        )
    return notes


def _padded_as_held(layout: Layout, state_set: StateSet, described: DescribedLayout) -> Layout:
    """``layout`` with another padding of the vocabulary, where that is what the first rank of tp holds: frameworks
    let their users choose it."""
    if not layout.vocab_multiple or layout.tp == 1:
        return layout
    first = np.flatnonzero(layout.coordinates()["tp"] == 0)
    for number, tensor in enumerate(state_set.tensors):
        if tensor.cut is None or not tensor.cut.vocab:
            continue
        rows = int((described.row_hi - described.row_lo)[first, number].max())
        if rows > 0 and layout.interval(tensor.cut, tensor.shape[0], layout.tp, 0) != (0, rows):
            return replace(layout, vocab_multiple=rows * layout.tp)
    return layout


def _elements(row_lo: IntArray, col_lo: IntArray, cols: IntArray, start: IntArray, stop: IntArray) -> IntArray:
    """[tensors, 6]: columns, and first and last element, of each tensor's range: equal where the elements are."""
    width = np.maximum(cols, 1)
    last = np.maximum(stop - 1, 0)
    found = np.stack(
        (col_lo, cols, row_lo + start // width, start % width, row_lo + last // width, last % width), axis=1
    )
    found[stop <= start] = 0
    return found
