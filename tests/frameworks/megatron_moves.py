"""A Megatron trainer handed over from one layout to another, with what the unmoved one does next to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from frameworks.megatron_models import At, Trainer, build, whole_of

from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.base import Binding
from nereus.runtime.adapters.whole import Whole
from nereus.runtime.live import move


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """``trainer``: the new one, ``filled`` its storages. ``expected``: loss, gradient norm and rate of the unmoved
    trainer's next step, ``after``: its whole tensors then."""

    trainer: Trainer
    filled: Binding
    arrived: Whole
    job: dict[str, Any]
    expected: Any
    after: Whole


def hand_over(trainer: Trainer, arch: Any, target: At, number: int) -> HandOver:
    """Called by all ranks. The state arrives bit for bit, and every line of the checklist holds."""
    old = trainer.adapter()
    binding, job = old.bind(), old.job_state()
    before = whole_of(binding, arch)
    # What the unmoved trainer does next; then back to where it was.
    memory = [m.clone() for m in binding.memory]
    expected = trainer.step(number)
    after = whole_of(old.bind(), arch)  # where gathers overlap, binding ends them
    for here, saved in zip(binding.memory, memory, strict=True):
        here.copy_(saved)
    old.finish(job)

    moved = build(arch, target, seed=99)
    new = moved.adapter()
    filled = new.bind()
    move(binding, filled, logical_tensors(arch))
    new.finish(job)
    for condition in new.checklist():
        assert condition.check() is None, (target, condition.name, condition.check())
    arrived = whole_of(filled, arch)
    assert arrived.keys() == before.keys()
    for key, values in before.items():
        assert torch.equal(arrived[key], values), (target, key)
    assert new.job_state() == job
    return HandOver(trainer=moved, filled=filled, arrived=arrived, job=job, expected=expected, after=after)


def agree(expected: Any, result: Any, after: Whole, here: Whole, *, bf16: bool) -> None:
    """Two steps, up to the order of sums: loss, gradient norm, rate, weights and moments."""
    assert result[2] == expected[2]  # lr
    loose = 2e-2 if bf16 else 2e-5
    assert result[0] == pytest.approx(expected[0], rel=loose)
    assert result[1] == pytest.approx(expected[1], rel=loose)
    for key, values in after.items():
        if key[1] in ("exp_avg", "master", "weight") and not bf16:
            torch.testing.assert_close(here[key], values, rtol=1e-3, atol=2e-5)
