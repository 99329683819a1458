"""Published shapes of the models that people post-train, by lower-case name.

Source of every row: the ``config.json`` of the named release. The parameter counts that follow from them are checked
against the published ones in ``tests/models/test_presets.py``.
"""

from __future__ import annotations

from nereus.ir.arch import Arch, Mla, Moe


def preset_names() -> tuple[str, ...]:
    return tuple(_PRESETS)


def preset(name: str) -> Arch:
    """Raises KeyError for an unknown name."""
    return _PRESETS[name]


def _llama(layers: int, hidden: int, heads: int, kv: int, ffn: int, *, vocab: int = 128256, tied: bool = False) -> Arch:
    return Arch(
        family="llama",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        tied_embeddings=tied,
    )


def _mistral(layers: int, hidden: int, heads: int, ffn: int, vocab: int) -> Arch:
    # head_dim is 128 also where hidden / heads is not (Nemo, Small).
    return Arch(
        family="mistral",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        ffn=ffn,
        vocab=vocab,
    )


def _qwen2(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, *, tied: bool = False) -> Arch:
    return Arch(
        family="qwen2",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        tied_embeddings=tied,
        qkv_bias=True,
    )


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False) -> Arch:
    return Arch(
        family="qwen3",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        ffn=ffn,
        vocab=151936,
        tied_embeddings=tied,
        qk_norm=True,
    )


def _qwen3_moe(layers: int, hidden: int, heads: int, dense_ffn: int, expert_ffn: int) -> Arch:
    return Arch(
        family="qwen3_moe",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=4,
        head_dim=128,
        ffn=dense_ffn,
        vocab=151936,
        qk_norm=True,
        moe=Moe(num_experts=128, experts_per_token=8, expert_ffn=expert_ffn),
    )


def _mixtral(layers: int, hidden: int, heads: int, ffn: int, vocab: int) -> Arch:
    return Arch(
        family="mixtral",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        ffn=ffn,
        vocab=vocab,
        moe=Moe(num_experts=8, experts_per_token=2, expert_ffn=ffn),
    )


_DEEPSEEK_V3 = Arch(
    # The main model; the multi-token-prediction layer that the release also carries is not part of it.
    family="deepseek_v3",
    num_layers=61,
    hidden=7168,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    ffn=18432,
    vocab=129280,
    moe=Moe(
        num_experts=256,
        experts_per_token=8,
        expert_ffn=2048,
        num_shared_experts=1,
        shared_expert_ffn=2048,
        first_dense_layers=3,
        router_bias=True,
    ),
    mla=Mla(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)

_MOONLIGHT = Arch(
    family="deepseek_v3",
    num_layers=27,
    hidden=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=192,
    ffn=11264,
    vocab=163840,
    moe=Moe(
        num_experts=64,
        experts_per_token=6,
        expert_ffn=1408,
        num_shared_experts=2,
        shared_expert_ffn=2816,
        first_dense_layers=1,
        router_bias=True,
    ),
    mla=Mla(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)

_PRESETS: dict[str, Arch] = {
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, tied=True),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _llama(126, 16384, 128, 8, 53248),
    "llama-3.3-70b": _llama(80, 8192, 64, 8, 28672),
    "deepseek-llm-7b": _llama(30, 4096, 32, 32, 11008, vocab=102400),
    "qwen2-7b": _qwen2(28, 3584, 28, 4, 18944, 152064),
    "qwen2-72b": _qwen2(80, 8192, 64, 8, 29568, 152064),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568, 152064),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 12288, 1536),
    "mistral-7b-v0.1": _mistral(32, 4096, 32, 14336, 32000),
    "mistral-7b-v0.3": _mistral(32, 4096, 32, 14336, 32768),
    "mistral-nemo-12b": _mistral(40, 5120, 32, 14336, 131072),
    "mistral-small-24b": _mistral(40, 5120, 32, 32768, 131072),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 32000),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 32768),
    "deepseek-v3": _DEEPSEEK_V3,
    "moonlight-16b-a3b": _MOONLIGHT,
}
