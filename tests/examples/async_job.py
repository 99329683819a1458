"""The processes of the test of asynchronous mode: a trainer, and replicas of a generator whose rollouts go on while it
trains. A step's gradient of an element depends on that element and the step alone, so the weights of every version are
known in every layout."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from examples.ppo.algorithm import Settings
from examples.ppo.model import Llama
from examples.ppo.rollout import Generator
from examples.ppo.stages import build
from nereus.ir.plan import Plan
from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.rollouts import Rollout, Rollouts
from nereus.runtime.session.attach import attach
from nereus.runtime.session.job import Job
from nereus.runtime.session.members import View
from nereus.runtime.session.record import Record, never

SETTINGS = Settings()
LIMIT = 24
SLOTS = 2


def train(module: torch.nn.Module, step: int) -> None:
    """The weights of version ``step + 1`` from those before: far enough for a greedy token to change."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.sin(parameter * 37 + step), alpha=0.05)


def prompt(number: int) -> tuple[int, ...]:
    return tuple(1 + (number * 5 + at * 3) % 11 for at in range(3 + number % 4))


class Process:
    def __init__(self, job: Job, words: Record, mode: str, steps: int) -> None:
        self.job, self.words, self.mode, self.steps = job, words, mode, steps
        self.adapter: PlainTorch | None = None
        self.rollouts: Rollouts | None = None
        self.done: list[Rollout] = []

    def engine(self, view: View) -> PlainTorch:
        """Made once: a change of the trainer's layout leaves it, and what it runs, alone."""
        if self.adapter is None:
            self.adapter = build(view, SETTINGS)
            assert isinstance(self.adapter.module, Llama)
            self.rollouts = Rollouts(Generator(self.adapter.module), self.mode, slots=SLOTS)
        return self.adapter

    def run(self, change: dict[int, Plan], hold: int) -> None:
        job = self.job
        while job.loop["step"] < self.steps:
            step, replicas = job.loop["step"], job.plan.stage("actor.generate").dp
            if self.rollouts is None:
                adapter = job.stage("actor.train")
                if isinstance(adapter, PlainTorch):
                    # Not before every replica has rollouts under way.
                    for replica in range(replicas):
                        self.words.wait(f"ready/{step}/{replica}", 60.0, of="an engine", stop=never)
                    with job.updating():
                        train(adapter.module, step)
                job.loop["step"] = step + 1
                for replica in range(replicas):
                    job.sync("actor.train", "actor.generate", (replica,))
            else:
                self.serve(step, hold=hold == step)
                job.loop["step"] = step + 1
            if (plan := change.get(step)) is not None:
                job.transition(plan)
            else:
                job.boundary()

    def serve(self, step: int, *, hold: bool) -> None:
        """Until the trainer has new weights for this replica, and has brought them. ``hold``: the first replica lets
        the trainer wait until the other one has made steps meanwhile."""
        job, rollouts = self.job, self.rollouts
        view = job.view("actor.generate")
        assert rollouts is not None and view is not None
        replica = view.place.at.dp[0]
        name = "actor.train", "actor.generate", (replica,)
        steps = 0
        while steps < 7 or not job.sync_waits(*name):
            while len(rollouts) < SLOTS + 1:
                number = self.words.count("prompts")
                rollouts.add(str(number), prompt(number), LIMIT)
            self.done += rollouts.step()
            self.words.count(f"steps/{replica}")
            steps += 1
            if steps == 5:
                self.words.put(f"ready/{step}/{replica}", True)
        if hold and replica == 0:
            before, end = self.words.counted("steps/1"), time.monotonic() + 30
            while self.words.counted("steps/1") < before + 5:
                assert time.monotonic() < end, "the other replica does not go on while this one is waited for"
                time.sleep(0.005)
        with rollouts.update(step + 1):
            job.sync(*name)


def main(
    *,
    store: Any,
    device: str,
    spawn: Any,
    name: str,
    plans: tuple[Plan, ...],
    mode: str,
    steps: int,
    change: dict[int, int],
    hold: int,
    folder: str,
) -> None:
    """``change``: after step s to plan number p."""
    torch.set_num_threads(1)
    job = attach(plans[0], store=store, device=device, name=name, deadline_s=60.0)
    process = Process(job, Record(store, f"{name}/words", job.me.number), mode, steps)
    job.bind("actor.train", lambda view: build(view, SETTINGS))
    job.bind("actor.generate", process.engine, cache=True)
    job.start({"step": 0})
    process.run({step: plans[number] for step, number in change.items()}, hold)
    if process.rollouts is not None:
        process.done += process.rollouts.ended()
        left = process.rollouts.release()
        said = {"done": [asdict(one) for one in process.done], "left": [asdict(one) for one in left]}
        path = Path(folder, f"rollouts-{device}.json")
        path.with_suffix(f".{os.getpid()}").write_text(json.dumps(said))
        path.with_suffix(f".{os.getpid()}").rename(path)
    job.close()
