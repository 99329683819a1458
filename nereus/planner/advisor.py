"""When to change the plan of a running job, to what, and whether it pays: one decision at every safe boundary.

    advisor = Advisor(plan, calibration)
    decision = advisor.observe(step=7, response_len=1810, step_s=61.0)
    if decision.plan is not None:
        job.request(decision.plan)

A plan is looked for when responses have drifted from what they were at the last look, or when the plan would not fit at
the lengths of now. A change that is not forced must pay: the steps after which its stop is earned back may be no more
than ``share`` of the steps that the next drift is expected in (the mean of past intervals). After a change the measured
step is compared with the one before, in proportion to what was predicted of both; if the first steps miss it, the job
goes back, and that plan is not proposed again at these lengths.

Rules after the Nereus paper (docs/cost-model.md); every decision is data, and replaying the observations repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from nereus.ir.plan import Plan
from nereus.planner.calibration import Calibration
from nereus.planner.limits import Limits, Serves
from nereus.planner.search import Found
from nereus.planner.targets import Target, targets

#: Tokens; no response is as long.
_LONGEST = 1e12
STAY, GO, BACK = "stay", "go", "back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``drift``: share by which the mean length moves before a plan is looked for. ``share``: of the expected interval
    that a stop may take to pay. ``margin``: by which a measured step may miss. ``missed_steps``: first ones of a plan,
    whose median is judged. ``num_targets``: plans looked at when the best does not pay."""

    drift: float = 0.3
    share: float = 0.5
    margin: float = 0.1
    missed_steps: int = 3
    num_targets: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``trigger``: drift, memory, missed or empty. ``plan``: what to go to; None to stay. ``considered``: (keys to
    write, seconds a step, stop, steps until it pays), best first. ``horizon_steps``: until the next drift, as
    expected."""

    step: int
    response_len: float
    step_s: float | None
    trigger: str
    action: str
    reason: str
    horizon_steps: float
    considered: tuple[tuple[str, float, float, float], ...] = ()
    plan: Plan | None = None


class Advisor:
    """``observe_only``: decide and log, and change nothing. ``pinned``: stages that stay as they are. ``serves``:
    whether the job's program can serve a stage in a layout. ``calibration`` may be replaced between two boundaries, but
    not while a change is ``trying``."""

    def __init__(
        self,
        plan: Plan,
        calibration: Calibration,
        *,
        settings: Settings = Settings(),
        pinned: Collection[str] = (),
        serves: Serves | None = None,
        observe_only: bool = False,
    ) -> None:
        self.plan = plan
        self.calibration = calibration
        self.settings = settings
        self.limits = Limits(pinned=frozenset(pinned), serves=serves)
        self.observe_only = observe_only
        self.log: list[Decision] = []
        self._reference = float(plan.workload.response_len)
        self._crossings: list[int] = []
        self._measured: list[float] = []  # under the present plan
        self._trial: _Trial | None = None
        self._missed: list[tuple[tuple[str, ...], float]] = []  # (keys of a plan, lengths at which it missed)

    def observe(
        self, *, step: int, response_len: float, step_s: float | None = None, plan: Plan | None = None
    ) -> Decision:
        """At a boundary after ``step``: mean response length of the last batch, seconds of the last step. ``plan``:
        what the job serves now; without it, what was advised last, which a change that was given up is not."""
        if not 0 < response_len < _LONGEST or (step_s is not None and not 0 < step_s < math.inf):
            raise ValueError(f"response_len {response_len} and step_s {step_s} must be positive and finite")
        if plan is not None and _keys(plan) != _keys(self.plan):
            self.plan, self._measured, self._trial = plan, [], None
        if step_s is not None:
            self._measured.append(step_s)
        decision = self._decide(step, response_len, step_s)
        self.log.append(decision)
        if decision.plan is not None and not self.observe_only:
            self._measured = []
            self.plan = decision.plan
        return decision if not self.observe_only else replace(decision, plan=None)

    @property
    def trying(self) -> bool:
        """Whether the first steps of a change are still to be judged against what was expected of them."""
        return self._trial is not None

    @property
    def horizon_steps(self) -> float:
        """Mean interval between crossings of the drift; one step before there is an interval."""
        intervals = [b - a for a, b in zip(self._crossings, self._crossings[1:], strict=False)]
        return fmean(intervals) if intervals else 1.0

    def _decide(self, step: int, response_len: float, step_s: float | None) -> Decision:
        now = _at_length(self.plan, response_len)
        back = self._back(step, response_len, step_s)
        if back is not None:
            return back
        fits = self.calibration.fits(now)
        drifted = abs(response_len / self._reference - 1) > self.settings.drift

        def stay(trigger: str, reason: str, considered: Sequence[Target] = ()) -> Decision:
            return Decision(
                step=step, response_len=response_len, step_s=step_s, trigger=trigger, action=STAY, reason=reason,
                horizon_steps=self.horizon_steps, considered=_rows(considered),
            )  # fmt: skip

        if fits and not drifted:
            return stay("", "lengths are about what they were")
        if drifted:
            self._crossings.append(step)
        self._reference = response_len  # whatever comes of it
        trigger = "memory" if not fits else "drift"
        horizon = max(1, round(self.horizon_steps))
        found = targets(now, self.calibration, steps=horizon, count=self.settings.num_targets, limits=self.limits)
        if not found.best:
            return stay(trigger, "no layout fits at these lengths: fewer samples, recomputation or a checkpoint remain")
        chosen = self._admitted(found.best, urgent=not fits, response_len=response_len)
        if chosen is None:
            return stay(trigger, "no change pays", found.best)
        present = found.searched.present
        if not self.observe_only:  # else nothing is tried
            self._trial = _Trial.of(self.plan, self._measured, present, chosen.found) if present is not None else None
        gain = "the plan would not fit" if not fits else f"pays after {chosen.payback_steps:.1f} steps"
        return Decision(
            step=step, response_len=response_len, step_s=step_s, trigger=trigger, action=GO, reason=gain,
            horizon_steps=self.horizon_steps, considered=_rows(found.best), plan=chosen.found.plan,
        )  # fmt: skip

    def _admitted(self, found: Sequence[Target], *, urgent: bool, response_len: float) -> Target | None:
        for target in found:
            if not any(target.found.changes.values()) or self._missed_before(target.found, response_len):
                continue
            if not self.calibration.fits(target.found.plan):
                continue
            if urgent or target.payback_steps <= self.settings.share * self.horizon_steps:
                return target
        return None

    def _missed_before(self, found: Found, response_len: float) -> bool:
        keys = _keys(found.plan)
        near = self.settings.drift
        return any(keys == missed and abs(response_len / at - 1) <= near for missed, at in self._missed)

    def _back(self, step: int, response_len: float, step_s: float | None) -> Decision | None:
        trial = self._trial
        if trial is None or len(self._measured) < self.settings.missed_steps:
            return None
        seen = median(self._measured[: self.settings.missed_steps])
        self._trial = None  # judged once, on its first steps
        allowed = trial.expected_s * (1 + self.settings.margin)
        before = _at_length(trial.before, response_len)
        if seen <= allowed or not self.calibration.fits(before):
            return None
        self._missed.append((_keys(self.plan), response_len))
        return Decision(
            step=step, response_len=response_len, step_s=step_s, trigger="missed", action=BACK,
            reason=f"steps take {seen:.1f} s, {trial.expected_s:.1f} were expected; before it was {trial.before_s:.1f}",
            horizon_steps=self.horizon_steps, plan=before,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A change whose first steps are still to be judged."""

    before: Plan
    before_s: float
    expected_s: float

    @staticmethod
    def of(plan: Plan, measured: Sequence[float], present: Found, found: Found) -> _Trial | None:
        """Nothing can be judged against a plan whose steps were never timed. Predictions are used as a ratio: what a
        framework adds to every step is in both."""
        if not measured:
            return None
        before_s = median(measured[-3:])
        return _Trial(before=plan, before_s=before_s, expected_s=before_s * found.seconds / present.seconds)


def _at_length(plan: Plan, response_len: float) -> Plan:
    return replace(plan, workload=replace(plan.workload, response_len=max(1, math.ceil(response_len))))


def _keys(plan: Plan) -> tuple[str, ...]:
    return tuple(
        f"{s.name} {s.tp} {s.pp} {s.dp} {s.cp} {s.ep} {s.micro_batch} {s.recompute} {s.zero}" for s in plan.stages
    )


def _rows(found: Sequence[Target]) -> tuple[tuple[str, float, float, float], ...]:
    return tuple((_text(t.found), t.found.seconds, t.stop_s, t.payback_steps) for t in found)


def _text(found: Found) -> str:
    return "; ".join(f"{stage} {{ {keys} }}" for stage, keys in found.changes.items() if keys) or "as it is"
