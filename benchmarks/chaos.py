"""Processes of a living job are killed, stopped, delayed and refused memory at random points of random changes, until
something is wrong: `python benchmarks/chaos.py --runs 200` (about ten seconds a run; `make chaos`).

Each run: a job of four processes under a random plan, a change to another, one fault in one process at one phase, at
one piece of what it receives, or in one step. It must end in the old plan, the new one, a replan of the survivors, or
by naming what only the lost process had; all who serve at the end hold, bit for bit, what an undisturbed run has. A run
that does not end is wrong. Faults whose time never came are not counted. Prints what failed with the seed that repeats
it, and exits with 1 then.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

PHASES = ("offer", "probe", "prepare", "move", "finish", "vote", "decide", "commit")
BEFORE = PHASES[:6]
#: Seconds after which a run that has not ended is wrong.
LONGEST_S = 90.0
KINDS = {
    "killed": "kill",
    "coordinator killed around the decision": "kill",
    "stopped, woken later": "stop",
    "delayed": "delay",
    "memory refused": "memory",
    "an exception": "raise",
    "a byte damaged": "corrupt",
}
#: With several stores: they are not used again after one of these.
OF_STORES = {
    "a store killed": "kill store",
    "a store stopped": "stop store",
    "coordinator and a store killed around the decision": "kill both",
}


def judge(results: list[dict[str, Any]]) -> str:
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
        return "lost, by name" if "NRS6010" in said else f"WRONG: {sorted(r.get('text', '') for r in results)}"
    return f"WRONG: nobody served at the end: {[r.get('text') for r in results]}"


def planted(dice: random.Random, stores: list[int]) -> tuple[str, dict[str, Any]]:
    """What happens, and to whom, and when. ``stores``: processes that keep the job's."""
    kinds = KINDS | (OF_STORES if len(stores) > 1 else {})
    kind = dice.choice(list(kinds))
    device, fault = f"n0.gpu{dice.randrange(4)}", kinds[kind]
    if kind.startswith("coordinator"):
        device, where = "n0.gpu0", {"phase": dice.choice(PHASES[5:])}
    elif fault == "corrupt":
        where = {"piece": 0}
    elif fault == "memory":
        where = {"phase": dice.choice(BEFORE)}
    elif (way := dice.randrange(4)) == 0 and fault == "kill":
        where = {"step": dice.randrange(4)}
    elif way == 1:
        where = {"piece": dice.randrange(3)}
    else:
        where = {"phase": dice.choice(BEFORE if fault == "raise" else PHASES)}
    return kind, {"device": device, "kind": fault, "pid": dice.choice(stores), **where}


def one(number: int, processes: Any) -> tuple[str, str, str]:
    """(kind, end, what it was) of the run with that seed; kind "" where its time never came."""
    from runtime.test_session import DP2, DP4, ONE, ONLY, PLANS, TP4, WITHOUT_0, WITHOUT_3, run

    dice = random.Random(number)
    first, second = dice.sample([DP2, DP4, TP4], 2)
    kind, fault = planted(dice, [keeper.pid for keeper in processes.keepers])
    with tempfile.TemporaryDirectory(prefix=f"chaos-{number}-") as folder:
        results = run(
            processes,
            Path(folder),
            first=first,
            steps=4,
            changes={1: second},
            expect=3 if fault["kind"] in ("kill", "kill both") else 4,
            fault=fault,
            fallback=(WITHOUT_3, WITHOUT_0, ONE, *ONLY),  # under load others may miss the deadline too
            deadline_s=8.0 if fault["kind"] == "stop" else 20.0,
            wait_s=LONGEST_S,
        )
        struck = any(Path(folder).glob("struck-*"))
    end = judge(results)
    if end == "new plan" and fault["kind"] == "corrupt" and struck:
        end = "WRONG: a damaged byte was not seen"
    if not struck and {r.get("fault") for r in results} == {"NRS6009"}:
        end = "not started"  # its processes were not all there by the deadline
    return kind if struck else "", end, f"seed {number}: {PLANS[first].path} -> {PLANS[second].path}, {fault}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="at one time")
    parser.add_argument("--stores", type=int, default=1, help="that keep what a job agrees on; some fail, of several")
    options = parser.parse_args()
    from nereus.runtime.session.local import LocalProcesses

    ends: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failed: list[str] = []
    begin, guard, numbers = time.monotonic(), threading.Lock(), itertools.count(options.seed)

    def worker() -> None:
        while runs():
            pass

    def runs() -> bool:
        """One after another, as long as all stores are there; whether more are to come."""
        with LocalProcesses("runtime.session_job:main", stores=options.stores) as processes:
            while True:
                with guard:
                    if sum(c.total() for c in ends.values()) >= options.runs:
                        return False
                    number = next(numbers)
                kind, end, what = one(number, processes)
                with guard:
                    if end.startswith("WRONG"):
                        failed.append(f"{what}: {end}")
                        print(failed[-1], flush=True)
                    if kind:
                        ends[kind][end if not end.startswith("WRONG") else "WRONG"] += 1
                    count = sum(c.total() for c in ends.values())
                    if count % 10 == 0:
                        print(f"{time.monotonic() - begin:.0f} s: {count}", flush=True)
                if kind in OF_STORES:
                    return True

    threads = [threading.Thread(target=worker) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("\n".join(table(ends)))
    return 1 if failed else 0


def table(ends: dict[str, collections.Counter[str]]) -> list[str]:
    names = sorted({end for counter in ends.values() for end in counter})
    total = sum(ends.values(), collections.Counter[str]())
    lines = [f"| | {' | '.join(names)} | all |", f"|---|{'---|' * (len(names) + 1)}"]
    for kind, counter in [*((k, ends[k]) for k in KINDS | OF_STORES if k in ends), ("all", total)]:
        lines.append(f"| {kind} | {' | '.join(str(counter[n] or '') for n in names)} | {counter.total()} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
