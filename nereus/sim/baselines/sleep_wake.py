"""verl's resource controller: rollout replicas sleep and wake, nothing else changes.

Rules (verl-project/verl, ``DynamicResourceController``, experimental): hybrid rollout replicas, which share their GPUs
with the trainer, are switched on and off: routing is cut, requests are aborted, the engine sleeps, and wakes with
weights synced from the trainer. TP and PP of every stage are fixed, replicas keep their GPUs, and no training state
moves. So it can follow a change only if every state set stays where it is and generation differs by whole replicas on
GPUs that the trainer has; everything else it cannot do at all.
"""

from __future__ import annotations

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan, Stage
from nereus.passes.lifecycle import engine_replicas
from nereus.sim.baselines.answer import Answer, Step, everything, refusal
from nereus.sim.baselines.problem import Problem

_ENGINE = ("tp", "pp", "ep", "engine", "kv_cache_bytes", "mem_fraction", "pp_split")


class SleepWake:
    name = "sleep/wake"
    system = "verl"

    def solve(self, problem: Problem) -> Answer:
        reason = _why_not(problem)
        if reason is not None:
            return refusal(self.name, problem, reason)
        base = problem.base_bytes()
        for stage in problem.storages.stages:
            size = problem.set_bytes(stage)
            base += size.kept + size.old
        return Answer(
            baseline=self.name,
            problem=problem,
            placed=problem.new,
            tables=problem.diff.tables,
            final=everything(problem.diff.tables),
            steps=(Step(name="sleep and wake", devices=problem.alive_devices),),
            base_bytes=base,
            outside_s=problem.drain_s() + problem.commit_s(),
        )


def _why_not(problem: Problem) -> str | None:
    old, new = problem.old, problem.new
    if old.cluster.devices != new.cluster.devices:
        return "GPUs come or go, and it has no placement"
    changed = problem.changed()
    if changed:
        return f"state of {', '.join(changed)} moves, and its layouts are fixed"
    for stage in new.owners():
        before = old.find_stage(stage.name)
        if before is None:
            return f"{stage.name} is new"
        if stage.kind == "generate":
            reason = _replicas(old, before, stage)
            if reason is not None:
                return reason
        elif before.ranks != stage.ranks:
            return f"{stage.name} changes its GPUs"
    return None


def _replicas(plan: Plan, before: Stage, after: Stage) -> str | None:
    if any(getattr(before, key) != getattr(after, key) for key in _ENGINE):
        return f"{after.name}: engines change, and replicas keep their layout"
    had, has = set(engine_replicas(before)), set(engine_replicas(after))
    if not (had <= has or has <= had):
        return f"{after.name}: replicas move, and they keep their GPUs"
    trained: set[Device] = {d for s in plan.stages if s.is_train and s.model == after.model for d in s.ranks}
    switched = {d for replica in had ^ has for d in replica}
    return None if switched <= trained else f"{after.name}: replicas that are not hybrid cannot sleep or wake"
