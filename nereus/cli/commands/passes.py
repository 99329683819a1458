"""``nereusc passes``: the passes in order, their options, and the text that ``--pass-pipeline`` reads."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from nereus.cli.exit_codes import ExitCode
from nereus.cli.options import add_json
from nereus.cli.output import Output, table, wrap
from nereus.cli.transition.options import MODES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from nereus.passes.manager import Pipeline

    passes = _passes()
    pipeline = str(Pipeline())
    if out.json:
        out.document("passes", {"passes": passes, "pipeline": pipeline})
        return ExitCode.OK
    rows = []
    for entry in passes:
        rows.append((entry["name"], entry["about"]))
        rows += [("", f"{option['name']} = {option['default']}") for option in entry["options"]]
    for line in table(("pass", "what it does, and its options"), rows, indent=0):
        out.print(line)
    out.print()
    out.print("The pipeline, as --pass-pipeline reads it; options stand in braces, e.g. place{horizon_steps=20}:")
    out.print(wrap(pipeline, width=out.width, indent="  ", first="  "))
    return ExitCode.OK


def _passes() -> list[dict[str, Any]]:
    from nereus.passes.manager import ABOUT, PASSES, Pipeline

    default = Pipeline()
    found = []
    for name, kind in PASSES.items():
        options: list[dict[str, Any]] = []
        if kind is not None:
            chosen = getattr(default, kind)
            options = [{"name": f.name, "default": getattr(chosen, f.name), "choices": None} for f in fields(chosen)]
        if name == "schedule":
            options.append({"name": "mode", "default": default.mode, "choices": list(MODES)})
        found.append({"name": name, "about": ABOUT[name], "options": options})
    return found
