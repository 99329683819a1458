"""Several stages placed together, against every allowed placement of all of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from passes.oracle import State, Universe, allowed_placements, coordinate_of_rank
from passes.plans import ARCHS, WORKLOAD, pairs, stage
from passes.profiles import examples

from nereus.ir.cluster import Cluster, Node
from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.holdings import join_clusters
from nereus.ir.plan import ORDER_MEGATRON, ORDER_REPLICA, Model, Plan, Stage
from nereus.models.hardware import gpu_type
from nereus.passes.diff import diff
from nereus.passes.hold import hold
from nereus.passes.place import Place, Placed, pin

#: So slow that the bytes of tiny models take seconds.
NIC, PCIE, INTRA = 25e3, 100e3, 200e3


def slow_cluster(*sizes: int) -> Cluster:
    gpu = replace(
        gpu_type("h100-sxm-80gb"), intra_bytes_per_s=INTRA, intra_peer_bytes_per_s=INTRA, pcie_bytes_per_s=PCIE
    )
    return Cluster(
        nodes=tuple(
            Node(name=f"n{i}", gpu=gpu, num_gpus=n, host_mem_bytes=1 << 36, nic_bytes_per_s=NIC)
            for i, n in enumerate(sizes)
        )
    )


@dataclass(frozen=True)
class Trains:
    """Degrees of one train stage on GPUs ``first .. stop`` of the cluster."""

    model: str
    first: int
    stop: int
    tp: int = 1
    pp: int = 1
    order: str = ORDER_REPLICA


def plan(on: Cluster, *trains: Trains) -> Plan:
    models = tuple(Model(name=t.model, arch=ARCHS[0], source="tiny") for t in trains)
    stages = tuple(
        stage(m, "train", on.devices[t.first : t.stop], tp=t.tp, pp=t.pp, order=t.order)
        for m, t in zip(models, trains, strict=True)
    )
    return Plan(cluster=on, models=models, workload=WORKLOAD, stages=stages)


A, C = "actor", "critic"
CASES = {
    "both grow": (
        (2, 2),
        (Trains(A, 0, 2, pp=2), Trains(C, 0, 2, tp=2)),
        (Trains(A, 0, 4, pp=2), Trains(C, 0, 4, tp=2)),
    ),
    "swap halves": ((2, 2), (Trains(A, 0, 2), Trains(C, 2, 4, pp=2)), (Trains(A, 2, 4, pp=2), Trains(C, 0, 2))),
    "stages cross nodes": (
        (2, 2),
        (Trains(A, 0, 4, tp=2), Trains(C, 1, 3)),
        (Trains(A, 0, 4, pp=2, order=ORDER_MEGATRON), Trains(C, 0, 3, pp=3)),
    ),
    "uneven nodes": (
        (1, 3),
        (Trains(A, 0, 2, pp=2), Trains(C, 0, 1)),
        (Trains(A, 0, 4, pp=2), Trains(C, 1, 3, pp=2)),
    ),
    "one node": ((4,), (Trains(A, 0, 2, tp=2), Trains(C, 0, 2, pp=2)), (Trains(A, 0, 4, tp=4), Trains(C, 0, 4, pp=2))),
    "alone": ((2, 2), (Trains(A, 0, 4, pp=2),), (Trains(A, 0, 4, tp=2, pp=2),)),
}


def transfer_s(old: State, new: State) -> float:
    """Of the busiest port, whatever the routing. Trainers that keep masters make their weights themselves."""
    width = old.universe.width
    before = {place: mask for place, mask in old.places().items() if not place[1]}
    loads: dict[tuple[str, str], float] = {}

    def load(port: str, name: object, num_bytes: int, rate: float) -> None:
        key = port, str(name)
        loads[key] = loads.get(key, 0.0) + num_bytes / rate

    masters = {}
    for copy in new.copies:
        if copy.slot == "master":
            place = new.ranks[copy.stage][copy.rank]
            for ids in copy.tensors.values():
                masters.setdefault(place, []).append(new.universe.weight_of[ids])
    lacks = {}
    for place, mask in new.places().items():
        lacking = mask & ~before.get(place, np.zeros_like(mask))
        for ids in masters.get(place[0], []):
            lacking[ids] = False
        lacks[place[0]] = lacking
        load("in", place[0], int(width[lacking].sum()), INTRA)
    nodes = {device.node for device in old.plan.cluster.devices}
    held = {
        n: np.logical_or.reduce([m for p, m in before.items() if p[0].node == n] or [np.zeros_like(mask)])
        for n in nodes
    }
    enters = {
        n: np.logical_or.reduce([m for d, m in lacks.items() if d.node == n] or [np.zeros_like(mask)]) & ~held[n]
        for n in nodes
    }
    somewhere = np.logical_or.reduce(list(enters.values()))
    for n in nodes:
        load("nic in", n, int(width[enters[n]].sum()), NIC)
        others = np.logical_or.reduce([h for m, h in held.items() if m != n] or [np.zeros_like(mask)])
        load("nic out", n, int(width[held[n] & ~others & somewhere].sum()), NIC)
    count = np.sum([m.astype(int) for m in before.values()], axis=0)
    for place, own in before.items():
        load("out", place[0], int(width[own & (count == 1) & somewhere].sum()), PCIE)
    return max(loads.values())


def step_s(one: Stage, on: Plan) -> float:
    """Of the busiest NIC: pipeline edges and rings of one stage."""
    arch, work = on.model(one.model).arch, on.workload
    params = sum(t.numel for s in hold(on).sets if s.owner == one.name for t in s.tensors)
    coords = coordinate_of_rank(one)
    where = {(c["pp"], c["dp"], c["cp"], c["tp"]): one.ranks[r].node for r, c in enumerate(coords)}
    out = dict.fromkeys((d.node for d in on.cluster.devices), 0.0)
    for pp, dp, cp, tp in where:
        if tp == 0 and pp + 1 < one.pp:
            ends = where[pp, dp, cp, 0], where[pp + 1, dp, cp, 0]
            if ends[0] != ends[1]:
                for end in ends:
                    out[end] += 2 * work.seq_len * arch.hidden * work.num_samples / one.dp
        if dp == 0 and one.dp > 1:
            visited = {where[pp, i, cp, tp] for i in range(one.dp)}
            for n in visited if len(visited) > 1 else ():
                out[n] += 2 * (one.dp - 1) / one.dp * 4 * params / (one.tp * one.pp)
    return max(out.values()) / NIC


@pytest.mark.parametrize("horizon", [1, 30])
@pytest.mark.parametrize("name", CASES)
def test_placement_of_all_stages_is_the_best_of_all_allowed(name: str, horizon: int) -> None:
    sizes, before, after = CASES[name]
    old, new = plan(slow_cluster(*sizes), *before), plan(slow_cluster(*sizes), *after)
    placed = place(old, new, horizon)
    universe = Universe(old, new)
    start = State(pin(old), universe)

    def cost(stages: tuple[Stage, ...]) -> float:
        chosen = replace(new, stages=stages)
        return transfer_s(start, State(chosen, universe)) + horizon * sum(step_s(s, chosen) for s in stages)

    found = cost(placed.plan.stages)
    assert found == pytest.approx(placed.together.seconds, abs=1e-6)
    best = min(
        cost(tuple(replace(s, place=devices) for s, devices in zip(new.stages, chosen, strict=True)))
        for chosen in itertools.product(*(list(allowed_placements(s)) for s in new.stages))
    )
    assert placed.together.bound_s <= best + 1e-6
    assert found == pytest.approx(best, abs=1e-5)
    assert placed.together.exact


def place(old: Plan, new: Plan, horizon: int = 100) -> Placed:
    old = pin(old)
    topology = join_clusters(old.cluster, new.cluster)
    return Place(horizon_steps=horizon).apply(old, hold(old), new, topology)


@examples(60)
@given(pairs(rich=True), st.sampled_from([1, 100]))
def test_atoms_of_the_placement_are_those_of_the_diff(pair: tuple[Plan, Plan], horizon: int) -> None:
    old, new = pair
    try:
        placed = place(old, new, horizon)
    except (DiagnosticError, ValueError):
        return
    old = pin(old)
    topology = join_clusters(old.cluster, new.cluster)
    before, after = hold(old), hold(placed.plan)
    anew, reused = diff(before, after, topology), diff(before, after, topology, known=placed.models)
    assert reused.holders == anew.holders and reused.wanters == anew.wanters
    assert (reused.kept_bytes, reused.derived_bytes, reused.lost) == (anew.kept_bytes, anew.derived_bytes, anew.lost)
    for one, other in zip(reused.tables, anew.tables, strict=True):
        assert one.new_groups == other.new_groups
        assert sorted(one.derived) == sorted(other.derived)
        assert all(np.array_equal(one.derived[p], other.derived[p]) for p in one.derived)
    for mine, theirs in zip(reused.demands, anew.demands, strict=True):
        assert (mine.table, mine.cls, mine.node, mine.wanters) == (
            theirs.table,
            theirs.cls,
            theirs.node,
            theirs.wanters,
        )
        assert np.array_equal(mine.intervals, theirs.intervals)
