"""What an advisor is told to keep to, and what it says."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.plan import Plan

STAY, GO, BACK, CHECKPOINT = "stay", "go", "back", "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``drift``: share by which the mean length moves before a plan is looked for. ``share``: of what the forecast
    promises that is believed. ``trust``: in its verdict (``admission``). ``margin``: by which a measured step may miss.
    ``missed_steps``: first ones of a plan, whose median is judged. ``headroom``: by which lengths may grow before a new
    plan would not fit; one with less than half of it left is taken not to fit. ``num_targets``: plans that are
    watched. ``sick``, ``well``: boundaries (``health.Health``)."""

    drift: float = 0.1
    share: float = 0.5
    trust: float = 0.5
    margin: float = 0.1
    missed_steps: int = 3
    headroom: float = 0.3
    num_targets: int = 4
    sick: int = 3
    well: int = 10


USUAL = Settings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``trigger``: drift, memory, pool, lost, health, missed, regret or empty. ``action``: ``checkpoint`` where nodes
    leave before a change could end, or held what nothing else holds: save, or use what was saved, and start ``plan``
    from it; without a ``plan`` none fits on the nodes that stay, and ``nodes_needed`` have to be there first (None:
    none fits on the whole cluster). ``plan``: what to go to; None to stay. ``considered``: (keys to write into the
    first plan, seconds a step, stop, steps until it pays), best first. ``horizon_steps``: for which the forecast is
    made. ``regret_s``: what staying has cost so far. ``unfit``: (node, why no plan should count on it)."""

    step: int
    response_len: float
    step_s: float | None
    trigger: str
    action: str
    reason: str
    horizon_steps: float
    considered: tuple[tuple[str, float, float, float], ...] = ()
    plan: Plan | None = None
    regret_s: float = 0.0
    notice_s: float | None = None
    nodes_needed: int | None = None
    unfit: tuple[tuple[str, str], ...] = ()
