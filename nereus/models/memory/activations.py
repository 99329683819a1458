"""Bytes of activations, logits and KV cache on one rank (bf16 activations, flash attention, no dropout).

Per layer and micro-batch of s*b tokens (Korthikanti 2022, generalised to gated MLPs and grouped queries):

    tokens/cp * [ 8 h / (tp if sequence parallel else 1) + (2 (q + k + v + attention output) + 2 * 3 * ffn) / tp ]

where q, k, v, ffn are widths in elements. The first term are inputs and outputs of the two norms; a gated MLP keeps
three tensors of its width (gate, up, their product). For Llama-3.1-8B that is 34 h bytes a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.arch import Arch
from nereus.ir.plan import Stage, Workload
from nereus.models.batch import packed_microbatches

_BF16 = 2
_GATED_MLP_TENSORS = 3
#: bf16 logits, their fp32 copy, and while training the bf16 gradient.
LOGITS_TRAIN_BYTES = 8
LOGITS_FORWARD_BYTES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one micro-batch brings to one rank's pipeline stage."""

    tokens: int  # s * b of the whole micro-batch, before context parallelism
    num_microbatches: int  # per optimizer update and data-parallel rank


def batch_of(stage: Stage, workload: Workload) -> Batch:
    """``max_tokens`` a micro-batch take the place of ``micro_batch`` sequences; one whole sequence is always taken."""
    seq_len = workload.seq_len
    samples = max(1, workload.mini_batch // stage.dp)
    if stage.max_tokens is not None:
        tokens = max(stage.max_tokens, seq_len)
        return Batch(tokens=tokens, num_microbatches=packed_microbatches(samples, seq_len, tokens))
    return Batch(tokens=seq_len * stage.micro_batch, num_microbatches=max(1, samples // stage.micro_batch))


def layer_bytes(arch: Arch, stage: Stage, tokens: int, *, experts: bool) -> int:
    """Activations that one layer keeps for one micro-batch."""
    norms = 4 * _BF16 * arch.hidden / (stage.tp if stage.sp else 1)
    cut = _BF16 * (_attention_width(arch) + _mlp_width(arch, experts=experts))
    return round(tokens / stage.cp * (norms + _latent_bytes(arch) + cut / stage.tp))


def checkpoint_bytes(arch: Arch, stage: Stage, tokens: int) -> int:
    """A layer's input, all that full recompute keeps; sequence parallelism shards it over tp."""
    return round(tokens / stage.cp * _BF16 * arch.hidden / (stage.tp if stage.sp else 1))


def in_flight(stage: Stage, index: int, num_microbatches: int) -> float:
    """Micro-batches whose activations pipeline stage ``index`` holds at once under 1F1B (interleaved where vp > 1)."""
    if stage.vp == 1:
        return min(stage.pp - index, num_microbatches)
    chunks = 2 * (stage.pp - index - 1) + (stage.vp - 1) * stage.pp + 1
    return min(chunks, num_microbatches * stage.vp) / stage.vp


def train_activation_bytes(
    arch: Arch, stage: Stage, batch: Batch, index: int, num_layers: int, num_expert_layers: int
) -> tuple[int, int]:
    """(kept in flight, working set of recomputation) of pipeline stage ``index``.

    Selective recompute drops the attention scores, which flash attention never stores: it costs what ``none`` costs.
    """
    flying = in_flight(stage, index, batch.num_microbatches)
    if stage.recompute == "full":
        kept = num_layers * checkpoint_bytes(arch, stage, batch.tokens)
        return round(kept * flying), _largest_layer(arch, stage, batch.tokens, num_layers, num_expert_layers)
    kept = (num_layers - num_expert_layers) * layer_bytes(arch, stage, batch.tokens, experts=False)
    kept += num_expert_layers * layer_bytes(arch, stage, batch.tokens, experts=True)
    return round(kept * flying), 0


def forward_bytes(arch: Arch, stage: Stage, tokens: int, num_layers: int, num_expert_layers: int) -> int:
    """Log-probabilities, rewards, prefill: one layer's working set and the pipeline boundary."""
    working = _largest_layer(arch, stage, tokens, num_layers, num_expert_layers)
    return working + checkpoint_bytes(arch, stage, tokens)


def logits_bytes(arch: Arch, stage: Stage, tokens: int, *, train: bool) -> int:
    """On the last pipeline stage of a model with an lm head."""
    per_element = LOGITS_TRAIN_BYTES if train else LOGITS_FORWARD_BYTES
    return -(-tokens * arch.vocab * per_element // (stage.tp * stage.cp))


def kv_bytes_per_token(arch: Arch, stage: Stage, num_layers: int, element_bytes: int) -> int:
    """On one rank; kv heads are replicated once tp exceeds them, the latent of MLA always is."""
    if arch.mla is not None:
        return num_layers * (arch.mla.kv_lora_rank + arch.mla.qk_rope_head_dim) * element_bytes
    return 2 * num_layers * max(1, arch.num_kv_heads // stage.tp) * arch.head_dim * element_bytes


def _largest_layer(arch: Arch, stage: Stage, tokens: int, num_layers: int, num_expert_layers: int) -> int:
    dense = layer_bytes(arch, stage, tokens, experts=False) if num_layers > num_expert_layers else 0
    return max(dense, layer_bytes(arch, stage, tokens, experts=True) if num_expert_layers else 0)


def _attention_width(arch: Arch) -> int:
    """Elements per token of queries, keys, values and the attention's output, over all heads."""
    heads, kv_heads, head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
    if arch.mla is not None:
        return heads * (2 * (arch.mla.qk_nope_head_dim + arch.mla.qk_rope_head_dim) + 2 * arch.mla.v_head_dim)
    normed = (heads + kv_heads) * head_dim if arch.qk_norm else 0  # the norms keep their inputs too
    return 2 * heads * head_dim + 2 * kv_heads * head_dim + normed


def _latent_bytes(arch: Arch) -> int:
    """MLA's compressed queries and keys, which every tp rank computes whole."""
    if arch.mla is None:
        return 0
    return _BF16 * ((arch.mla.q_lora_rank or 0) + arch.mla.kv_lora_rank + arch.mla.qk_rope_head_dim)


def _mlp_width(arch: Arch, *, experts: bool) -> int:
    if not experts or arch.moe is None:
        return _GATED_MLP_TENSORS * arch.ffn
    moe = arch.moe
    # Each routed copy of a token is also kept as dispatched and as it comes back.
    routed = moe.experts_per_token * (_GATED_MLP_TENSORS * moe.expert_ffn + 2 * arch.hidden)
    return routed + _GATED_MLP_TENSORS * moe.shared_expert_ffn
