"""Plan -> holdings: which copies of a model's state exist at a safe boundary, and where they lie."""

from __future__ import annotations

from dataclasses import replace

from nereus.ir.holdings import Holdings, StateSet
from nereus.ir.layout import BoundLayout, layout_of
from nereus.ir.plan import Plan, Stage
from nereus.models.tensors import logical_tensors


def hold(plan: Plan) -> Holdings:
    """State sets of ``plan``: one for every stage that owns a copy.

    A stage ``with`` another of the same model uses that one's tensors. A generation copy is older than its trainer at
    the end of a synchronous step, so it is a cache; at an asynchronous boundary (a weight sync) it is at the
    trainer's version.
    """
    trained = {s.model for s in plan.stages if s.is_train}
    sets: list[StateSet] = []
    caches: list[str] = []
    for stage in plan.stages:
        if stage.service is not None or not _owns_copy(plan, stage):
            continue
        stale = stage.kind == "generate" and stage.model in trained and plan.workload.mode == "sync"
        if stale or stage.idle == "discard":
            caches.append(stage.name)
            continue
        sets.append(_state_set(plan, stage))
    return Holdings(sets=tuple(sets), caches=tuple(caches))


def _owns_copy(plan: Plan, stage: Stage) -> bool:
    host = stage
    while host.with_ is not None:
        host = plan.stage(host.with_)
        if host.model == stage.model:
            return False
    return True


def _state_set(plan: Plan, stage: Stage) -> StateSet:
    model = plan.model(stage.model)
    host = stage
    while host.with_ is not None:  # layout and devices are the host stage's
        host = plan.stage(host.with_)
    in_host = stage.idle == "offload" or stage.swap == "host"
    return StateSet(
        stage=stage.name,
        model=stage.model,
        tensors=logical_tensors(model.arch, model.head),
        bound=BoundLayout(layout=layout_of(host), ranks=host.ranks),
        slots=tuple(replace(slot, host=slot.host or in_host) for slot in stage.slots),
    )
