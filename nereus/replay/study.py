"""All policies on one trace, and how far each is from the offline optimum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.plan import Plan
from nereus.planner.calibration import Calibration
from nereus.replay.offline import optimum
from nereus.replay.policies import AnyGain, AsRun, EveryK, Ours, Payback, Static
from nereus.replay.run import Outcome, Policy, run
from nereus.replay.space import Space
from nereus.replay.trace import Trace, no_trace
from nereus.replay.world import World

AS_RUN = "as-run"
POLICIES: Mapping[str, Callable[[], Policy]] = {
    AS_RUN: AsRun,
    "static": Static,
    "sleep-wake": lambda: Static(live=True),
    "every-3": lambda: EveryK(3),
    "any-gain": AnyGain,
    "payback": Payback,
    "ours": Ours,
}
#: On a trace that nobody ran; a run of one's own is compared with what it took.
USUAL = tuple(name for name in POLICIES if name != AS_RUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """``outcomes``: of the policies, in their order, and of the offline optimum, last."""

    world: World
    outcomes: tuple[Outcome, ...]

    @property
    def offline(self) -> Outcome:
        return self.outcomes[-1]

    def regret(self, outcome: Outcome) -> float:
        """Share of time beyond the offline optimum."""
        return outcome.total_s / self.offline.total_s - 1


def study(
    plan: Plan,
    trace: Trace,
    calibration: Calibration,
    *,
    policies: Sequence[str] = USUAL,
    model_error: float = 0.05,
    noise: float = 0.02,
    seed: int = 0,
    space: Space | None = None,
) -> Study:
    """``space``: of the same plan and calibration, where one is known from another trace. Raises DiagnosticError
    (NRS7005) where no layout fits in some step."""
    world = World(space or Space(plan, calibration), trace, model_error=model_error, noise=noise, seed=seed)
    for step, row in enumerate(trace.rows):
        if not world.space.choices(world.num_nodes[step], row.response_mean):
            why = f"no layout fits in step {step}, at {row.response_mean:.0f} tokens on {world.num_nodes[step]} nodes"
            raise DiagnosticError([no_trace(trace.name, why)])
    outcomes = [run(POLICIES[name](), world) for name in policies]
    visited = {number for outcome in outcomes for number in outcome.plans}
    return Study(world=world, outcomes=(*outcomes, optimum(world, visited)))
