"""tight: a schedule for full GPUs. Old storages go as soon as everything read from them was verified.

Units are single storages. In every wave the units that fit (memory of their space, windows of their devices) are
acquired and filled, then every old storage whose readers are all verified is released. With a spare of the largest
storage beyond max(before, after) this never sticks (algorithms: shift the chain to a device with room, or rotate the
cycle through the spares); with less it refuses and names the space that is full.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import numpy as np

from nereus.ir.holdings import Topology
from nereus.ir.intervals import Intervals
from nereus.ir.schedule import Schedule, StorageKey
from nereus.ir.transition import LOCAL, Move
from nereus.passes.diff import Diff
from nereus.passes.memory import MemoryPlan
from nereus.passes.route import Routed
from nereus.passes.schedule import transfer_seconds
from nereus.passes.storages import StorageMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """The witness of a refusal: ``space`` must take ``need_bytes`` next and has ``free_bytes``, and nothing can leave
    it first."""

    space: int
    need_bytes: int
    free_bytes: int
    storage: StorageKey


@dataclass(slots=True)
class _Unit:
    key: StorageKey
    space: int
    num_bytes: int
    moves: list[int] = field(default_factory=list)
    reads: set[StorageKey] = field(default_factory=set)

    @property
    def frees_nothing(self) -> bool:
        """State that the framework makes: it comes from nowhere, so nothing old waits for it. (A weight waits for its
        master.)"""
        return not self.moves and not self.reads and self.key[2] != "master"

    def complete(self, move_wave: list[int]) -> bool:
        return all(move_wave[number] >= 0 for number in self.moves)


def split_by_storage(routed: Routed, diff: Diff) -> list[Move]:
    """The same moves cut by tensor and slot, so that each fills one storage (per state set that wants it)."""
    result: list[Move] = []
    children: list[dict[tuple[int, int], int]] = []  # per routed move: (slot, tensor) -> new move
    for move in routed.moves:
        table = diff.tables[move.table]
        cells = diff.geometries[diff.geometry_of[move.table]].cells
        tensor = cells.tensor[move.intervals.cell]
        edges = np.flatnonzero(np.diff(tensor)) + 1
        bounds = [0, *edges.tolist(), len(tensor)]
        mine: dict[tuple[int, int], int] = {}
        for slot, slot_bytes in enumerate(table.slot_bytes):
            for first, last in itertools.pairwise(bounds):
                part = Intervals(
                    move.intervals.cell[first:last], move.intervals.start[first:last], move.intervals.stop[first:last]
                )
                key = (slot, int(tensor[first]))
                after = tuple(children[m][key] for m in move.after if key in children[m])
                mine[key] = len(result)
                result.append(
                    Move(move.src, move.dst, move.table, part, part.numel * slot_bytes, move.link, after, (slot,))
                )
        children.append(mine)
    return result


#: Orders in which units are tried. The first frees sources soonest, since all slots of a tensor travel together;
#: where it sticks, sources with several readers have filled the spare, and another order may leave it to those that
#: free most.
_ORDERS: tuple[Callable[[_Unit], tuple[object, ...]], ...] = (
    lambda u: (u.key[3], u.key[2] == "weight", u.key[2], u.key[0], u.key[1]),
    lambda u: (u.key[2] == "weight", -u.num_bytes, u.key[3], u.key[2], u.key[0], u.key[1]),
    lambda u: (u.key[2] == "weight", u.num_bytes, u.key[3], u.key[2], u.key[0], u.key[1]),
    lambda u: (u.key[0], u.key[3], u.key[2] == "weight", u.key[2], u.key[1]),
)


def tight_schedule(
    diff: Diff, storages: StorageMap, routed: Routed, memory: MemoryPlan, topology: Topology, window_bytes: int
) -> Schedule | Stuck:
    """The first order of units that does not stick; the first one's witness where all do."""
    moves = split_by_storage(routed, diff)
    units, readers, old_bytes = _units(diff, storages, moves, topology)
    witness: Stuck | None = None
    for order in _ORDERS:
        pending = sorted(units.values(), key=order)
        result = _schedule_units(pending, units, readers, old_bytes, moves, routed, memory, topology, window_bytes)
        if isinstance(result, Schedule):
            return result
        witness = witness or result
    assert witness is not None
    return witness


def _schedule_units(
    pending: list[_Unit],
    units: dict[StorageKey, _Unit],
    readers: dict[StorageKey, set[StorageKey]],
    old_bytes: dict[StorageKey, tuple[int, int]],
    moves: list[Move],
    routed: Routed,
    memory: MemoryPlan,
    topology: Topology,
    window_bytes: int,
) -> Schedule | Stuck:
    targets: list[list[StorageKey]] = [[] for _ in moves]
    for unit in units.values():
        for number in unit.moves:
            targets[number].append(unit.key)
    free = (memory.capacity - memory.tight_base).tolist()
    acquire: dict[StorageKey, int] = {}
    release: dict[StorageKey, int] = {}
    move_wave = [-1] * len(moves)
    waiting = {key: set(keys) for key, keys in readers.items()}
    filling: list[_Unit] = []  # acquired, some moves still to come
    idle = [key for key in old_bytes if not waiting.get(key)]
    # A process releases after the wave's agreement; the others of its node know at the next one. What leaves host
    # memory in wave w is therefore theirs in wave w + 2.
    leaving: list[tuple[int, int]] = []
    wave = 0
    while pending or filling or idle:
        window = _Window(moves, move_wave, wave, window_bytes, topology.num_devices, targets, acquire)
        progress = bool(idle or leaving)
        arriving, leaving = leaving, []
        for unit in filling:
            progress |= window.post(unit)
        left: list[_Unit] = []
        filled = {unit.space for unit in pending if not unit.frees_nothing}
        for unit in pending:
            if unit.frees_nothing and unit.space in filled:
                left.append(unit)  # the room is for those that let something old go
                continue
            # A derived weight waits for its master, an earlier unit of the same tensor.
            if unit.num_bytes > free[unit.space] or not _master_ready(unit, units, acquire) or not window.open(unit):
                left.append(unit)
                continue
            free[unit.space] -= unit.num_bytes
            acquire[unit.key] = wave
            window.post(unit)
            filling.append(unit)
            progress = True
        if not progress:
            return _stuck(left or filling, free)
        for unit in filling:
            if unit.complete(move_wave):
                for key in unit.reads:
                    waiting[key].discard(unit.key)
                    if not waiting[key]:
                        idle.append(key)
        filling = [unit for unit in filling if not unit.complete(move_wave)]
        for key in idle:
            if key not in release:
                release[key] = wave
                space, num_bytes = old_bytes[key]
                if space < topology.num_devices:
                    free[space] += num_bytes
                else:
                    leaving.append((space, num_bytes))
        for space, num_bytes in arriving:
            free[space] += num_bytes
        idle = []
        pending = left
        wave += 1
    order = sorted(range(len(moves)), key=lambda i: (move_wave[i], i))
    position = {number: at for at, number in enumerate(order)}
    ordered = tuple(
        Move(m.src, m.dst, m.table, m.intervals, m.num_bytes, m.link, tuple(position[a] for a in m.after), m.slots)
        for m in (moves[i] for i in order)
    )
    waves = tuple(move_wave[i] for i in order)
    return Schedule(
        mode="tight",
        moves=ordered,
        wave=waves,
        slices=(1,) * len(waves),
        num_waves=wave,
        window_bytes=window_bytes,
        acquire=acquire,
        release=release,
        transfer_s=transfer_seconds(ordered, waves, (1,) * len(waves), routed.links),
    )


def _units(
    diff: Diff, storages: StorageMap, moves: list[Move], topology: Topology
) -> tuple[dict[StorageKey, _Unit], dict[StorageKey, set[StorageKey]], dict[StorageKey, tuple[int, int]]]:
    """New storages as units, who reads each old storage, and every old storage's (space, bytes)."""
    units: dict[StorageKey, _Unit] = {}
    old_bytes: dict[StorageKey, tuple[int, int]] = {}
    num_devices = topology.num_devices
    for stage in storages.stages:
        for device in storages.devices_of(stage):
            host = num_devices + int(topology.node_of[device])
            for slot, old_slot, new_slot in storages.slots(stage):
                fit = storages.fit(stage, slot, device)
                for tensor in np.flatnonzero(fit.old).tolist():
                    space = host if old_slot is not None and old_slot.host else device
                    width = old_slot.element_bytes if old_slot is not None else 0
                    old_bytes[device, stage, slot, tensor] = (space, int(fit.old[tensor]) * width)
                for tensor in np.flatnonzero(fit.new).tolist():
                    space = host if new_slot is not None and new_slot.host else device
                    key = (device, stage, slot, tensor)
                    width = new_slot.element_bytes if new_slot is not None else 0
                    units[key] = _Unit(key, space, int(fit.new[tensor]) * width)
    readers: dict[StorageKey, set[StorageKey]] = {}

    def read(unit: _Unit, source: StorageKey) -> None:
        if source in old_bytes:
            unit.reads.add(source)
            readers.setdefault(source, set()).add(unit.key)

    old_stages, new_stages = storages.old, storages.new
    for number, move in enumerate(moves):
        table = diff.tables[move.table]
        geometry = diff.geometries[diff.geometry_of[move.table]]
        slot = table.slots[move.slots[0]] if move.slots else table.slots[0]
        tensor = int(geometry.cells.tensor[move.intervals.cell[0]])
        src, dst = move.src % num_devices, move.dst % num_devices
        for state_set in geometry.new_sets:
            unit = units.get((dst, state_set.stage, slot, tensor))
            if unit is None or (unit.space >= num_devices) != (move.dst >= num_devices):
                continue
            unit.moves.append(number)
            if not move.after:
                for source in geometry.old_sets:
                    read(unit, (src, source.stage, slot, tensor))
    for (device, stage, slot, tensor), unit in units.items():  # local copies
        model = new_stages[stage].state_set.model
        for other, shares in old_stages.items():
            if shares.state_set.model == model:
                read(unit, (device, other, slot, tensor))
    return units, readers, old_bytes


class _Window:
    """One wave's windows: how much every device sends and receives in it."""

    def __init__(
        self,
        moves: list[Move],
        move_wave: list[int],
        wave: int,
        window_bytes: int,
        num_devices: int,
        targets: list[list[StorageKey]],
        acquired: Container[StorageKey],
    ) -> None:
        self.moves, self.move_wave, self.wave = moves, move_wave, wave
        self.window_bytes, self.num_devices = window_bytes, num_devices
        self.targets, self.acquired = targets, acquired
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    def open(self, unit: _Unit) -> bool:
        """Whether some move of ``unit`` fits (or it has none): no storage is acquired before anything can arrive in
        it."""
        return not unit.moves or any(self._fits(number) for number in unit.moves)

    def post(self, unit: _Unit) -> bool:
        """Puts every move of ``unit`` that fits into this wave; whether there was one. A move that fills storages of
        several state sets of a place waits for all of them."""
        posted = False
        for number in unit.moves:
            there = all(key in self.acquired for key in self.targets[number])
            if there and self.move_wave[number] < 0 and self._fits(number):
                move = self.moves[number]
                if move.link != LOCAL:
                    src, dst = move.src % self.num_devices, move.dst % self.num_devices
                    self.sent[src] = self.sent.get(src, 0) + move.num_bytes
                    self.received[dst] = self.received.get(dst, 0) + move.num_bytes
                self.move_wave[number] = self.wave
                posted = True
        return posted

    def _fits(self, number: int) -> bool:
        move = self.moves[number]
        if any(self.move_wave[a] < 0 or self.move_wave[a] >= self.wave for a in move.after):
            return False
        if move.link == LOCAL:
            return True
        loads = (self.sent.get(move.src % self.num_devices, 0), self.received.get(move.dst % self.num_devices, 0))
        # A move larger than a window (a single huge row) goes alone.
        return all(not load or load + move.num_bytes <= self.window_bytes for load in loads)


def _master_ready(unit: _Unit, units: dict[StorageKey, _Unit], acquire: dict[StorageKey, int]) -> bool:
    device, stage, slot, tensor = unit.key
    master = (device, stage, "master", tensor)
    return slot != "weight" or master not in units or master in acquire


def _stuck(pending: list[_Unit], free: list[int]) -> Stuck:
    # A weight may wait for its master, or a window, with room to spare: the witness is one that memory keeps waiting.
    short = [unit for unit in pending if unit.num_bytes > free[unit.space]] or pending
    unit = min(short, key=lambda u: (u.num_bytes - free[u.space], u.key))
    return Stuck(space=unit.space, need_bytes=unit.num_bytes, free_bytes=max(free[unit.space], 0), storage=unit.key)
