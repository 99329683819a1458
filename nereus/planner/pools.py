"""The stages of a plan on other nodes: fewer after a loss, more after a growth.

Every process group keeps its share of the pool: what covered the nodes a to b of N covers a * M / N to b * M / N of M,
on the same GPUs of each node, or on all of each where it had all. Degrees stay where they are legal there; else the
nearest legal ones are taken, so that a search has a plan to start from. What is best there is the search's to find.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from nereus.ir.cluster import Device
from nereus.ir.holdings import join_clusters
from nereus.ir.plan import Plan, Stage
from nereus.models.batch import legal_micro_batches
from nereus.models.memory.neighbours import at_degrees, members
from nereus.passes.diff import diff
from nereus.passes.hold import hold


def nodes_of(plan: Plan) -> frozenset[str]:
    """Nodes that some stage uses."""
    return frozenset(device.node for stage in plan.stages for device in stage.devices)


def worth_trying(plan: Plan, names: Collection[str]) -> tuple[frozenset[str], ...]:
    """Pools within ``names``, the whole last: where GPUs are unlike the slowest sets the pace of a stage, so that fewer
    and faster ones may be the better."""
    speed = {node.name: node.gpu.bf16_tflops for node in plan.cluster.nodes if node.name in names}
    steps = sorted(set(speed.values()), reverse=True)
    return tuple(frozenset(name for name in speed if speed[name] >= least) for least in steps) or (frozenset(),)


def survives(old: Plan, new: Plan) -> bool:
    """Whether all state that ``new`` wants of ``old`` is on nodes that its cluster still has."""
    return not diff(hold(old), hold(new), join_clusters(old.cluster, new.cluster)).lost


def on_nodes(plan: Plan, names: Collection[str], *, lost: Collection[str] = ()) -> Plan | None:
    """``plan``, whose cluster lists every node that there may be, on the nodes ``names``; None where no legal degrees
    exist there. ``lost``: nodes that are gone, so that nothing on them is a source."""
    pool = [node.name for node in plan.cluster.nodes if node.name in names]
    if not pool:
        return None
    order = [node.name for node in plan.cluster.nodes if node.name in nodes_of(plan)]
    num_gpus = {node.name: node.num_gpus for node in plan.cluster.nodes}
    moved = plan
    for owner in plan.owners():
        devices = _moved(owner.devices, order, pool, num_gpus)
        if any(device.index >= num_gpus[device.node] for device in devices):
            return None
        mine = {stage.name for stage in members(plan, owner)}
        stages = (replace(s, devices=devices, place=None) if s.name in mine else s for s in moved.stages)
        placed = _legal(replace(moved, stages=tuple(stages)), owner.name)
        if placed is None:
            return None
        moved = placed
    cluster = replace(
        plan.cluster,
        nodes=tuple(node for node in plan.cluster.nodes if node.name not in lost),
        lost=tuple(dict.fromkeys((*plan.cluster.lost, *(name for name in num_gpus if name in lost)))),
    )
    return replace(moved, cluster=cluster)


def on_most_nodes(plan: Plan, names: Collection[str], *, lost: Collection[str] = ()) -> Plan | None:
    """On as many of the first of ``names`` as legal degrees exist for: a batch of 128 does not divide over 24 GPUs."""
    pool = [node.name for node in plan.cluster.nodes if node.name in names]
    for number in range(len(pool), 0, -1):
        found = on_nodes(plan, pool[:number], lost=lost)
        if found is not None:
            return found
    return None


def _moved(
    devices: Sequence[Device], order: Sequence[str], pool: Sequence[str], num_gpus: Mapping[str, int]
) -> tuple[Device, ...]:
    places = sorted(order.index(name) for name in {device.node for device in devices})
    first, last = places[0], places[-1] + 1
    start = min(first * len(pool) // len(order), len(pool) - 1)
    end = max(start + 1, last * len(pool) // len(order))
    indexes = sorted({device.index for device in devices})
    if len(devices) == sum(num_gpus[name] for name in order[first:last]):  # all of each node, however many that are
        return tuple(Device(name, index) for name in pool[start:end] for index in range(num_gpus[name]))
    return tuple(Device(name, index) for name in pool[start:end] for index in indexes)


def _legal(plan: Plan, name: str) -> Plan | None:
    """With the degrees nearest to those that the owner has; micro-batches as large as they were, where they divide."""
    owner = plan.stage(name)
    for tp, pp in _nearest(plan, owner):
        dp, left = divmod(len(owner.devices), tp * pp * owner.cp)
        if left:
            continue
        fitted = _with_micro_batches(plan, owner, dp)
        found = None if fitted is None else at_degrees(fitted, fitted.stage(name), tp=tp, pp=pp, ep=owner.ep)
        if fitted is not None and found is not None:
            return found.change(fitted)
    return None


def _nearest(plan: Plan, owner: Stage) -> Iterator[tuple[int, int]]:
    inside = min(sum(d.node == node for d in owner.devices) for node in {d.node for d in owner.devices})
    most = min(len(owner.devices), plan.model(owner.model).arch.num_layers)
    degrees = [(tp, pp) for tp in range(1, inside + 1) if inside % tp == 0 for pp in range(1, most + 1)]
    far = {(tp, pp): abs(math.log(tp / owner.tp)) + abs(math.log(pp / owner.pp)) for tp, pp in degrees}
    yield from sorted(degrees, key=lambda degree: (far[degree], degree))


def _with_micro_batches(plan: Plan, owner: Stage, dp: int) -> Plan | None:
    stages = []
    mine = {stage.name for stage in members(plan, owner)}
    for stage in plan.stages:
        if stage.name in mine and stage.is_train and stage.max_tokens is None:
            legal = legal_micro_batches(plan.workload.mini_batch, dp, limit=stage.micro_batch)
            if not legal:
                return None
            stage = replace(stage, micro_batch=legal[-1])
        stages.append(stage)
    return replace(plan, stages=tuple(stages))
