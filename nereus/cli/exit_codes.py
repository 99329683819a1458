"""Exit codes of ``nereusc``: one table, and one function from diagnostics to a code."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nereus.ir.diagnostic import Diagnostic


class ExitCode(enum.IntEnum):
    OK = 0
    INPUT_ERROR = 1
    #: Success with differences; only under ``--detailed-exitcode``.
    DIFFERENT = 2
    #: Well formed, but it cannot work: memory, pool, schedule.
    INFEASIBLE = 3
    #: A saved transition is stale, or its fingerprints do not match.
    STALE = 4
    #: ``fmt --check`` would change a file.
    UNFORMATTED = 5
    USAGE = 64
    INTERNAL = 70
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "success",
    ExitCode.INPUT_ERROR: "errors in the input",
    ExitCode.DIFFERENT: "success with differences (only with --detailed-exitcode)",
    ExitCode.INFEASIBLE: "the input is well formed but cannot work: memory, pool, schedule",
    ExitCode.STALE: "a saved transition is stale or does not match",
    ExitCode.UNFORMATTED: "fmt --check would change a file",
    ExitCode.USAGE: "wrong usage",
    ExitCode.INTERNAL: "a bug in Nereus",
    ExitCode.HUNG_UP: "ended by SIGHUP",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.TERMINATED: "ended by SIGTERM",
}

_INFEASIBLE_PREFIXES = ("NRS4", "NRS5")
_INTERNAL_PREFIX = "NRS9"
#: A file that is no saved transition is faulty input; one that does not hold any more is stale.
_FILE_PREFIX, _STALE_PREFIX = "NRS550", "NRS551"


def for_diagnostics(diagnostics: Iterable[Diagnostic]) -> ExitCode:
    """Only errors count; among them a bug of ours weighs most, then stale, then faulty input, then infeasible."""
    codes = [d.code for d in diagnostics if d.severity.value == "error"]
    if not codes:
        return ExitCode.OK
    if any(code.startswith(_INTERNAL_PREFIX) for code in codes):
        return ExitCode.INTERNAL
    if any(code.startswith(_STALE_PREFIX) for code in codes):
        return ExitCode.STALE
    if all(code.startswith(_INFEASIBLE_PREFIXES) and not code.startswith(_FILE_PREFIX) for code in codes):
        return ExitCode.INFEASIBLE
    return ExitCode.INPUT_ERROR
