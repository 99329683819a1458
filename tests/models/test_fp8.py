"""Block scales: which tensors have them, and that no legal degree cuts a block."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.arches import archs

from nereus.ir.arch import Arch
from nereus.ir.tensor import CutError
from nereus.models.fp8 import (
    BLOCK,
    FORMS,
    fp8_refusals,
    has_scale,
    legal_fp8_etp,
    legal_fp8_tp,
    scale_name,
    scale_tensors,
)
from nereus.models.legality import legal_tp
from nereus.models.presets import preset
from nereus.models.tensors import logical_tensors


def test_deepseek_v3_as_published() -> None:
    arch = preset("deepseek-v3")
    found = {t.name: t.shape for t in scale_tensors(arch)}
    attention = "model.layers.0.self_attn"
    assert {name: shape for name, shape in found.items() if name.startswith("model.layers.0.")} == {
        f"{attention}.q_a_proj.weight_scale_inv": (12, 56),
        f"{attention}.q_b_proj.weight_scale_inv": (192, 12),
        f"{attention}.kv_a_proj_with_mqa.weight_scale_inv": (5, 56),  # 576 rows: the last block is half
        f"{attention}.kv_b_proj.weight_scale_inv": (256, 4),
        f"{attention}.o_proj.weight_scale_inv": (56, 128),
        "model.layers.0.mlp.gate_proj.weight_scale_inv": (144, 56),
        "model.layers.0.mlp.up_proj.weight_scale_inv": (144, 56),
        "model.layers.0.mlp.down_proj.weight_scale_inv": (56, 144),
    }
    bare = {t.name.split(".")[-2] for t in logical_tensors(arch) if not has_scale(t)}
    assert bare == {
        "embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm",
        "q_a_layernorm", "kv_a_layernorm", "gate",
    }  # fmt: skip
    assert scale_tensors(arch) is scale_tensors(arch)


@pytest.mark.parametrize(
    ("name", "by_tp", "experts_whole"),
    [
        ("llama-3.1-8b", (1, 2, 4, 8, 16), None),
        ("qwen2.5-7b", (1, 2, 4), None),
        ("qwen3-30b-a3b", (1, 2), (1, 2, 4, 8, 16, 32)),  # 768 wide experts: 4 would leave 192
        ("qwen3-235b-a22b", (1, 2, 4), (1, 2, 4, 8, 16, 32, 64)),
        ("deepseek-v3", (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)),
        ("moonlight-16b-a3b", (1,), (1, 2)),
    ],
)
def test_degrees_of_published_models(name: str, by_tp: tuple[int, ...], experts_whole: tuple[int, ...] | None) -> None:
    arch = preset(name)
    assert legal_fp8_tp(arch) == by_tp
    if experts_whole is not None:
        assert legal_fp8_tp(arch, etp=1) == experts_whole


def test_a_stripe_that_is_cut_inside_q() -> None:
    """64 query and 8 kv heads of 128: a stripe has 1024 q, 128 k and 128 v rows. Over 16 ranks 640 rows each are whole
    blocks, so raw rows may be cut; with heads of 64, k and v share a block and no degree is right."""
    arch = Arch(
        family="llama", num_layers=1, hidden=256, num_heads=64, num_kv_heads=8, head_dim=128, ffn=8192, vocab=1024
    )
    assert fp8_refusals(arch, tp=16, etp=1, form="stripes") == ()
    assert fp8_refusals(arch, tp=32, etp=1, form="stripes") == (
        "fused q, k, v: 10240 rows over tp 32 are 320 on a rank, no multiple of 128",
    )
    small = Arch(
        family="llama", num_layers=1, hidden=256, num_heads=64, num_kv_heads=8, head_dim=64, ffn=8192, vocab=1024
    )
    (reason,) = fp8_refusals(small, tp=1, etp=1, form="stripes")
    assert reason == "fused q, k, v: stripes of 512 q, 64 k and 64 v rows share blocks"
    assert legal_fp8_tp(small, form="stripes") == ()
    assert 1 in legal_fp8_tp(small, form="separate")


def test_unknown_form() -> None:
    with pytest.raises(ValueError, match="not 'rows'"):
        fp8_refusals(preset("llama-3.1-8b"), tp=1, etp=1, form="rows")


@settings(max_examples=150, deadline=None)
@given(arch=archs(), data=st.data())
def test_legal_degrees_cut_on_block_borders_and_others_do_not(arch: Arch, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMS))
    etp = data.draw(st.sampled_from(legal_fp8_etp(arch, form=form) or (1,)))
    legal = legal_fp8_tp(arch, etp=etp, form=form, limit=16)
    scales = {t.name: t for t in scale_tensors(arch)}
    for tp in legal_tp(arch, limit=16):
        clean = True
        for tensor in logical_tensors(arch):
            if not has_scale(tensor):
                assert scale_name(tensor.name) not in scales
                continue
            scale = scales[scale_name(tensor.name)]
            assert scale.shape == tuple(-(-extent // BLOCK) for extent in tensor.shape)
            degree = etp if tensor.expert is not None else tp
            if tensor.cut is None or not tensor.cut.allows(degree):
                assert scale.cut is None or tensor.cut is not None
                continue
            assert scale.cut is not None and scale.cut.dim == tensor.cut.dim
            extent = tensor.shape[tensor.cut.dim]
            parts = [tensor.cut.interval(extent, degree, rank) for rank in range(degree)]
            on_borders = all(lo % BLOCK == 0 and (hi % BLOCK == 0 or hi == extent) for lo, hi in parts)
            # The scale's own cut says the same, and gives each rank the scales of its blocks.
            assert scale.cut.allows(degree) == on_borders
            if on_borders:
                blocks = scale.shape[scale.cut.dim]
                assert [scale.cut.interval(blocks, degree, r) for r in range(degree)] == [
                    (lo // BLOCK, -(-hi // BLOCK)) for lo, hi in parts
                ]
            else:
                with pytest.raises(CutError):
                    scale.cut.interval(scale.shape[scale.cut.dim], degree, 0)
            clean = clean and on_borders
        if form == "separate":
            assert (tp in legal) == clean
        elif form == "segments":
            assert clean or tp not in legal
