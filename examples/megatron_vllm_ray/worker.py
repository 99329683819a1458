"""One process of the job, whatever it serves: trainer rank, engine rank, or none just now."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch

import nereus
from examples.megatron_vllm_ray import trainer
from examples.megatron_vllm_ray.engine import Engine
from examples.megatron_vllm_ray.trainer import Batch, Trainer
from nereus.ir.plan import Workload
from nereus.runtime.session.job import COMMUNICATION, Job
from nereus.runtime.session.members import View
from nereus.runtime.session.record import Record


def work(
    *,
    store: Any,
    device: str,
    spawn: Any,
    name: str,
    config: str,
    steps: int,
    prepare: str,
    deadline_s: float,
    part: str = "",
) -> None:
    """``prepare``: ``module:function`` to call with the name of a stage before it is built; empty for none."""
    torch.set_num_threads(1)
    job = nereus.attach(store=store, device=device, part=part, name=name, deadline_s=deadline_s, snapshots=True)
    engine = Engine(store, config)
    # Small things that one process has for all, by step.
    words = Record(store, f"{name}/words", job.me.number)
    builders = {"actor.train": functools.partial(trainer.build, store=store), "actor.generate": engine.build}

    def build(view: View) -> Any:
        if prepare:
            module, _, function = prepare.partition(":")
            getattr(importlib.import_module(module), function)(view.stage.name)
        return builders[view.stage.name](view)

    job.bind("actor.train", build, probe=probe)
    job.bind("actor.generate", build, cache=True, part="engine")
    job.on_loss(lambda fault: trainer.shut())
    job.start()
    while job.loop["step"] < steps:
        try:
            if job.serves:
                step(job, engine, words, deadline_s)
            else:
                job.start()
        except COMMUNICATION as error:
            job.recover(error)
    job.close()


def step(job: Job, engine: Engine, words: Record, deadline_s: float) -> None:
    job.sync("actor.train", "actor.generate")
    number, key = job.loop["step"], f"{job.epoch}/{job.version}"
    workload = job.plan.workload
    if job.stage("actor.generate") is not None:
        prompts = prompts_of(workload, number)
        answers = engine.generate(prompts, workload.response_len, seed=number * len(prompts))
        if engine.speaks:
            words.put(f"answers/{key}", answers)
    tokens, values = heard(job, words, f"answers/{key}", deadline_s)
    actor = job.stage("actor.train")
    rewards = torch.tensor([reward(answer) for answer in tokens])
    if isinstance(actor, Trainer):
        with job.updating():
            report = actor.update(batch(workload, number, tokens, values, rewards))
        if report is not None:
            words.put(f"report/{key}", report)
    report = heard(job, words, f"report/{key}", deadline_s)
    job.loop.update(step=number + 1, reward=float(rewards.mean()), **report)
    job.boundary()


def heard(job: Job, words: Record, key: str, deadline_s: float) -> Any:
    return words.wait(key, deadline_s, of=f"the process that has {key}", stop=job.loss)


def prompts_of(workload: Workload, step: int) -> list[list[int]]:
    """Each prompt ``samples`` times."""
    numbers = torch.Generator().manual_seed(step)
    prompts = torch.randint(2, 64, (workload.prompts, workload.prompt_len), generator=numbers).tolist()
    return [prompt for prompt in prompts for _ in range(workload.samples)]


def reward(answer: Sequence[int]) -> float:
    """The share of tokens from the lower half of the vocabulary: what a tiny model learns in a few steps."""
    return sum(token < 32 for token in answer) / len(answer)


def batch(workload: Workload, step: int, tokens: Sequence[Any], values: Sequence[Any], rewards: torch.Tensor) -> Batch:
    """Advantages as GRPO's: of a reward among those of its prompt."""
    prompts = torch.tensor(prompts_of(workload, step))
    groups = rewards.view(workload.prompts, workload.samples)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    nothing = torch.zeros(prompts.shape)
    return Batch(
        tokens=torch.cat((prompts, torch.tensor(tokens)), 1),
        mask=torch.cat((nothing, torch.ones(len(prompts), workload.response_len)), 1).bool(),
        advantages=advantages.flatten(),
        engine=torch.cat((nothing, torch.tensor(values)), 1),
    )


def probe(actor: Any, view: Any) -> list[float]:
    """Of a fixed batch: the same before a change and after it."""
    workload = view.plan.workload
    tokens = [[(7 * number + at) % 64 for at in range(workload.response_len)] for number in range(workload.num_samples)]
    nothing = [[0.0] * workload.response_len] * workload.num_samples
    figures: list[float] = actor.figures(batch(workload, 0, tokens, nothing, torch.zeros(workload.num_samples)))
    return figures
