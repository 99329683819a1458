"""Full GPUs in a circle of two to eight model-stages: all are solved in the memory that tight mode promises."""

from __future__ import annotations

import numpy as np
import pytest
from passes.execute import pipeline
from sim.cycles import cycle_plans, tiny_cycle

from nereus.passes.pipeline import compile_transition
from nereus.runtime.run import squeezed
from nereus.sim.engine import simulate
from nereus.sim.from_transition import job_of
from nereus.sim.safety import faults_of


@pytest.mark.parametrize(("count", "relayout"), [*((n, False) for n in range(2, 9)), (2, True), (5, True), (8, True)])
def test_tiny_cycles_at_the_bound_of_memory(count: int, relayout: bool) -> None:
    """No byte more than max(before, after), the largest storage that comes, and staging."""
    old, new = tiny_cycle(count, relayout=relayout)
    options = pipeline(window=256, mode="tight")
    transition = squeezed(compile_transition(old, new, options), options)
    memory = transition.memory
    assert transition.schedule.mode == "tight"
    assert (memory.capacity == memory.tight_bound).all(), "scheduled with all the memory there is"
    full = memory.state.old > 0
    # Full indeed: what a GPU holds and what is to come do not fit together.
    assert (memory.capacity < memory.reversible["during the transfer"])[full].all()
    assert faults_of(transition, range(1, 6)) == []
    outcome = simulate(job_of(transition).job)
    assert outcome.safe and (outcome.peak_bytes <= memory.tight_bound).all()


@pytest.mark.parametrize("shift", [2, 3, 5])
def test_several_circles_at_once(shift: int) -> None:
    """Six stages that move on by 2, 3 or 5 nodes: two circles of three, three of two, one the other way round."""
    old, new = tiny_cycle(6, shift=shift)
    options = pipeline(window=256, mode="tight")
    transition = squeezed(compile_transition(old, new, options), options)
    assert (transition.memory.capacity == transition.memory.tight_bound).all()
    assert faults_of(transition, range(6)) == []


@pytest.mark.parametrize("count", [2, 3])
def test_real_models_that_do_not_fit_twice(count: int) -> None:
    transition = compile_transition(*cycle_plans(count))
    assert transition.schedule.mode == "tight" and transition.certificate.safe
    job = job_of(transition)
    outcome = simulate(job.job)
    assert outcome.safe and not outcome.overflows
    assert (outcome.peak_bytes <= transition.memory.capacity).all()
    assert np.isfinite(job.stopped_s(outcome))
    # Every GPU sends all it has and receives as much: the port's time is the bound.
    assert job.transfer_s(outcome) == pytest.approx(transition.certificate.bound_transfer_s, rel=0.15)
