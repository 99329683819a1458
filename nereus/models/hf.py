"""``config.json`` of a published model -> ``Arch``.

Only the shape is read. What cannot be represented (biases in the MLP, layers of mixed kinds, packed weights) is refused
with a sentence rather than guessed: a wrong shape here would become wrong bytes later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nereus.ir.arch import Arch, Mla, Moe

_Config = Mapping[str, object]

#: What the tail of an architecture's name says about its head; the plan's ``head`` decides, the backbone is the same.
_TAILS = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")


def arch_from_config(config: Mapping[str, object]) -> Arch:
    """Raises ValueError with a plain sentence on a missing key, a wrong type or what ``Arch`` cannot represent."""
    if not isinstance(config, Mapping):
        raise ValueError("a model configuration is a JSON object with keys such as hidden_size")
    read = _READERS[_backbone(config)]
    _refuse_packed_weights(config)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {activation!r}; only gated MLPs with silu are supported")
    return read(config)


def _backbone(config: _Config) -> str:
    architectures = config.get("architectures")
    if isinstance(architectures, (list, tuple)) and architectures:
        name = str(architectures[0])
    elif isinstance(config.get("model_type"), str):
        name = _MODEL_TYPES.get(str(config["model_type"]), str(config["model_type"]))
    else:
        raise ValueError("the configuration names neither 'architectures' nor 'model_type'")
    backbone = name
    for tail in _TAILS:
        backbone = backbone.removesuffix(tail)
    if backbone not in _READERS:
        known = ", ".join(f"{key}ForCausalLM" for key in _READERS)
        raise ValueError(f"architecture '{name}' is not supported; supported are {known}")
    return backbone


def _llama(config: _Config) -> Arch:
    _refuse_flags(config, "attention_bias", "mlp_bias")
    return _dense(config, "llama")


def _mistral(config: _Config) -> Arch:
    return _dense(config, "mistral")


def _qwen2(config: _Config) -> Arch:
    return _dense(config, "qwen2", qkv_bias=True)


def _qwen3(config: _Config) -> Arch:
    _refuse_flags(config, "attention_bias")
    return _dense(config, "qwen3", qk_norm=True)


def _mixtral(config: _Config) -> Arch:
    moe = Moe(
        num_experts=_int(config, "num_local_experts"),
        experts_per_token=_int(config, "num_experts_per_tok"),
        expert_ffn=_int(config, "intermediate_size"),
    )
    return _dense(config, "mixtral", moe=moe)


def _qwen3_moe(config: _Config) -> Arch:
    _refuse_flags(config, "attention_bias")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "mlp_only_layers or decoder_sparse_step mixes dense layers between expert layers; "
            "only models whose dense layers come first are supported"
        )
    # transformers 5 writes the count under its own common name.
    count = "num_experts" if "num_experts" in config else "num_local_experts"
    moe = Moe(
        num_experts=_int(config, count if count in config else "num_experts"),
        experts_per_token=_int(config, "num_experts_per_tok"),
        expert_ffn=_int(config, "moe_intermediate_size"),
    )
    return _dense(config, "qwen3_moe", qk_norm=True, moe=moe)


def _deepseek_v3(config: _Config) -> Arch:
    """The main model; multi-token-prediction layers (``num_nextn_predict_layers``) are no part of it."""
    _refuse_flags(config, "attention_bias")
    if config.get("moe_layer_freq", 1) != 1:
        raise ValueError("moe_layer_freq other than 1 mixes dense layers between expert layers, which is not supported")
    expert_ffn, num_shared = _int(config, "moe_intermediate_size"), _count(config, "n_shared_experts", 0)
    moe = Moe(
        num_experts=_int(config, "n_routed_experts"),
        experts_per_token=_int(config, "num_experts_per_tok"),
        expert_ffn=expert_ffn,
        num_shared_experts=num_shared,
        shared_expert_ffn=num_shared * expert_ffn,
        first_dense_layers=_count(config, "first_k_dense_replace", 0),
        router_bias=config.get("topk_method", "noaux_tc") == "noaux_tc",
    )
    mla = Mla(
        q_lora_rank=None if config.get("q_lora_rank") is None else _int(config, "q_lora_rank"),
        kv_lora_rank=_int(config, "kv_lora_rank"),
        qk_nope_head_dim=_int(config, "qk_nope_head_dim"),
        qk_rope_head_dim=_int(config, "qk_rope_head_dim"),
        v_head_dim=_int(config, "v_head_dim"),
    )
    heads = _int(config, "num_attention_heads")
    return Arch(
        family="deepseek_v3",
        num_layers=_int(config, "num_hidden_layers"),
        hidden=_int(config, "hidden_size"),
        num_heads=heads,
        num_kv_heads=heads,  # every head has its own keys and values once the latent is expanded
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        ffn=_int(config, "intermediate_size"),
        vocab=_int(config, "vocab_size"),
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        moe=moe,
        mla=mla,
    )


def _dense(
    config: _Config, family: str, *, qkv_bias: bool = False, qk_norm: bool = False, moe: Moe | None = None
) -> Arch:
    hidden, heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else _int(config, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return Arch(
        family=family,
        num_layers=_int(config, "num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config, family, hidden, heads),
        ffn=_int(config, "intermediate_size"),
        vocab=_int(config, "vocab_size"),
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        moe=moe,
    )


def _head_dim(config: _Config, family: str, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return _int(config, "head_dim")
    if family.startswith("qwen3"):
        return 128  # that family's default does not follow from its width
    if hidden % heads:
        raise ValueError(f"head_dim is missing and hidden_size {hidden} does not divide by {heads} heads")
    return hidden // heads


def _refuse_flags(config: _Config, *keys: str) -> None:
    for key in keys:
        if config.get(key):
            raise ValueError(f"{key} is set; this family is supported without it only")


def _refuse_packed_weights(config: _Config) -> None:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return
    method = quantization.get("quant_method")
    if method != "fp8":  # fp8 checkpoints keep the shapes; packed 4-bit ones do not
        raise ValueError(f"the weights are quantized ({method}) and have packed shapes; name the unquantized model")


def _int(config: _Config, key: str) -> int:
    value = config.get(key)
    if value is None:
        raise ValueError(f"key '{key}' is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"key '{key}' is {value!r}; a positive whole number is needed")
    return value


def _count(config: _Config, key: str, default: int) -> int:
    """Like ``_int``, but zero, null and absence mean something."""
    return _int(config, key) if config.get(key) else default


def _flag(config: _Config, key: str) -> bool:
    value = config.get(key, False)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"key '{key}' is {value!r}; true or false is needed")
    return bool(value)


_READERS: dict[str, Callable[[_Config], Arch]] = {
    "Llama": _llama,
    "Mistral": _mistral,
    "Qwen2": _qwen2,
    "Qwen3": _qwen3,
    "Mixtral": _mixtral,
    "Qwen3Moe": _qwen3_moe,
    "DeepseekV3": _deepseek_v3,
}

_MODEL_TYPES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v3": "DeepseekV3",
}
