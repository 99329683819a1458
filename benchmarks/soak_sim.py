"""Random transitions on random timings until one hangs, overflows or loses a byte: `python benchmarks/soak_sim.py`.

`--runs N` (100,000 by default) runs in all, `--timings M` of each transition, `--seed S`. Plans are those of the tests:
one to four nodes, several models, every way to shard, both modes, memory at its bound. Prints what failed with the
seeds that repeat it, and exits with 1 then. About 30 runs a second on one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--timings", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st
    from passes.execute import compile_or_confirm, pipeline
    from passes.plans import describe, pairs

    from nereus.ir.plan import Plan
    from nereus.runtime.run import squeezed
    from nereus.sim.safety import faults_of

    done = {"runs": 0, "transitions": 0, "tight": 0, "moving": 0, "refused": 0, "failed": 0}
    begin = told = time.monotonic()

    drawn = given(
        pairs(most=16),
        st.sampled_from(["reversible", "tight", "tight"]),
        st.sampled_from([512, 4096, 65536]),
        st.integers(0, 10**9),
    )
    limits = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))

    def judge(pair: tuple[Plan, Plan], mode: str, window: int, first: int) -> None:
        nonlocal told
        how = pipeline(window=window, mode=mode)
        transition = compile_or_confirm(*pair, how)
        if transition is None:  # state was lost with its nodes, which the oracle confirms
            done["refused"] += 1
            return
        transition = squeezed(transition, how)
        found = faults_of(transition, range(first, first + options.timings))
        done["transitions"] += 1
        done["runs"] += options.timings
        done["tight"] += transition.schedule.mode == "tight"
        done["moving"] += bool(transition.schedule.moves)
        if found:
            done["failed"] += 1
            print(f"window {window}, timings from {first}: " + "; ".join(found))
            print(describe(pair[0]) + "\n" + describe(pair[1]), flush=True)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"{told - begin:.0f} s: {done}", flush=True)

    # A transition that is refused is none of the runs: others take its place.
    start = options.seed
    while done["runs"] < options.runs:
        rest = -(-(options.runs - done["runs"]) // options.timings)
        seed(start)(settings(limits, max_examples=rest)(drawn(judge)))()
        start += 1
    print(f"{time.monotonic() - begin:.0f} s: {done}")
    return 1 if done["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
