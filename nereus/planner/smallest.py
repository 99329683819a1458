"""The fewest GPUs of a cluster that hold all stages of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from nereus.ir.plan import Plan
from nereus.planner.calibration import Calibration
from nereus.planner.limits import NO_LIMITS, Limits
from nereus.planner.placements import units_of
from nereus.planner.search import Found, search

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """``found``: the fastest plan on the first ``num_gpus`` of the cluster. ``too_few``: GPUs on which none fits; None
    where no fewer could be asked for."""

    num_gpus: int
    too_few: int | None
    found: Found


def smallest(plan: Plan, calibration: Calibration, *, limits: Limits = NO_LIMITS) -> Smallest | None:
    """None where no plan fits on the whole cluster. GPUs are taken in the cluster's order, in the units that
    placements are made of, and no fewer than the plan's pool always has; what fits on some of them fits on more, which
    leaves them unused."""
    units = units_of(plan.cluster, limits)
    ends = [sum(len(unit) for unit in units[: number + 1]) for number in range(len(units))]

    def on(number: int) -> Found | None:
        best = search(plan, calibration, count=1, limits=replace(limits, move=True, most_gpus=ends[number])).best
        return best[0] if best else None

    pool_gpus = 0 if plan.cluster.pool is None else plan.cluster.pool.min_gpus or 0
    first = next((number for number, end in enumerate(ends) if end >= pool_gpus), len(units) - 1)
    found = least(len(units), on, first=first)
    if found is None:
        return None
    number, best = found
    return Smallest(num_gpus=ends[number], too_few=None if number == first else ends[number - 1], found=best)


def least(num: int, on: Callable[[int], _T | None], *, first: int = 0) -> tuple[int, _T] | None:
    """The least number from ``first`` to below ``num`` that ``on`` finds something for, as it does for all larger
    ones; None where there is none."""
    if not 0 <= first < num:
        return None
    low, high, found = first - 1, first, on(first)
    while found is None:
        if high == num - 1:
            return None
        low, high = high, min(2 * high + 1, num - 1)
        found = on(high)
    while high - low > 1:
        middle = (low + high) // 2
        tried = on(middle)
        if tried is None:
            low = middle
        else:
            high, found = middle, tried
    return high, found
