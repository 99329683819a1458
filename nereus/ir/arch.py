"""The shape of a transformer, as published in its configuration. Tensors follow from it (``nereus.models.tensors``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    num_experts: int
    experts_per_token: int
    expert_ffn: int
    num_shared_experts: int = 0
    shared_expert_ffn: int = 0  # width of all shared experts together
    first_dense_layers: int = 0
    #: DeepSeek-V3's aux-free routing keeps one bias per expert.
    router_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek). Ranks in elements; ``q_lora_rank`` None = one full q projection."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters beside linears; everything else is frozen. The update is scaled by ``alpha / rank``."""

    rank: int
    alpha: float
    #: Module names such as ``q_proj``; empty: every linear of every layer, experts included, the router not.
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """Dense or MoE decoder-only transformer with RMSNorm and a gated MLP."""

    family: str  # llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v3
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: Moe | None = None
    mla: Mla | None = None
