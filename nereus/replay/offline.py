"""The offline optimum: the plans of every step that a job would have had, had it known the trace before.

A dynamic programme over (step, plan): least seconds until the end of a step under a plan. It is exact among the plans
that it is given. Most changes are never looked at: one cannot be better than staying unless what it starts from is
ahead by more than the least that any change costs, so the stop of few pairs is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from nereus.replay.run import Outcome
from nereus.replay.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """``step_s``: of a step under a plan, infinite where it cannot run. ``move_s``: before a step, from one plan to
    another; staying costs nothing. ``least_move_s``: of any change before a step."""

    num_steps: int
    plans: tuple[int, ...]
    step_s: Callable[[int, int], float]
    move_s: Callable[[int, int, int], float]
    least_move_s: Callable[[int], float]


def solve(problem: Problem) -> tuple[float, tuple[int, ...]]:
    """(least seconds, plan of each step), any plan first; infinite and empty where some step has no plan."""
    best = {plan: problem.step_s(0, plan) for plan in problem.plans if problem.step_s(0, plan) < math.inf}
    back: list[dict[int, int]] = []
    for step in range(1, problem.num_steps):
        reached: dict[int, float] = {}
        came: dict[int, int] = {}
        order = sorted(best, key=lambda plan: best[plan])
        least_move_s = problem.least_move_s(step)
        for plan in problem.plans:
            step_s = problem.step_s(step, plan)
            if step_s == math.inf:
                continue
            least, source = best.get(plan, math.inf), plan
            for other in order:
                if best[other] + least_move_s >= least:
                    break
                if other != plan:
                    seconds = best[other] + problem.move_s(step, other, plan)
                    if seconds < least:
                        least, source = seconds, other
            if least < math.inf:
                reached[plan], came[plan] = least + step_s, source
        best = reached
        back.append(came)
    if not best:
        return math.inf, ()
    last = min(best, key=lambda plan: best[plan])
    plans = [last]
    for came in reversed(back):
        plans.append(came[plans[-1]])
    return best[last], tuple(reversed(plans))


def optimum(world: World, also: Collection[int] = ()) -> Outcome:
    """Over the plans that searches found for every pool and length of the trace, and ``also``."""
    space = world.space
    numbers = set(also)
    for step, row in enumerate(world.trace.rows):
        numbers.update(space.choices(world.num_nodes[step], row.response_mean))
    problem = Problem(
        num_steps=world.num_steps,
        plans=tuple(sorted(numbers)),
        step_s=lambda step, plan: world.seconds(step, plan) if world.can_run(step, plan) else math.inf,
        move_s=world.move_s,
        # A step that is given up where nodes leave may be run again faster than it ran.
        least_move_s=lambda step: -math.inf if world.leaving(step) else 0.0,
    )
    _, chosen = solve(problem)
    between = (0.0, *(world.move_s(step, chosen[step - 1], chosen[step]) for step in range(1, world.num_steps)))
    return Outcome(
        policy="offline",
        plans=chosen,
        steps_s=tuple(world.seconds(step, plan) for step, plan in enumerate(chosen)),
        between_s=between,
        overflows=0,
    )
