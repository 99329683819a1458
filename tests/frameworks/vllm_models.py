"""vLLM's model classes of every family, built at any tensor, expert and data parallel coordinates in one process, and
filled by vLLM's own loaders."""

from __future__ import annotations

import importlib
import json
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nereus.ir.arch import Arch
from nereus.models.hf import arch_from_config
from nereus.models.tensors import logical_tensors

COMMON: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
#: family -> (module of vllm.model_executor.models, class, what differs from COMMON)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {"model_type": "llama"}),
    "mistral": ("mistral", "MistralForCausalLM", {"model_type": "mistral", "sliding_window": None}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {"model_type": "qwen2"}),
    "qwen3 tied": ("qwen3", "Qwen3ForCausalLM", {"model_type": "qwen3", "tie_word_embeddings": True}),
    "mixtral": (
        "mixtral",
        "MixtralForCausalLM",
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v2 (no q_lora)": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {
            **_DEEPSEEK,
            "model_type": "deepseek_v2",
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
        },
    ),
    "deepseek_v3": (
        "deepseek_v2",
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "model_type": "deepseek_v3", "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
}


@dataclass(frozen=True)
class Coordinates:
    """``tp`` of one attention replica, ``dp`` replicas, experts over all of them (``ep``) or cut over all."""

    tp: int = 1
    dp: int = 1
    ep: bool = False

    def ranks(self) -> Iterator[tuple[int, int]]:
        return ((dp_rank, tp_rank) for dp_rank in range(self.dp) for tp_rank in range(self.tp))


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    _, name, differs = FAMILIES[family]
    return {**COMMON, **differs, "architectures": [name], **changes}


def arch_of(family: str) -> Arch:
    if "v2" not in family:
        return arch_from_config(config_of(family))
    arch = arch_from_config(config_of("deepseek_v3"))
    assert arch.mla is not None and arch.moe is not None
    return replace(arch, mla=replace(arch.mla, q_lora_rank=None), moe=replace(arch.moe, router_bias=False))


def full_weights(arch: Arch) -> dict[str, torch.Tensor]:
    """Every logical tensor under its published name, with values that no other element near it has."""
    found = {}
    for t in logical_tensors(arch):
        generator = torch.Generator().manual_seed(zlib.crc32(t.name.encode()))
        dtype = torch.float32 if "e_score_correction_bias" in t.name else torch.bfloat16
        found[t.name] = torch.randn(t.shape, generator=generator).to(dtype)
    return found


class Builder:
    """Builds one family's models. The parallel groups are those of a single process; their sizes and ranks, which are
    all that the model classes read while they are built and loaded, are set by hand."""

    def __init__(self, family: str, *, fp8: bool = False) -> None:
        from vllm import ModelRegistry
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs

        module, name, _ = FAMILIES[family]
        # By class: by name, vLLM would inspect it in a process of its own first.
        ModelRegistry.register_model(
            name, getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
        )
        changes: dict[str, Any] = {}
        if fp8:
            changes["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "weight_block_size": [128, 128],
                "activation_scheme": "dynamic",
            }
        self.config = config_of(family, **changes)
        self.arch = arch_of(family)
        folder = tempfile.mkdtemp()
        (Path(folder) / "config.json").write_text(json.dumps(self.config))
        self.vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=64,
        ).create_engine_config()
        self._current = lambda: set_current_vllm_config(self.vllm_config)
        with self._current():
            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
            else:
                parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            parallel_state.initialize_model_parallel()
        self._state = parallel_state

    def build(self, at: Coordinates, dp_rank: int, tp_rank: int, weights: dict[str, torch.Tensor] | None) -> Any:
        """The model of one process, with ``weights`` loaded by vLLM's loaders; nothing rearranged for kernels."""
        from vllm.model_executor.model_loader.utils import initialize_model

        parallel = self.vllm_config.parallel_config
        parallel.enable_expert_parallel = at.ep
        parallel.tensor_parallel_size, parallel.data_parallel_size = at.tp, at.dp
        for group, size, rank in (
            (self._state.get_tp_group(), at.tp, tp_rank),
            (self._state.get_dp_group(), at.dp, dp_rank),
        ):
            group.world_size, group.rank_in_group = size, rank
        self.vllm_config.compilation_config.static_forward_context.clear()
        with self._current():
            torch.set_default_dtype(torch.bfloat16)
            try:
                model = initialize_model(self.vllm_config)
            finally:
                torch.set_default_dtype(torch.float32)
            for _, parameter in model.named_parameters():
                parameter.data.zero_()
            if weights is not None:
                model.load_weights(weights.items())
        return model
