"""Targets against all plans that the search knows, each with its own stop."""

from __future__ import annotations

import math

import pytest
from planner.test_rl_step import COLOCATED, PRIOR, plan_of

from nereus.passes.coarse import coarse
from nereus.planner.search import search
from nereus.planner.targets import targets


@pytest.mark.parametrize("steps", [1, 3, 10, 1000])
def test_no_plan_has_a_smaller_total(steps: int) -> None:
    plan = plan_of(COLOCATED)
    found = targets(plan, PRIOR, steps=steps)
    assert found.exact
    every = search(plan, PRIOR, count=200).best
    least = min(
        steps * each.cost + (coarse(plan, each.plan).stop_s if any(each.changes.values()) else 0.0) for each in every
    )
    present = search(plan, PRIOR, count=1).present
    assert present is not None
    assert found.best[0].total_s == pytest.approx(min(least, steps * present.cost))


def test_few_steps_stay_and_many_go() -> None:
    plan = plan_of(COLOCATED)
    one, many = (targets(plan, PRIOR, steps=steps).best[0] for steps in (1, 1000))
    assert many.stop_s > 0 and many.payback_steps < 1000
    assert one.total_s <= many.found.cost + many.stop_s
    totals = [target.total_s for target in targets(plan, PRIOR, steps=10, count=5).best]
    assert totals == sorted(totals) and len(totals) == 5


def test_staying_is_a_target_without_a_stop() -> None:
    plan = plan_of(COLOCATED)
    best = targets(plan, PRIOR, steps=10, count=50).best
    staying = [target for target in best if not any(target.found.changes.values())]
    assert len(staying) == 1 and staying[0].stop_s == staying[0].payback_steps == 0
    assert all((target.payback_steps > 0) == (target.stop_s > 0) for target in best)


def test_a_plan_that_does_not_fit_has_to_go_whatever_it_costs() -> None:
    plan = plan_of(COLOCATED.replace("response_len = 1536", "response_len = 30000").replace("4096", "40000"))
    found = targets(plan, PRIOR, steps=1)
    assert found.searched.present is None
    assert all(any(target.found.changes.values()) and target.payback_steps == 0 for target in found.best)
    assert not any(math.isnan(target.total_s) for target in found.best)
