"""Tiny models of every family as transformers builds them, and what Nereus makes of their configurations."""

from __future__ import annotations

from typing import Any

from nereus.ir.arch import Arch
from nereus.models.hf import arch_from_config

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
    },
}


def config(family: str, **more: Any) -> Any:
    from transformers import AutoConfig

    keys = {**_SIZES, **FAMILIES[family], **more}
    return AutoConfig.for_model(family, **{key: value for key, value in keys.items() if value is not None})


def arch(family: str, **more: Any) -> Arch:
    """What Nereus reads from the ``config.json`` that transformers would write."""
    return arch_from_config(config(family, **more).to_dict())
