"""Adapters as logical tensors, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.arches import archs, loras
from models.sample_plans import cluster, devices, joined, model, stage

from nereus.ir.arch import Arch, Lora
from nereus.ir.plan import Model, Plan, Slot, Workload
from nereus.ir.tensor import LogicalTensor
from nereus.models.lora import is_linear, linear_kinds
from nereus.models.memory.state import copies, gradient_bytes, keeper_of, slot_bytes
from nereus.models.memory.steady import steady_state
from nereus.models.presets import preset
from nereus.models.tensors import logical_tensors, num_params

LORA = Lora(rank=16, alpha=32)


def _cut(tensor: LogicalTensor, whole: np.ndarray[Any, Any], degree: int, rank: int) -> np.ndarray[Any, Any]:
    if tensor.cut is None:
        return whole
    lo, hi = tensor.cut.interval(tensor.shape[tensor.cut.dim], degree, rank)
    return whole.take(range(lo, hi), axis=tensor.cut.dim)


def test_parameters_of_an_8b_adapter_as_peft_counts_them() -> None:
    # r = 16 on q and v of Llama-3.1-8B: 32 x (16 x (4096 + 4096) + 16 x (4096 + 1024)).
    arch = preset("llama-3.1-8b")
    lora = Lora(rank=16, alpha=32, targets=("q_proj", "v_proj"))
    assert num_params(arch, "lm", lora, trainable=True) == 6_815_744
    assert num_params(arch, "lm", lora) == num_params(arch) + 6_815_744
    # ... and on all linears: 41,943,040.
    assert num_params(arch, "lm", LORA, trainable=True) == 41_943_040


def test_names_shapes_and_cuts() -> None:
    found = {t.name: t for t in logical_tensors(preset("llama-3.1-8b"), "lm", LORA)}
    attention, mlp = "model.layers.3.self_attn", "model.layers.3.mlp"
    assert found[f"{attention}.k_proj.lora_A.weight"].shape == (16, 4096)
    assert found[f"{attention}.k_proj.lora_A.weight"].cut is None
    assert found[f"{attention}.k_proj.lora_B.weight"].shape == (1024, 16)
    assert found[f"{attention}.k_proj.lora_B.weight"].cut == found[f"{attention}.k_proj.weight"].cut
    assert found[f"{mlp}.down_proj.lora_A.weight"].cut == found[f"{mlp}.down_proj.weight"].cut
    assert found[f"{mlp}.down_proj.lora_B.weight"].cut is None
    assert not any(found[name].trainable for name in (f"{attention}.k_proj.weight", "model.norm.weight"))


def test_the_same_tensors_are_the_same_object() -> None:
    arch = preset("qwen3-8b")
    assert logical_tensors(arch) is logical_tensors(arch, "lm", None)
    assert logical_tensors(arch, "lm", LORA) is logical_tensors(arch, lora=Lora(rank=16, alpha=32))


def test_a_value_head_is_trained_whole() -> None:
    score = next(t for t in logical_tensors(preset("qwen3-8b"), "value", LORA) if t.name == "score.weight")
    assert score.trainable


@settings(max_examples=60, deadline=None)
@given(arch=archs(), data=st.data())
def test_cut_factors_multiply_to_the_cut_of_the_product(arch: Arch, data: st.DataObject) -> None:
    lora = data.draw(loras(linear_kinds(logical_tensors(arch))))
    tensors = {t.name: t for t in logical_tensors(arch, "lm", lora)}
    assert [t for t in tensors.values() if "lora" not in t.name] == [
        replace(t, trainable=False) for t in logical_tensors(arch)
    ]
    random = np.random.default_rng(0)
    adapted = 0
    for base in logical_tensors(arch):
        module = base.name.removesuffix(".weight")
        a, b = tensors.get(f"{module}.lora_A.weight"), tensors.get(f"{module}.lora_B.weight")
        wanted = is_linear(base) and (not lora.targets or base.name.split(".")[-2] in lora.targets)
        assert (a is not None) == (b is not None) == wanted
        if a is None or b is None or (base.expert or 0) > 0:
            continue
        adapted += 1
        assert (a.layer, a.expert) == (b.layer, b.expert) == (base.layer, base.expert)
        assert a.trainable and b.trainable
        whole_a, whole_b = random.integers(-9, 9, a.shape), random.integers(-9, 9, b.shape)
        degrees = [d for d in (1, 2, 3, 4, 8) if base.cut is None or base.cut.allows(d)]
        degree = data.draw(st.sampled_from(degrees))
        for rank in range(degree):
            # A row-parallel rank multiplies its columns by its part of A; a column-parallel one makes its rows with B.
            local = _cut(b, whole_b, degree, rank) @ _cut(a, whole_a, degree, rank)
            assert (local == _cut(base, whole_b @ whole_a, degree, rank)).all()
    assert adapted or not linear_kinds(logical_tensors(arch))


# -- memory


def _plan(*, ref_lora: Lora | None = None, ref_slots: tuple[Slot, ...] | None = None, actor_lora: Lora | None) -> Plan:
    actor = model("actor", "llama-3.1-8b", lora=actor_lora)
    ref: Model = replace(actor, name="ref", base="actor", frozen=True, lora=ref_lora)
    train = stage(actor, "train", devices(0, 0), tp=2, backend="megatron", optimizer="adam")
    infer = joined(ref, "infer", train)
    if ref_slots is not None:
        infer = replace(infer, slots=ref_slots)
    return Plan(
        cluster=cluster("h100-sxm-80gb", 1), models=(actor, ref), workload=Workload(prompts=8), stages=(train, infer)
    )


def test_only_adapters_have_optimizer_state_and_gradients() -> None:
    full, adapted = (copies(_plan(actor_lora=lora))[0] for lora in (None, LORA))
    slots = {slot.name: slot for slot in adapted.slots}
    # Column-parallel: A whole, B halved; row-parallel (o, down): A halved, B whole.
    local = 0
    for t in logical_tensors(adapted.model.arch, "lm", LORA):
        if t.trainable:
            local += t.numel // (1 if t.cut is None else 2)
    assert slot_bytes(adapted, slots["exp_avg"], 0) == 4 * local
    assert slot_bytes(adapted, slots["master"], 0) == 4 * local
    assert gradient_bytes(adapted, 0) == 4 * local
    assert slot_bytes(adapted, slots["weight"], 0) - slot_bytes(full, slots["weight"], 0) == 2 * local


def test_reference_without_the_adapter_is_no_second_copy() -> None:
    plan = _plan(actor_lora=LORA)
    train, infer = plan.stages
    (only,) = copies(plan)
    assert only.users == (train, infer) and only.model.name == "actor"
    assert keeper_of(plan, infer) == "actor"
    report = steady_state(plan)
    alone = steady_state(replace(plan, stages=(train,)))
    assert report.worst("actor.train").need_bytes == alone.worst("actor.train").need_bytes


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("nothing to share: the actor trains its weights", {"actor_lora": None}),
        ("it has an adapter of its own", {"actor_lora": LORA, "ref_lora": LORA}),
        ("another dtype", {"actor_lora": LORA, "ref_slots": (Slot(name="weight", dtype="fp32"),)}),
    ],
)
def test_otherwise_it_is_one(case: str, options: dict[str, Any]) -> None:
    assert [c.model.name for c in copies(_plan(**options))] == ["actor", "ref"], case
