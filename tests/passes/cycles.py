"""Cycles of model-stages that trade GPUs, on GPUs that are full: what only a rotation or host memory can resolve."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from passes.execute import run
from passes.oracle import State, Universe, truth
from passes.plans import ARCHS, WORKLOAD, cluster, stage

from nereus.ir.arch import Arch
from nereus.ir.layout import IntArray
from nereus.ir.plan import Model, Plan
from nereus.ir.schedule import Schedule
from nereus.passes import check
from nereus.passes.compiled import Transition, transition_digest
from nereus.passes.dag import Dag, build_dag
from nereus.passes.findings import all_findings
from nereus.passes.manager import Pipeline
from nereus.passes.memory import MemoryPlan, plan_memory, window_staging
from nereus.passes.pipeline import compile_transition, storage_bytes
from nereus.passes.route import Routed
from nereus.passes.stripes import cut_moves
from nereus.passes.tight import Stuck, tight_schedule


def cycle(
    num_stages: int,
    *,
    group: int = 1,
    per_node: int = 4,
    archs: tuple[Arch, ...] = ARCHS[:1],
    settings: tuple[dict[str, object], ...] = ({},),
    trained: bool = False,
    mem_gb: float = 80.0,
) -> tuple[Plan, Plan]:
    """``num_stages`` model-stages on ``group`` GPUs each; every one moves to the GPUs of the next. ``settings``: old
    and new degrees, in turns."""
    total = num_stages * group
    sizes = [per_node] * (total // per_node) + ([total % per_node] if total % per_node else [])
    on = cluster(*sizes, mem_gb=mem_gb)
    models = tuple(
        Model(name=f"m{i}", arch=archs[i % len(archs)], source="tiny", frozen=not trained) for i in range(num_stages)
    )
    plans = []
    for shift in (0, 1):
        stages = []
        for i, model in enumerate(models):
            first = (i + shift) % num_stages * group
            chosen = settings[(i + shift) % len(settings)]
            stages.append(stage(model, "train" if trained else "infer", on.devices[first : first + group], **chosen))
        plans.append(Plan(cluster=on, models=models, workload=WORKLOAD, stages=tuple(stages)))
    return plans[0], plans[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pair that was compiled with room, to be scheduled again with less. ``memory``: with the tight staging."""

    transition: Transition
    routed: Routed
    memory: MemoryPlan
    window_bytes: int

    @classmethod
    def of(cls, pair: tuple[Plan, Plan], options: Pipeline) -> Case:
        return cls.from_transition(compile_transition(*pair, options), options)

    @classmethod
    def from_transition(cls, transition: Transition, options: Pipeline) -> Case:
        routed, window = options.route.apply(transition.diff), options.schedule.window_bytes
        routed = replace(routed, moves=cut_moves(routed.moves, window))
        staging = window_staging(routed, window)
        memory = plan_memory(transition.storages, transition.life, staging, transition.topology)
        return cls(transition=transition, routed=routed, memory=memory, window_bytes=window)

    def within(self, spare: int | IntArray, host_spare: int = 0) -> MemoryPlan:
        """``spare`` bytes on every GPU beyond the larger of before and after, ``host_spare`` in every host memory."""
        state = self.memory.state
        capacity = self.memory.tight_base + np.maximum(state.new - state.old, 0)
        count = self.transition.topology.num_devices
        capacity[:count] += spare
        capacity[count:] += host_spare
        return replace(self.memory, capacity=capacity)

    @property
    def largest(self) -> IntArray:
        """Per GPU: the largest storage that comes or goes."""
        return self.memory.state.largest[: self.transition.topology.num_devices]

    def schedule(self, memory: MemoryPlan) -> Schedule | Stuck:
        t = self.transition
        return tight_schedule(t.diff, t.storages, self.routed, memory, t.topology, self.window_bytes)

    def tight(self, memory: MemoryPlan) -> Transition | Stuck:
        schedule = self.schedule(memory)
        if isinstance(schedule, Stuck):
            return schedule
        return self.with_schedule(schedule, memory)

    def with_schedule(self, schedule: Schedule, memory: MemoryPlan) -> Transition:
        t = self.transition
        dag = build_dag(
            schedule,
            t.life,
            t.topology,
            memory.state.new,
            memory.state.old,
            storage_bytes(schedule.acquire, t.storages, t.topology, new=True),
            storage_bytes(schedule.release, t.storages, t.topology, new=False),
        )
        digest = transition_digest(t.old, t.new, schedule)
        return replace(t, schedule=schedule, memory=memory, dag=dag, digest=digest)


def findings(
    transition: Transition, schedule: Schedule | None = None, dag: Dag | None = None
) -> dict[str, check.Finding]:
    """By name; of another schedule or graph than the transition's own where one is given."""
    found, _ = all_findings(
        transition.diff,
        schedule or transition.schedule,
        dag or transition.dag,
        transition.storages,
        transition.memory,
        transition.topology,
        moved_bytes=transition.bound.moved_bytes,
    )
    return {f.name: f for f in found}


def check_tight(transition: Transition, seed: int) -> None:
    """Every finding holds, and the programs bring every element to its place within the capacity of every space."""
    broken = [f for f in findings(transition).values() if not f.holds]
    assert not broken, broken
    universe = Universe(transition.old, transition.new)
    start, end = State(transition.old, universe), State(transition.new, universe)
    expected = truth(start, end)
    outcome = run(transition, start.storages, universe.weight_of, seed)
    assert set(outcome.buffers) == set(end.storages)
    for key, ids in end.storages.items():
        if not expected.fresh[ids].all():
            assert np.array_equal(outcome.buffers[key], ids), key
    memory, topology, life = transition.memory, transition.topology, transition.life
    number: dict[object, int] = {d: i for i, d in enumerate(topology.devices)}
    # GPUs that a living node lost are a node of their own, with the same name.
    number |= {n.name: topology.num_devices + at for at, n in enumerate(topology.nodes) if topology.alive[at]}
    processes = np.zeros_like(memory.capacity)
    processes[: topology.num_devices] = life.before_bytes
    for op in life.ops:
        for device, num_bytes in zip(op.devices, op.after_bytes, strict=True):
            processes[device] += num_bytes
    for space, peak in outcome.peak.items():
        at = number[space]
        assert peak + processes[at] <= memory.capacity[at], (
            f"{space}: {peak} + {processes[at]} of {memory.capacity[at]}"
        )
