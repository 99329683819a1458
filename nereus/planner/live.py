"""An advisor of a job that is measured: what its steps say is learned before the advisor decides.

    live = Live(Advisor(plan, calibration), Online(calibration))
    decision = live.observe(step=7, response_len=1810, step_s=61.0, stage_s={"actor.train": 31.0}, plan=job.plan)
    ...
    live.changed(old, new, outcome.phases_s)
    json.dump(live.log, file)

While the first steps of a change are judged, predictions stay what they were: a slow plan must not become what was
expected of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from nereus.ir.plan import Plan
from nereus.planner.advisor import Advisor
from nereus.planner.decisions import Decision
from nereus.planner.health import Problem
from nereus.planner.online import Online


class Live:
    """``log``: what was observed and decided at every boundary, as values that JSON knows."""

    def __init__(self, advisor: Advisor, online: Online) -> None:
        self.advisor = advisor
        self.online = online
        self.log: list[dict[str, Any]] = []

    def observe(
        self,
        *,
        step: int,
        response_len: float,
        step_s: float | None = None,
        stage_s: Mapping[str, float] | None = None,
        peak_bytes: float | None = None,
        plan: Plan | None = None,
        pool: Collection[str] | None = None,
        notice_s: float | None = None,
        problems: Mapping[str, Collection[Problem]] | None = None,
    ) -> Decision:
        """As ``Advisor.observe``; ``stage_s`` and ``peak_bytes`` as ``Online.observe``."""
        # Before anything is learned of what the advisor would refuse.
        told: dict[str, Any] = {"pool": pool, "notice_s": notice_s, "problems": problems}
        self.advisor.refuse(response_len=response_len, step_s=step_s, **told)
        served = plan if plan is not None else self.advisor.plan
        workload = replace(served.workload, response_len=max(1, math.ceil(response_len)))
        self.online.observe(
            replace(served, workload=workload), step=step, step_s=step_s, stage_s=stage_s, peak_bytes=peak_bytes
        )
        if not self.advisor.trying:
            self.advisor.calibration = self.online.calibration()
        decision = self.advisor.observe(step=step, response_len=response_len, step_s=step_s, plan=plan, **told)
        self.log.append(
            {
                **as_data(decision),
                "stage_s": dict(stage_s or {}),
                "peak_bytes": peak_bytes,
                "pool": None if pool is None else sorted(pool),
                "problems": None if problems is None else {n: [asdict(p) for p in of] for n, of in problems.items()},
            }
        )
        return decision

    def changed(self, old: Plan, new: Plan, phases_s: Mapping[str, float]) -> None:
        """A change was executed: what its phases took."""
        self.online.changed(old, new, phases_s)


def as_data(decision: Decision) -> dict[str, Any]:
    """As values that JSON knows; of a plan its layouts, by stage."""
    found = {field.name: getattr(decision, field.name) for field in fields(decision)}
    found["considered"] = [
        {"changes": text, "step_s": step_s, "stop_s": stop_s, "payback_steps": steps if steps < math.inf else None}
        for text, step_s, stop_s, steps in decision.considered
    ]
    found["unfit"] = dict(decision.unfit)
    found["plan"] = None if decision.plan is None else layouts(decision.plan)
    return found


def layouts(plan: Plan) -> dict[str, dict[str, Any]]:
    """The keys of each stage that a search may write."""
    names = ("tp", "pp", "dp", "cp", "ep", "micro_batch", "recompute", "zero")
    return {stage.name: {name: getattr(stage, name) for name in names} for stage in plan.stages}
