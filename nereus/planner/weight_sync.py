"""Seconds of bringing new weights from each trainer to the other copies of its model, and where they are in a step.

A sync is a change that gives the engines' processes their weights while the trainer stays as it is; the coarse estimate
tells its transfer as it does that of any change. Everything is awake for it: weights that rest in host memory between
stages are on their GPUs. In sync mode it is the end of a step: it waits for what runs on the GPUs at both ends, and
the next generation for it. In async mode it runs beside the rest. What a framework adds (waking engines, converting
formats, loading) is not known here.
"""

from __future__ import annotations

from dataclasses import replace

from nereus.ir.plan import Plan, Stage
from nereus.models.memory.state import Copy, copies
from nereus.models.tensors import num_params
from nereus.passes.coarse import coarse
from nereus.planner.calibration import Calibration
from nereus.planner.rl_step import Order, StageTime, StepTime, order_of, schedule, stage_time

#: Of the logarithm: links seldom reach their data sheets.
_DEVIATION = 0.3


def synced_step_time(plan: Plan, calibration: Calibration) -> StepTime:
    """An RL step with its weight syncs (``model.sync``). Services and stages without GPUs take no time."""
    times = {stage.name: stage_time(plan, stage, calibration) for stage in plan.stages if stage.service is None}
    after = list(order_of(plan).after)
    for trainer, others in _synced(plan):
        name = f"{trainer.model.name}.sync"
        ends = {device for copy in (trainer, *others) for device in copy.owner.devices}
        waits = [other for other, _ in after if other in times and not ends.isdisjoint(plan.stage(other).devices)]
        times[name] = StageTime(stage=name, seconds=_seconds(plan, trainer, others), deviation=_DEVIATION)
        after.append((name, tuple(waits) if plan.workload.mode == "sync" else ()))
    return schedule(Order(after=tuple(after)), times)


def sync_seconds(plan: Plan) -> dict[str, float]:
    """By model that trains and has other copies."""
    return {trainer.model.name: _seconds(plan, trainer, others) for trainer, others in _synced(plan)}


def _synced(plan: Plan) -> list[tuple[Copy, tuple[Copy, ...]]]:
    """(copy that trains, others of its model)."""
    found = copies(plan)
    trainers = {copy.model.name: copy for copy in found if any(user.is_train for user in copy.users)}
    others = {
        name: tuple(copy for copy in found if copy.model.name == name and copy is not trainer)
        for name, trainer in trainers.items()
    }
    return [(trainer, others[name]) for name, trainer in trainers.items() if others[name]]


def _seconds(plan: Plan, trainer: Copy, others: tuple[Copy, ...]) -> float:
    # At an asynchronous boundary copies count as current, and so as something to fill.
    base = replace(plan, workload=replace(plan.workload, mode="async"))
    before = replace(base, stages=(_awake(trainer),))
    after = replace(base, stages=(_awake(trainer), *map(_awake, others)))
    model = trainer.model
    trained = num_params(model.arch, model.head, model.lora, trainable=True)
    return coarse(before, after).transfer_s * trained / num_params(model.arch, model.head, model.lora)


def _awake(copy: Copy) -> Stage:
    weight = tuple(replace(slot, host=False, host_share=1.0) for slot in copy.slots if slot.name == "weight")
    stage, owner = copy.stage, copy.owner
    return replace(
        stage, devices=owner.devices, place=owner.place, with_=None, idle="resident", swap=None, slots=weight
    )
