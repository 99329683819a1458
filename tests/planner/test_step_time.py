"""Classes of operations against published formulas and what must hold whatever the machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nereus.planner.runs import Machine, Run, columns
from nereus.planner.step_time import CLASSES, PRIOR, SPREAD, class_seconds

A100 = Machine(
    gpu="A100-SXM-80GB",
    flops_per_s=312e12,
    flops16_per_s=312e12,
    hbm_bytes_per_s=2.039e12,
    intra_bytes_per_s=300e9,
    nic_bytes_per_s=25e9,
    domain=8,
    mem_gb=80,
)
#: GPT-3 175B of Narayanan 2021.
GPT3 = Run(
    machine=A100,
    labels=(),
    layers=96,
    hidden=12288,
    heads=96,
    kv_heads=96,
    ffn=49152,
    mlp_matrices=2,
    vocab=51200,
    params=174.6e9,
    expert_params=0.0,
    experts_per_token=1,
    shared_experts=0,
    seq_len=2048,
    global_batch=1536,
    micro_batch=1,
    gpus=768,
    tp=8,
    pp=12,
    dp=8,
    cp=1,
    vp=1,
    ep=1,
    recompute="full",
    sharding="none",
    gradient_bytes=4,
    flash=False,
)


def seconds(run: Run) -> dict[str, float]:
    return dict(zip(CLASSES, class_seconds(columns([run]))[0].tolist(), strict=True))


def test_every_class_has_a_prior_and_a_spread() -> None:
    assert set(CLASSES) == set(PRIOR) == set(SPREAD) and len(set(CLASSES)) == len(CLASSES)


def test_multiplications_are_the_flops_of_the_paper() -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh), full recompute: Narayanan 2021, equation 3; the bubble comes on top."""
    run, c = GPT3, seconds(GPT3)
    flops = 96 * run.global_batch * run.seq_len * run.layers * run.hidden**2
    flops *= 1 + run.seq_len / (6 * run.hidden) + run.vocab / (16 * run.layers * run.hidden)
    # Logits are computed on one stage only, in 3 passes: counted in the pace of every stage here.
    of_layers = c["gemm"] + c["core"] + c["logits"] / run.pp
    micro_batches = run.num_microbatches
    bubble = (micro_batches + run.pp - 1) / micro_batches
    assert of_layers / bubble * run.gpus * A100.flops_per_s == pytest.approx(flops, rel=1e-3)


def test_interleaving_shortens_the_bubble_and_sends_more() -> None:
    once, four = seconds(GPT3), seconds(replace(GPT3, vp=4))
    micro_batches = GPT3.num_microbatches
    assert four["gemm"] / once["gemm"] == pytest.approx((micro_batches + 11 / 4) / (micro_batches + 11))
    assert four["pipeline"] > 3 * once["pipeline"]


def test_recomputation_costs_a_third_of_the_layers_and_two_reductions() -> None:
    full, none = seconds(GPT3), seconds(replace(GPT3, recompute="none"))
    assert full["gemm"] / none["gemm"] == pytest.approx(4 / 3)
    assert full["tp"] / none["tp"] == pytest.approx(6 / 4)
    assert full["logits"] == none["logits"]


def test_groups_inside_the_fast_links_use_no_others() -> None:
    alone = replace(GPT3, gpus=8, tp=8, pp=1, dp=1, global_batch=16)
    c = seconds(alone)
    assert c["tp"] > 0 and c["tp_outside"] == c["dp"] == c["pipeline"] == c["gather"] == 0
    across = seconds(replace(alone, gpus=16, tp=16))
    # Each GPU sends an eighth over its NIC, after 7/8 of the whole over the fast links.
    ratio = (2 * 1 / 2 / 8 / A100.nic_bytes_per_s) / (2 * 7 / 8 / A100.intra_bytes_per_s)
    assert across["tp_outside"] / across["tp"] == pytest.approx(ratio)


def test_a_ring_between_nodes_carries_what_is_left_of_the_reduction_inside() -> None:
    """tp 1 on 8 nodes of 8: 7/8 of the bytes stay inside; each NIC takes 7/8 of an eighth."""
    run = replace(GPT3, tp=1, pp=1, dp=64, gpus=64)
    size = run.params * (run.gradient_bytes + 2)
    expected = 7 / 8 * size / A100.intra_bytes_per_s + 7 / 8 * size / 8 / A100.nic_bytes_per_s
    assert seconds(run)["dp"] == pytest.approx(expected)


def test_sharded_weights_are_gathered_every_micro_batch() -> None:
    run = replace(GPT3, tp=1, pp=1, dp=64, gpus=64, sharding="full", micro_batch=4)
    c = seconds(run)
    assert c["dp"] == 0 and c["gather"] == pytest.approx(2 * seconds(replace(run, micro_batch=8))["gather"])


def test_experts_visit_each_node_once() -> None:
    moe = replace(
        GPT3, tp=1, pp=1, dp=64, gpus=64, mlp_matrices=3, expert_params=100e9, experts_per_token=8, recompute="none"
    )
    inside, across = seconds(replace(moe, ep=8)), seconds(replace(moe, ep=64))
    boundary, steps = 2 * moe.micro_batch * moe.seq_len * moe.hidden, moe.num_microbatches * moe.layers * 4
    assert inside["experts"] == pytest.approx(steps * boundary * 7 / 8 * 8 / A100.intra_bytes_per_s)
    nodes = 8 * (1 - (7 / 8) ** 8)  # of 8, those that 8 random experts lie on
    assert across["experts"] == pytest.approx(steps * boundary * nodes * 7 / 8 / A100.nic_bytes_per_s)


def test_many_runs_at_once_are_each_alone() -> None:
    runs = [replace(GPT3, tp=tp, pp=96 // tp, micro_batch=b) for tp in (1, 2, 4, 8) for b in (1, 2)]
    together = class_seconds(columns(runs))
    assert np.array_equal(together, np.concatenate([class_seconds(columns([run])) for run in runs]))
    assert np.isfinite(together).all() and (together >= 0).all()


def test_sequence_parallelism_divides_norms_too() -> None:
    """6 of 14 accesses are those of norms and residuals."""
    apart, shared = (seconds(replace(GPT3, sequence_parallel=sp))["elementwise"] for sp in (False, True))
    assert apart / shared == pytest.approx((6 + 8 / 8) / (14 / 8))
