"""Batches: the gradient of an update is the same whatever the degrees, micro-batches, budgets and lengths are."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.plan import Stage, Workload
from nereus.models.batch import (
    DEEPSPEED,
    MEAN,
    MEGATRON,
    PER_SAMPLE,
    PER_TOKEN,
    SUM,
    BatchError,
    MicroBatch,
    Update,
    accumulation,
    legal_dp,
    legal_micro_batches,
    mini_batches,
    resolve,
    schedule,
    update_of,
)

#: T11: 32 prompts x 8 samples.
WORKLOAD = Workload(prompts=32, samples=8, mini_batch=256, epochs=2, prompt_len=512, response_len=512)


def trainer(**fields: object) -> Stage:
    return Stage(model="actor", kind="train", devices=(), **fields)  # type: ignore[arg-type]


def sample_gradient(sample: int, tokens: int) -> Fraction:
    """A number that no two samples share; of the sample's mean loss."""
    return Fraction(7 * sample + 3, max(tokens, 1))


def mean_gradient(loss: str, samples: tuple[int, ...], counted: list[int]) -> Fraction:
    """Of the mean loss of ``samples``: over samples, or over their tokens."""
    if loss == PER_SAMPLE:
        return sum((sample_gradient(i, counted[i]) for i in samples), Fraction(0)) / len(samples)
    total = sum(counted[i] for i in samples)
    return sum((sample_gradient(i, counted[i]) * counted[i] for i in samples), Fraction(0)) / total if total else 0


def frameworks_gradient(update: Update, counted: list[int], cp: int) -> Fraction:
    """What each framework makes of ``scale * loss``, written as that framework does it."""
    ranks: list[Fraction] = []
    for batches in update.ranks:
        for part in range(cp):  # a cp rank's loss is its part of the samples' loss; parts need not be equal
            share = Fraction(2 * part + 1, cp * cp)
            total = Fraction(0)
            for batch in batches:
                if batch.is_empty:
                    assert batch.scale == 0
                    continue
                loss = batch.scale * mean_gradient(update.loss, batch.samples, counted) * share
                if update.reduction == MEGATRON:
                    loss = loss * cp / len(batches)  # forward_step_calc_loss
                if update.reduction == DEEPSPEED:
                    loss = loss / len(batches)  # engine.backward
                total += loss
            ranks.append(total)
    total = sum(ranks, Fraction(0))
    if update.reduction in (MEAN, MEGATRON):
        return total / len(ranks)
    return total / (len(ranks) // cp) if update.reduction == DEEPSPEED else total


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], dict[str, object]]:
    dp, micro_batch = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    budget = draw(st.none() | st.integers(1, 60))
    pad = draw(st.booleans())
    if pad:
        num_samples = draw(st.integers(1, 40))
    else:
        num_samples = dp * (1 if budget else micro_batch) * draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, 40), min_size=num_samples, max_size=num_samples))
    counted = [draw(st.integers(0, n)) for n in lengths]
    counted[-1] = max(counted[-1], 1)
    keys = {"dp": dp, "cp": draw(st.integers(1, 3)), "micro_batch": micro_batch, "max_tokens": budget, "pad": pad}
    keys["loss"] = draw(st.sampled_from([PER_SAMPLE, PER_TOKEN]))
    keys["reduction"] = draw(st.sampled_from([SUM, MEAN, DEEPSPEED, MEGATRON]))
    return lengths, counted, keys


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_gradient_is_that_of_the_whole_mini_batch(case: tuple[list[int], list[int], dict[str, object]]) -> None:
    lengths, counted, keys = case
    update = schedule(lengths, loss_tokens=counted, **keys)  # type: ignore[arg-type]
    batches = [batch for rank in update.ranks for batch in rank]
    assert sorted(i for batch in batches for i in batch.samples) == list(range(len(lengths)))
    assert {len(rank) for rank in update.ranks} == {update.num_microbatches} and len(update.ranks) == keys["dp"]
    assert sum(batch.weight for batch in batches) == 1
    everything = mean_gradient(update.loss, tuple(range(len(lengths))), counted)
    assert frameworks_gradient(update, counted, int(str(keys["cp"]))) == everything
    for batch in batches:
        check_size(batch, lengths, keys)
    assert update.num_padding == sum(b.num_padding for b in batches)
    if keys["max_tokens"] is None and not keys["pad"]:
        assert update.num_padding == 0
    shares = [sum(len(batch.samples) for batch in rank) for rank in update.ranks]
    assert max(shares) - min(shares) <= 1


def check_size(batch: MicroBatch, lengths: list[int], keys: dict[str, object]) -> None:
    assert batch.num_tokens == sum(lengths[i] for i in batch.samples)
    if keys["max_tokens"] is None:
        assert len(batch.samples) + batch.num_padding == max(int(str(keys["micro_batch"])), 1)
    else:
        assert batch.num_tokens <= int(str(keys["max_tokens"])) or len(batch.samples) == 1
        assert batch.num_padding == (0 if batch.samples else 1)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_same_batch_always_gives_the_same_schedule(case: tuple[list[int], list[int], dict[str, object]]) -> None:
    lengths, counted, keys = case
    assert schedule(list(lengths), loss_tokens=counted, **keys) == schedule(  # type: ignore[arg-type]
        tuple(lengths),
        loss_tokens=tuple(counted),
        **keys,  # type: ignore[arg-type]
    )


class TestSequenceParallelRanksAreNoReplicas:
    """T11: 256 samples, micro-batch 4, 8 GPUs; sequence parallel 2 halves dp, not the gradient."""

    def test_degrees(self) -> None:
        alone, halved = trainer(dp=8, micro_batch=4), trainer(dp=4, cp=2, micro_batch=4)
        one, two = update_of(WORKLOAD, alone), update_of(WORKLOAD, halved)
        assert (len(one.ranks), one.num_microbatches) == (8, 8)
        assert (len(two.ranks), two.num_microbatches) == (4, 16)
        assert [sum(len(b.samples) for b in rank) for rank in (*one.ranks, *two.ranks)] == [32] * 8 + [64] * 4
        for update in (one, two):
            assert {b.weight for rank in update.ranks for b in rank} == {Fraction(4, 256)}
        counted = [1024] * 256
        everything = mean_gradient(PER_SAMPLE, tuple(range(256)), counted)
        assert frameworks_gradient(one, counted, 1) == frameworks_gradient(two, counted, 2) == everything

    def test_the_old_fault_would_halve_it(self) -> None:
        two = update_of(WORKLOAD, trainer(dp=4, cp=2, micro_batch=4))
        wrong = schedule([1024] * 256, dp=8, micro_batch=4)  # dp taken as the world size: scales of 8 ranks
        assert two.ranks[0][0].scale == 4 * 2 * wrong.ranks[0][0].weight == wrong.ranks[0][0].scale
        assert wrong.num_microbatches == 8  # and half the samples of every rank are left out


class TestDegreesThatCannot:
    def test_are_refused_with_those_that_can(self) -> None:
        with pytest.raises(BatchError, match=r"no multiple of dp 6 x micro_batch 4; legal dp nearby: 1, 2, 4, 8, 16"):
            update_of(WORKLOAD, trainer(dp=6, micro_batch=4))
        with pytest.raises(BatchError, match="does not divide by dp 6") as caught:
            resolve(WORKLOAD, trainer(dp=8, micro_batch=4), 6)
        assert caught.value.legal[:2] == (4, 8)
        with pytest.raises(BatchError, match="does not divide by dp 7"):
            resolve(WORKLOAD, trainer(dp=8, max_tokens=4096), 7)
        with pytest.raises(BatchError, match="does not divide by dp 0"):
            resolve(WORKLOAD, trainer(dp=8), 0)

    def test_or_padded_and_said(self) -> None:
        update = update_of(WORKLOAD, trainer(dp=6, micro_batch=4), pad=True)
        assert update.num_microbatches == 11 and update.num_padding == 6 * 44 - 256
        assert sum(b.weight for rank in update.ranks for b in rank) == 1

    def test_nonsense(self) -> None:
        for keys in ({"dp": 0}, {"dp": 1, "micro_batch": 0}, {"dp": 1, "max_tokens": 0}, {"dp": 1, "loss": "batch"}):
            with pytest.raises(BatchError):
                schedule([4, 4], **keys)  # type: ignore[arg-type]
        with pytest.raises(BatchError):
            schedule([], dp=1)
        with pytest.raises(BatchError, match="no token"):
            schedule([4, 4], dp=1, loss=PER_TOKEN, loss_tokens=[0, 0])
        with pytest.raises(BatchError, match="2 counts"):
            schedule([4, 4], dp=1, loss_tokens=[4])
        with pytest.raises(BatchError, match="3 lengths for a mini batch of 256"):
            update_of(WORKLOAD, trainer(dp=8), [1, 2, 3])
        with pytest.raises(BatchError, match="no way to reduce"):
            schedule([4, 4], dp=1, reduction="ring")


class TestResolve:
    @pytest.mark.parametrize(
        ("micro_batch", "dp", "expected"),
        [(4, 4, (4, 16)), (4, 8, (4, 8)), (4, 128, (2, 1)), (4, 256, (1, 1)), (3, 8, (2, 16)), (16, 32, (8, 1))],
    )
    def test_the_largest_micro_batch_that_is_no_larger(
        self, micro_batch: int, dp: int, expected: tuple[int, int]
    ) -> None:
        found = resolve(WORKLOAD, trainer(dp=8, micro_batch=micro_batch), dp)
        assert (found.micro_batch, found.num_microbatches) == expected

    @given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 40))
    def test_keeps_the_mini_batch_or_refuses(self, mini_batch: int, micro_batch: int, dp: int) -> None:
        work = replace(WORKLOAD, mini_batch=mini_batch)
        try:
            found = resolve(work, trainer(micro_batch=micro_batch), dp)
        except BatchError as error:
            assert mini_batch % dp and all(mini_batch % d == 0 for d in error.legal)
            return
        assert found.micro_batch * found.num_microbatches * dp == mini_batch and found.micro_batch <= micro_batch
        larger = range(found.micro_batch + 1, micro_batch + 1)
        assert all(accumulation(mini_batch, dp, d) is None for d in larger)

    def test_a_token_budget_stays(self) -> None:
        stage = trainer(dp=8, max_tokens=4096)
        assert resolve(WORKLOAD, stage, 4).num_microbatches == 16  # 64 samples of 1024 tokens
        update = update_of(WORKLOAD, replace(stage, dp=4))
        assert update.num_microbatches == 16 and update.num_padding == 0


def test_updates_and_epochs_are_independent_of_degrees() -> None:
    work = replace(WORKLOAD, mini_batch=64)
    found = list(mini_batches(work))
    assert len(found) == 8 and [epoch for epoch, _ in found] == [0] * 4 + [1] * 4
    assert [i for epoch, part in found if epoch == 1 for i in part] == list(range(256))


def test_ranks_with_fewer_long_samples_wait_with_an_empty_micro_batch() -> None:
    update = schedule([10, 10, 1, 1], dp=2, max_tokens=10)
    assert [[b.samples for b in rank] for rank in update.ranks] == [[(0,), (2,)], [(1,), (3,)]]
    update = schedule([10, 9, 1], dp=3, max_tokens=5, pad=False)
    assert [[b.samples for b in rank] for rank in update.ranks] == [[(0,)], [(1,)], [(2,)]]
    update = schedule([5, 5, 5], dp=2, max_tokens=5, pad=True)
    assert [[b.samples for b in rank] for rank in update.ranks] == [[(0,), ()], [(1,), (2,)]]
    assert update.num_padding == 1 and update.ranks[0][1].is_empty and update.ranks[0][1].scale == 0


def test_lists_of_legal_sizes() -> None:
    assert legal_micro_batches(128, 8) == (1, 2, 4, 8, 16)
    assert legal_micro_batches(128, 7) == ()
    assert legal_dp(256, 7)[:2] == (8, 4)
    assert legal_dp(5, 9) == (5, 1)
