"""The flow programme written out: a unit flow per class and wanter on every edge, as in a textbook.

Nothing here imports the passes beyond ``Links`` (the rates that both must agree on) and ``Flow`` (a record).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from ortools.linear_solver import pywraplp

from nereus.passes.commodities import Flow
from nereus.passes.links import Links


def port_loads(links: Links, src: int, dst: int) -> dict[tuple[str, int], float]:
    """Port -> seconds per byte from ``src`` to ``dst``."""
    _, out_rate, in_rate, nic_rate = links.rates(src, dst)
    devices = links.num_devices
    loads = {("gpu out", src % devices): out_rate, ("gpu in", dst % devices): in_rate}
    if nic_rate:
        loads["nic out", links.rail_number(src)] = nic_rate
        loads["nic in", links.rail_number(dst)] = links.rail_s(dst)
    return loads


def edges(flow: Flow) -> list[tuple[int, int]]:
    return [(p, q) for p in (*flow.holders, *flow.wanters) for q in flow.wanters if p != q]


def flow_lp(flows: Sequence[Flow], links: Links, *, per_wanter: bool = True) -> float:
    """Least time of the busiest port. ``per_wanter=False``: the wrong programme, in which a wanter only has to take
    in, from anyone."""
    solver = pywraplp.Solver("oracle", pywraplp.Solver.GLOP_LINEAR_PROGRAMMING)
    unit = max(f.num_bytes for f in flows) * max(*links.rail, *links.pcie)
    time = solver.NumVar(0, solver.infinity(), "t")
    loads: dict[tuple[str, int], list[object]] = {}
    for flow in flows:
        x = {edge: solver.NumVar(0, solver.infinity(), "") for edge in edges(flow)}
        for edge, used in x.items():
            for port, rate in port_loads(links, *edge).items():
                loads.setdefault(port, []).append(used * (rate * flow.num_bytes / unit))
        for wanter in flow.wanters:
            if not per_wanter:
                solver.Add(sum(used for (_, q), used in x.items() if q == wanter) >= 1)
                continue
            f = {edge: solver.NumVar(0, solver.infinity(), "") for edge in x}
            for edge, amount in f.items():
                solver.Add(amount <= x[edge])
            for node in flow.wanters:
                into = sum(a for (_, q), a in f.items() if q == node)
                out = sum(a for (p, _), a in f.items() if p == node)
                solver.Add(into - out == (1 if node == wanter else 0))
    for terms in loads.values():
        solver.Add(sum(terms) <= time)
    solver.Minimize(time)
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return float(time.solution_value() * unit)


def trees(flow: Flow) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to give each wanter one source so that all hang on a holder."""
    options = [[p for p in (*flow.holders, *flow.wanters) if p != q] for q in flow.wanters]
    for sources in itertools.product(*options):
        parent = dict(zip(flow.wanters, sources, strict=True))
        if all(_reaches(q, parent) for q in flow.wanters):
            yield tuple((src, dst) for dst, src in parent.items())


def _reaches(place: int, parent: dict[int, int]) -> bool:
    seen = set()
    while place in parent:
        if place in seen:
            return False
        seen.add(place)
        place = parent[place]
    return True


def best_whole_routing(flows: Sequence[Flow], links: Links) -> float:
    """Busiest port of the best routing that sends every flow whole along one tree; by enumeration."""
    names: dict[tuple[str, int], int] = {}
    per_flow = []
    for flow in flows:
        vectors = []
        for tree in trees(flow):
            vector: dict[int, float] = {}
            for edge in tree:
                for port, rate in port_loads(links, *edge).items():
                    number = names.setdefault(port, len(names))
                    vector[number] = vector.get(number, 0.0) + rate * flow.num_bytes
            vectors.append(vector)
        per_flow.append(vectors)
    sums = np.zeros((1, len(names)))
    for vectors in per_flow:
        rows = np.zeros((len(vectors), len(names)))
        for row, vector in enumerate(vectors):
            rows[row, list(vector)] = list(vector.values())
        sums = (sums[:, None, :] + rows[None, :, :]).reshape(-1, len(names))
    return float(sums.max(axis=1).min())
