"""What measured peaks of a running plan say of its memory: a factor for each kind of bytes, and a constant.

``models/memory`` counts what the tensors of a plan take on its fullest GPU, part by part. A device shows more, or less:
an allocator rounds and keeps, a framework does not hold what the formula holds. Each kind of part has a factor, one at
first; the constant is that of the contexts. They are learned as those of step time are (``learned.py``), so a peak is
told with a range, which takes the place of a flat margin once the job was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus.ir.plan import Plan
from nereus.models.memory import steady_state
from nereus.models.memory.report import MemoryRow, Part
from nereus.planner.learned import Beliefs, Learned, Seen
from nereus.planner.runs import Floats

CLASSES = ("weights", "optimizer", "gradients", "activations", "working", "logits", "cache", "resident", "constant")
_OF_LABEL = {
    "weights": "weights",
    "gathered layers": "weights",
    "master": "optimizer",
    "moments": "optimizer",
    "gradients": "gradients",
    "activations": "activations",
    "working set": "working",
    "logits": "logits",
}
#: State is counted to the byte; what a program keeps beside it is not.
_SPREAD = (0.4, 0.4, 1.0, 1.5, 2.0, 1.5, 0.4, 0.4, 3.0)
NUM_PLACES = 1

PLAN_MEMORY = Beliefs(
    prior=np.zeros(len(CLASSES)),
    spread=np.array(_SPREAD),
    everywhere=0.3,
    by_label={"reading": 0.2},
    near=0.05,
    reach=1.0,
    near_label="reading",
    noise=0.02,
    freedom=4.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes of the fullest GPU of a plan. ``high_bytes``: the upper end of the 90 % range."""

    expected_bytes: float
    high_bytes: float
    mem_bytes: float

    @property
    def fits(self) -> bool:
        return self.high_bytes <= self.mem_bytes


def seen(plans: Sequence[Plan], reading: str) -> Seen:
    """Of the fullest GPU of each. ``reading``: how peaks are read; one kind says little of another."""
    rows = [of[int(np.argmax(of.sum(axis=1)))] for of in map(row_bytes, plans)]
    x = np.array(rows, float).reshape(len(rows), len(CLASSES))
    place = np.log2(np.maximum(x.sum(axis=1, keepdims=True), 1.0))
    return Seen(x=x, labels=((f"reading:{reading}",),) * len(rows), place=place)


def peak(learned: Learned, plan: Plan) -> Peak:
    """The fullest GPU by what was learned, as it was read last: another than by the formulas, perhaps."""
    rows, x = steady_state(plan).rows, row_bytes(plan)
    labels = (learned.seen.labels[-1] if learned.seen.labels else ("reading:",),) * len(rows)
    predicted = learned.predict(Seen(x=x, labels=labels, place=np.log2(np.maximum(x.sum(axis=1, keepdims=True), 1.0))))
    _, high = predicted.within_90()
    mem = np.array([_mem_bytes(plan, row) for row in rows])
    at = int(np.argmax(high - mem))
    return Peak(expected_bytes=float(predicted.value[at]), high_bytes=float(high[at]), mem_bytes=float(mem[at]))


def row_bytes(plan: Plan) -> Floats:
    """[rows of the report, CLASSES] bytes by the formulas: every stage on every kind of GPU."""
    return np.array([_bytes(row) for row in steady_state(plan).rows], float)


def _mem_bytes(plan: Plan, row: MemoryRow) -> float:
    return plan.cluster.node(row.device.node).gpu.mem_gb * 1e9


def _bytes(row: MemoryRow) -> Floats:
    found = np.zeros(len(CLASSES))
    for part in row.parts:
        found[CLASSES.index(_class_of(part))] += part.num_bytes
    return found


def _class_of(part: Part) -> str:
    if not part.stage:
        return "constant"
    if part.label.endswith("kv cache"):
        return "cache"
    return "resident" if part.label.endswith("resident") else _OF_LABEL[part.label]
