"""Small plans for the tests of the front end."""

from __future__ import annotations

from nereus.ir.diagnostic import Diagnostic, Severity
from nereus.ir.plan import Plan
from nereus.lang.api import resolve_text
from nereus.lang.render import render

CLUSTER = 'cluster { node n[0-3] { gpus = 8 x "h100-sxm-80gb" } }\n'
MODELS = 'model actor = "llama-3.1-8b"\nmodel critic = "llama-3.1-8b" { head = value }\n'
WORKLOAD = "workload { algorithm = sft  prompts = 512  mini_batch = 128 }\n"
HEAD = CLUSTER + MODELS + WORKLOAD


def found(text: str) -> list[Diagnostic]:
    return list(resolve_text(text).diagnostics)


def codes(text: str) -> list[str]:
    return [d.code for d in found(text) if d.severity is not Severity.NOTE]


def only(text: str, code: str) -> Diagnostic:
    """The one error or warning of ``text``."""
    loud = [d for d in found(text) if d.severity is not Severity.NOTE]
    assert [d.code for d in loud] == [code], render(loud, color=False)
    return loud[0]


def marked(d: Diagnostic) -> str:
    """The text under the caret."""
    assert d.primary is not None
    return d.primary.span.source.text[d.primary.span.start : d.primary.span.end]


def good(text: str) -> Plan:
    result = resolve_text(text)
    assert result.plan is not None, render(result.diagnostics, color=False)
    return result.plan
