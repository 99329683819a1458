"""State of a job beside its tensors: counters, versions, data position, RNG rule, schedules. The same on every rank.

Stored as JSON with a schema number and a checksum. ``docs/job-state.md`` explains the fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nereus.runtime.data_position import DataPosition
from nereus.runtime.job_values import JobStateError, decode, encode

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A learning-rate schedule: class, its own state, and the rate of each param group now."""

    kind: str
    state: Mapping[str, object]
    lrs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProgress:
    """``num_updates``: optimizer updates done; ``weight_version``: of the weights that engines are given, it never
    restarts. ``trainer``: what an adapter's ``job_state`` gives (steps per group, scaler, ...)."""

    model: str
    num_updates: int
    weight_version: int
    schedule: Schedule | None = None
    trainer: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchPosition:
    """Where training stands inside the RL step: pass ``epoch`` of ``num_epochs`` over the step's samples, mini-batch
    ``index`` of ``num_minibatches`` next. Both 0: at the boundary between two steps."""

    epoch: int = 0
    num_epochs: int = 1
    index: int = 0
    num_minibatches: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.epoch < self.num_epochs:
            raise JobStateError(f"minibatch.epoch: {self.epoch} is not one of {self.num_epochs}")
        if not 0 <= self.index < self.num_minibatches:
            raise JobStateError(f"minibatch.index: {self.index} is not one of {self.num_minibatches}")

    @property
    def at_boundary(self) -> bool:
        return self.epoch == 0 and self.index == 0

    def advanced(self) -> MinibatchPosition:
        """After one more mini-batch; after the last of the step, its boundary."""
        done = self.epoch * self.num_minibatches + self.index + 1
        epoch, index = divmod(done % (self.num_epochs * self.num_minibatches), self.num_minibatches)
        return MinibatchPosition(
            epoch=epoch, num_epochs=self.num_epochs, index=index, num_minibatches=self.num_minibatches
        )

    def step_data(self, *, seed: int, step: int, num_samples: int) -> DataPosition:
        """The same place as a position in the step's own ``num_samples`` samples, to be dealt by a RankSampler with a
        batch of ``num_samples / num_minibatches``: the shuffle depends on (seed, step, epoch), not on ranks."""
        if num_samples % self.num_minibatches:
            raise JobStateError(f"{num_samples} samples do not make {self.num_minibatches} equal mini-batches")
        size = num_samples // self.num_minibatches
        digest = hashlib.sha256(f"nereus minibatch {seed} {step}".encode()).digest()
        start = DataPosition(seed=int.from_bytes(digest[:4]), size=num_samples)
        return start.advanced((self.epoch * self.num_minibatches + self.index) * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RngRule:
    """How the random streams of all ranks came about. ``derived_step``: the step of the last change of layout, at which
    every rank derived its streams afresh; None: as the job began. ``declared``: (stream, scope) of streams that
    ``nereus.runtime.rng_streams`` does not know."""

    seed: int
    derived_step: int | None = None
    declared: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """``step``: RL steps done."""

    step: int
    models: tuple[ModelProgress, ...]
    data: DataPosition
    rng: RngRule
    minibatch: MinibatchPosition = field(default_factory=MinibatchPosition)

    def __post_init__(self) -> None:
        names = [m.model for m in self.models]
        if names != sorted(set(names)):
            raise JobStateError(f"models: {names} are not in order of their names, each once")
        for name, count in _counters(self).items():
            if count < 0:
                raise JobStateError(f"{name}: {count} is negative")

    def model(self, name: str) -> ModelProgress:
        for progress in self.models:
            if progress.model == name:
                return progress
        raise JobStateError(f"models: no {name}; there are {', '.join(m.model for m in self.models)}")

    def check_follows(self, earlier: JobState) -> None:
        """Raises JobStateError where a counter went back, or a model is gone: a version that restarts lets an engine
        take old weights for new ones."""
        now = _counters(self)
        for name, count in _counters(earlier).items():
            if name not in now:
                raise JobStateError(f"{name}: was {count} and is gone")
            if now[name] < count:
                raise JobStateError(f"{name}: went back from {count} to {now[name]}")


def _counters(state: JobState) -> dict[str, int]:
    found = {"step": state.step, "data.consumed": state.data.consumed}
    for progress in state.models:
        found[f"models[{progress.model}].num_updates"] = progress.num_updates
        found[f"models[{progress.model}].weight_version"] = progress.weight_version
    return found


def as_json(state: JobState) -> dict[str, Any]:
    """``state`` as JSON data. Raises JobStateError for what must not be in there."""
    return {
        "step": _typed(state.step, int, "step"),
        "models": [_model_json(m) for m in state.models],
        "data": _flat_json(state.data, "data"),
        "minibatch": _flat_json(state.minibatch, "minibatch"),
        "rng": {
            "seed": _typed(state.rng.seed, int, "rng.seed"),
            "derived_step": state.rng.derived_step,
            "declared": dict(state.rng.declared),
        },
    }


def _model_json(progress: ModelProgress) -> dict[str, Any]:
    path = f"models[{progress.model}]"
    schedule = progress.schedule
    return {
        "model": progress.model,
        "num_updates": _typed(progress.num_updates, int, f"{path}.num_updates"),
        "weight_version": _typed(progress.weight_version, int, f"{path}.weight_version"),
        "schedule": None
        if schedule is None
        else {
            "kind": schedule.kind,
            "state": encode(schedule.state, f"{path}.schedule.state"),
            "lrs": encode(list(schedule.lrs), f"{path}.schedule.lrs"),
        },
        "trainer": encode(progress.trainer, f"{path}.trainer"),
    }


def _flat_json(record: DataPosition | MinibatchPosition, path: str) -> dict[str, Any]:
    return {f.name: _typed(getattr(record, f.name), int, f"{path}.{f.name}") for f in fields(record)}


def digest(data: Mapping[str, Any]) -> str:
    """Checksum of JSON data, whatever the order of its keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def dumps(state: JobState) -> str:
    """Raises JobStateError for what must not be in there."""
    try:
        data = as_json(state)
    except RecursionError:
        raise JobStateError("job state contains itself, or is nested too deep") from None
    document = {"nereus_job_state": SCHEMA, "sha256": digest(data), "state": data}
    return json.dumps(document, indent=1, allow_nan=False)


def loads(text: str) -> JobState:
    """Raises JobStateError where the text is not what ``dumps`` wrote, naming the field."""
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise JobStateError(f"job state is not JSON: {error}") from None
    _names(document, ("nereus_job_state", "sha256", "state"), "job state")
    if document["nereus_job_state"] != SCHEMA:
        raise JobStateError(f"job state has schema {document['nereus_job_state']!r}; this version reads {SCHEMA}")
    data = document["state"]
    try:
        found = digest(data)
    except ValueError:  # 1e400 is JSON, and no number that was written
        found = None
    if found is None or found != document["sha256"]:
        raise JobStateError("job state does not match its checksum: it was damaged or edited")
    _names(data, ("step", "models", "data", "minibatch", "rng"), "state")
    rng = data["rng"]
    _names(rng, ("seed", "derived_step", "declared"), "rng")
    declared = _typed(rng["declared"], dict, "rng.declared")
    derived = rng["derived_step"]
    return JobState(
        step=_typed(data["step"], int, "step"),
        models=tuple(_model(m, f"models[{i}]") for i, m in enumerate(_typed(data["models"], list, "models"))),
        data=DataPosition(**_flat(data["data"], DataPosition, "data")),
        minibatch=MinibatchPosition(**_flat(data["minibatch"], MinibatchPosition, "minibatch")),
        rng=RngRule(
            seed=_typed(rng["seed"], int, "rng.seed"),
            derived_step=None if derived is None else _typed(derived, int, "rng.derived_step"),
            declared=tuple((name, _typed(scope, str, f"rng.declared.{name}")) for name, scope in declared.items()),
        ),
    )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _model(data: Any, path: str) -> ModelProgress:
    _names(data, ("model", "num_updates", "weight_version", "schedule", "trainer"), path)
    schedule = data["schedule"]
    if schedule is not None:
        _names(schedule, ("kind", "state", "lrs"), f"{path}.schedule")
        state = _typed(decode(schedule["state"], f"{path}.schedule.state"), dict, f"{path}.schedule.state")
        lrs = _typed(decode(schedule["lrs"], f"{path}.schedule.lrs"), list, f"{path}.schedule.lrs")
        rates = tuple(_typed(lr, float, f"{path}.schedule.lrs") for lr in lrs)
        schedule = Schedule(kind=_typed(schedule["kind"], str, f"{path}.schedule.kind"), state=state, lrs=rates)
    return ModelProgress(
        model=_typed(data["model"], str, f"{path}.model"),
        num_updates=_typed(data["num_updates"], int, f"{path}.num_updates"),
        weight_version=_typed(data["weight_version"], int, f"{path}.weight_version"),
        schedule=schedule,
        trainer=_typed(decode(data["trainer"], f"{path}.trainer"), dict, f"{path}.trainer"),
    )


def _flat(data: Any, record: type[DataPosition] | type[MinibatchPosition], path: str) -> dict[str, int]:
    names = tuple(f.name for f in fields(record))
    _names(data, names, path)
    return {name: _typed(data[name], int, f"{path}.{name}") for name in names}


def _names(data: Any, expected: tuple[str, ...], path: str) -> None:
    _typed(data, dict, path)
    if wrong := sorted(set(expected).symmetric_difference(data)):
        raise JobStateError(f"{path}: {wrong[0]} is {'missing' if wrong[0] in expected else 'not known'}")


def _typed(value: Any, kind: type[Any], path: str) -> Any:
    # bool is an int to Python, but no counter.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise JobStateError(f"{path}: {value!r} is not of type {kind.__name__}")
    return value
