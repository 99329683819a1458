"""Whether a transition is safe on whatever timing: many runs with random durations, judged to the byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from nereus.passes.compiled import Transition
from nereus.sim.engine import simulate
from nereus.sim.from_transition import Costs, job_of
from nereus.sim.job import Job
from nereus.sim.ledger import follow
from nereus.sim.timing import Timing


def with_promised_memory(transition: Transition) -> Transition:
    """The transition on a machine with as much memory as its certificate says it needs, and no byte more. A tight
    schedule is made for a capacity and judged by it, except before and after the transfer, where engines start and
    pools wake: its capacity may be the bound of the transfer alone."""
    memory = transition.memory
    if transition.schedule.mode == "reversible":
        return replace(transition, memory=replace(memory, capacity=memory.reversible_peak))
    outside = [values for phase, values in memory.reversible.items() if phase != "during the transfer"]
    return replace(transition, memory=replace(memory, capacity=np.maximum.reduce([memory.capacity, *outside])))


def random_timing(job: Job, seed: int) -> Timing:
    """Six kinds in turn: the job's own figures, mildly and wildly disturbed, late starts, durations that have nothing
    to do with the job, and such with a few operations that take very long."""
    kind = seed % 6
    if kind == 0:
        return Timing(seed=seed)
    if kind == 1:
        return Timing(seed=seed, fixed_spread=0.2, rate_spread=0.2)
    if kind == 2:
        return Timing(seed=seed, fixed_spread=4.0, rate_spread=4.0, law="loguniform")
    if kind == 3:
        busy_s = float(job.num_bytes.sum()) / float(job.resources.port_bytes_per_s.min()) + 1e-5
        return Timing(seed=seed, fixed_spread=0.5, rate_spread=0.5, delay_s=busy_s)
    generator = np.random.default_rng(seed)
    durations = generator.exponential(1.0, job.num_ops)
    if kind == 5:
        durations[generator.random(job.num_ops) < 0.02] *= 1000.0
    return Timing(seed=seed, durations=durations)


def faults_of(transition: Transition, seeds: Iterable[int], costs: Costs | None = None) -> list[str]:
    """What goes wrong in runs with these seeds: deadlocks, overflows, bytes lost, doubled or too early. Stops at the
    first run with a fault."""
    promised = with_promised_memory(transition)
    job = job_of(promised, costs)
    ledger = follow(promised, job)
    for seed in seeds:
        found = ledger.problems(simulate(job.job, random_timing(job.job, seed)), job)
        if found:
            return [f"seed {seed}: {text}" for text in found]
    return []
