"""Where the processes of a plan could lie: sets of owners that share GPUs, each set on GPUs of its own.

All in one set is a colocated plan, every owner alone a split one, and what is between is mixed. In async mode
generation runs beside everything else and is alone in its set (NRS3002). Sets get runs of
neighbouring GPUs, the largest first; in clusters of different nodes in every order. Runs are counted in units: small
clusters are cut into single GPUs, larger ones into halves and quarters of nodes, then whole nodes, where only some
numbers of them are tried (``_sizes``). The same space is searched by HybridFlow (Sheng 2024, algorithm 1), by whole
plans there.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from nereus.ir.cluster import Cluster, Device
from nereus.ir.plan import Plan, Stage
from nereus.lang.ranges import compress_devices
from nereus.models.memory.neighbours import members
from nereus.models.memory.state import owner_of
from nereus.planner.limits import Limits

#: Units that a cluster is cut into where that takes less than whole nodes; sizes of runs are as fine as that.
_UNITS = 16
#: More placements than that are not listed: plans with many owners are cut into fewer sets.
_MOST = 60_000

#: Sets of owners: (their names, the GPUs that they have to stay on or None).
Sets: TypeAlias = tuple[tuple[tuple[str, ...], tuple[Device, ...] | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices of each owner, in rank order."""

    devices: Mapping[str, tuple[Device, ...]]

    def changes(self, plan: Plan) -> dict[str, str]:
        """What to write, by owner."""
        found = {}
        whole = {node.name: node.num_gpus for node in plan.cluster.nodes}
        for owner in plan.owners():
            devices = self.devices[owner.name]
            if devices != owner.devices:
                words = compress_devices(devices, whole)
                on = words[0] if len(words) == 1 else f"({', '.join(words)})"
                pinned = any(key == "place" for key, _ in owner.key_spans)
                found[owner.name] = f"on = {on}" + ("  place = default" if pinned else "")
        return found

    def put(self, plan: Plan) -> Plan:
        """The plan's stages on these GPUs, their degrees not yet changed."""
        return replace(plan, stages=tuple(self._stage(plan, stage) for stage in plan.stages))

    def _stage(self, plan: Plan, stage: Stage) -> Stage:
        if stage.service is not None:
            return stage
        devices = self.devices[owner_of(plan, stage).name]
        return stage if devices == stage.devices else replace(stage, devices=devices, place=None)


def here(plan: Plan) -> Placement:
    return Placement(devices={owner.name: owner.devices for owner in plan.owners()})


@dataclass(frozen=True, slots=True)
class Runs:
    """A placement in units: each set that moves has ``counts`` of them from ``starts`` on. ``by_owner``: those of
    each owner that moves; where all units are alike, of a run like it near the first."""

    sets: Sets
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    by_owner: Mapping[str, tuple[int, int]]


class Placements:
    """Those of one plan under ``limits``."""

    def __init__(self, plan: Plan, limits: Limits) -> None:
        self.plan = plan
        self.limits = limits
        owners = plan.owners()
        self.num_gpus = {owner.name: num_gpus_of(plan, owner, limits) for owner in owners}
        self.free = [owner.name for owner in owners if not stays(plan, owner, limits)]
        self.staying = {owner.name: owner.devices for owner in owners if owner.name not in self.free}
        taken = {device for devices in self.staying.values() for device in devices}
        self.units = [unit for unit in units_of(plan.cluster, limits) if taken.isdisjoint(unit)]
        kinds = {_facts(plan.cluster, unit) for unit in self.units}
        nodes = Counter(unit[0].node for unit in self.units)
        self.alike = len(kinds) <= 1 and len(set(nodes.values())) <= 1
        #: Units after which a run has the same shape again.
        self._period = next(iter(nodes.values()), 1)
        self._runs: dict[tuple[int, int], tuple[Device, ...]] = {}

    def run(self, start: int, count: int) -> tuple[Device, ...]:
        if (start, count) not in self._runs:
            units = self.units[start : start + count]
            self._runs[start, count] = tuple(device for unit in units for device in unit)
        return self._runs[start, count]

    def __iter__(self) -> Iterator[Runs]:
        for sets in self._all_sets():
            yield from self._of(sets)

    def _all_sets(self) -> Iterator[Sets]:
        """Owners that stay have sets of their own, by their GPUs; others may join them there."""
        fixed: dict[tuple[Device, ...], list[str]] = {}
        for name, devices in self.staying.items():
            fixed.setdefault(devices, []).append(name)
        base = [(tuple(names), devices) for devices, names in fixed.items()]
        apart = self._apart()
        most = len(self.free)
        while most > 1 and self._count(most) > _MOST:
            most -= 1
        return (
            sets
            for sets in _partitions(self.free, base, most)
            if not any(len(names) > 1 and not apart.isdisjoint(names) for names, _ in sets)
        )

    def _apart(self) -> set[str]:
        """Owners that share no GPU with another."""
        if self.plan.workload.mode == "sync":
            return set()
        owners = self.plan.owners()
        return {o.name for o in owners if any(stage.kind == "generate" for stage in members(self.plan, o))}

    def _of(self, sets: Sets) -> Iterator[Runs]:
        moving = [names for names, devices in sets if devices is None]
        if not all(self._allowed(names, len(devices)) for names, devices in sets if devices is not None):
            return
        width = len(self.units[0]) if self.alike and self.units else 0
        for counts in _compositions(len(moving), len(self.units), _sizes(len(self.units))):
            if width and not all(self._allowed(names, n * width) for names, n in zip(moving, counts, strict=True)):
                continue
            for order in [_largest_first(counts)] if self.alike else itertools.permutations(range(len(moving))):
                starts, at = [0] * len(moving), 0
                for number in order:
                    starts[number] = at
                    at += counts[number]
                found = self._placed(sets, moving, tuple(starts), counts)
                if width or all(self._allowed(names, len(self.run(*found.by_owner[names[0]]))) for names in moving):
                    yield found

    def _placed(
        self, sets: Sets, moving: Sequence[tuple[str, ...]], starts: tuple[int, ...], counts: tuple[int, ...]
    ) -> Runs:
        first = [start % self._period for start in starts] if self.alike else starts
        by_owner = {
            name: (start, count) for names, start, count in zip(moving, first, counts, strict=True) for name in names
        }
        return Runs(sets, starts, counts, by_owner)

    def placement(self, runs: Runs) -> Placement:
        """On runs alike, so that most owners stay where they are."""
        moving = [names for names, devices in runs.sets if devices is None]
        found = [self.run(start, count) for start, count in zip(runs.starts, runs.counts, strict=True)]
        if self.alike:
            found = self._settled(moving, found)
        devices = {name: run for names, run in zip(moving, found, strict=True) for name in names}
        return Placement(devices=self.staying | {n: at for names, at in runs.sets if at for n in names} | devices)

    def _settled(self, moving: Sequence[tuple[str, ...]], runs: list[tuple[Device, ...]]) -> list[tuple[Device, ...]]:
        present = {owner.name: owner.devices for owner in self.plan.owners()}
        usable = {device for unit in self.units for device in unit}
        options: list[list[tuple[Device, ...] | None]] = []
        for names, run in zip(moving, runs, strict=True):
            kept = dict.fromkeys(present[name] for name in names)
            options.append([*(at for at in kept if _shape(at) == _shape(run) and usable.issuperset(at)), None])
        most, found = 0, runs
        for picked in itertools.product(*options):
            stay = sum(present[name] == at for names, at in zip(moving, picked, strict=True) for name in names)
            if stay > most:
                fitted = self._fitted(runs, picked)
                if fitted is not None:
                    most, found = stay, fitted
        return found

    def _fitted(
        self, runs: Sequence[tuple[Device, ...]], picked: Sequence[tuple[Device, ...] | None]
    ) -> list[tuple[Device, ...]] | None:
        """``picked`` runs, and for the others the first free ones that are alike; None where they do not fit in."""
        taken: set[Device] = set()
        for run in picked:
            if run is not None and not taken.isdisjoint(run):
                return None
            taken.update(run or ())
        found = list(picked)
        width = len(self.units[0])
        for number in _largest_first([len(run) for run in runs]):
            if found[number] is None:
                like, count = runs[number], len(runs[number]) // width
                tried = (self.run(start, count) for start in range(len(self.units) - count + 1))
                at = next((run for run in tried if _shape(run) == _shape(like) and taken.isdisjoint(run)), None)
                if at is None:
                    return None
                found[number] = at
                taken.update(at)
        return [run for run in found if run is not None]

    def _allowed(self, names: Sequence[str], num_gpus: int) -> bool:
        return all(least <= num_gpus <= most for least, most in (self.num_gpus[name] for name in names))

    def _count(self, most: int) -> int:
        """About how many placements there are with at most so many sets that move."""
        sizes = _sizes(len(self.units))
        total = 0
        for number in range(1, most + 1):
            total += _stirling(len(self.free), number) * sum(1 for _ in _compositions(number, len(self.units), sizes))
            if total > _MOST:
                break
        return total


def _shape(run: Sequence[Device]) -> list[int]:
    """GPUs of each node that it goes through."""
    return [len(list(devices)) for _, devices in itertools.groupby(run, key=lambda device: device.node)]


def stays(plan: Plan, owner: Stage, limits: Limits) -> bool:
    return any(stage.name in limits.pinned for stage in members(plan, owner))


def num_gpus_of(plan: Plan, owner: Stage, limits: Limits) -> tuple[int, int]:
    """Least and most for all stages in its processes."""
    found = [limits.num_gpus[s.name] for s in members(plan, owner) if s.name in limits.num_gpus]
    return max((least for least, _ in found), default=1), min((most for _, most in found), default=sys.maxsize)


def units_of(cluster: Cluster, limits: Limits) -> list[tuple[Device, ...]]:
    """Runs of GPUs that are given whole."""
    nodes = [node for node in cluster.nodes if node.name not in limits.free and node.name not in cluster.lost]
    devices = [device for node in nodes for device in node.devices]
    usable = set(devices[: limits.most_gpus])
    part = 1
    while nodes and len(devices) // part > _UNITS and all(node.num_gpus % (2 * part) == 0 for node in nodes):
        part *= 2
    found = [node.devices[at : at + part] for node in nodes for at in range(0, node.num_gpus, part)]
    return [unit for unit in found if usable.issuperset(unit)]


def _facts(cluster: Cluster, unit: Sequence[Device]) -> object:
    node = cluster.node(unit[0].node)
    return replace(node, name=""), len(unit)


def _sizes(num_units: int) -> list[int]:
    if num_units <= _UNITS:
        return list(range(1, num_units + 1))
    step = -(-num_units // _UNITS)
    powers = [1 << n for n in range(num_units.bit_length()) if 1 << n <= num_units]
    return sorted({*powers, *range(step, num_units + 1, step), num_units})


def _compositions(parts: int, total: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of units for each of ``parts`` sets, together at most ``total``."""
    if not parts:
        yield ()
        return
    for size in sizes:
        if size + (parts - 1) * sizes[0] > total:
            break
        for rest in _compositions(parts - 1, total - size, sizes):
            yield (size, *rest)


def _largest_first(counts: Sequence[int]) -> list[int]:
    return sorted(range(len(counts)), key=lambda number: -counts[number])


def _partitions(
    names: Sequence[str], base: Sequence[tuple[tuple[str, ...], tuple[Device, ...] | None]], most: int
) -> Iterator[Sets]:
    """Each name joins a set that is there, or begins one of at most ``most``."""
    if not names:
        yield tuple(base)
        return
    name, rest = names[0], names[1:]
    for at, (joined, devices) in enumerate(base):
        yield from _partitions(rest, [*base[:at], ((*joined, name), devices), *base[at + 1 :]], most)
    if sum(devices is None for _, devices in base) < most:
        yield from _partitions(rest, [*base, ((name,), None)], most)


def _stirling(num: int, parts: int) -> int:
    """Ways to cut ``num`` things into ``parts`` sets."""
    if parts in (1, num):
        return 1
    return 0 if parts > num else parts * _stirling(num - 1, parts) + _stirling(num - 1, parts - 1)
