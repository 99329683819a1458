"""docs/diagnostics.md says what the catalogue says."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_is_the_catalogue() -> None:
    document = runpy.run_path(str(ROOT / "tools" / "write_diagnostics.py"))["document"]
    assert (ROOT / "docs" / "diagnostics.md").read_text() == document(), "run tools/write_diagnostics.py"
