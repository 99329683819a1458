"""check: an independent verifier of a transition. It shares no code with route, schedule or tight.

Per atom table it lays out, place by place, what is wanted, what is there already or derived, and what arrives, and
sweeps once over the sorted borders. The DAG is checked by its numbering (every edge goes up), memory by a
maximum-weight closure per space: the worst state that any timing can reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

from nereus.ir.holdings import Topology
from nereus.ir.intervals import Intervals
from nereus.ir.layout import IntArray
from nereus.ir.schedule import Schedule
from nereus.ir.transition import INTER, LOCAL, Move
from nereus.passes.atoms import AtomTable
from nereus.passes.dag import MOVE, VERIFY, Dag
from nereus.passes.diff import Diff
from nereus.passes.tokens import most_by_tokens

#: Memory spaces whose worst state is found by a minimum cut; where there are more, an assignment of tokens proves all
#: and the cuts are a sample.
CLOSURES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One property: what was checked, whether it holds, and the evidence or the counterexample."""

    name: str
    holds: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class _Rows:
    """Intervals with the place where they are: parallel columns."""

    place: IntArray
    cell: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def gather(cls, parts: Iterable[tuple[int, Intervals]]) -> _Rows:
        """Many moves carry one region: its columns are laid out once and taken from there."""
        known: dict[int, int] = {}
        regions: list[Intervals] = []
        places: list[int] = []
        number: list[int] = []
        for place, region in parts:
            at = known.setdefault(id(region), len(regions))
            if at == len(regions):
                regions.append(region)
            places.append(place)
            number.append(at)
        if not regions:
            empty = np.zeros(0, dtype=np.int64)
            return cls(empty, empty, empty, empty)
        lengths = np.array([len(region.cell) for region in regions], dtype=np.int64)
        counts = lengths[number]
        first = (np.cumsum(lengths) - lengths)[number]
        rows = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        return cls(
            np.repeat(np.array(places, dtype=np.int64), counts),
            np.concatenate([region.cell for region in regions])[rows],
            np.concatenate([region.start for region in regions])[rows],
            np.concatenate([region.stop for region in regions])[rows],
        )

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
        derived = [
            (place, Intervals(table.cell[own], table.start[own], table.stop[own]))
            for place, own in table.derived.items()
        ]
        sizes = {id(region): region.numel for _, region in wanted}
        num_wanted = sum(sizes[id(region)] for _, region in wanted)
        for slot in range(len(table.slots)):
            moves = [m for m in schedule.moves if m.table == number and (m.slots is None or slot in m.slots)]
            arriving = [(m.dst, m.intervals) for m in moves]
            one_of = _representatives((wanted, present, derived, arriving))
            rows = [
                _Rows.gather(part for part in parts if part[0] in one_of)
                for parts in (wanted, present, derived, arriving)
            ]
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
            if all(m.slots is None for m in moves):
                total += num_wanted * (len(table.slots) - 1)
                break  # all slots travel together: one sweep stands for them
    return Finding(
        name="every element once", holds=True, evidence=f"{total:,} wanted elements, each accounted for once"
    )


def _representatives(signals: Sequence[Sequence[tuple[int, Intervals]]]) -> set[int]:
    """One of all places that have the very same regions in every signal: what holds for it holds for them."""
    of_place: dict[int, list[tuple[int, int]]] = {}
    for number, parts in enumerate(signals):
        for place, region in parts:
            of_place.setdefault(place, []).append((number, id(region)))
    return set({tuple(sorted(regions)): place for place, regions in of_place.items()}.values())


def _group_parts(table: AtomTable, *, new: bool, topology: Topology) -> list[tuple[int, Intervals]]:
    """(place, region) of every member of every group; members of a group have one region."""
    groups = table.new_groups if new else table.old_groups
    classes = table.class_wanters if new else table.class_holders
    # Intervals of every group, once; then one copy per place.
    order = np.argsort(table.cls, kind="stable")
    bounds = np.searchsorted(table.cls[order], np.arange(len(classes) + 1))
    of_group: dict[int, list[IntArray]] = {}
    for cls, members in enumerate(classes):
        for group in members:
            of_group.setdefault(group, []).append(order[bounds[cls] : bounds[cls + 1]])
    parts: list[tuple[int, Intervals]] = []
    for group, rows in of_group.items():
        chosen = np.concatenate(rows)
        region = Intervals(table.cell[chosen], table.start[chosen], table.stop[chosen])
        for place in groups[group].places:
            if new or topology.alive[topology.node_of_place(place)]:
                parts.append((place, region))
    return parts


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
    for number, table in enumerate(diff.tables):
        geometry = diff.geometries[diff.geometry_of[number]]
        num_cells, scale = geometry.cells.num_cells, int(geometry.cells.numel.max()) + 1
        numbered = [(i, m) for i, m in enumerate(schedule.moves) if m.table == number]
        first = [(i, m) for i, m in numbered if not m.after]
        held = _group_parts(table, new=False, topology=diff.topology)
        holds: dict[int, tuple[int, ...]] = {}
        for place, region in held:
            holds[place] = (*holds.get(place, ()), id(region))
        sources = [_held_at(diff, schedule, i, m) for i, m in first]
        if -1 in sources:
            i = first[sources.index(-1)][0]
            return Finding(name="sources", holds=False, evidence=f"move {i} reads where its storage is not, or not yet")
        # Places that hold the very same regions, and one region that is read from them: one of each is looked at.
        reads = {
            (holds.get(source, ()), id(m.intervals)): (source, m.intervals)
            for source, (_, m) in zip(sources, first, strict=True)
        }
        read_at = {source for source, _ in reads.values()}
        there = _Rows.gather(part for part in held if part[0] in read_at)
        bad = _outside(_Rows.gather(reads.values()), there, num_cells, scale)
        if bad is not None:
            return _source_finding(diff, table, bad, num_cells, scale)
        relayed = [(i, m) for i, m in numbered if m.after]
        for i, move in relayed:
            if any(not _later(schedule, a, i) or schedule.moves[a].dst != move.src for a in move.after):
                return Finding(name="sources", holds=False, evidence=f"move {i} relays before it received")
        # The move's number stands for the place: each relay against what its own predecessors brought. Those that carry
        # one region of the same predecessors' regions are looked at once.
        different = {(id(m.intervals), *(id(schedule.moves[a].intervals) for a in m.after)): (i, m) for i, m in relayed}
        received = _Rows.gather((i, schedule.moves[a].intervals) for i, m in different.values() for a in m.after)
        bad = _outside(_Rows.gather((i, m.intervals) for i, m in different.values()), received, num_cells, scale)
        if bad is not None:
            return Finding(
                name="sources", holds=False, evidence=f"move {bad // scale // num_cells} relays more than it received"
            )
    relays = sum(1 for m in schedule.moves if m.after)
    return Finding(
        name="sources",
        holds=True,
        evidence=f"{len(schedule.moves):,} moves read held or verified bytes, {relays:,} of them relays",
    )


def _held_at(diff: Diff, schedule: Schedule, number: int, move: Move) -> int:
    """The place at which the old plan holds what a move reads: its source, or the GPU whose storage went to the
    source's host memory in an earlier wave (and stays there until the move is over); -1 where that is not so."""
    num_devices, table = diff.topology.num_devices, diff.tables[move.table]
    if not schedule.staged or move.slots is None:
        return move.src
    cells = diff.geometries[diff.geometry_of[move.table]].cells
    device = move.src % num_devices
    first, last = schedule.wave[number], schedule.wave[number] + schedule.slices[number] - 1
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


def _later(schedule: Schedule, before: int, after: int) -> bool:
    """Whether each element of move ``after`` travels in a later wave than in move ``before``. Slices of equal
    intervals in equal numbers are the same elements, one by one; otherwise all of the first must be there."""
    wave, slices = schedule.wave, schedule.slices
    first, then = schedule.moves[before].intervals, schedule.moves[after].intervals
    same = slices[before] == slices[after] and (
        first is then
        or all(
            np.array_equal(a, b)
            for a, b in ((first.cell, then.cell), (first.start, then.start), (first.stop, then.stop))
        )
    )
    return wave[after] > wave[before] + (0 if same else slices[before] - 1)


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
    crossing = [i for i, m in enumerate(schedule.moves) if m.link != LOCAL]
    slices = np.array([schedule.slices[i] for i in crossing], dtype=np.int64)
    row = np.repeat(np.array(crossing, dtype=np.int64), slices)
    part = np.arange(len(row)) - np.repeat(np.cumsum(slices) - slices, slices)
    wave = np.array(schedule.wave, dtype=np.int64)[row] + part
    numel = np.array([m.intervals.numel for m in schedule.moves], dtype=np.int64)
    width = np.array([m.num_bytes for m in schedule.moves], dtype=np.int64) // np.maximum(numel, 1)
    count = np.array(schedule.slices, dtype=np.int64)[row]
    size = (numel[row] * (part + 1) // count - numel[row] * part // count) * width[row]
    posted = []
    for ends in ([m.src for m in schedule.moves], [m.dst for m in schedule.moves]):
        device = np.array(ends, dtype=np.int64)[row] % num_devices
        # Whole numbers below 2^53, so sums of floats are exact.
        load = np.bincount(device * (schedule.num_waves + 1) + wave, weights=size).astype(np.int64)
        key = np.flatnonzero(load)
        posted.append((key // (schedule.num_waves + 1), load[key]))
    worst = max((int(load.max(initial=0)) for _, load in posted), default=0)
    limit = max(schedule.window_bytes, int(width.max(initial=0)))
    need = np.zeros(num_devices, dtype=np.int64)
    for device, load in posted:
        most = np.zeros(num_devices, dtype=np.int64)
        np.maximum.at(most, device, load)
        need += most
    over = np.flatnonzero(need > staging_bytes)
    if len(over):
        at = int(over[0])
        evidence = f"device {at} posts {int(need[at]):,} bytes in a wave with {int(staging_bytes[at]):,} of staging"
        return Finding(name="windows", holds=False, evidence=evidence)
    return Finding(
        name="windows",
        holds=worst <= limit,
        evidence=f"at most {worst:,} bytes posted per device, direction and wave (limit {limit:,})",
    )


def check_bytes(diff: Diff, schedule: Schedule, bound_moved: int) -> Finding:
    """Moves carry what the demands need and no byte more, recounted from the intervals."""
    moves = schedule.moves
    if moves:
        lengths = np.array([len(m.intervals) for m in moves], dtype=np.int64)
        sizes = np.concatenate([m.intervals.stop - m.intervals.start for m in moves])
        numel = np.add.reduceat(sizes, np.concatenate(([0], np.cumsum(lengths)[:-1])))
        tables = diff.tables
        width = np.array(
            [
                tables[m.table].element_bytes
                if m.slots is None
                else sum(tables[m.table].slot_bytes[i] for i in m.slots)
                for m in moves
            ],
            dtype=np.int64,
        )
        said = np.array([m.num_bytes for m in moves], dtype=np.int64)
        bad = np.flatnonzero((numel * width != said) | (lengths == 0))
        if len(bad):
            at = int(bad[0])
            evidence = f"move {at} says {int(said[at])} bytes and has {int(numel[at] * width[at])}"
            return Finding(name="bytes", holds=False, evidence=evidence)
        node_of, num_devices = diff.topology.node_of, diff.topology.num_devices
        src = node_of[np.array([m.src for m in moves], dtype=np.int64) % num_devices]
        dst = node_of[np.array([m.dst for m in moves], dtype=np.int64) % num_devices]
        if bool(((src != dst) != np.array([m.link == INTER for m in moves], dtype=bool)).any()):
            return Finding(name="bytes", holds=False, evidence="a move's link class disagrees with its nodes")
    moved = sum(m.num_bytes for m in moves if m.link != LOCAL)
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
