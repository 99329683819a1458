"""Weights fed to vLLM's own ``load_weights`` bucket by bucket, against one whole load.

After every bucket each module of vLLM (all experts of a layer are one) is as it was or wholly new, so whatever an
engine does with a complete layer sees no half of one; buckets of single tensors, the control, leave halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from frameworks.harness import run
from frameworks.vllm_models import Builder, Coordinates, full_weights

from nereus.models.buckets import model_groups, pack

FAMILIES = ("qwen2", "qwen3 tied", "qwen3_moe", "deepseek_v3")
#: Smaller than an expert layer, larger than any group of the rest.
LIMIT_BYTES = 600_000


def _missing(model: torch.nn.Module) -> Iterator[tuple[str, bool, bool]]:
    """(module, whether elements are missing, whether elements are there), of every module of vLLM."""
    for name, module in model.named_modules():
        own = [p.data for p in module.parameters(recurse=False)]
        if own:
            missing = [bool(p.isnan().any()) for p in own]
            there = [not bool(p.isnan().all()) for p in own]
            yield name, any(missing), any(there)


def _feed(model: torch.nn.Module, batches: list[tuple[str, ...]], weights: dict[str, torch.Tensor]) -> list[str]:
    """Load batch by batch over NaN; modules left half loaded between two."""
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    halves: list[str] = []
    for names in batches:
        model.load_weights((name, weights[name]) for name in names)  # type: ignore[operator]
        halves += [name for name, missing, there in _missing(model) if missing and there]
    return halves


def _case(family: str) -> dict[str, Any]:
    builder = Builder(family)
    weights = full_weights(builder.arch)
    buckets = pack(
        model_groups(builder.arch), {n: w.numel() * w.element_size() for n, w in weights.items()}, LIMIT_BYTES
    )
    at = Coordinates(tp=2)
    whole = dict(builder.build(at, 0, 1, weights).named_parameters())
    fed = builder.build(at, 0, 1, None)
    halves = _feed(fed, [bucket.tensors for bucket in buckets], weights)
    found = dict(fed.named_parameters())
    same = found.keys() == whole.keys() and all(torch.equal(found[n], whole[n]) for n in whole)
    cut = _feed(fed, [(name,) for name in weights], weights)
    return {
        "buckets": len(buckets),
        "oversized": [g.name for b in buckets for g in b.groups if b.oversized],
        "same": same,
        "elements": sum(p.numel() for p in whole.values()),
        "halves": halves,
        "halves of single tensors": len(cut),
    }


def _all(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    return {family: _case(family) for family in FAMILIES}


def test_bucket_by_bucket_is_one_whole_load_and_no_module_is_left_half() -> None:
    (found,) = run(1, _all, init=False, timeout=300)
    assert tuple(found) == FAMILIES
    for name, result in found.items():
        print(name, result)
        assert result["same"] and result["elements"] > 100_000 and result["buckets"] > 4, (name, result)
        assert result["halves"] == [] and result["halves of single tensors"] > 5, (name, result)
        assert bool(result["oversized"]) == ("moe" in name or "deepseek" in name), (name, result)
