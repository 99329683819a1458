"""Megatron-Core resharding: own replica first, else round-robin over the source's data-parallel groups.

Rules (NVIDIA/Megatron-LM, ``megatron/core/resharding``: ``planner.py`` and ``select_src_metadata_balanced``): every
rank replays one deterministic schedule. Per destination rank and parameter, a source copy that the rank itself owns
is taken, and what it lacks then comes from that copy's tensor-parallel group. Otherwise the destination's global rank
chooses: with n data-parallel groups of the source, group ``rank % n`` and in it member ``(rank // n) % dp``, so
replicas take turns by rank, whatever node they are on. The destination model is allocated beside the source model; the
back ends send slices without a pack buffer. Ranks as listed. The library moves weights; the rule is applied to every
slot here, and a shard with one holder comes from that holder.
"""

from __future__ import annotations

from nereus.sim.baselines.answer import Answer, Transfer, refusal
from nereus.sim.baselines.direct import lacks, lost, one_step, replicas
from nereus.sim.baselines.problem import Problem, plan_layout


class RoundRobin:
    name = "round robin"
    system = "Megatron-Core"

    def solve(self, problem: Problem) -> Answer:
        gone = lost(problem)
        if gone is not None:
            return refusal(self.name, problem, gone)
        transfers: list[Transfer] = []
        known: dict[tuple[int, int], _Copies] = {}
        for lack in lacks(problem):
            key = (lack.table, lack.cls)
            if key not in known:
                known[key] = _Copies(problem, *key, lack.holders)
            source = known[key].source(lack.wanter, lack.wanter % problem.num_devices)
            transfers.append(Transfer(source, lack.wanter, lack.table, lack.intervals, lack.num_bytes))
        return one_step(self.name, problem, transfers, in_place=False, packed=False)


class _Copies:
    """Living copies of a class by replica of its first old state set."""

    def __init__(self, problem: Problem, table: int, cls: int, holders: tuple[int, ...]) -> None:
        atoms = problem.diff.tables[table]
        geometry = problem.diff.geometries[problem.diff.geometry_of[table]]
        state_set = geometry.old_sets[atoms.old_groups[atoms.class_holders[cls][0]].state_set]
        self.holders = holders
        self.ranks = problem.rank_places(state_set.stage)
        living = set(holders)
        self.by_replica: dict[int, list[int]] = {}
        self.pipeline: set[int] = set()
        for place, (replica, pipeline) in replicas(problem, atoms, table, cls).items():
            if place in living:
                self.by_replica.setdefault(replica, []).append(place)
                self.pipeline.add(pipeline)
        self.num_groups = plan_layout(state_set).tp

    def source(self, wanter: int, device: int) -> int:
        own = self.ranks.get(device)
        if own is not None and own[1] in self.pipeline and own[0] in self.by_replica:
            return self._of(own[0], device)
        if self.by_replica:
            order = sorted(self.by_replica)
            return self._of(order[device // self.num_groups % len(order)], device)
        return self.holders[device % len(self.holders)]

    def _of(self, replica: int, device: int) -> int:
        places = self.by_replica[replica]
        return places[device % len(places)]
