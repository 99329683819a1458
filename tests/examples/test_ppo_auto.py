"""The PPO example under a controller that is given one plan: it finds another one, goes there, and comes back where a
planted slowdown makes it bad. The curve is that of a run without any of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from examples.ppo import auto, fixed  # noqa: E402
from examples.ppo.algorithm import Settings  # noqa: E402
from examples.ppo.machine import Pace, measured, on  # noqa: E402
from examples.ppo.plans import alone, load  # noqa: E402
from examples.ppo.task import Counting  # noqa: E402
from nereus.planner.calibration import calibrate, from_document  # noqa: E402
from nereus.planner.decisions import BACK, GO  # noqa: E402
from nereus.planner.decisions import Settings as Rules  # noqa: E402
from nereus.planner.live import layouts  # noqa: E402
from nereus.planner.rl_step import step_time  # noqa: E402

pytestmark = [pytest.mark.procs, pytest.mark.slow]

SMALL = load(str(Path(__file__).resolve().parents[2] / "examples" / "ppo" / "small.plan"))
TASK, ALGORITHM = Counting(num_steps=1), Settings(lr=1e-2, critic_lr=1e-2)
NUM_STEPS = 10
#: Where other work shares the machine, stops are long and steps uneven.
RULES = Rules(margin=0.6, share=4.0)


@pytest.fixture(scope="module")
def expected() -> list[dict[str, float]]:
    """The curve of one process at the plan that is given."""
    options = replace(fixed.options_of(alone(SMALL), NUM_STEPS), settings=ALGORITHM, task=TASK)
    return list(fixed.run(0, dist.HashStore(), options).curve)


def run(pace: Pace, num_steps: int) -> dict[str, Any]:
    found = auto.run(SMALL, num_steps, settings=ALGORITHM, task=TASK, pace=pace, rules=RULES)
    assert json.loads(json.dumps(found)) == found
    return found


def test_a_better_plan_is_found_admitted_and_made(expected: list[dict[str, float]]) -> None:
    found = run(Pace(), NUM_STEPS - 3)
    actions = [said["action"] for said in found["log"]]
    went = found["log"][actions.index(GO)]
    assert went["considered"] and BACK not in actions
    assert went["plan"]["actor.train"]["tp"] > 1, "it updates faster when it is cut"
    made = found["changes"][0]
    assert made["fault"] == "" and made["layouts"] == went["plan"]
    assert found["layouts"]["actor.train"]["tp"] > 1, "and it stays there"
    before, after = (
        [said["stage_s"]["actor.train"] for said in part]
        for part in (found["log"][: actions.index(GO) + 1], found["log"][actions.index(GO) + 1 :])
    )
    assert min(after) < 0.7 * min(before)
    assert found["curve"] == expected[: NUM_STEPS - 3]
    assert from_document(found["calibration"], "saved").stops.ratios, "the next job begins with what was learned"


def test_a_plan_that_a_slowdown_made_bad_is_left_again(expected: list[dict[str, float]]) -> None:
    found = run(Pace(slow="actor.train"), NUM_STEPS)
    actions = [said["action"] for said in found["log"]]
    went, came_back = actions.index(GO), actions.index(BACK)
    assert came_back > went and "were expected" in found["log"][came_back]["reason"]
    there, back = found["changes"][:2]
    assert there["fault"] == back["fault"] == ""
    assert there["layouts"]["actor.train"]["tp"] > 1
    assert back["layouts"] == layouts(SMALL)
    assert found["log"][went]["plan"] not in [said["plan"] for said in found["log"][came_back:]], "not tried again"
    assert found["curve"] == expected


def test_a_machine_is_measured_where_none_is_emulated() -> None:
    gpu = measured(SMALL)
    plan = on(SMALL, gpu)
    assert all(node.gpu == gpu for node in plan.cluster.nodes)
    # Slower than any GPU, and not by ten orders of magnitude.
    assert 1e-6 < gpu.bf16_tflops < SMALL.cluster.nodes[0].gpu.bf16_tflops
    assert step_time(plan, calibrate(())).seconds > step_time(SMALL, calibrate(())).seconds > 0
