"""Follows every element of a transition through a run: each wanted one delivered once, from a place that has it then.

Dense: one number per (element, slot) and place, so for small models. It shares nothing with the passes but the diff
(what each place holds, and lacks) and the moves under judgement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.intervals import Intervals
from nereus.ir.layout import IntArray
from nereus.ir.schedule import StorageKey
from nereus.ir.transition import Move
from nereus.passes.atoms import AtomTable
from nereus.passes.compiled import Transition
from nereus.sim.from_transition import TransitionJob
from nereus.sim.outcome import Outcome

#: Elements x slots of one atom table beyond which following each is refused.
MAX_ELEMENTS = 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """``faults``: what no timing can make right. ``finished_before_start``: pairs of operations of which the first must
    be over when the second starts (who relays has received; a storage is there when something arrives, and is released
    when its readers are done)."""

    faults: tuple[str, ...]
    finished_before_start: IntArray
    messages: IntArray
    delivered_bytes: int

    def problems(self, outcome: Outcome, job: TransitionJob) -> list[str]:
        """What went wrong in a run; empty where every byte arrived once."""
        found = list(self.faults)
        if outcome.deadlock is not None:
            found.append(outcome.deadlock.describe(job.job))
        for over in outcome.overflows[:3]:
            name = job.job.name[over.op] if over.op >= 0 else "the start"
            found.append(f"{name} overflows space {over.space} by {over.excess_bytes} bytes at {over.time_s:.6g} s")
        missing = self.messages[np.isnan(outcome.finish_s[self.messages])]
        found += [f"{job.job.name[op]} never arrived" for op in missing[:3].tolist()]
        first, second = self.finished_before_start[:, 0], self.finished_before_start[:, 1]
        early = ~(outcome.finish_s[first] <= outcome.start_s[second]) & ~np.isnan(outcome.start_s[second])
        for a, b in self.finished_before_start[early][:3].tolist():
            found.append(f"{job.job.name[b]} started before {job.job.name[a]} was over")
        return found


def follow(transition: Transition, job: TransitionJob) -> Ledger:
    """Everything about a schedule that does not depend on timing, and what to look at in each run.

    Raises ValueError where the models are too large to follow every element.
    """
    book = _Book(transition, job)
    book.arrivals()
    book.relays()
    book.wants()
    if transition.schedule.mode == "tight":
        book.lifetimes()
    pairs = np.array(sorted(book.pairs), dtype=np.int64).reshape(-1, 2)
    return Ledger(
        faults=tuple(book.faults),
        finished_before_start=pairs,
        messages=np.unique(job.rows[:, 2]),
        delivered_bytes=book.delivered_bytes,
    )


class _Book:
    def __init__(self, transition: Transition, job: TransitionJob) -> None:
        self.transition, self.job = transition, job
        self.faults: list[str] = []
        self.pairs: set[tuple[int, int]] = set()
        self.delivered_bytes = 0
        diff = transition.diff
        self.offsets: list[IntArray] = []  # table -> number of a cell's first element
        for number, table in enumerate(diff.tables):
            cells = diff.geometries[diff.geometry_of[number]].cells
            ends = np.cumsum(cells.numel)
            if int(ends[-1]) * len(table.slots) > MAX_ELEMENTS:
                raise ValueError(f"{table.model}: {int(ends[-1]):,} elements are too many to follow one by one")
            self.offsets.append(np.concatenate(([0], ends)))
        #: (table, place) -> [slot, element]: row of the job that brings it, -1 nobody.
        self.by_row: dict[tuple[int, int], IntArray] = {}
        self.elements: list[IntArray] = []  # per row

    def arrivals(self) -> None:
        moves = self.transition.schedule.moves
        cut: dict[int, list[IntArray]] = {}
        slices = np.bincount(self.job.rows[:, 0], minlength=len(moves)).tolist()
        for row, (number, part, _) in enumerate(self.job.rows.tolist()):
            move = moves[number]
            if number not in cut:
                all_of = self.numbers(move.table, move.intervals)
                borders = [len(all_of) * k // slices[number] for k in range(1, slices[number])]
                cut[number] = np.split(all_of, borders)
            elements = cut[number][part]
            self.elements.append(elements)
            at = self.brought(move.table, move.dst)
            for slot in self.slots(move):
                twice = int((at[slot, elements] >= 0).sum())
                if twice:
                    self.faults.append(f"move {number} brings {twice} elements to place {move.dst} a second time")
                at[slot, elements] = row

    def relays(self) -> None:
        """Sources hold what they send in the old plan, or have received it by then."""
        moves, rows = self.transition.schedule.moves, self.job.rows
        for row, (number, part, op) in enumerate(rows.tolist()):
            move, elements = moves[number], self.elements[row]
            held = self.held(move.table, move.src)
            lacking = elements[~held[elements]]
            if not len(lacking):
                continue
            for slot in self.slots(move):
                sources = np.unique(self.brought(move.table, move.src)[slot, lacking])
                if sources[0] < 0:
                    self.faults.append(f"slice {part} of move {number} sends what place {move.src} never has")
                self.pairs.update((int(rows[source, 2]), op) for source in sources.tolist() if source >= 0)

    def wants(self) -> None:
        """What each place lacks arrives, and nothing else."""
        diff = self.transition.diff
        wanted: dict[tuple[int, int], np.ndarray[tuple[int, ...], np.dtype[np.bool_]]] = {}
        for demand in diff.demands:
            table = diff.tables[demand.table]
            chosen = Intervals(
                table.cell[demand.intervals], table.start[demand.intervals], table.stop[demand.intervals]
            )
            elements = self.numbers(demand.table, chosen)
            for place in demand.wanters:
                key = (demand.table, place)
                mask = wanted.setdefault(key, np.zeros(self.size(demand.table), dtype=bool))
                mask[elements] = True
        for key in dict.fromkeys((*wanted, *self.by_row)):
            table = diff.tables[key[0]]
            mask = wanted.get(key, np.zeros(self.size(key[0]), dtype=bool))
            at = self.brought(*key) >= 0
            lost, extra = int((mask & ~at).sum()), int((at & ~mask).sum())
            if lost:
                self.faults.append(f"{lost} elements of {table.model} {table.slots} never arrive at place {key[1]}")
            if extra:
                self.faults.append(f"{extra} elements of {table.model} {table.slots} arrive at place {key[1]} unasked")
            self.delivered_bytes += int((at.sum(axis=1) * np.array(table.slot_bytes)).sum())

    def lifetimes(self) -> None:
        """Storages are there when something arrives in them, and until what is read from them has arrived."""
        rows = self.job.rows
        for row, (number, _, op) in enumerate(rows.tolist()):
            move = self.transition.schedule.moves[number]
            geometry = self.transition.diff.geometries[self.transition.diff.geometry_of[move.table]]
            cell = np.searchsorted(self.offsets[move.table], self.elements[row], side="right") - 1
            tensors = np.unique(geometry.cells.tensor[cell]).tolist()
            for tensor in tensors:
                for key in self.keys(move, move.dst, tensor, new=True):
                    if key in self.job.acquires:
                        self.pairs.add((self.job.acquires[key], op))
                for key in self.keys(move, move.src, tensor, new=False):
                    if key in self.job.releases and not move.after:  # a relay reads what it has received
                        self.pairs.add((op, self.job.releases[key]))

    # -- small things -------------------------------------------------------------------------------------------------

    def keys(self, move: Move, place: int, tensor: int, *, new: bool) -> list[StorageKey]:
        diff = self.transition.diff
        geometry = diff.geometries[diff.geometry_of[move.table]]
        table, num_devices = diff.tables[move.table], self.transition.topology.num_devices
        storages, device = self.transition.storages, place % self.transition.topology.num_devices
        found = []
        for state_set in geometry.new_sets if new else geometry.old_sets:
            for slot in self.slots(move):
                shares = (storages.new if new else storages.old)[state_set.stage]
                if state_set.slot(table.slots[slot]) is None or device not in shares.rank_of_device:
                    continue
                if shares.in_host(device, table.slots[slot], tensor) == (place >= num_devices):
                    found.append((device, state_set.stage, table.slots[slot], tensor))
        return found

    def slots(self, move: Move) -> tuple[int, ...]:
        count = len(self.transition.diff.tables[move.table].slots)
        return tuple(range(count)) if move.slots is None else move.slots

    def size(self, table: int) -> int:
        return int(self.offsets[table][-1])

    def numbers(self, table: int, intervals: Intervals) -> IntArray:
        first = self.offsets[table][intervals.cell] + intervals.start
        count = intervals.stop - intervals.start
        ends = np.cumsum(count)
        inside = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - count, count)
        found: IntArray = np.repeat(first, count) + inside
        return found

    def brought(self, table: int, place: int) -> IntArray:
        key = (table, place)
        if key not in self.by_row:
            count = len(self.transition.diff.tables[table].slots)
            self.by_row[key] = np.full((count, self.size(table)), -1, dtype=np.int64)
        return self.by_row[key]

    def held(self, number: int, place: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        mask = np.zeros(self.size(number), dtype=bool)
        table: AtomTable = self.transition.diff.tables[number]
        holders = self.transition.diff.holders[number]
        classes = [cls for cls in range(table.num_classes) if place in holders[cls]]
        rows = np.flatnonzero(np.isin(table.cls, classes))
        mask[self.numbers(number, Intervals(table.cell[rows], table.start[rows], table.stop[rows]))] = True
        return mask
