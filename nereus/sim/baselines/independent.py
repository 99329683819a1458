"""DynaRL: every component migrates on its own, create before destroy.

Rules (DynaRL, OSDI'26, as described by its readers; project RLinf): a component (here a state set with its own
processes) moves by itself when its new place is decided: it waits for GPUs that another component runs on, creates the
new instance beside the old one, sends state rank to rank, then destroys the old instance. Nothing orders components
against each other, and each takes GPUs and memory as they come free, so migrations that want what the other holds wait
for ever. Topology is not modelled: receivers take the holders in turn, whatever node they are on. Ranks as listed.
GPUs are owned exclusively where stages run concurrently (asynchronous jobs); where they take turns only memory is
contended.
"""

from __future__ import annotations

import numpy as np

from nereus.ir.cluster import Device
from nereus.ir.holdings import Holdings
from nereus.sim.baselines.answer import Answer, Step, Transfer, everything, positive, refusal
from nereus.sim.baselines.direct import lacks, lost
from nereus.sim.baselines.problem import Problem


class Independent:
    name = "independent"
    system = "DynaRL"

    def solve(self, problem: Problem) -> Answer:
        gone = lost(problem)
        if gone is not None:
            return refusal(self.name, problem, gone)
        changed = problem.changed()
        transfers: dict[str, list[Transfer]] = {stage: [] for stage in changed}
        turn: dict[tuple[int, ...], int] = {}
        for lack in lacks(problem):
            stage = self._stage_of(problem, lack.table, lack.cls, lack.wanter)
            number = turn.get(lack.holders, 0)
            turn[lack.holders] = number + 1
            source = lack.holders[number % len(lack.holders)]
            transfers[stage].append(Transfer(source, lack.wanter, lack.table, lack.intervals, lack.num_bytes))
        base = problem.base_bytes()
        for stage in problem.storages.stages:
            size = problem.set_bytes(stage)
            base += size.kept + size.old
        index = problem.topology.index()
        exclusive = problem.new.workload.mode == "async"
        before = _devices(problem.old_holdings, index)
        after = _devices(problem.new_holdings, index)
        alive = set(problem.alive_devices)
        steps, owned = [], set()
        fails = _circular(before, after, changed) if exclusive else None
        for chain, stage in enumerate(changed):
            had, has = before.get(stage, set()) & alive, after.get(stage, set())
            size = problem.set_bytes(stage)
            sources = {t.src % problem.num_devices for t in transfers[stage]}
            # A device that several stages share, before or after, is not theirs to lock.
            shared = _shared(before) | _shared(after)
            takes = tuple(sorted(has - had - shared)) if exclusive else ()
            gives = tuple(sorted(had - has - shared)) if exclusive else ()
            owned |= (had - shared) if exclusive else set()
            steps.append(
                Step(
                    name=stage,
                    devices=tuple(sorted(had | has | sources)),
                    transfers=tuple(transfers[stage]),
                    acquired=positive(size.new + size.kept),
                    released=positive(size.old + size.kept),
                    chain=chain,
                    takes=takes,
                    gives=gives,
                )
            )
        return Answer(
            baseline=self.name,
            problem=problem,
            placed=problem.new,
            tables=problem.diff.tables,
            final=everything(problem.diff.tables),
            steps=tuple(steps),
            base_bytes=base,
            outside_s=problem.drain_s() + problem.setup_s() + problem.commit_s(),
            blocking=True,
            fails=fails,
            owned=tuple(sorted(owned)),
        )

    def _stage_of(self, problem: Problem, table: int, cls: int, wanter: int) -> str:
        atoms = problem.diff.tables[table]
        sets = problem.diff.geometries[problem.diff.geometry_of[table]].new_sets
        for group in atoms.class_wanters[cls]:
            if wanter in atoms.new_groups[group].places:
                return sets[atoms.new_groups[group].state_set].stage
        raise AssertionError("a wanter is in a wanting group")


def _devices(holdings: Holdings, index: dict[Device, int]) -> dict[str, set[int]]:
    return {s.stage: {index[d] for d in s.bound.ranks} for s in holdings.sets}


def _shared(places: dict[str, set[int]]) -> set[int]:
    counts = np.bincount([d for devices in places.values() for d in devices], minlength=1)
    return set(np.flatnonzero(counts > 1).tolist())


def _circular(before: dict[str, set[int]], after: dict[str, set[int]], changed: tuple[str, ...]) -> str | None:
    """Components each of which waits for GPUs that the next gives up only when it has moved."""
    waits = {
        stage: {
            other
            for other in changed
            if other != stage and (after.get(stage, set()) & before.get(other, set())) - after.get(other, set())
        }
        for stage in changed
    }
    free = set(changed)
    while free:
        done = {stage for stage in free if not (waits[stage] & free)}
        if not done:
            return f"{', '.join(sorted(free))} wait for each other's GPUs for ever"
        free -= done
    return None
