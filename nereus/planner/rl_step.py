"""Seconds of one RL step of a plan: every stage, the order they run in, and what is on the critical path.

A step generates, then computes log-probabilities, rewards and values, then trains. Stages that share a GPU run one
after another, stages that share none side by side; nothing trains before all that it needs is there. In async mode
generation runs beside the rest and the longer of the two sets the pace.

Generation has a long tail: the last sequences decode almost alone. Lengths are taken as log-normal around
``response_len`` with an assumed spread, cut at ``max_response``; the batch shrinks as sequences end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from nereus.ir.plan import Plan, Stage
from nereus.models.memory.cache import cache_tokens
from nereus.models.memory.steady import steady_state
from nereus.planner.calibration import Calibration
from nereus.planner.stage_runs import run_of_stage, serving_of_stage

#: Coefficient of variation of response lengths. An assumption: published runs report means and maxima only.
LENGTH_SPREAD = 0.6
_NUM_POINTS = 32
_PHASES: Mapping[str, int] = {"generate": 0, "logprob": 1, "infer": 1, "train": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """``deviation``: of the logarithm. ``start_s``: within the step."""

    stage: str
    seconds: float
    deviation: float
    start_s: float = 0.0

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """``critical``: stages that end the step or that one of these waited for, in the order they run."""

    seconds: float
    deviation: float
    stages: tuple[StageTime, ...]
    critical: tuple[str, ...]


def step_time(plan: Plan, calibration: Calibration) -> StepTime:
    """Services and stages without GPUs take no time. Weight sync is not counted."""
    times = {stage.name: stage_time(plan, stage, calibration) for stage in plan.stages if stage.service is None}
    return schedule(plan, times)


def stage_time(plan: Plan, stage: Stage, calibration: Calibration) -> StageTime:
    if stage.kind == "generate":
        return _generation(plan, stage, calibration)
    predicted = calibration.predict_step_time([run_of_stage(plan, stage)])
    workload = plan.workload
    times = workload.num_samples * workload.epochs / workload.mini_batch if stage.is_train else 1.0
    seconds = float(predicted.value[0]) * times
    return StageTime(stage=stage.name, seconds=seconds, deviation=float(predicted.deviation[0]))


def schedule(plan: Plan, times: Mapping[str, StageTime]) -> StepTime:
    """Each stage as early as its GPUs and what it needs allow, in plan order within a phase."""
    sync = plan.workload.mode == "sync"
    placed: dict[str, StageTime] = {}
    waited: dict[str, str] = {}
    for stage in sorted((s for s in plan.stages if s.name in times), key=lambda s: _PHASES[s.kind]):
        before = [other for name, other in placed.items() if _waits(plan, stage, plan.stage(name), sync=sync)]
        last = max(before, key=lambda other: other.end_s, default=None)
        if last is not None:
            waited[stage.name] = last.stage
        placed[stage.name] = replace(times[stage.name], start_s=last.end_s if last else 0.0)
    end = max(placed.values(), key=lambda time: time.end_s, default=None)
    critical: list[str] = []
    name = end.stage if end else None
    while name is not None:
        critical.append(name)
        name = waited.get(name)
    seconds = end.end_s if end else 0.0
    # Errors of stages that run one after another are taken as independent.
    variance = sum((placed[name].seconds * placed[name].deviation) ** 2 for name in critical)
    deviation = float(np.sqrt(variance)) / seconds if seconds else 0.0
    return StepTime(
        seconds=seconds, deviation=deviation, stages=tuple(placed.values()), critical=tuple(reversed(critical))
    )


def _waits(plan: Plan, stage: Stage, other: Stage, *, sync: bool) -> bool:
    """Whether ``stage`` starts only after ``other``, which comes first, has ended."""
    if not set(stage.devices).isdisjoint(other.devices):
        return True
    if not sync and other.kind == "generate":
        return False  # works on samples of earlier weights
    return _PHASES[other.kind] < _PHASES[stage.kind] and _feeds(other, stage)


def _feeds(other: Stage, stage: Stage) -> bool:
    """Advantages need every score; a critic trains without the actor's log-probabilities."""
    return not (stage.kind == "train" and other.kind == "logprob" and other.model != stage.model)


def _generation(plan: Plan, stage: Stage, calibration: Calibration) -> StageTime:
    samples = plan.workload.num_samples / stage.dp
    held = next((tokens for s, tokens, _ in cache_tokens(plan, steady_state(plan)) if s.name == stage.name), 0)
    most = max(1.0, held / plan.workload.seq_len)
    at_once = min(samples, most)
    token_s, deviation = _pace(plan, stage, calibration, at_once)
    # The queue keeps the engine full until the last ``at_once`` sequences are in; then the batch only shrinks.
    full_s = (samples - at_once) * plan.workload.response_len * token_s(at_once)
    lengths = _lengths(plan)
    alive = at_once * (1 - np.arange(_NUM_POINTS) / _NUM_POINTS)
    tokens = np.diff(lengths, prepend=0.0)
    tail_s = sum(token_s(max(1.0, b)) * max(1.0, b) * count for b, count in zip(alive, tokens, strict=True))
    return StageTime(stage=stage.name, seconds=float(full_s + tail_s), deviation=deviation)


def _pace(plan: Plan, stage: Stage, calibration: Calibration, most: float) -> tuple[Callable[[float], float], float]:
    """Seconds per token of one engine by its batch, from a few batches and straight lines between their logarithms."""
    batches = np.unique(np.geomspace(1.0, most, 9))
    predicted = calibration.predict_token_time([serving_of_stage(plan, stage, float(b)) for b in batches])
    logs = np.log(predicted.value)

    def token_s(batch: float) -> float:
        return float(np.exp(np.interp(np.log(batch), np.log(batches), logs)))

    return token_s, float(predicted.deviation[-1])


def _lengths(plan: Plan) -> np.ndarray:
    """Response lengths at equal steps of probability, ascending; their mean is ``response_len`` before the cut."""
    sigma = float(np.sqrt(np.log1p(LENGTH_SPREAD**2)))
    mean = plan.workload.response_len
    normal = NormalDist(np.log(mean) - sigma**2 / 2, sigma)
    lengths = np.exp([normal.inv_cdf((number + 0.5) / _NUM_POINTS) for number in range(_NUM_POINTS)])
    limits = [limit for limit in (plan.workload.max_response, plan.workload.max_tokens) if limit is not None]
    return np.minimum(lengths, min(limits)) if limits else lengths
