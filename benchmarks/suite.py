"""The suite: transitions against their bounds and against baselines. `make bench` runs the small ones.

python benchmarks/suite.py                     the default: one or two transitions of each group
python benchmarks/suite.py --full              all of them, up to 1,024 GPUs (a quarter of an hour or more)
python benchmarks/suite.py --only NAME ...     those whose names contain one of the words
... --write                                    tables into docs/benchmarks.md
... --json FILE                                everything as JSON
python benchmarks/suite.py --read FILE ...     tables of such files instead of a run
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path

from measure import BaselineRow, Refused, Row, measure
from random_plans import random_transitions
from real_configs import huge, real_configs
from tables import render_text, summary, write_document
from transitions import Case, paper, plans, table

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
SMALL = (
    "double-8b-4-to-8-replica",
    "double-8b-8-to-16-megatron",
    "reshard-8b-16-tp4pp2-tp8pp1-replica",
    "example-actor-critic-16-to-32",
    "overlap-cross-48",
    "ppo-8b-2k-to-ppo-8b-4k",
    "swap-full-to-swap-full-new",
    "table-2x2x4-4x1x4-replica",
    "verl-qwen2-7b-fsdp-8-to-16",
    "areal-1.5b-4-4-to-2-6",
    "random-8-0",
    "random-16-4",
    "random-32-3",
)


def cases() -> list[Case]:
    found = [*paper(), *plans(), *table(), *real_configs(), *random_transitions()]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), "names are unique"
    return found


def chosen(args: argparse.Namespace) -> list[Case]:
    if args.only:
        return [case for case in (*cases(), *huge()) if any(word in case.name for word in args.only)]
    if args.full:
        return [case for case in cases() if case.num_gpus <= args.most_gpus]
    return [case for case in cases() if case.name in SMALL]


def run(selected: Iterable[Case], *, quiet: bool = False) -> tuple[list[Row], list[Refused]]:
    rows: list[Row] = []
    refused: list[Refused] = []
    for case in selected:
        found = measure(case)
        if isinstance(found, Refused):
            refused.append(found)
        else:
            rows.append(found)
        if not quiet:
            what = found.reason if isinstance(found, Refused) else f"{found.transfer_ratio:.3f} x bound"
            print(f"  {case.name}: {what}", file=sys.stderr, flush=True)
    return rows, refused


def read(files: Iterable[str]) -> tuple[list[Row], list[Refused]]:
    """What runs wrote with --json, in the order of the suite."""
    rows: dict[str, Row] = {}
    refused: dict[str, Refused] = {}
    names = {field.name for field in fields(Row)}
    for file in files:
        document = json.loads(Path(file).read_text())
        for entry in document["transitions"]:
            known = {key: value for key, value in entry.items() if key in names}
            known["baselines"] = {name: BaselineRow(**row) for name, row in known["baselines"].items()}
            rows[entry["name"]] = Row(**known)
        for entry in document["refused"]:
            refused[entry["name"]] = Refused(**entry)
    order = [case.name for case in (*cases(), *huge())]
    return [rows[n] for n in order if n in rows], [refused[n] for n in order if n in refused]


def main() -> int:
    parser = argparse.ArgumentParser(description="Transitions against their bounds and against baselines.")
    parser.add_argument("--full", action="store_true", help="all transitions")
    parser.add_argument("--most-gpus", type=int, default=1024, help="with --full: none on more GPUs")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="transitions whose names contain a word")
    parser.add_argument("--json", metavar="FILE", help="write everything measured as JSON")
    parser.add_argument("--read", nargs="+", metavar="FILE", help="read what runs wrote with --json")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    parser.add_argument("--list", action="store_true", help="names only")
    args = parser.parse_args()
    if args.list:
        for case in cases():
            print(f"{case.group:8} {case.num_gpus:5} {case.name}")
        return 0
    started = time.perf_counter()
    rows, refused = read(args.read) if args.read else run(chosen(args))
    wall_s = time.perf_counter() - started
    print(render_text(rows, refused))
    print(f"{len(rows) + len(refused)} transitions in {wall_s:.0f} s")
    if args.json:
        document = {
            "summary": summary(rows),
            "wall_s": wall_s,
            "transitions": [
                {**asdict(row), "transfer_ratio": row.transfer_ratio, "peak_ratio": row.peak_ratio} for row in rows
            ],
            "refused": [asdict(entry) for entry in refused],
        }
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    if args.write:
        write_document(DOCUMENT, rows, refused)
    return 0 if rows and not [row for row in rows if not row.safe] else 1


if __name__ == "__main__":
    sys.exit(main())
