"""``nereusc replay`` end to end."""

from __future__ import annotations

import re
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
    bad.write_text("response_mean,gpus\n900,12\n")
    ran = nereusc("replay", str(job), str(bad))
    said = " ".join(ran.stderr.split())  # lines end where a path is long
    assert ran.code == 1 and "step 0 has 12 GPUs; the first nodes of the plan's cluster have 8, 16" in said
    assert nereusc("replay", str(job), str(bad), "--export", str(bad)).code == 64
    ran = nereusc("replay", str(job), "--export", str(bad))
    assert ran.code == 1 and "NRS7006" in ran.stderr


def test_the_example_of_the_docs(nereusc, repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run as verl printed it, replayed: what it took is what it says."""
    monkeypatch.chdir(repo_root)
    (command,) = re.findall(r"^    nereusc (replay \S+ --export \S+)", Path("docs/trace-study.md").read_text(), re.M)
    ran = nereusc(*command.split())
    assert ran.code == 0 and "its steps calibrate the prediction" in ran.stdout and "saved to as-run" in ran.stdout
    found = nereusc(*command.split(), "--json").json()
    check_schema(found, "replay")
    assert found["export"] == command.split()[-1] and len(found["drift"]) == found["num_steps"] == 3
    took = {policy["policy"]: policy for policy in found["policies"]}
    assert took["as-run"]["steps_s"] == pytest.approx([59.437, 60.91, 62.5])
    assert took["as-run"]["num_changes"] == 0 and took["offline"]["total_s"] <= took["as-run"]["total_s"]
