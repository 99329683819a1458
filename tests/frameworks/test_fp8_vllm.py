"""FP8 block scales against vLLM's own code on a CPU: its quantiser bit for bit, its shape checks degree by degree.

What cannot run without a GPU: the GEMM kernels, scales rounded to powers of two (ue8m0) and the orders that kernels
rearrange scales into. Those are made by the engine from what is compared here.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.arches import archs

from nereus.ir.arch import Arch
from nereus.models.fp8 import BLOCK, fp8_refusals
from nereus.models.legality import legal_tp
from nereus.models.presets import preset
from nereus.runtime.fp8 import quantise

deep_gemm = pytest.importorskip("vllm.utils.deep_gemm")
fp8_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (576, 200), (1, 1), (130, 129)])
@pytest.mark.parametrize("spread", [1e-7, 0.02, 1.0, 300.0])
def test_the_same_bytes_as_vllm(shape: tuple[int, int], spread: float) -> None:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    weight = (torch.randn(shape, generator=generator) * spread).to(torch.bfloat16)
    cast = deep_gemm.per_block_cast_to_fp8
    # The function itself, without the compiler around it.
    values, scales = getattr(cast, "_torchdynamo_orig_callable", cast)(weight, [BLOCK, BLOCK])
    made = quantise(weight)
    assert made.values.dtype == values.dtype
    assert torch.equal(made.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(made.scale_inv, scales)


def _vllm_refuses(arch: Arch, tp: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What vLLM's linears and experts of ``arch`` say at ``tp``, by the partition sizes that its layers have."""
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_world_size", lambda: tp)
    block = [BLOCK, BLOCK]
    heads = arch.num_heads // tp
    kv = max(1, arch.num_kv_heads // tp)
    dim, hidden = arch.head_dim, arch.hidden
    # QKVParallelLinear counts copies of kv heads into its output size.
    qkv = [heads * dim, kv * dim, kv * dim]
    linears = [(hidden, sum(qkv) * tp, hidden, qkv), (arch.num_heads * dim, hidden, heads * dim, [hidden])]
    if arch.moe is None:
        ffn = arch.ffn // tp
        linears += [(hidden, 2 * arch.ffn, hidden, [ffn, ffn]), (arch.ffn, hidden, ffn, [hidden])]
    try:
        for input_size, output_size, input_part, output_parts in linears:
            fp8_utils.validate_fp8_block_shape(
                SimpleNamespace(tp_size=tp), input_size, output_size, input_part, output_parts, block
            )
        if arch.moe is not None:
            fp8_utils.validate_fp8_block_shape_moe(arch.moe.expert_ffn // tp, block)
    except ValueError:
        return True
    return False


def _compare(arch: Arch) -> None:
    for tp in legal_tp(arch, limit=32):
        if arch.moe is not None and arch.moe.expert_ffn % tp:
            continue
        with pytest.MonkeyPatch.context() as patch:
            refused = _vllm_refuses(arch, tp, patch)
        assert bool(fp8_refusals(arch, tp=tp, form="segments")) == refused, tp


@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", "qwen2.5-7b", "qwen2.5-0.5b", "qwen3-4b", "qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b"],
)
def test_published_models(name: str) -> None:
    _compare(preset(name))


@settings(max_examples=80, deadline=None)
@given(arch=archs(families=("llama", "qwen3", "moe", "mixtral")), data=st.data())
def test_random_models(arch: Arch, data: st.DataObject) -> None:
    # A vocabulary that every degree divides, so that only the blocks decide.
    _compare(replace(arch, vocab=data.draw(st.sampled_from([1024, 4096])), qkv_bias=False))
