"""What every pass produced, as text for people who debug a plan or a pass: classes and sums, never every interval."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from nereus.ir.cluster import Device
from nereus.ir.described import DescribedLayout
from nereus.ir.holdings import Holdings, StateSet, Topology
from nereus.ir.plan import Stage
from nereus.ir.program import Program
from nereus.ir.schedule import Schedule, slices_of
from nereus.ir.transition import LOCAL, Move
from nereus.ir.units import format_bytes, format_seconds
from nereus.passes.atoms import AtomTable
from nereus.passes.compiled import Transition
from nereus.passes.diff import Diff
from nereus.passes.lifecycle import Lifecycle
from nereus.passes.lower import StageChange
from nereus.passes.memory import MemoryPlan
from nereus.passes.place import Placed
from nereus.passes.route import Routed

#: Rows of one kind that are printed before the rest is counted.
MAX_ROWS = 24


class IrPrinter:
    """A hook of the pass manager: writes one section for each of ``names``. Remembers the topology, so that later
    passes' device numbers become names."""

    def __init__(self, names: Collection[str], write: Callable[[str], None]) -> None:
        self.names = names
        self.write = write
        self.topology: Topology | None = None

    def __call__(self, name: str, result: object) -> None:
        if isinstance(result, Diff):
            self.topology = result.topology
        if isinstance(result, Transition) and "emit" in self.names:
            self._section("emit", emit_lines(result))
        if name in self.names:
            self._section(name, self._lines(result))

    def _section(self, name: str, lines: Iterable[str]) -> None:
        self.write("\n".join((f"// after {name}", *(f"  {line}" for line in lines), "")))

    def _lines(self, result: object) -> Iterator[str]:
        match result:
            case Holdings():
                return holdings_lines(result)
            case Placed():
                return placed_lines(result)
            case tuple():
                return changes_lines(result)
            case Diff():
                return diff_lines(result)
            case Transition():
                return findings_lines(result)
        assert self.topology is not None, "diff runs before the passes that number devices"
        match result:
            case Lifecycle():
                return lifecycle_lines(result, self.topology)
            case Routed():
                return routed_lines(result, self.topology)
            case MemoryPlan():
                return memory_lines(result, self.topology)
            case Schedule():
                return schedule_lines(result, self.topology)
        raise AssertionError(f"no printer for {type(result).__name__}")


def holdings_lines(holdings: Holdings) -> Iterator[str]:
    for entry in holdings.sets:
        yield f"{entry.stage}: {_layout(entry)} on {_devices(entry.bound.ranks)}"
        yield "  " + ", ".join(f"{s.name} {s.text}" for s in entry.slots)
    for stage in holdings.caches:
        yield f"{stage}: a cache; dropped, and filled by the next weight sync"


def _layout(entry: StateSet) -> str:
    layout = entry.bound.layout
    if isinstance(layout, DescribedLayout):
        return f"{layout.name}, {layout.num_ranks} ranks"
    text = f"dp {layout.dp} tp {layout.tp} pp {layout.pp}"
    if layout.splits_experts:
        text += f" ep {layout.ep} etp {layout.expert_tp}"
    return text + (f", shards {layout.num_shards}" if layout.num_shards > 1 else "")


def placed_lines(placed: Placed) -> Iterator[str]:
    choices = {choice.stage: choice for choice in placed.choices}
    for stage in placed.plan.stages:
        if stage.with_ is not None or stage.service is not None:
            continue
        yield f"{stage.name}: place = {_devices(stage.ranks)}"
        choice = choices.get(stage.name)
        if choice is None:
            yield "  no state to bring: as listed"
            continue
        yield (
            f"  {choice.chosen}: moves {format_bytes(choice.moved_bytes)} in {format_seconds(choice.transfer_s)}, "
            f"adds {format_seconds(choice.step_s)} a step"
        )
        yield (
            f"  listed: {format_bytes(choice.listed_moved_bytes)}, {format_seconds(choice.listed_transfer_s)}, "
            f"{format_seconds(choice.listed_step_s)} a step; "
            f"{'least' if choice.exact else 'lower bound'}: {format_bytes(choice.best_moved_bytes)}"
        )


def changes_lines(changes: Sequence[StageChange]) -> Iterator[str]:
    for change in changes:
        yield f"{change.marks.ljust(4)} {change.stage}: {_degrees(change.old)} -> {_degrees(change.new)}"
        for primitive in change.primitives:
            yield (
                f"  {primitive.kind} x {primitive.count}: tp, pp {primitive.before} -> {primitive.after} "
                f"on {_devices(primitive.devices)}"
            )
        for note in change.notes:
            yield f"  {note}"


def _degrees(stage: Stage | None) -> str:
    return "nothing" if stage is None else f"dp {stage.dp} tp {stage.tp} pp {stage.pp}"


def diff_lines(difference: Diff) -> Iterator[str]:
    yield f"kept {format_bytes(difference.kept_bytes)}, derived {format_bytes(difference.derived_bytes)}"
    for stage, slot in difference.fresh:
        yield f"fresh: {stage} {slot} (nothing held it; the framework initialises it)"
    for number, table in enumerate(difference.tables):
        yield from _table_lines(difference, number, table)
    for lost in difference.lost:
        size = format_bytes(lost.num_bytes)
        yield f"lost: {lost.state_set} {' '.join(lost.slots)} {size}, e.g. {lost.example_tensor}"


def _table_lines(difference: Diff, number: int, table: AtomTable) -> Iterator[str]:
    topology = difference.topology
    demanded: dict[int, int] = {}
    for demand in difference.demands:
        if demand.table == number:
            demanded[demand.cls] = demanded.get(demand.cls, 0) + demand.num_bytes * len(demand.wanters)
    yield (
        f"table {number}: {table.model} {' '.join(table.slots)}; {len(table.cell):,} atoms in {table.num_classes:,} "
        f"classes; {format_bytes(sum(demanded.values()))} lacking"
    )
    sizes = [int(table.num_bytes[intervals].sum()) for intervals in table.intervals_of_classes()]
    order = sorted(range(table.num_classes), key=lambda cls: (-sizes[cls], cls))
    for cls in order[:MAX_ROWS]:
        holders, wanters = difference.holders[number][cls], difference.wanters[number][cls]
        yield (
            f"  class {cls}: {format_bytes(sizes[cls])} held by {_places(topology, holders)}; "
            f"wanted by {_places(topology, wanters)}; lacking {format_bytes(demanded.get(cls, 0))}"
        )
    if len(order) > MAX_ROWS:
        yield f"  and {len(order) - MAX_ROWS:,} smaller classes"


def lifecycle_lines(life: Lifecycle, topology: Topology) -> Iterator[str]:
    for op in life.ops:
        where = " in the background" if op.background else ""
        running = max(op.running_bytes, default=0)
        yield (
            f"{op.kind} {op.stage}: {format_seconds(op.seconds)}{where}, {format_bytes(running)} a GPU, "
            f"on {_places(topology, op.devices)}"
        )


def routed_lines(routed: Routed, topology: Topology) -> Iterator[str]:
    yield from moves_lines(routed.moves, topology)
    yield f"busiest port {format_seconds(routed.ports.busiest_s)}"


def moves_lines(moves: Sequence[Move], topology: Topology) -> Iterator[str]:
    """Sums per link class, and between nodes."""
    links: dict[str, list[Move]] = {}
    pairs: dict[tuple[int, int], int] = {}
    for move in moves:
        links.setdefault(move.link, []).append(move)
        if move.link != LOCAL:
            pair = (topology.node_of_place(move.src), topology.node_of_place(move.dst))
            pairs[pair] = pairs.get(pair, 0) + move.num_bytes
    for link in sorted(links):
        those = links[link]
        relays = sum(1 for move in those if move.after)
        size = format_bytes(sum(move.num_bytes for move in those))
        yield f"{link}: {len(those):,} moves, {size}, {relays:,} of them relays"
    order = sorted(pairs, key=lambda pair: (-pairs[pair], pair))
    for src, dst in order[:MAX_ROWS]:
        yield f"  {topology.nodes[src].name} -> {topology.nodes[dst].name}: {format_bytes(pairs[src, dst])}"
    if len(order) > MAX_ROWS:
        yield f"  and {len(order) - MAX_ROWS:,} smaller pairs of nodes"


def memory_lines(memory: MemoryPlan, topology: Topology) -> Iterator[str]:
    """Spaces with equal numbers are one line."""
    yield f"staging {format_bytes(int(memory.staging.max(initial=0)))} a GPU"
    classes: dict[tuple[int, ...], list[int]] = {}
    names = list(memory.reversible)
    for space in range(len(memory.capacity)):
        columns = (memory.state.kept, memory.state.old, memory.state.new, *memory.reversible.values())
        row = tuple(int(column[space]) for column in (*columns, memory.tight_bound, memory.capacity))
        if any(row[:-1]):
            classes.setdefault(row, []).append(space)
    order = sorted(classes, key=lambda row: (row[-1] - max(row[3:-2]), row))
    for row in order[:MAX_ROWS]:
        kept, old, new, *phases, tight, capacity = row
        yield f"{_spaces(topology, classes[row])}: {format_bytes(capacity)}"
        yield f"  state stays {format_bytes(kept)}, goes {format_bytes(old)}, comes {format_bytes(new)}"
        texts = [f"{name} {format_bytes(value)}" for name, value in zip(names, phases, strict=True)]
        yield f"  reversible: {', '.join(texts)}; tight: {format_bytes(tight)}"
    if len(order) > MAX_ROWS:
        yield f"and {len(order) - MAX_ROWS:,} classes of memory with more room"


def schedule_lines(schedule: Schedule, topology: Topology) -> Iterator[str]:
    yield (
        f"{schedule.mode}: {len(schedule.moves):,} moves in {schedule.num_waves:,} waves of at most "
        f"{format_bytes(schedule.window_bytes)} a GPU and direction, {format_seconds(schedule.transfer_s)}"
    )
    counts, crossing = np.zeros(schedule.num_waves, dtype=np.int64), np.zeros(schedule.num_waves, dtype=np.int64)
    moves = schedule.moves
    for move, at, num_bytes in slices_of(moves, schedule.wave, schedule.slices, np.arange(len(moves))):
        np.add.at(counts, at, 1)
        np.add.at(crossing, at, np.where(moves.crosses[move], num_bytes, 0))
    totals = list(zip(counts.tolist(), crossing.tolist(), strict=True))
    for wave, (count, total) in enumerate(totals[:MAX_ROWS]):
        acquired = sum(1 for number in schedule.acquire.values() if number == wave)
        released = sum(1 for number in schedule.release.values() if number == wave)
        storages = f", acquires {acquired:,} and releases {released:,} storages" if acquired or released else ""
        yield f"  wave {wave}: {count:,} slices of moves, {format_bytes(total)}{storages}"
    if schedule.num_waves > MAX_ROWS:
        yield f"  and {schedule.num_waves - MAX_ROWS:,} more waves"


def findings_lines(transition: Transition) -> Iterator[str]:
    for name, holds, evidence in transition.certificate.checks:
        yield f"{'holds' if holds else 'FAILS'} {name}: {evidence}"
    yield f"digest {transition.digest}"


def emit_lines(transition: Transition) -> Iterator[str]:
    """The program of the device with the most moves; programs are emitted one by one, where they run."""
    from nereus.passes.emit import emit_program

    topology = transition.topology
    numbers = [d for d in range(topology.num_devices) if topology.alive[int(topology.node_of[d])]]
    device = min(numbers, key=lambda d: (-len(transition.moves_of_device(d)), d))
    yield from program_lines(emit_program(transition, device))


def program_lines(program: Program) -> Iterator[str]:
    roles = [s.role for s in program.storages]
    counts = ", ".join(f"{roles.count(role):,} {role}" for role in dict.fromkeys(roles))
    yield f"{program.device}: {program.mode}, storages: {counts or 'none'}; {program.num_messages:,} messages"
    for number, wave in enumerate(program.waves[:MAX_ROWS]):
        yield (
            f"  wave {number}: acquire {len(wave.acquire):,}, copies {len(wave.copies):,}, sends {len(wave.sends):,}, "
            f"receives {len(wave.receives):,}, derives {len(wave.derives):,}, release {len(wave.release):,}"
        )
    if len(program.waves) > MAX_ROWS:
        yield f"  and {len(program.waves) - MAX_ROWS:,} more waves"
    yield f"  after the commit: release {len(program.commit_release):,}"


def _spaces(topology: Topology, spaces: Sequence[int]) -> str:
    hosts = [topology.nodes[s - topology.num_devices].name for s in spaces if s >= topology.num_devices]
    words = _words([(topology.devices[s].node, topology.devices[s].index) for s in spaces if s < topology.num_devices])
    if hosts:
        words += [f"host memory of {' '.join(_runs(hosts))}"]
    return " ".join(words)


def _places(topology: Topology, places: Sequence[int]) -> str:
    if not places:
        return "nobody"
    count = topology.num_devices
    gpus = [(topology.devices[p].node, topology.devices[p].index) for p in places if p < count]
    hosts = [(topology.devices[p - count].node, topology.devices[p - count].index) for p in places if p >= count]
    words = _words(gpus)
    if hosts:
        words += ["host of", *_words(hosts)]
    return " ".join(words)


def _devices(devices: Iterable[Device]) -> str:
    return " ".join(_words([(device.node, device.index) for device in devices]))


def _words(gpus: Sequence[tuple[str, int]]) -> list[str]:
    """``n0.gpu[0-3]`` for GPUs that count up in one node; at most ``MAX_ROWS`` words."""
    words: list[str] = []
    i = 0
    while i < len(gpus):
        node, first = gpus[i]
        j = i + 1
        while j < len(gpus) and gpus[j] == (node, first + j - i):
            j += 1
        words.append(f"{node}.gpu{first}" if j == i + 1 else f"{node}.gpu[{first}-{first + j - i - 1}]")
        i = j
    return words if len(words) <= MAX_ROWS else [*words[:MAX_ROWS], f"... ({len(gpus):,} GPUs)"]


def _runs(names: Sequence[str]) -> list[str]:
    return list(names) if len(names) <= MAX_ROWS else [*names[:MAX_ROWS], f"... ({len(names):,} nodes)"]
