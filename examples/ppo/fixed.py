"""The job at one plan from start to end, on communicators and weight copies of its own, without Nereus's session:

    python -m examples.ppo.fixed examples/ppo/base.plan --steps 100 --curve curve.json
    python -m examples.ppo.fixed examples/ppo/base.plan --steps 100 --alone --against curve.json

One process a GPU of the plan (here: a core), or one for everything; a line for every step. What a run that changes its
plan is compared with: no bit of a curve depends on the layout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from examples.ppo import loop as rl
from examples.ppo.algorithm import Settings
from examples.ppo.display import line
from examples.ppo.plans import alone, load
from examples.ppo.stages import Worker, build, hand_over
from examples.ppo.task import Counting
from nereus.ir.plan import Plan, Stage
from nereus.runtime.groups import Groups, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A ``View``: one stage of a plan from where this process stands."""

    plan: Plan
    stage: Stage
    place: Place
    job_state: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    plan: Plan
    num_steps: int
    settings: Settings
    task: Counting
    allowed: int  # tokens of a response at the start


def run(me: int, store: Any, options: Options, *, epoch: int = 0, show: bool = False) -> rl.Loop:
    """The whole job as process ``me`` of it sees it; ``store``: torch's, shared by all; ``epoch``: unused in it."""
    torch.set_num_threads(1)
    plan = options.plan
    process_of = {device: number for number, device in enumerate(plan.cluster.devices)}
    groups = Groups(store, epoch, me)
    world = groups.make("world", range(len(process_of)))
    workers: dict[str, Worker] = {}
    for stage in plan.owners():
        place = groups.place(stage, process_of)
        if place is not None:
            view = Standing(plan=plan, stage=stage, place=place)
            workers[stage.name] = Worker(build(view, options.settings), view)
    actor = plan.model("actor")

    def sync() -> None:
        hand_over(workers.get("actor.train"), workers.get("actor.generate"), actor, world)

    side = rl.Side(
        task=options.task,
        settings=options.settings,
        workload=plan.workload,
        workers=workers,
        world=world,
        sync=sync,
    )
    state = rl.first(options.task, options.settings, options.allowed)
    while state.step < options.num_steps:
        begin = time.monotonic()
        state = rl.step(side, state)
        if show and me == 0:
            print(line(state.curve[-1], time.monotonic() - begin, side.seconds), flush=True)
    groups.close()
    return state


def options_of(plan: Plan, num_steps: int, seed: int = 1) -> Options:
    settings = Settings(algorithm=plan.workload.algorithm, seed=seed)
    return Options(plan=plan, num_steps=num_steps, settings=settings, task=Counting(), allowed=6)


def _process(me: int, folder: str, options: Options) -> None:
    store = torch.distributed.FileStore(os.path.join(folder, "store"), len(options.plan.cluster.devices))
    state = run(me, store, options, show=True)
    if me == 0:
        (Path(folder) / "curve").write_text(json.dumps(state.curve))


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO or GRPO of a tiny Llama on local processes")
    parser.add_argument("plan")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", help="write step, reward, length, ... of every step to this JSON file")
    parser.add_argument("--alone", action="store_true", help="all of it in one process")
    parser.add_argument("--against", metavar="FILE", help="compare with the curve of another run")
    args = parser.parse_args()
    plan = load(args.plan)
    options = options_of(alone(plan) if args.alone else plan, args.steps, args.seed)
    os.environ["OMP_NUM_THREADS"] = "1"  # a process is a GPU here: one core at most
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="nereus-ppo-") as folder:
        children = [
            context.Process(target=_process, args=(me, folder, options), daemon=True)
            for me in range(len(options.plan.cluster.devices))
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        if any(child.exitcode for child in children):
            sys.exit(1)
        curve = json.loads((Path(folder) / "curve").read_text())
        if args.curve:
            Path(args.curve).write_text(json.dumps({"plan": args.plan, "curve": curve}, indent=1))
        if args.against:
            sys.exit(compared(curve, json.loads(Path(args.against).read_text())["curve"]))


def compared(mine: list[dict[str, float]], other: list[dict[str, float]]) -> str | None:
    """The first difference, in words."""
    for a, b in zip(mine, other, strict=False):
        if a != b:
            return f"step {a['step']:.0f} differs: {a} here, {b} there"
    print(f"{min(len(mine), len(other))} steps are the same, to the last bit")
    return None


if __name__ == "__main__":
    main()
