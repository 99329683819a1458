"""Small cases: every way to give the groups of all stages to nodes is compared.

Node by node, what enters and leaves and what a step costs follow from the groups alone. Only how evenly the devices
inside a node fill depends on more, and there is a bound on that; so the least over all ways is a bound, and exact
where the best placement found reaches it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from math import comb

import numpy as np

from nereus.ir.layout import IntArray
from nereus.passes.place_bounds import wanted_bytes
from nereus.passes.place_joint import Joint, Option
from nereus.passes.place_stage import PlacedStage

#: Ways for one stage, and for all together.
MOST_WAYS = 128
MOST_TOGETHER = 512


def search(
    joint: Joint, stages: Mapping[str, PlacedStage], kept: Mapping[str, Option], device_s: float
) -> tuple[dict[str, Option], float] | None:
    """(the best of all ways, no placement needs fewer seconds), or None where there are too many.

    ``kept``: stages that stay; ``device_s``: seconds that the fullest device needs under any placement.
    """
    total = 1
    for stage in stages.values():
        ways = num_ways(stage)
        total *= ways
        if not 0 < ways <= MOST_WAYS or total > MOST_TOGETHER:
            return None
    alone = len(stages) == 1 and not kept  # then its fullest device can be evened out exactly
    options = [
        [joint.option(stage, "exact", stage.inside(nodes)) for nodes in node_assignments(stage)]
        for stage in stages.values()
    ]
    best: tuple[tuple[float, int], dict[str, Option]] | None = None
    bound = float("inf")
    for chosen in itertools.product(*options):
        found = {**kept, **dict(zip(stages, chosen, strict=True))}
        cost = joint.cost(found)
        if alone and cost.transfer_s > joint.node_s(cost.loads):
            found = {name: _evened(joint, stage, chosen[0]) for name, stage in stages.items()}
            if joint.cost(found).key < cost.key:
                cost = joint.cost(found)
            else:
                found = dict.fromkeys(stages, chosen[0])
        bound = min(bound, max(joint.node_s(cost.loads), cost.transfer_s if alone else device_s) + cost.added_s)
        if best is None or cost.key < best[0]:
            best = cost.key, found
    assert best is not None
    return best[1], bound


def _evened(joint: Joint, stage: PlacedStage, option: Option) -> Option:
    groups = stage.groups_of(option.rows)
    assert groups is not None
    others = np.zeros(len(stage.devices), dtype=np.int64)
    return joint.option(stage, "exact", stage.even(groups, wanted_bytes(stage), others))


def num_ways(stage: PlacedStage) -> int:
    """How many ways there are to give a stage's groups to nodes; 0 where groups span nodes."""
    if not stage.groups_fit:
        return 0
    left, ways = stage.num_groups, 1
    for room in stage.slots.tolist():
        ways *= comb(left, room)
        left -= room
    return ways


def node_assignments(stage: PlacedStage) -> Iterator[IntArray]:
    """Node of every group, in every way that fills all nodes."""

    def fill(node: int, free: tuple[int, ...], chosen: IntArray) -> Iterator[IntArray]:
        if node == len(stage.slots):
            yield chosen
            return
        for groups in itertools.combinations(free, int(stage.slots[node])):
            there = chosen.copy()
            there[list(groups)] = node
            yield from fill(node + 1, tuple(g for g in free if g not in groups), there)

    yield from fill(0, tuple(range(stage.num_groups)), np.full(stage.num_groups, -1, dtype=np.int64))
