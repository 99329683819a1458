"""Entry point of ``nereusc``.

Only what ``--help`` needs is imported here; the module of a subcommand is imported when that subcommand is chosen.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from nereus.cli.errors import CommandError, Ended, UsageError
from nereus.cli.exit_codes import MEANINGS, ExitCode

if TYPE_CHECKING:
    from nereus.cli.output import Output

PROGRAM = "nereusc"

#: Signals that end a command in good order, with its exit code.
ENDS = {
    number: code
    for name, code in (("SIGTERM", ExitCode.TERMINATED), ("SIGHUP", ExitCode.HUNG_UP))
    if (number := getattr(signal, name, None)) is not None
}

#: Subcommand -> (module in ``nereus.cli.commands``, help).
#: A module has ``add_arguments(parser)`` and ``run(args, out) -> int``.
COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("check", "say everything that is wrong with plans, and what memory each GPU needs"),
    "fmt": ("fmt", "rewrite plans in the standard form; comments stay"),
    "diff": ("diff", "what going from one plan to another moves, costs and risks"),
    "compile": ("compile", "save what going from one plan to another does, as a file"),
    "show": ("show", "show a saved transition, if it still holds"),
    "verify": ("verify", "prove a saved transition from its file alone, with code that the compiler does not share"),
    "import": ("import_", "make a plan from the configuration of a training framework"),
    "run": ("run", "carry out a change between plans on real tensors on this machine, and check every element"),
    "plan": ("plan", "the best layouts for the stages of a plan on the GPUs that they have"),
    "fit": ("fit", "learn from measured training runs what steps take and how much memory"),
    "predict": ("predict", "step time and peak memory of training runs, with the error where they were measured"),
    "replay": ("replay", "what a job takes under one policy of adaptation or another, on a trace of lengths and pools"),
    "passes": ("passes", "list the passes of the compiler, their options and the pipeline"),
    "explain": ("explain", "cause, example and cure of a message"),
    "inventory": (
        "inventory",
        "GPUs of this machine or of a Ray cluster, their health, and the cluster block for a plan",
    ),
    "doctor": ("doctor", "what works on this machine, and what would enable the rest"),
    "version": ("version", "version of nereusc and of what it runs on"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``UsageError`` where argparse would exit with 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, usage=self.format_usage())

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse would pass over a full disk in silence. OSError."""
        from nereus.cli.output import Output

        if message:
            Output(stdout=sys.stderr if file is None else file, color="never").raw(message)


class CommandParser(Parser):
    """Parser of one subcommand; its options are added when it is chosen, by the module that implements it."""

    module: str | None = None

    def load(self) -> None:
        if self.module is None:
            return
        from nereus.cli.options import add_color

        command = importlib.import_module(f"nereus.cli.commands.{self.module}")
        self.module = None
        add_color(self)
        command.add_arguments(self)
        self.set_defaults(run=command.run)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.load()
        return super().parse_known_args(args, namespace)


def build_parser() -> Parser:
    codes = "\n".join(f"  {code.value:>3}  {meaning}" for code, meaning in MEANINGS.items())
    parser = Parser(
        prog=PROGRAM,
        description="Compiler of Nereus: what going from one parallel plan to another means, and whether it is safe.",
        epilog=f"exit codes:\n{codes}\n\n{PROGRAM} COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", parser_class=CommandParser, required=False
    )
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        sub.module = module
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; never raises, whatever the input is."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(argv)
    except UsageError as error:
        _complain(f"{error.usage}{PROGRAM}: error: {error}")
        return ExitCode.USAGE
    except CommandError as error:
        _complain(f"{PROGRAM}: error: {error}")
        return error.code
    except SystemExit as stop:  # argparse after --help
        return ExitCode.OK if not stop.code else ExitCode.USAGE
    except Ended as end:
        _complain(f"{PROGRAM}: ended by {signal.Signals(end.number).name}")
        return end.code
    except KeyboardInterrupt:
        _complain(f"{PROGRAM}: interrupted")
        return ExitCode.INTERRUPTED
    except OSError as error:  # a full disk behind stdout, a folder that vanished: nothing that we can mend
        name = f": {error.filename}" if error.filename else ""
        _complain(f"{PROGRAM}: error: {error.strerror or error}{name}")
        return ExitCode.INPUT_ERROR
    except Exception as error:
        _report_bug(error, argv)
        return ExitCode.INTERNAL


def entry() -> NoReturn:
    """Console script."""
    if sys.stdout is None or sys.stderr is None:  # closed by the caller: `nereusc ... >&-`
        devnull = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
        sys.stdout, sys.stderr = sys.stdout or devnull, sys.stderr or devnull
    for stream in (sys.stdout, sys.stderr):
        # File names and plans may hold what the terminal's encoding cannot show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for number in ENDS:
        _end_in_order(number)
    code = int(main())
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)  # nothing is left to end
    try:
        sys.stdout.flush()
    except OSError:  # the reader left, or the disk is full: said already, if there was anyone to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # Streams are flushed and children gone: taking a large transition apart object by object would only cost time.
    os._exit(code)


def _end_in_order(number: int) -> None:
    """End on the signal as on Ctrl-C: temporary files and child processes go first."""

    def handle(number: int, frame: object) -> NoReturn:
        for other in ENDS:
            signal.signal(other, signal.SIG_IGN)  # once is enough; the way out is not to be cut short
        raise Ended(number, ENDS[number])

    if signal.getsignal(number) == signal.SIG_DFL:  # `nohup nereusc ...` stays as it is
        signal.signal(number, handle)


def _run(argv: list[str]) -> int:
    parser = build_parser()
    word = argv[0] if argv else ""
    if word and not word.startswith("-") and word not in COMMANDS:
        raise UsageError(_unknown_command(word), usage=parser.format_usage())
    args = parser.parse_args(argv)
    if args.version:
        import nereus

        args.command, args.color = "version", "never"
        out = _output(args)
        out.print(f"{PROGRAM} {nereus.__version__}")
        return ExitCode.OK
    if args.command is None:
        raise UsageError("which command?", usage=parser.format_help() + "\n")
    out = _output(args)
    from nereus.ir.diagnostic import DiagnosticError

    try:
        code: int = args.run(args, out)
    except DiagnosticError as error:
        from nereus.cli.exit_codes import for_diagnostics

        out.diagnostics(error.diagnostics)
        code = for_diagnostics(error.diagnostics)
    out.flush()
    return code


def _output(args: argparse.Namespace) -> Output:
    from nereus.cli.output import Output

    return Output(color=args.color, mode=getattr(args, "output_format", "full"), json=getattr(args, "json", False))


def _unknown_command(word: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(word, COMMANDS, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(COMMANDS)}"
    return f"no command '{word}'{hint}"


def _complain(text: str) -> None:
    from nereus.cli.output import Output

    with suppress(OSError):  # the terminal has gone, or a full disk is behind stderr: nobody to tell
        Output(color="never").message(text)


def _report_bug(error: Exception, argv: list[str]) -> None:
    import shlex
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    if os.environ.get("NEREUS_DEBUG") == "1":
        _complain("".join(traceback.format_exception(error)).rstrip())
    detail = str(error).split("\n", 1)[0]
    _complain(
        f"{PROGRAM}: internal error: {type(error).__name__}{': ' + detail if detail else ''}{where}\n"
        "This is a bug in Nereus, not in your input. Please report it with the input,\n"
        f"the output of `{PROGRAM} version --json` and the command: {PROGRAM} {shlex.join(argv)}\n"
        "NEREUS_DEBUG=1 in the environment shows the traceback."
    )


if __name__ == "__main__":
    entry()
