"""Where a job is in its data, independent of the number of ranks, and what each rank trains on next.

The order of an epoch depends on (seed, epoch) alone. A position counts samples in that order for the whole job; ranks
take slices of each global batch. A change of DP changes the slices, never what was or will be consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nereus.runtime.job_values import JobStateError

#: (seed, epoch, number of samples) -> the epoch's order: a permutation, the same on every rank.
Order = Callable[[int, int, int], "Sequence[int] | NDArray[np.int64]"]


class Tail(StrEnum):
    """What becomes of the samples that are left at the end of an epoch and do not fill a batch."""

    WRAP = "wrap"  # the batch goes on with the next epoch's first samples
    SHORT = "short"  # the batch is shorter
    DROP = "drop"  # skipped, and counted as dropped


class DataExhausted(JobStateError):
    """Nothing is left to train on. Said aloud: a job that resumes at its end must not pass for one that trained."""


@lru_cache(maxsize=2)  # asked for at every batch, and made by shuffling the whole data set
def torch_order(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """The order in which ``torch.utils.data.DistributedSampler`` shuffles."""
    import torch

    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order: NDArray[np.int64] = torch.randperm(size, generator=generator).numpy()
    return order


def file_order(seed: int, epoch: int, size: int) -> Sequence[int]:
    """No shuffling."""
    return range(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """``index``: samples of this epoch's order that lie behind, always less than ``size``: the end of an epoch is the
    start of the next. ``consumed``: samples trained on since the job began, over all epochs; ``dropped``: samples that
    were skipped. ``consumed + dropped`` always equals ``epoch * size + index``."""

    seed: int
    size: int
    epoch: int = 0
    index: int = 0
    consumed: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        for name in ("size", "epoch", "index", "consumed", "dropped"):
            if getattr(self, name) < 0:
                raise JobStateError(f"data.{name}: {getattr(self, name)} is negative")
        if self.size == 0:
            raise JobStateError("data.size: there are no samples")
        if self.index >= self.size:
            raise JobStateError(f"data.index: {self.index} is not in an epoch of {self.size} samples")
        if self.consumed + self.dropped != self.epoch * self.size + self.index:
            raise JobStateError(
                f"data.consumed: {self.consumed} consumed and {self.dropped} dropped samples do not lead to epoch "
                f"{self.epoch}, index {self.index} of {self.size}"
            )

    def advanced(self, num_samples: int) -> DataPosition:
        """After training on the next ``num_samples``."""
        epoch, index = divmod(self.epoch * self.size + self.index + num_samples, self.size)
        return replace(self, epoch=epoch, index=index, consumed=self.consumed + num_samples)

    def without_tail(self) -> DataPosition:
        """At the start of the next epoch, the rest of this one dropped; itself at the start of an epoch."""
        rest = (self.size - self.index) % self.size
        return replace(self, epoch=self.epoch + bool(rest), index=0, dropped=self.dropped + rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One global batch as one rank sees it. ``after``: the job's position once the whole batch is trained on."""

    samples: tuple[int, ...]  # this rank's, numbers in the data set
    num_global: int  # samples of all ranks
    after: DataPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSampler:
    """The batches of data-parallel rank ``rank`` of ``dp`` (ranks that differ in TP, PP or CP alone share it).

    ``batch``: samples of all ranks. A batch that ``dp`` does not divide is refused, unless ``uneven``: then ranks get
    sizes that differ by one, and weighing the gradient per sample is the trainer's duty.
    """

    batch: int
    dp: int
    rank: int
    tail: Tail = Tail.WRAP
    uneven: bool = False
    order: Order = torch_order

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.dp:
            raise JobStateError(f"data-parallel rank {self.rank} is not one of {self.dp}")
        if self.batch < 1:
            raise JobStateError(f"a batch of {self.batch} samples trains nothing")
        if self.uneven and self.batch < self.dp:
            raise JobStateError(f"a batch of {self.batch} samples leaves some of {self.dp} ranks without any")
        if not self.uneven:
            self._check_even(self.batch)

    def batches(self, position: DataPosition, *, num_epochs: int) -> Iterator[Batch]:
        """From ``position`` to the end of epoch ``num_epochs`` (exclusive, counted from 0).

        Raises DataExhausted where not one batch is left: at once, not when the first is asked for.
        """
        first = self._next(position, num_epochs)
        if first is None:
            raise DataExhausted(
                f"epoch {position.epoch}, index {position.index} of {position.size}: no batch of {self.batch} samples "
                f"is left of {num_epochs} epochs"
            )
        return self._from(first, num_epochs)

    def _from(self, batch: Batch | None, num_epochs: int) -> Iterator[Batch]:
        while batch is not None:
            yield batch
            batch = self._next(batch.after, num_epochs)

    def _next(self, position: DataPosition, num_epochs: int) -> Batch | None:
        if self.tail is Tail.DROP:
            if self.batch > position.size:
                raise JobStateError(f"a batch of {self.batch} is never full with {position.size} samples an epoch")
            if position.size - position.index < self.batch:
                position = position.without_tail()
        if position.epoch >= num_epochs:
            return None
        left = (num_epochs - position.epoch) * position.size - position.index
        num = min(self.batch, left if self.tail is Tail.WRAP else position.size - position.index)
        if not self.uneven:
            self._check_even(num)
        lo, hi = num * self.rank // self.dp, num * (self.rank + 1) // self.dp
        return Batch(samples=self._samples(position, lo, hi), num_global=num, after=position.advanced(num))

    def _samples(self, position: DataPosition, lo: int, hi: int) -> tuple[int, ...]:
        """Samples ``lo .. hi`` after ``position``, across epochs."""
        found: list[int] = []
        at, stop = (position.epoch * position.size + position.index + offset for offset in (lo, hi))
        while at < stop:
            epoch, index = divmod(at, position.size)
            last = min(position.size, index + stop - at)
            found += (int(sample) for sample in self.order(position.seed, epoch, position.size)[index:last])
            at += last - index
        return tuple(found)

    def _check_even(self, num: int) -> None:
        if num % self.dp:
            legal = [dp for dp in range(1, num + 1) if num % dp == 0]
            raise JobStateError(f"{num} samples do not divide among {self.dp} ranks; these do: {legal}")
