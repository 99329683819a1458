"""Public verl configurations: scripts of ours that carry their facts, imported, must give those facts back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published import check_layers, gpu_ids, shape_of

from nereus.ir.diagnostic import Severity
from nereus.ir.plan import Plan, Stage
from nereus.lang.api import format_text, load_plan, resolve_text
from nereus.lang.importers.result import ImportResult
from nereus.lang.importers.verl import import_verl
from nereus.models.memory import check_memory

DATA = Path(__file__).resolve().parents[1] / "data"
FACTS: list[dict[str, Any]] = json.loads((DATA / "verl_facts.json").read_text())
IDS = [row["id"] for row in FACTS]


def _script(name: str) -> Path:
    if name == "verl-ppo-qwen2-7b-rm-8k":
        return DATA.parents[1] / "examples" / "verl-qwen2-7b" / "launch.sh"
    return DATA / "verl" / f"{name}.sh"


def _import(name: str) -> ImportResult:
    path = _script(name)
    return import_verl(path.read_text(), path=path.name)


def _plan(name: str) -> Plan:
    text = _import(name).plan_text
    assert text is not None
    loaded = resolve_text(text, path="imported.plan")
    assert [d.headline for d in loaded.diagnostics if d.severity is Severity.ERROR] == []
    assert loaded.plan is not None
    return loaded.plan


def _check_stage(stage: Stage, facts: dict[str, Any], layers: int) -> None:
    assert len(stage.devices) == facts["gpus"]
    for key in ("tp", "pp", "cp", "dp", "ep", "etp"):
        if key in facts:
            assert getattr(stage, key) == facts[key], (stage.name, key)
    if "engines" in facts:
        assert stage.dp == facts["engines"]
    if "engine" in facts:
        assert stage.engine == facts["engine"]
    if "backend" in facts:
        assert stage.backend == facts["backend"]
    if "gpu_memory_utilization" in facts and stage.kind == "generate":
        assert stage.mem_fraction == pytest.approx(facts["gpu_memory_utilization"])
    if facts.get("full_shard"):
        assert stage.fsdp == stage.dp
    check_layers(stage, facts, layers)
    if (ids := gpu_ids(facts)) is not None:
        assert [d.index for d in stage.devices] == list(range(ids[0], ids[1] + 1))


@pytest.mark.parametrize("facts", FACTS, ids=IDS)
def test_cluster_and_models(facts: dict[str, Any]) -> None:
    plan = _plan(facts["id"])
    assert len(plan.cluster.nodes) == facts["nodes"]
    assert {n.num_gpus for n in plan.cluster.nodes} == {facts["gpus_per_node"]}
    actor = plan.model("actor")
    assert actor.source == facts["actor"]
    shape, found = facts["shape"], shape_of(actor.arch)
    assert {k: found[k] for k in shape} == shape
    names = {m.name for m in plan.models}
    assert ("critic" in names) == (facts["critic"] is not None)
    assert ("ref" in names) == (facts["ref"] is not None)
    assert ("reward" in names) == (facts["reward"] is not None)
    if facts["critic"] is not None:
        assert (plan.model("critic").source, plan.model("critic").head) == (facts["actor"], "value")
    if facts["reward"] is not None:
        reward = plan.model("reward")
        assert (reward.source, reward.head, reward.frozen) == (facts["reward"], "value", True)


@pytest.mark.parametrize("facts", FACTS, ids=IDS)
def test_workload(facts: dict[str, Any]) -> None:
    work = _plan(facts["id"]).workload
    assert (work.algorithm, work.mode) == (facts["algorithm"], facts["mode"])
    streamed = facts["prompts"] == "streamed"
    assert work.prompts == (facts["mini_batch_prompts"] if streamed else facts["prompts"])
    assert work.samples == facts["samples"]
    # verl's mini batch counts prompts, a plan's counts samples.
    assert work.mini_batch == facts["mini_batch_prompts"] * facts["samples"]
    assert (work.prompt_len, work.max_response) == (facts["max_prompt"], facts["max_response"])
    assert work.response_len == facts["max_response"]


@pytest.mark.parametrize("facts", FACTS, ids=IDS)
def test_stages(facts: dict[str, Any]) -> None:
    plan = _plan(facts["id"])
    layers = plan.model("actor").arch.num_layers
    _check_stage(plan.stage("actor.generate"), facts["generate"], layers)
    train = plan.stage("actor.train")
    _check_stage(train, facts["train"], layers)
    if facts["actor_micro"] is not None:
        assert train.micro_batch == facts["actor_micro"]
    assert train.max_tokens == facts["actor_max_tokens"]
    assert train.recompute == facts["recompute_actor"]
    assert (train.idle == "offload") == facts["actor_offload"]
    host = {s.name for s in train.slots if s.host}
    assert host == ({"master", "exp_avg", "exp_avg_sq"} if facts["optimizer_on_host"] else set())
    assert train.zero == (1 if train.backend == "megatron" else 0)
    logprob = plan.stage("actor.logprob")
    assert logprob.with_ == "actor.train"
    if facts["logprob_micro"] is not None:
        assert logprob.micro_batch == facts["logprob_micro"]
    if facts["critic"] is not None:
        critic = plan.stage("critic.train")
        _check_stage(critic, facts["critic"], layers)
        assert critic.recompute == facts["recompute_critic"]
        assert critic.max_tokens == facts["critic_max_tokens"]
        if facts["critic_micro"] is not None:
            assert critic.micro_batch == facts["critic_micro"]
        assert plan.stage("critic.infer").with_ == "critic.train"
    if facts["ref"] is not None:
        ref = plan.stage("ref.infer")
        assert ref.with_ == "actor.train"
        _check_stage(ref, facts["ref"], layers)
        assert ref.swap == "host"  # every one of these offloads the reference
    if facts["reward_stage"] is not None:
        reward = plan.stage("reward.infer")
        assert (reward.engine, reward.tp, reward.dp) == ("vllm", 1, facts["reward_stage"]["engines"])


@pytest.mark.parametrize("name", IDS)
def test_text_is_formatted_and_commented(name: str) -> None:
    text = _import(name).plan_text
    assert text is not None
    assert text.isascii()
    assert format_text(text, path="imported.plan").text == text
    assert "# GPU type is not in the launch" in text
    assert "response_len" in text
    assert "assumed" in next(line for line in text.splitlines() if "response_len" in line)


def test_gpu_and_nodes_replace_what_is_written() -> None:
    path = _script("verl-ppo-qwen2.5-32b")
    text = import_verl(path.read_text(), path=path.name, gpu="mi300x-192gb", nodes=2).plan_text
    assert text is not None
    plan = resolve_text(text, path="imported.plan").plan
    assert plan is not None
    assert len(plan.cluster.nodes) == 2
    assert {n.gpu.id for n in plan.cluster.nodes} == {"mi300x-192gb"}
    assert plan.stage("actor.train").dp == 16


def test_async_pools_are_apart() -> None:
    plan = _plan("verl-fullyasync-grpo-30b-96-32")
    train, generate = plan.stage("actor.train"), plan.stage("actor.generate")
    assert not set(train.devices) & set(generate.devices)
    work = plan.workload
    assert (work.staleness, work.sync_every, work.partial) == (1, 4, True)


def test_the_example_is_what_the_importer_writes() -> None:
    launch = _script("verl-ppo-qwen2-7b-rm-8k")
    text = import_verl(launch.read_text(), path=launch.name, gpu="h200-sxm-141gb").plan_text
    assert (launch.parent / "base.plan").read_text() == text


@pytest.mark.parametrize("name", ["base", "longer"])
def test_the_example_checks_clean(name: str) -> None:
    loaded = load_plan(str(_script("verl-ppo-qwen2-7b-rm-8k").parent / f"{name}.plan"))
    assert loaded.plan is not None
    # The launch has no KL term, hence no reference: that is all there is to note.
    assert {d.code for d in loaded.diagnostics} <= {"NRS3021"}
    assert check_memory(loaded.plan) == ()
