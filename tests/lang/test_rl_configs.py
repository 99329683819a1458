"""Public RL configurations, each stage of each row written as a plan: the degrees are those that its framework makes.

The rows state what the framework resolves (dp, expert dp, engines). Where they do not, its own formula is written here
beside the plan's result.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from published import check_layers, gpu_ids, shape_of

from nereus.ir.plan import Plan, Stage
from nereus.lang.api import pinned, placed_plan_text, resolve_text
from nereus.lang.importers.model_match import match_model
from nereus.lang.render import render
from nereus.models.presets import preset

Row = dict[str, Any]

ROWS = 28
STAGES = {
    "actor_generation": "actor.generate",
    "actor_training": "actor.train",
    "critic_training": "critic.train",
    "critic_inference": "critic.infer",
    "reference_inference": "ref.infer",
    "reward_inference": "reward.infer",
}


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> list[Row]:
    path: Path = request.getfixturevalue("shared") / "reference" / "rl_configs.json"
    if not path.is_file():
        pytest.skip("no rl_configs.json")
    found: list[Row] = json.loads(path.read_text())
    assert len(found) == ROWS
    return found


# -- rows as plans


def model_names(row: Row) -> tuple[str, str]:
    """Presets of the actor and of the reward model."""
    if row["model_shape"] is None:  # any size of a family
        return "llama-3.2-1b", "llama-3.2-1b"
    first, _, second = row["model"].partition(";")
    actor = match_model(re.split(r"[(,]", first)[0].strip()).preset
    assert actor is not None, row["model"]
    words = re.sub(r"^(reward model|LLM judge)", "", second.strip()).split("(")[0].strip()
    reward = match_model(words).preset if words and words.startswith(("Skywork", "Fsfair", "Llama", "Qwen")) else actor
    return actor, reward or "llama-3.1-8b"


def devices(row: Row, facts: Row, offset: int) -> str:
    size = row["cluster"]["gpus_per_node"]
    first, last = offset, offset + facts["gpus"] - 1
    first, last = gpu_ids(facts) or (first, last)
    words = []
    for node in range(row["cluster"]["nodes"]):
        a, b = max(first - node * size, 0), min(last - node * size, size - 1)
        if a <= b:
            words.append(f"n{node}" if (a, b) == (0, size - 1) else f"n{node}.gpu[{a}-{b}]")
    return f"[{', '.join(words)}]"


def written(row: Row, key: str, offset: int) -> str:
    """One stage of a row in the plan language."""
    facts, actor = row["stages"][key], row["stages"]["actor_training"]
    keys = [f"on = {devices(row, facts, offset)}"]
    attention_dp = facts.get("dp_attention", 1)  # SGLang: tp_size counts the attention's replicas too
    keys.append(f"tp = {facts['tp'] // attention_dp}")
    keys += [f"{name} = {facts[name]}" for name in ("pp", "cp", "ep", "etp") if name in facts]
    backend = facts.get("backend", "").split("+")[0].rstrip("2")
    trains = key.endswith("training")
    if backend:
        keys.append(f"backend = {backend}")
    if "engine" in facts:
        keys.append(f"engine = {facts['engine']}")
    if "zero_stage" in facts:
        keys.append(f"zero = {facts['zero_stage']}")
    elif backend == "megatron" and trains:
        keys.append("zero = 1")  # the distributed optimizer, on by default in all of these
    layers = facts.get("pp_layers") or (actor.get("pp_layers") if facts["pp"] == actor["pp"] else None)
    if layers:
        keys.append(f"pp_split = ({', '.join(map(str, layers))})")
    elif facts.get("vpp"):  # 94 layers, embedding and loss: 96 units over 48 chunks
        chunks = [2] * (facts["pp"] * facts["vpp"])
        chunks[0] = chunks[-1] = 1
        keys += [f"vp = {facts['vpp']}", f"pp_split = ({', '.join(map(str, chunks))})"]
    elif row["id"] == "areal-grpo-qwen3-235b-agent" and facts["pp"] > 1:
        keys.append("pp_split = (7, rest, 7)")
    batch = row["batch"]
    micro = [batch.get(k) for k in ("actor_micro_per_gpu", "micro_per_rank", "train_micro") if k in batch]
    if trains and micro and not batch.get("dynamic_batch"):
        keys.append(f"micro_batch = {batch.get('critic_micro_per_gpu', micro[0]) if key[0] == 'c' else micro[0]}")
    return f"stage {STAGES[key]} {{ {'  '.join(keys)} }}"


def workload(row: Row) -> tuple[int, int, int]:
    """prompts, samples per prompt, samples of an optimizer update, in the units of the plan language."""
    batch = row["batch"]
    samples = batch.get("samples_per_prompt", 1)
    prompts = batch["prompts_per_step"]
    if prompts == "streamed":
        prompts = batch["ppo_mini_batch_prompts"]
    total = prompts * samples
    if "ppo_mini_batch_prompts" in batch:
        return prompts, samples, batch["ppo_mini_batch_prompts"] * samples
    if "train_batch_samples" in batch:
        return prompts, samples, min(batch["train_batch_samples"], total)
    if "grad_accumulation" in batch:
        dp = row["stages"]["actor_training"]["dp"]
        return prompts, samples, min(batch["train_micro"] * batch["grad_accumulation"] * dp, total)
    return prompts, samples, total // (batch.get("minibatches") or batch.get("optimizer_steps_per_rollout") or 1)


def plan_text(row: Row) -> str:
    cluster, stages = row["cluster"], row["stages"]
    actor, reward = model_names(row)
    prompts, samples, mini_batch = workload(row)
    lines = [
        f'cluster {{ node n[0-{cluster["nodes"] - 1}] {{ gpus = {cluster["gpus_per_node"]} x "h100-sxm-80gb" }} }}',
        f'model actor = "{actor}"',
        "model ref = actor { frozen = true }",
        "model critic = actor { head = value }",
        f'model reward = "{reward}" {{ head = value  frozen = true }}',
        f"workload {{ algorithm = grpo  prompts = {prompts}  samples = {samples}  mini_batch = {mini_batch} }}",
    ]
    apart = stages["actor_training"]["gpus"] + stages["actor_generation"]["gpus"] == cluster["gpus"]
    for key in STAGES:
        if isinstance(stages.get(key), dict):
            offset = stages["actor_training"]["gpus"] if apart and key == "actor_generation" else 0
            lines.append(written(row, key, offset))
    return "\n".join(lines)


# -- what the frameworks make of them


def check(stage: Stage, facts: Row, plan: Plan) -> None:
    world = facts["gpus"]
    assert len(stage.devices) == world
    model = plan.model(stage.model)
    ep, etp = facts.get("ep", 1), facts.get("etp", facts["tp"] if facts.get("ep", 1) == 1 else 1)
    if "engine" in facts:
        assert stage.num_emus == facts["engines"] == world // (facts["tp"] * facts["pp"])
        assert stage.unit_dp == facts.get("dp_attention", 1)
        assert stage.dp == stage.num_emus * stage.unit_dp
    elif "backend" in facts:
        assert stage.dp == facts["dp"] == world // (facts["tp"] * facts["pp"] * facts["cp"])
        if facts["backend"] == "megatron" and not stage.is_train:
            # Nothing is sharded: a replica is closed under its model and its expert ranks.
            assert stage.num_emus == world // (facts["pp"] * math.lcm(facts["tp"] * facts["cp"], ep * etp))
        else:
            assert stage.num_emus == 1  # FSDP, ZeRO, the distributed optimizer shard over all of dp
    else:
        assert stage.dp == stage.num_emus == facts["dp"]
    if model.arch.moe is not None:
        assert (stage.ep, stage.etp) == (ep, etp)
        assert stage.expert_dp == world // (etp * ep * facts["pp"])
        assert stage.expert_dp == facts.get("expert_dp", stage.expert_dp)
    check_layers(stage, facts, model.arch.num_layers)
    if "vpp" in facts:
        assert len(stage.chunks) == stage.pp * facts["vpp"] and set(stage.pp_split) == {11, 12}


@pytest.mark.parametrize("number", range(ROWS))
def test_degrees_are_those_of_the_framework(rows: list[Row], number: int) -> None:
    row = rows[number]
    text = plan_text(row)
    result = resolve_text(text)
    assert result.plan is not None, f"{row['id']}\n{text}\n{render(result.diagnostics, color=False)}"
    plan = result.plan
    for key, name in STAGES.items():
        if isinstance(row["stages"].get(key), dict):
            check(plan.stage(name), row["stages"][key], plan)
    again = resolve_text(placed_plan_text(plan))
    assert again.plan == pinned(plan), render(again.diagnostics, color=False)


@pytest.mark.parametrize("number", range(ROWS))
def test_the_preset_has_the_published_shape(rows: list[Row], number: int) -> None:
    row = rows[number]
    shape = row["model_shape"]
    if shape is None:
        return
    found = shape_of(preset(model_names(row)[0]))
    assert {key: found[key] for key in shape} == shape
