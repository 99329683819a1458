"""tight: a schedule for full GPUs. Old storages go as soon as everything read from them was verified.

Units are single storages. In every wave the units that fit (memory of their space, windows of their devices) are
acquired and filled, then every old storage whose readers are all verified is released. Where every unit has one source
of its own size and every space a spare of the largest unit beyond max(before, after), this never sticks: were all
waiting spaces full, each would hold more than it will in the end, and all that leaves them would go to each other.
Chains shift to a device with room and cycles rotate through the spares by themselves. Units that several read, or read
in parts, are taken in an order that keeps every space between its start and its end (``balanced_order``).

Where the spare is less, a full device puts the old storage that is in the way into its node's host memory, and its
readers take it from there: one storage per cycle. A refusal names the space that is full, and the host memory that is
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray
from nereus.ir.moves import Moves
from nereus.ir.schedule import Schedule, StorageKey
from nereus.ir.transition import LOCAL, Move
from nereus.models.priors import MESSAGE_S
from nereus.passes.diff import Diff
from nereus.passes.links import Links
from nereus.passes.memory import MemoryPlan
from nereus.passes.route import Routed
from nereus.passes.schedule import transfer_seconds
from nereus.passes.storages import StorageMap
from nereus.passes.tight_units import PortLoads, Unit, Units, balanced_order, find_units, split_by_storage

#: Waves that a transfer is cut into where memory allows more at a time, and the shortest wave that pays, seconds.
WAVES, SHORTEST_WAVE_S = 48, 40 * MESSAGE_S
#: Gangs that are looked at behind the last that fits, and how near the bound a schedule ends the search for a faster.
LOOKAHEAD, GOOD = 64, 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """The witness of a refusal: ``space`` must take ``need_bytes`` next and has ``free_bytes``, and nothing can leave
    it first. ``host_short_bytes``: what the node's host memory lacks to take in what is in the way; None where nothing
    on the device may go there."""

    space: int
    need_bytes: int
    free_bytes: int
    storage: StorageKey
    host_short_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One way to try. ``whole``: the units of a gang are acquired together; ``strict``: what does not fit keeps
    later ones from its spaces; ``stage``: host memory may help."""

    order: Sequence[int]
    whole: bool = False
    strict: bool = False
    stage: bool = False
    wave_s: float = float("inf")


def tight_schedule(
    diff: Diff, storages: StorageMap, routed: Routed, memory: MemoryPlan, topology: Topology, window_bytes: int
) -> Schedule | Stuck:
    """The fastest of the ways that stay within ``tight_bound``; one that takes what memory there is where they stick;
    one through host memory where that does too; else its witness."""
    found = find_units(diff, storages, split_by_storage(routed, diff), topology)

    def attempt(way: _Way, free: list[int]) -> Schedule | Stuck:
        return _Run(found, free, way, routed.links, topology, window_bytes).run()

    everything = (memory.capacity - memory.tight_base).tolist()
    least = (np.minimum(memory.capacity, memory.tight_bound) - memory.tight_base).tolist()
    wave_s = max(routed.bound.transfer_s / WAVES, SHORTEST_WAVE_S)
    for free in (least, everything) if least != everything else (least,):
        order = balanced_order(found, free)
        good: list[Schedule] = []
        for way in (_Way(order=order, wave_s=wave_s), _Way(order=order), _Way(order=order, strict=True)):
            result = attempt(way, free)
            if isinstance(result, Schedule):
                good.append(result)
                if result.transfer_s <= GOOD * routed.bound.transfer_s:
                    break
        if good:
            return min(good, key=lambda schedule: schedule.transfer_s)
        for way in (_Way(order=order, whole=True, strict=True), *(_Way(order=o) for o in _listed_orders(found))):
            result = attempt(way, free)
            if isinstance(result, Schedule):
                return result
    return attempt(_Way(order=balanced_order(found, everything), stage=True), everything)


def _listed_orders(found: Units) -> list[list[int]]:
    """Gangs by tensor (all slots of a tensor travel together), by size both ways."""
    first = [found.units[members[0]] for members in found.gangs]
    size = [max(found.units[u].num_bytes for u in members) for members in found.gangs]
    numbers = range(len(found.gangs))
    return [
        sorted(numbers, key=lambda g: (first[g].key[3], first[g].key[2] == "weight", first[g].key[2], g)),
        sorted(numbers, key=lambda g: (first[g].key[2] == "weight", -size[g], first[g].key[3], g)),
        sorted(numbers, key=lambda g: (first[g].key[2] == "weight", size[g], first[g].key[3], g)),
    ]


class _Run:
    """One attempt, wave by wave."""

    def __init__(
        self, found: Units, free: list[int], way: _Way, links: Links, topology: Topology, window_bytes: int
    ) -> None:
        self.found, self.way, self.links, self.topology = found, way, links, topology
        self.window_bytes, self.num_devices = window_bytes, topology.num_devices
        self.units, self.olds = found.units, found.olds
        self.moves = list(found.moves)
        self.free = list(free)
        self.ports = PortLoads(links)
        self.port_of_move = [self.ports.of(move) for move in self.moves]
        self.move_wave = [-1] * len(self.moves)
        self.unsent = [len(unit.moves) for unit in self.units]
        self.acquired = [-1] * len(self.units)
        self.released = [-1] * len(self.olds)
        self.waiting = [set(old.readers) for old in self.olds]
        self.idle = [number for number, old in enumerate(self.olds) if not old.readers]
        self.filling: list[int] = []
        self.pending = [list(found.gangs[g]) for g in way.order]
        #: Per space, units that wait and let something go: state that comes from nowhere waits for them.
        self.useful = [0] * found.num_spaces
        for unit in self.units:
            self.useful[unit.space] += not unit.frees_nothing
        self.staged: dict[int, tuple[int, int]] = {}  # old -> waves in which it goes to host memory and leaves it
        # A process releases after the wave's agreement; the others of its node know at the next one. What leaves host
        # memory in wave w is therefore theirs in wave w + 2.
        self.leaving: list[tuple[int, int]] = []
        self.wave = 0

    def run(self) -> Schedule | Stuck:
        while any(self.pending) or self.filling or self.idle:
            arriving, self.leaving = self.leaving, []
            progress = bool(self.idle or arriving)
            self.load = [0.0] * self.ports.num_ports
            self.sent: dict[int, int] = {}
            self.received: dict[int, int] = {}
            for number in self.filling:
                progress |= self._post(number)
            progress |= self._acquire_all(progress)
            if not progress:
                if not self.way.stage:
                    return self._stuck()
                witness = self._stage_out()
                if witness is not None:
                    return witness
            self._complete()
            for space, num_bytes in arriving:
                self.free[space] += num_bytes
            self.wave += 1
        return self._schedule()

    # Acquiring

    def _acquire_all(self, busy: bool) -> bool:
        """Gangs in their order; far behind the first that do not fit nothing is looked for, unless nothing else
        happens in the wave."""
        progress, fruitless = False, 0
        blocked: set[int] = set()
        for members in self.pending:
            if self._acquire_gang(members, blocked):
                progress, fruitless = True, 0
            else:
                fruitless += 1
                if fruitless > LOOKAHEAD and (progress or busy):
                    break
        self.pending = [members for members in self.pending if members]
        return progress

    def _acquire_gang(self, members: list[int], blocked: set[int]) -> bool:
        units = self.units
        if self.way.whole and not units[members[0]].frees_nothing:
            need: dict[int, int] = {}
            for number in members:
                unit = units[number]
                need[unit.space] = need.get(unit.space, 0) + unit.num_bytes
            if any(self.free[space] < size or space in blocked for space, size in need.items()):
                if self.way.strict:
                    blocked.update(need)
                return False
        progress, left = False, []
        for number in members:
            unit = units[number]
            if (
                unit.num_bytes > self.free[unit.space]
                or unit.space in blocked
                or (unit.frees_nothing and self.useful[unit.space])
                or (unit.master >= 0 and self.acquired[unit.master] < 0)
                or not self._open(unit)
            ):
                left.append(number)
                continue
            self.free[unit.space] -= unit.num_bytes
            self.useful[unit.space] -= not unit.frees_nothing
            self.acquired[number] = self.wave
            self._post(number)
            self.filling.append(number)
            progress = True
        members[:] = left
        if self.way.strict:
            blocked.update(units[number].space for number in left)
        return progress

    def _open(self, unit: Unit) -> bool:
        """Whether some move of ``unit`` fits (or it has none): no storage is acquired before anything can arrive in
        it."""
        return not unit.moves or any(self._fits(number) for number in unit.moves)

    def _post(self, number: int) -> bool:
        """Puts every move of the unit that fits into this wave; whether there was one. A move that fills storages of
        several state sets of a place waits for all of them."""
        posted = False
        for at in self.units[number].moves:
            if self.move_wave[at] >= 0 or any(self.acquired[u] < 0 for u in self.found.targets[at]):
                continue
            if not self._fits(at):
                continue
            move = self.moves[at]
            if move.link != LOCAL:
                src, dst = move.src % self.num_devices, move.dst % self.num_devices
                self.sent[src] = self.sent.get(src, 0) + move.num_bytes
                self.received[dst] = self.received.get(dst, 0) + move.num_bytes
                for port, seconds in self.port_of_move[at]:
                    self.load[port] += seconds
            self.move_wave[at] = self.wave
            for target in self.found.targets[at]:
                self.unsent[target] -= 1
            posted = True
        return posted

    def _fits(self, number: int) -> bool:
        move = self.moves[number]
        if self.move_wave[number] >= 0:
            return False
        if any(self.move_wave[a] < 0 or self.move_wave[a] >= self.wave for a in move.after):
            return False
        if move.link == LOCAL:
            return True
        loads = (self.sent.get(move.src % self.num_devices, 0), self.received.get(move.dst % self.num_devices, 0))
        # A move larger than a window (a single huge row) goes alone.
        if any(load and load + move.num_bytes > self.window_bytes for load in loads):
            return False
        limit = self.way.wave_s
        return all(not self.load[p] or self.load[p] + s <= limit for p, s in self.port_of_move[number])

    # Letting go

    def _complete(self) -> None:
        still = []
        for number in self.filling:
            if self.unsent[number]:
                still.append(number)
                continue
            for source in self.units[number].reads:
                self.waiting[source].discard(number)
                if not self.waiting[source]:
                    self.idle.append(source)
        self.filling = still
        for number in self.idle:
            old = self.olds[number]
            if number in self.staged:
                self.staged[number] = (self.staged[number][0], self.wave)
                self.leaving.append((self._host_of(old.key[0]), old.num_bytes))
            elif self.released[number] < 0:
                self.released[number] = self.wave
                if old.space < self.num_devices:
                    self.free[old.space] += old.num_bytes
                else:
                    self.leaving.append((old.space, old.num_bytes))
        self.idle = []

    # Host memory

    def _host_of(self, device: int) -> int:
        return self.num_devices + int(self.topology.node_of[device])

    def _stage_out(self) -> Stuck | None:
        """Puts old storages into host memory until the largest unit that the fullest gang's spaces wait for fits, so
        that whatever comes next there fits too; the witness where that is not possible."""
        largest = [0] * self.found.num_spaces
        for members in self.pending:
            for number in members:
                unit = self.units[number]
                if not (unit.frees_nothing and self.useful[unit.space]):
                    largest[unit.space] = max(largest[unit.space], unit.num_bytes)
        tried: set[tuple[int, ...]] = set()
        for roomy in (largest, None):
            best: tuple[int, list[int]] | None = None
            for members in self.pending:
                short = self._short(members, roomy)
                key = tuple(sorted(short))
                if not short or (roomy is not None and key in tried) or (best and best[0] <= sum(short.values())):
                    continue
                tried.add(key)
                chosen = self._in_the_way(short)
                if chosen is not None:
                    best = (sum(short.values()), chosen)
            if best is not None:
                for number in best[1]:
                    self._stage(number)
                return None
        return self._stuck()

    def _short(self, members: list[int], roomy: list[int] | None) -> dict[int, int]:
        """Bytes that each GPU lacks for the units of a gang (or for the largest that it waits for)."""
        need: dict[int, int] = {}
        for number in members:
            unit = self.units[number]
            if unit.space < self.num_devices and not (unit.frees_nothing and self.useful[unit.space]):
                need[unit.space] = need.get(unit.space, 0) + unit.num_bytes
        if roomy is not None:
            need = {space: max(size, roomy[space]) for space, size in need.items()}
        return {space: size - self.free[space] for space, size in need.items() if size > self.free[space]}

    def _in_the_way(self, short: dict[int, int]) -> list[int] | None:
        """Old storages of each space, the smallest that suffices or the largest ones, that host memory has room for."""
        room = dict(enumerate(self.free))
        chosen: list[int] = []
        for space, size in sorted(short.items()):
            host = self._host_of(space)
            able = sorted(
                (old.num_bytes, number)
                for number, old in enumerate(self.olds)
                if old.space == space and old.sole and self.released[number] < 0 and self.waiting[number]
            )
            while size > 0:
                able = [entry for entry in able if entry[0] <= room[host]]
                if not able:
                    return None
                num_bytes, number = next((entry for entry in able if entry[0] >= size), able[-1])
                able.remove((num_bytes, number))
                chosen.append(number)
                room[host] -= num_bytes
                size -= num_bytes
        return chosen

    def _stage(self, number: int) -> None:
        old = self.olds[number]
        device = old.key[0]
        self.free[self._host_of(device)] -= old.num_bytes
        self.free[old.space] += old.num_bytes  # at the end of this wave: nothing else happens in it
        self.released[number] = self.wave
        self.staged[number] = (self.wave, -1)
        for reader in self.waiting[number]:
            for at in self.units[reader].moves:
                move = self.moves[at]
                if self.move_wave[at] >= 0 or move.after or move.src != device:
                    continue
                src = device + self.num_devices
                self.moves[at] = replace(move, src=src, link=self.links.link(src, move.dst))
                self.port_of_move[at] = self.ports.of(self.moves[at])

    # Results

    def _stuck(self) -> Stuck:
        # A weight may wait for its master, or a window, with room to spare: the witness is one that memory keeps
        # waiting.
        waiting = [self.units[n] for members in self.pending for n in members] or [self.units[n] for n in self.filling]
        short = [unit for unit in waiting if unit.num_bytes > self.free[unit.space]] or waiting
        unit = min(short, key=lambda u: (u.num_bytes - self.free[u.space], u.key))
        return Stuck(
            space=unit.space,
            need_bytes=unit.num_bytes,
            free_bytes=max(self.free[unit.space], 0),
            storage=unit.key,
            host_short_bytes=self._host_short(unit),
        )

    def _host_short(self, unit: Unit) -> int | None:
        if unit.space >= self.num_devices:
            return None
        left = (old for old, wave in zip(self.olds, self.released, strict=True) if wave < 0)
        able = [old.num_bytes for old in left if old.space == unit.space and old.sole]
        if not able:
            return None
        lacking = unit.num_bytes - self.free[unit.space]
        least = min((size for size in able if size >= lacking), default=max(able))
        return max(least - self.free[self._host_of(unit.space)], 0)

    def _schedule(self) -> Schedule:
        order = sorted(range(len(self.moves)), key=lambda i: (self.move_wave[i], i))
        position = {number: at for at, number in enumerate(order)}
        ordered = [replace(m, after=tuple(position[a] for a in m.after)) for m in (self.moves[i] for i in order)]
        waves = np.array([self.move_wave[i] for i in order], dtype=np.int64)
        return Schedule(
            mode="tight",
            moves=Moves.of(ordered),
            wave=waves,
            slices=np.ones_like(waves),
            num_waves=self.wave,
            window_bytes=self.window_bytes,
            acquire={unit.key: wave for unit, wave in zip(self.units, self.acquired, strict=True)},
            release={old.key: wave for old, wave in zip(self.olds, self.released, strict=True)},
            staged={self.olds[number].key: waves for number, waves in self.staged.items()},
            transfer_s=self._seconds(ordered, waves),
        )

    def _seconds(self, moves: list[Move], wave: IntArray) -> float:
        """Of the moves and of what goes to host memory."""
        every, waves = list(moves), wave.tolist()
        for number, (at, _) in self.staged.items() if moves else ():
            old = self.olds[number]
            device, host = old.key[0], old.key[0] + self.num_devices
            link = self.links.link(device, host)
            every.append(replace(moves[0], src=device, dst=host, num_bytes=old.num_bytes, link=link))
            waves.append(at)
        first = np.array(waves, dtype=np.int64)
        return transfer_seconds(Moves.of(every), first, np.ones_like(first), self.links, agreed=True)
