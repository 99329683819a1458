"""Samples across changes of the data-parallel degree: each once, none lost, no epoch that trains nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nereus.runtime.data_position import (  # noqa: E402
    Batch,
    DataExhausted,
    DataPosition,
    RankSampler,
    Tail,
    file_order,
    torch_order,
)
from nereus.runtime.job_state import JobState, MinibatchPosition, RngRule, dumps, loads  # noqa: E402
from nereus.runtime.job_values import JobStateError  # noqa: E402

#: Divided by 8, 6 and 4 ranks alike.
EVEN = 24


def _global(position: DataPosition, *, dp: int, batch: int, num_epochs: int, **kwargs: object) -> list[list[Batch]]:
    """Every batch that is left, as each rank of ``dp`` sees it."""
    ranks = [
        list(RankSampler(batch=batch, dp=dp, rank=r, **kwargs).batches(position, num_epochs=num_epochs))  # type: ignore[arg-type]
        for r in range(dp)
    ]
    return [list(batch) for batch in zip(*ranks, strict=True)]


def _joined(ranks: list[Batch]) -> list[int]:
    return [sample for one in ranks for sample in one.samples]


def _stored(position: DataPosition) -> DataPosition:
    """Through a checkpoint of the job state."""
    return loads(dumps(JobState(step=0, models=(), data=position, rng=RngRule(seed=0)))).data


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 400),
    seed=st.integers(0, 2**31),
    batch=st.sampled_from([EVEN, 2 * EVEN]),
    degrees=st.lists(st.sampled_from([8, 6, 4, 3, 1]), min_size=1, max_size=5),
    steps=st.integers(1, 6),
)
def test_every_sample_once_across_changes_of_dp(
    size: int, seed: int, batch: int, degrees: list[int], steps: int
) -> None:
    """8 -> 6 -> 4 and others: the samples of all ranks are the epochs' orders, without gap or repeat."""
    num_epochs = 3
    position = DataPosition(seed=seed, size=size)
    trained: list[int] = []
    # The last batch of all may be short; dealt unevenly it is still dealt.
    for dp in [*degrees, 1]:
        left = num_epochs * size - position.consumed
        if left < batch and dp > 1:
            continue
        try:
            rest = RankSampler(batch=batch, dp=1, rank=0).batches(position, num_epochs=num_epochs)
        except DataExhausted:
            assert position.consumed == num_epochs * size
            break
        number = len(list(rest)) if dp == 1 else min(steps, left // batch)
        samplers = [RankSampler(batch=batch, dp=dp, rank=rank) for rank in range(dp)]
        streams = [sampler.batches(position, num_epochs=num_epochs) for sampler in samplers]
        for _ in range(number):
            ranks = [next(stream) for stream in streams]
            assert len({one.after for one in ranks}) == 1
            assert len({len(one.samples) for one in ranks}) == 1
            trained += _joined(ranks)
            position = ranks[0].after
        position = _stored(position)
    expected = [int(sample) for epoch in range(num_epochs) for sample in torch_order(seed, epoch, size)]
    assert trained == expected
    assert position.consumed == len(trained) and (position.epoch, position.index) == (num_epochs, 0)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 200), batch=st.integers(8, 60), dps=st.permutations([8, 6, 4, 7]))
def test_short_tails_dealt_unevenly(size: int, batch: int, dps: list[int]) -> None:
    """A batch that no degree divides: shares differ by one at most, and each epoch is a permutation."""
    for epoch, dp in enumerate(dps):
        position = DataPosition(seed=5, size=size, epoch=epoch, consumed=epoch * size)
        batches = _global(position, dp=dp, batch=batch, num_epochs=epoch + 1, tail=Tail.SHORT, uneven=True)
        samples = [sample for ranks in batches for sample in _joined(ranks)]
        assert sorted(samples) == list(range(size))
        for ranks in batches:
            shares = [len(one.samples) for one in ranks]
            assert max(shares) - min(shares) <= 1 and sum(shares) == ranks[0].num_global


@pytest.mark.parametrize("dps", [(8, 6, 4), (4, 8, 6)])
def test_dropped_tails_are_counted(dps: tuple[int, ...]) -> None:
    position = DataPosition(seed=1, size=100)  # 4 batches of 24, 4 samples over
    seen: Counter[int] = Counter()
    for epoch, dp in enumerate(dps):
        batches = _global(position, dp=dp, batch=EVEN, num_epochs=epoch + 1, tail=Tail.DROP)
        assert len(batches) == 4
        samples = [sample for ranks in batches for sample in _joined(ranks)]
        assert len(set(samples)) == 96
        seen.update(samples)
        position = _stored(batches[-1][0].after)
        assert (position.epoch, position.index, position.dropped) == (epoch, 96, 4 * epoch)
    assert position.consumed == seen.total() == 288


def test_an_epoch_border_trains_the_next_epoch() -> None:
    """Stopped after the last batch of an epoch, a job goes on with the next one; with none left it says so."""
    position = DataPosition(seed=0, size=48).advanced(48)
    assert (position.epoch, position.index) == (1, 0)
    first = next(RankSampler(batch=24, dp=4, rank=1).batches(position, num_epochs=2))
    assert list(first.samples) == [int(s) for s in torch_order(0, 1, 48)[6:12]]
    with pytest.raises(DataExhausted, match="no batch of 24 samples is left of 1 epochs"):
        RankSampler(batch=24, dp=4, rank=1).batches(position, num_epochs=1)
    # Only a tail is left, and tails are dropped: that is the end of the job too, said at once.
    tail = DataPosition(seed=0, size=50).advanced(48)
    with pytest.raises(DataExhausted):
        RankSampler(batch=24, dp=4, rank=0, tail=Tail.DROP).batches(tail, num_epochs=1)
    batch = next(RankSampler(batch=24, dp=4, rank=0, tail=Tail.DROP).batches(tail, num_epochs=2))
    assert (batch.after.epoch, batch.after.index, batch.after.dropped) == (1, 24, 2)


def test_refusals() -> None:
    with pytest.raises(JobStateError, match=r"512 samples do not divide among 6 ranks; these do: \[1, 2, 4, 8"):
        RankSampler(batch=512, dp=6, rank=0)
    with pytest.raises(JobStateError, match="rank 4 is not one of 4"):
        RankSampler(batch=8, dp=4, rank=4)
    with pytest.raises(JobStateError, match="leaves some of 8 ranks without any"):
        RankSampler(batch=5, dp=8, rank=0, uneven=True)
    with pytest.raises(JobStateError, match="trains nothing"):
        RankSampler(batch=0, dp=1, rank=0)
    with pytest.raises(JobStateError, match="never full with 10 samples"):
        RankSampler(batch=12, dp=4, rank=0, tail=Tail.DROP).batches(DataPosition(seed=0, size=10), num_epochs=5)
    with pytest.raises(JobStateError, match="index: 10 is not in an epoch of 10"):
        DataPosition(seed=0, size=10, index=10, consumed=10)
    with pytest.raises(JobStateError, match="7 consumed and 0 dropped samples do not lead to epoch 0, index 6"):
        DataPosition(seed=0, size=10, index=6, consumed=7)


def test_the_order_is_that_of_torch() -> None:
    """A job that dealt its samples with torch's DistributedSampler can hand its position over."""
    from torch.utils.data import DistributedSampler

    sampler: DistributedSampler[int] = DistributedSampler(range(37), num_replicas=1, rank=0, shuffle=True, seed=11)  # type: ignore[arg-type]
    sampler.set_epoch(4)
    assert list(sampler) == [int(s) for s in torch_order(11, 4, 37)]


def test_own_order() -> None:
    batches = RankSampler(batch=4, dp=2, rank=1, order=file_order).batches(DataPosition(seed=0, size=6), num_epochs=2)
    assert [batch.samples for batch in batches] == [(2, 3), (0, 1), (4, 5)]


@pytest.mark.parametrize("stop", range(6))
def test_minibatches_inside_a_step(stop: int) -> None:
    """2 passes of 3 mini-batches over 48 samples, DP 8 until ``stop`` and DP 4 from there: each sample once a pass."""
    place = MinibatchPosition(num_epochs=2, num_minibatches=3)
    passes: list[list[int]] = [[], []]
    for number in range(6):
        dp = 8 if number < stop else 4
        data = place.step_data(seed=9, step=120, num_samples=48)
        ranks = [next(RankSampler(batch=16, dp=dp, rank=r).batches(data, num_epochs=2)) for r in range(dp)]
        passes[place.epoch] += _joined(ranks)
        place = place.advanced()
    assert [sorted(p) for p in passes] == [list(range(48))] * 2
    assert passes[0] != passes[1]
    assert place.at_boundary
    assert MinibatchPosition().step_data(seed=9, step=121, num_samples=48).seed != data.seed
