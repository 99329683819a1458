"""check: an independent verifier of a transition. It shares no code with route, schedule or tight.

Per atom table it lays out, place by place, what is wanted, what is there already or derived, and what arrives, and
sweeps once over the sorted borders. The DAG is checked by its numbering (every edge goes up), memory by a
maximum-weight closure per space: the worst state that any timing can reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

from nereus.ir.columns import runs
from nereus.ir.holdings import Topology
from nereus.ir.layout import BoolArray, IntArray
from nereus.ir.moves import Regions
from nereus.ir.schedule import Schedule
from nereus.ir.transition import INTER, LINK_NUMBER, LOCAL, Move
from nereus.passes.atoms import AtomTable
from nereus.passes.dag import MOVE, VERIFY, Dag
from nereus.passes.diff import Diff
from nereus.passes.lists import Lists, combinations, concatenated
from nereus.passes.tokens import most_by_tokens

#: Memory spaces whose worst state is found by a minimum cut; where there are more, an assignment of tokens proves all
#: and the cuts are a sample.
CLOSURES = 16
#: Slices of moves that are recounted in one go.
SLICES_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One property: what was checked, whether it holds, and the evidence or the counterexample."""

    name: str
    holds: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class _Parts:
    """Region ``region[i]`` of ``regions`` is at ``place[i]``."""

    place: IntArray
    region: IntArray
    regions: Regions

    def only(self, chosen: BoolArray) -> _Parts:
        """At the ``chosen`` places (a mask)."""
        kept = chosen[self.place]
        return _Parts(self.place[kept], self.region[kept], self.regions)

    def rows(self) -> _Rows:
        at, row = self.regions.rows(self.region)
        regions = self.regions
        return _Rows(self.place[at], regions.cell[row], regions.start[row], regions.stop[row])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Intervals with the place where they are: parallel columns."""

    place: IntArray
    cell: IntArray
    start: IntArray
    stop: IntArray

    def keys(self, num_cells: int, scale: int) -> tuple[IntArray, IntArray]:
        base = (self.place * num_cells + self.cell) * scale
        return base + self.start, base + self.stop


def check_coverage(diff: Diff, schedule: Schedule) -> Finding:
    """Every wanted element of every place is there, derived, or arrives exactly once; nothing else arrives."""
    total = 0
    for number, table in enumerate(diff.tables):
        geometry = diff.geometries[diff.geometry_of[number]]
        num_cells, scale = geometry.cells.num_cells, int(geometry.cells.numel.max()) + 1
        assert len(diff.topology.devices) * 2 * num_cells * scale < 2**63, "keys would overflow"
        wanted = _group_parts(table, new=True, topology=diff.topology)
        present = _group_parts(table, new=False, topology=diff.topology)
        derived = _derived_parts(table)
        num_wanted = int(wanted.regions.numel[wanted.region].sum())
        moves = schedule.moves
        of_table = moves.table == number
        for slot in range(len(table.slots)):
            mine = np.flatnonzero(of_table & ((moves.slots < 0) | (moves.slots >> slot & 1 > 0)))
            arriving = _Parts(moves.dst[mine], moves.region[mine], moves.regions)
            kinds = _kinds_of_place((wanted, present, derived, arriving), 2 * diff.topology.num_devices)
            # One of all places that have the very same regions: what holds for it holds for them.
            one_of = np.zeros(len(kinds), dtype=bool)
            one_of[np.unique(kinds, return_index=True)[1]] = True
            rows = [parts.only(one_of).rows() for parts in (wanted, present, derived, arriving)]
            bad = _sweep(rows[0], (rows[1], rows[2]), rows[3], num_cells, scale)
            if bad is not None:
                place, cell, at = bad
                tensor = geometry.cells.tensors[int(geometry.cells.tensor[cell])].name
                return Finding(
                    name="every element once",
                    holds=False,
                    evidence=f"{diff.topology.place_name(place)}: {table.model} {tensor} {table.slots[slot]}, "
                    f"cell {cell} offset {at}: not delivered exactly once",
                )
            total += num_wanted
            if bool((moves.slots[mine] < 0).all()):
                total += num_wanted * (len(table.slots) - 1)
                break  # all slots travel together: one sweep stands for them
    return Finding(
        name="every element once", holds=True, evidence=f"{total:,} wanted elements, each accounted for once"
    )


def _kinds_of_place(signals: Sequence[_Parts], num_places: int) -> IntArray:
    """A number per place, equal for places that have the very same regions in every signal."""
    place = np.concatenate([parts.place for parts in signals])
    offsets = np.cumsum([0, *(len(parts.regions) for parts in signals)])
    region = np.concatenate([parts.region + at for parts, at in zip(signals, offsets.tolist(), strict=False)])
    order = np.lexsort((region, place))
    first = np.searchsorted(place[order], np.arange(num_places + 1))
    return combinations(Lists(first, region[order]))[0]


def _group_parts(table: AtomTable, *, new: bool, topology: Topology) -> _Parts:
    """What every group has, at the places of its members."""
    groups = table.new_groups if new else table.old_groups
    of_class = Lists.of_tuples(table.class_wanters if new else table.class_holders)
    # Intervals of every group, ascending.
    interval, group = of_class.of(table.cls)
    order = np.argsort(group, kind="stable")
    rows = interval[order]
    first = np.searchsorted(group[order], np.arange(len(groups) + 1))
    regions = Regions(first, table.cell[rows], table.start[rows], table.stop[rows])
    places = Lists.of_tuples([entry.places for entry in groups])
    place, number = places.item, places.owner
    if not new:
        alive = np.array(topology.alive, dtype=bool)[topology.node_of[place % topology.num_devices]]
        place, number = place[alive], number[alive]
    return _Parts(place, number, regions)


def _derived_parts(table: AtomTable) -> _Parts:
    row = concatenated(table.derived.values())
    first = np.cumsum([0, *map(len, table.derived.values())], dtype=np.int64)
    place = np.fromiter(table.derived, dtype=np.int64, count=len(table.derived))
    return _Parts(place, np.arange(len(place)), Regions(first, table.cell[row], table.start[row], table.stop[row]))


def _sweep(
    wanted: _Rows, there: tuple[_Rows, ...], arriving: _Rows, num_cells: int, scale: int
) -> tuple[int, int, int] | None:
    """First (place, cell, offset) where the count is wrong, or None."""
    signals = (wanted, *there, arriving)
    keys = [rows.keys(num_cells, scale) for rows in signals]
    points = np.concatenate([k for pair in keys for k in pair])
    order = np.argsort(points, kind="stable")
    points = points[order]
    counts = []
    base = 0
    for lo, hi in keys:
        step = np.zeros(len(points), dtype=np.int8)
        weight = np.zeros(len(points), dtype=np.int8)
        weight[base : base + len(lo)] = 1
        weight[base + len(lo) : base + len(lo) + len(hi)] = -1
        step = weight[order]
        counts.append(np.cumsum(step, dtype=np.int32))
        base += len(lo) + len(hi)
    is_last = np.ones(len(points), dtype=bool)
    is_last[:-1] = points[1:] != points[:-1]
    want = counts[0][is_last] > 0
    have = np.zeros_like(want)
    for count in counts[1:-1]:
        have |= count[is_last] > 0
    wrong = np.flatnonzero(counts[-1][is_last] != (want & ~have))
    if not len(wrong):
        return None
    point = int(points[is_last][wrong[0]])
    place_cell, offset = divmod(point, scale)
    place, cell = divmod(place_cell, num_cells)
    return place, cell, offset


def check_sources(diff: Diff, schedule: Schedule) -> Finding:
    """Every move reads what its source holds in the old plan (on a living node) or what moves of earlier waves
    brought there."""
    moves = schedule.moves
    relayed = moves.after_counts > 0
    for number, table in enumerate(diff.tables):
        geometry = diff.geometries[diff.geometry_of[number]]
        num_cells, scale = geometry.cells.num_cells, int(geometry.cells.numel.max()) + 1
        first = np.flatnonzero((moves.table == number) & ~relayed)
        held = _group_parts(table, new=False, topology=diff.topology)
        source = moves.src[first]
        if schedule.staged:
            source = np.array([_held_at(diff, schedule, i, moves[i]) for i in first.tolist()], dtype=np.int64)
        gone = first[source < 0]
        if len(gone):
            what = f"move {int(gone[0])} reads where its storage is not, or not yet"
            return Finding(name="sources", holds=False, evidence=what)
        # Places that hold the very same regions, and one region that is read from them: one of each is looked at.
        kinds = _kinds_of_place((held,), 2 * diff.topology.num_devices)
        one = np.unique(kinds[source] * len(moves.regions) + moves.region[first], return_index=True)[1]
        reads = _Parts(source[one], moves.region[first[one]], moves.regions)
        read_at = np.zeros(len(kinds), dtype=bool)
        read_at[reads.place] = True
        bad = _outside(reads.rows(), held.only(read_at).rows(), num_cells, scale)
        if bad is not None:
            return _source_finding(diff, table, bad, num_cells, scale)
        relay, before = moves.relays
        mine = moves.table[relay] == number
        relay, before = relay[mine], before[mine]
        early = relay[~_later(schedule, before, relay) | (moves.dst[before] != moves.src[relay])]
        if len(early):
            return Finding(name="sources", holds=False, evidence=f"move {int(early[0])} relays before it received")
        # What a relay carries against what its own predecessors brought; its number stands for the place. One that
        # carries on the very region that it received is right as it is.
        whole = (moves.after_counts[relay] == 1) & (moves.region[before] == moves.region[relay])
        relay, before = relay[~whole], before[~whole]
        carried = np.unique(relay)
        received = _Parts(relay, moves.region[before], moves.regions).rows()
        bad = _outside(_Parts(carried, moves.region[carried], moves.regions).rows(), received, num_cells, scale)
        if bad is not None:
            return Finding(
                name="sources", holds=False, evidence=f"move {bad // scale // num_cells} relays more than it received"
            )
    return Finding(
        name="sources",
        holds=True,
        evidence=f"{len(moves):,} moves read held or verified bytes, {int(relayed.sum()):,} of them relays",
    )


def _held_at(diff: Diff, schedule: Schedule, number: int, move: Move) -> int:
    """The place at which the old plan holds what a move reads: its source, or the GPU whose storage went to the
    source's host memory in an earlier wave (and stays there until the move is over); -1 where that is not so."""
    num_devices, table = diff.topology.num_devices, diff.tables[move.table]
    if not schedule.staged or move.slots is None:
        return move.src
    cells = diff.geometries[diff.geometry_of[move.table]].cells
    device = move.src % num_devices
    first, last = int(schedule.wave[number]), int(schedule.wave[number] + schedule.slices[number] - 1)
    there = [
        (waves, schedule.release[key])
        for key, waves in schedule.staged.items()
        if key[0] == device
        and key[3] in cells.tensor[move.intervals.cell]
        and key[2] in [table.slots[i] for i in move.slots]
        and any(s.stage == key[1] for s in diff.old.sets if s.model == table.model)
    ]
    if not there:
        return move.src
    if move.src < num_devices:
        return move.src if all(last <= gone for _, gone in there) else -1
    return device if all(begin < first and last <= end for (begin, end), _ in there) else -1


def _later(schedule: Schedule, before: IntArray, after: IntArray) -> BoolArray:
    """Whether each element of the moves ``after`` travels in a later wave than in those of ``before``. Slices of equal
    intervals in equal numbers are the same elements, one by one; otherwise all of the first must be there."""
    wave, slices, moves = schedule.wave, schedule.slices, schedule.moves
    first, then = moves.region[before], moves.region[after]
    same = (slices[before] == slices[after]) & (first == then)
    for at in np.flatnonzero((slices[before] == slices[after]) & (slices[before] > 1) & (first != then)).tolist():
        one, other = moves.regions[int(first[at])], moves.regions[int(then[at])]
        columns = ((one.cell, other.cell), (one.start, other.start), (one.stop, other.stop))
        same[at] = all(np.array_equal(a, b) for a, b in columns)
    later: BoolArray = wave[after] > wave[before] + np.where(same, 0, slices[before] - 1)
    return later


def _source_finding(diff: Diff, table: AtomTable, point: int, num_cells: int, scale: int) -> Finding:
    place, cell = divmod(point // scale, num_cells)
    return Finding(
        name="sources",
        holds=False,
        evidence=f"{diff.topology.place_name(place)} does not hold {table.model} cell {cell} that it should send",
    )


def _outside(rows: _Rows, held: _Rows, num_cells: int, scale: int) -> int | None:
    """A point of ``rows`` that no interval of ``held`` covers, or None. Touching held intervals are joined first."""
    if not len(rows.cell):
        return None
    lo, hi = held.keys(num_cells, scale)
    order = np.argsort(lo, kind="stable")
    lo, hi = lo[order], np.maximum.accumulate(hi[order]) if len(hi) else hi
    if not len(lo):
        return int(rows.keys(num_cells, scale)[0][0])
    fresh = np.ones(len(lo), dtype=bool)
    fresh[1:] = lo[1:] > hi[:-1]
    starts = lo[fresh]
    stops = hi[np.concatenate((np.flatnonzero(fresh)[1:], [len(lo)])) - 1]
    begin, end = rows.keys(num_cells, scale)
    at = np.searchsorted(starts, begin, side="right") - 1
    bad = np.flatnonzero((at < 0) | (end > stops[np.maximum(at, 0)]))
    return int(begin[bad[0]]) if len(bad) else None


def check_order(dag: Dag, schedule: Schedule) -> Finding:
    """One total order: the numbering. Every edge goes up, so the earliest unfinished operation can always proceed;
    verify follows move; windows hold; every move waits for nothing of its own or a later wave."""
    every = np.concatenate((dag.edges, dag.slice_edges))
    if not bool((every[:, 0] < every[:, 1]).all()):
        return Finding(name="order", holds=False, evidence="an edge goes down: the order has a cycle")
    waves = dag.wave[dag.edges]
    timed = (waves >= 0).all(axis=1)
    if bool((waves[timed][:, 0] > waves[timed][:, 1]).any()):
        return Finding(name="order", holds=False, evidence="an operation waits for one of a later wave")
    num_moves = int((dag.kind == MOVE).sum())
    if num_moves != len(schedule.moves) or int((dag.kind == VERIFY).sum()) != num_moves:
        return Finding(name="order", holds=False, evidence="a move without its verify")
    return Finding(
        name="order", holds=True, evidence=f"acyclic: {dag.num_ops:,} operations, {dag.num_edges:,} edges, all upward"
    )


def check_windows(schedule: Schedule, num_devices: int, staging_bytes: IntArray) -> Finding:
    """No device posts more per direction and wave than a window (one storage larger than it travels alone), nor more
    both ways together than the staging that its memory was planned with."""
    moves = schedule.moves
    crossing = np.flatnonzero(moves.link != LINK_NUMBER[LOCAL])
    width = moves.num_bytes // np.maximum(moves.numel, 1)
    waves = schedule.num_waves + 1
    posted = [np.zeros(num_devices * waves) for _ in range(2)]
    for mine in np.array_split(crossing, 1 + int(schedule.slices.sum()) // SLICES_AT_ONCE):
        at, part = runs(schedule.slices[mine])
        row = mine[at]
        #: Elements sent before and with a slice; slices of a move follow each other.
        sent = moves.numel[row] * (part + 1) // schedule.slices[row]
        size = (sent - np.where(part == 0, 0, np.roll(sent, 1))) * width[row]
        for load, ends in zip(posted, (moves.src, moves.dst), strict=True):
            # Whole numbers below 2^53, so sums of floats are exact.
            key = (ends[row] % num_devices) * waves + schedule.wave[row] + part
            load += np.bincount(key, weights=size, minlength=len(load))
    most = [load.astype(np.int64).reshape(num_devices, waves).max(axis=1) for load in posted]
    worst = max(int(column.max(initial=0)) for column in most)
    limit = max(schedule.window_bytes, int(width.max(initial=0)))
    need = most[0] + most[1]
    over = np.flatnonzero(need > staging_bytes)
    if len(over):
        first = int(over[0])
        posts, staging = int(need[first]), int(staging_bytes[first])
        evidence = f"device {first} posts {posts:,} bytes in a wave with {staging:,} of staging"
        return Finding(name="windows", holds=False, evidence=evidence)
    return Finding(
        name="windows",
        holds=worst <= limit,
        evidence=f"at most {worst:,} bytes posted per device, direction and wave (limit {limit:,})",
    )


def check_bytes(diff: Diff, schedule: Schedule, bound_moved: int) -> Finding:
    """Moves carry what the demands need and no byte more, recounted from the intervals."""
    moves = schedule.moves
    widths = np.zeros(len(moves), dtype=np.int64)
    for number, table in enumerate(diff.tables):
        of_table = moves.table == number
        for slot, slot_bytes in enumerate(table.slot_bytes):
            widths[of_table & ((moves.slots < 0) | (moves.slots >> slot & 1 > 0))] += slot_bytes
    counted = moves.numel * widths
    bad = np.flatnonzero((counted != moves.num_bytes) | (moves.numel == 0))
    if len(bad):
        worst = int(bad[0])
        evidence = f"move {worst} says {int(moves.num_bytes[worst])} bytes and has {int(counted[worst])}"
        return Finding(name="bytes", holds=False, evidence=evidence)
    node_of, num_devices = diff.topology.node_of, diff.topology.num_devices
    leaves = node_of[moves.src % num_devices] != node_of[moves.dst % num_devices]
    if bool((leaves != (moves.link == LINK_NUMBER[INTER])).any()):
        return Finding(name="bytes", holds=False, evidence="a move's link class disagrees with its nodes")
    moved = int(moves.num_bytes[moves.link != LINK_NUMBER[LOCAL]].sum())
    return Finding(
        name="bytes", holds=moved >= bound_moved, evidence=f"{moved:,} bytes move, at least {bound_moved:,} must"
    )


def worst_memory(dag: Dag, space: int, base: int) -> int:
    """Most bytes that ``space`` can hold on any timing: ``base`` + the maximum-weight closure of started acquires and
    unfinished releases.

    A state is a set of started and a set of finished operations: finished(p) is needed for started(o) along every
    edge, and started(o) for finished(o). Started acquires add, finished releases subtract; the maximum is one minimum
    cut.
    """
    acquires = np.flatnonzero((dag.space == space) & (dag.acquired > 0))
    releases = np.flatnonzero((dag.space == space) & (dag.released > 0))
    gains = int(dag.acquired[acquires].sum())
    if not len(acquires) or not len(releases):
        return base + gains
    count = dag.num_ops
    source, sink = 2 * count, 2 * count + 1  # node o: started, node count + o: finished
    before, after = dag.edges[:, 0], dag.edges[:, 1]
    infinite = gains + 1
    tails = np.concatenate((after, np.arange(count) + count, np.full(len(acquires), source), releases + count))
    heads = np.concatenate((before + count, np.arange(count), acquires, np.full(len(releases), sink)))
    capacity = np.concatenate(
        (
            np.full(len(before) + count, infinite, dtype=np.int64),
            dag.acquired[acquires],
            dag.released[releases],
        )
    )
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tails.astype(np.int32), heads.astype(np.int32), capacity)
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, status
    return base + gains - int(flow.optimal_flow())


def check_memory(dag: Dag, base: IntArray, capacity: IntArray, topology: Topology) -> tuple[Finding, IntArray]:
    """Worst state per space on any timing. ``base``: bytes there when the transfer starts (state, processes,
    staging)."""
    acquired = np.zeros_like(base)
    touched = dag.space >= 0
    np.add.at(acquired, dag.space[touched], dag.acquired[touched])
    first_release = int(np.flatnonzero(dag.released > 0)[0]) if bool((dag.released > 0).any()) else dag.num_ops
    last_acquire = int(np.flatnonzero(dag.acquired > 0)[-1]) if bool((dag.acquired > 0).any()) else -1
    worst = base + acquired
    how = "nothing is released before everything was acquired"
    if first_release < last_acquire:
        spaces = np.flatnonzero(acquired).tolist()
        most = most_by_tokens(dag, len(base)) if len(spaces) > CLOSURES else None
        if most is not None:
            worst = base + most
            spaces = spaces[:: -(-len(spaces) // CLOSURES)]
        how = f"maximum-weight closure of {len(spaces)} spaces" + (", tokens in all" if most is not None else "")
        for space in spaces:
            closure = worst_memory(dag, space, int(base[space]))
            assert most is None or closure <= worst[space], "two proofs disagree"
            worst[space] = closure
    over = np.flatnonzero(worst > capacity)
    name = "memory"
    if len(over):
        space = int(over[np.argmax((worst - capacity)[over])])
        return Finding(
            name=name,
            holds=False,
            evidence=f"{_space_name(topology, space)} may hold {int(worst[space]):,} of {int(capacity[space]):,} bytes",
        ), worst
    return Finding(name=name, holds=True, evidence=f"holds in every order ({how})"), worst


def _space_name(topology: Topology, space: int) -> str:
    if space < topology.num_devices:
        return str(topology.devices[space])
    return f"{topology.nodes[space - topology.num_devices].name}.host"
