"""vLLM names -> segments, without vLLM: numbers that went wrong elsewhere, fused rows, kv copies, padding, experts,
latent attention, block scales and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.arches import archs

from nereus.ir.arch import Arch, Mla, Moe
from nereus.ir.fragment import Segment
from nereus.ir.tensor import CutError, matrix_shape
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.naming.vllm import VllmNaming
from nereus.models.presets import preset
from nereus.models.tensors import logical_tensors

DENSE = Arch(family="llama", num_layers=2, hidden=64, num_heads=8, num_kv_heads=2, head_dim=8, ffn=96, vocab=250)
EXPERTS = replace(DENSE, family="qwen3_moe", moe=Moe(num_experts=4, experts_per_token=2, expert_ffn=48))
LATENT = Arch(
    family="deepseek_v3",
    num_layers=2,
    hidden=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=192,
    ffn=512,
    vocab=256,
    moe=Moe(
        num_experts=4,
        experts_per_token=2,
        expert_ffn=128,
        num_shared_experts=2,
        shared_expert_ffn=256,
        first_dense_layers=1,
        router_bias=True,
    ),
    mla=Mla(q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)


def rows(segments: tuple[Segment, ...]) -> list[tuple[str, int, int, int]]:
    """(last component but one of the name, first row, end row, row in the parameter)."""
    return [(s.tensor.split(".")[-2], s.row_lo, s.row_hi, s.at_row) for s in segments]


def test_engine_rows_of_qwen25_7b_are_q_then_k_then_v() -> None:
    naming = VllmNaming(arch=preset("qwen2.5-7b"))
    where = Where(tp=2, tp_rank=0)
    found = naming.segments("model.layers.0.self_attn.qkv_proj.weight", (2304, 3584), where)
    assert rows(found) == [("q_proj", 0, 1792, 0), ("k_proj", 0, 256, 1792), ("v_proj", 0, 256, 2048)]
    found = naming.segments("model.layers.0.self_attn.qkv_proj.bias", (2304,), where)
    assert rows(found) == [("q_proj", 0, 1792, 0), ("k_proj", 0, 256, 1792), ("v_proj", 0, 256, 2048)]
    assert {(s.col_lo, s.col_hi) for s in found} == {(0, 1)}


@pytest.mark.parametrize("rank", range(8))
def test_two_kv_heads_are_copied_to_eight_ranks(rank: int) -> None:
    arch = replace(DENSE, hidden=8192, num_heads=64, num_kv_heads=2, head_dim=128)
    where = Where(tp=8, tp_rank=rank)
    found = VllmNaming(arch=arch).segments("model.layers.0.self_attn.qkv_proj.weight", (1280, 8192), where)
    kv = rank // 4 * 128
    assert rows(found) == [
        ("q_proj", rank * 1024, (rank + 1) * 1024, 0),
        ("k_proj", kv, kv + 128, 1024),
        ("v_proj", kv, kv + 128, 1152),
    ]


def test_gate_and_up_of_llama31_8b_are_cut_each() -> None:
    naming = VllmNaming(arch=preset("llama-3.1-8b"))
    found = naming.segments("model.layers.31.mlp.gate_up_proj.weight", (7168, 4096), Where(tp=4, tp_rank=1))
    assert rows(found) == [("gate_proj", 3584, 7168, 0), ("up_proj", 3584, 7168, 3584)]


def test_vocabulary_is_padded_to_64_and_padding_is_nothing() -> None:
    arch = replace(DENSE, vocab=151936)
    (found,) = VllmNaming(arch=arch).segments("model.embed_tokens.weight", (18992, 64), Where(tp=8, tp_rank=1))
    assert (found.row_lo, found.row_hi, found.at_row) == (18992, 37984, 0)
    naming = VllmNaming(arch=DENSE)  # 250 rows, 256 with padding
    assert naming.parameters(Where(tp=4, tp_rank=3))["lm_head.weight"] == (64, 64)
    (found,) = naming.segments("lm_head.weight", (64, 64), Where(tp=4, tp_rank=3))
    assert (found.row_lo, found.row_hi) == (192, 250)
    assert VllmNaming(arch=replace(DENSE, vocab=120)).segments("lm_head.weight", (32, 64), Where(tp=4, tp_rank=3)) == (
        Segment(tensor="lm_head.weight", row_lo=96, row_hi=120, col_lo=0, col_hi=64, at_row=0),
    )
    few = VllmNaming(arch=replace(DENSE, vocab=60))
    assert few.segments("lm_head.weight", (8, 64), Where(tp=8, tp_rank=7))[0].row_hi == 60
    none = VllmNaming(arch=replace(DENSE, num_heads=32, num_kv_heads=2, vocab=60))
    assert none.segments("lm_head.weight", (2, 64), Where(tp=32, tp_rank=31)) == ()  # padding only


def test_vocabulary_that_a_degree_cannot_cut_is_refused() -> None:
    arch = replace(DENSE, num_heads=6, num_kv_heads=6, vocab=151552)
    with pytest.raises(UnknownParameter, match="tp=6"):
        VllmNaming(arch=arch).segments("lm_head.weight", (25259, 64), Where(tp=6))
    with pytest.raises(CutError):
        VllmNaming(arch=arch).parameters(Where(tp=6))


def test_legal_degrees_of_qwen25() -> None:
    assert VllmNaming(arch=preset("qwen2.5-7b")).legal_tp() == (1, 2, 4)
    arch = replace(DENSE, hidden=1536, num_heads=12, num_kv_heads=2, head_dim=128, ffn=8960, vocab=151936)
    assert VllmNaming(arch=arch).legal_tp() == (1, 2, 4)  # 4 with copies of both kv heads


@given(archs(), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.data())
def test_the_ranks_together_hold_every_element_equally_often(
    arch: Arch, tp: int, by_expert: bool, data: st.DataObject
) -> None:
    naming = VllmNaming(arch=arch)
    count = {t.name: np.zeros(matrix_shape(t.shape), np.int8) for t in logical_tensors(arch)}
    order = list(range(arch.moe.num_experts)) if arch.moe else []
    order = data.draw(st.permutations(order))
    for rank in range(tp):
        where = Where(tp=tp, tp_rank=rank, etp=tp, etp_rank=rank)
        if by_expert:
            where = Where(tp=tp, tp_rank=rank, experts=order[rank::tp])
        try:
            parameters = naming.parameters(where)
        except CutError:
            assert by_expert is False or tp not in naming.legal_tp()
            return
        for name, shape in parameters.items():
            cols = shape[-1] if len(shape) > 1 else 1
            taken = np.zeros((int(np.prod(shape)) // cols, cols), np.int8)
            for s in naming.segments(name, shape, where):
                height, width = s.row_hi - s.row_lo, s.col_hi - s.col_lo
                taken[s.at_row : s.at_row + height, s.at_col : s.at_col + width] += 1
                count[s.tensor][s.row_lo : s.row_hi, s.col_lo : s.col_hi] += 1
            padded = name in ("model.embed_tokens.weight", "lm_head.weight")
            assert taken.max(initial=0) <= 1 and (padded or taken.all()), name
    for t in logical_tensors(arch):
        copies = count[t.name].flat[0]
        assert copies >= 1 and (count[t.name] == copies).all(), t.name


def test_experts_in_any_order_and_twice() -> None:
    naming = VllmNaming(arch=EXPERTS)
    where = Where(tp=4, tp_rank=1, experts=(3, 0, 3))  # a redundant copy of expert 3
    name = "model.layers.1.mlp.experts.routed_experts.w13_weight"
    found = naming.segments(name, (3, 96, 64), where)
    assert [(s.tensor.split("experts.")[1], s.at_row) for s in found] == [
        ("3.gate_proj.weight", 0),
        ("3.up_proj.weight", 48),
        ("0.gate_proj.weight", 96),
        ("0.up_proj.weight", 144),
        ("3.gate_proj.weight", 192),
        ("3.up_proj.weight", 240),
    ]
    assert naming.segments("model.layers.1.mlp.experts.w13_weight", (3, 96, 64), where) == found  # older vLLM
    with pytest.raises(UnknownParameter, match=r"experts \[4\] do not exist"):
        naming.segments(name, (1, 96, 64), Where(experts=(4,)))


def test_attention_data_parallel_with_experts_over_all_replicas() -> None:
    naming = VllmNaming(arch=EXPERTS)
    for dp_rank in range(4):
        where = Where(tp=1, experts=(dp_rank,))
        assert naming.parameters(where)["model.layers.0.self_attn.qkv_proj.weight"] == (96, 64)
        assert naming.parameters(where)["model.layers.0.mlp.experts.routed_experts.w2_weight"] == (1, 64, 48)
        # Without expert parallelism vLLM cuts every expert over all replicas.
        where = Where(tp=1, etp=4, etp_rank=dp_rank)
        (first, *_) = naming.segments("model.layers.0.mlp.experts.routed_experts.w2_weight", (4, 64, 12), where)
        assert (first.col_lo, first.col_hi) == (dp_rank * 12, (dp_rank + 1) * 12)


def test_mixtral_calls_gate_w1_and_up_w3() -> None:
    naming = VllmNaming(arch=replace(EXPERTS, family="mixtral"))
    name = "model.layers.0.block_sparse_moe.experts.routed_experts.w13_weight"
    found = naming.segments(name, (4, 48, 64), Where(tp=2, tp_rank=1, etp=2, etp_rank=1))
    assert [(s.tensor.rsplit(".", 3)[1:3], s.row_lo, s.at_row) for s in found[:2]] == [
        (["0", "w1"], 24, 0),
        (["0", "w3"], 24, 24),
    ]


def test_latent_attention_fuses_the_down_projections_on_every_rank() -> None:
    naming = VllmNaming(arch=LATENT)
    where = Where(tp=2, tp_rank=1)
    found = naming.segments("model.layers.0.self_attn.fused_qkv_a_proj.weight", (320, 256), where)
    assert rows(found) == [("q_a_proj", 0, 128, 0), ("kv_a_proj_with_mqa", 0, 192, 128)]
    assert rows(naming.segments("model.layers.0.self_attn.q_b_proj.weight", (384, 128), where)) == [
        ("q_b_proj", 384, 768, 0)
    ]
    assert rows(naming.segments("model.layers.0.self_attn.kv_b_proj.weight", (512, 128), where)) == [
        ("kv_b_proj", 512, 1024, 0)
    ]
    plain = VllmNaming(arch=replace(LATENT, mla=replace(LATENT.mla, q_lora_rank=None)))  # type: ignore[type-var]
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in plain.parameters(where)
    assert "model.layers.0.self_attn.fused_qkv_a_proj.weight" not in plain.parameters(where)


def test_shared_experts_are_cut_or_whole_as_their_shape_says() -> None:
    naming, where = VllmNaming(arch=LATENT), Where(tp=2, tp_rank=1)
    name = "model.layers.1.mlp.shared_experts.gate_up_proj.weight"
    assert rows(naming.segments(name, (256, 256), where)) == [("gate_proj", 128, 256, 0), ("up_proj", 128, 256, 128)]
    assert rows(naming.segments(name, (512, 256), where)) == [("gate_proj", 0, 256, 0), ("up_proj", 0, 256, 256)]


def test_a_pipeline_stage_holds_its_layers_under_global_numbers() -> None:
    naming = VllmNaming(arch=DENSE)
    first, last = naming.parameters(Where(layers=(0,))), naming.parameters(Where(layers=(1,)))
    assert "model.embed_tokens.weight" in first and "lm_head.weight" not in first
    assert "lm_head.weight" in last and "model.norm.weight" in last and "model.embed_tokens.weight" not in last
    assert set(first) | set(last) == set(naming.parameters(Where()))
    assert not any(".layers.0." in name for name in last)
    with pytest.raises(UnknownParameter, match=r"process with layers \[1\]"):
        naming.segments("model.layers.0.input_layernorm.weight", (64,), Where(layers=(1,)))
    tied = VllmNaming(arch=replace(DENSE, tied_embeddings=True))
    for layer in (0, 1):  # two pipeline holders of one tensor
        assert "model.embed_tokens.weight" in tied.parameters(Where(layers=(layer,)))
    assert "lm_head.weight" not in tied.parameters(Where(layers=(1,)))
    (found,) = tied.segments("lm_head.weight", (256, 64), Where(layers=(1,)))
    assert found.tensor == "model.embed_tokens.weight"


def test_value_head() -> None:
    naming = VllmNaming(arch=DENSE, head="value")
    parameters = naming.parameters(Where(tp=2))
    assert parameters["score.weight"] == (1, 64) and "lm_head.weight" not in parameters


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.qkv_proj.weight", (0,)),  # packed into a kernel's own memory
        ("model.layers.0.self_attn.qkv_proj.weight", (64, 96)),  # transposed
        ("model.layers.0.mlp.gate_up_proj.bias", (192,)),
        ("model.layers.2.input_layernorm.weight", (64,)),
        ("model.layers.0.self_attn.q_norm.weight", (8,)),
        ("model.layers.0.self_attn.attn.k_scale", (1,)),
        ("visual.patch_embed.weight", (8, 8)),
    ],
)
def test_what_is_not_known_is_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnknownParameter, match=name.replace(".", r"\.")):
        VllmNaming(arch=DENSE).segments(name, shape, Where())


def test_block_scales_follow_their_weights() -> None:
    naming = VllmNaming(arch=LATENT, fp8=True)
    where = Where(tp=2, tp_rank=1, experts=(2, 1))
    parameters = naming.parameters(where)
    # 128 + 192 rows: the last block is half full.
    assert parameters["model.layers.0.self_attn.fused_qkv_a_proj.weight_scale_inv"] == (3, 2)
    name = "model.layers.1.mlp.experts.routed_experts.w13_weight_scale_inv"
    assert parameters[name] == (2, 2, 2)
    found = naming.segments(name, (2, 2, 2), where)
    assert [(s.tensor.split("experts.")[1], s.row_lo, s.row_hi, s.at_row) for s in found] == [
        ("2.gate_proj.weight_scale_inv", 0, 1, 0),
        ("2.up_proj.weight_scale_inv", 0, 1, 1),
        ("1.gate_proj.weight_scale_inv", 0, 1, 2),
        ("1.up_proj.weight_scale_inv", 0, 1, 3),
    ]
    assert rows(naming.segments("model.layers.0.self_attn.q_b_proj.weight_scale_inv", (3, 1), where)) == [
        ("q_b_proj", 3, 6, 0)
    ]
    (found_o,) = naming.segments("model.layers.0.self_attn.o_proj.weight_scale_inv", (2, 2), where)
    assert (found_o.row_lo, found_o.row_hi, found_o.col_lo, found_o.col_hi) == (0, 2, 2, 4)
    assert not any("gate.weight_scale" in n or ("norm" in n and "scale" in n) for n in parameters)


def test_a_cut_inside_a_block_is_refused_with_the_legal_degrees() -> None:
    # q_b_proj has 4 heads x 192 rows: at tp 4 a rank's 192 rows end inside a block.
    naming = VllmNaming(arch=replace(LATENT, moe=None))
    with pytest.raises(UnknownParameter, match=r"inside a block of 128; legal tensor-parallel degrees: 1, 2$"):
        naming.segments("model.layers.0.self_attn.q_b_proj.weight_scale_inv", (2, 1), Where(tp=4, tp_rank=1))
    name = "model.layers.1.mlp.experts.routed_experts.w13_weight_scale_inv"
    with pytest.raises(UnknownParameter, match=r"legal expert tensor-parallel degrees: 1$"):
        VllmNaming(arch=LATENT).segments(name, (4, 1, 2), Where(tp=2, tp_rank=1, etp=2, etp_rank=1))


def test_scales_of_a_fused_matrix_whose_parts_share_a_block_are_refused() -> None:
    # Two kv heads of 64 rows: k ends and v starts inside one block.
    arch = replace(DENSE, hidden=256, num_heads=8, num_kv_heads=1, head_dim=64, ffn=256)
    with pytest.raises(UnknownParameter, match="inside a 128-row block; legal tensor-parallel degrees: none"):
        VllmNaming(arch=arch).segments("model.layers.0.self_attn.qkv_proj.weight_scale_inv", (5, 2), Where())
