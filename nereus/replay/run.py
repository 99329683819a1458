"""One policy on one trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nereus.replay.space import HEADROOM, Space
from nereus.replay.world import INTERRUPTED_AT, RESTART_S, World

#: Why a plan has to be left: nodes that it uses leave; its memory does not suffice; nothing.
LEAVES, OVERFLOWS, FREE = "leaves", "overflows", ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a policy knows at the boundary before ``step``: the step that ended, and the pool."""

    step: int
    present: int
    forced: str
    num_nodes: int
    response_mean: float
    response_max: float | None
    step_s: float | None
    notice_s: float | None
    #: Nodes that are gone without a notice.
    failed: frozenset[str]


class Policy(Protocol):
    """``restarts``: changes are restarts from a checkpoint, as without a system like this one."""

    name: str
    restarts: bool

    def first(self, world: World) -> int: ...

    def choose(self, view: View) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``plans``: number of each step's. ``between_s``: before each step, what was lost with steps given up included.
    ``overflows``: steps that ran out of memory."""

    policy: str
    plans: tuple[int, ...]
    steps_s: tuple[float, ...]
    between_s: tuple[float, ...]
    overflows: int

    @property
    def total_s(self) -> float:
        return sum(self.steps_s) + sum(self.between_s)

    @property
    def num_changes(self) -> int:
        return sum(a != b for a, b in zip(self.plans, self.plans[1:], strict=False))

    @property
    def worst_stall_s(self) -> float:
        return max(self.between_s, default=0.0)

    @property
    def share_between(self) -> float:
        return sum(self.between_s) / self.total_s


def run(policy: Policy, world: World) -> Outcome:
    """A plan that runs out of memory in a step loses half of it, and the job restarts with one that does not."""
    space, rows = world.space, world.trace.rows
    present = policy.first(world)
    plans: list[int] = []
    steps_s: list[float] = []
    between_s: list[float] = []
    overflows = 0
    for step in range(world.num_steps):
        chosen, lost_s = present, 0.0
        if step:
            seen = rows[step - 1]
            leaves = not space.runs_on(present, world.num_nodes[step])
            overflowed = not space.fits(present, seen.response_mean * (1 + HEADROOM / 2))
            notice_s = rows[step].notice_s
            chosen = policy.choose(
                View(
                    step=step, present=present, forced=LEAVES if leaves else OVERFLOWS if overflowed else FREE,
                    num_nodes=world.num_nodes[step], response_mean=seen.response_mean, response_max=seen.response_max,
                    step_s=steps_s[-1], notice_s=notice_s,
                    failed=world.leaving(step) if notice_s is None else frozenset(),
                )
            )  # fmt: skip
            if chosen != present:
                moved_s = world.move_s(step, present, chosen)
                lost_s = max(moved_s, RESTART_S) if policy.restarts else moved_s
        if not world.can_run(step, chosen):
            fits_s = world.seconds(step, chosen)
            lost_s += INTERRUPTED_AT * fits_s + RESTART_S
            overflows += 1
            chosen = _that_fits(space, chosen, world.num_nodes[step], rows[step].response_mean)
        present = chosen
        plans.append(chosen)
        steps_s.append(world.seconds(step, chosen))
        between_s.append(lost_s)
    return Outcome(
        policy=policy.name, plans=tuple(plans), steps_s=tuple(steps_s), between_s=tuple(between_s), overflows=overflows
    )


def _that_fits(space: Space, number: int, num_nodes: int, length: float) -> int:
    """What an operator would start after running out of memory: the best plan that fits."""
    choices = space.choices(num_nodes, length)
    return choices[0] if choices else number
