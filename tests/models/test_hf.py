"""Published configurations (shape keys only) -> Arch, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from nereus.models.hf import arch_from_config
from nereus.models.presets import preset


def _config(
    architecture: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "hidden_act": "silu",
        **more,
    }


_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _config(
        "LlamaForCausalLM",
        32,
        4096,
        32,
        14336,
        128256,
        num_key_value_heads=8,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
    ),
    "llama-3.2-1b": _config(
        "LlamaForCausalLM", 16, 2048, 32, 8192, 128256, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True
    ),
    "deepseek-llm-7b": _config("LlamaForCausalLM", 30, 4096, 32, 11008, 102400),
    "mistral-nemo-12b": _config("MistralForCausalLM", 40, 5120, 32, 14336, 131072, num_key_value_heads=8, head_dim=128),
    "mistral-7b-v0.3": _config("MistralForCausalLM", 32, 4096, 32, 14336, 32768, num_key_value_heads=8, head_dim=None),
    "qwen2.5-0.5b": _config(
        "Qwen2ForCausalLM", 24, 896, 14, 4864, 151936, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "qwen3-4b": _config(
        "Qwen3ForCausalLM",
        36,
        2560,
        32,
        9728,
        151936,
        num_key_value_heads=8,
        head_dim=128,
        attention_bias=False,
        tie_word_embeddings=True,
    ),
    "mixtral-8x7b": _config(
        "MixtralForCausalLM",
        32,
        4096,
        32,
        14336,
        32000,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3-30b-a3b": _config(
        "Qwen3MoeForCausalLM",
        48,
        2048,
        32,
        6144,
        151936,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        **_EXPERTS,
    ),
    "deepseek-v3": _config(
        "DeepseekV3ForCausalLM",
        61,
        7168,
        128,
        18432,
        129280,
        num_key_value_heads=128,
        q_lora_rank=1536,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        topk_method="noaux_tc",
        num_nextn_predict_layers=1,
        quantization_config={"quant_method": "fp8"},
        **_LATENT,
    ),
    "moonlight-16b-a3b": _config(
        "DeepseekV3ForCausalLM",
        27,
        2048,
        16,
        11264,
        163840,
        num_key_value_heads=16,
        q_lora_rank=None,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        **_LATENT,
    ),
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_configuration_equals_the_preset(name: str) -> None:
    assert arch_from_config(CONFIGS[name]) == preset(name)


def test_model_type_stands_in_for_architectures() -> None:
    config = dict(CONFIGS["qwen3-4b"], model_type="qwen3")
    del config["architectures"]
    assert arch_from_config(config) == preset("qwen3-4b")


def test_a_reward_model_has_the_same_backbone() -> None:
    config = dict(CONFIGS["llama-3.1-8b"], architectures=["LlamaForSequenceClassification"])
    assert arch_from_config(config) == preset("llama-3.1-8b")


@pytest.mark.parametrize(
    ("base", "change", "sentence"),
    [
        ("llama-3.1-8b", {"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported"),
        ("llama-3.1-8b", {"architectures": None}, "neither 'architectures' nor 'model_type'"),
        ("llama-3.1-8b", {"hidden_size": None}, "key 'hidden_size' is missing"),
        ("llama-3.1-8b", {"hidden_size": "4096"}, "positive whole number"),
        ("llama-3.1-8b", {"vocab_size": 0}, "positive whole number"),
        ("llama-3.1-8b", {"num_hidden_layers": True}, "positive whole number"),
        ("llama-3.1-8b", {"attention_bias": True}, "attention_bias is set"),
        ("llama-3.1-8b", {"mlp_bias": True}, "mlp_bias is set"),
        ("llama-3.1-8b", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama-3.1-8b", {"num_key_value_heads": 5}, "not a multiple"),
        ("llama-3.1-8b", {"hidden_size": 4100, "head_dim": None}, "head_dim is missing"),
        ("llama-3.1-8b", {"tie_word_embeddings": "yes"}, "true or false"),
        ("llama-3.1-8b", {"quantization_config": {"quant_method": "gptq"}}, "packed shapes"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0, 7]}, "mixes dense layers"),
        ("qwen3-30b-a3b", {"num_experts": None}, "'num_experts' is missing"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ],
)
def test_what_cannot_be_represented_is_refused_in_a_sentence(base: str, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        arch_from_config({**CONFIGS[base], **change})


def test_a_list_is_not_a_configuration() -> None:
    with pytest.raises(ValueError, match="JSON object"):
        arch_from_config([1, 2])  # type: ignore[arg-type]
