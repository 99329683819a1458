"""``nereusc run`` that is told to end: its own exit code, no processes and no files left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.procs

OLD = """\
cluster { node n0 { gpus = 4 x "h100-sxm-80gb" } }
model actor = "qwen2.5-0.5b"
workload { algorithm = sft  prompts = 64  mini_batch = 64 }
stage actor.train { on = n0  tp = 2  optimizer = adam }
"""


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        (signal.SIGHUP, 129, "ended by SIGHUP"),
        (signal.SIGINT, 130, "interrupted"),
    ],
)
def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path, number: int, code: int, word: str) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "old.plan").write_text(OLD)
    (tmp_path / "new.plan").write_text(OLD.replace("tp = 2", "tp = 1  pp = 4"))
    path = os.pathsep.join(p for p in sys.path if p)
    argv = [sys.executable, "-m", "nereus.cli.main", "run", "old.plan", "new.plan", "--procs", "2", "--drill", "hang"]
    process = subprocess.Popen(
        argv,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background, or under nohup, would hand down signals that are ignored.
        preexec_fn=_default_signals,  # noqa: PLW1509 - this process has one thread
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "moving" in line:
            break
    assert [entry.name[:11] for entry in scratch.iterdir() if entry.is_dir()] == ["nereus-run-"]
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (code, "")
    assert word in stderr
    assert "Traceback" not in stderr
    assert [entry for entry in scratch.iterdir() if entry.name.startswith("nereus-run-")] == []
    deadline = time.monotonic() + 10
    while _processes_of(scratch) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _processes_of(scratch) == []


def _default_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _processes_of(folder: Path) -> list[str]:
    """Command lines that name the folder, as those of the workers do."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found
