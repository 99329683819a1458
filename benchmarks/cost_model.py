"""The cost model against published measurements (benchmarks/data/measurements.csv): `make bench` prints it.

python benchmarks/cost_model.py                every run predicted from folds that do not hold it; six rows of a cluster
... --write                                    tables into docs/cost-model.md, under their own heading

No run is judged by a model that has seen it. Rows of one configuration that were published twice (two releases of one
recipe) are kept in one fold, so that a run is not predicted from its own repetition.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from accuracy_tables import header, line, main

from nereus.planner.accuracy import Accuracy, accuracy
from nereus.planner.calibration import Calibration, calibrate
from nereus.planner.learned import Predicted
from nereus.planner.rows import Row, read_rows
from nereus.planner.runs import Floats, Run

ROOT = Path(__file__).resolve().parent
DATA = ROOT / "data" / "measurements.csv"
NUM_FOLDS = 10
#: Rows that a new cluster is calibrated on, and how many draws of them.
FEW, NUM_DRAWS = 6, 60
#: Layouts whose step times differ by less are not ranked.
APART = 0.03
#: Clusters with many layouts of one model, by the beginning of their rows' ids.
STUDIED = (("vtm", "vTrain, 64-512 A100"), ("vts", "vTrain, 4-8 A100"), ("bs", "BigScience, 384 A100"))


@dataclass(frozen=True, slots=True)
class Judged:
    """Measured runs, and what was predicted of each by a model that had not seen it."""

    rows: tuple[Row, ...]
    measured: Floats
    predicted: Predicted

    @property
    def runs(self) -> list[Run]:
        return [run_of(row) for row in self.rows]

    def part(self, chosen: Sequence[int]) -> Accuracy:
        low, high = self.predicted.within_90()
        index = list(chosen)
        return accuracy(self.predicted.value[index], self.measured[index], low[index], high[index])


def run_of(row: Row) -> Run:
    assert row.run is not None
    return row.run


def usable(path: Path = DATA) -> tuple[Row, ...]:
    return tuple(row for row in read_rows(path.read_text(encoding="utf-8"), path.name) if row.run is not None)


def step_times(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(row for row in rows if run_of(row).step_time_s and not run_of(row).out_of_memory)


def peaks(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(row for row in rows if run_of(row).peak_mem_gb and not run_of(row).out_of_memory)


def seconds(run: Run) -> float:
    return run.step_time_s or 0.0


def bytes_of(run: Run) -> float:
    return (run.peak_mem_gb or 0.0) * run.gb_bytes


def _configuration(run: Run) -> tuple[object, ...]:
    return (
        run.labels, run.layers, run.hidden, run.heads, run.seq_len, run.global_batch, run.micro_batch, run.gpus,
        run.tp, run.pp, run.cp, run.vp, run.ep, run.recompute, run.sharding,
    )  # fmt: skip


def across_folds(
    rows: Sequence[Row],
    measured: Callable[[Run], float],
    predict: Callable[[Calibration, list[Run]], Predicted],
    num_folds: int = NUM_FOLDS,
) -> Judged:
    runs = [run_of(row) for row in rows]
    groups: dict[tuple[object, ...], int] = {}
    order = np.random.default_rng(0).permutation(len(runs))
    for number in order:
        groups.setdefault(_configuration(runs[number]), len(groups) % num_folds)
    fold = np.array([groups[_configuration(run)] for run in runs])
    value, deviation = np.zeros(len(runs)), np.zeros(len(runs))
    for number in range(num_folds):
        out = np.flatnonzero(fold == number)
        calibration = calibrate([runs[i] for i in np.flatnonzero(fold != number)])
        found = predict(calibration, [runs[i] for i in out])
        value[out], deviation[out] = found.value, found.deviation
    return Judged(tuple(rows), np.array([measured(run) for run in runs]), Predicted(value=value, deviation=deviation))


def from_few(
    rows: Sequence[Row], prefix: str, num_draws: int = NUM_DRAWS, num_fitted: int = FEW
) -> tuple[float, float]:
    """(mean, median) error over the rows of one cluster that were not drawn, averaged over draws."""
    of_cluster = [run_of(row) for row in rows if row.id.startswith(f"{prefix}-")]
    errors = []
    for seed in range(num_draws):
        drawn = np.random.default_rng(seed).permutation(len(of_cluster))
        calibration = calibrate([of_cluster[i] for i in drawn[:num_fitted]])
        others = [of_cluster[i] for i in drawn[num_fitted:]]
        found = accuracy(calibration.predict_step_time(others).value, np.array([seconds(run) for run in others]))
        errors.append((found.mean, found.median))
    mean, median = np.mean(errors, axis=0)
    return float(mean), float(median)


def ranking(judged: Judged, prefix: str) -> tuple[int, float, float]:
    """(pairs, share in the right order, mean regret) over layouts of one model, by GPU-seconds a sequence."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, row in enumerate(judged.rows):
        run = run_of(row)
        if row.id.startswith(f"{prefix}-"):
            same = (run.labels, run.layers, run.hidden, run.heads, run.seq_len, round(math.log2(run.gpus)))
            groups.setdefault(same, []).append(number)
    runs = judged.runs
    of_sequence = np.array([run.gpus / run.global_batch for run in runs])
    pairs = right = 0
    regrets = []
    for members in groups.values():
        measured, predicted = (of_sequence * values for values in (judged.measured, judged.predicted.value))
        measured, predicted = measured[members], predicted[members]
        for i in range(len(members)):
            for j in range(i):
                if abs(np.log(measured[i] / measured[j])) > APART:
                    pairs += 1
                    right += bool((measured[i] < measured[j]) == (predicted[i] < predicted[j]))
        if len(members) > 1:
            regrets.append(float(measured[np.argmin(predicted)] / measured.min() - 1))
    return pairs, right / max(pairs, 1), float(np.mean(regrets)) if regrets else 0.0


def clusters(judged: Judged, labels: Callable[[Run], tuple[str, ...]], kind: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, run in enumerate(judged.runs):
        label = next(label for label in labels(run) if label.startswith(f"{kind}:"))
        found.setdefault(label.partition(":")[2], []).append(number)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def report() -> str:
    rows = usable()
    time = across_folds(step_times(rows), seconds, Calibration.predict_step_time)
    memory = across_folds(peaks(rows), bytes_of, Calibration.predict_peak_memory)
    lines = [
        f"{len(time.rows)} step times and {len(memory.rows)} peaks; each predicted by a model that was given the other "
        f"{NUM_FOLDS - 1} of {NUM_FOLDS} folds. Regenerate with `python benchmarks/cost_model.py --write`.",
        "",
        *header("step time"),
        line("all", time.part(range(len(time.rows)))),
    ]
    for name, members in clusters(time, lambda run: run.labels, "cluster").items():
        if len(members) >= 10:
            lines.append(line(name, time.part(members)))
    lines += [
        "",
        f"| cluster | pairs of layouts | in the right order | mean regret | {FEW} rows fitted: mean error | median "
        "| nothing fitted: mean error | median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for prefix, name in STUDIED:
        pairs, right, regret = ranking(time, prefix)
        errors = " | ".join(f"{error:.1%}" for n in (FEW, 0) for error in from_few(time.rows, prefix, num_fitted=n))
        lines.append(f"| {name} | {pairs} | {right:.1%} | {regret:.1%} | {errors} |")
    lines += [
        "",
        *header("peak memory, by reading"),
        line("all", memory.part(range(len(memory.rows)))),
    ]
    for name, members in clusters(memory, lambda run: run.memory_labels, "reading").items():
        lines.append(line(name, memory.part(members)))
    lines += ["", _out_of_memory(rows)]
    return "\n".join(lines)


def _out_of_memory(rows: Sequence[Row]) -> str:
    """Runs that ran out of memory teach nothing, so all of the others may be used to judge them."""
    runs = [run_of(row) for row in rows]
    calibration = calibrate(runs)
    failed = [run for run in runs if run.out_of_memory]
    fits = calibration.predict_peak_memory(failed).within_90()[1] <= [run.machine.mem_gb * 1e9 for run in failed]
    ran = [run for run in runs if run.peak_mem_gb and not run.out_of_memory]
    judged = across_folds(peaks(rows), bytes_of, Calibration.predict_peak_memory)
    high = judged.predicted.within_90()[1]
    refused = sum(h > run.machine.mem_gb * 1e9 for h, run in zip(high, judged.runs, strict=True))
    return (
        f"Of {len(failed)} runs that ran out of memory {int(fits.sum())} are predicted to fit; of {len(ran)} that ran, "
        f"{refused} are called unsafe, because the upper end of their range is above the GPU's memory."
    )


if __name__ == "__main__":
    main(__doc__, "accuracy", report)
