"""Seconds that an engine takes per generated token, by class of operation at data-sheet rates.

With ``batch`` sequences at once, a decode step reads the weights once and every sequence's cache, multiplies, and
reduces over tp twice a layer; a token's share is that over the batch. Prefill of the prompt is spread over the tokens
that follow it. The classes are added, not overlapped: engines reach 0.15 to 0.8 of the memory roofline, which their
factors say (``learned.py``), and no single roof explains both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from nereus.planner.runs import Floats, Machine

CLASSES = ("weights", "cache", "compute", "tp", "launch", "prefill", "prefill_core", "sampling")

PRIOR: dict[str, float] = {
    "weights": 1.4,
    "cache": 1.6,
    "compute": 1.6,
    "tp": 2.0,
    "launch": 1.0,
    "prefill": 1.6,
    "prefill_core": 1.6,
    "sampling": 1.0,
}
SPREAD: dict[str, float] = {
    "weights": 0.7,
    "cache": 1.0,
    "compute": 0.7,
    "tp": 1.5,
    "launch": 2.0,
    "prefill": 0.7,
    "prefill_core": 1.0,
    "sampling": 2.0,
}

NUM_PLACES = 4
_BF16 = 2
#: Seconds to launch a layer's kernels, to start a collective (times log2 of the ranks), to sample one token.
_LAUNCH_S, _COLLECTIVE_S, _SAMPLE_S = 30e-6, 20e-6, 20e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One engine on ``tp`` x ``pp`` GPUs that keeps ``batch`` sequences going. Bytes are per element."""

    machine: Machine
    labels: tuple[str, ...]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    active_params: float  # that one token uses
    params: float
    weight_bytes: float
    cache_bytes: float
    tp: int
    pp: int
    prompt_len: float
    response_len: float
    batch: float

    @property
    def cache_token_bytes(self) -> float:
        """On each GPU; key and value heads are replicated once tp exceeds them."""
        of_head = self.hidden / self.heads * self.cache_bytes
        return 2 * self.layers / self.pp * max(self.kv_heads / self.tp, 1) * of_head


@dataclass(frozen=True, slots=True)
class _Columns:
    layers: Floats
    hidden: Floats
    active_params: Floats
    params: Floats
    weight_bytes: Floats
    tp: Floats
    pp: Floats
    prompt_len: Floats
    response_len: Floats
    batch: Floats
    cache_token_bytes: Floats


def class_seconds(servings: Sequence[Serving]) -> Floats:
    """[servings, CLASSES] seconds per generated token of one engine. A pipeline of p stages cuts the batch into p
    groups, of which each stage works on one: every group reads all weights, the rest is done p at a time."""
    c = _Columns(*(np.array([getattr(s, f.name) for s in servings], float) for f in fields(_Columns)))
    flops, flops16, hbm, intra = (
        np.array([getattr(s.machine, name) for s in servings], float)
        for name in ("flops_per_s", "flops16_per_s", "hbm_bytes_per_s", "intra_bytes_per_s")
    )
    at_once = np.minimum(c.pp, np.maximum(c.batch, 1.0))
    # Experts that a group does not reach are not read.
    reached = np.minimum(c.params, c.active_params * np.maximum(c.batch / c.pp, 1.0))
    reduced = 2 * c.layers * 2 * (c.tp - 1) / c.tp * _BF16 * c.hidden / intra
    prompts = c.prompt_len / c.response_len  # prompt tokens for each generated one
    found = {
        "weights": reached * c.weight_bytes / c.tp / hbm / c.batch,
        "cache": (c.prompt_len + c.response_len / 2) * c.cache_token_bytes * c.pp / at_once / hbm,
        "compute": 2 * c.active_params / c.tp / flops / at_once,
        "tp": reduced * (1 + prompts) / at_once,
        "launch": c.layers * (_LAUNCH_S + 2 * _COLLECTIVE_S * np.log2(c.tp)) / c.batch,
        "prefill": 2 * c.active_params * prompts / c.tp / flops / at_once,
        "prefill_core": 2 * c.layers * c.prompt_len * prompts * c.hidden / c.tp / flops16 / at_once,
        "sampling": np.full_like(c.batch, _SAMPLE_S),
    }
    return np.stack([found[name] for name in CLASSES], axis=1)


def places(servings: Sequence[Serving]) -> Floats:
    """[servings, NUM_PLACES] for ``Seen.place``."""
    rows = [
        (np.log2(s.tp), np.log2(s.prompt_len), np.log2(s.response_len), 0.5 * np.log2(max(s.batch, 1.0)))
        for s in servings
    ]
    return np.array(rows, float).reshape(len(rows), NUM_PLACES)
