"""Calibration while a job runs: what its steps, stages, peaks and changes say, added to what was known before.

    online = Online(calibration)                                   # of a file, or calibrate(())
    online.observe(plan, step=7, step_s=61.0)                      # or with stage_s={"actor.train": 31.0, ...}
    online.changed(old, new, outcome.phases_s)
    online.calibration()                                           # save it with ``to_document``, as nereusc fit does

A run of one stage is one layout at one length, give or take a tenth. Of its last measurements the median counts: one
disturbed step moves nothing. A run that was not measured for a while is believed less, its noise doubled with every
half-life, and is forgotten in the end; so efficiencies that drift are followed. Runs are learned together with those of
the calibration that the job began with (``learned.py``), which a saved calibration still holds.

Where a job tells the seconds of its steps and no more, those are first dealt to its stages: all steps together are
explained by one factor for each class of operation of any stage, and one for what passes between stages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nereus.ir.plan import Plan
from nereus.passes.coarse import coarse
from nereus.planner import generation, plan_memory, step_time
from nereus.planner.calibration import GENERATION, STEP_TIME, Calibration, timed_runs
from nereus.planner.learned import Beliefs, Learned, Seen, learn
from nereus.planner.rl_step import generation_seconds, num_passes, order_of, schedule, stage_time
from nereus.planner.runs import Floats
from nereus.planner.stage_runs import run_of_stage, serving_of_stage

#: Lengths that differ by less are one run.
_BAND = 0.1
#: Measurements of a run that are remembered; their median counts.
_KEPT = 5
#: The median of so many is no outlier, as long as it is fresh.
_CONFIRMED = 3
#: A run is forgotten after so many half-lives.
_FORGOTTEN = 5.0
#: How much more the noise of a stage's seconds may be that were dealt out of a step's (variance).
_DEALT = 4.0
#: Between stages, as a share of the step: what is expected, and how far it may be off (deviation of its log).
_BETWEEN, _BETWEEN_SPREAD = 0.05, 0.8


@dataclass(slots=True)
class _Run:
    """One layout at one length: (step, measured) of its last measurements."""

    plan: Plan
    found: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def typical(self) -> float:
        return float(np.median([value for _, value in self.found]))

    def age(self, now: int) -> int:
        return now - self.found[-1][0]


class Online:
    """``half_life_steps``: after which a measurement is half as good. ``reading``: how peaks are read (allocated,
    reserved, device)."""

    def __init__(self, base: Calibration, *, half_life_steps: float = 100.0, reading: str = "device") -> None:
        self.base = base
        self.reading = reading
        self._half_life = half_life_steps
        self._now = 0
        self._stages: dict[tuple[object, ...], _Run] = {}
        self._steps: dict[tuple[object, ...], _Run] = {}
        self._peaks: dict[tuple[object, ...], _Run] = {}
        self._stops = base.stops
        self._known: Calibration | None = None

    def observe(
        self,
        plan: Plan,
        *,
        step: int,
        step_s: float | None = None,
        stage_s: Mapping[str, float] | None = None,
        peak_bytes: float | None = None,
    ) -> None:
        """What ``step`` took under ``plan``, whose workload has the lengths of that step. ``stage_s``: seconds of the
        stages that were timed. ``peak_bytes``: most that any GPU held. Raises ValueError for what cannot be."""
        stage_s = dict(stage_s or {})
        given = [value for value in (step_s, peak_bytes, *stage_s.values()) if value is not None]
        if not all(0 < value < math.inf for value in given):
            raise ValueError(f"what is measured must be positive and finite: {given}")
        if unknown := set(stage_s) - {stage.name for stage in plan.stages}:
            raise ValueError(f"no stage of the plan: {', '.join(sorted(unknown))}")
        self._now = max(self._now, step)
        for name, seconds in stage_s.items():
            _keep(self._stages, (name, *_key(plan, name)), plan, step, seconds)
        everything = tuple(_key(plan, stage.name) for stage in plan.stages)
        if step_s is not None:
            _keep(self._steps, everything, plan, step, step_s)
        if peak_bytes is not None:
            _keep(self._peaks, everything, plan, step, peak_bytes)
        for runs in (self._stages, self._steps, self._peaks):
            for key in [k for k, run in runs.items() if run.age(self._now) > _FORGOTTEN * self._half_life]:
                del runs[key]
        self._known = None

    def changed(self, old: Plan, new: Plan, phases_s: Mapping[str, float]) -> None:
        """A change was executed; ``phases_s`` as its outcome has them."""
        self._stops = self._stops.seen(coarse(old, new), phases_s)
        self._known = None

    def calibration(self) -> Calibration:
        """What is known now."""
        if self._known is None:
            self._known = self._learned()
        return self._known

    @property
    def num_peaks(self) -> int:
        """Runs whose peak was measured."""
        return len(self._peaks)

    def between_s(self) -> float:
        """Seconds of a step that belong to no stage: weight sync, data, waking. The median over runs whose stages were
        timed; else what all steps together say; 0 where no step was timed."""
        found = []
        for run in self._steps.values():
            times = {s.name: self._stage_s(run.plan, s.name) for s in run.plan.stages if s.service is None}
            if all(seconds is not None for seconds in times.values()):
                found.append(max(0.0, run.typical - _schedule_s(run.plan, times)))
        if found:
            return float(np.median(found))
        return _dealt(list(self._steps.values()), self.base)[1] if self._steps else 0.0

    def _stage_s(self, plan: Plan, name: str) -> float | None:
        run = self._stages.get((name, *_key(plan, name)))
        return run.typical if run is not None else None

    def _doubt(self, run: _Run) -> float:
        """In times of the variance of one measurement's noise."""
        return float(2.0 ** (run.age(self._now) / self._half_life))

    def _row(self, stage: str, run: _Run, measured: float, dealt: float = 1.0) -> _Row:
        confirmed = len(run.found) >= _CONFIRMED and run.age(self._now) <= self._half_life
        return _Row(stage, run.plan, measured, dealt * self._doubt(run), confirmed)

    def _learned(self) -> Calibration:
        rows = [self._row(str(key[0]), run, run.typical) for key, run in self._stages.items()]
        timed = {(row.stage, *_key(row.plan, row.stage)) for row in rows}
        steps = list(self._steps.values())
        for run, seconds in zip(steps, _dealt(steps, self.base)[0], strict=True):
            rows += [
                self._row(name, run, value, _DEALT)
                for name, value in seconds.items()
                if (name, *_key(run.plan, name)) not in timed
            ]
        engines = [row for row in rows if row.plan.stage(row.stage).kind == "generate"]
        others = [row for row in rows if row.plan.stage(row.stage).kind != "generate"]
        peaks = [self._row("", run, run.typical) for run in self._peaks.values()]
        passes = [
            replace(row, measured=row.measured / num_passes(row.plan, row.plan.stage(row.stage))) for row in others
        ]
        runs = timed_runs([run_of_stage(row.plan, row.plan.stage(row.stage)) for row in others])
        return replace(
            self.base,
            step_time=_with(self.base.step_time, runs, passes),
            generation=_with(self.base.generation, _generated([(row.plan, row.stage) for row in engines]), engines),
            plan_memory=_with(
                self.base.plan_memory, plan_memory.seen([row.plan for row in peaks], self.reading), peaks
            ),
            stops=self._stops,
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """What one run says: ``measured`` seconds of a stage, or bytes."""

    stage: str
    plan: Plan
    measured: float
    doubt: float
    confirmed: bool


def _keep(runs: dict[tuple[object, ...], _Run], key: tuple[object, ...], plan: Plan, step: int, value: float) -> None:
    run = runs.setdefault(key, _Run(plan))
    run.plan = plan
    run.found.append((step, value))


def _key(plan: Plan, name: str) -> tuple[object, ...]:
    s, workload = plan.stage(name), plan.workload
    return (
        s.tp, s.pp, s.dp, s.cp, s.ep, s.vp, s.micro_batch, s.recompute, s.zero, s.fsdp,
        workload.num_samples, workload.mini_batch, workload.max_response,
        round(math.log(workload.seq_len) / _BAND), round(math.log(workload.response_len) / _BAND),
    )  # fmt: skip


def _with(base: Learned, seen: Seen, rows: Sequence[_Row]) -> Learned:
    """What ``base`` has seen, and these runs."""
    if not rows:
        return base
    num = len(base.seen.labels)
    both = Seen(
        x=np.concatenate([base.seen.x, seen.x]) if num else seen.x,
        labels=(*base.seen.labels, *seen.labels),
        place=np.concatenate([base.seen.place, seen.place]) if num else seen.place,
    )
    return learn(
        base.beliefs,
        both,
        np.concatenate([base.measured() if num else np.zeros(0), [row.measured for row in rows]]),
        np.concatenate([np.ones(num), [row.doubt for row in rows]]),
        np.concatenate([np.zeros(num, dtype=bool), np.array([row.confirmed for row in rows])]),
    )


def _generated(stages: Sequence[tuple[Plan, str]]) -> Seen:
    """Whole generate stages, of which each engine begins with its share of the samples."""
    engines = [
        serving_of_stage(plan, plan.stage(name), max(1.0, plan.workload.num_samples / plan.stage(name).dp))
        for plan, name in stages
    ]
    x = [generation_seconds(plan, plan.stage(name)) for plan, name in stages]
    return Seen(
        x=np.array(x).reshape(len(stages), len(generation.CLASSES)),
        labels=tuple(engine.labels for engine in engines),
        place=generation.places(engines),
    )


# -- step times alone --------------------------------------------------------------------------------------------------


def _dealt(steps: Sequence[_Run], base: Calibration) -> tuple[list[dict[str, float]], float]:
    """(seconds of each stage on the critical path for each run of whole steps, seconds between stages)."""
    if not steps:
        return [], 0.0
    parts = [_classes(run.plan, base) for run in steps]
    measured = np.array([run.typical for run in steps])
    between_s = _BETWEEN * float(np.median(measured))
    x = np.array([np.append(sum(of.values()), between_s) for of in parts])
    beliefs = _beliefs()
    seen = Seen(x=x, labels=(("",),) * len(steps), place=np.zeros((len(steps), 1)))
    factors = learn(beliefs, seen, measured).factors(seen)[0]
    found = []
    for of, seconds in zip(parts, measured, strict=True):
        expected = {name: float(classes @ factors[:-1]) for name, classes in of.items()}
        scale = seconds / (sum(expected.values()) + between_s * factors[-1])
        found.append({name: value * scale for name, value in expected.items()})
    return found, between_s * float(factors[-1])


def _beliefs() -> Beliefs:
    """Classes of training, of generation, and what lies between stages. All runs are of one job: what labels would
    say is one spread."""

    def own(beliefs: Beliefs) -> Floats:
        total = math.sqrt(beliefs.everywhere**2 + sum(value**2 for value in beliefs.by_label.values()))
        return beliefs.spread * total

    return Beliefs(
        prior=np.zeros(len(step_time.CLASSES) + len(generation.CLASSES) + 1),
        spread=np.concatenate([own(STEP_TIME), own(GENERATION), [_BETWEEN_SPREAD]]),
        everywhere=1.0,
        by_label={},
        near=0.0,
        reach=1.0,
        near_label="",
        noise=0.05,
        freedom=4.0,
    )


def _classes(plan: Plan, base: Calibration) -> dict[str, Floats]:
    """Seconds by class, of training and of generation, for each stage on the critical path, as ``base`` expects."""
    found = {}
    num = len(step_time.CLASSES)
    times = {stage.name: stage_time(plan, stage, base) for stage in plan.stages if stage.service is None}
    for name in schedule(order_of(plan), times).critical:
        stage = plan.stage(name)
        seconds = np.zeros(num + len(generation.CLASSES))
        if stage.kind == "generate":
            seen = _generated([(plan, name)])
            seconds[num:] = (seen.x * base.generation.factors(seen))[0]
        else:
            seen = timed_runs([run_of_stage(plan, stage)])
            seconds[:num] = (seen.x * base.step_time.factors(seen))[0] * num_passes(plan, stage)
        found[name] = seconds
    return found


def _schedule_s(plan: Plan, times: Mapping[str, float | None]) -> float:
    return max(order_of(plan).ends({name: seconds or 0.0 for name, seconds in times.items()}).values(), default=0.0)
