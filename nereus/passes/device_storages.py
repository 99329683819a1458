"""The storages of one device in a transition, and how regions of cells lie in them as blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nereus.ir.cells import Cells
from nereus.ir.intervals import Intervals
from nereus.ir.layout import IntArray
from nereus.ir.program import NO_BLOCKS, Blocks, StorageSpec
from nereus.passes.atoms import AtomTable, Group
from nereus.passes.compiled import Exchange
from nereus.passes.storages import SetShares

#: Storage of a device without the device: (stage, slot, tensor number).
LocalKey = tuple[str, str, int]


@dataclass(frozen=True, slots=True, eq=False)
class LocalSet:
    """Storages of one state set on the device, by (slot, tensor number): id, and the first element that each holds."""

    shares: SetShares
    coord: int
    ids: dict[tuple[str, int], int] = field(default_factory=dict)
    start: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def has_master(self) -> bool:
        return self.shares.state_set.slot("master") is not None

    def blocks(self, slot: str, cells: Cells, region: Intervals) -> Blocks:
        """Blocks of ``region`` in the set's storages of ``slot``, in (cell, start) order."""
        if not len(region):
            return NO_BLOCKS
        row, col, num_rows, num_cols, cell = rectangles(cells, region)
        tensor = cells.tensor[cell]
        numbers = tensor.tolist()
        ids = np.array([self.ids[slot, t] for t in numbers], dtype=np.int64)
        starts = np.array([self.start[slot, t] for t in numbers], dtype=np.int64)
        boxes = self.shares.boxes
        width = boxes.cols[self.coord, tensor]
        offset = (row - boxes.row_lo[self.coord, tensor]) * width + (col - boxes.col_lo[self.coord, tensor]) - starts
        total = cells.tensor_cols[tensor]
        return Blocks(np.stack((ids, offset, num_rows, num_cols, width, row * total + col, total), axis=1))


class DeviceStorages:
    """Every storage that the device has before or after, numbered, and which state set has what of an atom table."""

    def __init__(self, transition: Exchange, device: int) -> None:
        self.transition = transition
        self.device = device
        self.specs: list[StorageSpec] = []
        self.keys: dict[int, LocalKey] = {}  # storage id -> key
        self.old: dict[str, LocalSet] = {}
        self.new: dict[str, LocalSet] = {}
        self._holding: dict[tuple[int, int, bool], list[tuple[LocalSet, Intervals]]] = {}
        storages = transition.storages
        for stage in storages.stages:
            for side, shares in ((self.old, storages.old.get(stage)), (self.new, storages.new.get(stage))):
                if shares is not None and device in shares.rank_of_device:
                    side[stage] = LocalSet(shares, shares.class_of(device)[0])
            if stage in self.old or stage in self.new:
                self._number(stage)
        #: Old storage -> its copy in host memory, where it goes there on the way (tight mode).
        self.staged: dict[int, int] = {}
        for owner, stage, slot, tensor in sorted(transition.schedule.staged):
            if owner == device:
                self._stage((stage, slot, tensor))

    def _stage(self, key: LocalKey) -> None:
        old = next(n for n, known in self.keys.items() if known == key and self.specs[n].role == "old")
        number = len(self.specs)
        self.specs.append(replace(self.specs[old], id=number, role="staged", host=True))
        self.keys[number] = key
        self.staged[old] = number

    def _number(self, stage: str) -> None:
        storages = self.transition.storages
        for slot, old_slot, new_slot in storages.slots(stage):
            fit = storages.fit(stage, slot, self.device)
            for tensor in np.flatnonzero(fit.kept + fit.old + fit.new).tolist():
                if fit.kept[tensor]:
                    self._add("kept", stage, slot, tensor, (self.old[stage], self.new[stage]))
                    continue
                if fit.old[tensor] and old_slot is not None:
                    self._add("old", stage, slot, tensor, (self.old[stage],))
                if fit.new[tensor] and new_slot is not None:
                    self._add("new", stage, slot, tensor, (self.new[stage],))

    def _add(self, role: str, stage: str, slot: str, tensor: int, sets: Sequence[LocalSet]) -> None:
        local = sets[-1]
        state_set, boxes = local.shares.state_set, local.shares.boxes
        kind = state_set.slot(slot)
        assert kind is not None
        share = local.shares.share(slot, *local.shares.class_of(self.device))
        number = len(self.specs)
        self.specs.append(
            StorageSpec(
                id=number,
                role=role,
                stage=stage,
                model=state_set.model,
                tensor=state_set.tensors[tensor].name,
                slot=slot,
                dtype=kind.dtype,
                host=bool(share.host[tensor]),
                tensor_shape=state_set.tensors[tensor].shape,
                row_lo=int(boxes.row_lo[local.coord, tensor]),
                row_hi=int(boxes.row_hi[local.coord, tensor]),
                col_lo=int(boxes.col_lo[local.coord, tensor]),
                col_hi=int(boxes.col_hi[local.coord, tensor]),
                start=int(share.start[tensor]),
                stop=int(share.stop[tensor]),
            )
        )
        self.keys[number] = (stage, slot, tensor)
        for one in sets:
            one.ids[slot, tensor] = number
            one.start[slot, tensor] = int(share.start[tensor])

    def holding(self, table: int, place: int, *, old: bool) -> list[tuple[LocalSet, Intervals]]:
        """The old (or new) state sets of the device with the table's slots at ``place``, each with its intervals.

        Among new sets one that derives weights comes first, since the others copy from those before them.
        """
        key = (table, place, old)
        if key not in self._holding:
            atoms = self.transition.diff.tables[table]
            geometry = self.transition.geometry_of(atoms)
            groups, sets = (atoms.old_groups, geometry.old_sets) if old else (atoms.new_groups, geometry.new_sets)
            local = self.old if old else self.new
            found = [
                (local[sets[group.state_set].stage], _of_group(atoms, number, old=old))
                for number, group in enumerate(groups)
                if _at(group, place) and sets[group.state_set].stage in local
            ]
            self._holding[key] = sorted(found, key=lambda entry: not old and not entry[0].has_master)
        return self._holding[key]

    def without_kept(self, local: LocalSet, slot: str, cells: Cells, region: Intervals) -> Intervals:
        """The part of ``region`` whose storages are new."""
        tensors = [t for (s, t), number in local.ids.items() if s == slot and self.specs[number].role == "new"]
        chosen = np.isin(cells.tensor[region.cell], np.array(tensors, dtype=np.int64))
        return Intervals(region.cell[chosen], region.start[chosen], region.stop[chosen])


def _at(group: Group, place: int) -> bool:
    return place in group.places


def _of_group(table: AtomTable, group: int, *, old: bool) -> Intervals:
    classes = table.class_holders if old else table.class_wanters
    member = np.array([group in groups for groups in classes], dtype=bool)
    rows = np.flatnonzero(member[table.cls])
    return Intervals(table.cell[rows], table.start[rows], table.stop[rows])


def rectangles(cells: Cells, region: Intervals) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """(row, col, num_rows, num_cols, cell) of the rectangles of each interval, in order; rows and columns are the
    tensor's. An interval is the rest of a row, full rows, the start of a row; each may be missing."""
    width = cells.col_hi[region.cell] - cells.col_lo[region.cell]
    first_row, first_col = region.start // width, region.start % width
    last_row, last_col = region.stop // width, region.stop % width
    one_row = first_row == last_row
    head = (first_col > 0) & ~one_row
    body_from = first_row + head
    count = len(region)
    # Three candidate rectangles per interval: head (or the only one), body, tail.
    row = np.stack((first_row, body_from, last_row), axis=1)
    col = np.stack((first_col, np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)), axis=1)
    num_rows = np.stack(
        ((head | one_row).astype(np.int64), np.where(one_row, 0, last_row - body_from), (~one_row).astype(np.int64)),
        axis=1,
    )
    num_cols = np.stack((np.where(one_row, last_col - first_col, width - first_col), width, last_col), axis=1)
    keep = ((num_rows > 0) & (num_cols > 0)).reshape(-1)
    cell = np.repeat(region.cell, 3)[keep]
    return (
        row.reshape(-1)[keep] + cells.row_lo[cell],
        col.reshape(-1)[keep] + cells.col_lo[cell],
        num_rows.reshape(-1)[keep],
        num_cols.reshape(-1)[keep],
        cell,
    )
