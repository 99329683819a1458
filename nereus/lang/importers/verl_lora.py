"""verl's adapter settings -> the ``lora`` block of a model, where they say what one says."""

from __future__ import annotations

from nereus.ir.arch import Arch
from nereus.lang.importers.hydra import Config
from nereus.models.lora import linear_kinds
from nereus.models.tensors import logical_tensors

#: verl's own default.
DEFAULT_ALPHA = 16.0


def lora_rank(config: Config, prefix: str) -> int:
    """0: no adapter. ``prefix``: ``actor_rollout_ref.model`` or ``critic.model``."""
    return max(0, config.integer(f"{prefix}.lora_rank") or config.integer(f"{prefix}.lora.rank") or 0)


def lora_block(config: Config, prefix: str, arch: Arch | None) -> tuple[str | None, str]:
    """The block's text, or None and why there is none. Call it for a model that has an adapter."""
    rank = lora_rank(config, prefix)
    if not config.integer(f"{prefix}.lora_rank"):
        return None, "Megatron's adapters stand beside fused matrices (one factor for q, k and v)"
    if arch is None:
        return None, "the model's shape is not known"
    if (config.text(f"{prefix}.exclude_modules") or "null").lower() not in ("null", "none", "[]", ""):
        return None, "exclude_modules is a pattern"
    given = config.text(f"{prefix}.target_modules") or "all-linear"
    known = linear_kinds(logical_tensors(arch))
    words = [word.strip(" '\"") for word in given.strip("[]() ").split(",") if word.strip(" '\"")]
    if words == ["all-linear"]:
        if arch.moe is not None:
            return None, "what all-linear means depends on how the module stores its experts"
        words = list(known)
    if not words or any(word not in known for word in words):
        return None, f"target_modules `{given[:60]}` is no list of this model's modules"
    chosen = tuple(word for word in known if word in words)
    targets = "" if chosen == known else f"  targets = ({', '.join(chosen)})"
    alpha = config.number(f"{prefix}.lora_alpha")
    alpha = DEFAULT_ALPHA if alpha is None or not 0 < alpha < 1e9 else alpha
    return f"lora {{ rank = {rank}  alpha = {alpha:g}{targets} }}", ""
