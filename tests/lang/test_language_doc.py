"""The language reference: its examples compile, and it names every key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nereus.ir.diagnostic import Severity
from nereus.lang import schema
from nereus.lang.api import format_text, resolve_text
from nereus.lang.render import render

DOC = Path(__file__).parents[2] / "docs" / "language.md"
EXAMPLES = re.findall(r"^```plan\n(.*?)^```", DOC.read_text(encoding="utf-8"), re.S | re.M)


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_compiles(text: str) -> None:
    result = resolve_text(text, base_dir=str(Path(__file__).parents[1] / "plans"))
    loud = [d for d in result.diagnostics if d.severity is not Severity.NOTE]
    assert result.plan is not None and not loud, render(loud, color=False)
    assert format_text(text).text is not None


def test_every_key_is_documented() -> None:
    text = DOC.read_text(encoding="utf-8")
    words = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]*)`", text))))
    keys = {
        *schema.BLOCKS,
        *schema.CLUSTER_KEYS,
        *schema.NODE_KEYS,
        *schema.POOL_KEYS,
        *schema.MODEL_KEYS,
        *schema.MODE_KEYS,
        *schema.WORKLOAD_KEYS,
        *schema.CHECKPOINT_KEYS,
        *schema.REPLICA_KEYS,
        *schema.ALL_STAGE_KEYS,
    }
    assert keys - words == set()
    choices = (schema.ALGORITHMS, schema.BACKENDS, schema.ENGINES, schema.RECOMPUTE, schema.IDLE, schema.INFLIGHT)
    assert {w for group in (*choices, schema.CHECKPOINT_FORMATS, schema.WEIGHT_DTYPES) for w in group} <= set(
        re.findall(r"[a-z0-9]+", text)
    )
