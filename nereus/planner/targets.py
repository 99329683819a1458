"""Where to go from a running plan: the step that comes after, against the stop that it takes to get there.

What is minimised is what the steps to come cost (``search``: their time and a little for each key) plus the stop, which
the coarse estimate tells without compiling. A stop is never negative, so plans may be taken in the order of their steps
alone until even a stop of nothing could not make the next one best: the first target is exact, among the plans that
the search shows. Staying is a target like any other, without a stop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nereus.ir.plan import Plan
from nereus.passes.coarse import coarse
from nereus.planner.calibration import Calibration
from nereus.planner.limits import NO_LIMITS, Limits
from nereus.planner.search import Found, Searched, search

#: Plans asked of the search at first, and at most.
_FIRST, _MOST = 8, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``total_s``: what the steps to come cost, and the stop."""

    found: Found
    stop_s: float
    total_s: float
    #: Steps after which the stop has paid for itself; infinite where it never does, 0 for staying.
    payback_steps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Best first. ``exact``: no plan that was not looked at can be better than the first."""

    best: tuple[Target, ...]
    searched: Searched
    exact: bool


def targets(
    plan: Plan,
    calibration: Calibration,
    *,
    steps: int,
    count: int = 3,
    limits: Limits = NO_LIMITS,
) -> Targets:
    """``steps``: RL steps that the job goes on for with these lengths and GPUs. ``plan`` runs now, or does not fit."""
    num = max(count, _FIRST)
    while True:
        searched = search(plan, calibration, count=num, limits=limits)
        found = [_target(plan, searched, each, steps, calibration) for each in searched.best]
        if searched.present is not None and all(any(target.found.changes.values()) for target in found):
            found.append(_target(plan, searched, searched.present, steps, calibration))
        found.sort(key=lambda target: target.total_s)
        exact = len(searched.best) < num or steps * searched.best[-1].cost >= found[0].total_s
        if exact or num >= _MOST:
            return Targets(best=tuple(found[:count]), searched=searched, exact=exact)
        num *= 2


def _target(plan: Plan, searched: Searched, found: Found, steps: int, calibration: Calibration) -> Target:
    stop_s = calibration.stops.stop_s(coarse(plan, found.plan)) if any(found.changes.values()) else 0.0
    gain = (searched.present.seconds if searched.present is not None else math.inf) - found.seconds
    if not stop_s or gain == math.inf:
        payback = 0.0
    else:
        payback = stop_s / gain if gain > 0 else math.inf
    return Target(found=found, stop_s=stop_s, total_s=steps * found.cost + stop_s, payback_steps=payback)
