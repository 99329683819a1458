"""Inputs that are no plain files: pipes with, without and with slow writers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cli_support import GOOD_PLAN

from nereus.lang import files

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")

NOBODY = "it is a pipe that nobody writes to"


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "WRITER_WAIT_S", 0.3)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("command", ["check", "fmt", "show", "import"])
def test_a_pipe_without_a_writer_is_refused(nereusc, pipe: Path, command: str) -> None:
    argv = (command, "verl", str(pipe)) if command == "import" else (command, str(pipe))
    ran = nereusc(*argv)
    assert (ran.code, ran.stdout) == (1, "")
    assert NOBODY in " ".join(ran.stderr.split())
    assert str(pipe) in ran.stderr


def test_a_base_that_is_a_pipe_without_a_writer(nereusc, pipe: Path, tmp_path: Path) -> None:
    (tmp_path / "a.plan").write_text('extends "pipe"\n')
    ran = nereusc("check", str(tmp_path / "a.plan"))
    assert ran.code == 1
    assert NOBODY in " ".join(ran.stderr.split())


def test_a_writer_that_comes_late_and_is_slow(nereusc, pipe: Path) -> None:
    def write() -> None:
        time.sleep(0.1)
        with open(pipe, "wb", buffering=0) as file:
            time.sleep(0.6)  # longer than one that never comes is waited for
            for start in range(0, len(GOOD_PLAN), 100):
                file.write(GOOD_PLAN[start : start + 100].encode())
                time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    ran = nereusc("check", str(pipe))
    writer.join()
    assert ran.code == 0, ran.stderr
    assert "actor.train" in ran.stdout


def test_what_a_pipe_gives_is_bounded(pipe: Path) -> None:
    def write() -> None:
        with open(pipe, "wb", buffering=0) as file:
            file.write(b"x" * 40_000)

    writer = threading.Thread(target=write)
    writer.start()
    assert files.read_file(str(pipe), 100) == b"x" * 100
    writer.join()


@pytest.mark.parametrize("how", ["check <(sleep 0.5; cat good.plan)", "check /dev/stdin < <(cat good.plan)", "check -"])
def test_pipes_of_a_shell(tmp_path: Path, how: str) -> None:
    (tmp_path / "good.plan").write_text(GOOD_PLAN)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        ["bash", "-c", f'cat good.plan | "{sys.executable}" -m nereus.cli.main {how}'],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert b"actor.train" in done.stdout
