"""Where to go when a node fails, made ready before it does: the plan, what a step takes there, and the stop.

Nodes that are alike leave alike pools behind, so one search serves all of them: its plan is moved to the nodes that
stay in each case. What the change costs is estimated for each node, since what is lost with it is not alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nereus.ir.cluster import Device, Node
from nereus.ir.plan import Plan
from nereus.passes.coarse import coarse
from nereus.planner.calibration import Calibration
from nereus.planner.limits import NO_LIMITS, Limits
from nereus.planner.pools import nodes_of, on_most_nodes, survives, worth_trying
from nereus.planner.search import Found, search

if TYPE_CHECKING:
    from nereus.passes.compiled import Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Contingency:
    """``plan``: None where nothing fits without the node. ``survives``: all state is on other nodes as well; without it
    the job restarts from its checkpoint, and ``stop_s`` means nothing. ``transition``: where it was compiled."""

    node: str
    plan: Plan | None
    seconds: float = 0.0
    stop_s: float = 0.0
    survives: bool = False
    transition: Transition | None = None


def contingencies(
    plan: Plan,
    calibration: Calibration,
    *,
    home: Plan | None = None,
    pool: Collection[str] | None = None,
    limits: Limits = NO_LIMITS,
    compiled: bool = False,
) -> tuple[Contingency, ...]:
    """For each node that ``plan``, which runs, uses. ``home``: a plan of the job whose cluster lists all nodes;
    ``pool``: those that are there (default: those of ``plan``). ``limits``: of the searches. ``compiled``: compile
    every change as well."""
    home = replace(home or plan, workload=plan.workload)
    pool = nodes_of(plan) if pool is None else frozenset(pool)
    of_name = {node.name: node for node in home.cluster.nodes}
    known: dict[tuple[object, ...], tuple[Plan, Found | None]] = {}
    found = []
    for name in sorted(nodes_of(plan), key=list(of_name).index):
        left = [node for node in home.cluster.nodes if node.name in pool and node.name != name]
        alike = tuple(_kind(node) for node in left)
        if alike not in known:
            for names in worth_trying(home, [node.name for node in left]):
                placed = on_most_nodes(home, names, lost=(name,))
                best = () if placed is None else search(placed, calibration, count=1, limits=limits).best
                if placed is not None and (alike not in known or (best and _better(best[0], known[alike][1]))):
                    known[alike] = placed, best[0] if best else None
        placed, best_there = known.get(alike, (home, None))
        if best_there is None:
            found.append(Contingency(node=name, plan=None))
            continue
        there = [n.name for n in placed.cluster.nodes if n.name in pool]
        moved = _renamed(best_there.plan, home, name, dict(zip(there, (node.name for node in left), strict=True)))
        found.append(_costed(plan, moved, name, best_there.seconds, compiled=compiled))
    return tuple(found)


def _costed(plan: Plan, moved: Plan, name: str, seconds: float, *, compiled: bool) -> Contingency:
    from nereus.passes.pipeline import compile_transition  # with solvers, which advice does not need

    alive = survives(plan, moved)
    transition = compile_transition(plan, moved) if compiled and alive else None
    stop_s = coarse(plan, moved).stop_s if transition is None else transition.timeline.stop_s
    return Contingency(
        node=name, plan=moved, seconds=seconds, stop_s=stop_s, survives=alive, transition=transition
    )  # fmt: skip


def _better(found: Found, known: Found | None) -> bool:
    return known is None or found.cost < known.cost


def _kind(node: Node) -> tuple[object, ...]:
    return (node.gpu, node.num_gpus, node.host_mem_bytes, node.nic_bytes_per_s, node.rails)


def _renamed(plan: Plan, home: Plan, lost: str, names: Mapping[str, str]) -> Plan:
    """On other nodes, with another one lost."""
    cluster = replace(
        home.cluster,
        nodes=tuple(node for node in home.cluster.nodes if node.name != lost),
        lost=tuple(dict.fromkeys((*home.cluster.lost, lost))),
    )
    stages = (replace(s, devices=tuple(Device(names[d.node], d.index) for d in s.devices)) for s in plan.stages)
    return replace(plan, cluster=cluster, stages=tuple(stages))
