"""Saved calibrations, and the accuracy that the documentation claims (figures, no timings)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus.ir.diagnostic import DiagnosticError
from nereus.planner.calibration import Calibration, calibrate, from_document, to_document


@pytest.fixture(scope="module")
def cost_model(repo_root: Path) -> Any:
    sys.path.insert(0, str(repo_root / "benchmarks"))
    import cost_model

    return cost_model


@pytest.fixture(scope="module")
def rows(cost_model: Any) -> Any:
    return cost_model.usable()


def test_a_saved_calibration_predicts_the_same(cost_model: Any, rows: Any) -> None:
    runs = [cost_model.run_of(row) for row in rows]
    some, others = runs[::9], runs[1::9]
    calibration = calibrate(some)
    again = from_document(json.loads(json.dumps(to_document(calibration))), "cal.json")
    for predict in (Calibration.predict_step_time, Calibration.predict_peak_memory):
        before, after = predict(calibration, others), predict(again, others)
        assert np.allclose(after.value, before.value, rtol=1e-4)
        assert np.allclose(after.deviation, before.deviation, rtol=1e-3)


def test_nothing_known_is_saved_and_read_too() -> None:
    document = json.loads(json.dumps(to_document(calibrate(()))))
    assert len(from_document(document, "cal.json").step_time.pull) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"step_time": None},
        {"step_time": {}},
        {"peak_memory": {"labels": [["a:b"]], "formula": [[1.0]], "place": [], "pull": []}},
    ],
)
def test_a_damaged_calibration_is_refused(change: dict[str, Any]) -> None:
    document = to_document(calibrate(())) | change
    with pytest.raises(DiagnosticError, match="NRS7002"):
        from_document(document, "cal.json")


@pytest.mark.parametrize("document", [None, [], 1, {}])
def test_what_is_no_object_is_refused(document: object) -> None:
    with pytest.raises(DiagnosticError, match="NRS7002"):
        from_document(document, "cal.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("formula", -1.0),
        ("formula", 0.0),
        ("noise_variance", 0.0),
        ("place", 1e300),
        ("pull", 10**400),
        ("honesty", 1e300),
    ],
)
def test_numbers_that_no_fit_writes_are_refused(cost_model: Any, rows: Any, name: str, value: float) -> None:
    document = to_document(calibrate([cost_model.run_of(row) for row in rows[:3]]))
    saved = document["step_time"]
    saved[name] = np.full_like(np.array(saved[name]), value, dtype=object).tolist() if name != "honesty" else value
    with pytest.raises(DiagnosticError, match="NRS7002"):
        from_document(document, "cal.json")


def test_step_times_of_runs_that_were_not_seen(cost_model: Any, rows: Any) -> None:
    judged = cost_model.across_folds(
        cost_model.step_times(rows), cost_model.seconds, Calibration.predict_step_time, num_folds=5
    )
    found = judged.part(range(len(judged.rows)))
    assert found.num > 750 and found.mean <= 0.08 and found.median <= 0.05
    assert 0.8 <= found.within_90 <= 1.0
    for prefix, _ in cost_model.STUDIED:
        pairs, right, regret = cost_model.ranking(judged, prefix)
        assert pairs > 300 and right >= 0.85 and regret <= 0.04


def test_six_rows_of_a_new_cluster(cost_model: Any, rows: Any) -> None:
    """As documented (docs/cost-model.md): 12 % is reached; of the medians, for which 6 % is the goal, one is 7 %."""
    for prefix, _ in cost_model.STUDIED:
        mean, median = cost_model.from_few(cost_model.step_times(rows), prefix)
        assert mean <= 0.12 and median <= 0.075


def test_no_run_that_ran_out_of_memory_is_predicted_to_fit(cost_model: Any, rows: Any) -> None:
    runs = [cost_model.run_of(row) for row in rows]
    failed = [run for run in runs if run.out_of_memory]
    high = calibrate(runs).predict_peak_memory(failed).within_90()[1]
    assert len(failed) == 8 and all(h > run.machine.mem_gb * 1e9 for h, run in zip(high, failed, strict=True))
