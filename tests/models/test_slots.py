"""State per parameter by default."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from models.arches import archs
from models.sample_plans import cluster, devices, model, stage

from nereus.ir.arch import Arch
from nereus.ir.plan import Plan, Workload
from nereus.models.memory.state import copies, slot_bytes
from nereus.models.presets import preset
from nereus.models.slots import default_slots, slot_applies
from nereus.models.tensors import logical_tensors


def _bytes(**options: object) -> dict[str, int]:
    return {slot.name: slot.element_bytes for slot in default_slots(**options)}  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "Adam", None])
def test_adam_keeps_fourteen_bytes_beside_gradients(optimizer: str | None) -> None:
    slots = _bytes(trains=True, precision="bf16", optimizer=optimizer)
    assert slots == {"weight": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}


def test_other_cases() -> None:
    assert _bytes(trains=True, precision="bf16", optimizer="sgd") == {"weight": 2, "master": 4}
    assert _bytes(trains=True, precision="fp32", optimizer="adam") == {"weight": 4, "exp_avg": 4, "exp_avg_sq": 4}
    assert _bytes(trains=False, precision="bf16", optimizer="adam") == {"weight": 2}
    with pytest.raises(ValueError, match="lyon"):
        default_slots(trains=True, precision="bf16", optimizer="lyon")


@pytest.mark.parametrize("name", ["adafactor", "AdamW8bit", "shampoo"])
def test_state_that_is_not_shaped_like_the_parameters_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' cannot be described: its"):
        default_slots(trains=True, precision="bf16", optimizer=name)


def test_lion_and_muon() -> None:
    assert _bytes(trains=True, precision="bf16", optimizer="lion") == {"weight": 2, "master": 4, "exp_avg": 4}
    muon = _bytes(trains=True, precision="fp32", optimizer="muon")
    assert muon == {"weight": 4, "momentum_buffer": 4, "exp_avg": 4, "exp_avg_sq": 4}


@settings(max_examples=40, deadline=None)
@given(arch=archs())
def test_muon_keeps_one_kind_of_state_per_tensor(arch: Arch) -> None:
    for tensor in logical_tensors(arch):
        has = {s for s in ("weight", "momentum_buffer", "exp_avg", "exp_avg_sq") if slot_applies(s, tensor, "muon")}
        if tensor.name.endswith("e_score_correction_bias"):
            assert has == {"weight"}
        elif tensor.name.endswith(("norm.weight", ".bias", "embed_tokens.weight", "lm_head.weight")):
            assert has == {"weight", "exp_avg", "exp_avg_sq"}
        else:
            assert has == {"weight", "momentum_buffer"} and len(tensor.shape) == 2


def test_buffers_have_a_weight_only() -> None:
    tensors = logical_tensors(preset("deepseek-v3"))
    bias = [t for t in tensors if not slot_applies("exp_avg", t, "adam")]
    assert len(bias) == 58 and all(t.name.endswith("mlp.gate.e_score_correction_bias") for t in bias)
    assert all(slot_applies("weight", t, "adam") and not slot_applies("master", t, "adam") for t in bias)


def test_muon_memory_counts_each_tensor_once() -> None:
    actor = model("actor", "qwen3-0.6b")
    train = stage(actor, "train", devices(0, 0), tp=2, optimizer="muon")
    plan = Plan(cluster=cluster("h100-sxm-80gb", 1), models=(actor,), workload=Workload(prompts=8), stages=(train,))
    (copy,) = copies(plan)
    size = {slot.name: slot_bytes(copy, slot, 0) for slot in copy.slots}
    assert size["momentum_buffer"] + size["exp_avg"] == size["master"]
    assert size["exp_avg"] == size["exp_avg_sq"] > 0
