"""Adapters against vLLM's own code on a CPU: its reading of peft's names and settings, and its cut of every factor.

peft itself is not in this environment: its names are those of its documentation, which vLLM's parser reads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.arches import archs, loras

from nereus.ir.arch import Arch, Lora
from nereus.ir.tensor import LogicalTensor
from nereus.models.legality import legal_tp
from nereus.models.lora import linear_kinds
from nereus.models.naming.peft import PeftNaming, config_of, lora_from_config
from nereus.models.tensors import logical_tensors

utils = pytest.importorskip("vllm.lora.utils")
linear = pytest.importorskip("vllm.model_executor.layers.linear")
column = pytest.importorskip("vllm.lora.layers.column_parallel_linear")
row = pytest.importorskip("vllm.lora.layers.row_parallel_linear")


@settings(max_examples=40, deadline=None)
@given(arch=archs(), data=st.data())
def test_vllm_reads_the_names_as_the_same_modules(arch: Arch, data: st.DataObject) -> None:
    lora = data.draw(loras(linear_kinds(logical_tensors(arch))))
    for key, logical in PeftNaming(arch=arch, lora=lora).file_names().items():
        module, is_a = utils.parse_fine_tuned_lora_name(key)
        assert logical == f"{module}.{'lora_A' if is_a else 'lora_B'}.weight"


@settings(max_examples=40, deadline=None)
@given(arch=archs(), data=st.data(), stabilised=st.booleans())
def test_vllm_reads_the_settings_as_the_same_scale(arch: Arch, data: st.DataObject, stabilised: bool) -> None:
    from vllm.lora.peft_helper import PEFTHelper

    lora = data.draw(loras(linear_kinds(logical_tensors(arch))))
    config = {**config_of(lora, arch), "use_rslora": stabilised}
    helper = PEFTHelper.from_dict(config)
    again = lora_from_config(config, arch)
    assert helper.r == again.rank
    assert helper.vllm_lora_scaling_factor == pytest.approx(again.alpha / again.rank)
    assert not helper._validate_features()


def _cut(tensor: LogicalTensor, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    if tensor.cut is None:
        return whole
    lo, hi = tensor.cut.interval(tensor.shape[tensor.cut.dim], tp, rank)
    return whole.narrow(tensor.cut.dim, lo, hi - lo)


def _layers(arch: Arch) -> list[tuple[list[str], Any]]:
    """(logical modules of a layer, vLLM's wrapped layer), made for the rank of the group that is set."""
    hidden, heads, dim = arch.hidden, arch.num_heads, arch.head_dim
    common: dict[str, Any] = {"bias": False, "params_dtype": torch.float32}
    qkv = linear.QKVParallelLinear(hidden, dim, heads, arch.num_kv_heads, **common)
    out = linear.RowParallelLinear(heads * dim, hidden, **common)
    gate_up = linear.MergedColumnParallelLinear(hidden, [arch.ffn, arch.ffn], **common)
    down = linear.RowParallelLinear(arch.ffn, hidden, **common)
    return [
        (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], column.MergedQKVParallelLinearWithLoRA(qkv)),
        (["self_attn.o_proj"], row.RowParallelLinearWithLoRA(out)),
        (["mlp.gate_proj", "mlp.up_proj"], column.MergedColumnParallelLinearWithLoRA(gate_up)),
        (["mlp.down_proj"], row.RowParallelLinearWithLoRA(down)),
    ]


@settings(max_examples=25, deadline=None)
@given(arch=archs(families=("llama", "qwen3")), data=st.data())
def test_vllm_cuts_the_factors_at_the_same_places(arch: Arch, data: st.DataObject) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    tp = data.draw(st.sampled_from(legal_tp(arch, limit=16)))
    tensors = {t.name: t for t in logical_tensors(arch, "lm", Lora(rank=4, alpha=8))}
    whole = {name: torch.randn(t.shape) for name, t in tensors.items() if ".lora_" in name and ".layers.0." in name}
    for rank in range(tp):
        with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):
            # The layers ask their group for two numbers; nothing is exchanged here.
            patch.setattr("vllm.distributed.parallel_state._TP", SimpleNamespace(rank_in_group=rank, world_size=tp))
            layers = _layers(arch)
        for modules, layer in layers:
            names = [(f"model.layers.0.{m}.lora_A.weight", f"model.layers.0.{m}.lora_B.weight") for m in modules]
            a, b = [whole[n] for n, _ in names], [whole[n] for _, n in names]
            if len(modules) == 1:
                theirs = [layer.slice_lora_a(a[0])], [layer.slice_lora_b(b[0])]
            else:
                theirs = layer.slice_lora_a(a), layer.slice_lora_b(b)
            for i, (name_a, name_b) in enumerate(names):
                assert torch.equal(theirs[0][i], _cut(tensors[name_a], whole[name_a], tp, rank)), (name_a, tp, rank)
                assert torch.equal(theirs[1][i], _cut(tensors[name_b], whole[name_b], tp, rank)), (name_b, tp, rank)
