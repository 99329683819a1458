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

EXAMPLE = ROOT / "examples" / "megatron_vllm_ray"
PLANS = [load(str(EXAMPLE / f"{name}.plan")) for name in ("base", "pipeline", "data")]


def test_layouts_change_under_training_and_the_engine_follows() -> None:
    """Tensor parallel, pipeline, replicas; one of these is lost, the job goes on with the other, and grows again onto
    a new process. Beside a run whose plan stays as it is."""
    words = {"bundle": {DEVICE: 1}, "prepare": "frameworks.ray_engines:prepare"}
    fallback = load(str(EXAMPLE / "alone.plan"))
    with ray_cluster(1, 2):
        seen, outcomes = run(PLANS, steps=8, every=2, fallback=fallback, lose=5, **words)
        fixed, _ = run(PLANS[:1], steps=8, every=100, **words)
    plans = ["base", "base", "pipeline", "pipeline", "data", "alone", "base", "base"]
    assert [at["plan"] for at in seen] == plans and [at["step"] for at in seen] == list(range(1, 9))
    assert [o.fault for o in outcomes] == [None] * 5
    # The replica that is left needs nothing from anybody.
    assert [o.moved_bytes > 10**6 for o in outcomes[1:]] == [True, True, False, True]
    # The engine's log-probabilities of what it sampled are the trainer's, by other kernels.
    assert max(at["apart"] for at in seen) < 1e-4
    # Sums in another order may choose another token now and then: each is 0.002 of a reward.
    assert [at["reward"] for at in seen] == pytest.approx([at["reward"] for at in fixed], abs=0.05)
    assert seen[-1]["reward"] > seen[0]["reward"] + 0.1
