"""Circles of two to eight model-stages on full GPUs: `python benchmarks/full_cycles.py`.

Each stage is a 7B trainer alone on four 48 GB GPUs, which a second copy does not fit into, and takes the node of the
next. *spare* is what a GPU may use beyond max(before, after), its largest storage that comes and staging: as built, and
with the schedule made for no byte more (*at the bound*). Every schedule runs in the simulator with exact and with nine
random timings.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def main() -> int:
    from sim.cycles import cycle_plans

    from nereus.passes.manager import Pipeline
    from nereus.passes.pipeline import compile_transition
    from nereus.runtime.run import squeezed
    from nereus.sim.engine import simulate
    from nereus.sim.from_transition import job_of
    from nereus.sim.safety import random_timing

    columns = ("stages", "memory", "waves", "transfer/bound", "peak/capacity", "runs safe", "CPU s")
    print("{:>6} {:>13} {:>6} {:>15} {:>14} {:>10} {:>6}".format(*columns))
    for count in range(2, 9):
        begin = time.process_time()
        transition = compile_transition(*cycle_plans(count))
        for name, each in (("as built", transition), ("at the bound", squeezed(transition, Pipeline()))):
            job = job_of(each)
            runs = [simulate(job.job, random_timing(job.job, seed)) for seed in range(10)]
            fullest = max(float((run.peak_bytes / np.maximum(each.memory.capacity, 1)).max()) for run in runs)
            ratio = job.transfer_s(runs[0]) / each.certificate.bound_transfer_s
            print(
                f"{count:>6} {name:>13} {each.schedule.num_waves:>6} {ratio:>15.3f} {fullest:>14.4f} "
                f"{sum(run.safe for run in runs):>7}/10 {time.process_time() - begin:>6.1f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
