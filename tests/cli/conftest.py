"""Running ``nereusc`` in this process or in one of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import GOOD_PLAN, SAVED_PAIR, Ran, spawn

from nereus.cli.main import main


@pytest.fixture
def nereusc(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """``nereusc("check", "a.plan")`` in this process."""
    for name in ("NO_COLOR", "FORCE_COLOR", "NEREUS_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def call(*argv: str) -> Ran:
        capfd.readouterr()
        code = main(list(argv))
        sys.stdout.flush()
        captured = capfd.readouterr()
        return Ran(code=int(code), stdout=captured.out, stderr=captured.err)

    return call


@pytest.fixture
def spawned() -> Callable[..., Ran]:
    return spawn


@pytest.fixture
def good_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Path, relative to the current folder, of a plan without a fault."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.plan").write_text(GOOD_PLAN)
    return "good.plan"


@pytest.fixture
def in_plans(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root / "tests" / "plans")


@pytest.fixture
def saved(nereusc, in_plans: None, tmp_path: Path) -> Path:
    """A saved transition of ``SAVED_PAIR``."""
    path = tmp_path / "change.json"
    ran = nereusc("compile", *SAVED_PAIR, "-o", str(path))
    assert ran.code == 0, ran.stderr
    return path
