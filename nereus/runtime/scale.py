"""Smaller models of the same structure, so that a change between large plans runs on one machine.

Heads, kv heads, experts and every degree stay; what shrinks is the width of a unit (head_dim, hidden, ffn, vocabulary)
and the number of layers. An extent that a degree divides is still divided by it, and one that it does not divide still
is not, so shards are uneven exactly where they were. All plans of a run are scaled together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm

from nereus.ir.arch import Arch
from nereus.ir.plan import Plan, Stage
from nereus.models.tensors import num_params

#: Widest hidden size that ``auto`` takes, and what all devices together may then hold.
AUTO_WIDTH, AUTO_LAYERS = 128, 4
AUTO_TOTAL_BYTES = 384 * 2**20
_SMALLEST_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """``width``: hidden size to aim at; ``layers``, ``vocab`` likewise. Results are the next legal sizes above."""

    width: int
    layers: int = AUTO_LAYERS
    vocab: int | None = None

    def __post_init__(self) -> None:
        if self.width < 1 or self.layers < 1 or (self.vocab is not None and self.vocab < 1):
            raise ValueError("width, layers and vocabulary of a scale are at least 1")

    def __str__(self) -> str:
        return f"{self.width},{self.layers}" + (f",{self.vocab}" if self.vocab is not None else "")


def parse_scale(text: str) -> Scale | str:
    """``auto``, ``none`` or WIDTH[,LAYERS[,VOCAB]]. ValueError with a plain sentence otherwise."""
    if text in ("auto", "none"):
        return text
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3:
        raise ValueError(f"a scale is auto, none or WIDTH[,LAYERS[,VOCAB]], not '{text}'")
    return Scale(
        width=numbers[0],
        layers=numbers[1] if len(numbers) > 1 else AUTO_LAYERS,
        vocab=numbers[2] if len(numbers) > 2 else None,
    )


def scale_plans(plans: Sequence[Plan], scale: Scale | str) -> tuple[Plan, ...]:
    """Every plan with smaller models, each model shrunk in the same way in all of them."""
    if isinstance(scale, str) and scale not in ("auto", "none"):
        raise ValueError(f"a scale is 'auto', 'none' or a Scale, not {scale!r}")
    if scale == "none":
        return tuple(plans)
    if isinstance(scale, str):
        scale = _automatic(plans)
    models = {}
    splits: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for name in dict.fromkeys(m.name for plan in plans for m in plan.models):
        stages = [s for plan in plans for s in plan.stages if s.model == name and s.service is None]
        for arch in {m.arch for plan in plans for m in plan.models if m.name == name}:
            models[name, arch] = scale_arch(arch, scale, stages)
        for stage in stages:
            layers = models[name, next(p for p in plans if stage in p.stages).model(name).arch].num_layers
            splits[name, _parts(stage)] = scale_split(_parts(stage), layers)
    return tuple(
        replace(
            plan,
            models=tuple(replace(m, arch=models[m.name, m.arch]) for m in plan.models),
            stages=tuple(
                _with_parts(s, splits[s.model, _parts(s)]) if (s.model, _parts(s)) in splits else s for s in plan.stages
            ),
        )
        for plan in plans
    )


def _parts(stage: Stage) -> tuple[int, ...]:
    """Layers of every stage, or of every chunk of an interleaved schedule."""
    return stage.chunks or stage.pp_split


def _with_parts(stage: Stage, parts: tuple[int, ...]) -> Stage:
    if not stage.chunks:
        return replace(stage, pp_split=parts)
    return replace(stage, chunks=parts, pp_split=tuple(sum(parts[i :: stage.pp]) for i in range(stage.pp)))


def scale_arch(arch: Arch, scale: Scale, stages: Sequence[Stage]) -> Arch:
    """``arch`` with a hidden size near ``scale.width``, legal for every degree of ``stages``."""
    ratio = min(1.0, scale.width / arch.hidden)
    tps = sorted({s.tp for s in stages})
    rows = sorted({s.fsdp for s in stages if s.fsdp})  # rows of a local box are chunked over these
    cut = sorted({*tps, *(tp * shards for tp in tps for shards in rows)})
    num_layers = min(arch.num_layers, _num_layers(arch.num_layers, scale.layers, stages))
    vocab = scale.vocab if scale.vocab is not None else max(4 * scale.width, ceil(arch.vocab * ratio / 8))
    smaller = replace(
        arch,
        num_layers=num_layers,
        hidden=_shrink(arch.hidden, ceil(arch.hidden * ratio), rows),
        head_dim=_shrink(arch.head_dim, ceil(arch.head_dim * ratio), ()),
        ffn=_shrink(arch.ffn, ceil(arch.ffn * ratio), cut),
        vocab=_shrink(arch.vocab, min(vocab, arch.vocab), cut),
    )
    if arch.moe is not None:
        smaller = replace(
            smaller,
            moe=replace(
                arch.moe,
                expert_ffn=_shrink(arch.moe.expert_ffn, ceil(arch.moe.expert_ffn * ratio), cut),
                shared_expert_ffn=_shrink(arch.moe.shared_expert_ffn, ceil(arch.moe.shared_expert_ffn * ratio), cut),
                first_dense_layers=min(arch.moe.first_dense_layers, max(num_layers - 1, 0)),
            ),
        )
    if arch.mla is not None:
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        ranks = {name: max(1, ceil(getattr(arch.mla, name) * ratio)) for name in names}
        query = None if arch.mla.q_lora_rank is None else max(1, ceil(arch.mla.q_lora_rank * ratio))
        smaller = replace(smaller, mla=replace(arch.mla, q_lora_rank=query, **ranks))
    return smaller


def scale_split(split: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Layers per pipeline stage in the same proportions, at least one each; even stays even, uneven stays uneven.

    ValueError where there are fewer layers than stages.
    """
    total, parts = sum(split), len(split)
    if num_layers < parts:
        raise ValueError(f"{num_layers} layers do not make {parts} pipeline stages")
    if num_layers == total:
        return split
    exact = [count * num_layers / total for count in split]
    counts = [max(1, int(value)) for value in exact]
    while sum(counts) < num_layers:
        counts[max(range(parts), key=lambda i: (exact[i] - counts[i], -i))] += 1
    while sum(counts) > num_layers:
        counts[min((i for i in range(parts) if counts[i] > 1), key=lambda i: (exact[i] - counts[i], i))] -= 1
    if len(set(split)) > 1 and len(set(counts)) == 1 and counts[0] > 1:
        low = min(range(parts), key=lambda i: (split[i], i))
        high = max(range(parts), key=lambda i: (split[i], -i))
        counts[low] -= 1
        counts[high] += 1
    return tuple(counts)


def state_bytes(plan: Plan) -> int:
    """About what all devices of ``plan`` hold together (sharding counted, kv replicas and tied ends not)."""
    total = 0
    for stage in plan.stages:
        if stage.service is not None:
            continue
        model = plan.model(stage.model)
        params = num_params(model.arch, model.head)
        replicas = stage.dp * stage.cp
        for slot in stage.slots:
            sharded = stage.fsdp or stage.zero >= 3 or (stage.zero and slot.name != "weight")
            total += params * slot.element_bytes * (max(1, replicas // stage.num_shards) if sharded else replicas)
    return total


def _automatic(plans: Sequence[Plan]) -> Scale:
    width = AUTO_WIDTH
    while width > _SMALLEST_WIDTH:
        scale = Scale(width=width)
        if max(state_bytes(plan) for plan in scale_plans(plans, scale)) <= AUTO_TOTAL_BYTES:
            break
        width //= 2
    return Scale(width=width)


def _num_layers(original: int, wanted: int, stages: Iterable[Stage]) -> int:
    """Enough for every pipeline, and a multiple of those that divide the layers evenly now."""
    splits = {_parts(s) for s in stages if s.pp_split}
    even = lcm(*(len(split) for split in splits if len(set(split)) == 1)) if splits else 1
    uneven = max((len(split) + 1 for split in splits if len(set(split)) > 1), default=1)
    return min(original, even * ceil(max(wanted, uneven) / even))


def _shrink(extent: int, target: int, divisors: Iterable[int]) -> int:
    """Smallest size from ``target`` on that the same ones of ``divisors`` divide; at most ``extent``."""
    if extent == 0:
        return 0
    kept = [d for d in divisors if d > 1]
    step = lcm(*(d for d in kept if extent % d == 0))
    spoilers = [d for d in kept if extent % d]
    for size in range(step * max(1, ceil(target / step)), extent, step):
        if all(size % d for d in spoilers):
            return size
    return extent
