"""What runs have taught: a model each of step time, peak memory and generation, kept in a file that can be shared.

The file holds what was seen and what each run pulls at (``learned.py``), not the settings of the prior: those belong to
the version of Nereus that reads it, and a file of another version is refused rather than read wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity
from nereus.ir.plan import Plan
from nereus.models.memory import check_memory
from nereus.planner import generation, peak_memory, plan_memory, step_time, stops
from nereus.planner.generation import Serving
from nereus.planner.learned import Beliefs, Learned, Predicted, Seen, learn
from nereus.planner.plan_memory import PLAN_MEMORY
from nereus.planner.runs import RECOMPUTE, Columns, Floats, Run, columns
from nereus.planner.stops import Stops

#: Raised whenever classes, priors or labels change.
VERSION = 2
_NUM_PLACES = 12
_EMPTY: Mapping[str, Any] = {
    "labels": [], "formula": [], "place": [], "pull": [], "near_pull": [], "noise_variance": [], "honesty": 1.0,
}  # fmt: skip
#: No number of a calibration is as large, and the squares of smaller ones are finite.
_TOO_LARGE = 1e100

STEP_TIME = Beliefs(
    prior=np.log(step_time.class_array(step_time.PRIOR)),
    spread=step_time.class_array(step_time.SPREAD),
    everywhere=0.2,
    by_label={
        "gpu": 0.2, "format": 0.2, "gpu-format": 0.15, "publisher": 0.2, "cluster": 0.2, "set": 0.15, "sharding": 0.15,
    },
    near=0.1,
    reach=2.0,
    near_label="set",
    noise=0.03,
    freedom=3.0,
)  # fmt: skip

PEAK_MEMORY = Beliefs(
    prior=np.log(step_time.class_array(peak_memory.PRIOR, peak_memory.CLASSES)),
    spread=step_time.class_array(peak_memory.SPREAD, peak_memory.CLASSES),
    everywhere=0.3,
    # The same program holds the same on another GPU, but for what the device itself takes.
    by_label={"reading": 0.15, "publisher": 0.3, "cluster": 0.05, "set": 0.2},
    near=0.1,
    reach=2.0,
    near_label="set",
    noise=0.02,
    freedom=4.0,
)

GENERATION = Beliefs(
    prior=np.log(step_time.class_array(generation.PRIOR, generation.CLASSES)),
    spread=step_time.class_array(generation.SPREAD, generation.CLASSES),
    everywhere=0.4,
    by_label={"gpu": 0.2, "engine": 0.3, "cluster": 0.2, "set": 0.1},
    near=0.1,
    reach=2.0,
    near_label="cluster",
    noise=0.05,
    freedom=4.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    step_time: Learned
    peak_memory: Learned
    generation: Learned
    #: What running jobs taught of their whole memory, and of the stops of their changes.
    plan_memory: Learned = field(default_factory=lambda: learn(PLAN_MEMORY, plan_memory.seen((), ""), np.zeros(0)))
    stops: Stops = field(default_factory=Stops)

    def fits(self, plan: Plan) -> bool:
        """By the formulas; and where peaks of a running job are known, by those, at the upper end of their range."""
        if any(found.severity.value == "error" for found in check_memory(plan)):
            return False
        return not len(self.plan_memory.pull) or plan_memory.peak(self.plan_memory, plan).fits

    def predict_token_time(self, engines: Sequence[Serving]) -> Predicted:
        """Seconds per generated token of an engine."""
        return self.generation.predict(served(engines))

    def predict_step_time(self, runs: Sequence[Run]) -> Predicted:
        """Seconds."""
        return self.step_time.predict(timed_runs(runs))

    def expect_step_time(self, numbers: Columns, labels: Sequence[tuple[str, ...]]) -> Floats:
        """Seconds, without their range, of runs by their columns."""
        return self.step_time.expect(_timed_columns(numbers, labels))

    def predict_peak_memory(self, runs: Sequence[Run]) -> Predicted:
        """Bytes on the fullest GPU, as the run's kind of reading counts them."""
        return self.peak_memory.predict(_weighed(runs))


def calibrate(runs: Sequence[Run], engines: Sequence[Serving] = (), token_seconds: Sequence[float] = ()) -> Calibration:
    """From the runs that were measured; those that ran out of memory teach nothing (their peak is no reading).
    ``engines`` and what each took per generated token."""
    ended = [run for run in runs if not run.out_of_memory]
    timed = [run for run in ended if run.step_time_s]
    weighed = [run for run in ended if run.peak_mem_gb]
    return Calibration(
        step_time=learn(STEP_TIME, timed_runs(timed), np.array([run.step_time_s or 0.0 for run in timed])),
        peak_memory=learn(
            PEAK_MEMORY, _weighed(weighed), np.array([(run.peak_mem_gb or 0.0) * run.gb_bytes for run in weighed])
        ),
        generation=learn(GENERATION, served(engines), np.array(token_seconds)),
    )


def served(engines: Sequence[Serving]) -> Seen:
    """For ``learn(GENERATION, ...)``: seconds per generated token."""
    labels = tuple(engine.labels for engine in engines)
    return Seen(x=generation.class_seconds(engines), labels=labels, place=generation.places(engines))


def timed_runs(runs: Sequence[Run]) -> Seen:
    return _timed_columns(columns(runs), [run.labels for run in runs])


def _timed_columns(c: Columns, labels: Sequence[tuple[str, ...]]) -> Seen:
    return Seen(x=step_time.class_seconds(c), labels=tuple(labels), place=_places(c))


def _weighed(runs: Sequence[Run]) -> Seen:
    c, labels = columns(runs), tuple(run.memory_labels for run in runs)
    return Seen(x=peak_memory.class_bytes(c), labels=labels, place=_places(c))


def _places(c: Columns) -> Floats:
    """[runs, 12]: layouts that differ by a factor of two in one respect are 1 apart, or 0.5 where it matters less."""
    logs = np.log2(
        np.stack([c.tp, c.pp, c.micro_batch, c.layers, c.hidden, c.cp,
                  c.gpus, c.num_microbatches, c.ep, c.seq_len, c.vp], axis=1)
    )  # fmt: skip
    logs[:, 6:] *= 0.5
    return np.concatenate([logs, (c.recompute == RECOMPUTE.index("full"))[:, None].astype(float)], axis=1)


def to_document(calibration: Calibration) -> dict[str, Any]:
    return {
        "version": VERSION,
        "step_time": _save(calibration.step_time),
        "peak_memory": _save(calibration.peak_memory),
        "generation": _save(calibration.generation),
        "plan_memory": _save(calibration.plan_memory),
        "stops": stops.save(calibration.stops),
    }


def from_document(document: Any, path: str) -> Calibration:
    """Raises DiagnosticError (NRS7002)."""
    try:
        if not isinstance(document, dict):
            raise ValueError("it is no JSON object")
        if document["version"] != VERSION:
            raise ValueError(f"it is of version {document['version']}, this Nereus reads version {VERSION}")
        return Calibration(
            step_time=_load(STEP_TIME, document["step_time"], _NUM_PLACES),
            peak_memory=_load(PEAK_MEMORY, document["peak_memory"], _NUM_PLACES),
            generation=_load(GENERATION, document["generation"], generation.NUM_PLACES),
            # Files of before jobs were watched have neither.
            plan_memory=_load(PLAN_MEMORY, document.get("plan_memory", _EMPTY), plan_memory.NUM_PLACES),
            stops=stops.load(document.get("stops", {})),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error)
        raise DiagnosticError([no_calibration(path, why)]) from None


def no_calibration(path: str, why: str) -> Diagnostic:
    return Diagnostic(
        code="NRS7002",
        severity=Severity.ERROR,
        headline=f"{path} is no calibration: {why}",
        help="write one with `nereusc fit ROWS.csv -o FILE`",
    )


def _save(learned: Learned) -> dict[str, Any]:
    return {
        "labels": [list(labels) for labels in learned.seen.labels],
        "formula": _rounded(learned.seen.x),
        "place": _rounded(learned.seen.place),
        "pull": _rounded(learned.pull),
        "near_pull": _rounded(learned.near_pull),
        "noise_variance": _rounded(learned.noise_variance),
        "honesty": learned.honesty,
    }


def _load(beliefs: Beliefs, saved: Mapping[str, Any], num_places: int) -> Learned:
    num, num_classes = len(saved["labels"]), len(beliefs.prior)
    labels = tuple(tuple(str(label) for label in labels) for labels in saved["labels"])
    if len({tuple(label.split(":")[0] for label in of_run) for of_run in labels}) > 1:
        raise ValueError("its runs have labels of different kinds")
    seen = Seen(
        x=_array(saved, "formula", (num, num_classes)), labels=labels, place=_array(saved, "place", (num, num_places))
    )
    if (seen.x < 0).any() or not (seen.x > 0).any(axis=1).all():
        raise ValueError("'formula' has a run that takes nothing, or less")
    noise_variance = _array(saved, "noise_variance", (num,))
    if (noise_variance <= 0).any():
        raise ValueError("'noise_variance' is not positive everywhere")
    honesty = float(saved["honesty"])
    if not 1.0 <= honesty < _TOO_LARGE:
        raise ValueError(f"honesty is {honesty}")
    return Learned(
        beliefs=beliefs,
        seen=seen,
        pull=_array(saved, "pull", (num, num_classes)),
        near_pull=_array(saved, "near_pull", (num,)),
        noise_variance=noise_variance,
        honesty=honesty,
        left_out=np.zeros(0),
    )


def _array(saved: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Floats:
    found = np.array(saved[name], float).reshape(shape if 0 in shape else np.shape(saved[name]))
    if found.shape != shape or not (np.abs(found) < _TOO_LARGE).all():
        raise ValueError(f"'{name}' is no table of {' x '.join(map(str, shape))} numbers")
    return found


def _rounded(values: Floats) -> list[Any]:
    """Seven digits: the file stays small, and predictions move by less than one part in a million."""
    return np.vectorize(lambda value: float(f"{value:.7g}"), otypes=[float])(values).tolist() if values.size else []
