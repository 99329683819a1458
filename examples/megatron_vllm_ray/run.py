"""The driver: Ray places the processes, this one holds the plans and has no part of any model.

    python -m examples.megatron_vllm_ray.run examples/megatron_vllm_ray/{base,pipeline,data}.plan --steps 24 --every 8

Goes on to the next plan every so many steps. ``RAY_ADDRESS`` names a cluster; without it Ray starts on this machine,
with as many of ``--device`` as the plans need.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nereus
from nereus.ir.plan import Plan
from nereus.lang.api import load_plan, pinned
from nereus.lang.render import render
from nereus.runtime.providers.ray_actors import RayActors

CONFIG = Path(__file__).with_name("config.json")
#: The engine has processes of its own, beside the trainer's.
PARTS = {"actor.generate": "engine"}


def load(path: str) -> Plan:
    result = load_plan(path)
    if result.plan is None:
        sys.exit(render(result.diagnostics, color=False))
    return pinned(result.plan)


def run(
    plans: Sequence[Plan],
    *,
    steps: int,
    every: int,
    bundle: dict[str, float],
    fallback: Plan | None = None,
    lose: int | None = None,
    prepare: str = "",
    deadline_s: float = 300.0,
) -> tuple[list[dict[str, Any]], list[Any]]:
    """In a process that is connected to Ray: the loop's state at every boundary with the plan's name, and what became
    of the changes. ``lose``: the step after which the last trainer's process is ended without a word; the job goes on
    with ``fallback``."""
    args = {"name": "grpo", "config": CONFIG.read_text(), "steps": steps, "prepare": prepare, "deadline_s": deadline_s}
    seen = []
    with RayActors(
        "examples.megatron_vllm_ray.worker:work",
        cluster=plans[0].cluster,
        bundle=bundle,
        parts=("", *PARTS.values()),
        args=args,
        name="grpo",
    ) as actors:
        replan = (lambda plan, lost: fallback) if fallback is not None else None
        job = nereus.attach(plans[0], provider=actors, replan=replan, parts=PARTS, deadline_s=deadline_s)
        job.start({"step": 0})
        for boundary in job.boundaries():
            seen.append({**boundary.loop, "plan": Path(boundary.plan.path).stem})
            print(line(seen[-1], boundary.step_s), flush=True)
            step = boundary.loop["step"]
            if step % every == 0 and step < steps:
                job.request(plans[step // every % len(plans)])
            if step == lose:
                actors.retire(boundary.plan.stage("actor.train").ranks[-1])
        for outcome in job.outcomes[1:]:
            parts = " ".join(f"{name} {value:.2f}" for name, value in outcome.phases_s.items())
            how = f"given up: {outcome.fault}" if outcome.fault else f"{outcome.moved_bytes / 1e6:.2f} MB came in"
            print(f"-- {Path(outcome.plan.path).stem}: {how}; seconds of stopped training: {parts}", flush=True)
        return seen, job.outcomes


def line(at: dict[str, Any], step_s: float) -> str:
    return (
        f"step {at['step']:3}  {at['plan']:9}  reward {at['reward']:.3f}  "
        f"engine and trainer apart by {at['apart']:.1e} at most  {step_s:.1f} s"
    )


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description="GRPO with Megatron and vLLM in Ray actors; its plan changes")
    parser.add_argument("plans", nargs="+", help="the first to begin with")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=8, help="steps from one plan to the next")
    parser.add_argument("--lose", type=int, help="end the last trainer's process after this step")
    parser.add_argument("--fallback", help="the plan to go on with then")
    parser.add_argument("--device", default="GPU", help="Ray's name of what a device is")
    parser.add_argument("--prepare", default="", help="module:function to call before a stage is built")
    options = parser.parse_args()
    plans = [load(path) for path in options.plans]
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        count = len(plans[0].cluster.devices)
        ray.init(**({"num_gpus": count} if options.device == "GPU" else {"resources": {options.device: count}}))
    run(
        plans,
        steps=options.steps,
        every=options.every,
        bundle={options.device: 1},
        fallback=load(options.fallback) if options.fallback else None,
        lose=options.lose,
        prepare=options.prepare,
    )


if __name__ == "__main__":
    main()
