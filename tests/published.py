"""Published shapes of models and stages, as rows of public configurations write them."""

from __future__ import annotations

from typing import Any

from nereus.ir.arch import Arch
from nereus.ir.plan import Stage


def shape_of(arch: Arch) -> dict[str, Any]:
    """Everything that a row may say of its model."""
    found: dict[str, Any] = {
        "layers": arch.num_layers,
        "hidden": arch.hidden,
        "heads": arch.num_heads,
        "kv_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "ffn": arch.ffn,
        "vocab": arch.vocab,
        "tied_embeddings": arch.tied_embeddings,
    }
    if (moe := arch.moe) is not None:
        found |= {"experts": moe.num_experts, "topk": moe.experts_per_token, "expert_ffn": moe.expert_ffn}
        found |= {"dense_layers": moe.first_dense_layers, "shared_experts": moe.num_shared_experts}
    if (mla := arch.mla) is not None:
        found |= {"attention": "MLA", "kv_lora_rank": mla.kv_lora_rank, "q_lora_rank": mla.q_lora_rank}
    return found


def check_layers(stage: Stage, facts: dict[str, Any], num_layers: int) -> None:
    """Every layer lies on one pipeline stage, as the row says."""
    assert sum(stage.pp_split) == num_layers and len(stage.pp_split) == stage.pp
    if "pp_layers" in facts:
        assert list(stage.pp_split) == facts["pp_layers"]


def gpu_ids(facts: dict[str, Any]) -> tuple[int, int] | None:
    """First and last GPU of ``4-7``."""
    if "gpu_ids" not in facts:
        return None
    first, last = facts["gpu_ids"].split("-")
    return int(first), int(last)
