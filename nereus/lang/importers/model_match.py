"""Which preset a model path means: ``$HDFS/ckpt/Qwen2.5-32B-Instruct`` -> ``qwen2.5-32b``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nereus.lang.importers.result import closest
from nereus.models.presets import preset_names

#: Released under a name that says less than ours, or fine-tuned from a preset under a name of its own.
_ALIASES = {
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small": "mistral-small-24b",
    "mistral-7b": "mistral-7b-v0.1",
    "moonlight-16b": "moonlight-16b-a3b",
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "fsfairx-llama-3": "llama-3-8b",
    "qwen2-0.5b": "qwen2.5-0.5b",
    "qwen2-1.5b": "qwen2.5-1.5b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
}
#: Words that say how a model was tuned, quantized or packed, not what its shape is.
_TUNING = re.compile(
    r"(?<![a-z0-9])(instruct|chat|base|it|sft|rl|rm|reward|hf|mcore|dist|ckpt|bf16|fp16|fp8|config|verl|sglang|thinking|"
    r"math|coder|prm|critic|actor|random|dummy|skywork|meta|[0-9]{4}|[0-9]{6,8})(?![a-z0-9.])"
)
#: Taken off last: the version is part of names like deepseek-v3.
_VERSION = re.compile(r"-v[0-9](\.[0-9]+)?(?![a-z0-9.])")
#: Other shapes than the text model of the same name and size.
_OTHER_SHAPE = re.compile(r"(?<![a-z])(vl|vlm|omni|audio|vision|next|moe)(?![a-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    preset: str | None
    #: The name in the path is not the preset's own: what was recognised, for a comment.
    assumed: bool = False
    suggestions: tuple[str, ...] = ()


def match_model(path: str) -> Match:
    """The preset for a hub id or a path, by its last component that names one."""
    names = preset_names()
    parts = [p for p in re.split(r"[/\\]+", path.strip().lower().rstrip("/")) if p]
    for i, part in enumerate(reversed(parts[-3:])):
        name = _clean(part)
        if _OTHER_SHAPE.search(name):
            break
        if name in names:
            return Match(preset=name, assumed=i > 0)
        for candidate in _variants(name):
            target = _ALIASES.get(candidate, candidate)
            if target in names:
                return Match(preset=target, assumed=i > 0 or candidate != target or candidate not in _simple(name))
    return Match(preset=None, suggestions=closest(_clean(parts[-1]) if parts else "", names))


def _clean(part: str) -> str:
    part = part.removesuffix(".git").replace("_", "-").replace(" ", "-")
    # Meta writes Llama-3.2-1B and Meta-Llama-3-8B, others Llama3-8B or Llama-3-1-8B.
    part = re.sub(r"^meta-", "", part)
    part = re.sub(r"(?<![a-z])llama-?(\d)", r"llama-\1", part)
    return re.sub(r"(?<![a-z])qwen-(\d(?:\.\d)?-)", r"qwen\1", part)


def _simple(name: str) -> tuple[str, ...]:
    """The name itself and without what only says how it was tuned."""
    return (name, name.removesuffix("-instruct"), name.removesuffix("-chat"), name.removesuffix("-base"))


def _variants(name: str) -> tuple[str, ...]:
    found = list(_simple(name))
    stripped = name
    for pattern in (_TUNING, _VERSION, _TUNING):
        stripped = re.sub(r"-+", "-", pattern.sub("", stripped)).strip("-.")
        found.append(stripped)
    # A family and a size inside a longer name: `skywork-reward-llama-3.1-8b-v0.2`.
    inner = re.search(r"(llama-3(?:\.\d)?|qwen2(?:\.5)?|qwen3)-(\d+(?:\.\d+)?b(?:-a\d+b)?)(?![a-z0-9])", name)
    if inner:
        found.append(f"{inner[1]}-{inner[2]}")
    return tuple(dict.fromkeys(found))
