"""Text, concise and JSON forms of a diagnostic."""

from __future__ import annotations

import json

import pytest
from lang_support import HEAD, found

from nereus.ir.diagnostic import Diagnostic, Label, Severity, Source, Span
from nereus.lang.api import resolve_text
from nereus.lang.render import render, to_json


def diagnostic(text: str, start: int, end: int, **more) -> Diagnostic:  # type: ignore[no-untyped-def]
    span = Span(source=Source(path="a.plan", text=text), start=start, end=end)
    label = Label(span=span, message=more.pop("label", "here"))
    return Diagnostic(code="NRS2002", severity=Severity.ERROR, headline="unknown key", primary=label, **more)


def test_full_text() -> None:
    text = HEAD + "stage actor.train { on = n0  tp = 2  dp = 8 }\n"
    (d,) = [d for d in found(text) if d.severity is Severity.ERROR]
    assert render([d], color=False) == (
        "error[NRS3004]: actor.train: dp = 8 disagrees with its devices, which make dp 4\n"
        " --> <text>:5:38\n"
        "  |\n"
        "5 | stage actor.train { on = n0  tp = 2  dp = 8 }\n"
        "  |                                      ^^^^^^ should be 4\n"
        "  = note: dp = 8 GPUs / (tp 2 x pp 1 x cp 1) = 4\n"
        "  = help: leave dp out"
    )
    assert render([d], color=False, mode="concise") == (
        "<text>:5:38: error[NRS3004]: actor.train: dp = 8 disagrees with its devices, which make dp 4"
    )


def test_colour_only_adds_escapes() -> None:
    import re

    ds = found(HEAD + "stage actor.train { on = n9  tp = 3 }")
    plain, painted = render(ds, color=False), render(ds, color=True)
    assert "\x1b" not in plain and "\x1b[" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain


@pytest.mark.parametrize(
    ("line", "start", "end", "column", "length"),
    [
        ("\ttp = 2", 1, 3, 4, 2),  # a tab counts four columns
        ("# \u65e5\u672c tp", 5, 7, 7, 2),  # wide characters count two
        ("# e\u0301 tp", 5, 7, 4, 2),  # combining ones none
    ],
)
def test_caret_column(line: str, start: int, end: int, column: int, length: int) -> None:
    out = render([diagnostic(line + "\n", start, end)], color=False).splitlines()
    caret = out[-1].split("| ", 1)[1]
    assert caret == " " * column + "^" * length + " here"


def test_control_characters_do_not_reach_the_terminal() -> None:
    out = render([diagnostic("a\x1b[31m\x07 b", 0, 1)], color=True)
    assert "\x07" not in out and "\x1b[31mb" not in out and "a?[31m? b" in out


def test_long_line_is_shown_around_the_caret() -> None:
    text = "x" * 5000 + " bad " + "y" * 5000
    lines = render([diagnostic(text, 5001, 5004)], color=False, width=80).splitlines()
    assert all(len(line) <= 84 for line in lines)
    row, caret = lines[3], lines[4]
    assert row[caret.index("^") : caret.rindex("^") + 1] == "bad"


def test_labels_of_one_line_share_it() -> None:
    text = HEAD + "stage actor.train { on = n0  tp = 2  tp = 4 }"
    out = render(found(text), color=False)
    assert out.count("stage actor.train {") == 1 and "^^ again here" in out and "-- first written here" in out


def test_spans_at_the_edges() -> None:
    for text in ("", "a", "a\n"):
        for at in range(len(text) + 1):
            assert "NRS2002" in render([diagnostic(text, at, at)], color=False)
    assert (
        render([Diagnostic(code="NRS1001", severity=Severity.ERROR, headline="x")], color=False) == "error[NRS1001]: x"
    )
    assert render([], color=False) == ""
    with pytest.raises(ValueError, match="mode"):
        render([], color=False, mode="loud")


def test_json_form() -> None:
    (d,) = [d for d in found(HEAD + "stage actor.train { on = n0\n tpp = 2 }") if d.severity is Severity.ERROR]
    out = to_json(d)
    json.dumps(out)
    assert out["code"] == "NRS2002" and out["severity"] == "error"
    span = out["primary"]["span"]
    assert (span["start"]["line"], span["start"]["column"]) == (6, 2) and span["end"]["column"] == 5
    assert out["fix"]["text"] == "tp" and out["help"] == "did you mean tp?"


def test_fix_can_be_applied() -> None:
    text = HEAD + "stage actor.train { on = n0  tpp = 2 }"
    (d,) = [d for d in found(text) if d.severity is Severity.ERROR]
    assert d.fix is not None
    fixed = text[: d.fix.span.start] + d.fix.text + text[d.fix.span.end :]
    assert resolve_text(fixed).plan is not None
