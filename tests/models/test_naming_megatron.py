"""Megatron's names and shapes: which rows of which tensor lie in a local parameter. Numbers from real checkpoints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.arch import Arch, Mla, Moe
from nereus.ir.fragment import Segment
from nereus.ir.tensor import matrix_shape
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.naming.megatron import MegatronNaming
from nereus.models.tensors import logical_tensors

QWEN = Arch(
    family="qwen2", num_layers=28, hidden=3584, num_heads=28, num_kv_heads=4, head_dim=128, ffn=18944, vocab=152064,
    qkv_bias=True,
)  # fmt: skip
TINY = Arch(
    family="llama", num_layers=4, hidden=16, num_heads=8, num_kv_heads=2, head_dim=4, ffn=32, vocab=100, qk_norm=True
)
SPARSE = Arch(
    family="deepseek_v3", num_layers=3, hidden=16, num_heads=4, num_kv_heads=4, head_dim=4, ffn=32, vocab=100,
    moe=Moe(num_experts=8, experts_per_token=2, expert_ffn=8, num_shared_experts=1, shared_expert_ffn=16,
            first_dense_layers=1, router_bias=True),
    mla=Mla(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
)  # fmt: skip
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def _rows(segments: tuple[Segment, ...]) -> list[tuple[str, int, int, int]]:
    return [(s.tensor.split(".")[-2], s.row_lo, s.row_hi, s.at_row) for s in segments]


def test_grouped_qkv_of_qwen() -> None:
    """Each of 4 ranks holds one group: 896 rows of q, 128 of k, 128 of v; 2 ranks hold two groups in a row."""
    naming = MegatronNaming(arch=QWEN)
    assert _rows(naming.segments(QKV, (1152, 3584), Where(tp=4, tp_rank=1))) == [
        ("q_proj", 896, 1792, 0), ("k_proj", 128, 256, 896), ("v_proj", 128, 256, 1024)
    ]  # fmt: skip
    assert _rows(naming.segments(QKV, (2304, 3584), Where(tp=2, tp_rank=1))) == [
        ("q_proj", 1792, 2688, 0), ("k_proj", 256, 384, 896), ("v_proj", 256, 384, 1024),
        ("q_proj", 2688, 3584, 1152), ("k_proj", 384, 512, 2048), ("v_proj", 384, 512, 2176),
    ]  # fmt: skip
    bias = naming.segments(QKV.replace("weight", "bias"), (1152,), Where(tp=4, tp_rank=3))
    assert [(s.tensor.split(".")[-1], s.col_hi) for s in bias] == [("bias", 1)] * 3
    assert _rows(bias)[1] == ("k_proj", 384, 512, 896)


def test_raw_rows_where_tp_exceeds_kv_heads() -> None:
    """64 heads, 2 kv heads, tp 8: ranks 0-2 and 4-6 hold q only, ranks 3 and 7 the rest."""
    naming = MegatronNaming(arch=replace(QWEN, num_heads=64, num_kv_heads=2, hidden=8192))
    held = [naming.segments(QKV, (1088, 8192), Where(tp=8, tp_rank=rank)) for rank in range(8)]
    for rank in (0, 1, 2, 4, 5, 6):
        assert [name for name, *_ in _rows(held[rank])] == ["q_proj"]
    assert _rows(held[3]) == [("q_proj", 3264, 4096, 0), ("k_proj", 0, 128, 832), ("v_proj", 0, 128, 960)]
    assert _rows(held[7]) == [("q_proj", 7360, 8192, 0), ("k_proj", 128, 256, 832), ("v_proj", 128, 256, 960)]


def test_gate_and_up_lie_one_after_the_other_on_each_rank() -> None:
    naming = MegatronNaming(arch=replace(QWEN, ffn=14336))
    segments = naming.segments("decoder.layers.0.mlp.linear_fc1.weight", (7168, 3584), Where(tp=4, tp_rank=1))
    assert _rows(segments) == [("gate_proj", 3584, 7168, 0), ("up_proj", 3584, 7168, 3584)]
    (down,) = naming.segments("decoder.layers.0.mlp.linear_fc2.weight", (3584, 3584), Where(tp=4, tp_rank=1))
    assert (down.col_lo, down.col_hi, down.row_hi) == (3584, 7168, 3584)


@pytest.mark.parametrize(("tp", "rows", "true"), [(4, 38016, 37888), (8, 19072, 18432)])
def test_padded_vocabulary_is_no_segment(tp: int, rows: int, true: int) -> None:
    naming = MegatronNaming(arch=replace(QWEN, vocab=151936, num_heads=32))
    where = Where(tp=tp, tp_rank=tp - 1)
    for name, tensor in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        (segment,) = naming.segments(f"{name}.weight", (rows, 3584), where)
        assert (segment.tensor, segment.row_lo, segment.row_hi) == (f"{tensor}.weight", 151936 - true, 151936)
    assert naming.parameters(where)["output_layer.weight"] == (rows, 3584)


def test_a_rank_of_padding_only() -> None:
    naming = MegatronNaming(arch=TINY)  # 100 words on 4 ranks of 128
    assert naming.segments("output_layer.weight", (128, 16), Where(tp=4, tp_rank=1)) == ()
    with pytest.raises(UnknownParameter, match=r"100 rows on each of 2 ranks are 200, not 100 padded"):
        replace(naming, vocab_multiple=1).segments("output_layer.weight", (100, 16), Where(tp=2))


def test_layers_and_experts_are_numbered_globally() -> None:
    naming = MegatronNaming(arch=SPARSE)
    where = Where(layers=(1, 2), experts=(6, 7))
    names = (
        ("decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight", (16, 16)),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight1", (16, 16)),
    )
    for name, shape in names:
        found = naming.segments(f"module.module.{name}", shape, where)
        assert [s.tensor for s in found] == [f"model.layers.2.mlp.experts.7.{m}_proj.weight" for m in ("gate", "up")]
    with pytest.raises(UnknownParameter, match=r"expert 2 of a process that holds 2 \(experts \[6, 7\]\)"):
        naming.segments(names[0][0].replace("experts.1", "experts.2"), (16, 16), where)
    with pytest.raises(UnknownParameter, match=r"layer 2 of a process that holds 2 \(layers \[1, 2\]\)"):
        naming.segments("decoder.layers.2.input_layernorm.weight", (16,), where)
    mixtral = MegatronNaming(arch=replace(SPARSE, family="mixtral", mla=None))
    (down,) = mixtral.segments(
        "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight", (16, 4), Where(etp=2, etp_rank=1)
    )
    assert (down.tensor, down.col_lo) == ("model.layers.1.block_sparse_moe.experts.0.w2.weight", 4)


def test_ends_of_the_model() -> None:
    tied = MegatronNaming(arch=replace(TINY, tied_embeddings=True))
    assert "output_layer.weight" not in tied.parameters(Where())
    last = tied.parameters(Where(layers=(2, 3)))
    assert last["output_layer.weight"] == (128, 16) and "embedding.word_embeddings.weight" not in last
    assert tied.segments("output_layer.weight", (128, 16), Where())[0].tensor == "model.embed_tokens.weight"
    value = MegatronNaming(arch=TINY, head="value")
    for rank in range(2):  # replicated
        (segment,) = value.segments("output_layer.weight", (1, 16), Where(tp=2, tp_rank=rank))
        assert (segment.tensor, segment.row_hi) == ("score.weight", 1)


def test_latent_down_projections_whole_or_cut() -> None:
    naming, name = MegatronNaming(arch=SPARSE), "decoder.layers.0.self_attention.linear_q_down_proj.weight"
    assert _rows(naming.segments(name, (8, 16), Where(tp=2, tp_rank=1))) == [("q_a_proj", 0, 8, 0)]
    assert _rows(naming.segments(name, (4, 16), Where(tp=2, tp_rank=1))) == [("q_a_proj", 4, 8, 0)]
    fused = naming.segments(name.replace("_q_", "_qkv_"), (10, 16), Where(tp=2, tp_rank=1))
    assert _rows(fused) == [("q_a_proj", 4, 8, 0), ("kv_a_proj_with_mqa", 6, 12, 4)]


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("decoder.layers.0.self_attention._extra_state", (0,), "none of a llama model"),
        ("decoder.layers.0.input_layernorm.bias", (16,), "none of a llama model"),
        ("mtp.layers.0.eh_proj.weight", (16, 32), "none of a llama model"),
        (QKV, (80, 16), r"shape \[80, 16\]; at tp 0 of 1.*has \[48, 16\].*output gates"),
        ("decoder.layers.0.mlp.linear_fc1.weight", (32, 16), r"has \[64, 16\]"),
        ("decoder.layers.0.mlp.router.weight", (8, 16), "none of a llama model"),
        ("decoder.layers.0.mlp.experts.weight1", (8, 16), "none of a llama model"),
        # An adapter of the fused matrix would have one lora_A for q, k and v.
        ("decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight", (8, 16), "none of a llama model"),
        ("decoder.layers.4.mlp.linear_fc1.weight", (64, 16), "the model has no layer 4, but 4"),
    ],
)
def test_what_is_not_known_is_refused(name: str, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(UnknownParameter, match=text):
        MegatronNaming(arch=TINY).segments(name, shape, Where())


def test_degrees_that_cannot_cut() -> None:
    with pytest.raises(UnknownParameter, match=r"8 units of .*o_proj.*\(32 columns\) do not divide by 3"):
        MegatronNaming(arch=TINY).parameters(Where(tp=3, layers=(1,)))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_all_ranks_together_hold_each_element_once(data: st.DataObject) -> None:
    """Over random layouts: every element of every tensor lies on one rank of each replica group, none is lost."""
    arch = data.draw(st.sampled_from([TINY, replace(TINY, num_kv_heads=8, qkv_bias=True), SPARSE]))
    arch = replace(arch, tied_embeddings=data.draw(st.booleans()))
    naming = MegatronNaming(
        arch=arch,
        head=data.draw(st.sampled_from(["lm", "value"])),
        fused_norms=data.draw(st.booleans()),
        grouped_experts=data.draw(st.booleans()),
        vocab_multiple=data.draw(st.sampled_from([4, 128])),
    )
    tp, etp, ep = (data.draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    split = data.draw(st.integers(0, arch.num_layers - 1))
    stages = [s for s in (range(split), range(split, arch.num_layers)) if len(s)]
    tensors = {t.name: t for t in logical_tensors(arch, naming.head)}
    seen = {name: np.zeros(matrix_shape(t.shape), dtype=int) for name, t in tensors.items()}
    for layers in stages:
        for rank in range(tp * etp * ep):
            ranks = rank % tp, rank // tp % etp, rank // (tp * etp)
            per = (arch.moe.num_experts if arch.moe else ep) // ep
            experts = tuple(range(ranks[2] * per, (ranks[2] + 1) * per))
            where = Where(tp=tp, tp_rank=ranks[0], etp=etp, etp_rank=ranks[1], layers=layers, experts=experts)
            for name, shape in naming.parameters(where).items():
                taken = np.zeros(matrix_shape(shape), dtype=int)
                for s in naming.segments(name, shape, where):
                    seen[s.tensor][s.row_lo : s.row_hi, s.col_lo : s.col_hi] += 1
                    rows, cols = s.row_hi - s.row_lo, s.col_hi - s.col_lo
                    taken[s.at_row : s.at_row + rows, s.at_col : s.at_col + cols] += 1
                assert taken.max() <= 1
                vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight")
                assert vocabulary or taken.min() == 1, name
    for name, count in seen.items():
        assert count.min() == count.max() > 0, name  # none lost, no part held oftener than another
