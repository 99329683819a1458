"""Which copies of a model's state count at a boundary, with their slots and where each lies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.plan import Plan, Stage
from nereus.ir.tensor import LogicalTensor
from nereus.ir.units import DTYPE_BYTES
from nereus.models.memory.state import copies
from nereus.models.slots import slot_applies
from nereus.models.tensors import logical_tensors
from nereus.verify.finding import Violation
from nereus.verify.parts import Parts
from nereus.verify.segments import BoolArray, IntArray, ints
from nereus.verify.world import World

#: Kinds of half-precision weights that the optimizer step rounds from an fp32 master.
_ROUNDED = ("bf16", "fp16")


@dataclass(frozen=True, slots=True)
class SlotKind:
    """Bits move, values are never converted: a slot of another dtype is another slot."""

    name: str
    dtype: str

    @property
    def num_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class StateCopy:
    """``slots``: how much of each its ranks put into host memory. ``device_of_rank``: numbers of the world."""

    stage: str
    owner: Stage
    model: str
    tensors: tuple[LogicalTensor, ...]
    parts: Parts
    slots: dict[SlotKind, float]
    present: dict[str, BoolArray]
    device_of_rank: IntArray

    def kind(self, name: str) -> SlotKind | None:
        return next((kind for kind in self.slots if kind.name == name), None)

    @property
    def derives(self) -> bool:
        """Whether its weights follow from its masters in the same memory."""
        weight, master = self.kind("weight"), self.kind("master")
        if weight is None or master is None or master.dtype != "fp32" or weight.dtype not in _ROUNDED:
            return False
        alike = self.slots[weight] == self.slots[master]
        return alike or 0 < self.slots[weight] < 1 or 0 < self.slots[master] < 1


def as_stated(copies: tuple[StateCopy, ...], same: tuple[tuple[str, str], ...]) -> tuple[StateCopy, ...]:
    """Copies of two models that the job states to hold equal weights are copies of one. Raises Violation where one of
    the second model keeps more than weights: of that nothing is stated."""
    names = {other: name for name, other in same}
    if len(names) != len(same) or set(names) & set(names.values()):
        raise Violation("a model is said to be the same as two others")
    for copy in copies:
        more = [kind.name for kind in copy.slots if kind.name != "weight"]
        if copy.model in names and more:
            raise Violation(f"{copy.stage} is said to have {names[copy.model]}'s weights, and it has {more[0]} too")

    return tuple(replace(copy, model=names.get(copy.model, copy.model)) for copy in copies)


def state_copies(plan: Plan, world: World) -> tuple[StateCopy, ...]:
    """After a synchronous step every copy of a trained model outside the trainer's processes is a version behind: not
    counted, nor are discarded ones."""
    trained = {stage.model for stage in plan.stages if stage.kind == "train"}
    found = []
    for copy in copies(plan):
        trainer = next((user for user in copy.users if user.kind == "train"), None)
        behind = trainer is None and copy.model.name in trained and plan.workload.mode == "sync"
        if behind or copy.idle == "discard":
            continue
        model = copy.model
        tensors = logical_tensors(model.arch, model.head, model.lora)
        to_host = copy.idle == "offload" or copy.swap
        found.append(
            StateCopy(
                stage=(trainer or copy.stage).name,
                owner=copy.owner,
                model=model.name,
                tensors=tensors,
                parts=Parts(copy.stage, tensors, has_experts=model.arch.moe is not None),
                slots={
                    SlotKind(slot.name, slot.dtype): 1.0 if to_host else slot.host_share if slot.host else 0.0
                    for slot in copy.slots
                },
                present={
                    slot.name: np.array([slot_applies(slot.name, t, copy.optimizer) for t in tensors], dtype=bool)
                    for slot in copy.slots
                },
                device_of_rank=ints([world.number[device] for device in copy.owner.ranks]),
            )
        )
    return tuple(found)
