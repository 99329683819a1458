"""Buckets for receivers that load each as it comes: every tensor once, in order, no group cut, none too large."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.arches import archs, loras

from nereus.ir.arch import Arch
from nereus.models.buckets import Group, group_name, groups_of, model_bytes, model_groups, pack
from nereus.models.fp8 import has_scale, scale_name
from nereus.models.lora import linear_kinds
from nereus.models.naming.base import Where
from nereus.models.naming.hf import HfNaming
from nereus.models.presets import preset
from nereus.models.tensors import logical_tensors, num_params


@settings(max_examples=100, deadline=None)
@given(arch=archs(), data=st.data())
def test_every_tensor_once_no_group_cut_and_the_bound_kept(arch: Arch, data: st.DataObject) -> None:
    fp8 = data.draw(st.booleans())
    adapted = data.draw(st.booleans())
    lora = data.draw(loras(linear_kinds(logical_tensors(arch)))) if adapted else None
    sizes = model_bytes(arch, lora=lora, fp8=fp8)
    groups = model_groups(arch, lora=lora, fp8=fp8)
    limit = data.draw(st.integers(1, 2 * sum(sizes.values())))
    buckets = pack(groups, sizes, limit)

    sent = [name for bucket in buckets for name in bucket.tensors]
    assert sorted(sent) == sorted(sizes) and len(set(sent)) == len(sent)
    assert tuple(group for bucket in buckets for group in bucket.groups) == groups  # whole, and in their order
    place = {name: i for i, name in enumerate(sizes)}
    firsts = [place[group.tensors[0]] for group in groups]
    assert firsts == sorted(firsts)
    assert all([place[n] for n in g.tensors] == sorted(place[n] for n in g.tensors) for g in groups)
    for bucket in buckets:
        assert bucket.num_bytes == sum(sizes[name] for name in bucket.tensors)
        assert bucket.oversized == (bucket.num_bytes > limit)
        assert not bucket.oversized or len(bucket.groups) == 1
    for before, after in pairwise(buckets):  # no bucket ends early
        assert before.num_bytes + sum(sizes[name] for name in after.groups[0].tensors) > limit


@settings(max_examples=60, deadline=None)
@given(arch=archs(), fp8=st.booleans())
def test_what_a_receiver_fuses_is_one_group(arch: Arch, fp8: bool) -> None:
    of = {name: group.name for group in model_groups(arch, fp8=fp8) for name in group.tensors}
    for tensor in logical_tensors(arch):
        name = tensor.name
        for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa")):
            if f".{parts[0]}." in name:
                others = [name.replace(parts[0], part) for part in parts]
                assert {of[other] for other in others if other in of} == {of[name]}
        if name.endswith(".bias"):
            assert of[name] == of[name.removesuffix("bias") + "weight"]
        if fp8 and has_scale(tensor):
            assert of[scale_name(name)] == of[name]
        if tensor.expert is not None:
            same = [t.name for t in logical_tensors(arch) if t.layer == tensor.layer and t.expert is not None]
            assert {of[other] for other in same} == {of[name]}
    layers = {
        group.name: {n.split(".")[2] for n in group.tensors} for group in model_groups(arch) if "layers." in group.name
    }
    assert all(len(found) == 1 for found in layers.values())


def test_the_groups_of_a_layer() -> None:
    mine = [g for g in model_groups(preset("qwen2.5-0.5b")) if g.name.startswith("model.layers.1.")]
    prefix = "model.layers.1."
    assert [(g.name.removeprefix(prefix), [n.removeprefix(prefix) for n in g.tensors]) for g in mine] == [
        ("input_layernorm", ["input_layernorm.weight"]),
        ("self_attn.qkv_proj", [f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")]),
        ("self_attn.o_proj", ["self_attn.o_proj.weight"]),
        ("post_attention_layernorm", ["post_attention_layernorm.weight"]),
        ("mlp.gate_up_proj", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        ("mlp.down_proj", ["mlp.down_proj.weight"]),
    ]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.0.mlp.experts.7.down_proj.weight", "model.layers.0.mlp.experts"),
        ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts"),  # transformers 5
        ("model.layers.0.block_sparse_moe.experts.1.w3.weight", "model.layers.0.block_sparse_moe.experts"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "model.layers.0.mlp.shared_experts.gate_up_proj"),
        ("module._orig_mod.model.norm.weight", "model.norm"),
        ("model.layers.0.self_attn.v_proj.lora_B.weight", "model.layers.0.self_attn.qkv_proj.lora"),
        ("model.layers.0.mlp.experts.1.up_proj.lora_A.weight", "model.layers.0.mlp.experts.lora"),
        ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts"),
        ("model.layers.0.mlp.gate.e_score_correction_bias", "model.layers.0.mlp.experts"),
        ("score.weight", "score"),
        ("alone", "alone"),
    ],
)
def test_names_of_other_writers(name: str, group: str) -> None:
    assert group_name(name) == group


def test_modules_of_transformers_have_the_groups_of_the_checkpoint() -> None:
    arch = preset("qwen3-30b-a3b")
    fused = groups_of(HfNaming(arch=arch).parameters(Where()))
    assert [group.name for group in fused] == [group.name for group in model_groups(arch)]


def test_bytes_and_the_experts_of_a_layer_that_travel_alone() -> None:
    arch = preset("qwen3-30b-a3b")
    sizes = model_bytes(arch)
    assert sum(sizes.values()) == 2 * num_params(arch)
    buckets = pack(model_groups(arch), sizes, 1 << 30)
    over = [bucket for bucket in buckets if bucket.oversized]
    assert [bucket.groups[0].name for bucket in over] == [f"model.layers.{n}.mlp.experts" for n in range(48)]
    assert {bucket.num_bytes for bucket in over} == {(128 * 3 * 768 + 128) * 2048 * 2}
    assert sum(model_bytes(arch, fp8=True).values()) < 0.55 * sum(sizes.values())


def test_what_cannot_be_packed_is_refused() -> None:
    groups = (Group(name="a", tensors=("a.weight", "a.bias")),)
    with pytest.raises(ValueError, match=r"a\.bias: size not given"):
        pack(groups, {"a.weight": 4}, 10)
    with pytest.raises(ValueError, match="0 bytes holds nothing"):
        pack(groups, {"a.weight": 4, "a.bias": 2}, 0)
    with pytest.raises(ValueError, match=r"a\.weight is listed twice"):
        groups_of(["a.weight", "a.bias", "a.weight"])
    assert pack((), {}, 10) == ()
