"""The sample plans, from their text."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.ir.diagnostic import Severity
from nereus.ir.plan import Plan
from nereus.ir.units import GB
from nereus.models.memory import check_memory, steady_state

api = pytest.importorskip("nereus.lang.api")


def _plan(shared: Path, name: str) -> Plan:
    result = api.load_plan(str(shared / "plans" / f"{name}.plan"))
    assert isinstance(result.plan, Plan), result.diagnostics
    return result.plan


@pytest.mark.parametrize(
    "name",
    [
        "ppo-8b-2k",
        "ppo-8b-4k",
        "ppo-8b-zero1",
        "ppo-8b-zero1-lost",
        "ppo-8b-node-lost",
        "overlap-before",
        "overlap-after",
        "swap-full",
        "swap-full-new",
        "ppo-8b-512",
        "ppo-8b-1024",
        "grpo-30b-moe-ep8",
        "grpo-30b-moe-ep4",
    ],
)
def test_fits(shared: Path, name: str) -> None:
    plan = _plan(shared, name)
    assert [d.headline for d in check_memory(plan) if d.severity is Severity.ERROR] == []


def test_refused(shared: Path) -> None:
    plan = _plan(shared, "ppo-8b-4k-refused")
    (error,) = [d for d in check_memory(plan) if d.severity is Severity.ERROR]
    assert error.headline == "actor.train does not fit: 76.6 of 72.0 GB on n0.gpu0"
    assert error.primary is not None
    source, start = error.primary.span.source, error.primary.span.start
    assert source.text[start:].startswith("micro_batch"), "the key that decides, in the file that wrote it"


def test_numbers(shared: Path) -> None:
    report = steady_state(_plan(shared, "ppo-8b-4k"))
    needs = {row.stage: round(row.need_bytes / GB, 1) for row in report.worst_rows()}
    assert (needs["actor.train"], needs["critic.train"]) == (62.6, 70.5)


def test_examples_of_the_catalogue_show_their_codes() -> None:
    memory = pytest.importorskip("nereus.lang.catalog.memory")
    for entry in memory.ENTRIES:
        result = api.resolve_text(entry.example["plan.plan"])
        assert isinstance(result.plan, Plan), result.diagnostics
        assert [d.code for d in check_memory(result.plan)] == [entry.code]
