"""Every baseline delivers every wanted byte from places that have it, and never with fewer bytes than the bound."""

from __future__ import annotations

import numpy as np
from hypothesis import event, given
from passes.plans import pairs
from passes.profiles import examples
from sim.delivery import bound_bytes, check_delivery

from nereus.ir.plan import Plan
from nereus.sim.baselines import BASELINES, build_problem, job_of
from nereus.sim.engine import simulate


@examples(40)
@given(pairs())
def test_every_wanted_byte_arrives(pair: tuple[Plan, Plan]) -> None:
    problem = build_problem(*pair)
    for baseline in BASELINES:
        answer = baseline.solve(problem)
        event(f"{baseline.name}: {'cannot' if answer.cannot else 'fails' if answer.fails else 'does it'}")
        if answer.cannot is not None:
            assert not answer.steps
            continue
        check_delivery(answer)
        assert answer.moved_bytes >= bound_bytes(answer), baseline.name


@examples(20)
@given(pairs())
def test_the_simulator_runs_every_answer_and_agrees_on_memory(pair: tuple[Plan, Plan]) -> None:
    problem = build_problem(*pair)
    for baseline in BASELINES:
        answer = baseline.solve(problem)
        if answer.cannot is None:
            outcome = simulate(job_of(answer))
            if answer.fails is None and not answer.blocking:
                assert outcome.finished, baseline.name
            # The answer's peak holds for any timing, the simulator's is that of one.
            assert (outcome.peak_bytes <= np.maximum(answer.peak_bytes, answer.base_bytes)).all(), baseline.name
