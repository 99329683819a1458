"""Tokens against the minimum cut on random DAGs, against every order on small ones, and planted faults against both."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from passes.cycles import Case, cycle
from passes.execute import pipeline
from passes.profiles import examples
from passes.test_memory_orders import dag_of, most_by_enumeration, small_dags

from nereus.passes.check import worst_memory
from nereus.passes.compiled import Transition
from nereus.passes.dag import Dag
from nereus.passes.tokens import INITIAL, Short, Tokens, assign_tokens, check_tokens, most_by_tokens, with_tokens

Parts = tuple[list[int], list[int], list[tuple[int, int]]]


def free(amount: int, spaces: int = 1) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.full(spaces, amount, dtype=np.int64)


def edges_of(dag: Dag) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in dag.edges]


def one_after_the_other(acquired: list[int], released: list[int]) -> int:
    """Most bytes beyond the start if the operations run in their numbered order."""
    held = most = 0
    for acquire, release in zip(acquired, released, strict=True):
        most = max(most, held + acquire)
        held += acquire - release
    return most


@examples(150)
@given(small_dags(), st.integers(0, 12))
def test_against_every_order_of_small_dags(case: Parts, room: int) -> None:
    acquired, released, _ = case
    dag = dag_of(*case)
    found = assign_tokens(dag, free(room))
    if isinstance(found, Short):
        assert one_after_the_other(acquired, released) == room + found.num_bytes > room
        return
    safe = with_tokens(dag, found)
    assert check_tokens(safe, found, free(room)) is None
    assert (safe.edges[:, 0] < safe.edges[:, 1]).all()
    assert most_by_enumeration(acquired, released, edges_of(safe)) <= room
    # A DAG that is safe as it is gets no edge that it does not imply, and one that is not gets some.
    assert (most_by_enumeration(*case) <= room) == (len(found.added) == 0)


@st.composite
def larger_dags(draw: st.DrawFn) -> tuple[Dag, int]:
    """Up to 40 operations on up to 3 spaces, with any upward edges."""
    count = draw(st.integers(2, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spaces = draw(st.integers(1, 3))
    amount = rng.integers(0, 50, count)
    takes = rng.random(count) < 0.55
    pairs = np.array(list(itertools.combinations(range(count), 2)), dtype=np.int64)
    chosen = pairs[rng.random(len(pairs)) < rng.choice([0.02, 0.08, 0.2])]
    dag = dag_of(np.where(takes, amount, 0).tolist(), np.where(takes, 0, amount).tolist(), [])
    return replace(dag, edges=chosen, space=np.where(amount > 0, rng.integers(0, spaces, count), -1)), spaces


@examples(150)
@given(larger_dags(), st.integers(0, 300))
def test_against_the_minimum_cut(case: tuple[Dag, int], room: int) -> None:
    dag, spaces = case
    found = assign_tokens(dag, free(room, spaces))
    worst = [worst_memory(dag, space, 0) for space in range(spaces)]
    if isinstance(found, Short):
        assert worst[found.space] > room
        return
    safe = with_tokens(dag, found)
    assert check_tokens(safe, found, free(room, spaces)) is None
    assert all(worst_memory(safe, space, 0) <= room for space in range(spaces))
    assert (max(worst) <= room) == (len(found.added) == 0)


@examples(80)
@given(larger_dags(), st.integers(0, 300), st.integers(0, 10**6))
def test_planted_faults(case: tuple[Dag, int], room: int, pick: int) -> None:
    dag, spaces = case
    found = assign_tokens(dag, free(room, spaces))
    assume(isinstance(found, Tokens) and len(found.uses))
    assert isinstance(found, Tokens)
    safe = with_tokens(dag, found)
    row = pick % len(found.uses)
    space, producer, taker, num_bytes = found.uses[row].tolist()

    def changed(**fields: int) -> Tokens:
        uses = found.uses.copy()
        for name, value in fields.items():
            uses[row, ("space", "producer", "taker", "num_bytes").index(name)] = value
        return replace(found, uses=uses)

    assert check_tokens(safe, changed(num_bytes=num_bytes + 1), free(room, spaces))
    assert check_tokens(safe, replace(found, uses=np.delete(found.uses, row, axis=0)), free(room, spaces))
    more = replace(safe, acquired=safe.acquired + (np.arange(dag.num_ops) == taker))
    assert check_tokens(more, found, free(room, spaces))
    if producer == INITIAL:
        given_first = int(found.uses[(found.uses[:, 0] == space) & (found.uses[:, 1] == INITIAL), 3].sum())
        assert check_tokens(safe, found, free(given_first - 1, spaces))
    else:
        there = (safe.edges == (producer, taker)).all(axis=1)
        assert check_tokens(replace(safe, edges=safe.edges[~there]), found, free(room, spaces))


@examples(80)
@given(larger_dags())
def test_what_tokens_prove_is_never_below_the_minimum_cut(case: tuple[Dag, int]) -> None:
    dag, spaces = case
    most = most_by_tokens(dag, spaces)
    for space in range(spaces if most is not None else 0):
        assert most is not None and most[space] >= worst_memory(dag, space, 0)


@examples(60)
@given(larger_dags(), st.integers(0, 300))
def test_both_proofs_fail_without_the_edges_that_were_added(case: tuple[Dag, int], room: int) -> None:
    dag, spaces = case
    found = assign_tokens(dag, free(room, spaces))
    assume(isinstance(found, Tokens) and len(found.added))
    assert isinstance(found, Tokens)
    assert check_tokens(dag, found, free(room, spaces))
    assert max(worst_memory(dag, space, 0) for space in range(spaces)) > room
    # One byte less than what the worst state holds.
    safe = with_tokens(dag, found)
    for space in range(spaces):
        less = free(room, spaces)
        less[space] = worst_memory(safe, space, 0) - 1
        if less[space] >= 0:
            assert check_tokens(safe, found, less) or len(assign(safe, less).added)


def assign(dag: Dag, room: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tokens:
    """What an assignment would have to add; a fault where there is none counts as one edge."""
    found = assign_tokens(dag, room)
    return found if isinstance(found, Tokens) else Tokens(uses=np.zeros((0, 4)), added=np.ones((1, 2), dtype=np.int64))


@pytest.mark.parametrize("host", [0, 1000])
def test_tight_transitions_have_tokens_without_new_edges(host: int) -> None:
    case = Case.of(cycle(3, group=2, settings=({"tp": 2}, {"pp": 2})), pipeline(400, 40, 600))
    done = case.tight(case.within(0 if host else case.largest, host_spare=host))
    assert isinstance(done, Transition)
    room = done.memory.capacity - done.memory.tight_base
    found = assign_tokens(done.dag, room)
    assert isinstance(found, Tokens) and len(found.uses) and not len(found.added)
    assert check_tokens(with_tokens(done.dag, found), found, room) is None
    # A rank's waves follow each other: what tokens prove is exactly the worst state.
    most = most_by_tokens(done.dag, len(room))
    assert most is not None
    assert [worst_memory(done.dag, space, 0) for space in range(done.topology.num_devices)] == most[
        : done.topology.num_devices
    ].tolist()
