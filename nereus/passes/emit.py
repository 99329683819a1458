"""emit: the program of one participant.

Intervals become blocks: an interval of a cell is at most three rectangles (rest of a row, full rows, start of a row),
the same on every side, so sender and receiver agree on shapes without talking. Only their offsets and strides differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nereus.ir.cells import Cells
from nereus.ir.intervals import Intervals, union
from nereus.ir.layout import IntArray
from nereus.ir.program import NO_BLOCKS, Blocks, LocalCopy, Message, Program, StorageSpec, Wave
from nereus.ir.transition import Move
from nereus.passes.atoms import AtomTable
from nereus.passes.compiled import Transition
from nereus.passes.storages import SetShares


def emit_program(transition: Transition, device: int) -> Program:
    """Program of device number ``device`` (of ``transition.topology``)."""
    return _Emitter(transition, device).run()


@dataclass(frozen=True, slots=True)
class _Local:
    """Storages of one state set on this device, by (slot, tensor): id, and the geometry that turns cells into
    offsets."""

    shares: SetShares
    coord: int
    ids: dict[tuple[str, int], int]
    start: dict[tuple[str, int], int]


class _Emitter:
    def __init__(self, transition: Transition, device: int) -> None:
        self.transition = transition
        self.device = device
        self.storages: list[StorageSpec] = []
        self.keys: dict[int, tuple[str, str, int]] = {}  # storage id -> (stage, slot, tensor)
        self.old: dict[str, _Local] = {}
        self.new: dict[str, _Local] = {}

    def run(self) -> Program:
        self._allocate()
        schedule = self.transition.schedule
        num_waves = max(schedule.num_waves, 1)
        copies: list[list[LocalCopy]] = [[] for _ in range(num_waves)]
        derives: list[list[LocalCopy]] = [[] for _ in range(num_waves)]
        sends: list[list[Message]] = [[] for _ in range(num_waves)]
        receives: list[list[Message]] = [[] for _ in range(num_waves)]
        ready = self._messages(sends, receives)
        self._derives(derives, ready)
        self._local_copies(copies, derives, ready)
        acquire: list[list[int]] = [[] for _ in range(num_waves)]
        release: list[list[int]] = [[] for _ in range(num_waves)]
        commit: list[int] = []
        for spec in self.storages:
            key = (self.device, *self.keys[spec.id])
            if spec.role == "new":
                acquire[schedule.acquire.get(key, 0)].append(spec.id)
            elif spec.role == "old" and key in schedule.release:
                release[schedule.release[key]].append(spec.id)
            elif spec.role == "old":
                commit.append(spec.id)
        return Program(
            device=self.transition.topology.devices[self.device],
            mode=schedule.mode,
            digest=self.transition.digest,
            storages=tuple(self.storages),
            waves=tuple(
                Wave(
                    acquire=tuple(acquire[w]),
                    copies=tuple(copies[w]),
                    sends=tuple(sends[w]),
                    receives=tuple(receives[w]),
                    derives=tuple(derives[w]),
                    release=tuple(release[w]),
                )
                for w in range(num_waves)
            ),
            commit_release=tuple(commit),
        )

    # -- storages
    # -------------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        storages = self.transition.storages
        for stage in storages.stages:
            for side, shares in ((self.old, storages.old.get(stage)), (self.new, storages.new.get(stage))):
                if shares is not None and self.device in shares.rank_of_device:
                    side[stage] = _Local(shares, shares.class_of(self.device)[0], {}, {})
            if stage not in self.old and stage not in self.new:
                continue
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

    def _add(self, role: str, stage: str, slot: str, tensor: int, locals_: Sequence[_Local]) -> None:
        local = locals_[-1]
        state_set, boxes = local.shares.state_set, local.shares.boxes
        kind = state_set.slot(slot)
        assert kind is not None
        share = local.shares.share(slot, *local.shares.class_of(self.device))
        number = len(self.storages)
        self.storages.append(
            StorageSpec(
                id=number,
                role=role,
                stage=stage,
                model=state_set.model,
                tensor=state_set.tensors[tensor].name,
                slot=slot,
                dtype=kind.dtype,
                host=kind.host,
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
        for one in locals_:
            one.ids[slot, tensor] = number
            one.start[slot, tensor] = int(share.start[tensor])

    # -- blocks
    # ---------------------------------------------------------------------------------------------------------

    def _blocks(self, local: _Local, slot: str, cells: Cells, region: Intervals) -> Blocks:
        """Blocks of ``region`` in this device's storages, in (cell, start) order."""
        if not len(region):
            return NO_BLOCKS
        row, col, num_rows, num_cols, cell = rectangles(cells, region)
        tensor = cells.tensor[cell]
        boxes = local.shares.boxes
        ids = np.array([local.ids[slot, t] for t in tensor.tolist()], dtype=np.int64)
        starts = np.array([local.start[slot, t] for t in tensor.tolist()], dtype=np.int64)
        width = boxes.cols[local.coord, tensor]
        offset = (row - boxes.row_lo[local.coord, tensor]) * width + (col - boxes.col_lo[local.coord, tensor]) - starts
        total = cells.tensor_cols[tensor]
        return Blocks(np.stack((ids, offset, num_rows, num_cols, width, row * total + col, total), axis=1))

    def _old_local(self, table: AtomTable, place: int) -> list[tuple[_Local, int]]:
        """Old state sets of this device with the table's slots at ``place``, each with its group number."""
        geometry = self.transition.geometry_of(table)
        return [
            (self.old[geometry.old_sets[group.state_set].stage], number)
            for number, group in enumerate(table.old_groups)
            if place in group.places and geometry.old_sets[group.state_set].stage in self.old
        ]

    def _new_local(self, table: AtomTable, place: int) -> list[tuple[_Local, int]]:
        """New state sets of this device with the table's slots at ``place``: one that derives weights first, since
        the others copy from those before them."""
        geometry = self.transition.geometry_of(table)
        found = [
            (self.new[geometry.new_sets[group.state_set].stage], number)
            for number, group in enumerate(table.new_groups)
            if place in group.places and geometry.new_sets[group.state_set].stage in self.new
        ]
        return sorted(found, key=lambda entry: entry[0].shares.state_set.slot("master") is None)

    def _held(self, table: AtomTable, group: int, old_side: bool) -> Intervals:
        classes = table.class_holders if old_side else table.class_wanters
        member = np.array([group in groups for groups in classes], dtype=bool)
        return _select(table, np.flatnonzero(member[table.cls]))

    # -- moves
    # ----------------------------------------------------------------------------------------------------------

    def _messages(self, sends: list[list[Message]], receives: list[list[Message]]) -> dict[tuple[str, str, int], int]:
        """One message per (peer, wave, direction). Returns the last wave in which each new storage receives;
        ``_derives`` adds when weights are derived."""
        outgoing: dict[tuple[int, int], list[tuple[int, Move]]] = {}
        incoming: dict[tuple[int, int], list[tuple[int, Move]]] = {}
        schedule = self.transition.schedule
        for number in self.transition.moves_of_device(self.device):
            move, wave = schedule.moves[number], schedule.wave[number]
            src, dst = move.src % self.transition.topology.num_devices, move.dst % self.transition.topology.num_devices
            if src == self.device:
                outgoing.setdefault((wave, dst), []).append((number, move))
            if dst == self.device:
                incoming.setdefault((wave, src), []).append((number, move))
        ready: dict[tuple[str, str, int], int] = {}
        devices = self.transition.topology.devices
        for (wave, peer), moves in sorted(outgoing.items()):
            blocks = _join(self._source_blocks(move) for _, move in moves)
            sends[wave].append(Message(tag=moves[0][0], peer=devices[peer], blocks=blocks))
        for (wave, peer), moves in sorted(incoming.items()):
            blocks = _join(self._target_blocks(move) for _, move in moves)
            for storage in np.unique(blocks.table[:, 0]).tolist():
                key = self.keys[storage]
                ready[key] = max(ready.get(key, 0), wave)
            receives[wave].append(Message(tag=moves[0][0], peer=devices[peer], blocks=blocks))
        return ready

    def _slots(self, move: Move) -> tuple[str, ...]:
        slots = self.transition.diff.tables[move.table].slots
        return slots if move.slots is None else tuple(slots[i] for i in move.slots)

    def _source_blocks(self, move: Move) -> list[Blocks]:
        table = self.transition.diff.tables[move.table]
        cells = self.transition.geometry_of(table).cells
        # A relay sends what it received into its new storages; everyone else what it held before.
        if move.after:
            candidates = [(local, self._held(table, g, False)) for local, g in self._new_local(table, move.src)]
        else:
            candidates = [(local, self._held(table, g, True)) for local, g in self._old_local(table, move.src)]
        return self._spread(candidates, self._slots(move), cells, move.intervals)

    def _target_blocks(self, move: Move) -> list[Blocks]:
        table = self.transition.diff.tables[move.table]
        cells = self.transition.geometry_of(table).cells
        candidates = [(local, self._held(table, g, False)) for local, g in self._new_local(table, move.dst)]
        return self._spread(candidates, self._slots(move), cells, move.intervals)

    def _spread(
        self,
        candidates: Sequence[tuple[_Local, Intervals]],
        slots: Iterable[str],
        cells: Cells,
        region: Intervals,
    ) -> list[Blocks]:
        """Blocks of ``region`` from the first state set that has each part. Row order is the region's for every slot,
        whichever set a row comes from, so that both ends of a message agree."""
        result: list[Blocks] = []
        if len(candidates) == 1:
            return [self._blocks(candidates[0][0], slot, cells, region) for slot in slots]
        for slot in slots:
            rest, parts = region, []
            for local, held in candidates:
                common = rest.intersect(held)
                if len(common):
                    parts.append((common, local))
                    rest = rest.subtract(common)
            assert not len(rest), "a move of bytes that its end does not hold"
            rows = [(cell, start, stop, local) for common, local in parts for cell, start, stop in common.rows()]
            for cell, start, stop, local in sorted(rows, key=lambda r: r[:2]):
                one = Intervals(*(np.array([v], dtype=np.int64) for v in (cell, start, stop)))
                result.append(self._blocks(local, slot, cells, one))
        return result

    # -- local work
    # -------------------------------------------------------------------------------------------------------

    def _places(self) -> tuple[int, int]:
        return self.device, self.device + self.transition.topology.num_devices

    def _local_copies(
        self,
        copies: list[list[LocalCopy]],
        derives: list[list[LocalCopy]],
        ready: dict[tuple[str, str, int], int],
    ) -> None:
        """New storages from old ones of the same place, and a second new state set of a place from the first."""
        for table in self.transition.diff.tables:
            cells = self.transition.geometry_of(table).cells
            for place in self._places():
                sources = [(local, self._held(table, g, True)) for local, g in self._old_local(table, place)]
                filled: dict[str, list[tuple[_Local, Intervals]]] = {}
                for local, group in self._new_local(table, place):
                    wanted = self._held(table, group, False)
                    for slot in table.slots:
                        rest = self._without_kept(local, slot, cells, wanted)
                        for source, held in sources:
                            common = rest.intersect(held)
                            if len(common):
                                self._copy(copies, local, source, slot, cells, common, {})
                                rest = rest.subtract(common)
                        for source, have in filled.get(slot, []):
                            common = rest.intersect(have)
                            if len(common):
                                self._copy(derives, local, source, slot, cells, common, ready)
                                rest = rest.subtract(common)
                        filled.setdefault(slot, []).append((local, wanted))

    def _without_kept(self, local: _Local, slot: str, cells: Cells, wanted: Intervals) -> Intervals:
        tensors = {t for (s, t), number in local.ids.items() if s == slot and self.storages[number].role == "new"}
        chosen = np.isin(cells.tensor[wanted.cell], np.array(sorted(tensors), dtype=np.int64))
        return Intervals(wanted.cell[chosen], wanted.start[chosen], wanted.stop[chosen])

    def _copy(
        self,
        waves: list[list[LocalCopy]],
        target: _Local,
        source: _Local,
        slot: str,
        cells: Cells,
        region: Intervals,
        ready: dict[tuple[str, str, int], int],
        source_slot: str | None = None,
    ) -> None:
        """One copy per wave: that in which the target is there and the source complete. Old storages are from the
        start."""
        schedule = self.transition.schedule
        by_wave: dict[int, list[int]] = {}
        derived: dict[tuple[str, str, int], int] = {}
        tensors = cells.tensor[region.cell].tolist()
        for row, tensor in enumerate(tensors):
            target_key = self.keys[target.ids[slot, tensor]]
            source_id = source.ids[source_slot or slot, tensor]
            source_key = self.keys[source_id]
            wave = schedule.acquire.get((self.device, *target_key), 0)
            if self.storages[source_id].role == "new":
                wave = max(wave, schedule.acquire.get((self.device, *source_key), 0), ready.get(source_key, 0))
            if source_slot is not None:
                derived[target_key] = max(derived.get(target_key, 0), wave)
            by_wave.setdefault(wave, []).append(row)
        for wave, rows in sorted(by_wave.items()):
            part = Intervals(region.cell[rows], region.start[rows], region.stop[rows])
            waves[wave].append(
                LocalCopy(
                    src=self._blocks(source, source_slot or slot, cells, part),
                    dst=self._blocks(target, slot, cells, part),
                    cast=source_slot is not None,
                )
            )
        for key, wave in derived.items():
            ready[key] = max(ready.get(key, 0), wave)

    def _derives(self, derives: list[list[LocalCopy]], ready: dict[tuple[str, str, int], int]) -> None:
        """Weights that no one sends, from the master of the same place: wanted, not held here before, derivable."""
        for table in self.transition.diff.tables:
            if table.slots != ("weight",):
                continue
            cells = self.transition.geometry_of(table).cells
            for place in self._places():
                own = table.derived.get(place)
                if own is None:
                    continue
                derivable = _select(table, own)
                before = union(
                    [Intervals(*_columns(self._held(table, g, True))) for _, g in self._old_local(table, place)][:1]
                )
                for _, group in self._old_local(table, place)[1:]:
                    before = union([before, self._held(table, group, True).subtract(before)])
                for local, group in self._new_local(table, place):
                    if not any(slot == "master" for slot, _ in local.ids):
                        continue
                    wanted = self._without_kept(local, "weight", cells, self._held(table, group, False))
                    region = wanted.intersect(derivable).subtract(before)
                    if len(region):
                        self._copy(derives, local, local, "weight", cells, region, ready, source_slot="master")


def rectangles(cells: Cells, region: Intervals) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """(row, col, num_rows, num_cols, cell) of the rectangles of each interval, in order; rows and columns are the
    tensor's."""
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


def _select(table: AtomTable, rows: IntArray) -> Intervals:
    return Intervals(table.cell[rows], table.start[rows], table.stop[rows])


def _columns(region: Intervals) -> tuple[IntArray, IntArray, IntArray]:
    return region.cell, region.start, region.stop


def _join(groups: Iterable[list[Blocks]]) -> Blocks:
    tables = [blocks.table for group in groups for blocks in group if len(blocks)]
    return Blocks(np.concatenate(tables)) if tables else NO_BLOCKS
