"""The offline optimum against all sequences of plans."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.replay.offline import Problem, solve


@given(st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_sequence_of_plans_is_better(num_steps: int, num_plans: int, dice: random.Random) -> None:
    def drawn() -> float:
        return math.inf if dice.random() < 0.15 else dice.uniform(1, 10)

    step_s = [[drawn() for _ in range(num_plans)] for _ in range(num_steps)]
    least = [dice.choice([0.0, 1.0, -math.inf]) for _ in range(num_steps)]
    move_s = [
        [[max(least[step], dice.uniform(-2, 6)) for _ in range(num_plans)] for _ in range(num_plans)]
        for step in range(num_steps)
    ]

    def cost(plans: tuple[int, ...]) -> float:
        moves = ((step, plans[step - 1], plans[step]) for step in range(1, num_steps))
        return sum(step_s[step][plan] for step, plan in enumerate(plans)) + sum(
            move_s[step][a][b] for step, a, b in moves if a != b
        )

    problem = Problem(
        num_steps=num_steps,
        plans=tuple(range(num_plans)),
        step_s=lambda step, plan: step_s[step][plan],
        move_s=lambda step, a, b: move_s[step][a][b],
        least_move_s=lambda step: least[step],
    )
    best = min(cost(plans) for plans in itertools.product(range(num_plans), repeat=num_steps))
    found, plans = solve(problem)
    if best == math.inf:
        assert found == math.inf and plans == ()
    else:
        assert found == pytest.approx(best) == pytest.approx(cost(plans))
