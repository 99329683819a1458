"""The steps of an export, run under a plan -> a calibration.

An export says what took how long; the plan says what that was: which model, in which layout, on which GPUs. Seconds
that a framework counts for several stages together are dealt to them as they were predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.plan import Plan, Stage
from nereus.planner.calibration import Calibration
from nereus.planner.exports.read import Export, Step
from nereus.planner.online import Online
from nereus.planner.rl_step import stage_time

#: A finished run is looked at as a whole: nothing of it is stale.
_NEVER = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Of one stage of the plan. ``measured_s``: the median; ``before``, ``after``: mean error of the prediction without
    and with what was learned."""

    stage: str
    num: int
    measured_s: float
    before: float
    after: float


def learn_export(export: Export, plan: Plan, base: Calibration) -> tuple[Online, tuple[Fit, ...]]:
    """``plan``: under which all steps ran; lengths that a step does not tell are the plan's."""
    online = Online(base, half_life_steps=_NEVER, reading="allocated")
    stages = stages_of(plan)
    seen: list[tuple[str, Plan, float]] = []
    for step in export.steps:
        at = _at(plan, step)
        stage_s = _dealt(step, at, stages, base)
        online.observe(at, step=step.number, step_s=step.step_s, stage_s=stage_s, peak_bytes=step.peak_bytes)
        seen += [(name, at, seconds) for name, seconds in stage_s.items()]
    known = online.calibration()
    fits = []
    for name in dict.fromkeys(name for name, _, _ in seen):
        of_stage = [(at, seconds) for stage, at, seconds in seen if stage == name]
        errors = [
            [abs(stage_time(at, at.stage(name), c).seconds / seconds - 1) for at, seconds in of_stage]
            for c in (base, known)
        ]
        fits.append(
            Fit(
                stage=name,
                num=len(of_stage),
                measured_s=float(np.median([seconds for _, seconds in of_stage])),
                before=float(np.mean(errors[0])),
                after=float(np.mean(errors[1])),
            )
        )
    return online, tuple(fits)


def stages_of(plan: Plan) -> dict[str, str]:
    """Which stage of the plan does what is called so; roles without a stage are left out."""
    found: dict[str, str] = {}
    for stage in plan.stages:
        if stage.service is None and (role := _role(plan, stage)) is not None:
            found.setdefault(role, stage.name)
    return found


def _role(plan: Plan, stage: Stage) -> str | None:
    values = plan.model(stage.model).head == "value"
    if stage.is_train:
        return "critic" if values else "actor"
    if stage.kind in ("generate", "logprob"):
        return stage.kind
    if values:
        return "value"
    return "ref" if plan.model(stage.model).base else "reward"


def _dealt(step: Step, plan: Plan, stages: Mapping[str, str], base: Calibration) -> dict[str, float]:
    found: dict[str, float] = {}
    for roles, seconds in step.parts_s:
        names = [stages[role] for role in roles if role in stages]
        expected = {name: stage_time(plan, plan.stage(name), base).seconds for name in names}
        total = sum(expected.values())
        for name, of_stage in expected.items():
            found[name] = found.get(name, 0.0) + seconds * of_stage / total
    return found


def _at(plan: Plan, step: Step) -> Plan:
    workload = plan.workload
    response_len = workload.response_len if step.response_len is None else math.ceil(step.response_len)
    prompt_len = workload.prompt_len if step.prompt_len is None else math.ceil(step.prompt_len)
    return replace(plan, workload=replace(workload, response_len=response_len, prompt_len=prompt_len))
