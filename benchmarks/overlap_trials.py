"""The paper's three overlap trials, 1,000 times each: `python benchmarks/overlap_trials.py`.

Concurrent model-stages that own their GPUs change together. Each trial type has two changes: a *chain* (one stage takes
what another leaves; the paper's have one or two such dependences) and a *cycle* (each takes what another leaves). Every
run draws when each stage reaches its boundary (0 to 10 s) and lognormal jitter of 30 % on every operation and transfer.

Nereus runs the compiled transition: one global order. Independent migration runs from the same diff and placement
without any order across stages, see `nereus/sim/independent.py`: *waits* takes the planned GPUs and waits for each,
*pool* waits for any free ones, *fails* does not wait. A run succeeds if all stages end without deadlock, overflow or
two owners of a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import numpy as np

from nereus.ir.plan import Plan
from nereus.ir.units import GIB
from nereus.lang.api import resolve_text
from nereus.passes.compiled import Transition
from nereus.passes.manager import Pipeline
from nereus.passes.pipeline import compile_transition
from nereus.passes.schedule import WaveSchedule
from nereus.sim.engine import simulate
from nereus.sim.from_transition import TransitionJob, job_of
from nereus.sim.independent import WAYS, components, independent_job
from nereus.sim.timing import Timing

LAUNCH_S = 10.0
JITTER = 0.3
#: Ports are shared anew at most every 5 ms of transfers that take seconds.
QUANTUM_S = 0.005
#: Fewer and larger slices than by default, which makes runs faster and changes nothing about their order.
SCHEDULE = WaveSchedule(max_waves=8, window_bytes=16 * GIB)

HEAD = """cluster {{ node n[0-{last}] {{ gpus = 8 x "h200-sxm-141gb"  nic = 25 GB/s  host_mem = 2 TiB }} }}
model actor  = "llama-3.1-8b"
model critic = "llama-3.1-8b" {{ head = value }}
workload {{
  algorithm = ppo  mode = async {{ staleness = 1  sync_every = 1 updates  partial = true }}
  prompts = 768  samples = 1  mini_batch = 768  prompt_len = 512  response_len = 1536  max_response = 8192
}}
stage actor.generate {{ engine = vllm       on = {generate}  tp = 1  pp = 4  kv_cache = 40 GiB }}
stage critic.train   {{ backend = megatron  on = {critic}  tp = 1  pp = 4  micro_batch = 2  optimizer = adam }}
stage critic.infer   {{ with = critic.train }}
stage actor.train    {{ backend = megatron  on = {train}  tp = 2  pp = 2  micro_batch = 2  optimizer = adam }}
stage actor.logprob  {{ with = actor.train }}
"""

#: Trial type -> (nodes, those of generate, critic.train and actor.train before; the same after in chain and cycle).
TRIALS = {
    "same model, cross stage, 32 GPUs": (
        4,
        ("n0", "n1", "n[2-3]"),
        ("n[0,2]", "n1", "n3"),
        ("n2", "n1", "n[0,3]"),
    ),
    "cross model, same stage, 48 GPUs": (
        6,
        ("n0", "n[1-2]", "n[3-5]"),
        ("n0", "n[1-3]", "n[4-5]"),
        ("n0", "n[3-5]", "n[1-2]"),
    ),
    "cross model, cross stage, 48 GPUs": (
        6,
        ("n[0-1]", "n[2-3]", "n[4-5]"),
        ("n[0-2]", "n[3-4]", "n5"),
        ("n[2-3]", "n[4-5]", "n[0-1]"),
    ),
}


def plan(nodes: int, where: tuple[str, str, str]) -> Plan:
    generate, critic, train = where
    text = HEAD.format(last=nodes - 1, generate=generate, critic=critic, train=train)
    result = resolve_text(text)
    if result.plan is None:
        raise SystemExit("\n".join(str(d) for d in result.diagnostics))
    return result.plan


def compiled(nodes: int, before: tuple[str, str, str], after: tuple[str, str, str]) -> Transition:
    return compile_transition(plan(nodes, before), plan(nodes, after), Pipeline(schedule=SCHEDULE))


def launched(job: TransitionJob, transition: Transition, launch_s: dict[str, float]) -> np.ndarray:
    """Durations of a run: every device reaches its boundary when its stage does; NaN for all other operations."""
    index = transition.topology.index()
    stage_of = {str(d): stage.name for stage in transition.old.owners() for d in stage.ranks if d in index}
    durations = np.full(job.job.num_ops, np.nan)
    for op, name in enumerate(job.job.name):
        if name.startswith("quiesce "):
            durations[op] = launch_s[stage_of[name.removeprefix("quiesce ")]]
    return durations


def trials(transition: Transition, count: int) -> tuple[dict[str, int], list[float], dict[str, str]]:
    """(successes by who runs, seconds of Nereus after the last launch, a first failure each)."""
    job = job_of(transition)
    parts = components(transition)
    stages = [stage.name for stage in transition.old.owners()]
    good = dict.fromkeys(("nereus", *WAYS), 0)
    seconds: list[float] = []
    failures: dict[str, str] = {}
    for seed in range(count):
        generator = np.random.default_rng(seed)
        launch_s = {stage: float(generator.uniform(0, LAUNCH_S)) for stage in stages}
        timing = Timing(
            seed=seed, fixed_spread=JITTER, rate_spread=JITTER, durations=launched(job, transition, launch_s)
        )
        outcome = simulate(job.job, timing, quantum_s=QUANTUM_S)
        good["nereus"] += outcome.safe
        seconds.append(job.stopped_s(outcome) - max(launch_s.values()))
        if not outcome.safe:
            failures.setdefault("nereus", outcome.deadlock.describe(job.job) if outcome.deadlock else "overflow")
        for way in WAYS:
            alone = independent_job(transition, parts, launch_s, way)
            result = simulate(alone, Timing(seed=seed, rate_spread=JITTER, delay_s=0.01), quantum_s=QUANTUM_S)
            good[way] += result.safe
            if not result.safe:
                text = result.deadlock.describe(alone) if result.deadlock else "overflow"
                failures.setdefault(way, text)
    return good, seconds, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--why", action="store_true", help="a first failure of each")
    options = parser.parse_args()
    print(f"{'success of ' + str(options.trials):44} {'Nereus':>7} {'s':>6} {'waits':>7} {'pool':>7} {'fails':>7}")
    for name, (nodes, before, chain, cycle) in TRIALS.items():
        for kind, after in (("chain", chain), ("cycle", cycle)):
            transition = compiled(nodes, before, after)
            good, seconds, failures = trials(transition, options.trials)
            rates = {who: f"{100 * count / options.trials:.1f}%" for who, count in good.items()}
            print(
                f"{name + ', ' + kind:44} {rates['nereus']:>7} {statistics.median(seconds):>6.2f} "
                + " ".join(f"{rates[way]:>7}" for way in WAYS),
                flush=True,
            )
            if options.why:
                print("\n".join(f"    {who}: {text[:300]}" for who, text in failures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
