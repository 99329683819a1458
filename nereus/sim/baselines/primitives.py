"""The paper's own lowering: Split, Destroy, Extend, Merge through the largest common layout, one primitive at a time.

Rules (Nereus, arXiv 2609.34645): a unit is one replica of a model-stage, laid out TP x PP, with its whole optimizer
state. T_sub is the largest layout that both sides split into. Per model-stage: Split every unit into T_sub units on the
same GPUs (a position-wise all-gather, here a ring; source buffers stay until it ends); Destroy units that the new plan
has no place for while another lives; Extend living units to GPUs that lack one, shard by shard from rank to rank; Merge
T_sub units into the new layout, where a GPU keeps what it has of its new shard and nothing is copied. A sole replica
is destroyed after it was copied. Chains of model-stages are joined greedily: what releases goes before what acquires,
ties in the order generation, inference, training; an acquisition that does not fit, or GPUs that a concurrent stage
has not left, wait for a Destroy; where nothing can go the plan is infeasible.

Out of scope as in the paper: context and expert parallelism, sharded optimizer state (stages with ZeRO are taken as
replicated where that fits, so a unit is larger), interleaving, degrees that do not nest. Sources of Extends take turns;
units are merged with neighbours. A model-stage that the old plan lacks is copied from the first replica of its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np

from nereus.ir.diagnostic import Severity
from nereus.ir.holdings import StateSet
from nereus.ir.layout import IntArray
from nereus.models.memory import check_memory
from nereus.passes.atoms import AtomTable
from nereus.sim.baselines.answer import Answer, Step, Transfer, positive, refusal
from nereus.sim.baselines.direct import lacks, lost
from nereus.sim.baselines.problem import Problem, build_problem, plan_layout, with_places
from nereus.sim.baselines.units import (
    Content,
    Unit,
    common_set,
    content_of,
    outside_scope,
    placed_set,
    replicated,
    split_groups,
    units_of,
)

#: Tie-break of the global order.
_ORDER = {"generate": 0, "infer": 1, "logprob": 1, "train": 2}
_PHASES = ("split", "destroy", "extend", "destroy after extend", "merge", "load")


@dataclass(slots=True, kw_only=True)
class _Primitive:
    stage: str
    phase: int
    devices: tuple[int, ...]
    transfers: tuple[Transfer, ...] = ()
    acquired: IntArray
    released: IntArray
    enters: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Lowered:
    """Primitives of one model-stage, the state set it ends in, and its tables."""

    primitives: list[_Primitive]
    end: StateSet | None
    tables: list[AtomTable] = field(default_factory=list)
    final: list[tuple[int, ...]] = field(default_factory=list)


class _OutOfScope(Exception):
    pass


class Primitives:
    name = "primitives"
    system = "Nereus paper"

    def solve(self, problem: Problem) -> Answer:
        altered = None
        if any(s.zero in (1, 2) for plan in (problem.old, problem.new) for s in plan.stages):
            altered = "sharded optimizer state is taken as replicated"
            sides = replicated(problem.old), replicated(problem.new)
            for plan in sides:
                errors = [d for d in check_memory(plan) if d.severity is Severity.ERROR]
                if errors:
                    return refusal(self.name, problem, f"with whole optimizer states {errors[0].headline}")
            problem = build_problem(*sides)
        gone = lost(problem)
        if gone is not None:
            return refusal(self.name, problem, gone)
        try:
            lowered = {stage: _lower(problem, stage) for stage in problem.changed()}
        except _OutOfScope as reason:
            return refusal(self.name, problem, str(reason))
        return replace(_Join(self.name, problem, lowered).answer(), altered=altered)


def _lower(problem: Problem, stage: str) -> _Lowered:
    old, new = problem.old_holdings.find(stage), problem.new_holdings.find(stage)
    for state_set in (old, new):
        if state_set is not None:
            reason = outside_scope(state_set)
            if reason is not None:
                raise _OutOfScope(f"{stage}: {reason} is not part of the paper's units")
    if old is None:
        assert new is not None
        return _load(problem, stage, new)
    return _StageLowering(problem, stage, old, new).run()


def _load(problem: Problem, stage: str, new: StateSet) -> _Lowered:
    """All of a new model-stage, from the first holders."""
    index = problem.topology.index()
    devices = {index[d] for d in new.bound.ranks}
    own = _own_lacks(problem, stage, devices)
    size = problem.set_bytes(stage)
    involved = devices | {t.src % problem.num_devices for t in own}
    primitive = _Primitive(
        stage=stage,
        phase=5,
        devices=tuple(sorted(involved)),
        transfers=tuple(own),
        acquired=size.new,
        released=np.zeros_like(size.new),
        enters=tuple(sorted(devices)),
    )
    return _Lowered(primitives=[primitive], end=new)


def _own_lacks(problem: Problem, stage: str, devices: set[int]) -> list[Transfer]:
    found = []
    for lack in lacks(problem):
        table = problem.diff.tables[lack.table]
        sets = problem.diff.geometries[problem.diff.geometry_of[lack.table]].new_sets
        mine = any(
            sets[table.new_groups[g].state_set].stage == stage and lack.wanter in table.new_groups[g].places
            for g in table.class_wanters[lack.cls]
        )
        if mine and lack.wanter % problem.num_devices in devices:
            found.append(Transfer(lack.holders[0], lack.wanter, lack.table, lack.intervals, lack.num_bytes))
    return found


class _StageLowering:
    def __init__(self, problem: Problem, stage: str, old: StateSet, new: StateSet | None) -> None:
        self.problem, self.stage, self.old, self.new = problem, stage, old, new
        self.index = problem.topology.index()
        self.alive = set(problem.alive_devices)
        self.found: list[_Primitive] = []

    def run(self) -> _Lowered:
        every = units_of(self.old, self.index)
        intact = [unit for unit in every if set(unit) <= self.alive]
        if self.new is None:
            content = content_of(self.problem, self.old, self.old, self.old)
            for unit in every:
                self._destroy(content, 0, unit, 1)
            return _Lowered(primitives=self.found, end=None)
        if not intact:
            raise _OutOfScope(f"{self.stage}: no replica is intact")
        before, after = plan_layout(self.old), plan_layout(self.new)
        tp, pp = gcd(before.tp, after.tp), gcd(before.pp, after.pp)
        if tp not in (before.tp, after.tp) or pp not in (before.pp, after.pp):
            raise _OutOfScope(f"{self.stage}: degrees that do not nest have no common layout with whole units")
        whole, common = (before.tp, before.pp), (tp, pp)
        groups = split_groups(whole, common)
        parts = len(groups[0])
        wanted = {self.index[d] for d in self.new.bound.ranks}
        units = []
        for unit in intact:  # among the units that a Split can form, those that lie on GPUs of the new plan
            ranked = [sorted(group, key=lambda m: (unit[m] not in wanted, m)) for group in groups]
            units += [tuple(unit[group[j]] for group in ranked) for j in range(parts)]
        kept = [u for u in units if set(u) <= wanted]
        kept = kept[: len(wanted) // (tp * pp)]
        gone = [u for u in units if u not in set(kept)]
        held = {d for u in kept for d in u}
        free = sorted(wanted - held)
        fresh = [tuple(free[i : i + tp * pp]) for i in range(0, len(free), tp * pp)]
        merged, emus = self._emus(kept + fresh, common, (after.tp, after.pp))
        devices = self.problem.topology.devices
        end = placed_set(self.new, emus, devices)
        content = content_of(self.problem, self.old, common_set(self.old, common, units + fresh, devices), end)
        if whole != common:
            for unit in intact:
                self._split(content, unit, groups)
        broken = [u for u in every if u not in set(intact)]
        late = [] if kept else gone[:1]
        for unit in broken:
            self._destroy(content, 0, tuple(d for d in unit if d in self.alive), 1, whole=unit)
        for unit in gone:
            if unit not in late:
                self._destroy(content, 1, unit, 1)
        for number, unit in enumerate(fresh):
            sources = kept or late
            self._extend(content, sources[number % len(sources)], unit)
        for unit in late:
            self._destroy(content, 1, unit, 3)
        for members, emu in zip(merged, emus, strict=True):
            self._merge(content, members, emu, common, (after.tp, after.pp))
        return _Lowered(primitives=self.found, end=end, tables=list(content.tables), final=list(content.final))

    def _emus(
        self, units: list[Unit], common: tuple[int, int], after: tuple[int, int]
    ) -> tuple[list[list[Unit]], list[Unit]]:
        """Neighbouring units that become one replica, and its devices position by position."""
        ordered = sorted(units, key=lambda u: (self.problem.links.node(min(u)), u))
        groups = split_groups(after, common)
        parts = len(groups[0])
        merged = [ordered[i : i + parts] for i in range(0, len(ordered), parts)]
        emus = []
        for members in merged:
            emu = [0] * (after[0] * after[1])
            for position, group in enumerate(groups):
                for j, target in enumerate(group):
                    emu[target] = members[j][position]
            emus.append(tuple(emu))
        return merged, emus

    # -- primitives ---------------------------------------------------------------------------------------------------

    def _add(
        self,
        phase: int,
        devices: tuple[int, ...],
        transfers: list[Transfer],
        acquired: Mapping[int, tuple[int, int]],
        released: Mapping[int, tuple[int, int]],
        *,
        enters: tuple[int, ...] = (),
        leaves: tuple[int, ...] = (),
    ) -> None:
        self.found.append(
            _Primitive(
                stage=self.stage,
                phase=phase,
                devices=tuple(sorted(set(devices))),
                transfers=tuple(transfers),
                acquired=self._spaces(acquired),
                released=self._spaces(released),
                enters=enters,
                leaves=leaves,
            )
        )

    def _spaces(self, sizes: Mapping[int, tuple[int, int]]) -> IntArray:
        values = np.zeros(self.problem.num_spaces, dtype=np.int64)
        for device, (gpu, host) in sizes.items():
            values[device] += gpu
            values[self.problem.num_devices + self.problem.links.node(device)] += host
        return values

    def _place(self, content: Content, table: int, state: int, device: int) -> int:
        host = content.in_host[table] if state == 2 else content.was_in_host[table]
        return device + (self.problem.num_devices if host else 0)

    def _split(self, content: Content, unit: Unit, groups: list[list[int]]) -> None:
        transfers: list[Transfer] = []
        for number, table in enumerate(content.tables):
            sizes = table.num_bytes
            chunks, goal = content.positions[0][number], content.positions[1][number]

            def send(src: int, dst: int, part: IntArray, number: int = number, sizes: IntArray = sizes) -> None:
                if len(part):
                    places = (self._place(content, number, 0, src), self._place(content, number, 0, dst))
                    transfers.append(Transfer(*places, number, part, int(sizes[part].sum())))

            for position, group in enumerate(groups):
                have = {member: chunks[member] for member in group}
                for hop in range(1, len(group)):
                    for i, member in enumerate(group):
                        part = np.setdiff1d(chunks[group[i - hop]], have[member], assume_unique=True)
                        part = np.intersect1d(part, goal[position], assume_unique=True)
                        send(unit[group[i - 1]], unit[member], part)
                        have[member] = np.union1d(have[member], part)
                for member in group:  # what padding of other degrees puts elsewhere
                    rest = np.setdiff1d(goal[position], have[member], assume_unique=True)
                    for other in range(len(unit)):
                        part = np.intersect1d(rest, chunks[other], assume_unique=True)
                        send(unit[other], unit[member], part)
                        rest = np.setdiff1d(rest, part, assume_unique=True)
        position_of = {member: position for position, group in enumerate(groups) for member in group}
        self._add(
            0,
            unit,
            transfers,
            {unit[m]: content.num_bytes(1, p) for m, p in position_of.items()},
            {unit[m]: content.num_bytes(0, m) for m in position_of},
        )

    def _destroy(self, content: Content, state: int, unit: Unit, phase: int, *, whole: Unit | None = None) -> None:
        position = {d: p for p, d in enumerate(whole or unit)}
        released = {d: content.num_bytes(state, position[d]) for d in unit}
        if unit:
            self._add(phase, unit, [], {}, released, leaves=unit)

    def _extend(self, content: Content, source: Unit, unit: Unit) -> None:
        transfers = []
        for number, table in enumerate(content.tables):
            for position, (src, dst) in enumerate(zip(source, unit, strict=True)):
                part = content.positions[1][number][position]
                places = (self._place(content, number, 1, src), self._place(content, number, 1, dst))
                transfers.append(Transfer(*places, number, part, int(table.num_bytes[part].sum())))
        acquired = {d: content.num_bytes(1, p) for p, d in enumerate(unit)}
        self._add(2, (*source, *unit), transfers, acquired, {}, enters=unit)

    def _merge(
        self, content: Content, members: list[Unit], emu: Unit, common: tuple[int, int], after: tuple[int, int]
    ) -> None:
        position_in = {d: p for unit in members for p, d in enumerate(unit)}
        transfers: list[Transfer] = []
        acquired: dict[int, tuple[int, int]] = {}
        released: dict[int, tuple[int, int]] = {}
        for target, device in enumerate(emu):
            gained, dropped = [0, 0], [0, 0]
            for number, table in enumerate(content.tables):
                sizes = table.num_bytes
                goal = content.positions[2][number][target]
                have = content.positions[1][number][position_in[device]]
                host = content.in_host[number]
                if host != content.was_in_host[number]:  # the shard moves between the GPU and its host
                    rest, have = goal, np.zeros(0, dtype=np.int64)
                else:
                    rest = np.setdiff1d(goal, have, assume_unique=True)
                gained[host] += int(sizes[rest].sum())
                unused = np.setdiff1d(content.positions[1][number][position_in[device]], have, assume_unique=True)
                unused = np.union1d(unused, np.setdiff1d(have, goal, assume_unique=True))
                dropped[content.was_in_host[number]] += int(sizes[unused].sum())
                for other in (device, *emu):
                    if not len(rest):
                        break
                    part = np.intersect1d(rest, content.positions[1][number][position_in[other]], assume_unique=True)
                    if len(part):
                        src = self._place(content, number, 1, other)
                        dst = self._place(content, number, 2, device)
                        transfers.append(Transfer(src, dst, number, part, int(sizes[part].sum())))
                        rest = np.setdiff1d(rest, part, assume_unique=True)
            acquired[device], released[device] = (gained[0], gained[1]), (dropped[0], dropped[1])
        if common != after or transfers:
            self._add(4, emu, transfers, acquired, released)


class _Join:
    """The global order: one list of all primitives; what shares a device follows in it."""

    def __init__(self, name: str, problem: Problem, lowered: dict[str, _Lowered]) -> None:
        self.name, self.problem, self.lowered = name, problem, lowered

    def answer(self) -> Answer:
        problem = self.problem
        tables: list[AtomTable] = list(problem.diff.tables)
        final = [self._loaded(number) for number in range(len(tables))]
        queue: list[_Primitive] = []
        sets: dict[str, StateSet] = {}
        for stage, one in self.lowered.items():
            offset = len(tables) if one.tables else 0
            tables += one.tables
            final += one.final
            for primitive in one.primitives:
                moved = tuple(replace(t, table=t.table + offset) for t in primitive.transfers)
                primitive.transfers = moved
                queue.append(primitive)
            if one.end is not None:
                sets[stage] = one.end
        order, fails = self._order(queue)
        last: dict[int, int] = {}
        steps = []
        for number, primitive in enumerate(order):
            steps.append(
                Step(
                    name=f"{primitive.stage} {_PHASES[primitive.phase]}",
                    devices=primitive.devices,
                    transfers=primitive.transfers,
                    acquired=positive(primitive.acquired),
                    released=positive(primitive.released),
                    after=tuple(sorted({last[d] for d in primitive.devices if d in last})),
                )
            )
            for device in primitive.devices:
                last[device] = number
        return Answer(
            baseline=self.name,
            problem=problem,
            placed=with_places(problem.new, sets),
            tables=tuple(tables),
            final=tuple(final),
            steps=tuple(steps),
            base_bytes=self._base(),
            outside_s=problem.drain_s() + problem.setup_s() + problem.commit_s(),
            fails=fails,
        )

    def _loaded(self, number: int) -> tuple[int, ...]:
        """New groups of a table of the diff that belong to model-stages without a chain."""
        table = self.problem.diff.tables[number]
        sets = self.problem.diff.geometries[self.problem.diff.geometry_of[number]].new_sets
        loaded = {stage for stage, one in self.lowered.items() if one.end is not None and not one.tables}
        return tuple(i for i, g in enumerate(table.new_groups) if sets[g.state_set].stage in loaded)

    def _base(self) -> IntArray:
        base = self.problem.base_bytes()
        for stage in self.problem.storages.stages:
            size = self.problem.set_bytes(stage)
            base += size.kept + size.old
        return base

    def _order(self, queue: list[_Primitive]) -> tuple[list[_Primitive], str | None]:
        problem = self.problem
        held = self._base()
        kind = {s.name: _ORDER.get(s.kind, 2) for plan in (problem.old, problem.new) for s in plan.stages}
        stays = self._staying()
        on_device: dict[int, set[str]] = {}
        for primitive in queue:
            for device in primitive.leaves:
                on_device.setdefault(device, set()).add(primitive.stage)
        waiting = sorted(queue, key=lambda p: kind[p.stage])
        order: list[_Primitive] = []
        fails = None
        while waiting:
            phase_of = {
                stage: min(p.phase for p in waiting if p.stage == stage) for stage in {p.stage for p in waiting}
            }
            ready = [p for p in waiting if p.phase == phase_of[p.stage]]
            ready.sort(key=lambda p: (not p.leaves, kind[p.stage]))
            chosen = next((p for p in ready if self._fits(p, held, on_device, stays)), None)
            if chosen is None:
                chosen = ready[0]
                fails = (
                    fails or f"{chosen.stage} {_PHASES[chosen.phase]} waits for memory or GPUs that no Destroy frees"
                )
            waiting.remove(chosen)
            order.append(chosen)
            held = held + chosen.acquired - chosen.released
            for device in chosen.leaves:
                on_device.get(device, set()).discard(chosen.stage)
        return order, fails

    def _staying(self) -> dict[int, set[str]]:
        index = self.problem.topology.index()
        found: dict[int, set[str]] = {}
        for state_set in self.problem.new_holdings.sets:
            for device in state_set.bound.ranks:
                found.setdefault(index[device], set()).add(state_set.stage)
        return found

    def _fits(
        self, primitive: _Primitive, held: IntArray, on_device: dict[int, set[str]], stays: dict[int, set[str]]
    ) -> bool:
        takes = primitive.acquired > 0
        if bool((held + primitive.acquired > self.problem.capacity)[takes].any()):
            return False
        if self.problem.new.workload.mode != "async":
            return True
        # Concurrent stages own their GPUs: who leaves one must have left it.
        return not any(on_device.get(d, set()) - stays.get(d, set()) - {primitive.stage} for d in primitive.enters)
