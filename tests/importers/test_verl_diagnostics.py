"""Every diagnostic of the import: its documented example, its place, and that nothing ever raises."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.arch import Lora
from nereus.ir.diagnostic import Diagnostic, Severity
from nereus.lang.api import resolve_text
from nereus.lang.catalog.entry import CodeEntry
from nereus.lang.catalog.imports import ENTRIES
from nereus.lang.importers.result import ImportResult
from nereus.lang.importers.verl import import_verl
from nereus.models.memory.state import copies

SCRIPTS = sorted((Path(__file__).resolve().parents[1] / "data" / "verl").glob("*.sh"))
RUN = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=Qwen/Qwen2.5-7B "
)
GRPO = RUN + "algorithm.adv_estimator=grpo actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
MEGATRON = GRPO + "--config-name=ppo_megatron_trainer "


def codes(result: ImportResult) -> list[str]:
    return [d.code for d in result.diagnostics]


def text_of(result: ImportResult) -> str:
    assert result.plan_text is not None, codes(result)
    return result.plan_text


def marked(diagnostic: Diagnostic) -> str:
    assert diagnostic.primary is not None
    span = diagnostic.primary.span
    return span.source.text[span.start : span.end]


@pytest.mark.parametrize("entry", ENTRIES, ids=[e.code for e in ENTRIES])
def test_documented_examples(entry: CodeEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    (path, text), *_ = entry.example.items()
    gpu = entry.command.partition("--gpu ")[2] or None
    if entry.code == "NRS2512":
        monkeypatch.setitem(sys.modules, "yaml", None)
    result = import_verl(text, path=path, gpu=gpu)
    assert codes(result) == [entry.code]
    is_error = result.diagnostics[0].severity is Severity.ERROR
    assert (result.plan_text is None) == is_error


def test_values_are_pointed_at() -> None:
    text = f"TP=two\n{GRPO} actor_rollout_ref.rollout.tensor_model_parallel_size=$TP trainer.nnodes=1.5"
    result = import_verl(text, path="a.sh")
    assert [(d.code, marked(d)) for d in result.diagnostics] == [("NRS2505", "1.5"), ("NRS2505", "$TP")]


def test_unknown_gpu_suggests_the_nearest() -> None:
    (found,) = import_verl(GRPO, path="a.sh", gpu="h200").diagnostics
    assert found.help == "did you mean `h200-sxm-141gb`?"


def test_unneeded_gaps_are_silent() -> None:
    result = import_verl(f"{GRPO} trainer.experiment_name=run_$(date +%s) data.train_files=$DATA/x", path="a.sh")
    assert codes(result) == []


def test_nodes_replace_what_the_script_does_not_know() -> None:
    result = import_verl(f"{GRPO} trainer.nnodes=$SLURM_NNODES", path="a.sh", nodes=2)
    assert codes(result) == []
    assert "node n[0-1] {  # --nodes" in text_of(result)


def test_later_keys_win_and_deletions_remove() -> None:
    text = text_of(
        import_verl(f"{GRPO} trainer.nnodes=2 ++trainer.nnodes=3 data.train_batch_size=64 ~data", path="a.sh")
    )
    assert "node n[0-2]" in text
    assert "1024" in next(line for line in text.splitlines() if "prompts" in line)


@pytest.mark.parametrize(("written", "shards"), [(-1, 8), (1, 0), (4, 4), (64, 8)])
def test_fsdp_sizes(written: int, shards: int) -> None:
    script = f"{GRPO} actor_rollout_ref.actor.fsdp_config.fsdp_size={written}"
    plan = resolve_text(text_of(import_verl(script, path="a.sh")), path="p.plan").plan
    assert plan is not None
    train = plan.stage("actor.train")
    assert (train.backend, train.tp, train.dp, train.recompute) == ("fsdp", 1, 8, "full")
    assert train.fsdp == shards


def test_ulysses_is_context_parallel() -> None:
    keys = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.actor.fsdp_config.fsdp_size=4"
    result = import_verl(f"{GRPO} {keys}", path="a.sh")
    assert codes(result) == []
    plan = resolve_text(text_of(result), path="p.plan").plan
    assert plan is not None
    train = plan.stage("actor.train")
    assert (train.cp, train.dp, train.fsdp, train.num_emus) == (2, 4, 4, 2)


@pytest.mark.parametrize(("fraction", "share"), [("", 1), (1.0, 1), (0.5, 0.5), (0, 0)])
def test_an_optimizer_partly_on_the_host(fraction: float | str, share: float) -> None:
    at = "+actor_rollout_ref.actor.optim.override_optimizer_config"
    keys = f"{at}.optimizer_cpu_offload=True" + (
        f" {at}.optimizer_offload_fraction={fraction}" if fraction != "" else ""
    )
    result = import_verl(f"{MEGATRON} {keys}", path="a.sh")
    assert codes(result) == []
    plan = resolve_text(text_of(result), path="p.plan").plan
    assert plan is not None
    weight, *others = plan.stage("actor.train").slots
    assert not weight.host
    assert {slot.host_share if slot.host else 0 for slot in others} == {share}


def test_megatron_defaults() -> None:
    plan = resolve_text(text_of(import_verl(MEGATRON, path="a.sh")), path="p.plan").plan
    assert plan is not None
    train, generate = plan.stage("actor.train"), plan.stage("actor.generate")
    assert (train.backend, train.tp, train.pp, train.zero, train.recompute) == ("megatron", 1, 1, 1, "none")
    assert generate.tp == 2
    assert train.order == "tp-cp-ep-dp-pp"


def test_reference_with_its_own_layout_has_its_own_stage() -> None:
    keys = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4"
    plan = resolve_text(text_of(import_verl(f"{MEGATRON} {keys}", path="a.sh")), path="p.plan").plan
    assert plan is not None
    ref = plan.stage("ref.infer")
    assert (ref.with_, ref.tp) == (None, 4)


def test_kl_in_reward_needs_a_reference_and_lora_does_not() -> None:
    kl = f"{GRPO} algorithm.use_kl_in_reward=True"
    assert "ref.infer" in text_of(import_verl(kl, path="a.sh"))
    result = import_verl(f"{kl} actor_rollout_ref.model.lora_rank=32", path="a.sh")
    assert codes(result) == []
    plan = resolve_text(text_of(result), path="p.plan").plan
    assert plan is not None
    assert plan.model("actor").lora == Lora(rank=32, alpha=16.0)
    assert plan.model("ref").lora is None and plan.stage("ref.infer").with_ == "actor.train"
    (trainer,) = [copy for copy in copies(plan) if copy.owner.name == "actor.train"]
    assert plan.stage("ref.infer") in trainer.users


@pytest.mark.parametrize(
    ("keys", "targets"),
    [
        ("actor_rollout_ref.model.target_modules=[v_proj,q_proj]", ("q_proj", "v_proj")),
        ("actor_rollout_ref.model.target_modules=all-linear", ()),
    ],
)
def test_targets_of_an_adapter(keys: str, targets: tuple[str, ...]) -> None:
    result = import_verl(
        f"{GRPO} actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=32 {keys}", path="a.sh"
    )
    assert codes(result) == []
    plan = resolve_text(text_of(result), path="p.plan").plan
    assert plan is not None and plan.model("actor").lora == Lora(rank=8, alpha=32.0, targets=targets)


def test_a_critic_may_have_an_adapter_too() -> None:
    script = RUN + "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 critic.ppo_micro_batch_size_per_gpu=4 "
    result = import_verl(f"{script} critic.model.path=Qwen/Qwen2.5-7B critic.model.lora_rank=8", path="a.sh")
    assert codes(result) == []
    plan = resolve_text(text_of(result), path="p.plan").plan
    assert plan is not None
    assert plan.model("critic").lora == Lora(rank=8, alpha=16.0) and plan.model("critic").head == "value"


@pytest.mark.parametrize(
    "keys",
    [
        "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.target_modules=.*_proj",
        "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B",
        "+actor_rollout_ref.model.lora.rank=8 algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.model.lora_rank=8 +actor_rollout_ref.model.exclude_modules=.*visual.*",
    ],
)
def test_adapters_that_are_not_carried_over(keys: str) -> None:
    result = import_verl(f"{GRPO} {keys}", path="a.sh")
    assert codes(result) == ["NRS2508"]
    assert "lora" not in text_of(result) and "ref.infer" not in text_of(result)


def test_old_micro_batch_key_counts_all_ranks() -> None:
    script = GRPO.replace("ppo_micro_batch_size_per_gpu=4", "ppo_micro_batch_size=64")
    plan = resolve_text(text_of(import_verl(script, path="a.sh")), path="p.plan").plan
    assert plan is not None
    assert plan.stage("actor.train").micro_batch == 8


def test_reward_model_with_its_own_pool() -> None:
    keys = "reward_model.enable=True reward_model.model.path=Llama-3.1-8B reward_model.enable_resource_pool=True "
    keys += "reward_model.nnodes=1 reward_model.n_gpus_per_node=4 reward_model.rollout.name=sglang"
    plan = resolve_text(text_of(import_verl(GRPO + keys, path="a.sh")), path="p.plan").plan
    assert plan is not None
    reward = plan.stage("reward.infer")
    assert (reward.engine, reward.tp, [str(d) for d in reward.devices]) == (
        "sglang",
        2,
        ["n1.gpu0", "n1.gpu1", "n1.gpu2", "n1.gpu3"],
    )


def test_one_step_off_shares_a_node_between_pools() -> None:
    script = GRPO.replace("verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo")
    keys = "data.train_batch_size=768 actor_rollout_ref.actor.ppo_mini_batch_size=192 trainer.n_gpus_per_node=6 "
    keys += "rollout.nnodes=1 rollout.n_gpus_per_node=2"
    plan = resolve_text(text_of(import_verl(script + keys, path="a.sh")), path="p.plan").plan
    assert plan is not None
    assert (len(plan.stage("actor.train").devices), len(plan.stage("actor.generate").devices)) == (6, 2)
    assert (plan.workload.mode, plan.workload.staleness, plan.workload.sync_every) == ("async", 1, 4)


YAML = """\
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  actor:
    strategy: megatron
    ppo_micro_batch_size_per_gpu: 2
    megatron: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 1}
  rollout:
    name: vllm
    tensor_model_parallel_size: ${actor_rollout_ref.actor.megatron.tensor_model_parallel_size}
    n: 8
algorithm: {adv_estimator: grpo}
data: {max_prompt_length: 1024, max_response_length: '${oc.select:data.missing,2048}'}
trainer: {nnodes: 1, n_gpus_per_node: 8, logger: [console]}
"""


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_resolved_configurations(form: str) -> None:
    yaml = pytest.importorskip("yaml")
    text = YAML if form == "yaml" else json.dumps(yaml.safe_load(YAML))
    result = import_verl(text, path=f"config.{form}")
    assert codes(result) == []
    plan = resolve_text(text_of(result), path="p.plan").plan
    assert plan is not None
    assert (plan.stage("actor.train").tp, plan.stage("actor.generate").tp) == (4, 4)
    assert (plan.workload.samples, plan.workload.response_len) == (8, 2048)
    assert import_verl(text, path="-").plan_text is not None  # recognised without a name, too


def test_yaml_bombs_end() -> None:
    pytest.importorskip("yaml")
    lines = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}" for i in range(1, 40)]
    for leaf in ("{x: 1}", "{}"):
        text = "\n".join(["trainer: {nnodes: 1}", *lines]).replace("{x: 1}", leaf)
        assert import_verl(text, path="bomb.yaml").plan_text is not None


def _assert_sane(result: ImportResult, text: str) -> None:
    errors = any(d.severity is Severity.ERROR for d in result.diagnostics)
    assert (result.plan_text is None) == errors
    for diagnostic in result.diagnostics:
        labels = ((diagnostic.primary,) if diagnostic.primary else ()) + diagnostic.secondary
        for label in labels:
            assert 0 <= label.span.start <= label.span.end <= len(text)


PIECES = ["$(", "$((", "${", "}", "))", ")", "(", "{", "if ", "; then ", "fi", "else", "case x in ", "esac", "done"]
PIECES += [*"\"'`;|&=+~[]#$\n\0", "for i in ", "do ", "\\\n", "&&", "||", "<<EOF\n", "[[ ", " ]]", "${X:-", "X=", "A=("]
PIECES += ["f() {", "eval ", 'bash -c "', "-1", "null", "1e400", "nan", "\ud800", "\u00e9", "9" * 20]


@pytest.mark.parametrize("seed", range(6))
def test_mutated_scripts_never_raise(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(120):
        text = rng.choice(SCRIPTS).read_text()
        for _ in range(rng.choice([1, 3, 10, 40])):
            start = rng.randrange(len(text) + 1)
            end = min(len(text), start + rng.choice([0, 0, 1, 3, 20, 200]))
            text = text[:start] + rng.choice(PIECES) * rng.choice([1, 1, 2, 60]) + text[end:]
        path = rng.choice(["a.sh", "a.yaml", "-"])
        _assert_sane(import_verl(text, path=path, nodes=rng.choice([None, 1, 100_000])), text)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=400), path=st.sampled_from(["a.sh", "a.yaml", "a.json", "-"]))
def test_random_bytes_never_raise(data: bytes, path: str) -> None:
    text = data.decode("utf-8", "replace")
    _assert_sane(import_verl(text, path=path), text)


KEYS = [
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size",
    "actor_rollout_ref.actor.strategy",
    "critic.strategy",
    "reward_model.enable",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage",
    "actor_rollout_ref.actor.megatron.override_transformer_config.account_for_loss_in_pipeline_split",
    "actor_rollout_ref.actor.use_dynamic_bsz",
    "actor_rollout_ref.model.path",
]
VALUES = [
    "0",
    "1",
    "2",
    "3",
    "27",
    "64",
    "-1",
    "0.5",
    "null",
    "True",
    "megatron",
    "fsdp2",
    "gae",
    "x y",
    "1e9",
    "[1,2]",
]
VALUES += ["Moonlight-16B-A3B", "${trainer.nnodes}", "'"]


@settings(max_examples=150, deadline=None)
@given(pairs=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)), max_size=8))
def test_any_values_never_raise(pairs: list[tuple[str, str]]) -> None:
    text = GRPO + " ".join(f'{key}="{value}"' for key, value in pairs)
    _assert_sane(import_verl(text, path="a.sh"), text)
