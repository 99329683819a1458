"""What a framework wrote down of a run -> its trace, and what is known of its job afterwards.

The run's own steps calibrate the models, stage by stage where the framework times them. What is left between a measured
step and the prediction is the machines' efficiency, as it drifted over the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

from nereus.ir.plan import Plan
from nereus.planner.calibration import Calibration
from nereus.planner.exports.learn import learn_export
from nereus.planner.exports.read import Export, Step
from nereus.planner.rl_step import step_time
from nereus.replay.trace import Row, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """``plan``: with the prompts of the run. ``calibration``: with what the run teaches. ``drift``: seconds over what
    is then predicted, of the steps that were timed as a whole."""

    plan: Plan
    trace: Trace
    calibration: Calibration
    drift: tuple[float, ...]


def recorded(export: Export, plan: Plan, base: Calibration, *, name: str) -> Recorded:
    """``plan``: under which all of it ran, on all nodes of its cluster. A step whose length was not written has the
    plan's; one whose seconds were not, the efficiency that is usual in the others."""
    prompts = [step.prompt_len for step in export.steps if step.prompt_len is not None]
    if prompts:
        plan = replace(plan, workload=replace(plan.workload, prompt_len=math.ceil(median(prompts))))
    calibration = learn_export(export, plan, base)[0].calibration()
    drift = tuple(
        step.step_s / _predicted_s(step, plan, calibration) for step in export.steps if step.step_s is not None
    )
    usual = 1 / median(drift) if drift else 1.0
    rows = (
        Row(
            response_mean=_length(step, plan),
            response_max=None if step.response_max is None else max(step.response_max, _length(step, plan)),
            efficiency=usual if step.step_s is None else 1.0,
            step_s=step.step_s,
        )
        for step in export.steps
    )
    return Recorded(plan=plan, trace=Trace(name=name, rows=tuple(rows)), calibration=calibration, drift=drift)


def _length(step: Step, plan: Plan) -> float:
    return float(plan.workload.response_len) if step.response_len is None else max(1.0, step.response_len)


def _predicted_s(step: Step, plan: Plan, calibration: Calibration) -> float:
    length, most = _length(step, plan), step.response_max
    longest = plan.workload.max_response if most is None else math.ceil(most)
    workload = replace(plan.workload, response_len=math.ceil(length), max_response=longest)
    return step_time(replace(plan, workload=workload), calibration).seconds
