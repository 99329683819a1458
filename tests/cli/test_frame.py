"""Exit codes, streams, colour and what happens when things go wrong outside of the input."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

import nereus
from nereus.cli import main as frame
from nereus.cli.errors import CommandError, Ended
from nereus.cli.exit_codes import MEANINGS, ExitCode, for_diagnostics
from nereus.cli.output import GLUE, Output, table, use_color, wrap
from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity


def error(code: str, severity: Severity = Severity.ERROR) -> Diagnostic:
    return Diagnostic(code=code, severity=severity, headline=f"about {code}")


@pytest.mark.parametrize(
    ("diagnostics", "expected"),
    [
        ((), 0),
        ((error("NRS3001", Severity.WARNING), error("NRS4001", Severity.NOTE)), 0),
        ((error("NRS1001"),), 1),
        ((error("NRS2001"), error("NRS4001")), 1),
        ((error("NRS4001"), error("NRS5001")), 3),
        ((error("NRS4001"), error("NRS2001", Severity.WARNING)), 3),
        ((error("NRS6001"),), 1),
        ((error("NRS1001"), error("NRS9001")), 70),
    ],
)
def test_exit_code_of_diagnostics(diagnostics, expected):
    assert for_diagnostics(diagnostics) == expected


def test_exit_codes_are_the_published_table(repo_root):
    assert {int(code) for code in ExitCode} == {0, 1, 2, 3, 4, 5, 64, 70, 129, 130, 143}
    readme = (repo_root / "README.md").read_text().replace("`", "")
    for code, meaning in MEANINGS.items():
        assert f"| {code.value} | {meaning} |" in readme


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "which command?"),
        (("chek",), "did you mean 'check'?"),
        (("frobnicate",), "no command 'frobnicate'"),
        (("check",), "required: FILE"),
        (("check", "--no-such-option", "x.plan"), "--no-such-option"),
        (("check", "--color", "pink", "x.plan"), "pink"),
        (("--col",), "--col"),
        (("explain",), "name the codes"),
        (("explain", "NRS4001", "--all"), "name the codes"),
        (("explain", "nonsense"), "no code nonsense"),
        (("import", "torchrun", "x.sh"), "torchrun"),
        (("import", "verl", "x.sh", "--nodes", "0"), "not a positive number"),
        (("fmt", "-", "-"), "once only"),
    ],
)
def test_wrong_usage_is_64_on_stderr(nereusc, argv, words):
    ran = nereusc(*argv)
    assert ran.code == 64
    assert ran.stdout == ""
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("command", ["", *frame.COMMANDS])
def test_help_goes_to_stdout(nereusc, command):
    ran = nereusc(*command.split(), "--help")
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.stdout.startswith("usage: nereusc")


def test_version_option(nereusc):
    ran = nereusc("--version")
    assert (ran.code, ran.stdout, ran.stderr) == (0, f"nereusc {nereus.__version__}\n", "")


class Command:
    """Stands for a subcommand module whose ``run`` raises."""

    def __init__(self, raised: BaseException) -> None:
        self.raised = raised

    def add_arguments(self, parser):
        pass

    def run(self, args, out):
        raise self.raised


@pytest.fixture
def raising(nereusc, monkeypatch):
    def call(raised: BaseException):
        monkeypatch.setattr(frame.importlib, "import_module", lambda name: Command(raised))
        return nereusc("version")

    return call


def test_a_bug_is_70_with_a_short_message(raising):
    ran = raising(KeyError("some key"))
    assert ran.code == 70
    assert ran.stdout == ""
    assert "internal error: KeyError: 'some key' (test_frame.py:" in ran.stderr
    assert "nereusc version --json" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_debug_shows_the_traceback(raising, monkeypatch):
    monkeypatch.setenv("NEREUS_DEBUG", "1")
    ran = raising(ZeroDivisionError("by zero"))
    assert ran.code == 70
    assert "Traceback" in ran.stderr
    assert "internal error: ZeroDivisionError" in ran.stderr


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Ended(15, ExitCode.TERMINATED), 143, "ended by SIGTERM"),
        (CommandError("no such thing", ExitCode.STALE), 4, "nereusc: error: no such thing"),
        (OSError(28, "No space left on device", "x.plan"), 1, "No space left on device: x.plan"),
        (DiagnosticError([error("NRS4001")]), 3, "about NRS4001"),
        (RecursionError("maximum recursion depth exceeded"), 70, "internal error: RecursionError"),
    ],
)
def test_exceptions_have_their_codes(raising, raised, code, words):
    ran = raising(raised)
    assert ran.code == code
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("choice", "environ", "terminal", "expected"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ("auto", {"TERM": "dumb"}, True, False),
        ("always", {"NO_COLOR": "1", "TERM": "dumb"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_colour(choice, environ, terminal, expected):
    assert use_color(choice, Terminal() if terminal else io.StringIO(), environ) is expected


def test_streams_are_apart_and_style_follows_stdout():
    stdout, stderr = io.StringIO(), Terminal()
    out = Output(stdout=stdout, stderr=stderr, environ={})
    out.print(out.style("result", "bold"))
    out.message("progress")
    assert stdout.getvalue() == "result\n"
    assert stderr.getvalue() == "progress\n"
    assert out.width == 100


def test_text_that_the_encoding_lacks_is_escaped():
    raw = io.BytesIO()
    out = Output(stdout=io.TextIOWrapper(raw, encoding="ascii"), stderr=io.StringIO(), environ={})
    out.print("node \u00fc \udc80")
    assert raw.getvalue() == b"node \\xfc \\udc80\n"


def test_a_reader_that_leaves_is_no_failure():
    """`nereusc explain --all | head -1` with a pipe whose reading end is closed before anything is written."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "nereus.cli.main", "version", "--json"],
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_is_no_failure(stream):
    redirect = {"stdout": ">&-", "stderr": "2>&-"}[stream]
    command = f'"{sys.executable}" -m nereus.cli.main version {redirect}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False, timeout=60)
    assert done.returncode == 0
    assert done.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("argv", [["version"], ["--help"], ["check", "--help"]])
def test_a_full_disk_is_said_plainly(argv, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nereus.cli.main", *argv],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == b"nereusc: error: No space left on device\n"


def test_table_aligns_and_cuts_nothing_off():
    long = "x" * 150
    lines = table(("name", "num"), [("a", "1"), (long, "22")], right=(1,), indent=0)
    assert lines == ["name".ljust(150) + "  num", "a".ljust(150) + "    1", long + "   22"]


def test_wrap_keeps_glued_words_together():
    assert wrap(f"ab cd{GLUE}ef gh", width=8) == "ab cd ef\ngh"
    assert wrap(f"abc cd{GLUE}ef gh", width=8) == "abc\ncd ef gh"


def test_wrap_keeps_long_words():
    assert wrap("ab cd-ef " + "y" * 30, width=10, indent="  ") == "  ab cd-ef\n  " + "y" * 30
