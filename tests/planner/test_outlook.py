"""The trend of lengths and the horizon for which it is relied on."""

from __future__ import annotations

import random

import pytest

from nereus.planner.outlook import Outlook


def observed(lengths: list[float], remaining: int | None = None) -> Outlook:
    outlook = Outlook(remaining)
    for length in lengths:
        outlook.observe(length)
    return outlook


def test_a_growth_goes_on_and_one_odd_batch_does_not_turn_it() -> None:
    lengths = [1000 * 1.02**step for step in range(8)]
    assert observed(lengths).length(10) == pytest.approx(1000 * 1.02**17)
    lengths[4] *= 1.05
    assert observed(lengths).length(10) == pytest.approx(1000 * 1.02**17, rel=0.03)


def test_the_horizon_is_as_long_as_things_have_lasted() -> None:
    dice = random.Random(0)
    steady = observed([1000 * (1 + 0.02 * dice.gauss(0, 1)) for _ in range(20)])
    assert steady.horizon_steps == 20
    steady.restart()
    assert steady.horizon_steps == 10, "changed once in 20 steps: twice, by Laplace"
    assert observed([1000.0] * 20, remaining=25).horizon_steps == 5


def test_a_jump_ends_what_was_known() -> None:
    outlook = observed([1000.0] * 10 + [2000.0])
    assert outlook.horizon_steps == 11 // 2
    assert outlook.length(5) == pytest.approx(2000)
