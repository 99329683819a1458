"""Gradients of one update as torch DDP, FSDP2, DeepSpeed and megatron-core accumulate and average them.

Each runs the micro-batches that ``nereus.models.batch`` gives its rank, ``(scale * mean loss).backward()``; what it has
before the optimizer step must be the gradient of the mean over the whole mini batch, on any dp, with context-parallel
ranks beside, unequal lengths, token budgets, empty micro-batches and a mini batch that needs padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from frameworks.harness import run
from torch import nn

from nereus.models.batch import DEEPSPEED, MEAN, MEGATRON, PER_SAMPLE, PER_TOKEN, MicroBatch, Update, schedule

VOCAB, WIDTH = 11, 8
LENGTHS = [3, 9, 2, 7, 7, 1, 12, 4, 5, 6, 2, 8]
#: The last one comes out on no dp, and gives the ranks with one sample less a micro-batch without any.
CASES: list[tuple[list[int], dict[str, Any]]] = [
    (LENGTHS, {"micro_batch": 1}),
    (LENGTHS, {"micro_batch": 1, "max_tokens": 14}),
    (LENGTHS[:10], {"micro_batch": 2, "pad": True}),
    ([20, 19, 18, 17, 16], {"max_tokens": 20, "pad": True}),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))

    def set_input_tensor(self, tensor: Any) -> None:
        """Megatron calls it on every first stage."""


def tokens_of(sample: int, lengths: list[int]) -> torch.Tensor:
    return torch.randint(VOCAB, (lengths[sample] + 1,), generator=torch.Generator().manual_seed(sample))


def mean_loss(
    logits: torch.Tensor, targets: torch.Tensor, sizes: list[int], loss: str, part: int = 0, parts: int = 1
) -> torch.Tensor:
    """Of samples laid end to end; a context-parallel rank counts its tokens only, but divides as for all of them."""
    each = nn.functional.cross_entropy(logits, targets, reduction="none")
    total = logits.sum() * 0
    first = 0
    for size in sizes:
        mine = each[first : first + size][part::parts].sum()
        total = total + (mine / (size * len(sizes)) if loss == PER_SAMPLE else mine / sum(sizes))
        first += size
    return total


def batch_loss(
    model: Callable[[torch.Tensor], torch.Tensor], samples: tuple[int, ...], lengths: list[int], loss: str,
    part: int = 0, parts: int = 1,
) -> torch.Tensor:  # fmt: skip
    found = [tokens_of(sample, lengths) for sample in samples or (0,)]
    inputs, targets = torch.cat([t[:-1] for t in found]), torch.cat([t[1:] for t in found])
    return mean_loss(model(inputs), targets, [len(t) - 1 for t in found], loss, part, parts)


def cases(dp: int, cp: int, reduction: str) -> Iterator[tuple[Update, list[int]]]:
    for loss in (PER_SAMPLE, PER_TOKEN):
        for lengths, keys in CASES:
            yield schedule(lengths, dp=dp, cp=cp, loss=loss, reduction=reduction, **keys), lengths


Accumulate = Callable[[tuple[MicroBatch, ...], list[int], str, int, int], dict[str, torch.Tensor]]


def gradients(rank: int, dp: int, cp: int, reduction: str, accumulate: Accumulate) -> list[dict[str, torch.Tensor]]:
    return [
        {
            name: grad.detach().clone()
            for name, grad in accumulate(u.ranks[rank // cp], n, u.loss, rank % cp, cp).items()
        }
        for u, n in cases(dp, cp, reduction)
    ]


def by_ddp(rank: int, world: int, dp: int, cp: int) -> list[dict[str, torch.Tensor]]:
    def accumulate(batches: tuple[MicroBatch, ...], lengths: list[int], loss: str, part: int, parts: int) -> Any:
        model = nn.parallel.DistributedDataParallel(Model())
        for number, batch in enumerate(batches):
            model.require_backward_grad_sync = number == len(batches) - 1
            (float(batch.scale) * batch_loss(model, batch.samples, lengths, loss, part, parts)).backward()
        return {name: p.grad for name, p in model.module.named_parameters()}

    return gradients(rank, dp, cp, MEAN, accumulate)


def by_fsdp(rank: int, world: int, dp: int, cp: int) -> list[dict[str, torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))  # sequence-parallel ranks shard and average too, as in verl

    def accumulate(batches: tuple[MicroBatch, ...], lengths: list[int], loss: str, part: int, parts: int) -> Any:
        model = Model()
        fully_shard(model, mesh=mesh)
        for number, batch in enumerate(batches):
            model.set_requires_gradient_sync(number == len(batches) - 1)
            (float(batch.scale) * batch_loss(model, batch.samples, lengths, loss, part, parts)).backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    return gradients(rank, dp, cp, MEAN, accumulate)


def by_deepspeed(rank: int, world: int, dp: int, cp: int) -> list[dict[str, torch.Tensor]]:
    import deepspeed

    def accumulate(batches: tuple[MicroBatch, ...], lengths: list[int], loss: str, part: int, parts: int) -> Any:
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": len(batches),
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        }
        model = Model()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            config=settings,
            dist_init_required=False,
        )
        for number, batch in enumerate(batches):
            engine.backward(float(batch.scale) * batch_loss(engine, batch.samples, lengths, loss))
            if number < len(batches) - 1:
                engine.step()
        return {name: deepspeed.utils.safe_get_full_grad(p) for name, p in model.named_parameters()}

    return gradients(rank, dp, cp, DEEPSPEED, accumulate)


def by_megatron(rank: int, world: int, dp: int, cp: int) -> list[dict[str, torch.Tensor]]:
    from frameworks import cpu_shim

    cpu_shim.install()
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(1, 1, context_parallel_size=cp)
    assert parallel_state.get_data_parallel_rank() == rank // cp

    def accumulate(batches: tuple[MicroBatch, ...], lengths: list[int], loss: str, part: int, parts: int) -> Any:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=WIDTH,
            num_attention_heads=1,
            context_parallel_size=cp,
            use_cpu_initialization=True,
        )
        config.finalize_model_grads_func = finalize_model_grads
        module = Model()
        module.config = config  # type: ignore[assignment]
        module.model_type = ModelType.encoder_or_decoder  # type: ignore[assignment]
        model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module)
        model.zero_grad_buffer()

        def step(batches: Iterator[MicroBatch], model: Any) -> Any:
            batch = next(batches)
            found = [tokens_of(sample, lengths) for sample in batch.samples or (0,)]
            logits = model(torch.cat([t[:-1] for t in found]))
            targets, sizes = torch.cat([t[1:] for t in found]), [len(t) - 1 for t in found]

            def value(logits: torch.Tensor) -> Any:
                scaled = float(batch.scale) * mean_loss(logits, targets, sizes, loss, part, parts)
                return scaled, {"loss": scaled.detach()}

            return logits, value

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        return {name: p.main_grad for name, p in module.named_parameters()}

    return gradients(rank, dp, cp, MEGATRON, accumulate)


FRAMEWORKS = {"ddp": by_ddp, "fsdp2": by_fsdp, "deepspeed": by_deepspeed, "megatron": by_megatron}
#: Framework, dp, cp. DeepSpeed's sequence parallelism needs attention of its own.
RUNS = [("ddp", 4, 1), ("ddp", 2, 2), ("fsdp2", 3, 1), ("fsdp2", 2, 2), ("deepspeed", 3, 1)]
RUNS += [("megatron", 2, 1), ("megatron", 1, 2)]


@pytest.mark.procs
@pytest.mark.parametrize(("name", "dp", "cp"), RUNS)
def test_every_framework_gets_the_gradient_of_the_whole_mini_batch(name: str, dp: int, cp: int) -> None:
    expected = []
    for update, lengths in cases(dp, cp, MEAN):
        model = Model()
        batch_loss(model, tuple(range(len(lengths))), lengths, update.loss).backward()
        expected.append({n: p.grad for n, p in model.named_parameters()})
    assert dp == 1 or any(
        batch.is_empty for update, _ in cases(dp, cp, MEAN) for rank in update.ranks for batch in rank
    )
    for found in run(dp * cp, FRAMEWORKS[name], dp, cp, timeout=300):
        assert len(found) == len(expected)
        for mine, whole in zip(found, expected, strict=True):
            assert mine.keys() == whole.keys()
            for parameter, grad in whole.items():
                torch.testing.assert_close(mine[parameter], grad, rtol=2e-5, atol=1e-6)
