"""Names, shapes and cuts of logical tensors."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.arch import Arch
from nereus.models.legality import legal_tp, tp_refusals
from nereus.models.presets import preset, preset_names
from nereus.models.tensors import logical_tensors, num_params


def _shapes(arch: Arch, head: str = "lm") -> dict[str, tuple[int, ...]]:
    tensors = logical_tensors(arch, head)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    assert len(shapes) == len(tensors), "names are global, hence unique"
    return shapes


def test_llama_names_and_shapes_as_published() -> None:
    shapes = _shapes(preset("llama-3.1-8b"))
    assert len(shapes) == 291  # tensors in the published index
    layer = {name.removeprefix("model.layers.31."): shape for name, shape in shapes.items() if ".31." in name}
    assert layer == {
        "input_layernorm.weight": (4096,),
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.k_proj.weight": (1024, 4096),
        "self_attn.v_proj.weight": (1024, 4096),
        "self_attn.o_proj.weight": (4096, 4096),
        "post_attention_layernorm.weight": (4096,),
        "mlp.gate_proj.weight": (14336, 4096),
        "mlp.up_proj.weight": (14336, 4096),
        "mlp.down_proj.weight": (4096, 14336),
    }
    ends = {name: shape for name, shape in shapes.items() if "layers" not in name}
    assert ends == {
        "model.embed_tokens.weight": (128256, 4096),
        "model.norm.weight": (4096,),
        "lm_head.weight": (128256, 4096),
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen2.5-7b",
            {"model.layers.0.self_attn.q_proj.bias": (3584,), "model.layers.0.self_attn.k_proj.bias": (512,)},
        ),
        (
            "qwen3-4b",
            {"model.layers.0.self_attn.q_norm.weight": (128,), "model.layers.0.self_attn.o_proj.weight": (2560, 4096)},
        ),
        (
            "mixtral-8x7b",
            {
                "model.layers.3.block_sparse_moe.experts.7.w2.weight": (4096, 14336),
                "model.layers.3.block_sparse_moe.gate.weight": (8, 4096),
            },
        ),
        (
            "qwen3-30b-a3b",
            {
                "model.layers.47.mlp.experts.127.gate_proj.weight": (768, 2048),
                "model.layers.0.mlp.gate.weight": (128, 2048),
            },
        ),
        (
            "deepseek-v3",
            {
                "model.layers.0.self_attn.q_a_proj.weight": (1536, 7168),
                "model.layers.0.self_attn.q_b_proj.weight": (24576, 1536),
                "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
                "model.layers.0.self_attn.kv_b_proj.weight": (32768, 512),
                "model.layers.0.self_attn.o_proj.weight": (7168, 16384),
                "model.layers.2.mlp.gate_proj.weight": (18432, 7168),
                "model.layers.3.mlp.gate.e_score_correction_bias": (256,),
                "model.layers.3.mlp.shared_experts.down_proj.weight": (7168, 2048),
            },
        ),
        (
            "moonlight-16b-a3b",
            {
                "model.layers.0.self_attn.q_proj.weight": (3072, 2048),
                "model.layers.1.mlp.shared_experts.up_proj.weight": (2816, 2048),
            },
        ),
    ],
)
def test_family_tensors(name: str, expected: dict[str, tuple[int, ...]]) -> None:
    shapes = _shapes(preset(name))
    assert {key: shapes.get(key) for key in expected} == expected


def test_dense_layers_come_first_in_deepseek() -> None:
    experts = {t.layer for t in logical_tensors(preset("deepseek-v3")) if t.expert is not None}
    assert experts == set(range(3, 61))


def test_ends_of_the_model() -> None:
    def ends(arch: Arch, head: str) -> dict[str, tuple[bool, bool]]:
        return {t.name: (t.first, t.last) for t in logical_tensors(arch, head) if t.layer is None}

    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    untied, tied = preset("qwen2.5-7b"), preset("qwen3-4b")
    assert ends(untied, "lm") == {embedding: (True, False), norm: (False, True), "lm_head.weight": (False, True)}
    assert ends(tied, "lm") == {embedding: (True, True), norm: (False, True)}
    for arch in (untied, tied):
        assert ends(arch, "value") == {embedding: (True, False), norm: (False, True), "score.weight": (False, True)}


def test_value_head_is_replicated() -> None:
    score = next(t for t in logical_tensors(preset("llama-3.1-8b"), "value") if t.name == "score.weight")
    assert (score.shape, score.cut) == ((1, 4096), None)


def test_unknown_head_is_refused() -> None:
    with pytest.raises(ValueError, match="lm or value"):
        logical_tensors(preset("llama-3.1-8b"), "reward")


def test_legal_degrees_of_qwen_7b_and_every_reason() -> None:
    arch = preset("qwen2.5-7b")
    assert legal_tp(arch) == (1, 2, 4)
    assert tp_refusals(arch, 8) == ("28 heads do not divide by 8",)
    for tp in (7, 14):
        assert tp_refusals(arch, tp) == (
            f"4 kv heads neither divide by {tp} nor divide it",
            f"ffn width 18944 does not divide by {tp}",
            f"vocabulary 152064 does not divide by {tp}",
        )
    assert tp_refusals(arch, 28) == ("ffn width 18944 does not divide by 28", "vocabulary 152064 does not divide by 28")


def test_kv_heads_are_copied_where_tp_exceeds_them() -> None:
    arch = preset("qwen2.5-1.5b")
    assert tp_refusals(arch, 4) == ()
    assert "12 heads do not divide by 8" in tp_refusals(arch, 8)
    key = next(t for t in logical_tensors(arch) if t.name.endswith("layers.0.self_attn.k_proj.weight"))
    assert key.cut is not None
    assert [key.cut.interval(256, 4, rank) for rank in range(4)] == [(0, 128), (0, 128), (128, 256), (128, 256)]


def test_legal_degrees_need_not_be_powers_of_two() -> None:
    arch = Arch(family="llama", num_layers=2, hidden=96, num_heads=12, num_kv_heads=6, head_dim=8, ffn=48, vocab=120)
    assert legal_tp(arch, limit=16) == (1, 2, 3, 6, 12)


def test_nonsense_degree_has_a_reason() -> None:
    assert tp_refusals(preset("llama-3.1-8b"), 0) == ("tensor parallelism needs at least one rank, not 0",)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([n for n in preset_names() if n != "deepseek-v3"]),
    head=st.sampled_from(["lm", "value"]),
    data=st.data(),
)
def test_local_parts_of_all_ranks_make_up_the_model(name: str, head: str, data: st.DataObject) -> None:
    arch = preset(name)
    tp = data.draw(st.sampled_from(legal_tp(arch)))
    logical = held = copies = 0
    for tensor in logical_tensors(arch, head):
        if tensor.expert is not None:
            continue  # cut by etp, not tp
        logical += tensor.numel
        dim = 0 if tensor.cut is None else tensor.cut.dim
        extent = tensor.shape[dim]
        other = tensor.numel // extent
        intervals = (
            [(0, extent)] * tp if tensor.cut is None else [tensor.cut.interval(extent, tp, r) for r in range(tp)]
        )
        assert intervals[0][0] == 0 and intervals[-1][1] == extent
        assert all(right[0] in (left[0], left[1]) for left, right in itertools.pairwise(intervals)), "no gap"
        held += sum(stop - start for start, stop in intervals) * other
        replicas = tp if tensor.cut is None else max(1, tp // tensor.cut.groups) if tensor.cut.replicate else 1
        copies += (replicas - 1) * tensor.numel
    assert held == logical + copies
    if arch.moe is None:
        assert logical == num_params(arch, head)
