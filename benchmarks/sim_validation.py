"""The simulator beside real executions over gloo on this machine: `python benchmarks/sim_validation.py`.

Small models change their layout on one to four processes, one a GPU, with the runtime's own executor, which packs,
sends, unpacks and checks every byte. Predicted is the time from the first post to the last verified message, and so it
is measured: the longest that a process packs, transfers (waiting included), unpacks and verifies. Three figures are
fitted, from probes that are not among the transitions: the rate of one process's port, packing included (a pair of
processes), what cores and memory pass when two pairs do the same at once, and the cost of a message (the pair again,
with a model so small that bytes do not count). All of it is one chain of changes that the same processes go through
several times; each round has its own rates from its own probes, since whatever else runs on the machine changes them.
"""

from __future__ import annotations

import argparse
import os
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
TEXT = """cluster {{ node n0 {{ gpus = 4 x "h100-sxm-80gb" }} }}
model actor = "llama-3.1-8b"
workload {{ algorithm = sft  prompts = 96  mini_batch = 96  prompt_len = 128  response_len = 128 }}
stage actor.train {{ backend = megatron  on = {on}  {rest}  recompute = full  optimizer = adam }}
"""

#: Layouts by name: GPUs and degrees.
LAYOUTS = {
    "2 tp2": ("n0.gpu[0-1]", "tp = 2"),
    "2 pp2": ("n0.gpu[0-1]", "tp = 1  pp = 2"),
    "4 tp2 dp2": ("n0", "tp = 2"),
    "4 pp2 dp2": ("n0", "tp = 1  pp = 2"),
    "4 pp4": ("n0", "tp = 1  pp = 4"),
    "4 tp4": ("n0", "tp = 4"),
    "4 tp4 zero1": ("n0", "tp = 4  zero = 1"),
    "4 tp2 pp2 zero1": ("n0", "tp = 2  pp = 2  zero = 1"),
    "1": ("n0.gpu0", "tp = 1"),
    "4 dp4": ("n0", "tp = 1"),
    "3 dp3 zero1": ("n0.gpu[0-2]", "tp = 1  zero = 1"),
    "2 dp2 zero1": ("n0.gpu[0-1]", "tp = 1  zero = 1"),
}
#: One round; the first four changes between these are the probes.
ROUND = (
    *("2 tp2", "2 pp2", "2 tp2"),
    *("4 tp2 dp2", "4 pp2 dp2", "4 tp2 dp2"),
    *("4 pp4", "4 tp4", "4 pp4", "4 tp2 pp2 zero1", "4 tp4 zero1", "4 tp2 pp2 zero1"),
    *("1", "4 dp4", "3 dp3 zero1", "2 dp2 zero1", "3 dp3 zero1", "4 tp4", "2 tp2"),
)
PAIR = (("2 tp2", "2 pp2"), ("2 pp2", "2 tp2"))
TWO_PAIRS = (("4 tp2 dp2", "4 pp2 dp2"), ("4 pp2 dp2", "4 tp2 dp2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One change: from, to, measured seconds, and the job that predicts them."""

    change: tuple[str, str]
    seconds: float
    job: TransitionJob
    moved_bytes: int

    @property
    def num_messages(self) -> int:
        return len(np.unique(self.job.rows[:, 2]))


def plan(name: str) -> Plan:
    on, rest = LAYOUTS[name]
    result = resolve_text(TEXT.format(on=on, rest=rest))
    if result.plan is None:
        raise SystemExit("\n".join(d.headline for d in result.diagnostics))
    return result.plan


def measure(names: Sequence[str], scale: Scale) -> list[Run]:
    """Every change of a chain, executed."""
    known = dict(zip(LAYOUTS, scale_plans(tuple(map(plan, LAYOUTS)), scale), strict=True))
    steps = compile_chain([known[name] for name in names], [Pipeline()] * (len(names) - 1))
    devices = tuple(sorted(dict.fromkeys(d for step in steps for d in step.programs)))
    results = run_processes(
        [(s.transition.old, s.transition.new, s.programs) for s in steps],
        {device: number for number, device in enumerate(devices)},
        num_processes=len(devices),
        deadline_s=120.0,
        drill=None,
        emit=lambda event: None,
    )
    runs = []
    for number, step in enumerate(steps):
        phases = [dict(result.steps[number].execution.phases_s) for result in results]  # type: ignore[union-attr]
        runs.append(
            Run(
                change=(names[number], names[number + 1]),
                seconds=max(sum(of_one.get(name, 0.0) for name in PHASES) for of_one in phases),
                job=one_process_each(step.transition),
                moved_bytes=step.transition.certificate.moved_bytes,
            )
        )
    return runs


def one_process_each(transition: Transition) -> TransitionJob:
    """The job on this machine: two ports a process, and one port for all of them: cores and memory."""
    job = job_of(transition, Costs(message_s=0.0, agree_s=0.0))
    ports = job.job.ports.copy()
    ports[job.job.num_bytes > 0, 2] = len(job.job.resources.port_bytes_per_s) - 1
    return replace(job, job=replace(job.job, ports=ports, weights=None))


def predict(job: TransitionJob, port: float, machine: float, message_s: float) -> float:
    rates = np.full(len(job.job.resources.port_bytes_per_s), port)
    rates[-1] = machine
    fixed = job.job.fixed_s.copy()
    fixed[np.unique(job.rows[:, 2])] = message_s
    resources = replace(job.job.resources, port_bytes_per_s=rates)
    outcome = simulate(replace(job.job, resources=resources, fixed_s=fixed), quantum_s=1e-6)
    return job.transfer_s(outcome)


def rates_of(runs: Sequence[Run], message_s: float) -> tuple[float, float]:
    """Bytes per second of a port and of the machine, such that the probes of a round come out right on average."""
    pair = [run for run in runs if run.change in PAIR]
    two = [run for run in runs if run.change in TWO_PAIRS]

    def search(probes: Sequence[Run], predicted: object) -> float:
        low, high = 1e6, 1e12
        for _ in range(50):  # more rate, less time
            rate = (low * high) ** 0.5
            excess = sum(predicted(run, rate) - run.seconds for run in probes)  # type: ignore[operator]
            low, high = (rate, high) if excess > 0 else (low, rate)
        return rate

    port = search(pair, lambda run, rate: predict(run.job, rate, 1e15, message_s))
    return port, search(two, lambda run, rate: predict(run.job, port, rate, message_s))


def main() -> int:
    os.environ["NEREUS_SAME_HOST"] = "0"  # links between processes are what is simulated
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    tiny = measure(("2 tp2", "2 pp2") * 10 + ("2 tp2",), Scale(width=16, layers=2))
    message_s = statistics.median(2 * run.seconds / run.num_messages for run in tiny)
    runs = measure((*ROUND[:-1] * options.rounds, ROUND[-1]), Scale(width=options.width, layers=4))
    length = len(ROUND) - 1
    table: dict[tuple[str, str], list[tuple[float, float, Run]]] = {}
    fitted = []
    for first in range(0, len(runs), length):
        this = runs[first : first + length]
        port, machine = rates_of(this, message_s)
        fitted.append((port, machine))
        for run in this:
            if run.change not in (*PAIR, *TWO_PAIRS) and run.moved_bytes:
                predicted = predict(run.job, port, machine, message_s)
                table.setdefault(run.change, []).append((predicted, run.seconds, run))
    for what, column in (("a process", 0), ("the machine", 1)):
        values = sorted(rates[column] / 1e9 for rates in fitted)
        print(f"{what}: {statistics.median(values):.2f} GB/s ({values[0]:.2f} to {values[-1]:.2f})")
    print(f"a message: {message_s * 1e6:.0f} us")
    print(f"{'':36} {'MB':>5} {'messages':>9} {'measured s':>11} {'(range)':>15} {'predicted s':>12} {'error':>6}")
    medians = []
    for (before, after), rows in table.items():
        errors = [predicted / seconds - 1 for predicted, seconds, _ in rows]
        measured = sorted(seconds for _, seconds, _ in rows)
        medians.append(statistics.median(errors))
        run = rows[0][2]
        print(
            f"{before + ' -> ' + after:36} {run.moved_bytes / 1e6:>5.0f} {run.num_messages:>9} "
            f"{statistics.median(measured):>11.3f} {f'{measured[0]:.3f} - {measured[-1]:.3f}':>15} "
            f"{statistics.median(p for p, _, _ in rows):>12.3f} {100 * medians[-1]:>5.0f}%"
        )
    size = sorted(abs(error) for error in medians)
    print(f"error of {len(size)}: median {100 * statistics.median(size):.0f}%, largest {100 * size[-1]:.0f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
