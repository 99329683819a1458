"""The built wheel, installed in an empty environment: core dependencies only, no torch, no repository around."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cli_support import GOOD_PLAN

pytestmark = pytest.mark.slow


def run(*argv: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        list(map(str, argv)), cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=900
    )


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # No isolation: hatchling comes with the dev extra, and the test then needs no network.
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, repo_root)
    built = run(*command, cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_data_and_nothing_foreign(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "nereus/lang/grammar/plan.lark" in names
    assert "nereus/models/data/hardware.csv" in names
    assert "nereus/cli/schemas/check.json" in names
    assert "nereus/py.typed" in names
    assert {f"nereus/kernels/{name}" for name in ("cells.h", "sums.h", "regions.c", "flow.c", "regions.cu")} <= names
    assert {name.split("/")[0] for name in names} == {
        "nereus",
        next(n for n in names if ".dist-info" in n).split("/")[0],
    }


def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path):
    venv = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", venv, cwd=tmp_path).returncode == 0
    installed = run(venv / "bin" / "python", "-m", "pip", "install", "-qq", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr

    nereusc = venv / "bin" / "nereusc"
    helped = run(nereusc, "--help", cwd=tmp_path)
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "check" in helped.stdout

    (tmp_path / "small.plan").write_text(GOOD_PLAN)
    checked = run(nereusc, "check", "small.plan", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "actor.train" in checked.stdout

    code = "import importlib.util, nereus; print(nereus.__file__, importlib.util.find_spec('torch'))"
    where = run(venv / "bin" / "python", "-c", code, cwd=tmp_path)
    assert where.stdout.startswith(str(venv))
    assert where.stdout.strip().endswith("None")
