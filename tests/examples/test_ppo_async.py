"""Weights arrive while rollouts run: a trainer, and two replicas of the example's generator, updated one after the
other at every step. Each token is what the weights of its version say, on keys and values as the mode has them; the
trainer's layout changes on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from examples.async_job import LIMIT, SETTINGS, prompt, train  # noqa: E402

from examples.ppo.model import Cache, Llama, initialise  # noqa: E402
from examples.ppo.plans import load  # noqa: E402
from nereus.ir.plan import Plan  # noqa: E402
from nereus.runtime.groups import Groups  # noqa: E402
from nereus.runtime.rollouts import DRAIN, KEEP, MODES, REQUEUE  # noqa: E402
from nereus.runtime.session.local import LocalProcesses  # noqa: E402

pytestmark = pytest.mark.procs

STEPS = 5
BASE = load(str(Path(__file__).resolve().parents[2] / "examples" / "ppo" / "base.plan"))


def plan(name: str, tp: int) -> Plan:
    """The actor alone: it trains on the first device or two, and generates on two others, each for itself."""
    devices = BASE.cluster.devices
    train_stage, generate = BASE.stage("actor.train"), BASE.stage("actor.generate")
    stages = (
        replace(train_stage, devices=devices[:tp], place=None, tp=tp, dp=1),
        replace(generate, devices=devices[2:4], place=None, tp=1, dp=2),
    )
    return replace(BASE, path=name, models=(BASE.model("actor"),), stages=stages)


PLANS = (plan("one", 1), plan("two", 2))


@pytest.fixture(scope="module")
def processes() -> Any:
    with LocalProcesses("examples.async_job:main") as found:
        yield found


def weights(version: int) -> Llama:
    module = Llama(BASE.model("actor").arch, Groups(dist.HashStore(), 0, 0).make("alone", (0,)))
    initialise(module, SETTINGS.seed * 100)
    for step in range(version):
        train(module, step)
    return module


@torch.no_grad()
def check(rollout: dict[str, Any], mode: str, models: list[Llama]) -> None:
    given, before = list(rollout["prompt"]), None
    cache = Cache(models[0].arch, 1, len(given) + LIMIT, 1)
    assert tuple(given) == prompt(int(rollout["name"]))
    assert len(rollout["tokens"]) == len(rollout["versions"]) == len(rollout["logprobs"])
    for at, (token, version) in enumerate(zip(rollout["tokens"], rollout["versions"], strict=True)):
        if before is not None and version != before and mode != KEEP:
            cache.filled, given = 0, [*rollout["prompt"], *rollout["tokens"][:at]]
        before = version
        chances = models[version](torch.tensor([given]), cache)[0, -1].log_softmax(-1)
        assert int(chances.argmax()) == token, (mode, rollout["name"], at)
        assert abs(float(chances[token]) - rollout["logprobs"][at]) < 1e-4
        given = [token]


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_outlive_every_steps_weights(processes: LocalProcesses, tmp_path: Path, mode: str) -> None:
    words = {"name": tmp_path.name, "plans": PLANS, "mode": mode, "steps": STEPS, "folder": str(tmp_path)}
    words |= {"change": {2: 1}, "hold": 1}
    pids = [processes.spawn(f"n0.gpu{number}", name=tmp_path.name, args=words) for number in range(4)]
    processes.wait(150.0)
    assert [processes.codes[pid] for pid in pids] == [0] * 4
    models = [weights(version) for version in range(STEPS + 1)]
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rollouts-*.json"))]
    assert len(found) == 2
    done = [rollout for said in found for rollout in said["done"]]
    every = [*done, *(rollout for said in found for rollout in said["left"])]
    names = [int(rollout["name"]) for rollout in every]
    assert sorted(names) == list(range(1, len(every) + 1)), "a rollout was lost, or is there twice"
    for rollout in every:
        check(rollout, mode, models)
    assert all(len(rollout["tokens"]) == LIMIT for rollout in done)
    mixed = [rollout for rollout in every if len(set(rollout["versions"])) > 1]
    if mode in (DRAIN, REQUEUE):
        assert not mixed
        assert done or mode == REQUEUE
        assert any(rollout["restarts"] for rollout in every) == (mode == REQUEUE)
    else:
        assert len(mixed) >= 2 and max(len(set(rollout["versions"])) for rollout in mixed) >= 3
