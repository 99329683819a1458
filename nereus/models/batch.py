"""One optimizer update over data-parallel ranks: which samples each rank takes, and with which weight.

What a change of layout must keep: the samples of every update (``mini_batch``), the number of updates, and the weight
of every sample in the gradient: 1 / mini_batch where the loss is a mean over samples, its tokens / all tokens of the
mini batch where it is a mean over tokens. Micro-batches and accumulation are only how that is computed, so they are
solved anew for every dp. Ranks of one tp, pp or cp group work on the same samples and are never counted as dp.

Frameworks average on their own, each in its way (``divisor``). A micro-batch's ``scale`` undoes that: with ``loss`` the
mean over the micro-batch's own samples (tokens), ``(scale * loss).backward()`` on every rank for every micro-batch
leaves the gradient of the mean over the whole mini batch, whatever the lengths are.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from nereus.ir.plan import Stage, Workload

#: What the loss of an update is the mean of.
PER_SAMPLE, PER_TOKEN = "sample", "token"

#: Gradients are added up over the ranks and nothing else happens.
SUM = "sum"
#: DDP, FSDP, FSDP2: the mean over the group that reduces, which holds dp x cp ranks.
MEAN = "mean"
#: DeepSpeed: the mean over dp; ``backward`` divides by the accumulation steps.
DEEPSPEED = "deepspeed"
#: Megatron without ``calculate_per_token_loss``: the mean over dp; the schedule divides by the number of micro-batches.
MEGATRON = "megatron"

_OF_BACKEND = {None: MEAN, "torch": MEAN, "fsdp": MEAN, "deepspeed": DEEPSPEED, "megatron": MEGATRON}


class BatchError(ValueError):
    """A mini batch that cannot be kept exactly. ``legal``: the degrees (data-parallel) that could, nearest first."""

    def __init__(self, message: str, legal: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.legal = legal


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """mini_batch = dp x micro_batch x num_microbatches; with a token budget micro_batch says nothing."""

    micro_batch: int
    num_microbatches: int  # per rank and update; expected from the observed lengths where a token budget packs them


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one rank runs forward and backward at once."""

    samples: tuple[int, ...]  # positions in the mini batch
    num_padding: int  # samples that only keep shapes and collectives equal; their weight is 0, so is an empty one's
    num_tokens: int  # without padding
    weight: Fraction  # of its mean loss in the loss of the update; all weights of an update add up to 1
    scale: Fraction  # what to multiply its mean loss by before backward

    @property
    def is_empty(self) -> bool:
        """Nothing but padding: run any sample with a loss of 0, since the other ranks wait in their collectives."""
        return not self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """``ranks[r]`` are the micro-batches of data-parallel rank r: equally many on every rank."""

    loss: str
    reduction: str
    ranks: tuple[tuple[MicroBatch, ...], ...]

    @property
    def num_microbatches(self) -> int:
        return len(self.ranks[0])

    @property
    def num_padding(self) -> int:
        """Samples of weight 0 that are run besides the mini batch."""
        return sum(batch.num_padding for rank in self.ranks for batch in rank)


def mini_batches(workload: Workload) -> Iterator[tuple[int, range]]:
    """(epoch, positions in the step's samples) of every optimizer update of one RL step; no degree enters."""
    for epoch in range(workload.epochs):
        for first in range(0, workload.num_samples, workload.mini_batch):
            yield epoch, range(first, min(first + workload.mini_batch, workload.num_samples))


# -- arithmetic of equal shares


def accumulation(mini_batch: int, dp: int, micro_batch: int = 1) -> int | None:
    """Micro-batches per rank, None where they do not come out."""
    unit = dp * micro_batch
    return mini_batch // unit if unit > 0 and mini_batch % unit == 0 else None


def legal_micro_batches(mini_batch: int, dp: int, *, limit: int = 64) -> tuple[int, ...]:
    """Ascending; none where dp itself does not divide."""
    return tuple(d for d in range(1, limit + 1) if accumulation(mini_batch, dp, d) is not None)


def legal_dp(mini_batch: int, dp: int, micro_batch: int = 1, *, count: int = 6) -> tuple[int, ...]:
    """Data-parallel degrees near ``dp`` that divide, nearest first."""
    span = range(1, min(4 * dp, 4096) + 1)
    found = (d for d in span if accumulation(mini_batch, d, micro_batch) is not None)
    return tuple(sorted(found, key=lambda d: (abs(d - dp), d))[:count])


def resolve(workload: Workload, stage: Stage, dp: int) -> Accumulation:
    """How ``stage`` keeps the workload's mini batch on ``dp`` data-parallel ranks.

    The micro-batch is the largest legal one that is no larger than the stage's own, so activations do not grow. Raises
    BatchError where dp does not divide the mini batch.
    """
    mini_batch = workload.mini_batch
    if accumulation(mini_batch, dp) is None:
        near = legal_dp(mini_batch, max(dp, 1))
        shown = ", ".join(map(str, sorted(near)))
        raise BatchError(f"mini_batch {mini_batch} does not divide by dp {dp}; legal dp nearby: {shown}", near)
    if stage.max_tokens is not None:
        expected = packed_microbatches(mini_batch // dp, workload.seq_len, stage.max_tokens)
        return Accumulation(micro_batch=stage.micro_batch, num_microbatches=expected)
    micro_batch = max(d for d in range(1, stage.micro_batch + 1) if accumulation(mini_batch, dp, d) is not None)
    return Accumulation(micro_batch=micro_batch, num_microbatches=mini_batch // (dp * micro_batch))


def packed_microbatches(num_samples: int, seq_len: int, max_tokens: int) -> int:
    """Micro-batches of a rank's share if every sample has ``seq_len`` tokens; a whole sample is always taken."""
    return max(1, -(-num_samples * seq_len // max(max_tokens, seq_len)))


# -- schedules


def divisor(reduction: str, *, dp: int, cp: int, num_microbatches: int) -> int:
    """By how much the framework divides what the ranks add up. The ranks of a cp group each hold a part of the loss of
    the same samples, parts that add up to it: their gradients are a sum, and only ``mean`` averages over them too."""
    match reduction:
        case "sum":
            return 1
        case "mean":
            return dp * cp
        case "deepspeed" | "megatron":
            return dp * num_microbatches
    raise BatchError(f"'{reduction}' is no way to reduce gradients: sum, mean, deepspeed or megatron")


def update_of(
    workload: Workload,
    stage: Stage,
    lengths: Sequence[int] | None = None,
    *,
    loss: str = PER_SAMPLE,
    loss_tokens: Sequence[int] | None = None,
    pad: bool = False,
) -> Update:
    """The schedule of one update as ``stage`` runs it; ``lengths``: observed tokens of each sample, default all
    alike."""
    if lengths is not None and len(lengths) != workload.mini_batch:
        raise BatchError(f"{len(lengths)} lengths for a mini batch of {workload.mini_batch}")
    return schedule(
        [workload.seq_len] * workload.mini_batch if lengths is None else lengths,
        dp=stage.dp,
        cp=stage.cp,
        micro_batch=stage.micro_batch,
        max_tokens=stage.max_tokens,
        loss=loss,
        loss_tokens=loss_tokens,
        reduction=_OF_BACKEND[stage.backend],
        pad=pad,
    )


def schedule(
    lengths: Sequence[int],
    *,
    dp: int,
    cp: int = 1,
    micro_batch: int = 1,
    max_tokens: int | None = None,
    loss: str = PER_SAMPLE,
    loss_tokens: Sequence[int] | None = None,
    reduction: str = MEAN,
    pad: bool = False,
) -> Update:
    """One update of a mini batch of ``lengths`` (tokens of each sample, cp ranks together).

    Without a budget samples keep their order, ``micro_batch`` at a time. With ``max_tokens`` each rank gets equally
    many samples, the longest first to the rank with the fewest tokens, and packs them; a sample longer than the budget
    is alone. ``loss_tokens``: tokens of each sample that count in a token mean, default all. ``pad`` allows a mini
    batch that does not come out: the missing samples are padding of weight 0, else that raises BatchError.
    """
    mini_batch = len(lengths)
    counted = tuple(lengths if loss_tokens is None else loss_tokens)
    if loss not in (PER_SAMPLE, PER_TOKEN):
        raise BatchError(f"'{loss}' is nothing to average over: sample or token")
    if min(dp, cp, micro_batch, 1 if max_tokens is None else max_tokens) < 1 or not mini_batch:
        raise BatchError("a schedule needs samples, and degrees and sizes of at least 1")
    if len(counted) != mini_batch or min((*lengths, *counted)) < 0:
        raise BatchError(f"lengths and loss_tokens are {mini_batch} counts of tokens each")
    total = mini_batch if loss == PER_SAMPLE else sum(counted)
    if not total:
        raise BatchError("no token of the mini batch counts in the loss")
    share = 1 if max_tokens is not None else micro_batch
    if accumulation(mini_batch, dp, share) is None and not pad:
        near = legal_dp(mini_batch, dp, share)
        what = f"dp {dp}" if share == 1 else f"dp {dp} x micro_batch {share}"
        shown = ", ".join(map(str, sorted(near))) or "none"
        raise BatchError(f"mini_batch {mini_batch} is no multiple of {what}; legal dp nearby: {shown}", near)
    if max_tokens is None:
        packed = _in_order(mini_batch, dp, micro_batch)
    else:
        packed = [_pack(lengths, mine, max_tokens) for mine in _balance(lengths, dp)]
    num_microbatches = max(1, *(len(bins) for bins in packed))
    factor = divisor(reduction, dp=dp, cp=cp, num_microbatches=num_microbatches)

    def finished(samples: Sequence[int]) -> MicroBatch:
        part = len(samples) if loss == PER_SAMPLE else sum(counted[i] for i in samples)
        weight = Fraction(part, total)
        return MicroBatch(
            samples=tuple(samples),
            num_padding=max(0 if samples else 1, 0 if max_tokens is not None else micro_batch - len(samples)),
            num_tokens=sum(lengths[i] for i in samples),
            weight=weight,
            scale=weight * factor,
        )

    ranks = tuple(tuple(finished(s) for s in _split_up(bins, num_microbatches, lengths)) for bins in packed)
    return Update(loss=loss, reduction=reduction, ranks=ranks)


def _in_order(mini_batch: int, dp: int, micro_batch: int) -> list[list[list[int]]]:
    bounds = [rank * mini_batch // dp for rank in range(dp + 1)]
    found = []
    for first, last in itertools.pairwise(bounds):
        samples = list(range(first, last))
        found.append([samples[i : i + micro_batch] for i in range(0, len(samples), micro_batch)])
    return found


def _balance(lengths: Sequence[int], dp: int) -> list[list[int]]:
    """Samples of every rank: equally many, one less on the last ranks where they do not come out, tokens even."""
    room = [(rank + 1) * len(lengths) // dp - rank * len(lengths) // dp for rank in range(dp)]
    found: list[list[int]] = [[] for _ in range(dp)]
    fewest = [(0, rank) for rank in range(dp) if room[rank]]
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, rank = heapq.heappop(fewest)
        found[rank].append(sample)
        if len(found[rank]) < room[rank]:
            heapq.heappush(fewest, (tokens + lengths[sample], rank))
    return found


def _pack(lengths: Sequence[int], samples: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First fit, the longest first."""
    bins: list[list[int]] = []
    free: list[int] = []
    for sample in sorted(samples, key=lambda i: (-lengths[i], i)):
        slot = next((i for i, tokens in enumerate(free) if tokens >= lengths[sample]), None)
        if slot is None:
            bins.append([sample])
            free.append(max_tokens - lengths[sample])
        else:
            bins[slot].append(sample)
            free[slot] -= lengths[sample]
    return bins


def _split_up(bins: list[list[int]], count: int, lengths: Sequence[int]) -> list[list[int]]:
    """``count`` micro-batches out of at most as many: the fullest are halved, and only what cannot be is empty."""
    bins = [list(samples) for samples in bins]
    while len(bins) < count:
        fullest = max(
            (i for i, samples in enumerate(bins) if len(samples) > 1),
            key=lambda i: (sum(lengths[s] for s in bins[i]), -i),
            default=None,
        )
        if fullest is None:
            bins.append([])
            continue
        samples = bins[fullest]
        bins[fullest] = samples[::2]
        bins.append(samples[1::2])
    return [sorted(samples) for samples in bins]
