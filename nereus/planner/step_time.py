"""Seconds that each class of operation would take in one training step at data-sheet rates.

A step is the sum of its classes, each divided by the efficiency that the class reaches (``learned.py``). What differs
between layouts is in the formulas here; what differs between machines and programs is in the efficiencies. Formulas
after Narayanan 2021 and Korthikanti 2022, with these choices:

* 1F1B: a stage works for ``m + (p - 1) / v`` micro-batches: its own and the bubble, which interleaving over v chunks
  shortens. The slowest stage has ``ceil(layers / p)`` layers.
* Matrix multiplications lose to narrow operands and to short ones: the classes ``narrow`` and ``short`` are their time
  in proportion to 1 / local width and 1 / local tokens. Head sizes that are no multiple of 8 are ``misaligned``.
* ``scores`` is the memory traffic of attention scores that are written out; a flash kernel has next to none.
* A group that leaves the fast links works in levels: inside them first, then between them with what is left of it.
* Nothing is said of overlap: what a program hides of a class is part of its efficiency.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nereus.planner.runs import RECOMPUTE, SHARDING, Columns, Floats

_BF16 = 2
#: Reads and writes of one activation per layer and pass outside matrix multiplications: norms and residuals, which
#: without sequence parallelism every rank of a tensor-parallel group does whole, and the MLP's activation.
_NORM_ACCESSES, _ACTIVATION_ACCESSES = 6, 8
#: Reads and writes of each attention score where scores are written out (product, mask, softmax, dropout).
_SCORE_ACCESSES, _FLASH_SHARE = 6, 0.1
#: Width (elements) and length (tokens) at which ``narrow`` and ``short`` are as long as the multiplication itself.
_NARROW, _SHORT = 512, 1024
#: Seconds that a layer's kernels take to launch per pass, a collective step or a pipeline message to start.
_LAUNCH_S, _COLLECTIVE_S, _MESSAGE_S = 300e-6, 20e-6, 100e-6
#: Bytes an optimizer step reads and writes per parameter (fp32 master, two moments, gradient, weight).
_OPTIMIZER_BYTES = 28
_STEP_S = 0.02

CLASSES = (
    "gemm",
    "narrow",
    "short",
    "misaligned",
    "logits",
    "core",
    "scores",
    "elementwise",
    "tp",
    "tp_start",
    "tp_outside",
    "pipeline",
    "pipeline_start",
    "dp",
    "gather",
    "experts",
    "context",
    "optimizer",
    "launch",
    "step",
)

#: What a class takes, in data-sheet times, where nothing was measured; slow rather than fast.
PRIOR: dict[str, float] = {
    "gemm": 1.4,
    "narrow": 0.5,
    "short": 0.3,
    "misaligned": 0.4,
    "logits": 1.4,
    "core": 1.2,
    "scores": 1.0,
    "elementwise": 1.2,
    "tp": 1.3,
    "tp_start": 1.0,
    "tp_outside": 1.5,
    "pipeline": 1.0,
    "pipeline_start": 2.0,
    "dp": 0.7,
    "gather": 0.4,
    "experts": 0.7,
    "context": 0.3,
    "optimizer": 1.3,
    "launch": 0.8,
    "step": 1.0,
}

#: How far a class is from its prior, as a multiple of the spread between machines: compute varies least.
SPREAD: dict[str, float] = {
    "gemm": 0.5,
    "narrow": 2.0,
    "short": 2.0,
    "misaligned": 1.0,
    "logits": 0.6,
    "core": 1.0,
    "scores": 2.0,
    "elementwise": 1.0,
    "tp": 1.0,
    "tp_start": 2.0,
    "tp_outside": 1.5,
    "pipeline": 2.0,
    "pipeline_start": 2.0,
    "dp": 2.0,
    "gather": 2.0,
    "experts": 2.0,
    "context": 2.0,
    "optimizer": 1.0,
    "launch": 1.5,
    "step": 3.0,
}


def class_seconds(c: Columns) -> Floats:
    """[runs, CLASSES] seconds at data-sheet rates."""
    tokens = c.micro_batch * c.seq_len / c.cp
    layers = np.ceil(c.layers / c.pp)
    busy = c.num_microbatches + (c.pp - 1) / c.vp
    full, selective = c.recompute == RECOMPUTE.index("full"), c.recompute == RECOMPUTE.index("selective")
    forward = c.forward_only > 0
    passes = np.where(forward, 1.0, 3.0 + full)
    core_passes = np.where(forward, 1.0, passes + selective)
    # Messages between stages and to experts go forward, and again backward.
    directions = np.where(forward, 0.5, 1.0)
    sharded = c.sharding == SHARDING.index("full")
    attention = c.hidden**2 * (2 + 2 * c.kv_heads / c.heads)
    mlp = c.hidden * c.ffn * c.mlp_matrices * (c.experts_per_token + c.shared_experts)
    boundary = _BF16 * tokens * c.hidden
    reductions = busy * layers * np.where(forward, 2.0, np.where(full, 6.0, 4.0))
    crosses = c.gpus > c.domain

    gemm = busy * passes * layers * 2 * tokens * (attention + mlp) / c.tp / c.flops_per_s
    core = busy * core_passes * layers * 4 * tokens * c.seq_len * c.hidden / c.tp / c.flops16_per_s
    scores = busy * core_passes * layers * tokens * c.seq_len * c.heads / c.tp * _BF16 * _SCORE_ACCESSES
    accesses = _NORM_ACCESSES / np.where(c.sequence_parallel > 0, c.tp, 1.0) + _ACTIVATION_ACCESSES / c.tp
    elementwise = busy * passes * layers * boundary * accesses / c.hbm_bytes_per_s
    held = (c.params - c.expert_params) / (c.tp * c.pp) + c.expert_params / (c.tp * c.pp) / c.ep
    ranks = c.dp * c.cp
    shards = np.where((c.sharding == 0), 1.0, ranks)
    gathers = held * np.where(forward, 1, 3) * _BF16
    rate = np.where(crosses, c.nic_bytes_per_s, c.intra_bytes_per_s)
    found = {
        "gemm": gemm,
        "narrow": gemm * _NARROW / (c.hidden / c.tp),
        "short": gemm * _SHORT / tokens,
        "misaligned": np.where((c.hidden // c.heads) % 8 != 0, gemm + core, 0.0),
        "logits": np.where(forward, 1.0, 3.0) * busy * 2 * tokens * c.hidden * c.vocab / c.tp / c.flops16_per_s,
        "core": core,
        "scores": scores * np.where(c.flash > 0, _FLASH_SHARE, 1.0) / c.hbm_bytes_per_s,
        "elementwise": elementwise,
        "tp": reductions * _all_reduce(boundary, np.minimum(c.tp, c.domain)) / c.intra_bytes_per_s,
        "tp_start": reductions * np.log2(c.tp) * _COLLECTIVE_S,
        "tp_outside": reductions
        * _all_reduce(boundary / np.minimum(c.tp, c.domain), np.ceil(c.tp / c.domain))
        / c.nic_bytes_per_s,
        "pipeline": np.where(c.pp > 1, directions * busy * c.vp * 2 * boundary / c.tp / rate, 0.0),
        "pipeline_start": np.where(c.pp > 1, directions * (c.num_microbatches * c.vp + c.pp - 1) * 2 * _MESSAGE_S, 0.0),
        "dp": np.where(sharded | forward, 0.0, _levels(held * (c.gradient_bytes + _BF16), ranks, c)),
        "gather": np.where(sharded, c.num_microbatches * _levels(gathers, ranks, c), 0.0),
        "experts": directions * busy * layers * 4 * _dispatch(boundary, c),
        "context": busy * layers * 2 * passes * boundary * c.kv_heads / c.heads * (c.cp - 1) / c.cp / c.tp / rate,
        "optimizer": np.where(forward, 0.0, held / shards * _OPTIMIZER_BYTES / c.hbm_bytes_per_s),
        "launch": busy * layers * passes * _LAUNCH_S,
        "step": np.full_like(gemm, _STEP_S),
    }
    return np.stack([found[name] for name in CLASSES], axis=1)


def class_array(of: dict[str, float], classes: Sequence[str] = CLASSES) -> Floats:
    return np.array([of[name] for name in classes])


def _all_reduce(size_bytes: Floats, ranks: Floats) -> Floats:
    """Bytes through each rank's link: a ring."""
    return 2 * (ranks - 1) / ranks * size_bytes


def _levels(size_bytes: Floats, ranks: Floats, c: Columns) -> Floats:
    """Seconds of one pass of ``size_bytes`` around ``ranks``, of which a fast domain holds those that tp leaves room
    for: inside it first, then between domains with the share that each of its GPUs has by then."""
    inside = np.clip(c.domain // np.minimum(c.tp, c.domain), 1, ranks)
    outside = np.maximum(ranks / inside, 1.0)
    near = (inside - 1) / inside * size_bytes / c.intra_bytes_per_s
    far = (outside - 1) / outside * size_bytes / inside / c.nic_bytes_per_s
    return near + far


def _dispatch(boundary: Floats, c: Columns) -> Floats:
    """Seconds of one all-to-all of the routed tokens; a token enters each other domain that it needs once."""
    inside = (c.ep - 1) / c.ep * c.experts_per_token / c.intra_bytes_per_s
    domains = np.maximum(c.ep / c.domain, 1.0)
    visited = domains * (1 - (1 - 1 / domains) ** c.experts_per_token) * (domains - 1) / domains
    return boundary / c.tp * np.where(c.ep <= c.domain, inside, visited / c.nic_bytes_per_s)
