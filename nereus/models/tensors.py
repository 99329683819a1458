"""Logical tensors of every family under their published (HF) names. ``nereus.models.legality``: which degrees fit.

Query, key, value, gate and up stay separate: how a framework fuses them is a property of its storage, not of the state.
Tensors of one expert carry its number, and their ``cut`` is over the expert tensor-parallel degree (etp), not tp.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from nereus.ir.arch import Arch, Lora, Mla, Moe
from nereus.ir.tensor import Cut, LogicalTensor
from nereus.models.lora import with_adapters

HEADS = ("lm", "value")


def logical_tensors(arch: Arch, head: str = "lm", lora: Lora | None = None) -> tuple[LogicalTensor, ...]:
    """All tensors in model order: embedding, layers, final norm, head (lm, or value: ``score.weight`` [1, hidden]);
    with ``lora`` each adapted matrix is followed by its two factors."""
    return _all_tensors(arch, head, lora)


@lru_cache(maxsize=64)
def _all_tensors(arch: Arch, head: str, lora: Lora | None) -> tuple[LogicalTensor, ...]:
    if lora is not None:
        return tuple(with_adapters(_all_tensors(arch, head, None), lora))
    if head not in HEADS:
        raise ValueError(f"a model's head is lm or value, not '{head}'")
    return (
        *_front(arch, head),
        *(t for layer in range(arch.num_layers) for t in _layer(arch, layer)),
        *_back(arch, head),
    )


@lru_cache(maxsize=64)
def num_params(arch: Arch, head: str = "lm", lora: Lora | None = None, *, trainable: bool = False) -> int:
    """Parameters, or only the ``trainable`` ones; a tied embedding counts once."""
    return sum(t.numel for t in logical_tensors(arch, head, lora) if t.trainable or not trainable)


def _front(arch: Arch, head: str) -> Iterator[LogicalTensor]:
    yield LogicalTensor(
        name="model.embed_tokens.weight",
        shape=(arch.vocab, arch.hidden),
        cut=Cut(dim=0, groups=arch.vocab, vocab=True),
        first=True,
        last=arch.tied_embeddings and head == "lm",  # a value head needs no second copy of the embedding
    )


def _back(arch: Arch, head: str) -> Iterator[LogicalTensor]:
    yield LogicalTensor(name="model.norm.weight", shape=(arch.hidden,), last=True)
    if head == "value":
        yield LogicalTensor(name="score.weight", shape=(1, arch.hidden), last=True)
    elif not arch.tied_embeddings:
        yield LogicalTensor(
            name="lm_head.weight",
            shape=(arch.vocab, arch.hidden),
            cut=Cut(dim=0, groups=arch.vocab, vocab=True),
            last=True,
        )


def _layer(arch: Arch, layer: int) -> Iterator[LogicalTensor]:
    prefix = f"model.layers.{layer}"
    yield LogicalTensor(name=f"{prefix}.input_layernorm.weight", shape=(arch.hidden,), layer=layer)
    if arch.mla is not None:
        yield from _latent_attention(arch, arch.mla, f"{prefix}.self_attn", layer)
    else:
        yield from _attention(arch, f"{prefix}.self_attn", layer)
    yield LogicalTensor(name=f"{prefix}.post_attention_layernorm.weight", shape=(arch.hidden,), layer=layer)
    if arch.moe is not None and layer >= arch.moe.first_dense_layers:
        yield from _experts(arch, arch.moe, prefix, layer)
    else:
        yield from _mlp(arch.hidden, arch.ffn, f"{prefix}.mlp", layer)


def _attention(arch: Arch, prefix: str, layer: int) -> Iterator[LogicalTensor]:
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    # Fused, a kv head's rows follow the rows of the query heads that share it.
    per_group = queries // arch.num_kv_heads
    period = per_group + 2 * arch.head_dim
    bounds = (0, per_group, per_group + arch.head_dim, period)
    for number, (name, rows, groups) in enumerate(
        (("q_proj", queries, arch.num_heads), ("k_proj", keys, arch.num_kv_heads), ("v_proj", keys, arch.num_kv_heads))
    ):
        fused = (bounds[number], bounds[number + 1], period, arch.num_kv_heads)
        cut = Cut(dim=0, groups=groups, replicate=number > 0, fused=fused)
        yield LogicalTensor(name=f"{prefix}.{name}.weight", shape=(rows, arch.hidden), cut=cut, layer=layer)
        if arch.qkv_bias:
            yield LogicalTensor(name=f"{prefix}.{name}.bias", shape=(rows,), cut=cut, layer=layer)
    yield LogicalTensor(
        name=f"{prefix}.o_proj.weight",
        shape=(arch.hidden, queries),
        cut=Cut(dim=1, groups=arch.num_heads),
        layer=layer,
    )
    if arch.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield LogicalTensor(name=f"{prefix}.{name}.weight", shape=(arch.head_dim,), layer=layer)


def _latent_attention(arch: Arch, mla: Mla, prefix: str, layer: int) -> Iterator[LogicalTensor]:
    heads, hidden = arch.num_heads, arch.hidden
    by_head = Cut(dim=0, groups=heads)
    query_rows = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        yield LogicalTensor(name=f"{prefix}.q_proj.weight", shape=(query_rows, hidden), cut=by_head, layer=layer)
    else:
        rank = mla.q_lora_rank
        yield LogicalTensor(name=f"{prefix}.q_a_proj.weight", shape=(rank, hidden), layer=layer)
        yield LogicalTensor(name=f"{prefix}.q_a_layernorm.weight", shape=(rank,), layer=layer)
        yield LogicalTensor(name=f"{prefix}.q_b_proj.weight", shape=(query_rows, rank), cut=by_head, layer=layer)
    # The latent (kv_a) is shared by all heads, so every rank holds all of it.
    latent = mla.kv_lora_rank
    yield LogicalTensor(
        name=f"{prefix}.kv_a_proj_with_mqa.weight", shape=(latent + mla.qk_rope_head_dim, hidden), layer=layer
    )
    yield LogicalTensor(name=f"{prefix}.kv_a_layernorm.weight", shape=(latent,), layer=layer)
    yield LogicalTensor(
        name=f"{prefix}.kv_b_proj.weight",
        shape=(heads * (mla.qk_nope_head_dim + mla.v_head_dim), latent),
        cut=by_head,
        layer=layer,
    )
    yield LogicalTensor(
        name=f"{prefix}.o_proj.weight",
        shape=(hidden, heads * mla.v_head_dim),
        cut=Cut(dim=1, groups=heads),
        layer=layer,
    )


def _mlp(
    hidden: int,
    ffn: int,
    prefix: str,
    layer: int,
    *,
    expert: int | None = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[LogicalTensor]:
    gate, up, down = names
    for name in (gate, up):
        yield LogicalTensor(
            name=f"{prefix}.{name}.weight",
            shape=(ffn, hidden),
            cut=Cut(dim=0, groups=ffn),
            layer=layer,
            expert=expert,
        )
    yield LogicalTensor(
        name=f"{prefix}.{down}.weight",
        shape=(hidden, ffn),
        cut=Cut(dim=1, groups=ffn),
        layer=layer,
        expert=expert,
    )


def _experts(arch: Arch, moe: Moe, prefix: str, layer: int) -> Iterator[LogicalTensor]:
    mixtral = arch.family == "mixtral"
    block = f"{prefix}.block_sparse_moe" if mixtral else f"{prefix}.mlp"
    yield LogicalTensor(name=f"{block}.gate.weight", shape=(moe.num_experts, arch.hidden), layer=layer)
    if moe.router_bias:
        # Balanced by the trainer's own rule, not by gradients: a buffer.
        yield LogicalTensor(
            name=f"{block}.gate.e_score_correction_bias", shape=(moe.num_experts,), layer=layer, trainable=False
        )
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for expert in range(moe.num_experts):
        yield from _mlp(
            arch.hidden,
            moe.expert_ffn,
            f"{block}.experts.{expert}",
            layer,
            expert=expert,
            names=names,
        )
    if moe.num_shared_experts:
        yield from _mlp(arch.hidden, moe.shared_expert_ffn, f"{block}.shared_experts", layer)
