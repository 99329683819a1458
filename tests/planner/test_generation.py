"""Classes of decoding against the roofline, and the accuracy that the documentation claims."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner.test_step_time import A100

from nereus.planner.accuracy import accuracy
from nereus.planner.generation import CLASSES, PRIOR, SPREAD, Serving, class_seconds

LLAMA = Serving(
    machine=A100,
    labels=(),
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    active_params=8.03e9,
    params=8.03e9,
    weight_bytes=2,
    cache_bytes=2,
    tp=1,
    pp=1,
    prompt_len=512,
    response_len=1024,
    batch=64,
)


def seconds(serving: Serving) -> dict[str, float]:
    return dict(zip(CLASSES, class_seconds([serving])[0].tolist(), strict=True))


def test_every_class_has_a_prior_and_a_spread() -> None:
    assert set(CLASSES) == set(PRIOR) == set(SPREAD)


def test_a_step_reads_the_weights_once_and_every_cache() -> None:
    """At the mean length, half of the response is there; a token of the cache of this model takes 128 KiB."""
    c = seconds(LLAMA)
    assert LLAMA.cache_token_bytes == 2 * 32 * 8 * 128 * 2
    step_bytes = (c["weights"] + c["cache"]) * LLAMA.batch * A100.hbm_bytes_per_s
    assert step_bytes == pytest.approx(8.03e9 * 2 + 64 * (512 + 512) * 131072)


def test_heads_that_are_replicated_buy_no_room() -> None:
    assert replace(LLAMA, tp=8).cache_token_bytes == replace(LLAMA, tp=16).cache_token_bytes
    assert replace(LLAMA, tp=4).cache_token_bytes == LLAMA.cache_token_bytes / 4


def test_few_tokens_reach_few_experts() -> None:
    sparse = replace(LLAMA, params=30.5e9, active_params=3.3e9)
    assert seconds(replace(sparse, batch=1))["weights"] * A100.hbm_bytes_per_s == pytest.approx(3.3e9 * 2)
    assert seconds(sparse)["weights"] * A100.hbm_bytes_per_s * 64 == pytest.approx(30.5e9 * 2)


def test_one_gpu_reduces_nothing() -> None:
    assert seconds(LLAMA)["tp"] == 0 and seconds(replace(LLAMA, tp=2))["tp"] > 0


def test_throughputs_that_were_not_seen(repo_root: Path) -> None:
    sys.path.insert(0, str(repo_root / "benchmarks"))
    import decode

    engines, measured = decode.measured()
    value, low, high = decode.across_folds(engines, measured)
    found = accuracy(value, np.array(measured), low, high)
    assert found.num > 200 and found.mean <= 0.09 and found.median <= 0.06
    assert found.within_90 is not None and found.within_90 >= 0.85
