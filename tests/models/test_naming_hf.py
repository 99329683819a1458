"""HF names -> segments, without transformers: wrappers, tensor-parallel cuts, fused experts, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nereus.ir.arch import Arch, Lora, Moe
from nereus.ir.fragment import Segment
from nereus.ir.tensor import matrix_shape
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.naming.hf import HfNaming
from nereus.models.tensors import logical_tensors

DENSE = Arch(family="qwen3", num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24, vocab=40)
EXPERTS = replace(
    DENSE, family="mixtral", ffn=12, moe=Moe(num_experts=4, experts_per_token=2, expert_ffn=12), tied_embeddings=True
)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight",
        "module.model.layers.1.mlp.up_proj.weight",
        "_orig_mod.module.model.layers.1._checkpoint_wrapped_module.mlp.up_proj.weight",
        "_fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module.mlp.up_proj.weight",
    ],
)
def test_wrappers_do_not_hide_a_name(name: str) -> None:
    expected = Segment(tensor="model.layers.1.mlp.up_proj.weight", row_lo=0, row_hi=24, col_lo=0, col_hi=16, at_row=0)
    assert HfNaming(arch=DENSE).segments(name, (24, 16), Where()) == (expected,)


@pytest.mark.parametrize("arch", [DENSE, EXPERTS, replace(EXPERTS, family="qwen3_moe")])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ranks_together_hold_every_element(arch: Arch, fused: bool, tp: int) -> None:
    naming = HfNaming(arch=arch, fused_experts=fused)
    counts = {t.name: np.zeros(matrix_shape(t.shape), int) for t in logical_tensors(arch)}
    for rank in range(tp):
        where = Where(tp=tp, tp_rank=rank, etp=tp, etp_rank=rank)
        for name, shape in naming.parameters(where).items():
            for s in naming.segments(name, shape, where):
                counts[s.tensor][s.row_lo : s.row_hi, s.col_lo : s.col_hi] += 1
    for t in logical_tensors(arch):
        assert (counts[t.name] == counts[t.name].flat[0]).all()
        copies = tp if t.cut is None else max(1, tp // t.cut.groups)
        assert counts[t.name].flat[0] == copies, t.name


def test_experts_under_any_order_and_cut_in_both_halves() -> None:
    where = Where(etp=2, etp_rank=1, experts=(3, 0))
    naming = HfNaming(arch=EXPERTS)
    assert naming.parameters(where)["model.layers.0.mlp.experts.gate_up_proj"] == (2, 12, 16)
    found = naming.segments("model.layers.0.mlp.experts.gate_up_proj", (2, 12, 16), where)
    assert [(s.tensor.split("experts.")[1], s.row_lo, s.row_hi, s.at_row) for s in found] == [
        ("3.w1.weight", 6, 12, 0),
        ("3.w3.weight", 6, 12, 6),
        ("0.w1.weight", 6, 12, 12),
        ("0.w3.weight", 6, 12, 18),
    ]
    down = naming.segments("model.layers.0.mlp.experts.down_proj", (2, 16, 6), where)
    assert [(s.col_lo, s.col_hi, s.at_row) for s in down] == [(6, 12, 0), (6, 12, 16)]


def test_layers_of_a_pipeline_stage_keep_their_global_numbers() -> None:
    names = HfNaming(arch=DENSE).parameters(Where(layers=(1,)))
    assert {n.split(".")[2] for n in names if ".layers." in n} == {"1"}


def test_a_tied_head_is_the_embedding_and_a_value_head_its_own() -> None:
    (segment,) = HfNaming(arch=EXPERTS).segments("lm_head.weight", (40, 16), Where())
    assert segment.tensor == "model.embed_tokens.weight"
    assert "lm_head.weight" not in HfNaming(arch=EXPERTS).parameters(Where())
    critic = HfNaming(arch=EXPERTS, head="value")
    assert critic.segments("score.weight", (1, 16), Where())[0].tensor == "score.weight"
    with pytest.raises(UnknownParameter, match=r"lm_head\.weight"):
        critic.segments("lm_head.weight", (40, 16), Where())


def test_a_tensor_that_a_plan_leaves_whole_is_known() -> None:
    where = Where(tp=2, tp_rank=1)
    (segment,) = HfNaming(arch=DENSE).segments("lm_head.weight", (40, 16), where)
    assert (segment.row_lo, segment.row_hi) == (0, 40)
    (segment,) = HfNaming(arch=DENSE).segments("lm_head.weight", (20, 16), where)
    assert (segment.row_lo, segment.row_hi) == (20, 40)


def test_factors_are_known_where_the_model_is_adapted() -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    adapted = HfNaming(arch=DENSE, lora=Lora(rank=2, alpha=4.0, targets=("q_proj",)))
    assert adapted.segments(name, (2, 16), Where())[0].tensor == name
    with pytest.raises(UnknownParameter, match="lora_A"):
        HfNaming(arch=DENSE).segments(name, (2, 16), Where())


@pytest.mark.parametrize(
    ("name", "shape", "where", "words"),
    [
        (
            "model.layers.0.mlp.extra.weight",
            (24, 16),
            Where(),
            "'model.layers.0.mlp.extra.weight' is none of a mixtral",
        ),
        ("model.layers.9.input_layernorm.weight", (16,), Where(), "none of a mixtral model"),
        ("model.layers.1.input_layernorm.weight", (16,), Where(layers=(0,)), "layer 1 is none of this process's"),
        ("model.norm.weight", (17,), Where(), r"is \[17\], not \[16\]"),
        ("model.embed_tokens.weight", (64, 16), Where(tp=2), r"is \[64, 16\], not \[40, 16\], or \[20, 16\] on this"),
        ("model.embed_tokens.weight", (14, 16), Where(tp=3), "40 units cannot be cut over tp=3"),
        ("model.layers.2.mlp.experts.down_proj", (4, 16, 12), Where(), "layer 2 has no experts"),
        ("model.layers.0.mlp.experts.down_proj", (3, 16, 12), Where(), r"is \[3, 16, 12\], not \[4, 16, 12\]"),
        ("model.layers.0.mlp.experts.down_proj", (1, 16, 12), Where(experts=(4,)), "no expert 4"),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 4, 16), Where(etp=5), "12 cannot be cut over 5"),
    ],
)
def test_unknown_is_refused_by_name(name: str, shape: tuple[int, ...], where: Where, words: str) -> None:
    with pytest.raises(UnknownParameter, match=words):
        HfNaming(arch=EXPERTS).segments(name, shape, where)
