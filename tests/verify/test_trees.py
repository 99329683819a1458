"""Cheapest deliveries against all deliveries there are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.verify.trees import ROOT, Way, cheapest


def by_hand(component: list[int], ways: tuple[Way, ...]) -> float:
    """Every choice of a giver for every vertex that is no root, without circles."""
    vertices = sorted(set(component) - {ROOT})
    rows = range(len(component))
    edge = {
        (a, b): min(
            (
                w.give[i] + w.take[j]
                for w in ways
                for i in rows
                for j in rows
                if component[i] == a and component[j] == b and w.scope[i] == w.scope[j]
            ),
            default=np.inf,
        )
        for a in (ROOT, *vertices)
        for b in vertices
        if a != b
    }
    best = np.inf
    for parents in product((ROOT, *vertices), repeat=len(vertices)):
        parent = dict(zip(vertices, parents, strict=True))
        if any(a == b for a, b in parent.items()):
            continue
        for vertex in vertices:
            seen = set()
            while vertex != ROOT and vertex not in seen:
                seen.add(vertex)
                vertex = parent[vertex]
            if vertex != ROOT:
                break
        else:
            best = min(best, sum(edge[b, a] for a, b in parent.items()))
    return best


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_delivery_is_cheaper(data: st.DataObject) -> None:
    """Two graphs at once; few different costs, so that there are ties, or any."""
    components, graphs = [], []
    for graph in range(2):
        size = data.draw(st.integers(2, 5))
        # Several roots, and vertices of more than one row.
        found = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        components.append([ROOT, *(ROOT if c == 3 and data.draw(st.booleans()) else 10 * graph + c for c in found)])
        graphs += [graph] * (size + 1)
    rows = len(graphs)
    numbers = st.integers(0, 3) if data.draw(st.booleans()) else st.integers(0, 1000)
    ways = []
    for reach in (1, 2):
        scope = [10 * g + data.draw(st.integers(0, reach - 1)) for g in graphs]
        give, take = (
            np.array([np.inf if data.draw(st.integers(0, 9)) == 0 else float(data.draw(numbers)) for _ in range(rows)])
            for _ in range(2)
        )
        ways.append(Way(np.array(scope), give, take))
    found_costs = cheapest(np.array(graphs), np.array([c for one in components for c in one]), tuple(ways), 2)
    first = len(components[0])
    for graph, (lo, hi) in enumerate(((0, first), (first, rows))):
        part = tuple(Way(w.scope[lo:hi], w.give[lo:hi], w.take[lo:hi]) for w in ways)
        assert found_costs[graph] == pytest.approx(by_hand(components[graph], part))


def test_many_who_ask_the_same() -> None:
    """One who has it and asks much, a thousand who ask little: it leaves the first once."""
    rows = 1001
    give = np.array([100.0, *[1.0] * 1000])
    way = Way(np.zeros(rows, dtype=np.int64), give, np.ones(rows))
    component = np.array([ROOT, *range(1000)])
    assert cheapest(np.zeros(rows, dtype=np.int64), component, (way,), 1).tolist() == [100 + 999 + 1000]
