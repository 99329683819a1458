"""The simulator beside real executions over gloo on this machine: `python benchmarks/sim_validation.py`.

Transitions of small models run on one process a GPU with the runtime's own executor, which packs, sends, unpacks and
checks every byte. Predicted is the time from the first post to the last verified message, and so it is measured: the
longest that a process packs, transfers (waiting included), unpacks and verifies. Three figures are fitted, all from
probes that are not among the transitions: the rate of one process's port, packing included, and the cost of a message
(a pair of processes, large and small models), and what the machine's cores and memory pass when two pairs do the same
at once. Every transition runs several times, one of them there and the next back; the fastest run of each counts,
since whatever else runs on the machine only adds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.plan import Plan
from nereus.lang.api import resolve_text
from nereus.passes.compiled import Transition
from nereus.passes.manager import Pipeline
from nereus.runtime.launch import run_processes
from nereus.runtime.run import compile_chain
from nereus.runtime.scale import Scale, scale_plans
from nereus.sim.engine import simulate
from nereus.sim.from_transition import Costs, TransitionJob, job_of

PHASES = ("pack", "transfer", "unpack", "verify")
HEAD = """cluster { node n0 { gpus = 4 x "h100-sxm-80gb" } }
model actor = "llama-3.1-8b"
workload { algorithm = sft  prompts = 96  mini_batch = 96  prompt_len = 128  response_len = 128 }
"""
TWO = """cluster { node n0 { gpus = 4 x "h100-sxm-80gb" } }
model actor = "llama-3.1-8b"
model critic = "llama-3.1-8b" { head = value }
workload { algorithm = ppo  mode = async { staleness = 1 }  prompts = 96  samples = 1  mini_batch = 96
  prompt_len = 128  response_len = 128 }
"""


def train(on: str, rest: str, model: str = "actor") -> str:
    return f"stage {model}.train {{ backend = megatron  on = {on}  {rest}  recompute = full  optimizer = adam }}\n"


def pair(first: str, second: str) -> str:
    return TWO + train(first, "tp = 2  micro_batch = 1") + train(second, "tp = 2  micro_batch = 1", "critic")


def both(first: str, second: str) -> str:
    """Two models, each on a pair of processes of its own."""
    return TWO + train("n0.gpu[0-1]", first) + train("n0.gpu[2-3]", second, "critic")


#: name -> (plan, plan, mode). Columns of matrices travel both ways, so that there is packing to do.
PROBES = {
    "one pair": (
        HEAD + train("n0.gpu[0-1]", "tp = 2"),
        HEAD + train("n0.gpu[0-1]", "tp = 1  pp = 2"),
        "reversible",
    ),
    "two pairs": (
        both("tp = 2  micro_batch = 1", "tp = 2  micro_batch = 1"),
        both("tp = 1  pp = 2  micro_batch = 1", "tp = 1  pp = 2  micro_batch = 1"),
        "reversible",
    ),
}
TRANSITIONS = {
    "tp2 pp2 - tp4, ZeRO-1": (
        HEAD + train("n0", "tp = 2  pp = 2  zero = 1"),
        HEAD + train("n0", "tp = 4  zero = 1"),
        "reversible",
    ),
    "pp4 - tp4": (HEAD + train("n0", "tp = 1  pp = 4"), HEAD + train("n0", "tp = 4"), "reversible"),
    "2 GPUs tp2 - 4 GPUs tp2 dp2": (
        HEAD + train("n0.gpu[0-1]", "tp = 2"),
        HEAD + train("n0", "tp = 2"),
        "reversible",
    ),
    "2 GPUs dp2 - 3 GPUs dp3, ZeRO-1": (
        HEAD + train("n0.gpu[0-1]", "tp = 1  zero = 1"),
        HEAD + train("n0.gpu[0-2]", "tp = 1  zero = 1"),
        "reversible",
    ),
    "1 GPU - 4 GPUs dp4": (HEAD + train("n0.gpu0", "tp = 1"), HEAD + train("n0", "tp = 1"), "reversible"),
    "tp2 dp2 - pp2 dp2": (HEAD + train("n0", "tp = 2"), HEAD + train("n0", "pp = 2  tp = 1"), "reversible"),
    "two pairs trade places, tight": (
        pair("n0.gpu[0-1]", "n0.gpu[2-3]"),
        pair("n0.gpu[2-3]", "n0.gpu[0-1]"),
        "tight",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One direction of a transition: its seconds, fastest and slowest, and the job that predicts them."""

    seconds: float
    slowest_s: float
    job: TransitionJob
    moved_bytes: int


def plan(text: str) -> Plan:
    result = resolve_text(text)
    if result.plan is None:
        raise SystemExit("\n".join(str(d) for d in result.diagnostics))
    return result.plan


def measure(before: str, after: str, mode: str, scale: Scale, repeats: int) -> tuple[Run, Run]:
    """Both directions, ``repeats`` times each, one run of the processes."""
    plans = scale_plans((plan(before), plan(after)), scale)
    chain = (*(plans * repeats), plans[0])
    steps = compile_chain(chain, [Pipeline(mode=mode)] * (len(chain) - 1), squeeze=True)
    devices = tuple(dict.fromkeys(d for step in steps for d in step.programs))
    results = run_processes(
        [(s.transition.old, s.transition.new, s.programs) for s in steps],
        {device: number for number, device in enumerate(devices)},
        num_processes=len(devices),
        deadline_s=120.0,
        drill=None,
        emit=lambda event: None,
    )
    seconds = []
    for number in range(len(steps)):
        runs = [dict(result.steps[number].execution.phases_s) for result in results]  # type: ignore[union-attr]
        seconds.append(max(sum(phases.get(name, 0.0) for name in PHASES) for phases in runs))
    return tuple(  # type: ignore[return-value]
        Run(
            seconds=min(seconds[way::2]),
            slowest_s=max(seconds[way::2]),
            job=one_process_each(steps[way].transition),
            moved_bytes=steps[way].transition.certificate.moved_bytes,
        )
        for way in (0, 1)
    )


def one_process_each(transition: Transition) -> TransitionJob:
    """The job on this machine: two ports a process, and one port for all of them: cores and memory."""
    job = job_of(transition, Costs(message_s=0.0, agree_s=0.0))
    ports = job.job.ports.copy()
    ports[job.job.num_bytes > 0, 2] = len(job.job.resources.port_bytes_per_s) - 1
    return replace(job, job=replace(job.job, ports=ports, weights=None))


def predict(job: TransitionJob, port: float, machine: float, message_s: float) -> float:
    rates = np.full(len(job.job.resources.port_bytes_per_s), port)
    rates[-1] = machine
    messages = np.unique(job.rows[:, 2])
    fixed = job.job.fixed_s.copy()
    fixed[messages] = message_s
    resources = replace(job.job.resources, port_bytes_per_s=rates)
    outcome = simulate(replace(job.job, resources=resources, fixed_s=fixed), quantum_s=1e-6)
    return job.transfer_s(outcome)


def fit(large: Sequence[Run], small: Sequence[Run], together: Sequence[Run]) -> tuple[float, float, float]:
    """(bytes per second of a port, of the machine, seconds per message)."""

    def mean(values: Sequence[float]) -> float:
        return statistics.mean(values)

    def waves(runs: Sequence[Run]) -> float:
        return mean([len(np.unique(run.job.rows[:, 2])) / 2 for run in runs])

    # Each of the two sends and receives half: seconds = waves x cost + bytes / 2 / rate, at two sizes.
    table = np.array([[waves(runs), mean([r.moved_bytes / 2 for r in runs])] for runs in (large, small)])
    cost, inverse = np.linalg.solve(table, [mean([r.seconds for r in runs]) for runs in (large, small)])
    message_s = max(float(cost), 0.0)
    port = 1 / float(inverse) if cost >= 0 else table[0, 1] / mean([r.seconds for r in large])
    low, high = port / 16, port * 16
    for _ in range(30):  # more rate, less time
        machine = (low * high) ** 0.5
        excess = mean([predict(r.job, port, machine, message_s) - r.seconds for r in together])
        low, high = (machine, high) if excess > 0 else (low, machine)
    return float(port), machine, message_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    scale = Scale(width=options.width, layers=4)
    large = measure(*PROBES["one pair"], scale, options.repeats)
    small = measure(*PROBES["one pair"], Scale(width=options.width // 4, layers=4), options.repeats)
    together = measure(*PROBES["two pairs"], scale, options.repeats)
    port, machine, message_s = fit(large, small, together)
    print(
        f"fitted: a process {port / 1e9:.2f} GB/s each way, the machine {machine / 1e9:.2f} GB/s, a message "
        f"{message_s * 1e6:.0f} us"
    )
    print(f"{'':40} {'MB':>6} {'messages':>9} {'slowest':>8} {'fastest':>8} {'predicted':>10} {'error':>7}")
    errors = []
    for name, (before, after, mode) in TRANSITIONS.items():
        for way, run in zip(("there", "back"), measure(before, after, mode, scale, options.repeats), strict=True):
            if not run.moved_bytes:  # everybody has what it wants already
                continue
            predicted = predict(run.job, port, machine, message_s)
            errors.append(predicted / run.seconds - 1)
            print(
                f"{name + ', ' + way:40} {run.moved_bytes / 1e6:>6.0f} {len(np.unique(run.job.rows[:, 2])):>9} "
                f"{run.slowest_s:>8.3f} {run.seconds:>8.3f} {predicted:>10.3f} {100 * errors[-1]:>6.0f}%",
                flush=True,
            )
    size = sorted(abs(error) for error in errors)
    print(f"error of {len(errors)}: median {100 * statistics.median(size):.0f}%, largest {100 * size[-1]:.0f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
