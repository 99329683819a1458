"""An RL step: stages, their order, the tail of generation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.plan import Plan
from nereus.lang.api import resolve_text
from nereus.passes.pipeline import compile_transition
from nereus.planner.calibration import calibrate
from nereus.planner.rl_step import StageTime, StepTime, order_of, schedule, stage_time, step_time
from nereus.planner.weight_sync import synced_step_time

PRIOR = calibrate(())
COLOCATED = """
cluster { node n[0-1] { gpus = 8 x "h100-sxm-80gb" } }
model actor = "llama-3.1-8b"
model ref = actor { frozen = true }
workload {
  algorithm = grpo  prompts = 64  samples = 8  mini_batch = 256
  prompt_len = 512  response_len = 1536  max_response = 4096
}
stage actor.generate { on = n[0-1]  tp = 2  engine = vllm  kv_cache = 24 GiB  idle = offload }
stage actor.logprob { with = actor.train }
stage ref.infer { on = n[0-1]  tp = 2  idle = offload }
stage actor.train { on = n[0-1]  tp = 2  pp = 2  backend = megatron  optimizer = adam }
"""
SPLIT = COLOCATED.replace("actor.generate { on = n[0-1]", "actor.generate { on = n0").replace(
    "actor.train { on = n[0-1]", "actor.train { on = n1"
)


def plan_of(text: str) -> Plan:
    result = resolve_text(text, path="job.plan", base_dir=".")
    assert result.plan is not None, result.diagnostics
    return result.plan


def test_stages_of_one_pool_run_one_after_another() -> None:
    found = step_time(plan_of(COLOCATED), PRIOR)
    assert found.seconds == pytest.approx(sum(time.seconds for time in found.stages))
    assert found.critical == ("actor.generate", "actor.logprob", "ref.infer", "actor.train")


def test_training_waits_for_what_it_needs_wherever_that_runs() -> None:
    found = {time.stage: time for time in step_time(plan_of(SPLIT), PRIOR).stages}
    assert found["actor.logprob"].start_s >= found["actor.generate"].end_s
    assert found["actor.train"].start_s >= max(found["ref.infer"].end_s, found["actor.logprob"].end_s)


def test_generation_runs_beside_the_rest_when_asynchronous() -> None:
    text = SPLIT.replace("stage ref.infer { on = n[0-1]", "stage ref.infer { on = n1")
    text = text.replace("algorithm = grpo", "algorithm = grpo  mode = async { staleness = 1 }")
    found = step_time(plan_of(text), PRIOR)
    by_name = {time.stage: time for time in found.stages}
    assert by_name["actor.generate"].start_s == by_name["actor.logprob"].start_s == 0
    assert found.seconds == max(time.end_s for time in found.stages)


def test_a_forward_pass_is_less_than_a_third_of_training() -> None:
    plan = plan_of(COLOCATED)
    train = stage_time(plan, plan.stage("actor.train"), PRIOR).seconds
    forward = stage_time(plan, plan.stage("actor.logprob"), PRIOR).seconds
    assert 0.15 < forward / train < 0.4


def test_longer_responses_and_longer_tails_take_longer() -> None:
    plan = plan_of(COLOCATED)
    stage = plan.stage("actor.generate")

    def seconds(**changes: int) -> float:
        return stage_time(replace(plan, workload=replace(plan.workload, **changes)), stage, PRIOR).seconds

    assert seconds(response_len=3072, max_response=50_000) > 1.8 * seconds(response_len=1536, max_response=50_000)
    assert seconds(max_response=2048) < seconds(max_response=4096) < seconds(max_response=8192)


def test_a_cache_that_holds_few_sequences_takes_longer() -> None:
    small = plan_of(COLOCATED.replace("kv_cache = 24 GiB", "kv_cache = 1 GiB"))
    large = plan_of(COLOCATED)
    assert (
        stage_time(small, small.stage("actor.generate"), PRIOR).seconds
        > 1.5 * stage_time(large, large.stage("actor.generate"), PRIOR).seconds
    )


@given(st.lists(st.floats(0.1, 100), min_size=4, max_size=4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_schedule_is_the_longest_path(seconds: list[float], split: bool) -> None:
    """Against relaxation over all pairs that may not run at once, in the order of phases."""
    plan = plan_of(SPLIT if split else COLOCATED)
    names = [stage.name for stage in plan.stages]
    times = {n: StageTime(stage=n, seconds=s, deviation=0.1) for n, s in zip(names, seconds, strict=True)}
    found = schedule(order_of(plan), times)
    generate, logprob, ref, train = seconds
    # The trainer's processes hold actor.logprob; ref.infer lies on both nodes, so nothing runs beside it.
    assert found.seconds == pytest.approx(generate + logprob + ref + train)
    assert sum(times[name].seconds for name in found.critical) == pytest.approx(found.seconds)
    assert found.deviation == pytest.approx(0.1 * np.sqrt(np.sum(np.square(seconds))) / found.seconds)


@given(st.lists(st.floats(0.1, 100), min_size=4, max_size=4))
@settings(max_examples=60, deadline=None)
def test_stages_that_share_nothing_run_side_by_side(seconds: list[float]) -> None:
    text = SPLIT.replace("stage ref.infer { on = n[0-1]", "stage ref.infer { on = n0")
    plan = plan_of(text)
    names = [stage.name for stage in plan.stages]
    times = {n: StageTime(stage=n, seconds=s, deviation=0.1) for n, s in zip(names, seconds, strict=True)}
    generate, logprob, ref, train = seconds
    assert schedule(order_of(plan), times).seconds == pytest.approx(generate + max(logprob, ref) + train)


def synced(text: str) -> tuple[Plan, StepTime, StageTime]:
    plan = plan_of(text)
    found = synced_step_time(plan, PRIOR)
    return plan, found, next(time for time in found.stages if time.stage == "actor.sync")


@pytest.mark.parametrize("text", [COLOCATED, SPLIT])
def test_a_weight_sync_ends_a_synchronous_step(text: str) -> None:
    plan, found, sync = synced(text)
    without = step_time(plan, PRIOR)
    assert sync.seconds > 0 and found.critical[-2:] == ("actor.train", "actor.sync")
    assert found.seconds == pytest.approx(without.seconds + sync.seconds)


def test_a_weight_sync_is_beside_an_asynchronous_step() -> None:
    text = SPLIT.replace("stage ref.infer { on = n[0-1]", "stage ref.infer { on = n1")
    plan, found, sync = synced(text.replace("algorithm = grpo", "algorithm = grpo  mode = async { staleness = 1 }"))
    assert 0 < sync.seconds < found.seconds == step_time(plan, PRIOR).seconds


def test_a_weight_sync_takes_what_the_compiled_move_takes() -> None:
    """Of the trainer's weights into engines that have none, on their own node and among the trainer's GPUs."""
    for text in (COLOCATED, SPLIT):
        plan, _, sync = synced(text)
        weight = plan.stage("actor.generate").slots[:1]
        train, generate = (
            replace(plan.stage(name), idle="resident", slots=weight) for name in ("actor.train", "actor.generate")
        )
        base = replace(plan, workload=replace(plan.workload, mode="async"))
        old, new = (replace(base, stages=stages) for stages in ((train,), (train, generate)))
        certificate = compile_transition(old, new, verify=False).certificate
        assert sync.seconds == pytest.approx(certificate.transfer_s, rel=0.2)


def test_an_adapter_is_synced_in_its_share_of_the_model() -> None:
    whole = synced(COLOCATED)[2].seconds
    adapter = synced(COLOCATED.replace('"llama-3.1-8b"', '"llama-3.1-8b" { lora { rank = 16 } }'))[2].seconds
    assert 0 < adapter < whole / 20


def test_a_model_in_one_place_needs_no_sync() -> None:
    alone = plan_of("\n".join(line for line in COLOCATED.splitlines() if "actor.generate" not in line))
    assert [time.stage for time in synced_step_time(alone, PRIOR).stages if "sync" in time.stage] == []
