"""Efficiencies are planted in a world of its own noise, and found again from what a job would measure there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.test_rl_step import COLOCATED, PRIOR, plan_of

from nereus.ir.plan import Plan
from nereus.passes.coarse import coarse
from nereus.planner import generation, plan_memory, step_time
from nereus.planner.calibration import Calibration, from_document, timed_runs, to_document
from nereus.planner.learned import learn
from nereus.planner.online import Online
from nereus.planner.plan_memory import PLAN_MEMORY, peak
from nereus.planner.rl_step import generation_seconds, num_passes, order_of, stage_time
from nereus.planner.rl_step import step_time as predicted
from nereus.planner.stage_runs import run_of_stage

BASE = plan_of(COLOCATED)
PHASES = {"offer": 0.2, "prepare": 4.0, "move": 1.0, "probe": 0.1, "finish": 0.5, "vote": 0.1}


def at(length: float, plan: Plan = BASE) -> Plan:
    return replace(plan, workload=replace(plan.workload, response_len=round(length)))


def otherwise(plan: Plan = BASE) -> Plan:
    """Another layout of the same stages: twice the tensor parallelism where there is pipeline to give."""
    stages = tuple(replace(s, tp=s.tp * 2, pp=s.pp // 2) if s.pp % 2 == 0 else s for s in plan.stages)
    assert stages != plan.stages
    return replace(plan, stages=stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Every class of operation takes its prior times a factor of this world's."""

    of_step: np.ndarray
    of_token: np.ndarray
    between_s: float = 0.0

    @classmethod
    def drawn(cls, seed: int, between_s: float = 0.0) -> World:
        rng = np.random.default_rng(seed)
        return cls(
            of_step=np.exp(STEP_PRIOR + 0.3 * rng.standard_normal(len(STEP_PRIOR))),
            of_token=np.exp(TOKEN_PRIOR + 0.3 * rng.standard_normal(len(TOKEN_PRIOR))),
            between_s=between_s,
        )

    def stages(self, plan: Plan) -> dict[str, float]:
        found = {}
        for stage in plan.stages:
            if stage.kind == "generate":
                found[stage.name] = float(generation_seconds(plan, stage) @ self.of_token)
            else:
                x = timed_runs([run_of_stage(plan, stage)]).x[0]
                found[stage.name] = float(x @ self.of_step) * num_passes(plan, stage)
        return found

    def step(self, plan: Plan) -> float:
        return max(order_of(plan).ends(self.stages(plan)).values()) + self.between_s


STEP_PRIOR = np.log(step_time.class_array(step_time.PRIOR))
TOKEN_PRIOR = np.log(step_time.class_array(generation.PRIOR, generation.CLASSES))


def noisy(values: Mapping[str, float], rng: np.random.Generator, spread: float = 0.02) -> dict[str, float]:
    return {name: value * float(np.exp(spread * rng.standard_normal())) for name, value in values.items()}


def off(calibration: Calibration, plan: Plan, truth: float) -> float:
    return abs(predicted(plan, calibration).seconds / truth - 1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_stage_timings_give_the_worlds_efficiencies(seed: int) -> None:
    """At lengths between those that were seen, and less well beyond them."""
    world, rng = World.drawn(seed), np.random.default_rng(seed)
    online = Online(PRIOR)
    for step, length in enumerate(range(1000, 2600, 160)):
        online.observe(at(length), step=step, stage_s=noisy(world.stages(at(length)), rng))
    known = online.calibration()
    for length, within in ((1100, 0.05), (2000, 0.05), (3200, 0.12)):
        assert off(known, at(length), world.step(at(length))) < within
        for stage in BASE.stages:
            truth = world.stages(at(length))[stage.name]
            assert abs(stage_time(at(length), stage, known).seconds / truth - 1) < 2 * within


def test_another_layout_is_predicted_better_than_without() -> None:
    better = []
    for seed in range(20):
        world, rng = World.drawn(seed), np.random.default_rng(seed)
        online = Online(PRIOR)
        for step, length in enumerate(range(1000, 2600, 160)):
            online.observe(at(length), step=step, stage_s=noisy(world.stages(at(length)), rng))
        other = at(1800, otherwise())
        better.append((off(online.calibration(), other, world.step(other)), off(PRIOR, other, world.step(other))))
    with_it, without = np.mean(better, axis=0)
    assert with_it < 0.08 and with_it < 0.6 * without


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), between_s=st.floats(0.0, 10.0))
def test_step_times_alone_give_the_steps_of_other_lengths(seed: int, between_s: float) -> None:
    world, rng = World.drawn(seed, between_s), np.random.default_rng(seed)
    online = Online(PRIOR)
    for step, length in enumerate(range(1000, 2600, 100)):
        online.observe(at(length), step=step, step_s=world.step(at(length)) * float(np.exp(0.02 * rng.normal())))
    for length, within in ((1250, 0.06), (2450, 0.06), (3000, 0.12)):
        found = predicted(at(length), online.calibration()).seconds + online.between_s()
        assert abs(found / world.step(at(length)) - 1) < within


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_tenth_of_outliers_moves_little(seed: int) -> None:
    world, rng = World.drawn(seed), np.random.default_rng(seed)
    online = Online(PRIOR)
    for step in range(60):
        length = 1000 + 25 * step
        stage_s = noisy(world.stages(at(length)), rng)
        if step % 10 == 5:
            stage_s = {name: 5.0 * value for name, value in stage_s.items()}
        online.observe(at(length), step=step, stage_s=stage_s)
    for length in (1200, 2400):
        assert off(online.calibration(), at(length), world.step(at(length))) < 0.06


def test_a_drift_is_followed_and_a_short_disturbance_is_not() -> None:
    world = World.drawn(3)
    slower = replace(world, of_step=1.5 * world.of_step, of_token=1.5 * world.of_token)
    online = Online(PRIOR)
    for step in range(20):
        online.observe(at(1500), step=step, stage_s=world.stages(at(1500)))
    online.observe(at(1500), step=20, stage_s=slower.stages(at(1500)))
    assert off(online.calibration(), at(1500), world.step(at(1500))) < 0.02
    for step in range(21, 26):
        online.observe(at(1500), step=step, stage_s=slower.stages(at(1500)))
    assert off(online.calibration(), at(1500), slower.step(at(1500))) < 0.02


def test_what_was_measured_long_ago_counts_less_and_then_not_at_all() -> None:
    """In one world a layout was measured, in the next its neighbour at the same length."""
    first, then = World.drawn(5), World.drawn(5)
    then = replace(then, of_step=1.6 * first.of_step, of_token=1.6 * first.of_token)
    wrong = []
    for pause in (0, 30, 90):
        online = Online(PRIOR, half_life_steps=20)
        for step in range(5):
            online.observe(at(1300), step=step, stage_s=first.stages(at(1300)))
        for step in range(5 + pause, 10 + pause):
            online.observe(at(1800), step=step, stage_s=then.stages(at(1800)))
        wrong.append(off(online.calibration(), at(1500), then.step(at(1500))))
    assert wrong[0] > wrong[1] > wrong[2] and wrong[1] < 0.15
    online.observe(at(1800), step=1000, stage_s={})
    assert np.array_equal(online.calibration().step_time.seen.x, PRIOR.step_time.seen.x)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_peaks_give_a_constant_and_a_factor_for_each_kind_of_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    factors = np.exp(0.3 * np.array(plan_memory.PLAN_MEMORY.spread) * rng.uniform(-1, 1, len(plan_memory.CLASSES)))

    def truth(plan: Plan) -> float:
        return float((plan_memory.row_bytes(plan) @ factors).max())

    online = Online(PRIOR)
    for step, length in enumerate(range(800, 3200, 200)):
        online.observe(at(length), step=step, peak_bytes=truth(at(length)) * float(np.exp(0.01 * rng.normal())))
    for length in (900, 2500, 3600):
        found = peak(online.calibration().plan_memory, at(length))
        assert abs(found.expected_bytes / truth(at(length)) - 1) < 0.06
        assert found.expected_bytes < found.high_bytes < 1.3 * found.expected_bytes


def test_changes_that_were_made_tell_the_stop_of_others() -> None:
    other = otherwise()
    estimate = coarse(BASE, other)
    assert PRIOR.stops.stop_s(estimate) == estimate.stop_s > 0
    online = Online(PRIOR)
    for _ in range(4):
        online.changed(BASE, other, PHASES)
    online.changed(BASE, other, {name: 20 * seconds for name, seconds in PHASES.items()})
    assert online.calibration().stops.stop_s(estimate) == pytest.approx(sum(PHASES.values()), rel=0.01)
    assert online.calibration().stops.stop_s(coarse(BASE, BASE)) == 0.0


def test_it_is_saved_as_any_calibration_and_goes_on_from_there() -> None:
    world = World.drawn(7, between_s=2.0)
    online = Online(PRIOR)
    for step, length in enumerate(range(1000, 2600, 200)):
        plan = at(length)
        online.observe(plan, step=step, step_s=world.step(plan), stage_s=world.stages(plan), peak_bytes=6e10)
    online.changed(BASE, otherwise(), PHASES)
    assert online.between_s() == pytest.approx(2.0, rel=1e-6)
    known = online.calibration()
    again = from_document(json.loads(json.dumps(to_document(known))), "saved")
    for plan in (at(1500), at(1500, otherwise())):
        assert predicted(plan, again).seconds == pytest.approx(predicted(plan, known).seconds, rel=1e-5)
        assert peak(again.plan_memory, plan).high_bytes == pytest.approx(
            peak(known.plan_memory, plan).high_bytes, rel=1e-5
        )
    assert again.stops.stop_s(coarse(BASE, otherwise())) == pytest.approx(sum(PHASES.values()), rel=0.01)
    # A job that begins with it and measures one more step forgets nothing of it.
    next_one = Online(again)
    next_one.observe(at(2700), step=0, stage_s=world.stages(at(2700)))
    for length in (1100, 2700):
        assert off(next_one.calibration(), at(length), world.step(at(length)) - 2.0) < 0.03


def test_a_saved_model_holds_what_was_measured() -> None:
    rng = np.random.default_rng(1)
    seen = plan_memory.seen([at(length) for length in range(800, 3200, 100)], "device")
    measured = seen.x.sum(axis=1) * np.exp(0.05 * rng.standard_normal(len(seen.x)))
    assert learn(PLAN_MEMORY, seen, measured).measured() == pytest.approx(measured, rel=0.01)


def test_what_cannot_be_measured_is_refused() -> None:
    online = Online(PRIOR)
    for wrong in ({"step_s": 0.0}, {"step_s": float("nan")}, {"peak_bytes": -1.0}, {"stage_s": {"actor.train": 0.0}}):
        with pytest.raises(ValueError, match="positive and finite"):
            online.observe(BASE, step=0, **wrong)
    with pytest.raises(ValueError, match=r"no stage of the plan: critic\.train"):
        online.observe(BASE, step=0, stage_s={"critic.train": 1.0})
    assert online.calibration() == PRIOR
