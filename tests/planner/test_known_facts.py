"""Which layouts are best and which fit, as published, under the assumptions that make it so.

Llama-3.1-8B on 16 GPUs of 80 GB, (dp, tp, pp): state is the same for (4, 2, 2) and (4, 4, 1), the first has twice the
activations on its first stage and a bubble, the second three times the tensor-parallel traffic. The optimizer is not
sharded, nothing is recomputed, micro-batches are of 4 sequences, and nothing else is on the GPUs.
"""

from __future__ import annotations

import pytest
from planner.test_rl_step import PRIOR, plan_of

from nereus.ir.plan import Plan
from nereus.models.memory import check_memory
from nereus.planner.limits import Limits
from nereus.planner.rl_step import step_time
from nereus.planner.search import search

STATED = Limits(
    values={
        ("actor.train", "micro_batch"): frozenset("4"),
        ("actor.train", "zero"): frozenset("0"),
        ("actor.train", "recompute"): frozenset({"none"}),
    }
)


def trainer(num_gpus: int, gpu: str, seq_len: int, mini_batch: int, settings: str) -> Plan:
    nodes = f"n[0-{num_gpus // 8 - 1}]"
    return plan_of(
        f"""
cluster {{ node {nodes} {{ gpus = 8 x "{gpu}"  host_mem = 2 TiB }} }}
model actor = "llama-3.1-8b"
workload {{
  algorithm = grpo  prompts = {mini_batch}  samples = 1  mini_batch = {mini_batch}
  prompt_len = {seq_len // 2}  response_len = {seq_len // 2}
}}
stage actor.train {{ on = {nodes}  backend = megatron  optimizer = adam  {settings} }}
"""
    )


def layout(plan: Plan) -> tuple[int, int, int]:
    stage = plan.stage("actor.train")
    return stage.dp, stage.tp, stage.pp


def fits(plan: Plan) -> bool:
    return not any(d.severity.value == "error" for d in check_memory(plan))


@pytest.mark.parametrize(
    ("gpu", "mini_batch"),
    [("a100-sxm-80gb", 256), ("a100-sxm-80gb", 512), ("h100-sxm-80gb", 128), ("h100-sxm-80gb", 256)],
)
def test_the_layout_that_is_best_at_2k_does_not_fit_at_4k(gpu: str, mini_batch: int) -> None:
    def at(seq_len: int, tp: int, pp: int) -> Plan:
        return trainer(16, gpu, seq_len, mini_batch, f"tp = {tp}  pp = {pp}  micro_batch = 4  zero = 0")

    for seq_len, best in ((2048, (4, 2, 2)), (4096, (4, 4, 1))):
        (found,) = search(at(seq_len, 2, 2), PRIOR, count=1, limits=STATED).best
        assert layout(found.plan) == best
    assert fits(at(2048, 4, 1)) and fits(at(2048, 2, 2)) and not fits(at(4096, 2, 2))
    assert step_time(at(2048, 2, 2), PRIOR).seconds < step_time(at(2048, 4, 1), PRIOR).seconds


def test_with_few_micro_batches_the_bubble_outweighs_the_traffic() -> None:
    """The fact fails where it should: 8 micro-batches a rank on NVLink."""
    short = trainer(16, "a100-sxm-80gb", 2048, 128, "tp = 2  pp = 2  micro_batch = 4  zero = 0")
    (found,) = search(short, PRIOR, count=1, limits=STATED).best
    assert layout(found.plan) == (4, 4, 1)


def test_the_best_layout_differs_between_32_and_256_gpus() -> None:
    def best(num_gpus: int) -> tuple[int, int, int]:
        plan = trainer(num_gpus, "h100-sxm-80gb", 4096, 512, "tp = 8  pp = 2  micro_batch = 1  zero = 1")
        limits = Limits(values={("actor.train", "recompute"): frozenset({"none"})})
        (found,) = search(plan, PRIOR, count=1, limits=limits).best
        return layout(found.plan)

    small, large = best(32), best(256)
    assert small[1:] != large[1:]
