"""Options of ``diff`` and ``compile``, and the pipeline that they describe."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from nereus.cli.errors import UsageError
from nereus.cli.options import add_json, add_output_format

if TYPE_CHECKING:
    from nereus.passes.manager import Pipeline

MODES = ("auto", "reversible", "tight")


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", help="plan that runs now; - is stdin")
    parser.add_argument("new", metavar="NEW", help="plan to go to; - is stdin")
    parser.add_argument(
        "--horizon",
        type=int,
        metavar="STEPS",
        help="RL steps over which a placement's slower steps count against its faster transfer (default: 100)",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="reversible: the old plan stays whole until the commit; tight: memory is released on the way; "
        "auto: reversible where it fits (default: auto)",
    )
    parser.add_argument("--allow-destroy", action="store_true", help="allow that state of a model is lost for good")
    parser.add_argument(
        "--same",
        metavar="MODEL=MODEL",
        action="append",
        default=[],
        help="the job states that these two models hold equal weights now, as a reference model and the actor that "
        "it was made from at version 0: each is a source of the other; may be given several times",
    )
    parser.add_argument(
        "--detailed-exitcode", action="store_true", help="exit with 2 instead of 0 where the plans differ"
    )
    add_detail(parser)
    parser.add_argument(
        "--pass-pipeline", metavar="TEXT", help="options of the passes, as `nereusc passes` prints them"
    )
    parser.add_argument(
        "--print-ir-after",
        metavar="PASS",
        action="append",
        default=[],
        help="print what a pass (or all) produced to stderr; may be given several times",
    )
    parser.add_argument("--time-passes", action="store_true", help="print the seconds of every pass to stderr")
    add_output_format(parser)
    add_json(parser)


def add_detail(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--detail",
        action="store_true",
        help="the whole certificate, the evidence of every check, and memory of every class of GPUs",
    )


def pipeline_of(args: argparse.Namespace) -> Pipeline:
    """``--horizon`` and ``--mode`` win over what ``--pass-pipeline`` says. UsageError."""
    from nereus.passes.manager import Pipeline, parse_pipeline

    try:
        pipeline = parse_pipeline(args.pass_pipeline) if args.pass_pipeline is not None else Pipeline()
    except ValueError as error:
        raise UsageError(f"--pass-pipeline: {error}") from None
    if args.horizon is not None:
        if args.horizon <= 0:
            raise UsageError("--horizon: a positive number of RL steps")
        pipeline = replace(pipeline, place=replace(pipeline.place, horizon_steps=args.horizon))
    if args.mode is not None:
        pipeline = replace(pipeline, mode=args.mode)
    return pipeline


def stated_same(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Pairs given to ``--same``. UsageError."""
    pairs = []
    for text in args.same:
        one, equals, other = (part.strip() for part in text.partition("="))
        if not (one and equals and other) or "=" in other:
            raise UsageError(f"--same: write MODEL=MODEL, not {text!r}")
        pairs.append((one, other))
    return tuple(pairs)


def printed_passes(args: argparse.Namespace) -> frozenset[str]:
    """Names given to ``--print-ir-after``. UsageError."""
    from nereus.passes.manager import PASSES

    names: set[str] = set()
    for name in args.print_ir_after:
        if name == "all":
            names |= set(PASSES)
        elif name in PASSES:
            names.add(name)
        else:
            raise UsageError(f"--print-ir-after: no pass '{name}'; there are {', '.join(PASSES)} and all")
    return frozenset(names)
