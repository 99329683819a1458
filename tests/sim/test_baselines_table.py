"""The published comparison of direct moves with the paper's primitives: bytes, ratio and peak, to two digits.

A grid of 16 layers x 16 tensor ranks of which every parameter is sharded by both, 8 GPUs per node; M is the state of
the model. "via T_sub" chooses the GPUs that it frees itself, so where the pool shrinks the new plan lies on nodes that
whole units of its Split lie on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from passes.plans import WORKLOAD, cluster, stage

from nereus.ir.arch import Arch
from nereus.ir.cluster import Device
from nereus.ir.holdings import join_clusters
from nereus.ir.plan import Model, Plan
from nereus.models.tensors import num_params
from nereus.passes.hold import hold
from nereus.passes.place import Place, pin
from nereus.sim.baselines import build_problem
from nereus.sim.baselines.primitives import Primitives

# Norms, which every tensor rank holds, and the embedding are a ten-thousandth of it.
GRID = Arch(
    family="llama",
    num_layers=16,
    hidden=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    ffn=8192,
    vocab=16,
)
MODEL = Model(name="actor", arch=GRID, source="grid", frozen=True)
M = 2 * num_params(GRID)

Degrees = tuple[int, int, int]  # tp, pp, dp


@dataclass(frozen=True)
class Row:
    old: Degrees
    new: Degrees
    direct: float
    placed: float
    primitives: float
    peak: float | None
    nodes: tuple[int, ...] | None = None  # of the new plan, for the primitives


TABLE = (
    Row((2, 2, 4), (4, 1, 4), 3.00, 2.00, 4.00, 3.0),
    Row((4, 8, 1), (8, 2, 1), 0.97, 0.88, 3.00, 2.5, nodes=(0, 2)),
    Row((1, 4, 2), (2, 4, 2), 1.75, 1.00, 2.00, None),
    Row((2, 2, 4), (4, 2, 2), 1.50, 0.00, 0.00, None),
    Row((8, 2, 2), (4, 4, 2), 1.75, 1.00, 2.00, 3.0),
    Row((2, 4, 4), (8, 1, 4), 3.50, 3.00, 12.0, 5.0),
    Row((4, 4, 2), (8, 1, 4), 3.75, 3.00, 6.00, 2.5),
)


def _plan(degrees: Degrees, num_gpus: int, nodes: tuple[int, ...] | None = None) -> Plan:
    on = cluster(*[8] * (num_gpus // 8))
    devices: tuple[Device, ...] = on.devices[: prod(degrees)]
    if nodes is not None:
        devices = tuple(d for number in nodes for d in on.nodes[number].devices)
    tp, pp, _ = degrees
    one = stage(MODEL, "infer", devices, tp=tp, pp=pp)
    return Plan(cluster=on, models=(MODEL,), workload=WORKLOAD, stages=(one,))


@pytest.mark.parametrize("row", TABLE, ids=lambda r: f"{r.old}->{r.new}")
def test_row(row: Row) -> None:
    num_gpus = max(prod(row.old), prod(row.new))
    old, new = pin(_plan(row.old, num_gpus)), _plan(row.new, num_gpus)
    listed = build_problem(old, new)
    direct = sum(demand.num_bytes * len(demand.wanters) for demand in listed.diff.demands)
    assert direct / M == pytest.approx(row.direct, abs=0.006)
    placed = Place().apply(old, hold(old), new, join_clusters(old.cluster, new.cluster))
    assert placed.choices[0].best_moved_bytes / M == pytest.approx(row.placed, abs=0.006)

    problem = build_problem(old, _plan(row.new, num_gpus, row.nodes))
    answer = Primitives().solve(problem)
    assert answer.fails is None
    assert answer.moved_bytes / M == pytest.approx(row.primitives, rel=0.002, abs=0.006)
    if row.peak is not None:
        state = answer.peak_bytes - problem.base_bytes()
        endpoint = M / min(row.old[0] * row.old[1], row.new[0] * row.new[1])
        assert int(np.max(state)) / endpoint == pytest.approx(row.peak, abs=0.05)
