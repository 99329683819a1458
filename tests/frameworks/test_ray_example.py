"""The example with the real engines: Megatron trains, vLLM generates with the trainer's weights of every step, Ray
places the processes, and the trainer's layout changes twice on the way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from frameworks.ray_cluster import DEVICE, ray_cluster

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.megatron_vllm_ray.run import load, run  # noqa: E402

PLANS = [load(str(ROOT / "examples" / "megatron_vllm_ray" / f"{name}.plan")) for name in ("base", "pipeline", "data")]


def test_layouts_change_under_training_and_the_engine_follows() -> None:
    """Beside a run whose plan stays as it is."""
    words = {"steps": 6, "bundle": {DEVICE: 1}, "prepare": "frameworks.ray_engines:prepare"}
    with ray_cluster(1, 2):
        seen, outcomes = run(PLANS, every=2, **words)
        fixed, _ = run(PLANS[:1], every=100, **words)
    assert [at["plan"] for at in seen] == ["base"] * 2 + ["pipeline"] * 2 + ["data"] * 2
    assert [at["step"] for at in seen] == list(range(1, 7))
    assert [o.fault for o in outcomes] == [None] * 3 and all(o.moved_bytes > 10**6 for o in outcomes[1:])
    # The engine's log-probabilities of what it sampled are the trainer's, by other kernels.
    assert max(at["apart"] for at in seen) < 1e-4
    # Sums in another order may choose another token now and then: each is 0.002 of a reward.
    assert [at["reward"] for at in seen] == pytest.approx([at["reward"] for at in fixed], abs=0.05)
    assert seen[-1]["reward"] > seen[0]["reward"] + 0.1
