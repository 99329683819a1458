"""Oobleck: pipelines are instantiated anew from templates and missing layers are broadcast.

Rules (arXiv 2309.08125; SymbioticLab/Oobleck, ``ReconfigurationEngine``): training is a set of pipelines whose stages
are groups of GPUs; after a change of nodes pipelines are re-instantiated from templates generated beforehand, with
other numbers of pipelines and of stages, but groups inside a stage are cut as before (here: tp stays). Layer by layer:
where every new group had the layer, nothing happens; else one group that had it and has it again, the first, broadcasts
it along the data-parallel group of the layer, to members that have it too. A layer that no group keeps ends the job.
Sharded optimizer state, context and expert parallelism and other tp are not known. Tensors of the old pipeline go when
the copies are done. Broadcasts are pipelined rings in order of rank. Every changed model-stage is treated as a
training job of its own.
"""

from __future__ import annotations

from itertools import pairwise

from nereus.sim.baselines.answer import Answer, Transfer, refusal
from nereus.sim.baselines.direct import lost, one_step
from nereus.sim.baselines.problem import Problem, plan_layout
from nereus.sim.baselines.units import outside_scope


class Templates:
    name = "templates"
    system = "Oobleck"

    def solve(self, problem: Problem) -> Answer:
        reason = lost(problem) or self._scope(problem)
        if reason is not None:
            return refusal(self.name, problem, reason)
        transfers: list[Transfer] = []
        for number, table in enumerate(problem.diff.tables):
            geometry = problem.diff.geometries[problem.diff.geometry_of[number]]
            sizes = table.num_bytes
            for cls, intervals in enumerate(table.intervals_of_classes()):
                holders = set(problem.diff.holders[number][cls])
                num_bytes = int(sizes[intervals].sum())
                by_set: dict[int, list[int]] = {}
                for group in table.class_wanters[cls]:
                    by_set.setdefault(table.new_groups[group].state_set, []).append(group)
                for state_set, groups in by_set.items():
                    stage = geometry.new_sets[state_set].stage
                    own = {
                        p
                        for g in table.class_holders[cls]
                        if geometry.old_sets[table.old_groups[g].state_set].stage == stage
                        for p in table.old_groups[g].places
                    } & holders
                    for group in groups:  # one per tensor rank: the data-parallel group of the layer
                        members = table.new_groups[group].places
                        if set(members) <= own:
                            continue
                        keepers = [p for p in members if p in own]
                        if not keepers:
                            layer = geometry.cells.tensors[int(geometry.cells.tensor[table.cell[intervals[0]]])]
                            text = f"{stage}: no group keeps {layer.name}, so the job ends"
                            return refusal(self.name, problem, text)
                        at = members.index(keepers[0])
                        ring = members[at:] + members[:at]
                        transfers += [Transfer(src, dst, number, intervals, num_bytes) for src, dst in pairwise(ring)]
        return one_step(self.name, problem, transfers, in_place=True, packed=False)

    def _scope(self, problem: Problem) -> str | None:
        for stage in problem.changed():
            sides = [h.find(stage) for h in (problem.old_holdings, problem.new_holdings)]
            if sides[0] is None or sides[1] is None:
                return f"{stage} is not in both plans: a job is started, not reconfigured"
            layouts = []
            for side in sides:
                assert side is not None
                layout = plan_layout(side)
                reason = outside_scope(side)
                if reason is not None:
                    return f"{stage}: {reason} is not known"
                layouts.append(layout)
            if layouts[0].tp != layouts[1].tp:
                return f"{stage}: tp changes, and templates differ in pipeline stages only"
        return None
