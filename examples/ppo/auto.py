"""The job under a controller that is given one plan and finds the others: it watches the steps, learns what they take,
looks for a better layout as responses grow, and makes the change where that pays.

    python -m examples.ppo.auto examples/ppo/small.plan --steps 20 --emulate [--slow actor.train] --log log.json

Processes tell with each step what its stages took and what they hold; all else is the controller's: calibration,
search, decision, change, and the way back from one that was no good. The lines that begin with ``--`` are what it
decided. ``--emulate``: on slow devices, see ``machine.py``; ``--slow``: a stage that cut layouts make slow, which the
controller has to find out.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from examples.ppo import loop as rl
from examples.ppo.algorithm import Settings
from examples.ppo.display import line
from examples.ppo.machine import Pace, emulated, measured, on
from examples.ppo.model import Llama
from examples.ppo.plans import load
from examples.ppo.stages import View, Worker, build
from examples.ppo.task import Counting
from examples.ppo.train import ALLOWED, STAGES, probe, timeline
from nereus.ir.plan import Plan, Stage
from nereus.planner import decisions
from nereus.planner.advisor import Advisor
from nereus.planner.calibration import Calibration, calibrate, to_document
from nereus.planner.decisions import STAY
from nereus.planner.live import Live, layouts
from nereus.planner.online import Online
from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.groups import Group
from nereus.runtime.session.attach import attach
from nereus.runtime.session.job import Job
from nereus.runtime.session.local import LocalProcesses

#: What the controller is told beside the loop's state.
_TOLD = "measured"
#: Steps of this job are short, and its machine is shared: a plan has missed when it is slower by a third.
RULES = decisions.Settings(margin=0.33)


class Timed(Worker):
    """A worker that says what its work takes; with a pace, no less than that."""

    def __init__(self, adapter: PlainTorch, view: View, pace: Pace | None, seconds: dict[str, float]) -> None:
        super().__init__(adapter, view)
        self.pace, self.seconds, self.owed_s = pace, seconds, 0.0

    def generate(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with self._timed():
            return super().generate(*args)

    def score(self, *args: Any) -> torch.Tensor:
        with self._timed():
            return super().score(*args)

    def update(self, *args: Any) -> float:
        with self._timed():
            found = super().update(*args)
            if self.pace is not None:
                self.owed_s += self.pace.update_s(self.stage.name, tp=self.stage.tp)
            return found

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin, self.owed_s = time.monotonic(), 0.0
        watch = self.module.register_forward_hook(self._owe)
        try:
            yield
        finally:
            watch.remove()
        time.sleep(max(0.0, begin + self.owed_s - time.monotonic()))
        name = self.stage.name
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin

    def _owe(self, module: Llama, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        if self.pace is not None:
            self.owed_s += self.pace.forward_s(
                self.stage.name,
                tokens=inputs[0].numel(),
                tp=self.stage.tp,
                layers=module.arch.num_layers,
                decodes=len(inputs) > 1,
                learns=torch.is_grad_enabled(),
            )


def process(
    *,
    store: Any,
    device: str,
    spawn: Any,
    num_steps: int,
    settings: Mapping[str, Any],
    task: Mapping[str, Any],
    pace: Mapping[str, Any] | None,
) -> None:
    """One process of the job; the controller leads."""
    torch.set_num_threads(1)
    _work(
        attach(store=store, device=device, spawn=spawn, deadline_s=60.0),
        num_steps,
        settings=Settings(**settings),
        task=Counting(**task),
        pace=Pace(**pace) if pace is not None else None,
    )


def _work(job: Job, num_steps: int, *, settings: Settings, task: Counting, pace: Pace | None) -> None:
    for name in STAGES:
        job.bind(name, functools.partial(build, settings=settings), probe=probe)
    job.start()
    while job.loop["step"] < num_steps:
        if not job.serves:
            job.start()
            continue
        seconds: dict[str, float] = {}
        side = _side(job, settings, task, pace, seconds)
        with job.updating():
            state = rl.step(side, rl.Loop.of({key: value for key, value in job.loop.items() if key != _TOLD}))
        job.loop.update({**state.plain(), _TOLD: _slowest(seconds, side.world)})
        job.boundary()
    job.close()


def _side(job: Job, settings: Settings, task: Counting, pace: Pace | None, seconds: dict[str, float]) -> rl.Side:
    workers: dict[str, Worker] = {}
    for name in STAGES:
        adapter, view = job.stage(name), job.view(name)
        if isinstance(adapter, PlainTorch) and view is not None:
            workers[name] = Timed(adapter, view, pace, seconds)
    return rl.Side(
        task=task,
        settings=settings,
        workload=job.plan.workload,
        workers=workers,
        world=workers["actor.train"].place.everyone,
        sync=lambda: job.sync("actor.train", "actor.generate"),
    )


def _slowest(seconds: Mapping[str, float], world: Group) -> dict[str, float]:
    """Of all processes: seconds by stage, and bytes of the largest. The same in all, as the loop's state has to be."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    mine = torch.tensor([*(seconds.get(name, 0.0) for name in STAGES), peak_bytes], dtype=torch.float64)
    most = torch.stack(world.all_gather(mine)).amax(0).tolist()
    return dict(zip((*STAGES, "peak_bytes"), most, strict=True))


def serves(plan: Plan) -> Callable[[Stage], bool]:
    """This job's program cuts its models by tp and dp, and computes in chunks of the plan's micro-batch."""
    given = layouts(plan)

    def can(stage: Stage) -> bool:
        mine = layouts(replace(plan, stages=(stage,)))[stage.name]
        return all(mine[key] == value for key, value in given[stage.name].items() if key not in ("tp", "dp"))

    return can


def run(
    plan: Plan,
    num_steps: int,
    *,
    settings: Settings | None = None,
    task: Counting | None = None,
    pace: Pace | None = None,
    calibration: Calibration | None = None,
    rules: decisions.Settings = RULES,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The whole job from the controller's process: ``curve``; ``log`` of what was observed and decided; ``changes``
    that were made, or given up; ``calibration``, with which the next job may begin."""
    settings, task = settings or Settings(algorithm=plan.workload.algorithm), task or Counting()
    gpu = emulated(plan, pace) if pace is not None else measured(plan)
    # Whatever the policy learns to say is promised: layouts are chosen for the lengths of now.
    plan = on(replace(plan, workload=replace(plan.workload, max_response=task.goal)), gpu)
    known = calibration or calibrate(())
    live = Live(Advisor(plan, known, settings=rules, serves=serves(plan)), Online(known))
    args = {
        "num_steps": num_steps,
        "settings": asdict(settings),
        "task": asdict(task),
        "pace": asdict(pace) if pace is not None else None,
    }
    changes: list[dict[str, Any]] = []
    with LocalProcesses(
        "examples.ppo.auto:process", cluster=plan.cluster, args=args, env={"OMP_NUM_THREADS": "1"}
    ) as processes:
        job = attach(plan, provider=processes, deadline_s=60.0)
        outcome = job.start(rl.first(task, settings, ALLOWED).plain())
        # A start moves nothing; what it took to build says what a change will.
        live.changed(replace(plan, stages=()), plan, {"prepare": outcome.phases_s["prepare"]})
        served = plan
        for boundary in job.boundaries():
            for outcome in job.outcomes[len(changes) + 1 :]:
                if outcome.committed:
                    live.changed(served, outcome.plan, outcome.phases_s)
                changes.append(
                    {
                        "step": boundary.loop["step"] - 1,
                        "layouts": layouts(outcome.plan),
                        "fault": str(outcome.fault or ""),
                    }
                )
                say(f"-- {timeline(outcome)}" if outcome.committed else f"-- given up: {outcome.fault}")
            point, told = boundary.loop["curve"][-1], boundary.loop[_TOLD]
            say(line(point, boundary.step_s, {name: told[name] for name in STAGES}))
            if boundary.plan is not served:  # the first step under a plan compiles its weight sync: it tells nothing
                served = boundary.plan
                continue
            decision = live.observe(
                step=int(point["step"]),
                response_len=point["length"],
                step_s=boundary.step_s,
                stage_s={name: told[name] for name in STAGES if told[name] > 0},
                peak_bytes=told["peak_bytes"],
                plan=served,
            )
            if decision.trigger:
                what = "" if decision.plan is None else f" to {_degrees(decision.plan)}"
                say(f"-- {decision.action}{what} ({decision.trigger}): {decision.reason}")
            if decision.action != STAY and decision.plan is not None and point["step"] + 1 < num_steps:
                job.request(replace(decision.plan, path=f"found after step {point['step']:.0f}"))
        curve = list(job.loop["curve"])
    return {
        "curve": curve,
        "log": live.log,
        "changes": changes,
        "layouts": layouts(served),
        "calibration": to_document(live.online.calibration()),
    }


def _degrees(plan: Plan) -> str:
    return ", ".join(f"{stage.name} dp {stage.dp} tp {stage.tp}" for stage in plan.stages)


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO of a tiny Llama; a controller finds its plans")
    parser.add_argument("plan", help="the plan to begin with")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--emulate", action="store_true", help="on slow devices: changes pay on any machine")
    parser.add_argument("--slow", default="", metavar="STAGE", help="cut layouts of this stage are slow")
    parser.add_argument("--log", help="write what was observed and decided to this JSON file")
    args = parser.parse_args()
    plan = load(args.plan)
    settings = Settings(algorithm=plan.workload.algorithm, seed=args.seed)
    pace = Pace(slow=args.slow) if args.emulate else None
    found = run(plan, args.steps, settings=settings, pace=pace, say=functools.partial(print, flush=True))
    if args.log:
        Path(args.log).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
