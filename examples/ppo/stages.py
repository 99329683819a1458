"""The model-stages of the job as one process sees them. Everything that depends on a layout is in here.

``build(view)`` makes a stage's module (and optimizer) for this process's coordinate in a placed plan; Nereus calls it
again for every new layout and fills what it made. A ``Worker`` does a stage's work on *whole* batches: every process
gives and gets all rows, and which of them it computes is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from examples.ppo.algorithm import Settings
from examples.ppo.model import Cache, Llama, initialise
from nereus.ir.plan import Model, Plan, Stage
from nereus.ir.tensor import LogicalTensor
from nereus.models.naming.base import Where
from nereus.models.naming.hf import HfNaming
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.groups import Group, Place
from nereus.runtime.job_state import RngRule
from nereus.runtime.rng_streams import RngPlace, Scope, derive_seed

#: Numbers drawn for a sample: its own stream, whoever generates it.
SAMPLING = ("sampling", Scope.RANK.value)


class View(Protocol):
    """What a stage is built from: a placed plan, the stage, and ``place``, this process's coordinate in it with its
    communicators. ``job_state``: what the stage's adapter said before a change of layout; None at a job's start."""

    @property
    def plan(self) -> Plan: ...
    @property
    def stage(self) -> Stage: ...
    @property
    def place(self) -> Place: ...
    @property
    def job_state(self) -> Mapping[str, object] | None: ...


def build(view: View, settings: Settings) -> PlainTorch:
    """The stage's objects, and the adapter that tells Nereus what they hold. At a job's start they have its first
    weights; later they are empty, and Nereus fills them."""
    stage, place = view.stage, view.place
    if stage.pp > 1 or stage.cp > 1:
        raise ValueError(f"{stage.name}: this job cuts its models by tp and dp only")
    model = view.plan.model(stage.model)
    module = Llama(model.arch, place.tp, model.head)
    optimizer = None
    if stage.is_train:
        lr = settings.critic_lr if model.head == "value" else settings.lr
        optimizer = torch.optim.Adam(module.parameters(), lr=lr)
    else:
        module.requires_grad_(False)
    if view.job_state is None:
        # A model made from another (``ref = actor``) starts with that one's weights.
        names = [m.name for m in view.plan.models]
        initialise(module, settings.seed * 100 + names.index(model.base or model.name))
    return PlainTorch(
        module,
        optimizer,
        naming=HfNaming(arch=model.arch, head=model.head),
        where=Where(tp=stage.tp, tp_rank=place.tp.rank),
        rank=place.everyone.rank,
    )


class Worker:
    """One stage in one process: what ``build`` made, at work."""

    def __init__(self, adapter: PlainTorch, view: View) -> None:
        assert isinstance(adapter.module, Llama)
        self.module, self.optimizer = adapter.module, adapter.optimizer
        self.stage, self.place = view.stage, view.place

    @property
    def speaks(self) -> bool:
        """One of the ranks that compute the same rows, for all of them."""
        return self.place.tp.rank == 0

    def rows(self, count: int) -> list[range]:
        """The chunks of ``count`` rows that this process computes: ``micro_batch`` rows each, dealt over dp in order.

        The chunks are the same whatever dp is; only who computes them changes."""
        size, dp = self.stage.micro_batch, self.place.dp
        if count % (size * dp.size):
            raise ValueError(f"{self.stage.name}: {count} rows are no multiple of dp {dp.size} x micro_batch {size}")
        mine = count // dp.size
        return [range(at, at + size) for at in range(dp.rank * mine, (dp.rank + 1) * mine, size)]

    @torch.no_grad()
    def generate(
        self, prompts: torch.Tensor, length: int, uniforms: torch.Tensor, answers: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(responses, mask), [rows, length]: this process's rows, the others zero. ``uniforms`` [rows, length]: the
        numbers that choose the tokens. A response ends at its first token that is not the answer's."""
        responses, mask = torch.zeros_like(answers), torch.zeros(answers.shape)
        dp = self.place.dp
        lo, hi = (len(prompts) * rank // dp.size for rank in (dp.rank, dp.rank + 1))
        cache = Cache(self.module.arch, hi - lo, prompts.shape[1] + length, self.place.tp.size)
        tokens, alive = prompts[lo:hi], torch.ones(hi - lo, dtype=torch.bool)
        for at in range(length):
            logits = self.module(tokens, cache)[:, -1].double() / temperature
            reached = logits.softmax(-1).cumsum(-1)
            chosen = (reached < uniforms[lo:hi, at : at + 1]).sum(-1).clamp(max=logits.shape[-1] - 1)
            responses[lo:hi, at] = torch.where(alive, chosen, 0)
            mask[lo:hi, at] = alive.float()
            alive = alive & (chosen == answers[lo:hi, at])
            if not alive.any():
                break
            tokens = chosen.unsqueeze(1)
        return (responses, mask) if self.speaks else (responses.zero_(), mask.zero_())

    @torch.no_grad()
    def score(
        self,
        prompts: torch.Tensor,
        responses: torch.Tensor,
        measure: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """``measure(output, responses)`` of this process's rows, [rows, length], the others zero. ``output``: the
        module's at the position before each response token."""
        found = torch.zeros(responses.shape)
        for chunk in self.rows(len(prompts)):
            part = slice(chunk.start, chunk.stop)
            found[part] = measure(self.before(prompts[part], responses[part]), responses[part])
        return found if self.speaks else found.zero_()

    def before(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """The module's output at the position before each response token: what decided it."""
        output = self.module(torch.cat((prompts, responses[:, :-1]), dim=1))
        return output[:, prompts.shape[1] - 1 :]

    def update(self, rows: Sequence[int], loss_of: Callable[[list[int]], torch.Tensor], max_norm: float) -> float:
        """One optimizer step on ``rows`` of the batch. ``loss_of(chunk)``: the chunk's part of the loss, which is the
        sum of all chunks' parts. Returns the loss.

        Every chunk's gradient stands alone until all of them are added up, in the order of the rows: the sum is the
        same, bit for bit, however many processes the chunks were dealt to.
        """
        assert self.optimizer is not None
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        parts = []
        for chunk in self.rows(len(rows)):
            loss = loss_of([rows[i] for i in chunk])
            gradients = torch.autograd.grad(loss, parameters)
            parts.append(torch.cat([loss.detach().reshape(1), *(g.reshape(-1) for g in gradients)]))
        total = ordered_sum(torch.stack(parts), self.place.dp)
        at = 1
        for parameter in parameters:
            parameter.grad = total[at : at + parameter.numel()].view_as(parameter).clone()
            at += parameter.numel()
        self._clip(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total[0])

    def _clip(self, max_norm: float) -> None:
        norm = float(self.module.squares().sqrt())
        if norm > max_norm:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad *= max_norm / norm


def ordered_sum(parts: torch.Tensor, dp: Group) -> torch.Tensor:
    """The sum of all ranks' ``parts`` [chunks, elements], one chunk after the other in the order of the ranks."""
    every = torch.cat(dp.all_gather(parts.contiguous()))
    total = every[0].clone()
    for part in every[1:]:
        total += part
    return total


def everyones(mine: torch.Tensor, world: Group) -> torch.Tensor:
    """All rows, from the processes that have them: each row is zero in all but one, so the sum is exact."""
    return world.all_reduce(mine)


def sampling_numbers(rule: RngRule, step: int, rows: int, length: int) -> torch.Tensor:
    """[rows, length] uniform in 0..1: of a stream for each sample of the step, so no layout changes them; a longer
    response goes on where a shorter one ends."""
    found = np.empty((rows, length))
    for row in range(rows):
        seed = derive_seed(rule, step, RngPlace(role="actor.generate", rank=row, alike=row), SAMPLING[0])
        found[row] = np.random.Generator(np.random.Philox(seed)).random(length)
    return torch.from_numpy(found)


@torch.no_grad()
def hand_over(source: Worker | None, target: Worker | None, model: Model, world: Group) -> None:
    """The trainer's weights into the generator, the simple way: every whole tensor to every process. What a job
    without Nereus would do, and what its sync is compared with. Every process calls it."""
    tensors = logical_tensors(model.arch, model.head)
    wholes = torch.zeros(sum(tensor.numel for tensor in tensors)).split([tensor.numel for tensor in tensors])
    for tensor, whole in zip(tensors, wholes, strict=True):
        # The first replica gives its part; what all its ranks have alike, the first of them.
        if source is not None and source.place.dp.rank == 0 and (source.speaks or tensor.cut is not None):
            _part(whole, tensor, source).copy_(source.module.get_parameter(tensor.name))
    flat = everyones(torch.cat(wholes), world).split([tensor.numel for tensor in tensors])
    for tensor, whole in zip(tensors, flat, strict=True):
        if target is not None:
            target.module.get_parameter(tensor.name).copy_(_part(whole, tensor, target))


def _part(whole: torch.Tensor, tensor: LogicalTensor, worker: Worker) -> torch.Tensor:
    """What ``worker`` holds of ``tensor``, as a view of all of it."""
    shaped = whole.view(tensor.shape)
    if tensor.cut is None:
        return shaped
    tp = worker.place.tp
    lo, hi = tensor.cut.interval(tensor.shape[tensor.cut.dim], tp.size, tp.rank)
    return shaped.narrow(tensor.cut.dim, lo, hi - lo)
