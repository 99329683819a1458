"""Bytes by class against published ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner.test_step_time import GPT3

from nereus.planner.peak_memory import CLASSES, PRIOR, SPREAD, class_bytes
from nereus.planner.runs import Run, columns

GIB = 2**30


def gib(run: Run) -> dict[str, float]:
    return {name: value / GIB for name, value in zip(CLASSES, class_bytes(columns([run]))[0].tolist(), strict=True)}


def test_every_class_has_a_prior_and_a_spread() -> None:
    assert set(CLASSES) == set(PRIOR) == set(SPREAD)


#: Korthikanti 2022, table 3 and figure 1: 8 GPUs a pipeline stage, 3 chunks each, fp16, no data parallelism.
KORTHIKANTI = replace(
    GPT3, gpus=64, tp=8, pp=8, vp=3, dp=1, global_batch=64, sharding="none", recompute="selective", gradient_bytes=2
)


def test_activations_of_the_first_stage_are_those_of_the_whole_model() -> None:
    """12.35 GiB for 175B at tp 8 with sequence parallelism and selective recomputation, read off the figure."""
    assert gib(KORTHIKANTI)["activations"] == pytest.approx(12.35, rel=0.01)
    assert gib(KORTHIKANTI)["scores"] == 0


def test_without_sequence_parallelism_ten_of_34_bytes_are_on_every_rank() -> None:
    """Korthikanti 2022, section 4.2: s b h (10 + 24 / t) bytes a layer against 34 / t."""
    apart = gib(replace(KORTHIKANTI, sequence_parallel=False))
    assert apart["activations"] / gib(KORTHIKANTI)["activations"] == pytest.approx((10 + 24 / 8) / (34 / 8))
    full = replace(KORTHIKANTI, recompute="full")
    whole = gib(replace(full, sequence_parallel=False))
    assert whole["activations"] == pytest.approx(8 * gib(full)["activations"])


def test_a_peak_read_on_the_last_stage_is_of_its_micro_batches_and_logits() -> None:
    first = gib(replace(KORTHIKANTI, vp=1))
    last = gib(replace(KORTHIKANTI, vp=1, read_last=True))
    assert last["activations"] == pytest.approx(first["activations"] / 8) and last["logits"] > 0 == first["logits"]


def test_tied_tables_are_one_on_a_stage_alone_and_two_on_two() -> None:
    """A model of two tables and one of the same blocks with one table."""
    two = replace(KORTHIKANTI, tp=1, pp=1, vp=1, gpus=1)
    one = replace(two, tied=True, params=two.params - two.vocab * two.hidden)
    assert gib(two)["weights"] - gib(one)["weights"] == pytest.approx(2 * two.vocab * two.hidden / GIB)
    apart = [gib(replace(run, pp=2, gpus=2))["weights"] for run in (one, two)]
    assert apart[0] == pytest.approx(apart[1])


def test_scores_that_are_kept_fill_most_of_the_rest() -> None:
    kept = gib(replace(KORTHIKANTI, recompute="none"))
    assert kept["scores"] == pytest.approx(5 * 96 * 2048 / 12288 * 2048 * 12288 * 96 / 8 / GIB * (1 + 7 / 24))


def test_pipeline_depth_buys_no_activations() -> None:
    shallow = replace(KORTHIKANTI, vp=1)
    deep = replace(shallow, pp=16, gpus=128)
    assert gib(deep)["activations"] == pytest.approx(gib(shallow)["activations"])
    assert gib(deep)["weights"] < 0.6 * gib(shallow)["weights"]


def test_sharding_cuts_what_it_says() -> None:
    base = replace(GPT3, dp=8, sharding="none")
    for sharding, cut in (
        ("optimizer", {"optimizer"}),
        ("gradients", {"optimizer", "gradients"}),
    ):
        before, after = gib(base), gib(replace(base, sharding=sharding))
        for name in ("weights", "gradients", "optimizer"):
            assert after[name] == pytest.approx(before[name] / (8 if name in cut else 1))
    full = gib(replace(base, sharding="full"))
    assert full["weights"] < gib(base)["weights"] / 2


def test_a_last_stage_with_a_large_vocabulary_is_the_fullest() -> None:
    small = replace(KORTHIKANTI, pp=2, vp=1, gpus=16, vocab=512000, recompute="full")
    assert gib(small)["logits"] > 0 and gib(replace(small, pp=64, vocab=1000))["logits"] == 0


def test_the_layouts_of_the_seed() -> None:
    """8B on 16 GPUs, no recomputation: (dp 4, tp 2, pp 2) holds twice the activations of (4, 4, 1) and equal state."""
    llama = replace(
        GPT3, layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, mlp_matrices=3, vocab=128256, params=8.03e9,
        seq_len=4096, gpus=16, dp=4, global_batch=256, micro_batch=4, recompute="none", flash=True,
    )  # fmt: skip
    deep, wide = gib(replace(llama, tp=2, pp=2)), gib(replace(llama, tp=4, pp=1))
    assert deep["activations"] == pytest.approx(2 * wide["activations"])
    for name in ("weights", "gradients", "optimizer"):
        assert deep[name] == pytest.approx(wide[name], rel=0.03)
