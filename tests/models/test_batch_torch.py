"""Batches on a real model: gradients under any dp, micro-batch and budget agree with those of the whole mini batch."""

from __future__ import annotations

import itertools

import pytest

from nereus.models.batch import DEEPSPEED, MEAN, MEGATRON, PER_SAMPLE, PER_TOKEN, Update, schedule

torch = pytest.importorskip("torch")

NUM_SAMPLES, VOCAB, WIDTH = 16, 11, 8
LENGTHS = [3, 9, 2, 7, 7, 1, 12, 4, 5, 6, 2, 8, 10, 3, 1, 11]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, VOCAB)
    ).double()


def token_losses(net: torch.nn.Module, sample: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sample)
    tokens = torch.randint(VOCAB, (LENGTHS[sample] + 1,), generator=generator)
    return torch.nn.functional.cross_entropy(net(tokens[:-1]), tokens[1:], reduction="none")


def mean_loss(net: torch.nn.Module, samples: tuple[int, ...], loss: str) -> torch.Tensor:
    parts = [token_losses(net, sample) for sample in samples]
    return torch.stack([p.mean() for p in parts]).mean() if loss == PER_SAMPLE else torch.cat(parts).mean()


def gradients(net: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters()]


def run(update: Update) -> list[torch.Tensor]:
    """Each rank accumulates by itself; then the ranks are averaged, as DDP, FSDP, DeepSpeed and Megatron do."""
    ranks = []
    for batches in update.ranks:
        net = model()
        net.zero_grad()
        for batch in batches:
            # A rank without samples runs one of the others' all the same, with a factor of 0.
            loss = float(batch.scale) * mean_loss(net, batch.samples or (0,), update.loss)
            if update.reduction != MEAN:
                loss = loss / len(batches)
            loss.backward()
        ranks.append(gradients(net))
    return [torch.stack(parts).mean(dim=0) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("loss", [PER_SAMPLE, PER_TOKEN])
def test_every_degree_gives_the_gradient_of_the_full_batch(loss: str) -> None:
    net = model()
    mean_loss(net, tuple(range(NUM_SAMPLES)), loss).backward()
    whole = gradients(net)
    ways = [{"micro_batch": m} for m in (1, 2)] + [{"max_tokens": t} for t in (12, 20, 100)]
    for dp, way, reduction in itertools.product((8, 4, 2), ways, (MEAN, DEEPSPEED, MEGATRON)):
        found = run(schedule(LENGTHS, dp=dp, loss=loss, reduction=reduction, **way))
        for a, b in zip(whole, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    for dp in (3, 5, 7):
        padded = run(schedule(LENGTHS, dp=dp, micro_batch=2, loss=loss, pad=True))
        for a, b in zip(whole, padded, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_plain_averages_of_unequal_micro_batches_would_not() -> None:
    net = model()
    mean_loss(net, tuple(range(NUM_SAMPLES)), PER_TOKEN).backward()
    whole = gradients(net)
    update = schedule(LENGTHS, dp=4, micro_batch=2, loss=PER_TOKEN)
    net.zero_grad()
    for batch in (b for rank in update.ranks for b in rank):
        (mean_loss(net, batch.samples, PER_TOKEN) / (4 * update.num_microbatches)).backward()
    assert not torch.allclose(whole[1], gradients(net)[1], rtol=1e-3)
