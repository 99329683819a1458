"""What a subcommand raises to stop with one plain sentence instead of diagnostics."""

from __future__ import annotations

from nereus.cli.exit_codes import ExitCode


class CommandError(Exception):
    """``message`` goes to stderr as ``nereusc: error: ...``; no traceback."""

    def __init__(self, message: str, code: ExitCode = ExitCode.INPUT_ERROR) -> None:
        super().__init__(message)
        self.code = code


class Ended(KeyboardInterrupt):
    """A signal asks the program to end; like Ctrl-C it passes whatever handles errors."""

    def __init__(self, number: int, code: ExitCode) -> None:
        super().__init__(f"signal {number}")
        self.number = number
        self.code = code


class UsageError(CommandError):
    """The command line itself is wrong. ``usage`` is printed first."""

    def __init__(self, message: str, usage: str = "") -> None:
        super().__init__(message, ExitCode.USAGE)
        self.usage = usage
