"""Where a variant breaks what its base wrote, the caret goes to what the variant says, not into the base."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.ir.diagnostic import Diagnostic, Severity
from nereus.lang.api import load_plan
from nereus.lang.render import render

BASE = """cluster { node n0 { gpus = 8 x "h100-sxm-80gb" } }
model actor = "llama-3.1-8b"
workload { algorithm = sft  prompts = 96 }
stage actor.train { on = n0  tp = 2  pp = 2  pp_split = (15, 17) }
"""


def one(tmp_path: Path, variant: str, base: str = BASE) -> Diagnostic:
    (tmp_path / "base.plan").write_text(base)
    (tmp_path / "variant.plan").write_text(f'extends "base.plan"\n{variant}\n')
    errors = [d for d in load_plan(str(tmp_path / "variant.plan")).diagnostics if d.severity is Severity.ERROR]
    assert len(errors) == 1, render(errors, color=False)
    return errors[0]


@pytest.mark.parametrize(
    ("variant", "code", "marked"),
    [
        ("stage actor.train { pp = 3  pp_split = (10, 12, 10)  tp = 1 }", "NRS3003", "pp = 3"),
        ("stage actor.train { on = n0.gpu[0-2] }", "NRS3003", "on = n0.gpu[0-2]"),
        ("stage actor.train { pp = 4 }", "NRS3009", "pp = 4"),
        ('model actor = "qwen2.5-7b"', "NRS3009", "model actor"),
        ("stage actor.train { pp_split = (16, 15) }", "NRS3009", "pp_split = (16, 15)"),
        ("stage actor.train { tp = 3 }", "NRS3005", "tp = 3"),
    ],
)
def test_the_caret_is_in_the_variant(tmp_path: Path, variant: str, code: str, marked: str) -> None:
    found = one(tmp_path, variant)
    assert found.code == code and found.primary is not None
    span = found.primary.span
    assert span.source.path.endswith("variant.plan")
    assert span.source.text[span.start : span.end] == marked


def test_a_degree_of_the_variant_shows_the_devices_of_the_base(tmp_path: Path) -> None:
    found = one(tmp_path, "stage actor.train { cp = 3 }")
    assert found.code == "NRS3003" and found.primary is not None and found.primary.message == "makes 12 GPUs a replica"
    (label,) = found.secondary
    assert label.message == "8 GPUs" and label.span.source.path.endswith("base.plan")


def test_layers_of_another_model(tmp_path: Path) -> None:
    """The base's pp was right for its model: nothing is to be edited in the base."""
    base = BASE.replace("pp = 2  pp_split = (15, 17)", "pp = 4").replace("tp = 2", "tp = 1")
    found = one(tmp_path, 'model actor = "deepseek-llm-7b"\n', base)
    assert found.code == "NRS3008" and found.primary is not None
    assert found.primary.span.source.path.endswith("variant.plan") and found.fix is None
    assert found.primary.message == "30 layers / 4"
    assert found.help is not None and found.help.startswith("say how they are split, stage actor.train { pp_split = (")
    # What the help says, written into the variant, is the way out.
    block = found.help.split("split, ")[1].split(", or write")[0]
    (tmp_path / "variant.plan").write_text((tmp_path / "variant.plan").read_text() + block)
    assert load_plan(str(tmp_path / "variant.plan")).plan is not None
