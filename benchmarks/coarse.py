"""The coarse estimate against the full compilation, and how long it takes: `make bench` runs the small part.

python benchmarks/coarse.py                    a few transitions of the suite, and the curve up to 1,024 GPUs
python benchmarks/coarse.py --full             all of the suite, and the curve up to 16,384 GPUs
... --write                                    tables into docs/benchmarks.md, under their own heading
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from compile_time import write_pair
from suite import DOCUMENT, SMALL, cases
from transitions import Case, on, plan_text, resolved, train

from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.plan import Plan
from nereus.ir.transition import Certificate
from nereus.lang.api import load_plan
from nereus.passes import coarse as coarse_pass
from nereus.passes.coarse import coarse
from nereus.passes.coarse_grid import bit_sets, grid_of, layer_runs, numel_table
from nereus.passes.coarse_side import rank_coordinates
from nereus.passes.coarse_tables import coordinate_shares, weights_of
from nereus.passes.pipeline import compile_transition

BEGIN, END = "<!-- coarse: begin -->", "<!-- coarse: end -->"
SIZES = (64, 256, 1024, 4096, 16384)
REPEATS = 30
#: Below this nothing is compared as a ratio.
LEAST_BYTES, LEAST_S = 1e9, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """``estimate / compiled`` per figure, for the compiler's placement and for the one that the plan lists."""

    name: str
    placed: dict[str, float]
    listed: dict[str, float]


def compare(name: str, old: Plan, listed: Plan, placed: Plan, certificate: Certificate) -> Compared:
    return Compared(
        name=name,
        placed=_ratios(coarse(old, placed), certificate),
        listed=_ratios(coarse(old, listed), certificate),
    )


def _ratios(found: coarse_pass.CoarseEstimate, certificate: Certificate) -> dict[str, float]:
    pairs = {
        "moved bytes": (found.moved_bytes, certificate.moved_bytes, LEAST_BYTES),
        "into a node": (found.node_in_bytes_max, certificate.node_in_bytes_max, LEAST_BYTES),
        "bound": (found.bound_transfer_s, certificate.bound_transfer_s, LEAST_S),
        "transfer": (found.transfer_s, certificate.transfer_s, LEAST_S),
        "stop": (found.stop_s, certificate.downtime_s, LEAST_S),
    }
    # A peak is compared where it is a GPU's in both.
    if not certificate.peak_device.endswith(".host"):
        pairs["peak"] = (found.peak_bytes_max, certificate.peak_bytes_max, LEAST_BYTES)
    return {key: guess / true for key, (guess, true, least) in pairs.items() if true >= least}


def compared(selected: Iterable[Case]) -> Iterator[Compared]:
    for case in selected:
        try:
            old, new = case.make()
            transition = compile_transition(old, new, verify=False)
        except DiagnosticError:
            continue
        yield compare(case.name, transition.old, new, transition.new, transition.certificate)


def error_table(rows: list[Compared]) -> list[str]:
    lines = [
        "| figure | same placement: median error | 90 % of transitions | largest | plans as listed: median | largest |",
        "|---|---|---|---|---|---|",
    ]
    for key in ("moved bytes", "into a node", "bound", "transfer", "stop", "peak"):
        cells = []
        for side, quantiles in (("placed", (0.5, 0.9, 1.0)), ("listed", (0.5, 1.0))):
            found = sorted(abs(ratio - 1.0) for row in rows if (ratio := getattr(row, side).get(key)) is not None)
            cells += [f"{found[min(len(found) - 1, int(q * len(found)))]:.1%}" if found else "-" for q in quantiles]
        lines.append(f"| {key} | " + " | ".join(cells) + " |")
    return lines


def worst(rows: list[Compared], key: str, count: int = 4) -> list[str]:
    found = sorted((row for row in rows if key in row.placed), key=lambda row: -abs(row.placed[key] - 1.0))
    return [f"{row.name} {row.placed[key]:.2f}" for row in found[:count]]


# -- time --------------------------------------------------------------------------------------------------------------


def _thread_ms(call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(repeats):
        before()
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


def forget() -> None:
    """All that is remembered: plans, and tables of layouts."""
    coarse_pass.forget()
    for cached in (grid_of, bit_sets, layer_runs, numel_table, rank_coordinates, coordinate_shares, weights_of):
        cached.cache_clear()


def pairs(num_gpus: int) -> dict[str, tuple[Plan, Plan]]:
    """One trainer that doubles and drops its pipeline, and the RL job of compile_time.py."""
    nodes = num_gpus // 8
    texts = [
        plan_text(
            nodes, 'model actor = "llama-3.1-8b"', [train("actor", on(0, gpus), zero=1, tp=tp, pp=pp)], prompts=num_gpus
        )
        for gpus, tp, pp in ((num_gpus // 2, 4, 2), (num_gpus, 8, 1))
    ]
    found = {"one trainer": (resolved(texts[0], "old"), resolved(texts[1], "new"))}
    with tempfile.TemporaryDirectory() as name:
        write_pair(Path(name), num_gpus)
        plans = [load_plan(str(Path(name) / f"{side}.plan")).plan for side in ("old", "new")]
    assert plans[0] is not None and plans[1] is not None
    found["PPO, 4 models"] = plans[0], plans[1]
    return found


def curve(sizes: Iterable[int]) -> list[str]:
    lines = [
        "| GPUs | transition | nothing remembered, ms | layouts seen before, plans new | old plan known | both known |",
        "|---|---|---|---|---|---|",
    ]
    for num_gpus in sizes:
        for name, (old, new) in pairs(num_gpus).items():
            call = lambda old=old, new=new: coarse(old, new)  # noqa: E731
            cells = [
                _thread_ms(call, max(3, REPEATS // 6), forget),
                _thread_ms(call, REPEATS, coarse_pass.forget),
                _thread_ms(call, REPEATS, lambda new=new: coarse_pass.forget(new)),
                _thread_ms(call, REPEATS),
            ]
            lines.append(f"| {num_gpus:,} | {name} | " + " | ".join(f"{ms:.2f}" for ms in cells) + " |")
    return lines


def document(rows: list[Compared], timing: list[str]) -> str:
    return "\n".join(
        [
            f"{len(rows)} transitions of the suite, error |estimate / compiled - 1| where the compiled figure is at",
            "least 1 GB or 1 ms. The compiler places new ranks so that least has to move; the estimate takes the",
            "placement that it is given, so both are shown.",
            "",
            *error_table(rows),
            "",
            "Farthest off at the same placement (estimate / compiled): transfer "
            + ", ".join(worst(rows, "transfer"))
            + "; stop "
            + ", ".join(worst(rows, "stop"))
            + ".",
            "",
            f"CPU time of one estimate, one core, parsing excluded, best of {REPEATS}. Remembered are: of a plan, the",
            "columns of its copies; across plans, tables of layouts and of architectures. The aim is 1.2 ms at 1,024;",
            "on a machine with two busy cores, so that figures differ by a tenth or two between runs:",
            "",
            *timing,
        ]
    )


def write(text: str) -> None:
    whole = DOCUMENT.read_text()
    if BEGIN not in whole:
        whole = whole.rstrip() + f"\n\n## Coarse estimate\n\n{BEGIN}\n{END}\n"
    head, rest = whole.split(BEGIN)
    _, tail = rest.split(END)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description="The coarse estimate: its error and its time.")
    parser.add_argument("--full", action="store_true", help="all transitions, and up to 16,384 GPUs")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    args = parser.parse_args()
    rows = list(compared(case for case in cases() if args.full or case.name in SMALL))
    text = document(rows, curve(SIZES if args.full else SIZES[:3]))
    print(text)
    if args.write:
        write(text)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
