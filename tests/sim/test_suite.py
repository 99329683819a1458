"""The benchmark suite: its plans resolve, and three transitions go through it end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).resolve().parents[2] / "benchmarks" / "suite.py"
NAMES = ("areal-1.5b-4-4-to-2-6", "table-2x2x4-4x2x2-megatron", "swap-full-to-swap-full-new")


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SUITE), *args], check=False, capture_output=True, text=True)


def test_three_transitions(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    done = _run("--only", *NAMES, "--json", str(out))
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    rows = {row["name"]: row for row in document["transitions"]}
    assert set(rows) == set(NAMES)
    for row in rows.values():
        assert row["safe"]
        assert row["bound_s"] <= row["transfer_s"] * (1 + 1e-9)
        assert row["moved_bytes"] == row["bound_bytes"]
        assert row["stop_s"] > 0
        for name, other in row["baselines"].items():
            assert other["cannot"] is not None or other["moved_bytes"] >= 0, name
    swap = rows["swap-full-to-swap-full-new"]
    assert swap["mode"] == "tight"
    # Full GPUs that trade places: only who goes through host memory or storage gets through.
    through = {name for name, b in swap["baselines"].items() if not (b["cannot"] or b["fails"] or b["overflows"])}
    assert through == {"first replica", "via storage"}
    assert document["summary"]["bytes / bound"]["over_goal"] == 0
    for name in NAMES:
        assert name in done.stdout


def test_there_are_at_least_sixty_and_both_rank_orders() -> None:
    lines = _run("--list").stdout.splitlines()
    assert len(lines) >= 60
    groups = [line.split()[0] for line in lines]
    assert set(groups) == {"paper", "plans", "table", "configs", "random"}
    assert any("megatron" in line for line in lines)
    assert any("replica" in line for line in lines)
    assert max(int(line.split()[1]) for line in lines) == 1024
