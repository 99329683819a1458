"""Where a running job could go: the best plans on some pools, and what changing to each would take."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from nereus.ir.plan import Plan
from nereus.passes.coarse import coarse
from nereus.planner.calibration import Calibration
from nereus.planner.limits import Limits
from nereus.planner.pools import nodes_of, on_most_nodes
from nereus.planner.rl_step import step_time
from nereus.planner.search import Found, search
from nereus.planner.smallest import least
from nereus.planner.targets import Target

Keys: TypeAlias = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking:
    """``home``: the job's first plan, whose cluster lists all nodes. ``headroom``: by which lengths may grow before a
    plan that is found would not fit. ``count``: plans that a search is asked for. ``steps``: for which one is weighed.

    Searches start from the first plan: from one that is the best already they would have to look at every other to find
    a second."""

    home: Plan
    calibration: Calibration
    limits: Limits
    headroom: float
    count: int
    steps: float

    def found(
        self, present: Plan, pools: Sequence[frozenset[str]], *, ahead: float, lost: Collection[str] = ()
    ) -> list[Target]:
        """On some of ``pools``, the last of which need not be used whole; ``ahead``: the length to fit at. ``lost``:
        nodes of which nothing can be read."""
        found: list[Target] = []
        roomy = self._roomy(ahead)
        for pool in pools:
            placed = on_most_nodes(roomy, pool, lost=lost)
            if placed is not None and (nodes_of(placed) == pool or pool != nodes_of(present) or pool == pools[-1]):
                best = search(placed, self.calibration, count=self.count, limits=self.limits).best
                found += [self.target(present, each) for each in best if self.calibration.fits(each.plan)]
        if placed is not None and nodes_of(present) != pools[-1]:
            # The same degrees on other nodes often stop the job for less.
            same = on_most_nodes(replace(roomy, stages=present.stages), pools[-1])
            if same is not None and self.calibration.fits(same):
                plan = replace(same, cluster=placed.cluster)
                found.append(self.target(present, Found(seconds=0, cost=0, plan=plan, changes={}, stage_seconds={})))
        return found

    def target(self, present: Plan, found: Found) -> Target:
        """``found`` at the lengths of ``present``, which are those of now."""
        plan = replace(found.plan, workload=present.workload)
        found = replace(found, plan=plan, seconds=step_time(plan, self.calibration).seconds)
        if keys_of(found.plan) == keys_of(present):
            return Target(found=found, stop_s=0.0, total_s=self.steps * found.seconds, payback_steps=0.0)
        stop_s = self.calibration.stops.stop_s(coarse(present, found.plan))
        gain_s = step_time(present, self.calibration).seconds - found.seconds
        payback = stop_s / gain_s if gain_s > 0 else math.inf
        return Target(found=found, stop_s=stop_s, total_s=self.steps * found.seconds + stop_s, payback_steps=payback)

    def nodes_needed(self, length: float, there: Collection[str]) -> int | None:
        """Fewest nodes, those that are ``there`` and others, on which some layout fits; None: the cluster is too
        small."""
        names = sorted((node.name for node in self.home.cluster.nodes), key=lambda name: name not in there)

        def on(number: int) -> Plan | None:
            placed = on_most_nodes(self._roomy(length), names[: number + 1])
            best = () if placed is None else search(placed, self.calibration, count=1, limits=self.limits).best
            return best[0].plan if best and self.calibration.fits(best[0].plan) else None

        found = least(len(names), on, first=len(there))
        return None if found is None else found[0] + 1

    def _roomy(self, length: float) -> Plan:
        return at_length(self.home, length * (1 + self.headroom))


def at_length(plan: Plan, response_len: float) -> Plan:
    return replace(plan, workload=replace(plan.workload, response_len=max(1, math.ceil(response_len))))


def keys_of(plan: Plan) -> Keys:
    """What makes a plan another one: layouts and places."""
    return tuple(
        (s.name, s.tp, s.pp, s.dp, s.cp, s.ep, s.micro_batch, s.recompute, s.zero, s.fsdp, s.pp_split, s.devices)
        for s in plan.stages
    )
