"""Nothing that a file can hold makes the front end raise, and the formatter never loses a comment."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.diagnostic import Source
from nereus.lang.api import format_text, load_plan, resolve_text
from nereus.lang.parser import parse
from nereus.lang.render import render, to_json
from nereus.lang.scan import scan

FOLDER = Path(__file__).parents[1] / "plans"
TEXTS = [p.read_text(encoding="utf-8") for p in sorted(FOLDER.glob("*.plan"))]
SCRAPS = [
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    '"',
    "=",
    "#",
    ",",
    "@",
    "x",
    "\n",
    " ",
    "\0",
    "\u65e5",
    "-",
    ".",
    "0",
    "9" * 30,
]
SCRAPS += [
    "stage ",
    "model ",
    "extends ",
    "remove ",
    "default",
    "n[0-1]",
    "n9",
    "tp = 0",
    "tp = -1",
    "ep = 3",
    "with = ",
    "1e9",
]


def check_text(text: str) -> None:
    result = resolve_text(text, base_dir=str(FOLDER))
    assert (result.plan is None) == any(d.severity.value == "error" for d in result.diagnostics)
    render(result.diagnostics, color=True)
    render(result.diagnostics, color=False, mode="concise")
    for d in result.diagnostics:
        to_json(d)
        assert "Token(" not in d.headline and "Traceback" not in d.headline
    check_format(text)


def check_format(text: str) -> None:
    formatted = format_text(text)
    if formatted.text is None:
        assert formatted.diagnostics
        return
    again = format_text(formatted.text)
    assert again.text == formatted.text, again.diagnostics
    before, after = parse(Source(path="p", text=text)).file, parse(Source(path="p", text=formatted.text)).file
    assert before.items == after.items

    def comments(t: str) -> list[str]:
        return sorted(t[a:b].rstrip() for a, b in scan(t).comments)

    assert comments(text) == comments(formatted.text)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(text)))
        match draw(st.integers(0, 2)):
            case 0:
                text = text[:at] + text[at + draw(st.integers(1, 12)) :]
            case 1:
                text = text[:at] + draw(st.sampled_from(SCRAPS)) + text[at:]
            case 2:
                start = draw(st.integers(0, len(text)))
                text = text[:at] + text[start : start + 40] + text[at:]
    return text


@settings(max_examples=200, deadline=None)
@given(mutated())
def test_mutated_plans(text: str) -> None:
    check_text(text)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300) | st.lists(st.sampled_from(SCRAPS), max_size=60).map("".join))
def test_random_text(text: str) -> None:
    check_text(text)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.plan"
        path.write_bytes(data)
        result = load_plan(str(path))
        render(result.diagnostics, color=False)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(TEXTS),
    st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(["# c\n", "#\n", " # d #e \r\n"])), max_size=5),
)
def test_comments_anywhere(text: str, inserts: list[tuple[int, str]]) -> None:
    """A comment may stand wherever white space may."""
    for at, comment in inserts:
        gaps = [m.start() for m in re.finditer(r"[ \n]", text)]
        at = gaps[at % len(gaps)]
        text = text[:at] + " " + comment + text[at:]
    check_format(text)


# -- random trees

WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
RANGED = st.sampled_from(["n[0-1]", "n0.gpu[4-7]", "a.b", "tp-cp-pp-dp", "n[0-2].gpu[0,2]"])
STRINGS = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=8).map(
    lambda s: '"' + s.replace("\\", "\\\\").replace('"', '\\"') + '"'
)
NUMBERS = st.sampled_from(["0", "2", "-1", "0.85", "1e3", "1_000", "40 GiB", "25 GB/s", "20 steps", "7 zz"])
SCALARS = st.one_of(WORDS, RANGED, STRINGS, NUMBERS, st.just("fp32 @host"), st.just('8 x "a"'), st.just('hf("c")'))
SEPARATORS = st.sampled_from([" ", "  ", "\n", ", ", ",\n\n\n  ", " # note\n", "\n# own\n\n# two\n"])


@st.composite
def bodies(draw: st.DrawFn, depth: int = 0) -> str:
    parts = ["{", draw(SEPARATORS).replace(",", " ")]
    for _ in range(draw(st.integers(0, 4))):
        parts += [draw(items(depth=depth + 1)), draw(SEPARATORS)]
    return "".join([*parts, "}"])


@st.composite
def values(draw: st.DrawFn) -> str:
    if draw(st.integers(0, 4)):
        return draw(SCALARS)
    open_, close = draw(st.sampled_from(["()", "[]"]))
    inner = draw(st.lists(SCALARS, min_size=1, max_size=30))
    return open_ + draw(st.sampled_from([", ", ",\n", " , # x\n"])).join(inner) + close


@st.composite
def items(draw: st.DrawFn, depth: int = 0) -> str:
    gap = draw(st.sampled_from([" ", "\n", " # in\n"]))
    kind = draw(st.integers(0, 5 if depth < 3 else 1))
    if kind <= 1:
        return f"{draw(WORDS)}{gap}= {draw(values())}"
    if kind == 2:
        return f"{draw(WORDS)} {draw(bodies(depth))}"
    if kind == 3:
        return f"{draw(WORDS)} {draw(RANGED)}{gap}{draw(bodies(depth))}"
    if kind == 4:
        return f"model {draw(WORDS)} = {draw(values())} {draw(bodies(depth))}"
    return f"{draw(WORDS)} = {draw(WORDS)} {draw(bodies(depth))}"


@settings(max_examples=250, deadline=None)
@given(st.lists(st.tuples(items(), SEPARATORS), max_size=6))
def test_random_trees_print_and_parse_back(pieces: list[tuple[str, str]]) -> None:
    text = "".join(item + separator for item, separator in pieces)
    check_format(text)
