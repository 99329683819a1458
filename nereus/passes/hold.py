"""Plan -> holdings: which copies of a model's state exist at a safe boundary, and where they lie."""

from __future__ import annotations

from dataclasses import replace

from nereus.ir.holdings import Holdings, StateSet
from nereus.ir.layout import BoundLayout, layout_of
from nereus.ir.plan import Plan
from nereus.models.memory.state import Copy, copies
from nereus.models.slots import slot_applies
from nereus.models.tensors import logical_tensors


def hold(plan: Plan) -> Holdings:
    """One state set for every copy of a model in some process, as the memory model counts them.

    Stages of one model in the same processes share a copy; it has the slots of the fullest of them and the name of the
    one that trains. At the end of a synchronous step the trainer has just updated, so every other copy of its model
    (generation, separate log-probabilities) is older: a cache, dropped and filled by the next weight sync. At an
    asynchronous boundary, a weight sync, resident copies are at the trainer's version.
    """
    trained = {s.model for s in plan.stages if s.is_train}
    sets: list[StateSet] = []
    caches: list[str] = []
    for copy in copies(plan):
        trainer = next((user for user in copy.users if user.is_train), None)
        stale = trainer is None and copy.model.name in trained and plan.workload.mode == "sync"
        name = (trainer or copy.stage).name
        if stale or copy.idle == "discard":
            caches.append(name)
        else:
            sets.append(_state_set(copy, name))
    return Holdings(sets=tuple(sets), caches=tuple(caches))


def _state_set(copy: Copy, name: str) -> StateSet:
    in_host = copy.idle == "offload" or copy.swap
    model = copy.model
    tensors = logical_tensors(model.arch, model.head, model.lora)
    absent = []
    for slot in copy.slots:
        missing = tuple(i for i, t in enumerate(tensors) if not slot_applies(slot.name, t, copy.optimizer))
        if missing:
            absent.append((slot.name, missing))
    return StateSet(
        stage=name,
        owner=copy.owner.name,
        model=model.name,
        tensors=tensors,
        bound=BoundLayout(layout=layout_of(copy.stage, experts=model.arch.moe is not None), ranks=copy.owner.ranks),
        slots=tuple(replace(slot, host=True, host_share=1.0) if in_host else slot for slot in copy.slots),
        absent=tuple(absent),
    )
