"""The RL loop: its state, which is small and the same on every process, and one step of it.

Nothing in here knows a layout. Workers take and give whole batches, so a step reads the same before and after a change
of plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from examples.ppo import algorithm
from examples.ppo.algorithm import Settings
from examples.ppo.stages import SAMPLING, Worker, everyones, sampling_numbers
from examples.ppo.task import Counting
from nereus.ir.plan import Workload
from nereus.runtime.data_position import DataPosition, RankSampler
from nereus.runtime.groups import Group
from nereus.runtime.job_state import MinibatchPosition, RngRule

#: When the mean response has reached this share of what is allowed, more is allowed.
_FULL = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """State of the loop beside the models, the same in every process. ``allowed``: longest response now; it doubles
    as responses fill it."""

    step: int
    data: DataPosition
    rng: RngRule
    kl: float
    allowed: int
    curve: tuple[dict[str, float], ...] = ()

    def plain(self) -> dict[str, Any]:
        """As values that JSON knows."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Loop:
        rng = {**plain["rng"], "declared": tuple((name, scope) for name, scope in plain["rng"]["declared"])}
        curve = tuple(dict(point) for point in plain["curve"])
        return cls(**{**plain, "data": DataPosition(**plain["data"]), "rng": RngRule(**rng), "curve": curve})


def first(task: Counting, settings: Settings, allowed: int) -> Loop:
    """The state before the first step."""
    return Loop(
        step=0,
        data=DataPosition(seed=settings.seed, size=task.num_prompts),
        rng=RngRule(seed=settings.seed, declared=(SAMPLING,)),
        kl=0.001,
        allowed=allowed,
    )


@dataclass(slots=True)
class Side:
    """This process's side of the job under one plan. ``workers``: the stages that it has a part in, by name.
    ``sync``: brings the trainer's weights into the generator."""

    task: Counting
    settings: Settings
    workload: Workload
    workers: Mapping[str, Worker]
    world: Group
    sync: Callable[[], object]
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, since: float) -> float:
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - since
        return now


def step(side: Side, loop: Loop) -> Loop:
    """Generate, judge, learn. Every process of the job calls it, and returns the same."""
    now = time.monotonic()
    workload, settings, task, world = side.workload, side.settings, side.task, side.world
    side.seconds.clear()
    side.sync()
    now = side.timed("sync", now)

    batch = next(RankSampler(batch=workload.prompts, dp=1, rank=0).batches(loop.data, num_epochs=1 << 30))
    numbers = [number for number in batch.samples for _ in range(workload.samples)]
    prompts = task.prompts(numbers)
    answers = task.answers(prompts, loop.allowed)
    uniforms = sampling_numbers(loop.rng, loop.step, len(numbers), loop.allowed)
    responses, mask = torch.zeros_like(answers), torch.zeros(answers.shape)
    generator = side.workers.get("actor.generate")
    if generator is not None:
        responses, mask = generator.generate(prompts, loop.allowed, uniforms, answers, settings.temperature)
    responses, mask = everyones(responses, world), everyones(mask, world)
    # What nobody emitted needs no computation.
    longest = int(mask.sum(1).max())
    responses, mask = responses[:, :longest].contiguous(), mask[:, :longest].contiguous()
    now = side.timed("generate", now)

    rewards = task.rewards(prompts, responses, mask)
    scored = {name: _scored(side, name, prompts, responses) for name in ("actor.train", "ref.infer", "critic.train")}
    old, reference, values = (scored[name] * mask for name in scored)
    divergence = float(((old - reference) * mask).sum() / mask.sum())
    now = side.timed("score", now)

    if settings.algorithm == "grpo":
        advantages, returns = algorithm.group_advantages(rewards, mask, workload.samples), values
    else:
        paid = algorithm.kl_penalised(rewards, old, reference, mask, loop.kl)
        advantages, returns = algorithm.gae(paid, values, mask, settings.gamma, settings.lam)
        advantages = algorithm.whitened(advantages, mask)
    _learn(side, loop, prompts, responses, mask, old, reference, values, advantages, returns)
    side.timed("learn", now)

    reward, length = float(rewards.sum(1).mean()), float(mask.sum(1).mean())
    point = {
        "step": loop.step,
        "reward": reward,
        "length": length,
        "allowed": loop.allowed,
        "kl": divergence,
    }
    full = length > _FULL * loop.allowed
    return replace(
        loop,
        step=loop.step + 1,
        data=batch.after,
        kl=algorithm.next_kl(loop.kl, divergence, settings.kl_target),
        allowed=min(task.goal, 2 * loop.allowed) if full else loop.allowed,
        curve=(*loop.curve, point),
    )


def _scored(side: Side, name: str, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Log-probs of the responses, or the critic's estimates before each of their tokens."""
    worker = side.workers.get(name)
    found = torch.zeros(responses.shape)
    if worker is not None:
        values = worker.module.head == "value"
        found = worker.score(prompts, responses, (lambda out, _: out) if values else algorithm.log_probs)
    return everyones(found, side.world)


def _learn(
    side: Side,
    loop: Loop,
    prompts: torch.Tensor,
    responses: torch.Tensor,
    mask: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor,
    values: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
) -> None:
    """All optimizer updates of the step: every loss is a mean over the tokens of its whole mini-batch."""
    settings, workload = side.settings, side.workload
    actor, critic = side.workers.get("actor.train"), side.workers.get("critic.train")
    count = len(prompts)
    position = MinibatchPosition(num_epochs=workload.epochs, num_minibatches=count // workload.mini_batch)
    data = position.step_data(seed=settings.seed, step=loop.step, num_samples=count)
    grpo = settings.algorithm == "grpo"
    for batch in RankSampler(batch=workload.mini_batch, dp=1, rank=0).batches(data, num_epochs=workload.epochs):
        rows = list(batch.samples)
        tokens = mask[rows].sum()
        if actor is not None:

            def surrogate(part: list[int], worker: Worker = actor, tokens: torch.Tensor = tokens) -> torch.Tensor:
                return (
                    algorithm.policy_loss(
                        worker.before(prompts[part], responses[part]),
                        responses[part],
                        old[part],
                        advantages[part],
                        mask[part],
                        settings,
                        reference=reference[part] if grpo else None,
                        kl=loop.kl,
                    )
                    / tokens
                )

            actor.update(rows, surrogate, settings.max_norm)
        if critic is not None:

            def error(part: list[int], worker: Worker = critic, tokens: torch.Tensor = tokens) -> torch.Tensor:
                estimate = worker.before(prompts[part], responses[part])
                return algorithm.value_loss(estimate, values[part], returns[part], mask[part], settings) / tokens

            critic.update(rows, error, settings.max_norm)
