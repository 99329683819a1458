"""Bytes of each class on the fullest GPU of a training run, by the formulas of ``docs/cost-model.md``.

Under 1F1B the first stage holds the activations of ``min(p, m)`` micro-batches, the last those of one and the logits;
interleaving holds more on both; the fuller of the two counts. Measured peaks are these classes times factors that are
learned (``learned.py``): one reading counts what was allocated, another what was reserved, a third everything on the
device.
"""

from __future__ import annotations

import numpy as np

from nereus.planner.runs import RECOMPUTE, SHARDING, Columns, Floats

_BF16 = 2
_WEIGHT_BYTES, _OPTIMIZER_BYTES = 2, 12
#: bf16 logits, their fp32 copy, the gradient.
_LOGIT_BYTES = 8
#: Attention keeps scores, their softmax and the dropout mask: 5 bytes each.
_SCORE_BYTES = 5

CLASSES = ("weights", "gradients", "optimizer", "activations", "scores", "working", "logits", "constant")

PRIOR: dict[str, float] = {
    "weights": 1.0,
    "gradients": 1.0,
    "optimizer": 1.0,
    "activations": 1.1,
    "scores": 1.0,
    "working": 1.0,
    "logits": 0.8,
    "constant": 1.0,
}
#: State and scores are known to the byte but for the program's own habits; what a reading adds is not.
SPREAD: dict[str, float] = {
    "weights": 0.4,
    "gradients": 0.8,
    "optimizer": 0.4,
    "activations": 1.0,
    "scores": 0.35,
    "working": 2.0,
    "logits": 1.0,
    "constant": 2.0,
}


def class_bytes(c: Columns) -> Floats:
    """[runs, CLASSES] bytes on the fullest GPU."""
    tokens = c.micro_batch * c.seq_len / c.cp
    layers = np.ceil(c.layers / c.pp)
    full = c.recompute == RECOMPUTE.index("full")
    between = np.where(c.sequence_parallel > 0, c.tp, 1.0)
    input_bytes = _BF16 * tokens * c.hidden / between
    # Two norms keep input and output, and two dropouts their masks (models without a gated MLP have them); attention
    # its q, k, v and output; the MLP what lies between its matrices.
    masks = np.where(c.mlp_matrices == 3, 0.0, 2 * tokens * c.hidden)
    width = 2 * c.hidden + 2 * c.hidden * c.kv_heads / c.heads
    width = width + np.where(c.mlp_matrices == 3, 3, 2) * c.ffn * (c.experts_per_token + c.shared_experts)
    width = width + np.where(c.expert_params > 0, 2 * c.experts_per_token * c.hidden, 0)
    layer_bytes = (_BF16 * tokens * 4 * c.hidden + masks) / between + _BF16 * tokens * width / c.tp
    scores = np.where(c.flash > 0, 0.0, tokens * c.seq_len * c.heads * _SCORE_BYTES / c.tp)
    selective = c.recompute != RECOMPUTE.index("none")
    kept_scores = np.where(selective, 0.0, scores) * layers
    kept = np.where(full, input_bytes, layer_bytes) * layers
    first, last = _in_flight(c, c.pp - 1), _in_flight(c, np.zeros_like(c.pp))
    logits = tokens * c.vocab * _LOGIT_BYTES / c.tp

    table = c.vocab * c.hidden / c.tp
    tables = np.where(c.tied > 0, 1.0, 2.0)
    blocks = (c.params - c.expert_params - tables * c.vocab * c.hidden) / c.layers * layers / c.tp
    own = np.maximum(blocks, 0.0) + c.expert_params / c.layers * layers / c.tp / c.ep
    held = own + table * np.where(c.pp == 1, tables, 1.0)
    ranks = c.dp * c.cp

    def cut(kind: str) -> Floats:
        return np.where(c.sharding >= SHARDING.index(kind), ranks, 1.0)

    gathered = np.where(c.sharding == SHARDING.index("full"), 2 * own / layers * _WEIGHT_BYTES, 0.0)
    last_is_fuller = (c.read_last > 0) | (logits + (kept + kept_scores) * last > (kept + kept_scores) * first)
    has_logits = (c.pp == 1) | last_is_fuller
    flying = np.where(last_is_fuller, last, first)
    found = {
        "weights": held * _WEIGHT_BYTES / cut("full") + gathered,
        "gradients": held * c.gradient_bytes / cut("gradients"),
        "optimizer": held * _OPTIMIZER_BYTES / cut("optimizer"),
        "activations": kept * flying,
        "scores": kept_scores * flying,
        "working": np.where(full, layer_bytes + scores, 0.0),
        "logits": np.where(has_logits, logits, 0.0),
        "constant": c.constant_bytes,
    }
    return np.stack([found[name] for name in CLASSES], axis=1)


def _in_flight(c: Columns, after: Floats) -> Floats:
    """Micro-batches whose activations a stage holds that has ``after`` stages behind it."""
    interleaved = np.minimum(2 * after + (c.vp - 1) * c.pp + 1, c.num_microbatches * c.vp) / c.vp
    return np.where(c.vp > 1, interleaved, np.minimum(after + 1, c.num_microbatches))
