"""``nereusc replay`` end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_support import check_schema
from planner.test_rl_step import COLOCATED


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.plan"
    path.write_text(COLOCATED)
    return path


def test_a_trace_is_generated_written_and_replayed(nereusc, job: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    args = ("--steps", "12", "--pool", "spot", "--seed", "1", "--policy", "static", "--policy", "ours")
    ran = nereusc("replay", str(job), *args, "--write-trace", str(trace))
    assert ran.code == 0
    for word in ("static", "ours", "offline", "regret", "worst s", "response", "changes ours"):
        assert word in ran.stdout
    first = nereusc("replay", "--json", str(job), *args).json()
    check_schema(first, "replay")
    again = nereusc("replay", "--json", str(job), str(trace), *args).json()
    assert [p["policy"] for p in first["policies"]] == ["static", "ours", "offline"]
    assert first["num_steps"] == again["num_steps"] == 12
    offline = first["policies"][-1]
    for policy in first["policies"]:
        assert policy["total_s"] >= offline["total_s"] and policy["regret"] >= 0
        assert {str(number) for number in policy["plans"]} <= first["layouts"].keys()


def test_bad_input_is_told(nereusc, job: Path, tmp_path: Path) -> None:
    for option in (
        ("--policy", "magic"), ("--lengths", "odd"), ("--pool", "odd"), ("--steps", "0"), ("--noise", "2"),
    ):  # fmt: skip
        assert nereusc("replay", str(job), *option).code == 64
    bad = tmp_path / "bad.csv"
    bad.write_text("step\n1\n")
    ran = nereusc("replay", str(job), str(bad))
    assert ran.code == 1 and "NRS7005" in ran.stderr
    assert "NRS7005" in nereusc("replay", str(job), str(tmp_path / "job.plan")).stderr
    assert nereusc("replay", str(job), "--steps", "3", "--write-trace", str(job)).code == 1
    job.write_text(COLOCATED.replace("cluster {", 'cluster { node m0 { gpus = 2 x "a100-sxm-80gb" }', 1))
    ran = nereusc("replay", str(job), "--steps", "3", "--pool", "spot")
    assert ran.code == 1 and "which ones is" in ran.stderr
