"""docs/language.md lists every preset and every GPU id."""

from __future__ import annotations

from pathlib import Path

from nereus.models.hardware import gpu_ids
from nereus.models.presets import preset_names


def test_the_reference_lists_presets_and_gpus() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "language.md").read_text()
    missing = [name for name in (*preset_names(), *gpu_ids()) if f"`{name}`" not in text]
    assert not missing
