"""Lists and sparse tables against sets and dictionaries; the two assignments against all permutations."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from passes.profiles import examples

from nereus.passes import lists as module
from nereus.passes.lists import Lists, Sparse, combinations, common, contains, join
from nereus.passes.place_assign import NodeValues, assign_all, most_valuable

SETS = st.lists(st.frozensets(st.integers(0, 6)), max_size=7)


def lists_of(sets: list[frozenset[int]]) -> Lists:
    return Lists.of_tuples([tuple(sorted(s)) for s in sets])


@examples(100)
@given(SETS, SETS)
def test_lists_are_sets(left: list[frozenset[int]], right: list[frozenset[int]]) -> None:
    one, other = lists_of(left), lists_of(right)
    weights = np.array([3, 5, 7, 11, 13, 17, 19], dtype=np.int64)
    assert one.sums(weights).tolist() == [sum(int(weights[i]) for i in s) for s in left]
    assert [set(t) for t in _back(one.inverse(7))] == [{i for i, s in enumerate(left) if x in s} for x in range(7)]
    number, contents = combinations(one)
    assert [frozenset(_back(contents)[n]) for n in number.tolist()] == left
    assert len(contents) == len(set(left))
    pairs = np.array(list(itertools.product(range(len(left)), range(len(right)))), dtype=np.int64).reshape(-1, 2)
    expected = [sum(int(weights[i]) for i in left[a] & right[b]) for a, b in pairs.tolist()]
    assert common(one, other, pairs[:, 0], pairs[:, 1], weights).tolist() == expected
    assert join(one, other, weights).at(pairs[:, 0], pairs[:, 1]).tolist() == expected
    asked = np.array(list(itertools.product(range(len(left)), range(7))), dtype=np.int64).reshape(-1, 2)
    assert contains(one, asked[:, 0], asked[:, 1]).tolist() == [x in left[a] for a, x in asked.tolist()]


def _back(lists: Lists) -> list[tuple[int, ...]]:
    return [tuple(lists.item[a:b].tolist()) for a, b in itertools.pairwise(lists.first.tolist())]


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 9)), max_size=12), st.booleans())
def test_sparse_tables_are_dictionaries(entries: list[tuple[int, int, int]], dense: bool) -> None:
    before, module.DENSE_ENTRIES = module.DENSE_ENTRIES, 1 << 20 if dense else 0
    try:
        row, col, value = (np.array([e[i] for e in entries], dtype=np.int64) for i in range(3))
        table = Sparse.summing(4, 5, row, col, value)
    finally:
        module.DENSE_ENTRIES = before
    at = table.at(np.arange(4)[:, None], np.arange(5)[None, :])
    for r, c in itertools.product(range(4), range(5)):
        assert at[r, c] == sum(v for a, b, v in entries if (a, b) == (r, c))


@examples(40)
@given(st.integers(1, 4), st.integers(3, 5), st.randoms(use_true_random=False))
def test_devices_in_nodes_are_assigned_best(size: int, nodes: int, random: object) -> None:
    values = np.array(
        [[[random.randint(0, 9) for _ in range(size)] for _ in range(size)] for _ in range(nodes)],  # type: ignore[attr-defined]
        dtype=np.int64,
    )
    chosen = assign_all(values)
    for matrix, devices in zip(values, chosen, strict=True):
        assert sorted(devices.tolist()) == list(range(size))
        best = max(sum(matrix[r, p[r]] for r in range(size)) for p in itertools.permutations(range(size)))
        assert matrix[np.arange(size), devices].sum() == best


@examples(60)
@given(st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_units_choose_nodes_best(units: int, nodes: int, random: object) -> None:
    draw = random.randint  # type: ignore[attr-defined]
    kind = np.array([draw(0, 1) for _ in range(nodes)], dtype=np.int64)
    base = np.array([[draw(0, 9) for _ in range(2)] for _ in range(units)], dtype=np.int64)
    places = [(u, n) for u in range(units) for n in range(nodes) if draw(0, 2) == 0]
    values = NodeValues(
        base=base,
        kind=kind,
        unit=np.array([u for u, _ in places], dtype=np.int64),
        node=np.array([n for _, n in places], dtype=np.int64),
        excess=np.array([draw(1, 9) for _ in places], dtype=np.int64),
    )
    room = np.array([draw(0, 2) for _ in range(nodes)], dtype=np.int64)
    chosen = most_valuable(values, room, np.zeros(units, dtype=np.int64))
    assert (np.bincount(chosen[chosen >= 0], minlength=nodes) <= room).all()
    everywhere = values.at(np.arange(units)[:, None], np.arange(nodes)[None, :])

    def worth(nodes_of: tuple[int, ...]) -> int:
        return sum(int(everywhere[u, n]) for u, n in enumerate(nodes_of) if n >= 0)

    fitting = min(units, int(room.sum()))
    best = max(
        worth(way)
        for way in itertools.product(range(-1, nodes), repeat=units)
        if sum(n >= 0 for n in way) == fitting and all(way.count(n) <= room[n] for n in range(nodes))
    )
    assert worth(tuple(chosen.tolist())) == best
