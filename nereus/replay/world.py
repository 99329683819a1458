"""What really happens on a trace: seconds of steps and of changes, which no policy is told before.

The truth differs from what the cost model says in three ways: every layout of some processes has a factor of its own
(``model_error``, the deviation of its logarithm), every step some noise, and the machines an efficiency that the trace
tells. Whoever knows the truth before is the offline optimum; policies see the step that they have run.

A change at the boundary before step ``t`` costs its stop. Where nodes that the plan uses leave with step ``t``, step
``t - 1`` was running when the notice came (at half of its time) or when they failed:

    the step ends, the change follows             where the notice is long enough for both
    the step is given up, the change follows      where it is long enough for the change alone
    the step ends or is given up, the job restarts from its checkpoint (written at every boundary)

whichever is least; a failure is a notice of no time, where the change works with what the nodes left hold. A step that
was given up is run again under the new plan.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from itertools import accumulate

from nereus.ir.diagnostic import DiagnosticError
from nereus.replay.space import Space
from nereus.replay.trace import Trace, no_trace

#: From a checkpoint to the next step: processes, engines, weights from storage. LiveR reports 150 s for a 30B job.
RESTART_S = 150.0
#: Share of a step that is over when a notice comes or a node fails.
INTERRUPTED_AT = 0.5


class World:
    """``noise``: deviation of the logarithm of a step's time."""

    def __init__(
        self, space: Space, trace: Trace, *, model_error: float = 0.05, noise: float = 0.02, seed: int = 0
    ) -> None:
        self.space, self.trace = space, trace
        self.num_steps = len(trace.rows)
        self.num_nodes = _num_nodes(space, trace)
        self._error, self._seed = model_error, seed
        dice = random.Random(f"noise {seed} {trace.name}")
        start = space.number(space.start)
        self._level = []
        for row in trace.rows:
            level = math.exp(noise * dice.gauss(0, 1)) / row.efficiency
            if row.step_s is not None:  # of the plan that is replayed
                level = row.step_s / space.seconds(start, row.response_mean, row.response_max, self._factors(start))
            self._level.append(level)
        self._known_factors: dict[int, Mapping[str, float]] = {}
        self._known_s: dict[tuple[int, int], float] = {}
        self._known_moves: dict[tuple[int, int, int], float] = {}

    def seconds(self, step: int, number: int) -> float:
        """Of the step under a plan, in truth."""
        key = step, number
        if key not in self._known_s:
            row = self.trace.rows[step]
            if number not in self._known_factors:
                self._known_factors[number] = self._factors(number)
            seconds = self.space.seconds(number, row.response_mean, row.response_max, self._known_factors[number])
            self._known_s[key] = self._level[step] * seconds
        return self._known_s[key]

    def can_run(self, step: int, number: int) -> bool:
        row = self.trace.rows[step]
        return self.space.runs_on(number, self.num_nodes[step]) and self.space.fits(number, row.response_mean)

    def leaving(self, step: int) -> frozenset[str]:
        """Nodes that are there no more."""
        before = self.num_nodes[step - 1] if step else self.num_nodes[0]
        return self.space.pool(before) - self.space.pool(self.num_nodes[step])

    def move_s(self, step: int, before: int, after: int) -> float:
        """Seconds between the steps, from ``before`` in step - 1 to ``after`` in ``step``; those lost with a step that
        is given up are in it."""
        key = step, before, after
        if key not in self._known_moves:
            self._known_moves[key] = self._move_s(step, before, after)
        return self._known_moves[key]

    def _move_s(self, step: int, before: int, after: int) -> float:
        if self.space.runs_on(before, self.num_nodes[step]):
            return self.space.stop_s(before, after)
        step_s, again_s = self.seconds(step - 1, before), self.seconds(step - 1, after)
        given_up_s = INTERRUPTED_AT * step_s + again_s - step_s
        notice_s = self.trace.rows[step].notice_s
        if notice_s is None:
            stop_s = self.space.stop_after_loss_s(before, after, self.leaving(step))
            return given_up_s + (RESTART_S if stop_s is None else min(stop_s, RESTART_S))
        stop_s = self.space.stop_s(before, after)
        ways = [given_up_s + RESTART_S]
        rest_s = (1 - INTERRUPTED_AT) * step_s
        if rest_s <= notice_s:
            ways.append(RESTART_S)
        if rest_s + stop_s <= notice_s:
            ways.append(stop_s)
        if stop_s <= notice_s:
            ways.append(given_up_s + stop_s)
        return min(ways)

    def _factors(self, number: int) -> Mapping[str, float]:
        def factor(stage: str, text: str) -> float:
            return math.exp(self._error * random.Random(f"{self._seed} {stage} {text}").gauss(0, 1))

        return {stage: factor(stage, layout.text) for stage, layout in self.space.layouts(number).items()}


def _num_nodes(space: Space, trace: Trace) -> list[int]:
    """Of every step."""
    first = tuple(accumulate(node.num_gpus for node in space.start.cluster.nodes))
    nodes = {gpus: number for number, gpus in enumerate(first, start=1)}
    found, now = [], len(first)
    for step, row in enumerate(trace.rows):
        if row.gpus is not None:
            if row.gpus not in nodes:
                some = ", ".join(map(str, first[:4])) + (f", ... {first[-1]}" if len(first) > 4 else "")
                why = f"step {step} has {row.gpus} GPUs; the first nodes of the plan's cluster have {some}"
                raise DiagnosticError([no_trace(trace.name, why)])
            now = nodes[row.gpus]
        found.append(now)
    return found
