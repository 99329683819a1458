"""Copies of models in processes, and the bytes that each keeps per rank.

A process belongs to an owner stage. The stages that run in it (``with``) use its copy where the model is the same and
bring one of their own where it is another. A copy's slots are those of the stage that keeps most, normally the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.layout import layout_of
from nereus.ir.plan import Model, Plan, Slot, Stage
from nereus.models.memory.local import LocalShapes, local_numel, local_shapes, sharding
from nereus.models.slots import default_slots

GRADIENT_BYTES = 4  # fp32, only while a train stage runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy of ``model`` in the processes of ``owner``. ``stage`` gives its layout, slots and idle policy."""

    owner: Stage
    model: Model
    stage: Stage
    slots: tuple[Slot, ...]
    idle: str
    swap: bool
    #: Stages that run on this copy.
    users: tuple[Stage, ...]

    @property
    def shapes(self) -> tuple[LocalShapes, ...]:
        return local_shapes(self.model.arch, self.model.head, self.stage)


def owner_of(plan: Plan, stage: Stage) -> Stage:
    """The stage whose processes ``stage`` runs in (``with`` may chain)."""
    seen = {stage.name}
    while stage.with_ is not None:
        stage = plan.stage(stage.with_)
        assert stage.name not in seen, "the resolver refuses cycles of with"
        seen.add(stage.name)
    return stage


def copies(plan: Plan) -> tuple[Copy, ...]:
    """In plan order of their owners, the owner's own model first."""
    found = []
    for owner in plan.owners():
        inside = [s for s in plan.stages if s.service is None and owner_of(plan, s).name == owner.name]
        names = dict.fromkeys([owner.model, *(s.model for s in inside)])
        for name in names:
            users = tuple(s for s in inside if s.model == name)
            fullest = max(users, key=lambda s: len(slots_of(plan, s)))
            lead = owner if owner.model == name else fullest
            found.append(
                Copy(
                    owner=owner,
                    model=plan.model(name),
                    stage=lead,
                    slots=slots_of(plan, fullest),
                    idle=lead.idle,
                    swap=lead.swap == "host",
                    users=users,
                )
            )
    return tuple(found)


def slots_of(plan: Plan, stage: Stage) -> tuple[Slot, ...]:
    if stage.slots:
        return stage.slots
    precision = plan.model(stage.model).precision
    return default_slots(trains=stage.is_train, precision=precision, optimizer=stage.optimizer)


def slot_bytes(copy: Copy, slot: Slot, index: int) -> int:
    """Bytes of ``slot`` on the fullest rank of pipeline stage ``index``."""
    return local_numel(copy.shapes[index], sharding(copy.stage, slot.name)) * slot.element_bytes


def gradient_bytes(copy: Copy, index: int) -> int:
    return local_numel(copy.shapes[index], sharding(copy.stage, "gradients")) * GRADIENT_BYTES


def gathered_bytes(copy: Copy, index: int) -> int:
    """ZeRO-3 and FSDP gather weights to use them: two layers (one prefetched) and the ends, which stay gathered."""
    if copy.stage.fsdp <= 1 and copy.stage.zero < 3:
        return 0
    shapes = copy.shapes[index]
    weight = next(slot for slot in copy.slots if slot.name == "weight")
    return (shapes.ends + min(2, shapes.num_layers) * shapes.largest_layer) * weight.element_bytes


def device_state_bytes(copy: Copy, index: int) -> int:
    """All slots that live in GPU memory, without gradients."""
    return sum(slot_bytes(copy, slot, index) for slot in copy.slots if not slot.host)


def host_state_bytes(copy: Copy, index: int) -> int:
    """What one rank keeps in host memory: the whole copy where it is offloaded or swapped, else its host slots."""
    whole = copy.idle == "offload" or copy.swap
    return sum(slot_bytes(copy, slot, index) for slot in copy.slots if whole or slot.host)


def pipeline_index_of_ranks(stage: Stage) -> list[int]:
    """Pipeline coordinate of every rank, in rank order."""
    indices: list[int] = layout_of(stage).coordinates()["pp"].tolist()
    return indices
