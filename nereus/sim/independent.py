"""Independent migration: every model-stage that changes moves itself, without an order across stages.

The rules, for each changed stage on its own, from the same diff and placement as the compiled transition:

1. it launches at a time of its own and stops its ranks;
2. it gives up at once the devices that it leaves and of whose state another device that it still has holds a copy;
3. it acquires its target devices one after the other in the order of its ranks, and on each the memory of its new
   storages, and holds what it has meanwhile. A device that another stage owns is waited for;
4. once it has all of them it builds its groups and copies what each place lacks from a holder (one in the same node
   where there is one, the least loaded), all at once;
5. then it commits, frees its old storages, gives up the devices that it left, and goes on.

Three ways to acquire: ``waits``: the devices that the plan names, each waited for; ``pool``: as many devices as the
plan says, each waited for, from whatever is free (what a resource manager hands out that knows no plan); ``fails``: the
planned devices, none waited for: where one has another owner still, or no room, the migration fails (an overflow: a
device holds one owner).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from nereus.models.priors import MESSAGE_S, commit_s, groups_s
from nereus.passes.compiled import Transition
from nereus.sim.builder import JobBuilder
from nereus.sim.job import Job
from nereus.sim.network import Network

WAYS = ("waits", "pool", "fails")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A changed stage: devices in rank order, bytes that come and go per memory space, and what it copies as (source
    place, destination place) -> bytes. ``spare``: devices that it can give up before anything is copied."""

    stage: str
    old: tuple[int, ...]
    new: tuple[int, ...]
    spare: tuple[int, ...]
    arriving: Mapping[int, int]
    leaving: Mapping[int, int]
    copies: Mapping[tuple[int, int], int]


def components(transition: Transition) -> tuple[Component, ...]:
    """Stages of which a storage, or a device, comes or goes."""
    storages = transition.storages
    copies = _copies(transition)
    found = []
    for stage in storages.stages:
        old_side, new_side = storages.old.get(stage), storages.new.get(stage)
        old = tuple(old_side.rank_of_device) if old_side is not None else ()
        new = tuple(new_side.rank_of_device) if new_side is not None else ()
        arriving: dict[int, int] = {}
        leaving: dict[int, int] = {}
        for name, before, after in storages.slots(stage):
            for total in storages.totals(stage, name):
                for slot, counts, spaces in ((before, total.old, leaving), (after, total.new, arriving)):
                    for space, count in zip(total.space.tolist(), counts.tolist(), strict=True):
                        if slot is not None and count:
                            spaces[space] = spaces.get(space, 0) + count * slot.element_bytes
        if arriving or leaving or set(old) != set(new):
            found.append(
                Component(
                    stage=stage,
                    old=old,
                    new=new,
                    spare=_spare(transition, stage, old, new),
                    arriving=arriving,
                    leaving=leaving,
                    copies=copies.get(stage, {}),
                )
            )
    return tuple(found)


def independent_job(transition: Transition, parts: Iterable[Component], launch_s: Mapping[str, float], way: str) -> Job:
    """The job of all components together. ``launch_s``: per stage. ``way``: see the module."""
    if way not in WAYS:
        raise ValueError(f"devices are acquired by {', '.join(WAYS)}, not {way!r}")
    build = _Builder(transition, way)
    for part in parts:
        build.add(part, launch_s[part.stage])
    return build.finish()


def _copies(transition: Transition) -> dict[str, dict[tuple[int, int], int]]:
    """stage -> (source, destination) -> bytes."""
    diff, topology = transition.diff, transition.topology
    sent: dict[int, int] = {}
    found: dict[str, dict[tuple[int, int], int]] = {}
    for demand in diff.demands:
        table = diff.tables[demand.table]
        sets = diff.geometries[diff.geometry_of[demand.table]].new_sets
        holders = diff.holders[demand.table][demand.cls]
        near = [p for p in holders if topology.node_of_place(p) == demand.node] or list(holders)
        for place in demand.wanters:
            stage = next(
                sets[table.new_groups[g].state_set].stage
                for g in table.class_wanters[demand.cls]
                if place in table.new_groups[g].places
            )
            source = min(near, key=lambda p: (sent.get(p, 0), p))
            sent[source] = sent.get(source, 0) + demand.num_bytes
            pairs = found.setdefault(stage, {})
            pairs[source, place] = pairs.get((source, place), 0) + demand.num_bytes
    return found


def _spare(transition: Transition, stage: str, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Devices of ``old`` that are not in ``new`` and all of whose state other devices of ``old`` hold too."""
    diff, num_devices = transition.diff, transition.topology.num_devices
    held: list[set[int]] = []  # per class of the stage's state: devices with a copy
    for number, table in enumerate(diff.tables):
        sets = diff.geometries[diff.geometry_of[number]].old_sets
        mine = [g for g, group in enumerate(table.old_groups) if sets[group.state_set].stage == stage]
        for groups in table.class_holders:
            devices = {p % num_devices for g in groups if g in mine for p in table.old_groups[g].places}
            if devices:
                held.append(devices)
    found = []
    for device in sorted(set(old) - set(new)):
        if all(device not in devices or len(devices) > 1 for devices in held):
            found.append(device)
            for devices in held:
                devices.discard(device)
    return tuple(found)


class _Builder(JobBuilder):
    def __init__(self, transition: Transition, way: str) -> None:
        super().__init__()
        self.transition, self.way = transition, way
        self.num_devices = transition.topology.num_devices
        self.pool = len(transition.memory.capacity)  # a space that counts devices; behind it one per device, its owner
        self.owned: set[int] = set()
        self.base = transition.memory.state.kept + transition.memory.state.old

    def add(self, part: Component, launch_s: float) -> None:
        self.owned |= set(part.old)
        stage = part.stage
        quiesced = self.op(f"launch {stage}", fixed_s=launch_s)
        for device in part.spare:
            self._leave(part, device, quiesced)
        last = quiesced
        hosts = [space for space in part.arriving if space >= self.num_devices]
        for device in part.new:
            last = self._enter(part, device, last)
        for space in hosts:
            size = part.arriving[space]
            last = self.op(f"{stage} acquires memory {space}", (last,), space=space, acquired=size)
        groups = self.op(f"groups {stage}", (last,), fixed_s=groups_s(len(part.new)))
        copied = [
            self.op(f"{stage} copies {src} -> {dst}", (groups,), fixed_s=MESSAGE_S, num_bytes=size, src=src, dst=dst)
            for (src, dst), size in part.copies.items()
        ]
        commit = self.op(f"commit {stage}", (groups, *copied), fixed_s=commit_s(len(part.new)))
        for device in part.old:
            if device not in part.spare:
                self._leave(part, device, commit)
        for space, size in part.leaving.items():
            if space >= self.num_devices:
                self.op(f"{stage} frees memory {space}", (commit,), space=space, released=size)
        self.op(f"resume {stage}", (commit,))

    def _enter(self, part: Component, device: int, last: int) -> int:
        comes = device not in part.old
        size, name = part.arriving.get(device, 0), f"{part.stage} enters {device}"
        if self.way == "pool":
            return self.op(name, (last,), space=self.pool, acquired=1) if comes else last
        takes = device if comes and self.way == "waits" else -1
        if comes and self.way == "fails":
            last = self.op(f"{part.stage} owns {device}", (last,), space=self.pool + 1 + device, acquired=1)
        return self.op(name, (last,), space=device if size else -1, acquired=size, takes=takes)

    def _leave(self, part: Component, device: int, after: int) -> int:
        goes = device not in part.new
        size, name = part.leaving.get(device, 0), f"{part.stage} leaves {device}"
        if self.way == "pool":
            return self.op(name, (after,), space=self.pool, released=1) if goes else after
        gives = device if goes and self.way == "waits" else -1
        left = self.op(name, (after,), space=device if size else -1, released=size, gives=gives)
        if goes and self.way == "fails":
            left = self.op(f"{part.stage} disowns {device}", (left,), space=self.pool + 1 + device, released=1)
        return left

    def finish(self) -> Job:
        network = Network(self.transition.topology)
        sizes = np.array([row[0] for row in self.rows], dtype=np.int64)
        ports, weights = self.ports(network, np.flatnonzero(sizes))
        owned = sorted(self._all_owned() | self.owned)
        owners = np.zeros(self.num_devices, dtype=np.int64)
        owners[owned] = 1
        base = np.concatenate((self.base, [len(owned)], owners))
        capacity = np.concatenate((self.transition.memory.capacity, [self.num_devices], np.ones_like(owners)))
        resources = network.resources(base, capacity, tuple(owned))
        return self.job(resources, ports, weights, blocking=self.way != "fails")

    def _all_owned(self) -> set[int]:
        index = self.transition.topology.index()
        return {index[d] for stage in self.transition.old.owners() for d in stage.ranks}
