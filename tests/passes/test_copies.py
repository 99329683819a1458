"""Which copies count at a boundary, and changes that must not pass unseen. Plans as text; each was a fault once."""

from __future__ import annotations

import pytest

from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.plan import Plan
from nereus.lang.api import resolve_text
from nereus.passes.compiled import Transition
from nereus.passes.pipeline import compile_transition

CLUSTER = 'cluster { node n[0-1] { gpus = 4 x "h200-sxm-141gb" } }\n'
ACTOR = 'model actor = "qwen2.5-3b"\n'
SYNC = "workload { algorithm = grpo  prompts = 64 }\n"
ASYNC = "workload { algorithm = grpo  prompts = 64  mode = async }\n"


def plan(*stages: str, head: str = CLUSTER + ACTOR + SYNC) -> Plan:
    result = resolve_text(head + "\n".join(stages))
    assert result.plan is not None, result.diagnostics
    return result.plan


def codes(old: Plan, new: Plan) -> list[str]:
    with pytest.raises(DiagnosticError) as caught:
        compile_transition(old, new)
    return [d.code for d in caught.value.diagnostics]


def slots(transition: Transition, stage: str) -> set[str]:
    found = transition.new_holdings.find(stage)
    return {slot.name for slot in found.slots} if found is not None else set()


@pytest.mark.parametrize(
    "host",
    [
        "stage actor.logprob {{ on = {on}  tp = {tp} }}",
        "stage actor.generate {{ on = {on}  tp = {tp}  engine = vllm  kv_cache = 8 GiB  idle = offload }}",
    ],
)
def test_a_trainer_in_another_stages_processes_keeps_its_optimizer_state(host: str) -> None:
    kind = host.split()[1]
    trainer = f"stage actor.train {{ with = {kind}  optimizer = adam }}"
    old = plan(host.format(on="n0", tp=2), trainer)
    new = plan(host.format(on="n1", tp=4), trainer)
    transition = compile_transition(old, new)
    assert slots(transition, "actor.train") == {"weight", "master", "exp_avg", "exp_avg_sq"}
    # Master and both moments, 12 bytes a parameter, once into n1, exchanged inside where tensors are replicated.
    params = sum(t.numel for t in transition.new_holdings.sets[0].tensors)
    assert transition.certificate.node_in_bytes_max == 12 * params


def test_a_separate_copy_of_a_model_that_trains_is_no_source_in_sync_mode() -> None:
    trainer = "stage actor.train { on = n0  tp = 2  recompute = full  optimizer = sgd }"
    model = 'model actor = "qwen2.5-3b" { precision = fp32 }\n'
    old = plan("stage actor.logprob { on = n1  tp = 2 }", trainer, head=CLUSTER + model + SYNC)
    lost = CLUSTER.replace("} }", "}  remove = n0 }")
    new = plan(
        "stage actor.logprob { on = n1  tp = 2 }",
        trainer.replace("n0", "n1"),
        head=lost + model + SYNC,
    )
    assert "NRS5001" in codes(old, new)


def test_guests_of_one_foreign_model_share_a_copy() -> None:
    head = CLUSTER + ACTOR + 'model critic = "qwen2.5-3b" { head = value }\n' + SYNC.replace("grpo", "ppo")
    stages = ("stage actor.train { on = n0  tp = 4 }", "stage critic.train { with = actor.train }")
    one = plan(*stages, "stage critic.infer { with = critic.train }", head=head)
    two = plan(*stages, "stage critic.infer { with = actor.train }", head=head)
    transition = compile_transition(one, two)
    assert [s.stage for s in transition.new_holdings.sets] == ["actor.train", "critic.train"]
    assert transition.certificate.moved_bytes == 0


def test_an_asynchronous_engine_changes_on_its_own_gpus() -> None:
    trainer = "stage actor.train { on = n0  tp = 2  zero = 1 }"
    engine = "stage actor.generate {{ on = n1  tp = {}  engine = vllm  mem = 0.85 }}"
    head = CLUSTER + ACTOR + ASYNC
    transition = compile_transition(
        plan(engine.format(2), trainer, head=head), plan(engine.format(1), trainer, head=head)
    )
    assert transition.certificate.safe


def test_slots_of_another_dtype_are_other_slots() -> None:
    head = CLUSTER + ACTOR + ASYNC
    engine = "stage actor.generate {{ on = n1  tp = 2  kv_cache = 8 GiB  state {{ weight = {} }} }}"
    trainer = "stage actor.train {{ on = n0  tp = {} }}"
    old = plan(engine.format("fp8"), trainer.format(2), head=head)
    assert codes(old, plan(engine.format("bf16"), trainer.format(2), head=head)) == ["NRS5005"]
    transition = compile_transition(old, plan(engine.format("fp8"), trainer.format(4), head=head))
    assert transition.certificate.safe and not transition.diff.fresh


@pytest.mark.parametrize(
    ("before", "after", "note"),
    [
        ("backend = megatron", "backend = deepspeed", "backend megatron -> deepspeed"),
        ("", "sp = false", "sp true -> false"),
        ("", "state { exp_avg = fp32 @host }", "state exp_avg fp32 -> fp32 @host"),
        ("", "state { momentum = fp32 }", "state momentum none -> fp32"),
    ],
)
def test_every_setting_that_differs_is_said(before: str, after: str, note: str) -> None:
    stage = "stage actor.train {{ on = n0  tp = 2  order = tp-cp-pp-dp  {} }}"
    transition = compile_transition(plan(stage.format(before)), plan(stage.format(after)), allow_destroy=True)
    (change,) = transition.changes
    assert change.changed
    assert note in change.notes


def test_destroyed_state_is_a_difference() -> None:
    stage = "stage actor.train {{ on = n0  tp = 2  {} }}"
    old, new = plan(stage.format("")), plan(stage.format("state { master = none }"))
    assert codes(old, new) == ["NRS5007"]
    transition = compile_transition(old, new, allow_destroy=True)
    assert transition.certificate.mode != "none"


def test_another_machine_under_a_known_name_is_refused() -> None:
    old = plan("stage actor.train { on = n0  tp = 4 }")
    new = plan(
        "stage actor.train { on = n0  tp = 4 }",
        head=CLUSTER.replace("h200", "h100").replace("141", "80") + ACTOR + SYNC,
    )
    assert codes(old, new) == ["NRS5008"] * 2


def test_another_source_of_the_same_shape_is_warned_of() -> None:
    stage = "stage actor.train { on = n0  tp = 4 }"
    models = ['model actor = "llama-3-8b"\n', 'model actor = "llama-3.1-8b"\n']
    old, new = (plan(stage, head=CLUSTER + model + SYNC) for model in models)
    assert [d.code for d in compile_transition(old, new).warnings] == ["NRS5009"]


def test_copies_inside_host_memory_take_time() -> None:
    stage = "stage actor.train {{ backend = fsdp  on = n0  fsdp = {}  idle = offload }}"
    transition = compile_transition(plan(stage.format(4)), plan(stage.format(2)))
    certificate = transition.certificate
    assert certificate.moved_bytes == 0 and certificate.local_bytes > 0
    assert certificate.transfer_s >= certificate.bound_transfer_s > 0.05
