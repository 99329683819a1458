"""Which tensor-parallel degrees a model allows, by the rules of the framework that cuts it.

Every dimension that is cut must come out, not only the heads. Frameworks differ in the vocabulary:

- ``megatron`` pads it to a multiple of 128 x tp, so that it always comes out;
- ``vllm`` and ``sglang`` pad it to a multiple of 64, whatever tp is: the padded number must divide by tp;
- ``fsdp`` (with DTensor), ``deepspeed``, ``torch``, and where nothing is said: the true number must divide by tp.

All of them copy whole kv heads, or cut their rows, where tp is a multiple of them. A value head is never cut.
"""

from __future__ import annotations

from nereus.ir.arch import Arch
from nereus.ir.layout import ENGINE_VOCAB_MULTIPLE

ENGINES = ("vllm", "sglang")


def tp_refusals(arch: Arch, tp: int, *, head: str = "lm", backend: str | None = None) -> tuple[str, ...]:
    """Why ``tp`` cannot cut the model, a sentence for each dimension; empty if it can. ``backend``: the framework,
    None = none of them may pad."""
    if head not in ("lm", "value"):
        raise ValueError(f"a model's head is lm or value, not '{head}'")
    if tp < 1:
        return (f"tensor parallelism needs at least one rank, not {tp}",)
    reasons = []
    if arch.num_heads % tp:
        reasons.append(f"{arch.num_heads} heads do not divide by {tp}")
    kv = arch.num_kv_heads
    if arch.mla is None and kv % tp and tp % kv:
        reasons.append(f"{kv} kv heads neither divide by {tp} nor divide it")
    if _has_dense_layers(arch) and arch.ffn % tp:
        reasons.append(f"ffn width {arch.ffn} does not divide by {tp}")
    if arch.moe is not None and arch.moe.shared_expert_ffn % tp:
        reasons.append(f"shared-expert width {arch.moe.shared_expert_ffn} does not divide by {tp}")
    # The embedding is cut even where a value head takes the place of the output matrix.
    if backend in ENGINES:
        padded = -(-arch.vocab // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE
        if padded % tp:
            more = "" if padded == arch.vocab else f", padded to {padded},"
            reasons.append(f"vocabulary {arch.vocab}{more} does not divide by {tp}")
    elif backend != "megatron" and arch.vocab % tp:
        reasons.append(f"vocabulary {arch.vocab} does not divide by {tp}")
    return tuple(reasons)


def legal_tp(arch: Arch, *, head: str = "lm", limit: int = 64, backend: str | None = None) -> tuple[int, ...]:
    """Every legal degree up to ``limit``, not only powers of two."""
    return tuple(tp for tp in range(1, limit + 1) if not tp_refusals(arch, tp, head=head, backend=backend))


def etp_refusals(arch: Arch, etp: int) -> tuple[str, ...]:
    """Why experts cannot be cut ``etp`` ways; no framework pads them. Empty for a model without experts."""
    if etp < 1:
        return (f"expert tensor parallelism needs at least one rank, not {etp}",)
    if arch.moe is None or arch.moe.expert_ffn % etp == 0:
        return ()
    return (f"expert width {arch.moe.expert_ffn} does not divide by {etp}",)


def legal_etp(arch: Arch, *, limit: int = 64) -> tuple[int, ...]:
    return tuple(etp for etp in range(1, limit + 1) if not etp_refusals(arch, etp))


def legal_ep(arch: Arch, *, limit: int = 256) -> tuple[int, ...]:
    """Degrees over which the experts of a layer spread evenly; 1 for a model without experts."""
    if arch.moe is None:
        return (1,)
    num_experts = arch.moe.num_experts
    return tuple(ep for ep in range(1, min(num_experts, limit) + 1) if num_experts % ep == 0)


def _has_dense_layers(arch: Arch) -> bool:
    return arch.moe is None or arch.moe.first_dense_layers > 0
