"""How other systems would make the same change, through the same simulator: one file a rule."""

from __future__ import annotations

from nereus.sim.baselines.answer import Answer, Baseline
from nereus.sim.baselines.first_replica import FirstReplica
from nereus.sim.baselines.independent import Independent
from nereus.sim.baselines.jobs import job_of
from nereus.sim.baselines.least_loaded import LeastLoaded
from nereus.sim.baselines.primitives import Primitives
from nereus.sim.baselines.problem import Problem, build_problem
from nereus.sim.baselines.round_robin import RoundRobin
from nereus.sim.baselines.sleep_wake import SleepWake
from nereus.sim.baselines.templates import Templates
from nereus.sim.baselines.via_storage import ViaStorage

__all__ = ["BASELINES", "Answer", "Baseline", "Problem", "build_problem", "job_of"]

BASELINES: tuple[Baseline, ...] = (
    Primitives(),
    FirstReplica(),
    RoundRobin(),
    LeastLoaded(),
    Independent(),
    Templates(),
    ViaStorage(),
    SleepWake(),
)
