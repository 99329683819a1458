"""Memory diagnostics: numbers, remedies that hold when written into the plan, host memory, promises, small caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from models.sample_plans import cluster, devices, model, ppo_8b_2k, ppo_8b_4k, ppo_8b_4k_refused, stage, swap_full

from nereus.ir.cluster import Cluster, Device
from nereus.ir.diagnostic import Diagnostic, Severity, Source, Span
from nereus.ir.plan import Plan, Workload
from nereus.ir.units import GB, GIB
from nereus.models.memory import check_memory, process_count, steady_state


def _errors(plan: Plan) -> list[Diagnostic]:
    return [d for d in check_memory(plan) if d.severity is Severity.ERROR]


def _on_hosts_of(plan: Plan, host_mem_bytes: int) -> Plan:
    nodes = tuple(replace(node, host_mem_bytes=host_mem_bytes) for node in plan.cluster.nodes)
    return replace(plan, cluster=Cluster(nodes=nodes))


def test_the_refused_plan() -> None:
    (error,) = _errors(ppo_8b_4k_refused())
    assert error.code == "NRS4001"
    assert error.headline == "actor.train does not fit: 76.6 of 72.0 GB on n0.gpu0"
    assert (
        error.notes[0]
        == "activations 36.5 + moments 16.1 + master 8.0 + gradients 8.0 + weights 4.0 + 4 processes 4.0 GB"
    )
    assert "2 micro-batches in flight" in error.notes[1]
    data = dict(error.data)
    assert (data["device"], data["have_bytes"], data["num_devices"]) == ("n0.gpu0", 72 * GB, 4)
    assert sum(v for k, v in error.data if k.startswith("part:") and isinstance(v, int)) == data["need_bytes"]


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("micro_batch = 2", {"micro_batch": 2}),
        ("recompute = full", {"recompute": "full"}),
        ("zero = 1", {"zero": 1}),
        ("tp = 4  pp = 1", {"tp": 4, "pp": 1, "dp": 4, "pp_split": (32,)}),
    ],
)
def test_what_is_said_to_help_helps(text: str, change: dict[str, Any]) -> None:
    plan = ppo_8b_4k_refused()
    (error,) = _errors(plan)
    assert error.help is not None and f"{text} (" in error.help
    # The log-probability stage runs with the trainer and follows its degrees.
    names = ("actor.train", "actor.logprob") if "tp" in change else ("actor.train",)
    changed = replace(plan, stages=tuple(replace(s, **change) if s.name in names else s for s in plan.stages))
    assert _errors(changed) == []
    assert dict(error.data)[f"fits_with:{text}"] == steady_state(changed).worst("actor.train").need_bytes


def test_a_micro_batch_that_does_not_come_out_is_not_offered() -> None:
    (error,) = _errors(ppo_8b_4k_refused())
    assert error.help is not None
    assert "micro_batch = 3" not in error.help, "128 samples are no multiple of dp 4 x 3"


def test_a_combination_where_no_single_change_is_enough() -> None:
    policy = model("actor", "llama-3.1-8b")
    crowded = stage(policy, "train", devices(0, 0), tp=2, micro_batch=8, optimizer="adam")
    plan = Plan(
        cluster=cluster("a100-sxm-40gb", 1),
        models=(policy,),
        workload=Workload(mini_batch=128, prompt_len=1024, response_len=7168),
        stages=(crowded,),
    )
    (error,) = _errors(plan)
    assert error.help is not None and error.help.startswith("fits with: tp = 8, micro_batch = 1 (")
    fixed = replace(crowded, tp=8, dp=1, micro_batch=1)
    assert _errors(replace(plan, stages=(fixed,))) == []


def test_nothing_helps() -> None:
    policy = model("actor", "llama-3.1-70b")
    only = stage(policy, "train", devices(0, 0), tp=8, recompute="full")
    plan = Plan(cluster=cluster("l40s-48gb", 1), models=(policy,), workload=Workload(mini_batch=8), stages=(only,))
    (error,) = _errors(plan)
    assert error.help is not None and "more or larger GPUs" in error.help


def test_a_resident_neighbour_is_named_and_offloading_it_helps() -> None:
    policy, value = model("actor", "llama-3.1-8b"), model("critic", "llama-3.1-8b", head="value")
    shared: dict[str, Any] = {"tp": 4, "optimizer": "adam", "micro_batch": 2}
    source = Source(path="plan", text="stage actor.train {} stage critic.train {}")
    train = stage(policy, "train", devices(0, 0), span=Span(source=source, start=0, end=20), **shared)
    learn = stage(value, "train", devices(0, 0), span=Span(source=source, start=21, end=42), **shared)
    plan = Plan(
        cluster=cluster("h100-sxm-80gb", 1),
        models=(policy, value),
        workload=Workload(mini_batch=64, prompt_len=1024, response_len=3072),
        stages=(train, learn),
    )
    first, second = _errors(plan)
    assert first.primary is not None and first.primary.span == train.span
    assert [label.span for label in first.secondary] == [learn.span]
    assert "26.3 GB" in first.secondary[0].message
    assert second.headline.startswith("critic.train does not fit")
    assert first.help is not None and "critic.train { idle = offload } (" in first.help


def test_the_caret_points_at_the_deciding_key() -> None:
    source = Source(path="plan", text="stage actor.train { micro_batch = 4 }")
    key = Span(source=source, start=20, end=35)
    plan = ppo_8b_4k_refused()
    stages = tuple(replace(s, key_spans=(("micro_batch", key),)) if s.is_train else s for s in plan.stages)
    (error,) = _errors(replace(plan, stages=stages))
    assert error.primary is not None and error.primary.span == key
    assert error.primary.message == "4.6 GB too much"


def test_host_memory() -> None:
    plan = _on_hosts_of(ppo_8b_2k(), 300 * GB)
    (error,) = _errors(plan)
    assert (error.code, error.headline) == (
        "NRS4002",
        "offloaded state does not fit in host memory: 336.6 of 300.0 GB on n0",
    )
    assert error.notes == ("critic.train 210.2 + actor.generate 64.2 + ref.infer 32.1 + reward.infer 30.0 GB",)
    assert _errors(_on_hosts_of(ppo_8b_2k(), 337 * GB)) == []


def test_promised_length_only_warns() -> None:
    (warning,) = check_memory(ppo_8b_4k())
    assert (warning.code, warning.severity) == ("NRS4003", Severity.WARNING)
    assert "9,216 tokens" in warning.notes[0]
    assert "actor.train would need 90.7 of 72.0 GB" in warning.notes[0]
    modest = replace(ppo_8b_4k(), workload=replace(ppo_8b_4k().workload, max_response=3072))
    assert check_memory(modest) == ()


def test_plans_without_a_promise_are_silent() -> None:
    assert check_memory(swap_full()) == ()


def test_cache_smaller_than_a_sequence() -> None:
    policy = model("actor", "llama-3.1-8b")
    engine = stage(policy, "generate", devices(0, 0), tp=2, kv_cache_bytes=GIB // 8)
    plan = Plan(
        cluster=cluster("h100-sxm-80gb", 1),
        models=(policy,),
        workload=Workload(prompt_len=1024, response_len=3072),
        stages=(engine,),
    )
    (error,) = _errors(plan)
    assert error.code == "NRS4004"
    assert dict(error.data)["held_tokens"] == 2048
    assert _errors(replace(plan, stages=(replace(engine, kv_cache_bytes=GIB // 4),))) == []
    share = replace(engine, kv_cache_bytes=None, mem_fraction=0.05)
    (error,) = _errors(replace(plan, stages=(share,)))
    assert "holds 0 tokens" in error.headline


def test_an_oversized_cache_is_cut_to_what_fits() -> None:
    policy = model("actor", "llama-3.1-8b")
    engine = stage(policy, "generate", devices(0, 0), tp=2, kv_cache_bytes=70 * GIB)
    plan = Plan(cluster=cluster("h100-sxm-80gb", 1), models=(policy,), workload=Workload(), stages=(engine,))
    (error,) = _errors(plan)
    assert error.help is not None and error.help.startswith("fits with: kv_cache = 58 GiB (")
    assert process_count(plan, Device("n0", 0)) == 1


def _engine_beside_trainer(**engine: Any) -> Plan:
    policy = model("actor", "qwen2.5-7b")
    stages = (
        stage(policy, "generate", devices(0, 0), tp=2, **engine),
        stage(policy, "train", devices(0, 0), tp=2, optimizer="adam"),
    )
    workload = Workload(mini_batch=64, prompt_len=1024, response_len=3072)
    return Plan(cluster=cluster("h200-sxm-141gb", 1), models=(policy,), workload=workload, stages=stages)


@pytest.mark.parametrize("engine", [{}, {"mem_fraction": 0.8}, {"kv_cache_bytes": 90 * GIB}])
def test_a_cache_that_leaves_room_for_its_resident_neighbour(engine: dict[str, Any]) -> None:
    plan = _engine_beside_trainer(**engine)
    for error in _errors(plan):
        (text,) = (key for key, _ in error.data if "kv_cache = " in key)
        size = int(text.split("kv_cache = ")[1].split(" GiB")[0])
        assert text.endswith("instead of mem = 0.8") == ("mem_fraction" in engine)
        cached = replace(plan.stage("actor.generate"), kv_cache_bytes=size * GIB, mem_fraction=None)
        assert check_memory(replace(plan, stages=(cached, plan.stage("actor.train")))) == (), "one change mends both"
        larger = replace(cached, kv_cache_bytes=(size + 1) * GIB)
        assert _errors(replace(plan, stages=(larger, plan.stage("actor.train")))), "and it is the largest"
    assert len(_errors(plan)) == 2
    assert "actor.generate { idle = offload } (" in str(_errors(plan)[1].help)


def test_a_cache_together_with_offloading() -> None:
    plan = _engine_beside_trainer()
    small = replace(plan, cluster=cluster("a100-sxm-80gb", 1))
    stages = (small.stage("actor.generate"), replace(small.stage("actor.train"), tp=1, dp=8, sp=False))
    error = _errors(replace(small, stages=stages))[0]
    assert error.help is not None and "actor.train { idle = offload }, kv_cache = " in error.help


def test_no_cache_is_offered_that_holds_less_than_a_sequence() -> None:
    plan = _engine_beside_trainer(kv_cache_bytes=60 * GIB)
    # 28 layers, 4 kv heads of 128 over tp 4: 14 KiB a token, so 8 Mi tokens are 112 GiB.
    plan = replace(plan, workload=replace(plan.workload, prompt_len=1024, response_len=2**23))
    helps = [str(error.help) for error in _errors(plan) if error.code == "NRS4001"]
    assert helps and not any("kv_cache = " in text for text in helps)


def test_a_larger_shard_group_is_a_remedy() -> None:
    from nereus.lang.api import resolve_text

    text = """cluster { node n[0-1] { gpus = 8 x "h100-sxm-80gb"  host_mem = 2 TiB } }
model actor = "qwen2.5-32b"
workload { algorithm = sft  prompts = 128  prompt_len = 1024  response_len = 3072 }
stage actor.train { on = n[0-1]  backend = fsdp  fsdp = %s  recompute = full }
"""
    refused, mended = resolve_text(text % "8").plan, resolve_text(text % "full").plan
    assert refused is not None and mended is not None
    (found,) = check_memory(refused)
    assert found.code == "NRS4001"
    assert found.help is not None and "fsdp = full" in found.help and "tp = 2" in found.help
    assert not check_memory(mended)
