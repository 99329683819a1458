"""Seconds of one RL step of a plan: every stage, the order they run in, and what is on the critical path.

A step generates, then computes log-probabilities, rewards and values, then trains. Stages that share a GPU run one
after another, stages that share none side by side; nothing trains before all that it needs is there. In async mode
generation runs beside the rest and the longer of the two sets the pace.

Generation has a long tail: the last sequences decode almost alone. Lengths are taken as log-normal around
``response_len`` with an assumed spread, cut at ``max_response``; the batch shrinks as sequences end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np

from nereus.ir.plan import Plan, Stage
from nereus.models.memory.cache import engine_tokens
from nereus.models.memory.state import owner_of, pipeline_index_of_ranks
from nereus.models.memory.steady import mem_bytes_of
from nereus.planner.calibration import Calibration
from nereus.planner.generation import class_seconds
from nereus.planner.runs import Floats
from nereus.planner.stage_runs import Settings, columns_of_stage, run_of_stage, serving_of_stage

#: Coefficient of variation of response lengths. An assumption: published runs report means and maxima only.
LENGTH_SPREAD = 0.6
_NUM_POINTS = 32
#: Of which the pace is predicted.
_NUM_BATCHES = 9
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
    """Services and stages without GPUs take no time. Weight sync is not counted (``weight_sync``)."""
    times = {stage.name: stage_time(plan, stage, calibration) for stage in plan.stages if stage.service is None}
    return schedule(order_of(plan), times)


def stage_time(plan: Plan, stage: Stage, calibration: Calibration) -> StageTime:
    if stage.kind == "generate":
        return _generations([(plan, stage)], calibration)[0]
    predicted = calibration.predict_step_time([run_of_stage(plan, stage)])
    seconds = float(predicted.value[0]) * num_passes(plan, stage)
    return StageTime(stage=stage.name, seconds=seconds, deviation=float(predicted.deviation[0]))


def stage_seconds(layouts: Sequence[tuple[Plan, Settings]], name: str, calibration: Calibration) -> Floats:
    """Of one stage in many layouts at once (``columns_of_stage``), without ranges."""
    plan, _ = layouts[0]
    stage = plan.stage(name)
    if stage.kind == "generate":
        bases = {id(base): base for base, _ in layouts}
        times = _generations([(base, base.stage(name)) for base in bases.values()], calibration)
        by_base = dict(zip(bases, times, strict=True))
        return np.array([by_base[id(base)].seconds for base, _ in layouts])
    return calibration.expect_step_time(*columns_of_stage(name, layouts)) * num_passes(plan, stage)


def num_passes(plan: Plan, stage: Stage) -> float:
    """Optimizer updates of an RL step; 1 for a stage that does not train."""
    workload = plan.workload
    return workload.num_samples * workload.epochs / workload.mini_batch if stage.is_train else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """``after``: each stage with those that it waits for, which stand before it. Times change nothing of it."""

    after: tuple[tuple[str, tuple[str, ...]], ...]

    def ends(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """When each stage ends that takes so long; it starts as early as those that it waits for allow."""
        found: dict[str, float] = {}
        for name, before in self.after:
            found[name] = seconds[name] + max((found[other] for other in before), default=0.0)
        return found

    def last_ends(self, seconds: Mapping[str, float | Floats]) -> Floats:
        """When the last stage ends, for many choices at once: some stages have one time for each."""
        found: dict[str, float | Floats] = {}
        last: Floats = np.zeros(1)
        for name, before in self.after:
            start: float | Floats = 0.0
            for other in before:
                start = np.maximum(start, found[other])
            found[name] = start + seconds[name]
            last = np.maximum(last, found[name])
        return last


def order_of(plan: Plan) -> Order:
    """Plan order within a phase. Services take no time and are left out."""
    sync = plan.workload.mode == "sync"
    stages = sorted((s for s in plan.stages if s.service is None), key=lambda s: _PHASES[s.kind])
    return Order(
        after=tuple(
            (stage.name, tuple(other.name for other in stages[:number] if _waits(stage, other, sync=sync)))
            for number, stage in enumerate(stages)
        )
    )


def schedule(order: Order, times: Mapping[str, StageTime]) -> StepTime:
    ends = order.ends({name: time.seconds for name, time in times.items()})
    after = dict(order.after)
    placed = tuple(
        replace(times[name], start_s=max((ends[other] for other in before), default=0.0))
        for name, before in order.after
    )
    critical: list[str] = []
    name = max(ends, key=lambda n: ends[n], default=None)
    while name is not None:
        critical.append(name)
        name = max(after[name], key=lambda n: ends[n], default=None)
    seconds = max(ends.values(), default=0.0)
    # Errors of stages that run one after another are taken as independent.
    variance = sum((times[name].seconds * times[name].deviation) ** 2 for name in critical)
    deviation = float(np.sqrt(variance)) / seconds if seconds else 0.0
    return StepTime(seconds=seconds, deviation=deviation, stages=placed, critical=tuple(reversed(critical)))


def _waits(stage: Stage, other: Stage, *, sync: bool) -> bool:
    """Whether ``stage`` starts only after ``other``, which comes first, has ended."""
    if not set(stage.devices).isdisjoint(other.devices):
        return True
    if not sync and other.kind == "generate":
        return False  # works on samples of earlier weights
    return _PHASES[other.kind] < _PHASES[stage.kind] and _feeds(other, stage)


def _feeds(other: Stage, stage: Stage) -> bool:
    """Advantages need every score; a critic trains without the actor's log-probabilities."""
    return not (stage.kind == "train" and other.kind == "logprob" and other.model != stage.model)


def _generations(stages: Sequence[tuple[Plan, Stage]], calibration: Calibration) -> list[StageTime]:
    """Generate stages, each of its plan."""
    batches = [_batches(plan, stage) for plan, stage in stages]
    paces = _paces(stages, calibration, [at_once for at_once, _, _, _ in batches])
    found = []
    for (plan, stage), (at_once, queued, left, tokens), (token_s, deviation) in zip(
        stages, batches, paces, strict=True
    ):
        # The queue keeps the engine full until the last ``at_once`` sequences are in; then the batch only shrinks.
        full_s = queued * plan.workload.response_len * token_s(np.array([at_once]))[0]
        tail_s = (token_s(left) * left * tokens).sum()
        found.append(StageTime(stage=stage.name, seconds=float(full_s + tail_s), deviation=deviation))
    return found


def generation_seconds(plan: Plan, stage: Stage) -> Floats:
    """[generation.CLASSES] seconds of a generate stage at data-sheet rates. What it takes is their sum, each times the
    factor of its class: the same time as ``stage_time``'s, which interpolates between batches."""
    at_once, queued, left, tokens = _batches(plan, stage)
    engines = [serving_of_stage(plan, stage, float(batch)) for batch in (at_once, *left)]
    weight = np.array([queued * plan.workload.response_len, *(left * tokens)])
    found: Floats = weight @ class_seconds(engines)
    return found


def _batches(plan: Plan, stage: Stage) -> tuple[float, float, Floats, Floats]:
    """(sequences that one engine decodes at once, those that wait for a place, sequences left in each part of the
    tail, tokens that each of them decodes there)."""
    samples = plan.workload.num_samples / stage.dp
    at_once = min(samples, max(1.0, _tokens_held(plan, stage) / plan.workload.seq_len))
    alive = at_once * (1 - np.arange(_NUM_POINTS) / _NUM_POINTS)
    return at_once, samples - at_once, np.maximum(alive, 1.0), np.diff(_lengths(plan), prepend=0.0)


def _tokens_held(plan: Plan, stage: Stage) -> int:
    """By the cache of one engine."""
    owner = owner_of(plan, stage)
    inside = tuple(s for s in plan.stages if s.service is None and owner_of(plan, s).name == owner.name)
    nodes = {node.name: mem_bytes_of(node) for node in plan.cluster.nodes}
    ranks = zip(pipeline_index_of_ranks(owner), owner.ranks, strict=True)
    places = {(index, nodes[device.node]) for index, device in ranks}
    return engine_tokens(replace(plan, stages=inside), stage, sorted(places))[0]


def _paces(
    stages: Sequence[tuple[Plan, Stage]], calibration: Calibration, most: Sequence[float]
) -> list[tuple[Callable[[Floats], Floats], float]]:
    """Seconds per token of one engine of each by its batch of at most so many, from a few batches and straight lines
    between their logarithms; and their deviation."""
    batches = [np.unique(np.geomspace(1.0, at_once, _NUM_BATCHES)) for at_once in most]
    engines = []
    for (plan, stage), sizes in zip(stages, batches, strict=True):
        engine = serving_of_stage(plan, stage, 1.0)
        engines += [replace(engine, batch=size) for size in sizes.tolist()]
    predicted = calibration.predict_token_time(engines)
    ends = np.cumsum([len(sizes) for sizes in batches])
    logs = np.split(np.log(predicted.value), ends[:-1])
    return [
        (_between(np.log(sizes), log), float(predicted.deviation[end - 1]))
        for sizes, log, end in zip(batches, logs, ends, strict=True)
    ]


def _between(log_batches: Floats, log_seconds: Floats) -> Callable[[Floats], Floats]:
    def token_s(batch: Floats) -> Floats:
        seconds: Floats = np.exp(np.interp(np.log(batch), log_batches, log_seconds))
        return seconds

    return token_s


def _lengths(plan: Plan) -> Floats:
    """Response lengths at equal steps of probability, ascending; their mean is ``response_len`` before the cut."""
    limits = [limit for limit in (plan.workload.max_response, plan.workload.max_tokens) if limit is not None]
    lengths = plan.workload.response_len * _around_one()
    return np.minimum(lengths, min(limits)) if limits else lengths


@cache
def _around_one() -> Floats:
    """Lengths over their mean."""
    sigma = float(np.sqrt(np.log1p(LENGTH_SPREAD**2)))
    normal = NormalDist(-(sigma**2) / 2, sigma)
    return np.exp([normal.inv_cdf((number + 0.5) / _NUM_POINTS) for number in range(_NUM_POINTS)])
