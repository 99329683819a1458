"""The model of learned factors, against factors that made the data, and against a brute-force posterior."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.planner.learned import Beliefs, Seen, learn

BELIEFS = Beliefs(
    prior=np.zeros(3),
    spread=np.ones(3),
    everywhere=0.5,
    by_label={"cluster": 0.4},
    near=0.05,
    reach=1.0,
    near_label="cluster",
    noise=0.02,
    freedom=4.0,
)


def _seen(rng: np.random.Generator, num: int, cluster: str = "cluster:a") -> Seen:
    return Seen(x=rng.uniform(0.1, 3.0, (num, 3)), labels=((cluster,),) * num, place=rng.normal(size=(num, 2)))


def test_factors_that_made_the_data_are_found() -> None:
    rng = np.random.default_rng(0)
    seen, factors = _seen(rng, 60), np.array([0.5, 2.0, 1.3])
    measured = (seen.x * factors).sum(axis=1) * np.exp(rng.normal(scale=0.01, size=60))
    found = learn(BELIEFS, seen, measured).factors(seen)
    assert np.allclose(found, factors, rtol=0.05)


def test_a_disturbed_run_pulls_at_nothing() -> None:
    rng = np.random.default_rng(1)
    seen = _seen(rng, 40)
    measured = seen.x.sum(axis=1)
    clean = learn(BELIEFS, seen, measured).predict(seen).value
    measured[7] *= 3
    disturbed = learn(BELIEFS, seen, measured).predict(seen).value
    others = np.arange(40) != 7
    assert np.abs(disturbed / clean - 1)[others].max() < 0.03


def test_without_runs_there_is_the_prior_and_its_width() -> None:
    rng = np.random.default_rng(2)
    nothing = Seen(x=np.zeros((0, 3)), labels=(), place=np.zeros((0, 2)))
    some = _seen(rng, 5)
    predicted = learn(BELIEFS, nothing, np.zeros(0)).predict(some)
    assert np.allclose(predicted.value, some.x.sum(axis=1))
    share = some.x / some.x.sum(axis=1)[:, None]
    variance = (share**2).sum(axis=1) * (0.5**2 + 0.4**2) + 0.05**2 + 0.02**2
    assert np.allclose(predicted.deviation, np.sqrt(variance))


def test_another_cluster_learns_what_is_common_and_stays_less_certain() -> None:
    rng = np.random.default_rng(3)
    seen = _seen(rng, 50)
    model = learn(BELIEFS, seen, 2 * seen.x.sum(axis=1))
    here, there = _seen(rng, 10), _seen(rng, 10, "cluster:b")
    there = replace(there, x=here.x)
    ratio_here = model.predict(here).value / here.x.sum(axis=1)
    ratio_there = model.predict(there).value / here.x.sum(axis=1)
    assert np.all(ratio_here > 1.9) and np.all((ratio_there > 1.2) & (ratio_there < ratio_here))
    assert np.all(model.predict(there).deviation > 2 * model.predict(here).deviation)


def test_left_out_runs_are_as_if_learned_without_them() -> None:
    """At the mode the closed form equals learning again, but for the linearisation around a slightly other mode."""
    rng = np.random.default_rng(4)
    seen = _seen(rng, 25)
    measured = (seen.x * [0.7, 1.5, 1.0]).sum(axis=1) * np.exp(rng.normal(scale=0.02, size=25))
    whole = learn(BELIEFS, seen, measured)
    for out in range(0, 25, 5):
        kept = np.array([i for i in range(25) if i != out])
        again = learn(BELIEFS, seen.part(kept), measured[kept]).predict(seen.part(np.array([out])))
        assert np.log(measured[out] / again.value[0]) == pytest.approx(whole.left_out[out], abs=0.01)


def _minus_log_posterior(seen: Seen, measured: np.ndarray, effects: np.ndarray, near: np.ndarray) -> float:
    """One cluster: effects [3] common to all runs, near [runs]. Written out, not over covariances."""
    variance = BELIEFS.everywhere**2 + BELIEFS.by_label["cluster"] ** 2
    residual = np.log((seen.x * np.exp(effects)).sum(axis=1)) + near - np.log(measured)
    distance = np.sqrt(((seen.place[:, None] - seen.place[None]) ** 2).sum(axis=2))
    covariance = BELIEFS.near**2 * np.exp(-distance / BELIEFS.reach)
    noise = BELIEFS.noise**2 * BELIEFS.freedom
    tails = (BELIEFS.freedom + 1) / 2 * np.log1p(residual**2 / noise)
    return float(tails.sum() + 0.5 * (effects**2).sum() / variance + 0.5 * near @ np.linalg.solve(covariance, near))


@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_no_other_choice_has_a_higher_posterior(seed: int) -> None:
    """The pulls name a point of the space of effects; no step from it, in any direction, is more likely."""
    rng = np.random.default_rng(seed)
    seen = _seen(rng, 8)
    measured = (seen.x * rng.uniform(0.5, 2.0, 3)).sum(axis=1) * np.exp(rng.normal(scale=0.05, size=8))
    model = learn(BELIEFS, seen, measured)
    effects = np.log(model.factors(seen)[0])
    distance = np.sqrt(((seen.place[:, None] - seen.place[None]) ** 2).sum(axis=2))
    near = BELIEFS.near**2 * np.exp(-distance / BELIEFS.reach) @ model.near_pull
    best = _minus_log_posterior(seen, measured, effects, near)
    for _ in range(40):
        size = 10 ** rng.uniform(-3, 0)
        other = _minus_log_posterior(
            seen, measured, effects + size * rng.normal(size=3), near + 0.1 * size * rng.normal(size=8)
        )
        assert other > best - 0.02
