"""verify: what must hold of each pass's result before the next one reads it. A failure is a bug in Nereus, not in a
plan.

These are invariants of single levels, checked between passes (``--verify-each``, on by default); that the whole
transition is right is ``check``'s business.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nereus.ir.cells import local_boxes
from nereus.ir.holdings import Holdings, StateSet
from nereus.ir.layout import Layout, layout_of
from nereus.ir.plan import Plan, Stage
from nereus.ir.schedule import Schedule, follows
from nereus.passes.diff import Diff, holders_by_class
from nereus.passes.lists import contains
from nereus.passes.place import Placed
from nereus.passes.route import Routed


class BrokenInvariant(AssertionError):
    """A pass produced something that cannot be; carries the pass's name in its message."""


def verify_each(name: str, result: object) -> None:
    """The hook: raises BrokenInvariant."""
    problem: str | None = None
    if isinstance(result, Holdings):
        problem = next(filter(None, map(_state_set_problem, result.sets)), None)
    elif isinstance(result, Placed):
        problem = _placement_problem(result.plan)
    elif isinstance(result, Diff):
        problem = _diff_problem(result)
    elif isinstance(result, Routed):
        problem = _route_problem(result)
    elif isinstance(result, Schedule):
        problem = _schedule_problem(result)
    if problem is not None:
        raise BrokenInvariant(f"after {name}: {problem}")


def _state_set_problem(state_set: StateSet) -> str | None:
    """Every layer lies on exactly one pipeline stage, and the coordinates together hold every tensor whole."""
    layout = state_set.bound.layout
    layers = {t.layer for t in state_set.tensors if t.layer is not None}
    if (
        isinstance(layout, Layout)
        and layers
        and (sum(layout.pp_split) != len(layers) or max(layers) != len(layers) - 1)
    ):
        return f"{state_set.stage}: pp_split {layout.pp_split} does not cover {len(layers)} layers"
    boxes = local_boxes(state_set.tensors, layout)
    whole = np.array([t.numel for t in state_set.tensors], dtype=np.int64)
    tensor = np.broadcast_to(np.arange(len(whole)), boxes.row_lo.shape)
    corners = np.stack((tensor, boxes.row_lo, boxes.row_hi, boxes.col_lo, boxes.col_hi), axis=-1).reshape(-1, 5)
    distinct = np.unique(corners, axis=0)
    held = np.zeros_like(whole)
    np.add.at(held, distinct[:, 0], (distinct[:, 2] - distinct[:, 1]) * (distinct[:, 4] - distinct[:, 3]))
    bad = np.flatnonzero(held != whole)
    if len(bad):
        return f"{state_set.stage}: {state_set.tensors[int(bad[0])].name} is not held whole"
    return None


def _placement_problem(plan: Plan) -> str | None:
    """Every stage lies on its own devices, and as few tensor-parallel groups as possible cross a node border."""
    for stage in plan.owners():
        if sorted(stage.ranks) != sorted(stage.devices):
            return f"{stage.name}: its placement is not a permutation of its devices"
        per_node: dict[str, int] = {}
        for device in stage.devices:
            per_node[device.node] = per_node.get(device.node, 0) + 1
        most_inside = sum(count // stage.tp for count in per_node.values())
        crossing = _crossing_groups(stage)
        if stage.key_span("place") is stage.span and crossing > len(stage.ranks) // stage.tp - most_inside:
            listed = _crossing_groups(replace(stage, place=None))
            if crossing > listed:
                return f"{stage.name}: {crossing} tensor-parallel groups cross nodes, {listed} as listed"
    return None


def _crossing_groups(stage: Stage) -> int:
    coords = layout_of(stage).coordinates()
    nodes: dict[tuple[int, int, int], set[str]] = {}
    for rank, device in enumerate(stage.ranks):
        key = (int(coords["pp"][rank]), int(coords["dp"][rank]), int(coords["cp"][rank]))
        nodes.setdefault(key, set()).add(device.node)
    return sum(1 for group in nodes.values() if len(group) > 1)


def _diff_problem(difference: Diff) -> str | None:
    """Intervals of a table ascend and do not overlap; a demand's wanters are on its node and hold nothing of it."""
    for number, table in enumerate(difference.tables):
        same = table.cell[1:] == table.cell[:-1]
        if bool((table.start >= table.stop).any()) or bool((table.cell[1:] < table.cell[:-1]).any()):
            return f"table {number}: empty or unordered intervals"
        if bool((same & (table.start[1:] < table.stop[:-1])).any()):
            return f"table {number}: intervals overlap"
    demands, node_of = difference.demands, np.tile(difference.topology.node_of, 2)  # of GPUs, then of host memories
    holders = holders_by_class(difference)
    owner, place = demands.wanters.owner, demands.wanters.item
    kept = contains(holders, demands.classes.owner[owner], place)
    bad = (holders.counts == 0)[demands.classes.owner]
    bad[owner[kept]] = True
    if bad.any():
        return f"a demand of table {int(demands.table[bad][0])} has no holder, or wants what it holds"
    mixed = np.flatnonzero(node_of[place] != demands.node[owner])
    if len(mixed):
        return f"a demand of table {int(demands.table[owner[mixed[0]]])} mixes nodes"
    return None


def _route_problem(routed: Routed) -> str | None:
    """Moves carry exactly the bound, and a relay follows what it relays."""
    moves = routed.moves
    moved = int(moves.num_bytes[moves.crosses].sum())
    if moved != routed.bound.moved_bytes + routed.foregone_bytes:
        return f"{moved} bytes routed, {routed.bound.moved_bytes} demanded"
    relay, before = moves.relays
    if bool((before >= relay).any()):
        return "a relay comes before what it relays"
    return None


def _schedule_problem(schedule: Schedule) -> str | None:
    relay, before = schedule.moves.relays
    bad = np.flatnonzero(~follows(schedule, before, relay))
    return f"move {int(relay[bad[0]])} relays in the wave in which it receives" if len(bad) else None
