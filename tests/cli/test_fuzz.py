"""No input makes ``nereusc`` show a traceback, fail as if by a bug of its own, or leave the table of exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
from pathlib import Path

import pytest
from cli_support import GOOD_PLAN, check_schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nereus.cli.exit_codes import ExitCode
from nereus.cli.main import main

#: Bad input may end in these only; 70 would be a bug.
EXPECTED = {ExitCode.OK, ExitCode.INPUT_ERROR, ExitCode.INFEASIBLE, ExitCode.UNFORMATTED}

COMMANDS = (
    ("check",),
    ("check", "--json"),
    ("check", "--output-format", "concise", "--color", "always"),
    ("fmt", "--diff"),
    ("fmt", "--check"),
    ("import", "verl"),
    ("import", "verl", "--json", "--gpu", "h100-sxm-80gb"),
)

#: Pieces of the language in wrong places; each example takes few of them, so that it stays quick.
WORDS = """
    cluster node model stage workload checkpoint extends remove default with state pool hf gpus order zero place
    { } ( ) [ ] = , x @host # n[0-1] n[5-1] n0.gpu[0-7] n0.gpu99 n[0-999999999] actor actor.train critic.generate
    tp pp dp on true 0 1 -1 3 8 1e999 0x10 99999999999999999999999 1.5 nan tp-cp-pp-dp
"""
STRINGS = ('"', '"h100-sxm-80gb"', '"qwen2.5-7b"', '"fuzz.plan"', "40 GiB", "7 parsecs")
CHARACTERS = ("\n", "\t", "\x00", "\u00fc", "\U0001f600")
TOKENS = [*WORDS.split(), *STRINGS, *CHARACTERS]


def run(command: tuple[str, ...], data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.plan"
        path.write_bytes(data)
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = main([*command, str(path)])
    assert "Traceback" not in stderr.getvalue()
    assert code in EXPECTED, stderr.getvalue()
    if code == ExitCode.INPUT_ERROR:
        assert stderr.getvalue()
    if "--json" in command and stdout.getvalue():
        document = json.loads(stdout.getvalue())
        check_schema(document, document["kind"])


fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@fuzz
@given(st.sampled_from(COMMANDS), st.binary(max_size=300))
def test_random_bytes(command, data):
    run(command, data)


@fuzz
@given(st.sampled_from(COMMANDS), st.lists(st.sampled_from(TOKENS), max_size=30))
def test_random_tokens(command, tokens):
    run(command, " ".join(tokens).encode())


@fuzz
@given(st.sampled_from(COMMANDS[:5]), st.integers(0, 2**32))
def test_mutated_plans(command, seed):
    run(command, mutate(GOOD_PLAN, random.Random(seed)).encode())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    "data",
    [b"", b"\xef\xbb\xbf", b"\x00" * 100, b"{" * 5000, b"(" * 5000, b"a = " * 3000, b"#" * 100_000, b'"', b"\r\r\n"],
    ids=["empty", "bom", "nul", "braces", "parentheses", "assignments", "comment", "quote", "newlines"],
)
def test_odd_files(command, data):
    run(command, data)


def mutate(text: str, rng: random.Random) -> str:
    """A few edits of the kind that people and disks make."""
    for _ in range(rng.randint(1, 4)):
        words = text.split(" ")
        at = rng.randrange(len(words))
        edit = rng.randrange(5)
        if edit == 0:
            del words[at]
        elif edit == 1:
            words[at] = rng.choice(TOKENS)
        elif edit == 2:
            words.insert(at, rng.choice(TOKENS))
        elif edit == 3:
            other = rng.randrange(len(words))
            words[at], words[other] = words[other], words[at]
        else:
            words = words[: max(1, at)]
        text = " ".join(words) or " "
    return text
