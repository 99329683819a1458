"""Copies of models in processes, and the bytes that each keeps per rank.

A process belongs to an owner stage. The stages that run in it (``with``) use its copy where the model is the same and
bring one of their own where it is another. A copy's slots are those of the stage that keeps most, normally the trainer.

A model that is another one *without its adapter* (``model ref = actor { lora = none }``) has the very weights that the
other keeps frozen: in the same processes it runs on that copy and has none of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nereus.ir.layout import layout_of
from nereus.ir.offload import least_in_host, most_in_host
from nereus.ir.plan import Model, Plan, Slot, Stage
from nereus.models.memory.local import (
    LocalShapes,
    alike,
    dense_and_expert,
    largest_part,
    local_numel,
    local_shapes,
    sharding,
)
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
    #: Stages that run on this copy, those of a model that shares its frozen base included.
    users: tuple[Stage, ...]
    _shapes: dict[tuple[str, str | None], tuple[LocalShapes, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def optimizer(self) -> str | None:
        return next((user.optimizer for user in self.users if user.is_train), None)

    @property
    def shapes(self) -> tuple[LocalShapes, ...]:
        return self.shapes_of("weight")

    def shapes_of(self, slot: str) -> tuple[LocalShapes, ...]:
        """Of the tensors that have ``slot``; ``gradients``: of those that train."""
        optimizer = self.optimizer
        key = alike(slot, optimizer)
        if key not in self._shapes:
            arch, head, lora = self.model.arch, self.model.head, self.model.lora
            self._shapes[key] = local_shapes(arch, head, self.stage, lora=lora, slot=slot, optimizer=optimizer)
        return self._shapes[key]


def owner_of(plan: Plan, stage: Stage) -> Stage:
    """The stage whose processes ``stage`` runs in (``with`` may chain)."""
    seen = {stage.name}
    while stage.with_ is not None:
        stage = plan.stage(stage.with_)
        assert stage.name not in seen, "the resolver refuses cycles of with"
        seen.add(stage.name)
    return stage


def keeper_of(plan: Plan, stage: Stage) -> str:
    """The model on whose copy ``stage`` runs: its own, or, where that is another model of the same processes without
    its adapter, the other one."""
    model = plan.model(stage.model)
    if model.base is None or model.lora is not None:
        return model.name
    base = plan.model(model.base)
    if base.lora is None or (base.arch, base.head, base.precision) != (model.arch, model.head, model.precision):
        return model.name
    owner = owner_of(plan, stage).name
    inside = [s for s in plan.stages if s.service is None and owner_of(plan, s).name == owner]
    if any(s.model == model.name and s.is_train for s in inside):  # it trains the weights, so they are its own
        return model.name
    dtype = _weight_dtype(plan, stage)
    shared = any(s.model == base.name and _weight_dtype(plan, s) == dtype for s in inside)
    return base.name if shared else model.name


def copies(plan: Plan) -> tuple[Copy, ...]:
    """In plan order of their owners, the owner's own model first."""
    found = []
    for owner in plan.owners():
        inside = [s for s in plan.stages if s.service is None and owner_of(plan, s).name == owner.name]
        keepers = {s.name: keeper_of(plan, s) for s in inside}
        for name in dict.fromkeys([keepers[owner.name], *keepers.values()]):
            users = tuple(s for s in inside if keepers[s.name] == name)
            fullest = max((s for s in users if s.model == name), key=lambda s: len(slots_of(plan, s)))
            lead = owner if owner in users and owner.model == name else fullest
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


def _weight_dtype(plan: Plan, stage: Stage) -> str:
    return next(slot.dtype for slot in slots_of(plan, stage) if slot.name == "weight")


def slot_bytes(copy: Copy, slot: Slot, index: int) -> int:
    """Bytes of ``slot`` on the fullest rank of pipeline stage ``index``."""
    return local_numel(copy.shapes_of(slot.name)[index], sharding(copy.stage, slot.name)) * slot.element_bytes


def device_slot_bytes(copy: Copy, slot: Slot, index: int) -> int:
    """Those of ``slot_bytes`` that lie in GPU memory while the stage runs, at most."""
    if not slot.is_split:
        return 0 if slot.host else slot_bytes(copy, slot, index)
    numel = slot_bytes(copy, slot, index) // slot.element_bytes
    return (numel - least_in_host(numel, slot.host_share)) * slot.element_bytes


def host_slot_bytes(copy: Copy, slot: Slot, index: int) -> int:
    """Bytes of ``slot`` in host memory while the stage runs, at most: a share of it ends with a whole part, and which
    part that is depends on the order in which the framework takes them."""
    if not slot.is_split:
        return slot_bytes(copy, slot, index) if slot.host else 0
    shapes, shards = copy.shapes_of(slot.name)[index], sharding(copy.stage, slot.name)
    held = zip(dense_and_expert(shapes, shards), largest_part(shapes, shards), strict=True)
    return sum(most_in_host(numel, slot.host_share, part) for numel, part in held) * slot.element_bytes


def gradient_bytes(copy: Copy, index: int) -> int:
    return local_numel(copy.shapes_of("gradients")[index], sharding(copy.stage, "gradients")) * GRADIENT_BYTES


def gathered_bytes(copy: Copy, index: int) -> int:
    """ZeRO-3 and FSDP gather weights to use them: two layers (one prefetched) and the ends, which stay gathered."""
    if copy.stage.fsdp <= 1 and copy.stage.zero < 3:
        return 0
    shapes = copy.shapes[index]
    weight = next(slot for slot in copy.slots if slot.name == "weight")
    return (shapes.ends + min(2, shapes.num_layers) * shapes.largest_layer) * weight.element_bytes


def device_state_bytes(copy: Copy, index: int) -> int:
    """All slots that live in GPU memory, without gradients."""
    return sum(device_slot_bytes(copy, slot, index) for slot in copy.slots)


def host_state_bytes(copy: Copy, index: int) -> int:
    """What one rank keeps in host memory: the whole copy where it is offloaded or swapped, else its host slots."""
    whole = copy.idle == "offload" or copy.swap
    return sum((slot_bytes if whole else host_slot_bytes)(copy, slot, index) for slot in copy.slots)


def pipeline_index_of_ranks(stage: Stage) -> list[int]:
    """Pipeline coordinate of every rank, in rank order."""
    indices: list[int] = layout_of(stage).coordinates()["pp"].tolist()
    return indices
