"""Which degrees cut a model, by framework: T9 and T12 of the reports that users wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.ir.arch import Arch
from nereus.ir.layout import layout_of
from nereus.ir.plan import Stage
from nereus.ir.tensor import CutError
from nereus.models.legality import etp_refusals, legal_ep, legal_etp, legal_tp, tp_refusals
from nereus.models.presets import preset, preset_names
from nereus.models.tensors import logical_tensors

FRAMEWORKS = (None, "megatron", "vllm", "sglang", "fsdp", "deepspeed", "torch")

#: A vocabulary of 151552, as GLM has, and heads that divide by 6.
SIX = Arch(family="llama", num_layers=2, hidden=768, num_heads=48, num_kv_heads=48, head_dim=16, ffn=1536, vocab=151552)


def test_a_padded_vocabulary_is_legal_where_it_is_padded() -> None:
    """T9: 151552 = 64 x 2368 at tp 6 is illegal unless it is padded to 152064, 25344 rows each."""
    assert 151552 % 64 == 0 and 151552 % 6
    refused = ("vocabulary 151552 does not divide by 6",)
    for backend in (None, "vllm", "sglang", "fsdp", "deepspeed", "torch"):
        assert tp_refusals(SIX, 6, backend=backend) == refused
        assert legal_tp(SIX, backend=backend, limit=16) == (1, 2, 4, 8, 16)
    assert tp_refusals(SIX, 6, backend="megatron") == ()
    assert legal_tp(SIX, backend="megatron", limit=16) == (1, 2, 3, 4, 6, 8, 12, 16)
    (embedding,) = (t for t in logical_tensors(SIX) if "embed_tokens" in t.name)
    assert embedding.cut is not None
    stage = Stage(model="a", kind="train", devices=(), tp=6, pp_split=(2,), backend="megatron")
    rows = [layout_of(stage).interval(embedding.cut, 151552, 6, rank) for rank in range(6)]
    assert rows[0] == (0, 25344) and rows[5] == (5 * 25344, 151552)


def test_engines_pad_to_64_and_say_so() -> None:
    arch = replace(SIX, vocab=151500)  # padded to 151552
    assert tp_refusals(arch, 8, backend="vllm") == () and tp_refusals(arch, 8) != ()
    assert tp_refusals(arch, 6, backend="vllm") == ("vocabulary 151500, padded to 151552, does not divide by 6",)


def test_qwen_7b_and_the_reasons() -> None:
    """T12."""
    arch = preset("qwen2.5-7b")
    for backend in ("vllm", "sglang", "fsdp", "deepspeed", "torch", None):
        assert legal_tp(arch, backend=backend) == (1, 2, 4)
        assert tp_refusals(arch, 8, backend=backend) == ("28 heads do not divide by 8",)
        for tp in (7, 14):
            kv, ffn, vocab = tp_refusals(arch, tp, backend=backend)
            assert "4 kv heads" in kv and "18944" in ffn and "152064" in vocab
        assert len(tp_refusals(arch, 28, backend=backend)) == 2
    # Megatron pads the vocabulary, the rest stays.
    assert legal_tp(arch, backend="megatron") == (1, 2, 4)
    assert len(tp_refusals(arch, 7, backend="megatron")) == 2
    small = preset("qwen2.5-1.5b")
    for backend in FRAMEWORKS:
        assert tp_refusals(small, 4, backend=backend) == () and tp_refusals(small, 8, backend=backend)


def test_a_value_head_is_never_cut_but_its_embedding_is() -> None:
    assert tp_refusals(SIX, 6, head="value") == ("vocabulary 151552 does not divide by 6",)
    assert tp_refusals(SIX, 6, head="value", backend="megatron") == ()
    with pytest.raises(ValueError, match="lm or value"):
        tp_refusals(SIX, 6, head="reward")


def test_experts() -> None:
    arch = preset("qwen3-30b-a3b")  # 128 experts of width 768
    assert etp_refusals(arch, 5) == ("expert width 768 does not divide by 5",)
    assert legal_etp(arch, limit=8) == (1, 2, 3, 4, 6, 8)
    assert legal_ep(arch) == (1, 2, 4, 8, 16, 32, 64, 128)
    dense = preset("llama-3.1-8b")
    assert (legal_ep(dense), etp_refusals(dense, 7)) == ((1,), ())
    assert etp_refusals(arch, 0) and tp_refusals(arch, 0)


@given(st.sampled_from(preset_names()), st.integers(1, 40), st.sampled_from(FRAMEWORKS))
def test_a_legal_degree_cuts_every_tensor_and_an_illegal_one_does_not(
    name: str, tp: int, framework: str | None
) -> None:
    """Against the geometry that is really used: every rank's part exists, and the parts cover every tensor."""
    arch = replace(preset(name), num_layers=min(4, preset(name).num_layers))
    engine = framework if framework in ("vllm", "sglang") else None
    backend = None if engine else framework
    stage = Stage(
        model="a", kind="infer", devices=(), tp=tp, pp_split=(arch.num_layers,), backend=backend, engine=engine
    )
    layout = layout_of(stage)
    fits = True
    for tensor in logical_tensors(arch):
        if tensor.expert is not None or tensor.cut is None:
            continue
        extent = tensor.shape[tensor.cut.dim]
        try:
            parts = sorted(layout.interval(tensor.cut, extent, tp, rank) for rank in range(tp))
        except CutError:
            fits = False
            continue
        end = 0
        for a, b in parts:
            assert a <= end
            end = max(end, b)
        assert end == extent
    assert stage.framework == framework
    legal = not tp_refusals(arch, tp, backend=framework)
    # Raw-row cuts exist for more degrees than the heads allow; the heads decide.
    assert fits or not legal
    if framework != "megatron":
        assert fits == legal
