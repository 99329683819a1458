"""One document with everything that its plans say: what all checks look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nereus.ir.plan import Plan
from nereus.verify.copies import SlotKind, StateCopy, as_stated, state_copies
from nereus.verify.document import Document
from nereus.verify.finding import Violation
from nereus.verify.ground import Ground, Holdings
from nereus.verify.segments import BoolArray, IntArray, Segments
from nereus.verify.world import World, build_world


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What moves carry: (move, lo, hi), elements as the ground numbers them, in the order of the move's region."""

    move: IntArray
    lo: IntArray
    hi: IntArray

    def of_moves(self, chosen: BoolArray) -> Rows:
        """``chosen``: a mask over all moves."""
        keep = chosen[self.move]
        return Rows(self.move[keep], self.lo[keep], self.hi[keep])


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """All moves of one slot: a table of the document and the slot's number in it; ``carries`` masks the moves."""

    model: str
    kind: SlotKind
    table: int
    carries: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Wants:
    """Of one slot, all places on one line (``Holdings.line``): wanted, there, made there, and what must come."""

    wanted: Segments
    held: Segments
    derived: Segments
    need: Segments


class Case:
    """Raises Violation where the document is about other devices or other tensors than its plans."""

    def __init__(self, document: Document, old: Plan, new: Plan) -> None:
        self.document, self.old_plan, self.new_plan = document, old, new
        self.world: World = build_world(old, new, document.devices)
        old_copies, new_copies = (as_stated(state_copies(plan, self.world), document.same) for plan in (old, new))
        self.grounds: dict[str, Ground] = {}
        by_model: dict[str, StateCopy] = {}
        for copy in (*old_copies, *new_copies):
            known = by_model.setdefault(copy.model, copy)
            if known.tensors != copy.tensors:
                raise Violation(f"{copy.model} has other tensors in the new plan than in the old one")
        for table in document.tables:
            if table.model not in by_model:
                raise Violation(f"the document moves {table.model}, of which neither plan keeps state")
            grid = document.grids[table.cells]
            if table.model not in self.grounds:
                self.grounds[table.model] = Ground(table.model, grid, by_model[table.model].tensors)
            elif self.grounds[table.model].grid is not grid:
                raise Violation(f"{table.model} is cut in two ways")
        self.old = Holdings(old_copies, self.world, self.grounds)
        self.new = Holdings(new_copies, self.world, self.grounds)
        self._wants: dict[tuple[object, ...], Wants] = {}

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        found: dict[tuple[str, SlotKind], Stream] = {}
        moves = self.document.moves
        for number, table in enumerate(self.document.tables):
            for slot, (name, dtype) in enumerate(zip(table.slots, table.dtypes, strict=True)):
                key = (table.model, SlotKind(name, dtype))
                if key in found:
                    raise Violation(f"{table.model} {name} {dtype} is in two tables")
                carries = np.flatnonzero((moves.table == number) & moves.has_slot(slot))
                found[key] = Stream(*key, number, carries)
        return tuple(found.values())

    @cached_property
    def slot_kinds(self) -> tuple[tuple[str, SlotKind], ...]:
        """Slots that the new plan wants and the old one had somewhere; others the framework makes."""
        held = {(copy.model, kind) for copy in self.old.copies for kind in copy.slots}
        wanted = dict.fromkeys((copy.model, kind) for copy in self.new.copies for kind in copy.slots)
        return tuple(key for key in wanted if key in held)

    @cached_property
    def rows(self) -> Rows:
        """Of all moves, tables of one grid together."""
        document = self.document
        moves, regions = document.moves, document.regions
        first = [self.grounds[table.model].first for table in document.tables]
        size = [self.grounds[table.model].grid.numel for table in document.tables]
        move, row = regions.rows_of(moves.region)
        if len(np.unique(move)) != len(moves):
            raise Violation("a move has an empty region")
        lo, hi = regions.start[row].copy(), regions.stop[row].copy()
        cell, table_of_row = regions.cell[row], moves.table[move]
        for number in range(len(document.tables)):
            mine = np.flatnonzero(table_of_row == number)
            bad = (lo[mine] < 0) | (hi[mine] <= lo[mine]) | (hi[mine] > size[number][cell[mine]])
            if bool(bad.any()):
                at = mine[np.flatnonzero(bad)[0]]
                raise Violation(f"move {int(move[at])} has a region [{lo[at]}, {hi[at]}) that is not inside its cell")
            lo[mine] += first[number][cell[mine]]
            hi[mine] += first[number][cell[mine]]
        inside = np.flatnonzero((move[1:] == move[:-1]) & (lo[1:] < hi[:-1]))
        if len(inside):
            raise Violation(f"move {int(move[inside[0]])} has a region that is not in ascending order")
        return Rows(move, lo, hi)

    @cached_property
    def numel(self) -> IntArray:
        """Elements of every move, of one slot."""
        rows = self.rows
        ends = np.cumsum(rows.hi - rows.lo)
        last = ends[np.searchsorted(rows.move, np.arange(len(self.document.moves)), side="right") - 1]
        return np.diff(np.concatenate((np.zeros(1, dtype=np.int64), last)))

    @cached_property
    def element_bytes(self) -> IntArray:
        """Bytes of one element of every move, all its slots together."""
        moves, tables = self.document.moves, self.document.tables
        found = np.zeros(len(moves), dtype=np.int64)
        for number, table in enumerate(tables):
            mine = moves.table == number
            for slot, width in enumerate(table.slot_bytes):
                found[mine & moves.has_slot(slot)] += width
        return found

    def wants(self, model: str, kind: SlotKind) -> Wants:
        """Slots that are spread alike everywhere are worked out once."""
        derives = kind.name == "weight"
        sides = [
            (side, *holdings.alike(copy, kind.name), copy.slots[kind])
            for side, holdings in enumerate((self.old, self.new))
            for copy in holdings.of_model(model)
            if kind in copy.slots
        ]
        key = (model, derives, kind.dtype if derives else "", *sides)
        if key not in self._wants:
            wanted, held = self.new.line(model, kind), self.old.line(model, kind)
            lacking = wanted.minus(held)
            derived = lacking.common(self._derivable(model, kind))
            self._wants[key] = Wants(wanted, held, derived, lacking.minus(derived))
        return self._wants[key]

    def _derivable(self, model: str, kind: SlotKind) -> Segments:
        """Weights that a copy rounds from its own masters, where masters exist: ones that nothing held before are
        themselves made from the weights."""
        empty = np.zeros(0, dtype=np.int64)
        master = SlotKind("master", "fp32")
        if kind.name != "weight" or not any(master in copy.slots for copy in self.old.of_model(model)):
            return Segments(empty, empty)
        makers = tuple(c for c in self.new.of_model(model) if kind in c.slots and c.derives)
        return self.new.line(model, master, only=makers)

    def distinct(self) -> Iterator[tuple[Stream, Wants, int]]:
        """(stream, wants, how many streams it stands for): streams with the same moves and wants are judged once."""
        groups: dict[tuple[object, ...], list[Stream]] = {}
        for stream in self.streams:
            wants = self.wants(stream.model, stream.kind)
            groups.setdefault((id(wants), stream.carries.tobytes()), []).append(stream)
        for members in groups.values():
            yield members[0], self.wants(members[0].model, members[0].kind), len(members)

    def where(self, stream: Stream, point: int) -> str:
        """A point of the line in words."""
        ground = self.grounds[stream.model]
        place, element = divmod(point, ground.stride)
        return f"{self.world.place_name(place)}: {ground.name(element)} {stream.kind.name}"
