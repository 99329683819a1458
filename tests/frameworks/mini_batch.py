"""The samples of an optimizer update, which of them a data-parallel rank takes with which weight, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nereus.models.batch import PER_TOKEN, MicroBatch, schedule


def samples(number: int, vocab: int, num: int, length: int) -> torch.Tensor:
    """[num, length] tokens of update ``number``, whatever the layout."""
    return torch.randint(0, vocab, (num, length), generator=torch.Generator().manual_seed(1000 + number))


def share(lengths: Sequence[int], dp: int, dp_rank: int, reduction: str) -> tuple[MicroBatch, ...]:
    """Micro-batches of one sample each. ``lengths``: the tokens of every sample that count."""
    return schedule(lengths, dp=dp, micro_batch=1, loss=PER_TOKEN, reduction=reduction).ranks[dp_rank]


def total(part: tuple[int, float] | None) -> float:
    """The loss of the update from (dp rank, its weighted losses): ranks of one dp rank give it once. A collective of
    all processes."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, part)
    by_rank = dict(p for p in everyone if p is not None)
    return sum(by_rank[r] for r in sorted(by_rank))
