"""Policies: when a job changes its plan, and to which.

All choose from the same plans, by the same predictions, at the lengths that they saw last. Fixed ones hold the degrees
that fit until the longest responses, which whoever configures a job without a system like this one has to know before.

    as-run       the plan that is given, all along; where it cannot be, as sleep-wake
    static       degrees fixed; a changed pool is a restart from the checkpoint
    sleep-wake   degrees fixed; replicas go and come with the pool, live (what verl's resource controller does)
    every-K      the best plan each K steps
    any-gain     the best plan whenever it is predicted to be faster at all (DynaRL)
    payback      the Nereus paper: at a drift of 30 %, where the stop is earned back in half of the expected interval
    ours         nereus.planner.advisor
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from statistics import fmean

from nereus.planner.advisor import Advisor
from nereus.planner.decisions import Settings
from nereus.replay.run import FREE, LEAVES, View
from nereus.replay.space import Space, at_length, best_of
from nereus.replay.world import World

#: The paper's figures: drift of the length that triggers, share of the interval, plans tried when the best is too dear.
DRIFT, SHARE = 0.3, 0.5


class _Base(ABC):
    name = ""
    restarts = False
    space: Space

    def first(self, world: World) -> int:
        """The best at the length that the plan says, on the nodes that there are."""
        self.space = world.space
        start = self.space.start.workload
        (best, *_) = self.space.choices(world.num_nodes[0], max(start.response_len, world.trace.rows[0].response_mean))
        return best

    def options(self, view: View) -> tuple[int, ...]:
        """What the search found, best first, and the present degrees on the nodes that there are."""
        choices = self.space.choices(view.num_nodes, view.response_mean)
        kept = self.space.placed(self.space.plans[view.present], view.num_nodes)
        return choices if kept is None else (*choices, self.space.number(kept))

    def best(self, view: View) -> int:
        choices = self.options(view)
        if view.forced == LEAVES and view.notice_s is not None:
            quick = [c for c in choices if self.space.stop_s(view.present, c) <= view.notice_s]
            choices = tuple(quick) or choices
        found = best_of(self.space, choices, view.response_mean, view.response_max)
        return choices[0] if found is None and choices else view.present if found is None else found

    def gain_s(self, view: View, other: int) -> float:
        now, then = (
            self.space.seconds(number, view.response_mean, view.response_max) for number in (view.present, other)
        )
        return now - then

    @abstractmethod
    def choose(self, view: View) -> int: ...


class Static(_Base):
    """``live``: follows the pool without a restart."""

    def __init__(self, *, live: bool = False) -> None:
        self.name = "sleep-wake" if live else "static"
        self.restarts = not live

    def first(self, world: World) -> int:
        """The plan that is the fastest now among those that fit at all lengths of the trace, on all pools."""
        self.space = space = world.space
        longest = max(row.response_mean for row in world.trace.rows)
        least = min(world.num_nodes)
        for number in (*space.choices(world.num_nodes[0], longest), *space.choices(least, longest)):
            smallest = space.placed(space.plans[number], least)
            if smallest is not None and space.fits(space.number(smallest), longest):
                break
        else:
            return space.choices(world.num_nodes[0], longest)[0]
        self._home = space.plans[number]
        placed = space.placed(self._home, world.num_nodes[0])
        return number if placed is None else space.number(placed)

    def choose(self, view: View) -> int:
        placed = self.space.placed(self.space.plans[view.present], view.num_nodes)
        if placed is None:
            return self.best(view)
        number = self.space.number(placed)
        return number if self.space.fits(number, view.response_mean) else self.best(view)


class AsRun(Static):
    """What a recorded run took."""

    def __init__(self) -> None:
        super().__init__(live=True)
        self.name = "as-run"

    def first(self, world: World) -> int:
        self.space = world.space
        start = self.space.number(self.space.start)
        return start if world.can_run(0, start) else super().first(world)


class EveryK(_Base):
    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"every {k} steps: at least 1")
        self.k = k
        self.name = f"every-{k}"

    def choose(self, view: View) -> int:
        return self.best(view) if view.forced or view.step % self.k == 0 else view.present


class AnyGain(_Base):
    name = "any-gain"

    def choose(self, view: View) -> int:
        best = self.best(view)
        return best if view.forced or self.gain_s(view, best) > 0 else view.present


class Payback(_Base):
    name = "payback"

    def first(self, world: World) -> int:
        self._reference = world.trace.rows[0].response_mean
        self._num_nodes = world.num_nodes[0]
        self._crossings: list[int] = []
        self._pool_changes: list[int] = []
        return super().first(world)

    def choose(self, view: View) -> int:
        drifted = abs(view.response_mean / self._reference - 1) > DRIFT
        grown = view.num_nodes != self._num_nodes
        if not (drifted or grown or view.forced):
            return view.present
        if drifted:
            self._crossings.append(view.step)
        if grown:
            self._pool_changes.append(view.step)
        self._reference, self._num_nodes = view.response_mean, view.num_nodes
        if view.forced:
            return self.best(view)
        horizons = [h for h, due in ((self._crossings, drifted), (self._pool_changes, grown)) if due]
        allowed = SHARE * min(_interval(steps) for steps in horizons)
        for other in self.options(view):
            gain_s = self.gain_s(view, other)
            if gain_s > 0 and self.space.stop_s(view.present, other) <= allowed * gain_s:
                return other
        return view.present


def _interval(steps: list[int]) -> float:
    """Mean of past intervals; one step before there is one."""
    between = [b - a for a, b in pairwise(steps)]
    return fmean(between) if between else 1.0


class Ours(_Base):
    """``advisor``: for its log, after a run."""

    name = "ours"

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self.advisor: Advisor | None = None

    def first(self, world: World) -> int:
        number = super().first(world)
        # The plan of the job is where its searches start; the one that runs is told with every step.
        start = at_length(self.space.start, world.trace.rows[0].response_mean)
        pool = self.space.pool(world.num_nodes[0])
        self.advisor = Advisor(start, self.space.calibration, settings=self._settings, pool=pool)
        return number

    def choose(self, view: View) -> int:
        assert self.advisor is not None
        decision = self.advisor.observe(
            step=view.step - 1,
            response_len=view.response_mean,
            step_s=view.step_s,
            plan=at_length(self.space.plans[view.present], view.response_mean),
            pool=self.space.pool(view.num_nodes),
            notice_s=view.notice_s,
        )
        if decision.plan is not None:
            return self.space.number(decision.plan)
        return view.present if view.forced == FREE else self.best(view)
