"""emit: the program of one participant.

Both ends of a move cut its intervals into the same rectangles, in the same order, so that they agree on every element
without talking; only offsets and strides differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nereus.ir.cells import Cells
from nereus.ir.intervals import Intervals
from nereus.ir.program import NO_BLOCKS, Blocks, LocalCopy, Message, Program, Wave
from nereus.ir.transition import Move
from nereus.passes.compiled import Exchange
from nereus.passes.device_storages import DeviceStorages, LocalKey, LocalSet


def emit_program(transition: Exchange, device: int) -> Program:
    """Program of device number ``device`` (of ``transition.topology``)."""
    return _Emitter(transition, device).run()


class _Emitter:
    def __init__(self, transition: Exchange, device: int) -> None:
        self.transition = transition
        self.device = device
        self.num_devices = transition.topology.num_devices
        self.storages = DeviceStorages(transition, device)
        waves = range(max(transition.schedule.num_waves, 1))
        self.copies: list[list[LocalCopy]] = [[] for _ in waves]
        self.derives: list[list[LocalCopy]] = [[] for _ in waves]
        self.sends: list[list[Message]] = [[] for _ in waves]
        self.receives: list[list[Message]] = [[] for _ in waves]
        #: Last wave in which something is written into a new storage.
        self.ready: dict[LocalKey, int] = {}

    def run(self) -> Program:
        self._messages()
        self._derives()
        self._local_copies()
        self._stage()
        schedule, storages = self.transition.schedule, self.storages
        acquire: list[list[int]] = [[] for _ in self.copies]
        release: list[list[int]] = [[] for _ in self.copies]
        commit: list[int] = []
        for spec in storages.specs:
            key = (self.device, *storages.keys[spec.id])
            if spec.role == "staged":
                first, last = schedule.staged[key]
                acquire[first].append(spec.id)
                release[last].append(spec.id)
            elif spec.role == "new":
                acquire[schedule.acquire.get(key, 0)].append(spec.id)
            elif spec.role == "old" and key in schedule.release:
                release[schedule.release[key]].append(spec.id)
            elif spec.role == "old":
                commit.append(spec.id)
        return Program(
            device=self.transition.topology.devices[self.device],
            mode=schedule.mode,
            digest=self.transition.digest,
            storages=tuple(storages.specs),
            waves=tuple(
                Wave(
                    acquire=tuple(acquire[wave]),
                    copies=tuple(self.copies[wave]),
                    sends=tuple(self.sends[wave]),
                    receives=tuple(self.receives[wave]),
                    derives=tuple(self.derives[wave]),
                    release=tuple(release[wave]),
                )
                for wave in range(len(acquire))
            ),
            commit_release=tuple(commit),
        )

    def _places(self) -> tuple[int, int]:
        """The device's own GPU and its part of host memory."""
        return self.device, self.device + self.num_devices

    def _cells(self, table: int) -> Cells:
        return self.transition.geometry_of(self.transition.diff.tables[table]).cells

    # Moves

    def _messages(self) -> None:
        """One message per (peer, wave, direction): slices of moves, in the moves' order."""
        outgoing: dict[tuple[int, int], list[Blocks]] = {}
        incoming: dict[tuple[int, int], list[Blocks]] = {}
        tags: dict[tuple[int, int, int], int] = {}  # (wave, source, destination) -> the first slice's
        schedule = self.transition.schedule
        for number in self.transition.moves_of_device(self.device):
            move, wave, count = schedule.moves[number], int(schedule.wave[number]), int(schedule.slices[number])
            src, dst = move.src % self.num_devices, move.dst % self.num_devices
            for part, intervals in enumerate(move.intervals.split(count)):
                at = wave + part
                tags.setdefault((at, src, dst), at * len(schedule.moves) + number)
                if src == self.device:
                    # A relay sends what it received into its new storages; everyone else what it held before.
                    blocks = self._blocks(move, intervals, self._source(move), old=not move.after)
                    outgoing.setdefault((at, dst), []).extend(self._there(each, at) for each in blocks)
                if dst == self.device:
                    blocks = self._blocks(move, intervals, move.dst, old=False)
                    incoming.setdefault((at, src), []).extend(blocks)
        devices = self.transition.topology.devices
        for (wave, peer), parts in sorted(outgoing.items(), key=lambda entry: entry[0]):
            tag = tags[wave, self.device, peer]
            self.sends[wave].append(Message(tag=tag, peer=devices[peer], blocks=_join(parts)))
        for (wave, peer), parts in sorted(incoming.items(), key=lambda entry: entry[0]):
            blocks_in = _join(parts)
            for storage in np.unique(blocks_in.table[:, 0]).tolist():
                self._written(self.storages.keys[storage], wave)
            self.receives[wave].append(Message(tag=tags[wave, peer, self.device], peer=devices[peer], blocks=blocks_in))

    def _source(self, move: Move) -> int:
        """The place whose storages a move reads. What went to host memory on the way is addressed as it lay before."""
        if move.after or not self.storages.staged:
            return move.src
        rest = move.intervals
        for _, held in self.storages.holding(move.table, move.src, old=True):
            rest = rest.subtract(held)
        return move.src % self.num_devices if len(rest) else move.src

    def _there(self, blocks: Blocks, wave: int) -> Blocks:
        """``blocks`` of old storages where those lie in ``wave``."""
        schedule, storages = self.transition.schedule, self.storages
        table = blocks.table
        for old, copy in storages.staged.items():
            if wave > schedule.staged[self.device, *storages.keys[old]][0] and (table[:, 0] == old).any():
                table = table.copy()
                table[table[:, 0] == old, 0] = copy
        return blocks if table is blocks.table else Blocks(table)

    def _stage(self) -> None:
        """Old storages that go to host memory on the way, whole."""
        for old, copy in self.storages.staged.items():
            wave, _ = self.transition.schedule.staged[self.device, *self.storages.keys[old]]
            size = self.storages.specs[old].numel
            src, dst = (Blocks(np.array([[number, 0, 1, size, size, 0, 0]], dtype=np.int64)) for number in (old, copy))
            self.copies[wave].append(LocalCopy(src=src, dst=dst))

    def _written(self, key: LocalKey, wave: int) -> None:
        self.ready[key] = max(self.ready.get(key, 0), wave)

    def _blocks(self, move: Move, intervals: Intervals, place: int, *, old: bool) -> list[Blocks]:
        """Blocks of a part of a move on this device, slot after slot, each from the first state set that has it.

        Their order is the region's, whichever set a row comes from, so that both ends of a message agree.
        """
        table = self.transition.diff.tables[move.table]
        slots = table.slots if move.slots is None else tuple(table.slots[i] for i in move.slots)
        cells, candidates = self._cells(move.table), self.storages.holding(move.table, place, old=old)
        if len(candidates) == 1:
            return [candidates[0][0].blocks(slot, cells, intervals) for slot in slots]
        parts: list[tuple[int, int, int, LocalSet]] = []
        rest = intervals
        for local, held in candidates:
            common = rest.intersect(held)
            parts += [(*row, local) for row in common.rows()]
            rest = rest.subtract(common)
        assert not len(rest), "a move of bytes that its end does not hold"
        parts.sort(key=lambda part: part[:2])
        return [local.blocks(slot, cells, _one(cell, a, b)) for slot in slots for cell, a, b, local in parts]

    # Local work

    def _derives(self) -> None:
        """Weights that no one sends, from the master of the same place: wanted, not held here before, derivable."""
        for number, table in enumerate(self.transition.diff.tables):
            cells = self._cells(number)
            for place in self._places():
                own = table.derived.get(place)
                if own is None:
                    continue
                derivable = Intervals(table.cell[own], table.start[own], table.stop[own])
                for _, held in self.storages.holding(number, place, old=True):
                    derivable = derivable.subtract(held)
                for local, wanted in self.storages.holding(number, place, old=False):
                    if local.has_master:
                        region = self.storages.without_kept(local, "weight", cells, wanted).intersect(derivable)
                        self._copy(self.derives, local, "weight", local, "master", cells, region)

    def _local_copies(self) -> None:
        """New storages from old ones of the same place, and a second new state set of a place from the first."""
        for number, table in enumerate(self.transition.diff.tables):
            cells = self._cells(number)
            for place in self._places():
                sources = self.storages.holding(number, place, old=True)
                targets = self.storages.holding(number, place, old=False)
                for slot in table.slots:
                    for at, (local, wanted) in enumerate(targets):
                        rest = self.storages.without_kept(local, slot, cells, wanted)
                        for waves, candidates in ((self.copies, sources), (self.derives, targets[:at])):
                            for source, held in candidates:
                                common = rest.intersect(held)
                                self._copy(waves, local, slot, source, slot, cells, common)
                                rest = rest.subtract(common)

    def _copy(
        self,
        waves: list[list[LocalCopy]],
        target: LocalSet,
        slot: str,
        source: LocalSet,
        source_slot: str,
        cells: Cells,
        region: Intervals,
    ) -> None:
        """One copy per wave: the first in which the target is there and the source complete. Old storages are so from
        the start."""
        acquire, storages = self.transition.schedule.acquire, self.storages
        by_wave: dict[int, list[int]] = {}
        for row, tensor in enumerate(cells.tensor[region.cell].tolist()):
            target_key = storages.keys[target.ids[slot, tensor]]
            source_id = source.ids[source_slot, tensor]
            source_key = storages.keys[source_id]
            wave = acquire.get((self.device, *target_key), 0)
            if storages.specs[source_id].role == "new":
                wave = max(wave, acquire.get((self.device, *source_key), 0), self.ready.get(source_key, 0))
            by_wave.setdefault(wave, []).append(row)
        for wave, rows in sorted(by_wave.items()):
            part = Intervals(region.cell[rows], region.start[rows], region.stop[rows])
            cast = slot != source_slot
            copy = LocalCopy(
                src=self._there(source.blocks(source_slot, cells, part), wave),
                dst=target.blocks(slot, cells, part),
                cast=cast,
            )
            waves[wave].append(copy)
            if cast:  # whoever copies these weights waits for them
                for storage in np.unique(copy.dst.table[:, 0]).tolist():
                    self._written(storages.keys[storage], wave)


def _one(cell: int, start: int, stop: int) -> Intervals:
    return Intervals(*(np.array([value], dtype=np.int64) for value in (cell, start, stop)))


def _join(blocks: Sequence[Blocks]) -> Blocks:
    tables = [b.table for b in blocks if len(b)]
    return Blocks(np.concatenate(tables)) if tables else NO_BLOCKS
