"""The verifier itself: every planted fault is caught, by the check whose business it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from passes.cycles import findings
from passes.execute import pipeline
from passes.plans import cluster, trainer

from nereus.ir.intervals import Intervals
from nereus.ir.moves import Moves
from nereus.ir.plan import Plan
from nereus.ir.schedule import Schedule
from nereus.ir.transition import INTER, LOCAL, Move
from nereus.passes import check
from nereus.passes.compiled import Transition
from nereus.passes.dag import VERIFY
from nereus.passes.pipeline import compile_transition


def pair() -> tuple[Plan, Plan]:
    """One node holds everything; two others take it in, relaying to each other."""
    on = cluster(4, 4, 4)
    old = trainer(on, on.devices[:4], tp=2, pp=2)
    return old, trainer(on, on.devices[2:], tp=2, zero=1)


@pytest.fixture(scope="module")
def reversible() -> Transition:
    return compile_transition(*pair(), pipeline(400, 16, 2000))


@pytest.fixture(scope="module")
def tight() -> Transition:
    return compile_transition(*pair(), pipeline(400, 16, 2000, mode="tight"))


def change(schedule: Schedule, number: int, **fields: object) -> Schedule:
    moves = list(schedule.moves)
    moves[number] = dataclasses.replace(moves[number], **fields)  # type: ignore[arg-type]
    return replace(schedule, moves=Moves.of(moves))


def test_untouched_transitions_pass(reversible: Transition, tight: Transition) -> None:
    assert all(f.holds for f in findings(reversible).values()), findings(reversible)
    assert all(f.holds for f in findings(tight).values()), findings(tight)
    assert any(m.after for m in reversible.schedule.moves), "the example has relays"
    assert reversible.schedule.num_waves > 2 and tight.schedule.num_waves > 2


def relay(schedule: Schedule) -> int:
    return next(i for i, m in enumerate(schedule.moves) if m.after)


def drop(t: Transition) -> Schedule:
    last = len(t.schedule.moves) - 1
    s = t.schedule
    return replace(s, moves=Moves.of(s.moves[:last]), wave=s.wave[:last], slices=s.slices[:last])


def duplicate(t: Transition) -> Schedule:
    s = t.schedule
    moves = Moves.of([*s.moves, s.moves[0]])
    return replace(s, moves=moves, wave=np.append(s.wave, s.wave[0]), slices=np.append(s.slices, s.slices[0]))


def shift(t: Transition) -> Schedule:
    region = t.schedule.moves[0].intervals
    moved = Intervals(region.cell, region.start + 1, region.stop + 1)
    return change(t.schedule, 0, intervals=moved)


def shorten(t: Transition) -> Schedule:
    number = next(i for i, m in enumerate(t.schedule.moves) if int((m.intervals.stop - m.intervals.start)[-1]) > 1)
    region = t.schedule.moves[number].intervals
    stop = region.stop.copy()
    stop[-1] -= 1
    return change(t.schedule, number, intervals=Intervals(region.cell, region.start, stop))


def wrong_source(t: Transition) -> Schedule:
    number = next(i for i, m in enumerate(t.schedule.moves) if not m.after and m.link == INTER)
    return change(t.schedule, number, src=t.topology.num_devices - 1)


def swap_ends(t: Transition) -> Schedule:
    move = next(m for m in t.schedule.moves if not m.after)
    return change(t.schedule, t.schedule.moves.index(move), src=move.dst, dst=move.src)


def relay_at_once(t: Transition) -> Schedule:
    s = t.schedule
    number = relay(s)
    wave = s.wave.copy()
    wave[number] = s.wave[s.moves[number].after[0]]
    return replace(s, wave=wave)


def relay_of_another(t: Transition) -> Schedule:
    s = t.schedule
    number = relay(s)
    other = next(i for i, m in enumerate(s.moves) if m.dst != s.moves[number].src and s.wave[i] < s.wave[number])
    return change(s, number, after=(other,))


def relay_more(t: Transition) -> Schedule:
    """A relay that forwards what another of its receives brought."""
    s = t.schedule
    for number, move in enumerate(s.moves):
        for other, also in enumerate(s.moves):
            if move.after and also.after and move.src == also.src and move.table == also.table and number != other:
                lacks = also.intervals.subtract(s.moves[move.after[0]].intervals)
                if len(lacks) and set(also.after) != set(move.after):
                    return change(s, number, intervals=also.intervals, num_bytes=also.num_bytes)
    raise AssertionError("the example has no two relays of one place")


def all_at_once(t: Transition) -> Schedule:
    wave = np.zeros_like(t.schedule.wave)
    return replace(t.schedule, wave=wave, slices=np.ones_like(wave))


def wrong_bytes(t: Transition) -> Schedule:
    return change(t.schedule, 0, num_bytes=t.schedule.moves[0].num_bytes + 1)


def wrong_link(t: Transition) -> Schedule:
    number = next(i for i, m in enumerate(t.schedule.moves) if m.link == INTER)
    return change(t.schedule, number, link=LOCAL)


@pytest.mark.parametrize(
    ("plant", "caught_by"),
    [
        (drop, "every element once"),
        (duplicate, "every element once"),
        (shift, "every element once"),
        (shorten, "every element once"),
        (wrong_source, "sources"),
        (swap_ends, "sources"),
        (relay_at_once, "sources"),
        (relay_of_another, "sources"),
        (relay_more, "sources"),
        (all_at_once, "windows"),
        (wrong_bytes, "bytes"),
        (wrong_link, "bytes"),
    ],
)
@pytest.mark.parametrize("mode", ["reversible", "tight"])
def test_faulty_schedules(
    plant: Callable[[Transition], Schedule], caught_by: str, mode: str, request: pytest.FixtureRequest
) -> None:
    transition: Transition = request.getfixturevalue(mode)
    found = findings(transition, schedule=plant(transition))
    assert not found[caught_by].holds


def test_storages_that_go_too_early_or_come_too_late(tight: Transition) -> None:
    schedule = tight.schedule
    early = replace(schedule, release={key: max(wave - 1, 0) for key, wave in schedule.release.items()})
    assert not findings(tight, schedule=early)["lifetimes"].holds
    last = int(schedule.wave.max())
    number = int(np.argmax(schedule.wave))
    target = next(
        key for key, wave in schedule.acquire.items() if key[0] == schedule.moves[number].dst and wave <= last
    )
    late = replace(schedule, acquire=dict.fromkeys(schedule.acquire, last + 1))
    assert not findings(tight, schedule=late)["lifetimes"].holds
    never = replace(schedule, acquire={k: w for k, w in schedule.acquire.items() if k != target})
    assert not findings(tight, schedule=never)["lifetimes"].holds


@pytest.mark.parametrize("mode", ["reversible", "tight"])
def test_missing_edges(mode: str, request: pytest.FixtureRequest) -> None:
    """Without any one edge into a move, a verify, a commit or a release that nothing else implies, a check fails."""
    transition: Transition = request.getfixturevalue(mode)
    dag = transition.dag
    rng = np.random.default_rng(0)
    if mode == "reversible":
        fewer = replace(dag, slice_edges=dag.slice_edges[1:])
        assert not findings(transition, dag=fewer)["edges"].holds
    for kind in (VERIFY, check.MOVE):
        into = np.flatnonzero(dag.kind[dag.edges[:, 1]] == kind)
        for edge in rng.choice(into, size=min(12, len(into)), replace=False).tolist():
            fewer = replace(dag, edges=np.delete(dag.edges, edge, axis=0))
            assert not findings(transition, dag=fewer)["edges"].holds
    from_verify = np.flatnonzero(dag.kind[dag.edges[:, 0]] == VERIFY)
    verify = int(dag.edges[from_verify[-1], 0])
    fewer = replace(dag, edges=dag.edges[dag.edges[:, 0] != verify])
    assert not findings(transition, dag=fewer)["edges"].holds


def test_a_cycle_and_a_wait_for_a_later_wave(reversible: Transition) -> None:
    dag = reversible.dag
    back = np.array([[dag.num_ops - 1, 0]], dtype=np.int64)
    cyclic = replace(dag, edges=np.concatenate((dag.edges, back)))
    assert not findings(reversible, dag=cyclic)["order"].holds
    wave = dag.wave.copy()
    first = int(np.flatnonzero(dag.kind == check.MOVE)[0])
    wave[first] = wave.max() + 1
    assert not findings(reversible, dag=replace(dag, wave=wave))["order"].holds


@pytest.mark.parametrize("mode", ["reversible", "tight"])
def test_memory_over_capacity(mode: str, request: pytest.FixtureRequest) -> None:
    transition: Transition = request.getfixturevalue(mode)
    memory = transition.memory
    finding, worst = check.check_memory(transition.dag, memory.tight_base, memory.capacity, transition.topology)
    assert finding.holds
    for space in np.flatnonzero(transition.dag.acquired)[:4].tolist():
        at = int(transition.dag.space[space])
        capacity = memory.capacity.copy()
        capacity[at] = worst[at] - 1
        less = check.check_memory(transition.dag, memory.tight_base, capacity, transition.topology)[0]
        assert not less.holds and "may hold" in less.evidence


def test_moves_are_compared_by_value(reversible: Transition) -> None:
    """The faults above change what they say they change."""
    move = reversible.schedule.moves[0]
    assert isinstance(move, Move) and shift(reversible).moves[0].intervals.start[0] == move.intervals.start[0] + 1
