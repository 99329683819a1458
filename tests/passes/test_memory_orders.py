"""The memory proof (one min-cut) against every order that a small DAG allows."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from passes.profiles import examples

from nereus.passes.check import worst_memory
from nereus.passes.dag import POST, RELEASE, Dag


def dag_of(acquired: list[int], released: list[int], edges: list[tuple[int, int]]) -> Dag:
    count = len(acquired)
    column = np.full(count, -1, dtype=np.int64)
    return Dag(
        kind=np.array([RELEASE if r else POST for r in released], dtype=np.int64),
        device=column,
        wave=column,
        item=column,
        space=np.array([0 if a or r else -1 for a, r in zip(acquired, released, strict=True)], dtype=np.int64),
        acquired=np.array(acquired, dtype=np.int64),
        released=np.array(released, dtype=np.int64),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        slice_edges=np.zeros((0, 2), dtype=np.int64),
    )


def most_by_enumeration(acquired: list[int], released: list[int], edges: list[tuple[int, int]]) -> int:
    """Walks every reachable state: an operation starts when its predecessors finished, and finishes at any later
    time; an acquire counts from its start, a release from its end."""
    count = len(acquired)
    before = [frozenset(a for a, b in edges if b == op) for op in range(count)]

    @cache
    def most(started: frozenset[int], finished: frozenset[int]) -> int:
        best = sum(acquired[o] for o in started) - sum(released[o] for o in finished)
        for op in range(count):
            if op not in started and before[op] <= finished:
                best = max(best, most(started | {op}, finished))
            elif op in started and op not in finished:
                best = max(best, most(started, finished | {op}))
        return best

    return most(frozenset(), frozenset())


@st.composite
def small_dags(draw: st.DrawFn) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    count = draw(st.integers(1, 7))
    acquired, released = [0] * count, [0] * count
    for op in range(count):
        amount = draw(st.integers(0, 6))
        (acquired if draw(st.booleans()) else released)[op] = amount
    pairs = list(itertools.combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(pairs), max_size=9, unique=True)) if pairs else []
    return acquired, released, edges


@examples(120)
@given(small_dags(), st.integers(0, 20))
def test_worst_memory_is_the_most_over_all_orders(
    case: tuple[list[int], list[int], list[tuple[int, int]]], base: int
) -> None:
    acquired, released, edges = case
    assert worst_memory(dag_of(*case), 0, base) == base + most_by_enumeration(acquired, released, edges)


def test_one_edge_more_or_less() -> None:
    """release 5 -> acquire 5 keeps the space level; without the edge both may lie there at once."""
    assert worst_memory(dag_of([0, 5], [5, 0], [(0, 1)]), 0, 5) == 5
    assert worst_memory(dag_of([0, 5], [5, 0], []), 0, 5) == 10
    # A release in another space, or behind the acquire, is no help.
    assert worst_memory(dag_of([5, 0], [0, 5], [(0, 1)]), 0, 5) == 10
