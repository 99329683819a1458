"""The bad examples of the codes about transitions show what their entries say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nereus.cli.exit_codes import ExitCode
from nereus.lang.catalog import CATALOG, CodeEntry

_FILE = {"NRS5501", "NRS5502", "NRS5503"}
_STALE = {"NRS5510", "NRS5511"}


#: Warnings: the change compiles all the same.
_WARNINGS = {"NRS5009"}


def expected(code: str) -> ExitCode:
    if code in _WARNINGS:
        return ExitCode.OK
    if code in _FILE:
        return ExitCode.INPUT_ERROR
    return ExitCode.STALE if code in _STALE else ExitCode.INFEASIBLE


@pytest.mark.parametrize("entry", [e for e in CATALOG.values() if e.command in ("diff", "show")], ids=lambda e: e.code)
def test_example_shows_its_code(nereusc, entry: CodeEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, text in entry.example.items():
        Path(name).write_text(text)
    files = list(entry.example)[: 2 if entry.command == "diff" else 1]
    ran = nereusc(entry.command, *files, *entry.options, "--output-format", "concise")
    assert ran.code == expected(entry.code), ran.stderr
    assert (ran.stdout == "") == (entry.code not in _WARNINGS)
    assert set(re.findall(r"(?:error|warning)\[(NRS\d{4})\]", ran.stderr)) == {entry.code}, ran.stderr


def test_plans_of_the_examples_are_good_ones(nereusc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is wrong is the change, never a plan by itself."""
    for entry in CATALOG.values():
        if entry.command == "diff":
            folder = tmp_path / entry.code
            folder.mkdir()
            monkeypatch.chdir(folder)
            for name, text in entry.example.items():
                Path(name).write_text(text)
            ran = nereusc("check", *entry.example, "--quiet")
            assert ran.code == 0, ran.stderr
