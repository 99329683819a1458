"""The job with Nereus: PPO (or GRPO) on local processes, whose plan changes while it runs.

    python -m examples.ppo.train examples/ppo/{base,longer,longest}.plan --steps 120 --curve curve.json

The first plan is the one to begin with. The policy's responses grow as it learns; when the job wants to allow longer
ones than the plan promises, it goes over to the next plan (``--at STEP ...``: to the next one at those steps, round
and round). ``--kill STEP`` ends a process at that step: the others go on from the last boundary with ``--fallback``,
and some steps later the job takes a new process in. The lines that begin with ``--`` are the changes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples.ppo import loop as rl
from examples.ppo.algorithm import Settings, log_probs
from examples.ppo.display import line
from examples.ppo.plans import load
from examples.ppo.stages import View, Worker, build
from examples.ppo.task import Counting
from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.faults import CANNOT_START, Fault
from nereus.runtime.session.attach import attach
from nereus.runtime.session.change import Outcome
from nereus.runtime.session.job import COMMUNICATION, Aborted, Job
from nereus.runtime.session.local import LocalProcesses

STAGES = ("actor.train", "actor.generate", "critic.train", "ref.infer")
#: Tokens of a response at the start.
ALLOWED = 6
#: Steps with fewer processes before the job takes a new one in.
_WITHOUT = 4


def process(
    *,
    store: Any,
    device: str,
    spawn: Any,
    plans: Sequence[Plan],
    fallback: Plan | None,
    num_steps: int,
    seed: int,
    at: Sequence[int],
    kill: tuple[str, int] | None,
    answer: str,
) -> None:
    """One process of the job. ``plans``: in the order in which they are wanted, by growth, or by steps ``at``;
    ``kill``: device and step of a process that ends itself; ``answer``: where the curve is left."""
    torch.set_num_threads(1)
    settings, task = Settings(algorithm=plans[0].workload.algorithm, seed=seed), Counting()
    job = attach(plans[0], store=store, device=device, spawn=spawn, deadline_s=30.0, snapshots=True)
    for name in STAGES:
        job.bind(name, functools.partial(build, settings=settings), probe=probe)
    job.start(rl.first(task, settings, ALLOWED).plain())
    newcomer = job.epoch > 1
    lost_at: int | None = None
    while job.loop["step"] < num_steps:
        if not job.serves:
            job.start()  # waits until a plan needs this process
            continue
        step = job.loop["step"]
        try:
            if kill == (device, step) and not newcomer:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            side = side_of(job, settings, task)
            with job.updating():
                state = rl.step(side, rl.Loop.of(job.loop))
            if job.leads:
                print(line(state.curve[-1], time.monotonic() - begin, side.seconds), flush=True)
            wanted = plan_for(state, job.plan, plans)
            if at:
                wanted = plans[sum(state.step >= each for each in at) % len(plans)] if lost_at is None else job.plan
            if lost_at is not None and state.step >= lost_at + _WITHOUT:
                wanted, lost_at = plan_for(state, plans[0], plans), None
            if state.step == 1 and not newcomer:  # the optimizers have their state now, as they will at a change
                for plan in plans[1:]:
                    job.rehearse(plan)
            promised = wanted.workload.max_response or state.allowed
            job.loop.update(replace(state, allowed=min(state.allowed, promised)).plain())
            if wanted.path == job.plan.path:
                job.boundary()
                continue
            try:
                job.transition(wanted)
                told = f"{wanted.path}: {timeline(job.outcomes[-1])}"
            except Aborted as aborted:  # the old plan goes on, and what it promises counts
                job.loop["allowed"] = min(job.loop["allowed"], job.plan.workload.max_response or state.allowed)
                told = f"{wanted.path} was given up: {aborted}"
            if job.leads:
                print(f"-- {told}", flush=True)
        except COMMUNICATION as error:
            job.recover(error, functools.partial(without, fallback))
            lost_at = job.loop["step"]
            if job.leads:
                print(f"-- a process is lost; back to step {lost_at}: {timeline(job.outcomes[-1])}", flush=True)
    if job.leads:
        stopped_s = sum(sum(outcome.phases_s.values()) for outcome in job.outcomes[1:])
        print(f"-- {num_steps} steps; {len(job.outcomes) - 1} changes stopped training for {stopped_s:.2f} s in all")
        Path(answer).write_text(json.dumps({"curve": job.loop["curve"], "plan": job.plan.path}))
    job.close()


def side_of(job: Job, settings: Settings, task: Counting) -> rl.Side:
    """What this process has of the stages, as they are now. Every stage of this job is on all its processes."""
    workers: dict[str, Worker] = {}
    for name in STAGES:
        adapter, view = job.stage(name), job.view(name)
        if isinstance(adapter, PlainTorch) and view is not None:
            workers[name] = Worker(adapter, view)
    return rl.Side(
        task=task,
        settings=settings,
        workload=job.plan.workload,
        workers=workers,
        world=workers["actor.train"].place.everyone,
        sync=lambda: job.sync("actor.train", "actor.generate"),
    )


def plan_for(state: rl.Loop, now: Plan, plans: Sequence[Plan]) -> Plan:
    """The plan that serves now, or the first that promises what the loop wants to allow."""
    if (now.workload.max_response or state.allowed) >= state.allowed:
        return now
    return next((plan for plan in plans if (plan.workload.max_response or 0) >= state.allowed), plans[-1])


def without(fallback: Plan | None, plan: Plan, lost: tuple[Device, ...]) -> Plan:
    """The plan to go on with after a loss."""
    if fallback is None or set(lost) & {device for stage in fallback.owners() for device in stage.ranks}:
        raise Fault(CANNOT_START, f"no plan does without {', '.join(map(str, lost))}")
    return fallback


def probe(adapter: Any, view: View) -> list[float]:
    """Log-probs (a critic: estimates) of a fixed batch: the same before and after a change of layout."""
    worker = Worker(adapter, view)
    tokens = torch.arange(16).repeat(2).view(4, 8) % view.plan.model(view.stage.model).arch.vocab
    with torch.no_grad():
        output = worker.before(tokens[:, :2], tokens[:, 2:])
    figures = output if worker.module.head == "value" else log_probs(output, tokens[:, 2:])
    return [1.0 + float(value) for value in figures.abs().mean(1)]


def timeline(outcome: Outcome) -> str:
    """Where the stop of a change went, in this process."""
    total_s = sum(outcome.phases_s.values())
    parts = " ".join(f"{name} {value:.2f}" for name, value in outcome.phases_s.items())
    return f"training stopped for {total_s:.2f} s ({parts}), {outcome.moved_bytes / 1e3:.0f} kB came in"


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO or GRPO of a tiny Llama; its plan changes while it runs")
    parser.add_argument("plans", nargs="+", help="the first to begin with; the others when responses outgrow it")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", help="write step, reward, length, ... of every step to this JSON file")
    parser.add_argument("--at", type=int, nargs="+", default=(), metavar="STEP", help="go to the next plan then")
    parser.add_argument("--kill", type=int, metavar="STEP", help="end the last process of the first plan at this step")
    parser.add_argument("--fallback", metavar="PLAN", help="the plan to go on with after that")
    args = parser.parse_args()
    plans = tuple(load(path) for path in args.plans)
    fallback = load(args.fallback) if args.fallback else None
    curve = run(plans, args.steps, seed=args.seed, at=args.at, kill=args.kill, fallback=fallback)
    if args.curve:
        Path(args.curve).write_text(json.dumps({"plans": args.plans, **curve}, indent=1))


def run(
    plans: Sequence[Plan],
    num_steps: int,
    *,
    seed: int = 1,
    at: Sequence[int] = (),
    kill: int | None = None,
    fallback: Plan | None = None,
) -> dict[str, Any]:
    """The whole run from the launching process: the curve, and the plan that served last. Ends the process where the
    run did not end well."""
    import tempfile

    devices = [str(device) for device in plans[0].stage("actor.train").ranks]
    with tempfile.TemporaryDirectory(prefix="nereus-ppo-") as folder:
        answer = Path(folder, "answer")
        words = {
            "plans": tuple(plans),
            "fallback": fallback,
            "num_steps": num_steps,
            "seed": seed,
            "at": tuple(at),
            "kill": None if kill is None else (devices[-1], kill),
            "answer": str(answer),
        }
        with LocalProcesses("examples.ppo.train:process", args=words, env={"OMP_NUM_THREADS": "1"}) as processes:
            for device in devices:
                processes.spawn(device)
            while processes.alive and not answer.exists():
                time.sleep(0.05)
            # Spares wait for a plan that needs them; the run is over.
            processes.close()
        if not answer.exists():
            sys.exit("the run ended before its last step")
        return dict(json.loads(answer.read_text()))


if __name__ == "__main__":
    main()
