"""From two plan files to a transition, or to every reason why there is none."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nereus.cli.errors import UsageError
from nereus.cli.exit_codes import ExitCode, for_diagnostics
from nereus.cli.files import STDIN, STDIN_NAME, display_name, read_text
from nereus.cli.output import Output, table
from nereus.cli.transition.options import pipeline_of, printed_passes, stated_same
from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity, has_errors

if TYPE_CHECKING:
    from nereus.lang.api import LoadResult
    from nereus.passes.compiled import Transition
    from nereus.passes.manager import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """``transition`` is None exactly where ``diagnostics`` has an error."""

    old_path: str
    new_path: str
    pipeline: Pipeline
    transition: Transition | None
    diagnostics: tuple[Diagnostic, ...]

    @property
    def code(self) -> ExitCode:
        """A transition that the independent check refuses is infeasible, whatever the scheduler thought."""
        if self.transition is not None and not self.transition.certificate.safe:
            return ExitCode.INFEASIBLE
        return for_diagnostics(self.diagnostics)


def compile_files(args: argparse.Namespace, out: Output) -> Compiled:
    """Load OLD and NEW, compile, print diagnostics to stderr, and what the debug options ask for."""
    pipeline, printed, same = pipeline_of(args), printed_passes(args), stated_same(args)
    sides = load_sides(args)
    diagnostics = errors_first(d for side in sides for d in side.diagnostics)
    transition = None
    old, new = sides[0].plan, sides[1].plan
    if old is not None and new is not None and not has_errors(diagnostics):
        from nereus.passes.pipeline import compile_transition

        hooks = []
        if printed:
            from nereus.passes.printing import IrPrinter

            hooks.append(IrPrinter(printed, out.message))
        # A compilation makes a few hundred thousand small objects and no cycles worth collecting on the way.
        gc.disable()
        try:
            transition = compile_transition(
                old, new, pipeline, allow_destroy=args.allow_destroy, same=same, hooks=hooks
            )
            diagnostics = errors_first((*transition.warnings, *diagnostics))
        except DiagnosticError as error:
            diagnostics = errors_first((*error.diagnostics, *diagnostics))
        finally:
            gc.enable()
    out.diagnostics(diagnostics)
    if transition is not None and args.time_passes:
        print_timings(transition, out)
    return Compiled(
        old_path=display_name(args.old),
        new_path=display_name(args.new),
        pipeline=pipeline,
        transition=transition,
        diagnostics=diagnostics,
    )


def load_sides(args: argparse.Namespace) -> tuple[LoadResult, LoadResult]:
    """OLD and NEW. UsageError."""
    if args.old == STDIN and args.new == STDIN:
        raise UsageError("standard input (-) can be read once only")
    return _load(args.old), _load(args.new)


def print_timings(transition: Transition, out: Output) -> None:
    rows = [(name, f"{seconds:.3f}") for name, seconds in transition.timings]
    rows.append(("all", f"{transition.certificate.compile_s:.3f}"))
    for line in table(("pass", "seconds"), rows, right=(1,), indent=0):
        out.message(line)


def _load(path: str) -> LoadResult:
    from nereus.lang.api import load_plan, resolve_text

    if path == STDIN:
        return resolve_text(read_text(STDIN), path=STDIN_NAME, base_dir=".")
    return load_plan(path)


def errors_first(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Each once (both plans may share a base), errors before the rest."""
    found: list[Diagnostic] = []
    for diagnostic in diagnostics:
        if diagnostic not in found:
            found.append(diagnostic)
    return tuple(sorted(found, key=lambda d: d.severity is not Severity.ERROR))
