"""Rent or buy against the offline optimum: the factors that are stated hold on random costs and any forecast."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.planner.admission import RentOrBuy

TRUSTS = st.sampled_from([0.25, 0.5, 1.0])
STOP_S = 10.0
#: Steps that are small against the stop.
SMALL = 0.1 * STOP_S
GAINS = st.lists(st.floats(0.0, SMALL), min_size=1, max_size=300)


def once(gains: list[float], forecasts: list[float], trust: float) -> float:
    """Seconds beyond the faster plan, of a change that is not taken back."""
    rule, paid = RentOrBuy(trust), 0.0
    for gain, forecast in zip(gains, forecasts, strict=True):
        paid += gain
        rule.step({"other": gain})
        if rule.due("other", stop_s=STOP_S, forecast_s=forecast):
            return paid + STOP_S
    return paid


@given(GAINS, TRUSTS, st.randoms(use_true_random=False))
def test_one_change_costs_at_most_the_stated_factor_whatever_the_forecast(gains, trust, dice) -> None:
    forecasts = [dice.choice([0.0, 1e9]) for _ in gains]
    best = min(sum(gains), STOP_S)
    assert once(gains, forecasts, trust) <= (1 + 1 / trust) * best + SMALL + 1e-9


@given(GAINS, TRUSTS)
def test_one_change_costs_less_where_the_forecast_is_right(gains, trust) -> None:
    left = [sum(gains[step:]) for step in range(len(gains))]
    verdict = 1e9 if left[0] >= STOP_S else 0.0
    best = min(left[0], STOP_S)
    assert once(gains, [verdict] * len(gains), trust) <= (1 + trust) * best + SMALL + 1e-9


@given(
    st.lists(st.tuples(st.floats(0.0, SMALL), st.floats(0.0, SMALL)), min_size=1, max_size=300),
    TRUSTS,
    st.randoms(use_true_random=False),
)
def test_there_and_back_costs_at_most_the_stated_factor(costs, trust, dice) -> None:
    rule, at, paid = RentOrBuy(trust), 0, 0.0
    best = [0.0, math.inf]
    for cost in costs:
        best = [min(best[here], best[1 - here] + STOP_S) + cost[here] for here in (0, 1)]
        paid += cost[at]
        rule.step({1 - at: cost[at] - cost[1 - at]})
        if rule.due(1 - at, stop_s=STOP_S, forecast_s=dice.choice([0.0, 1e9])):
            paid, at = paid + STOP_S, 1 - at
            rule.moved()
    factor = (1 + 1 / trust) ** 2 + SMALL / STOP_S / trust
    assert paid <= factor * min(best) + (1 + 1 / trust) * STOP_S + SMALL + 1e-9


def test_what_staying_gained_does_not_count_against_a_change() -> None:
    rule = RentOrBuy(0.5)
    for _ in range(100):
        rule.step({"other": -1.0})
    rule.step({"other": 6.0})
    assert rule.due("other", stop_s=10.0, forecast_s=20.0)
    assert not rule.due("other", stop_s=10.0, forecast_s=5.0)


def test_an_alternative_that_is_new_takes_over_the_regret() -> None:
    rule = RentOrBuy(1.0)
    rule.step({"first": 3.0, "second": 1.0})
    rule.step({"third": 1.0})
    assert rule.regret_s("third") == 4.0 and rule.regret_s("first") == 0.0
    rule.moved()
    assert rule.regret_s("third") == 0.0


@pytest.mark.parametrize("trust", [0.0, -1.0, 1.5, math.nan])
def test_trust_is_a_share(trust: float) -> None:
    with pytest.raises(ValueError, match="trust"):
        RentOrBuy(trust)
