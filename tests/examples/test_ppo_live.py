"""The PPO example under changes of plan and the loss of a process: its curve is, to the last bit, that of one process
which does everything alone."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from examples.ppo import fixed, train  # noqa: E402
from examples.ppo.plans import alone, laid_out, load  # noqa: E402

pytestmark = [pytest.mark.procs, pytest.mark.slow]

PPO = Path(__file__).resolve().parents[2] / "examples" / "ppo"


BASE = load(str(PPO / "base.plan"))
PLANS = (
    BASE,
    load(str(PPO / "longest.plan")),
    laid_out(BASE, 4, {"actor.train": 4, "critic.train": 2, "ref.infer": 4}, "tp 4"),
    load(str(PPO / "pair.plan")),
)
NUM_STEPS = 7


@pytest.fixture(scope="module")
def expected() -> list[dict[str, float]]:
    """The curve of one process."""
    return list(fixed.run(0, dist.HashStore(), fixed.options_of(alone(BASE), NUM_STEPS)).curve)


def test_layouts_change_and_no_bit_does(expected: list[dict[str, float]]) -> None:
    """Tensor parallelism 1, 2 and 4 of trainers and generator; two processes leave the plan and come back."""
    found = train.run(PLANS, NUM_STEPS, at=(1, 2, 4, 6))
    assert found["plan"] == PLANS[0].path, "once round"
    assert found["curve"] == expected


def test_a_process_is_killed_and_another_comes(expected: list[dict[str, float]]) -> None:
    """The others go on with two from the last boundary; later the job asks for a process and is four again."""
    found = train.run(PLANS[:2], NUM_STEPS, kill=1, fallback=PLANS[3])
    assert found["curve"] == expected
    assert found["plan"] == PLANS[0].path
