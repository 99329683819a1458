"""Units of tight mode: single storages that come, what fills each, and what each lets go.

A *gang* is the units of one model, tensor and slot: no other reads the old storages that it reads, which all go when
it is there. Gangs whose units lie alike (all layers of one pipeline stage) form a class.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from nereus.ir.holdings import Topology
from nereus.ir.intervals import Intervals
from nereus.ir.schedule import StorageKey
from nereus.ir.transition import INTER, LOCAL, Move
from nereus.passes.diff import Diff
from nereus.passes.links import Links
from nereus.passes.route import Routed
from nereus.passes.storages import StorageMap


@dataclass(slots=True, eq=False)
class Unit:
    """A new storage. ``moves`` fill it; ``reads``: old storages (by number) that something in it comes from."""

    key: StorageKey
    space: int
    num_bytes: int
    moves: list[int] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    master: int = -1  # unit of the master that it may be derived from

    @property
    def frees_nothing(self) -> bool:
        """State that the framework makes: it comes from nowhere, so nothing old waits for it. (A weight waits for its
        master.)"""
        return not self.moves and not self.reads and self.master < 0 and self.key[2] != "master"


@dataclass(slots=True, eq=False)
class Old:
    """An old storage that goes. ``sole``: no other state set of its device holds the same elements."""

    key: StorageKey
    space: int
    num_bytes: int
    model: str
    readers: list[int] = field(default_factory=list)
    sole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    moves: list[Move]
    units: list[Unit]
    olds: list[Old]
    targets: list[list[int]]  # move -> units that it fills
    gangs: list[list[int]]
    masters: list[int]  # per gang: the gang of the masters that it may be derived from, or -1
    num_spaces: int


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


def find_units(diff: Diff, storages: StorageMap, moves: list[Move], topology: Topology) -> Units:
    num_devices = topology.num_devices
    units: list[Unit] = []
    olds: list[Old] = []
    unit_of: dict[StorageKey, int] = {}
    old_of: dict[StorageKey, int] = {}
    model_of = {
        stage: shares.state_set.model for side in (storages.old, storages.new) for stage, shares in side.items()
    }
    for stage in storages.stages:
        for device in storages.devices_of(stage):
            host = num_devices + int(topology.node_of[device])
            for slot, old_slot, new_slot in storages.slots(stage):
                fit = storages.fit(stage, slot, device)
                for tensor in np.flatnonzero(fit.old).tolist():
                    space = host if fit.old_host[tensor] else device
                    width = old_slot.element_bytes if old_slot is not None else 0
                    key = (device, stage, slot, tensor)
                    old_of[key] = len(olds)
                    olds.append(Old(key, space, int(fit.old[tensor]) * width, model_of[stage]))
                for tensor in np.flatnonzero(fit.new).tolist():
                    space = host if fit.new_host[tensor] else device
                    key = (device, stage, slot, tensor)
                    width = new_slot.element_bytes if new_slot is not None else 0
                    unit_of[key] = len(units)
                    units.append(Unit(key, space, int(fit.new[tensor]) * width))
    for unit in units:
        device, stage, slot, tensor = unit.key
        if slot == "weight":
            unit.master = unit_of.get((device, stage, "master", tensor), -1)
    targets: list[list[int]] = [[] for _ in moves]
    for number, move in enumerate(moves):
        table = diff.tables[move.table]
        geometry = diff.geometries[diff.geometry_of[move.table]]
        slot = table.slots[move.slots[0]] if move.slots else table.slots[0]
        tensor = int(geometry.cells.tensor[move.intervals.cell[0]])
        src, dst = move.src % num_devices, move.dst % num_devices
        for state_set in geometry.new_sets:
            at = unit_of.get((dst, state_set.stage, slot, tensor), -1)
            if at < 0 or (units[at].space >= num_devices) != (move.dst >= num_devices):
                continue
            units[at].moves.append(number)
            targets[number].append(at)
            if not move.after:
                for source in geometry.old_sets:
                    held = old_of.get((src, source.stage, slot, tensor))
                    if held is not None:
                        units[at].reads.add(held)
    for unit in units:  # local copies
        device, stage, slot, tensor = unit.key
        for other in storages.old:
            if model_of[other] == model_of[stage] and (device, other, slot, tensor) in old_of:
                unit.reads.add(old_of[device, other, slot, tensor])
    for number, unit in enumerate(units):
        for old in unit.reads:
            olds[old].readers.append(number)
    for old_storage in olds:
        device, stage, slot, tensor = old_storage.key
        twins = (other for other, shares in storages.old.items() if other != stage)
        old_storage.sole = not any(
            model_of[o] == old_storage.model and device in storages.old[o].rank_of_device for o in twins
        )
    gangs: dict[tuple[str, int, str], list[int]] = {}
    for number, unit in enumerate(units):
        _, stage, slot, tensor = unit.key
        gangs.setdefault((model_of[stage], tensor, slot), []).append(number)
    index = {key: at for at, key in enumerate(gangs)}
    return Units(
        moves=moves,
        units=units,
        olds=olds,
        targets=targets,
        gangs=list(gangs.values()),
        masters=[
            index[model, tensor, "master"] if any(units[u].master >= 0 for u in members) else -1
            for (model, tensor, _), members in gangs.items()
        ],
        num_spaces=num_devices + len(topology.nodes),
    )


class PortLoads:
    """Ports of moves: GPU out, GPU in, NIC out, NIC in, numbered in that order."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.num_rails = len(links.rail)
        self.num_ports = 2 * links.num_devices + 2 * self.num_rails

    def of(self, move: Move) -> tuple[tuple[int, float], ...]:
        """(port, seconds) of every port that ``move`` passes."""
        link, out_rate, in_rate, nic_rate = self.links.rates(move.src, move.dst)
        if link == LOCAL:
            return ()
        count = self.links.num_devices
        ends = (
            (move.src % count, move.num_bytes * out_rate),
            (count + move.dst % count, move.num_bytes * in_rate),
        )
        if link != INTER:
            return ends
        first = 2 * count
        return (
            *ends,
            (first + self.links.rail_number(move.src), move.num_bytes * nic_rate),
            (first + self.num_rails + self.links.rail_number(move.dst), move.num_bytes * self.links.rail_s(move.dst)),
        )


def balanced_order(found: Units, free: list[int]) -> list[int]:
    """Gangs in an order in which every class goes forward at the same pace.

    At the same pace every port and every memory space goes from its start to its end along a line, but for one gang of
    every class at a time: no stage idles and nothing piles up. Before the next in line come those that fit and leave
    every space they touch room for the largest that is still to come there, if it does not.
    """
    releases: dict[int, list[int]] = {}
    gang_of_unit = {unit: gang for gang, members in enumerate(found.gangs) for unit in members}
    room = np.array(free, dtype=np.int64)
    for number, old in enumerate(found.olds):
        if not old.readers:
            room[old.space] += old.num_bytes
            continue
        # The last of the gangs that read it (a derived weight's own gang, or that of another stage).
        releases.setdefault(max(gang_of_unit[r] for r in old.readers), []).append(number)
    classes: dict[tuple[object, ...], int] = {}
    members: list[list[int]] = []
    columns: list[tuple[dict[int, int], dict[int, int]]] = []
    useless: list[int] = []
    for gang, units in enumerate(found.gangs):
        if all(found.units[u].frees_nothing for u in units):
            useless.append(gang)
            continue
        need: dict[int, int] = {}
        for u in units:
            unit = found.units[u]
            need[unit.space] = need.get(unit.space, 0) + unit.num_bytes
        gone: dict[int, int] = {}
        for number in releases.get(gang, ()):
            old = found.olds[number]
            gone[old.space] = gone.get(old.space, 0) + old.num_bytes
        key = (tuple(sorted(need.items())), tuple(sorted(gone.items())), found.masters[gang] < 0)
        at = classes.setdefault(key, len(members))
        if at == len(members):
            members.append([])
            columns.append((need, gone))
        members[at].append(gang)
    count = len(members)
    need_of = np.zeros((count, found.num_spaces), dtype=np.int64)
    gone_of = np.zeros_like(need_of)
    for at, (need, gone) in enumerate(columns):
        for matrix, row in ((need_of, need), (gone_of, gone)):
            matrix[at, list(row)] = list(row.values())
    size = np.array([len(m) for m in members], dtype=np.float64)
    touched = (need_of > 0) | (gone_of > 0)
    taken = np.zeros(count, dtype=np.int64)
    pace = 0.5 / np.maximum(size, 1)
    order: list[int] = []
    done, masters = [False] * len(found.gangs), found.masters
    derived = [at for at, gangs in enumerate(members) if any(masters[g] >= 0 for g in gangs)]
    largest = need_of.max(axis=0, initial=0)
    for _ in range(int(size.sum())):
        ready = np.isfinite(pace)
        ready[[at for at in derived if not done[masters[members[at][int(taken[at]) % len(members[at])]]]]] = False
        able = np.flatnonzero((need_of <= room).all(axis=1) & ready)
        after = room + gone_of[able] - need_of[able]
        keeps = able[((after >= largest) | ~touched[able]).all(axis=1)]
        choice = keeps if len(keeps) else able
        if not len(choice):
            choice = np.flatnonzero(ready)
        chosen = int(choice[np.argmin(pace[choice])])
        order.append(members[chosen][int(taken[chosen])])
        done[order[-1]] = True
        taken[chosen] += 1
        room += gone_of[chosen] - need_of[chosen]
        pace[chosen] = (taken[chosen] + 0.5) / size[chosen]
        if taken[chosen] == size[chosen]:
            pace[chosen] = np.inf
            largest = need_of[np.isfinite(pace)].max(axis=0, initial=0)
    return order + useless
