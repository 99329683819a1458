"""Processes of a living job are killed, stopped, delayed and refused memory at random points of random changes, until
something is wrong: `python benchmarks/chaos.py --runs 200` (about ten seconds a run; `make chaos`).

Each run: a job of four processes under a random plan, a change to another, one fault in one process at one phase or
step. It must end in the old plan, the new one, a replan of the survivors, or by naming what only the lost process had;
all who serve at the end hold, bit for bit, what an undisturbed run has. Prints what failed with the seed that repeats
it, and exits with 1 then.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

PHASES = ("offer", "probe", "prepare", "move", "finish", "vote", "decide", "commit")
BEFORE = PHASES[:6]


def judge(results: list[dict[str, Any]], kind: str) -> str:
    """How a run ended; text beginning with "WRONG" where it may not end so."""
    wrong = [r for r in results if r.get("wrong")]
    done = [r for r in results if "wrong" in r]
    if wrong:
        return f"WRONG bytes: {wrong[0]['wrong'][:2]}"
    if len({r["plan"] for r in done}) > 1:
        return f"WRONG: two plans: {sorted({r['plan'] for r in done})}"
    if done:
        log = [line for r in done for line in r["log"]]
        if any("recovered" in line for line in log):
            return "replanned"
        return "old plan" if any("aborted" in line for line in log) else "new plan"
    said = {r.get("fault") for r in results}
    if said and all("wanted and held by none" in r["text"] for r in results if r.get("fault") == "NRS6010"):
        return "lost, by name" if "NRS6010" in said else f"WRONG: {sorted(map(str, said))}"
    return f"WRONG: nobody served at the end: {[r.get('text') for r in results]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from runtime.test_session import DP2, DP4, ONE, PLANS, TP4, WITHOUT_0, WITHOUT_3, run

    from nereus.runtime.session.local import LocalProcesses

    ends: collections.Counter[str] = collections.Counter()
    failed = 0
    begin = time.monotonic()
    with LocalProcesses("runtime.session_job:main") as processes:
        for number in range(options.seed, options.seed + options.runs):
            dice = random.Random(number)
            first, second = dice.sample([DP2, DP4, TP4], 2)
            kind = dice.choice(["kill", "kill", "kill", "raise", "memory", "delay", "stop"])
            where: dict[str, Any] = {"phase": dice.choice(BEFORE if kind in ("raise", "memory") else PHASES)}
            if kind == "kill" and dice.random() < 0.3:
                where = {"step": dice.randrange(4)}
            fault = {"device": f"n0.gpu{dice.randrange(4)}", "kind": kind, **where}
            with tempfile.TemporaryDirectory(prefix=f"chaos-{number}-") as folder:
                results = run(
                    processes,
                    Path(folder),
                    first=first,
                    steps=4,
                    changes={1: second},
                    expect=3 if kind == "kill" else 4,
                    fault=fault,
                    fallback=(WITHOUT_3, WITHOUT_0, ONE),
                    deadline_s=4.0 if kind == "stop" else 20.0,
                    wait_s=60.0,
                )
            end = judge(results, kind)
            ends[end if not end.startswith("WRONG") else "WRONG"] += 1
            if end.startswith("WRONG"):
                failed += 1
                print(f"seed {number}: {PLANS[first].path} -> {PLANS[second].path}, {fault}: {end}", flush=True)
            if (number + 1 - options.seed) % 10 == 0:
                print(f"{time.monotonic() - begin:.0f} s: {dict(ends)}", flush=True)
    print(f"{options.runs} runs: {dict(ends)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
