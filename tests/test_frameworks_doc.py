"""docs/frameworks.md, docs/job-state.md: examples run, and every cell of the tables names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "frameworks.md").read_text()


def names_by_file() -> dict[str, set[str]]:
    """Two folders may have a file of the same name."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)}
        found.setdefault(path.name, set()).update(names)
    return found


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 30
    known = names_by_file()
    assert [f"{file}::{name}" for file, name in named if name not in known.get(file, set())] == []


def test_no_cell_without_a_test() -> None:
    tables = [block for block in TEXT.split("\n\n") if block.startswith(("| family", "| framework | layouts"))]
    assert len(tables) == 2
    families, layouts = ([line.split("|")[1:-1] for line in t.splitlines()[2:]] for t in tables)
    for row in families:
        for cell in row[1:]:
            assert "::" in cell or cell.strip() == "-", row[0]
        live = row[-1]
        for part in live.split(";"):
            assert live.strip() == "-" or re.match(
                r" *(vLLM|Megatron|DeepSpeed|transformers)(, weights only)?: `", part
            ), f"{row[0]}: between objects of which framework?"
    for row in layouts:
        assert "::" in row[-1], row[0]


@pytest.mark.parametrize(("page", "number"), [("frameworks.md", 0), ("frameworks.md", 1), ("job-state.md", 0)])
def test_the_examples_run(page: str, number: int) -> None:
    pytest.importorskip("torch")
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
    assert len(examples) == {"frameworks.md": 2, "job-state.md": 1}[page]
    exec(compile(examples[number], f"docs/{page}", "exec"), {})
