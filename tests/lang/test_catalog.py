"""Every code is documented, and every documented example does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nereus.ir.diagnostic import Severity
from nereus.lang.api import load_plan
from nereus.lang.catalog import CATALOG, CodeEntry
from nereus.lang.render import render
from nereus.models.memory import check_memory

#: Codes that never stand alone: the example of one has others beside it.
_IN_COMPANY = {"NRS1014"}


@pytest.mark.parametrize("entry", [e for e in CATALOG.values() if e.command == "check"], ids=lambda e: e.code)
def test_example_shows_its_code(entry: CodeEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in entry.example.items():
        Path(name).write_text(text, encoding=entry.encoding)
    result = load_plan(entry.compiles or next(iter(entry.example)))
    diagnostics = result.diagnostics
    if result.plan is not None:
        diagnostics += check_memory(result.plan)
    seen = {d.code for d in diagnostics if d.severity is not Severity.NOTE or d.code == entry.code}
    assert entry.code in seen, render(diagnostics, color=False)
    # An example that shows something else as well would teach the wrong thing.
    if entry.code.startswith(("NRS1", "NRS2", "NRS3")) and entry.code not in _IN_COMPANY:
        assert seen == {entry.code}, render(diagnostics, color=False)


def test_every_code_in_the_source_is_documented(repo_root: Path) -> None:
    used: dict[str, str] = {}
    for path in sorted((repo_root / "nereus").rglob("*.py")):
        for code in re.findall(r"\bNRS\d{4}\b", path.read_text(encoding="utf-8")):
            used.setdefault(code, str(path.relative_to(repo_root)))
    missing = {code: path for code, path in used.items() if code not in CATALOG}
    assert not missing


def test_entries_are_complete() -> None:
    for code, entry in CATALOG.items():
        assert code == entry.code and re.fullmatch(r"NRS\d{4}", code)
        assert entry.title and entry.cause and entry.fix and entry.example
