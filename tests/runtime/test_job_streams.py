"""Random streams by the re-derivation rule: reproducible, and shared by exactly those that must share them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from nereus.runtime.job_state import RngRule  # noqa: E402
from nereus.runtime.job_values import JobStateError  # noqa: E402
from nereus.runtime.rng_streams import (  # noqa: E402
    SCOPES,
    RngPlace,
    Scope,
    derive_seed,
    fingerprints,
    live_streams,
    rederive,
    restore,
    snapshot,
)

RULE = RngRule(seed=17)


@pytest.fixture(autouse=True)
def _streams_as_they_were() -> Iterator[None]:
    saved = snapshot()
    yield
    restore(saved)


def _place(rank: int, *, tp: int = 1, role: str = "actor") -> RngPlace:
    return RngPlace(role=role, rank=rank, alike=rank // tp * tp)


def _draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_every_rank_draws_other_numbers_and_draws_them_again() -> None:
    drawn = {}
    for rank in range(12):
        rule, note = rederive(RULE, step=120, place=_place(rank))
        drawn[rank] = _draws()
        assert rule == RngRule(seed=17, derived_step=120)
        assert "seed 17" in note and "step 120" in note and "other numbers" in note
    for stream in range(3):
        assert len({numbers[stream] for numbers in drawn.values()}) == 12
    rederive(RULE, step=120, place=_place(5))
    assert _draws() == drawn[5]
    for step, place, rule in (
        (121, _place(5), RULE),
        (120, _place(5, role="critic"), RULE),
        (120, _place(5), RngRule(seed=18)),
    ):
        rederive(rule, step=step, place=place)
        assert not set(_draws()) & set(drawn[5])


@given(
    tp=st.sampled_from([1, 2, 4]),
    replicas=st.integers(1, 4),
    stream=st.sampled_from(sorted(SCOPES)),
    step=st.integers(0, 10**6),
)
def test_scopes(tp: int, replicas: int, stream: str, step: int) -> None:
    seeds = [derive_seed(RULE, step, _place(rank, tp=tp), stream) for rank in range(tp * replicas)]
    distinct = {Scope.RANK: tp * replicas, Scope.ALIKE: replicas, Scope.ROLE: 1}[SCOPES[stream]]
    assert len(set(seeds)) == distinct
    if SCOPES[stream] is Scope.ALIKE:
        assert all(seeds[rank] == seeds[rank // tp * tp] for rank in range(tp * replicas))
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_on_every_machine() -> None:
    """A change of the rule would break every job that is resumed: it needs a new number in the hashed text."""
    assert derive_seed(RULE, 120, _place(5), "model-parallel-rng") == 1756351919119195009


def test_unknown_streams_are_refused_until_declared() -> None:
    with pytest.raises(JobStateError, match="who shares the stream 'my-dropout' is not known; declare it"):
        derive_seed(RULE, 1, _place(0), "my-dropout")
    declared = RngRule(seed=17, declared=(("my-dropout", "alike"),))
    assert derive_seed(declared, 1, _place(1, tp=2), "my-dropout") == derive_seed(declared, 1, _place(0), "my-dropout")
    with pytest.raises(JobStateError, match=r"rng\.declared\.my-dropout: 'tp' is not one of rank, alike, role"):
        derive_seed(RngRule(seed=17, declared=(("my-dropout", "tp"),)), 1, _place(0), "my-dropout")


def test_a_change_that_is_given_up_leaves_the_streams_as_they_were() -> None:
    torch.manual_seed(3)
    saved, before = snapshot(), fingerprints()
    expected = _draws()
    rederive(RULE, step=1, place=_place(0))
    assert not set(fingerprints().items()) & set(before.items())
    restore(saved)
    assert fingerprints() == before and _draws() == expected
    assert set(before) == set(live_streams())
