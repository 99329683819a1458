"""The engine on jobs that can be worked out by hand, and against a simulator that takes tiny steps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.jobs import Op, World, fill_ports, make_job, step_by_step

from nereus.sim import engine
from nereus.sim.engine import coarse_quantum_s, simulate
from nereus.sim.outcome import DEVICE, MEMORY, OPERATION
from nereus.sim.sharing import few_rates, max_min_rates
from nereus.sim.timing import Timing

CLOSE = 1e-6


def finish(ops: list[Op], world: World | None = None) -> list[float]:
    outcome = simulate(make_job(ops, world))
    assert outcome.safe
    return outcome.finish_s.tolist()


# -- time -------------------------------------------------------------------------------------------------------------


def test_an_operation_alone_takes_its_fixed_part_and_its_bytes() -> None:
    assert finish([Op(fixed_s=0.5, num_bytes=20, ports=(0, 1))], World(ports=(10, 4))) == pytest.approx(
        [5.5], abs=CLOSE
    )


def test_bytes_without_a_port_take_no_time() -> None:
    assert finish([Op(fixed_s=0.5, num_bytes=20)]) == pytest.approx([0.5], abs=CLOSE)


def test_two_share_a_port_and_the_longer_has_it_alone_in_the_end() -> None:
    assert finish([Op(num_bytes=1, ports=(0,)), Op(num_bytes=2, ports=(0,))]) == pytest.approx([2, 3], abs=CLOSE)


def test_who_comes_later_shares_only_from_then_on() -> None:
    ops = [Op(num_bytes=2, ports=(0,)), Op(fixed_s=1, num_bytes=2, ports=(0,))]
    assert finish(ops) == pytest.approx([3, 4], abs=CLOSE)


def test_what_a_narrow_port_leaves_goes_to_the_others() -> None:
    # Port 0 carries three, one of which port 1 holds at 1: the other two have 4.5 each.
    ops = [Op(num_bytes=9, ports=(0, 1)), Op(num_bytes=9, ports=(0,)), Op(num_bytes=18, ports=(0,))]
    assert finish(ops, World(ports=(10, 1))) == pytest.approx([9, 2, 3], abs=CLOSE)


def test_a_chain_of_ports_is_max_min_fair() -> None:
    """The textbook case: one flow over both links, one on each; the second link is wider."""
    rates = max_min_rates(np.array([[0, 1], [0, -1], [1, -1]]), np.ones((3, 2)), np.array([1.0, 2.0]))
    assert rates == pytest.approx([0.5, 0.5, 1.5])


def test_a_byte_that_weighs_more_takes_more_of_its_port() -> None:
    ops = [Op(num_bytes=10, ports=(0,), weights=(3.0,)), Op(num_bytes=10, ports=(0,), weights=(1.0,))]
    # Equal rates of 2.5 each use 7.5 + 2.5.
    assert finish(ops, World(ports=(10,))) == pytest.approx([4, 4], abs=CLOSE)


def test_edges_order_operations_and_the_trace_tells_them() -> None:
    job = make_job([Op(fixed_s=1), Op(fixed_s=2, after=(0,)), Op(fixed_s=1, after=(0,)), Op(after=(1, 2))])
    outcome = simulate(job)
    assert outcome.trace(job) == [("op0", 0, 1), ("op1", 1, 3), ("op2", 1, 2), ("op3", 3, 3)]
    assert outcome.makespan_s == 3


def test_given_durations_override_everything_but_the_order() -> None:
    ops = [Op(num_bytes=100, ports=(0,)), Op(num_bytes=1, ports=(0,)), Op(fixed_s=1, after=(0,))]
    timing = Timing(seed=3, fixed_spread=1.0, rate_spread=1.0, delay_s=9.0, durations=np.array([0.25, np.nan, 0.5]))
    outcome = simulate(make_job(ops), timing)
    assert outcome.finish_s[[0, 2]] == pytest.approx([0.25, 0.75])
    assert outcome.finish_s[1] != pytest.approx(1)


def test_equal_seeds_give_equal_runs() -> None:
    job = make_job([Op(fixed_s=1, num_bytes=5, ports=(0,)) for _ in range(9)])
    wild = Timing(seed=1, fixed_spread=0.5, rate_spread=0.5, delay_s=0.1)
    first, again, other = simulate(job, wild), simulate(job, wild), simulate(job, replace(wild, seed=2))
    assert first.finish_s.tolist() == again.finish_s.tolist()
    assert first.finish_s.tolist() != other.finish_s.tolist()
    bounded = replace(wild, law="loguniform", delay_s=0.0)
    _, work = bounded.draw(job)
    assert work.min() >= 5 * np.exp(-0.5) and work.max() <= 5 * np.exp(0.5)


# -- memory and devices -----------------------------------------------------------------------------------------------


def test_peak_and_memory_over_time() -> None:
    ops = [
        Op(fixed_s=1, space=0, acquired=30, released=10),
        Op(fixed_s=1, space=0, acquired=40, released=60, after=(0,)),
        Op(fixed_s=1, space=0, acquired=50, after=(1,)),
    ]
    job = make_job(ops, World(base=(5,)))
    outcome = simulate(job)
    assert outcome.safe and outcome.peak_bytes.tolist() == [65]
    times, held = outcome.memory(job, 0)
    assert times.tolist() == [0, 0, 1, 1, 2, 2] and held.tolist() == [5, 35, 25, 65, 5, 55]


def test_what_is_released_in_an_instant_is_there_for_who_starts_in_it() -> None:
    ops = [Op(fixed_s=1, space=0, acquired=100, released=100), Op(fixed_s=1), Op(space=0, acquired=100, after=(1,))]
    assert simulate(make_job(ops)).safe


def test_an_overflow_by_one_byte_is_recorded_with_its_operation_and_time() -> None:
    job = make_job([Op(space=0, acquired=60), Op(fixed_s=2), Op(space=0, acquired=41, after=(1,))])
    outcome = simulate(job)
    (found,) = outcome.overflows
    assert (found.op, found.time_s, found.space, found.excess_bytes) == (2, 2, 0, 1)
    assert outcome.finished and not outcome.safe


def test_a_base_that_does_not_fit_is_an_overflow() -> None:
    assert simulate(make_job([Op()], World(base=(101,)))).overflows[0].excess_bytes == 1


def test_blocking_operations_wait_for_memory() -> None:
    ops = [Op(fixed_s=3, space=0, acquired=60, released=60), Op(space=0, acquired=60), Op(space=0, acquired=40)]
    outcome = simulate(make_job(ops, blocking=True))
    assert outcome.safe and outcome.start_s.tolist() == [0, 3, 0]


def test_a_device_has_one_owner_and_is_handed_on_in_order_of_arrival() -> None:
    ops = [
        Op(fixed_s=1, takes=2),
        Op(fixed_s=1, gives=2, after=(0,)),
        Op(fixed_s=5, takes=2, gives=2),
        Op(fixed_s=1, takes=2, gives=2),
    ]
    outcome = simulate(make_job(ops))
    assert outcome.safe and outcome.start_s.tolist() == [0, 1, 2, 7]
    owned = simulate(make_job([Op(fixed_s=4, gives=1), Op(takes=1)], World(owned=(1,))))
    assert owned.start_s.tolist() == [0, 4]


# -- deadlock ---------------------------------------------------------------------------------------------------------


def test_a_cycle_of_edges_is_a_deadlock() -> None:
    outcome = simulate(make_job([Op(after=(1,)), Op(after=(0,)), Op(fixed_s=1)]))
    assert outcome.deadlock is not None and set(outcome.deadlock.cycle) == {0, 1}
    assert all(wait.kind == OPERATION for wait in outcome.deadlock.waits)


def test_two_that_hold_what_the_other_wants() -> None:
    ops = [
        Op(takes=0),
        Op(fixed_s=1, after=(0,)),
        Op(takes=1, after=(1,)),
        Op(gives=0, after=(2,)),
        Op(gives=1, after=(2,)),
    ]
    more = [replace(op, after=tuple(a + 5 for a in op.after)) for op in ops]
    more = [replace(op, takes=1 - op.takes if op.takes >= 0 else -1) for op in more]
    job = make_job([*ops, *more])
    outcome = simulate(job)
    assert outcome.deadlock is not None and outcome.deadlock.time_s == 1
    assert {w.op: w.kind for w in outcome.deadlock.waits if w.kind == DEVICE} == {2: DEVICE, 7: DEVICE}
    assert {2, 7} <= set(outcome.deadlock.cycle)
    assert "op2 waits for device 1" in outcome.deadlock.describe(job)
    late = simulate(job, Timing(durations=np.array([0, 1, 0, 0, 0, *[np.nan] * 5])))
    assert late.deadlock is not None  # both start at once whatever comes then
    # Once the first is through before the second starts, nothing is in the way.
    first_through = [*ops, Op(fixed_s=9), *(replace(op, after=tuple(a + 1 for a in op.after) or (5,)) for op in more)]
    assert simulate(make_job(first_through)).finished


def test_memory_that_nobody_frees_is_a_deadlock_without_a_cycle() -> None:
    job = make_job([Op(space=0, acquired=80), Op(space=0, acquired=30), Op(after=(1,))], blocking=True)
    outcome = simulate(job)
    assert outcome.deadlock is not None and outcome.deadlock.cycle == ()
    assert [(w.op, w.kind, w.on) for w in outcome.deadlock.waits] == [(1, MEMORY, ()), (2, OPERATION, (1,))]


def test_two_that_hold_memory_and_want_more() -> None:
    half = [
        Op(space=0, acquired=60),
        Op(fixed_s=1, after=(0,)),
        Op(space=1, acquired=60, after=(1,)),
        Op(space=0, released=60, after=(2,)),
        Op(space=1, released=60, after=(2,)),
    ]
    other = [
        replace(op, space=1 - op.space if op.space >= 0 else -1, after=tuple(a + 5 for a in op.after)) for op in half
    ]
    outcome = simulate(make_job([*half, *other], World(base=(0, 0), capacity=(100, 100)), blocking=True))
    assert outcome.deadlock is not None and {2, 7} <= set(outcome.deadlock.cycle)
    assert simulate(make_job([*half, *other], World(base=(0, 0), capacity=(120, 120)), blocking=True)).finished


# -- malformed jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        ([Op(ports=(1,))], "port"),
        ([Op(space=1)], "space"),
        ([Op(takes=4)], "device"),
        ([Op(acquired=1)], "no space"),
        ([Op(fixed_s=-1)], "negative seconds"),
        ([Op(gives=0)], "nobody owns"),
        ([Op(after=(3,))], "edge"),
    ],
)
def test_malformed_jobs_are_refused(ops: list[Op], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        simulate(make_job(ops))


def test_durations_must_fit() -> None:
    with pytest.raises(ValueError, match="job of 1"):
        simulate(make_job([Op()]), Timing(durations=np.zeros(2)))
    with pytest.raises(ValueError, match="law"):
        Timing(law="normal")


# -- against oracles --------------------------------------------------------------------------------------------------


@st.composite
def flows(draw: st.DrawFn) -> tuple[list[dict[int, float]], tuple[float, ...]]:
    capacity = tuple(draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 7.0]), min_size=1, max_size=5)))
    one = st.dictionaries(
        st.integers(0, len(capacity) - 1), st.sampled_from([1.0, 1.0, 2.5]), min_size=1, max_size=min(4, len(capacity))
    )
    return draw(st.lists(one, min_size=1, max_size=7)), capacity


@settings(deadline=None)
@given(flows())
def test_both_ways_to_share_are_progressive_filling(case: tuple[list[dict[int, float]], tuple[float, ...]]) -> None:
    passes, capacity = case
    few = few_rates([tuple(p.items()) for p in passes], capacity)
    ports = np.full((len(passes), 4), -1)
    weights = np.ones((len(passes), 4))
    for row, of_one in enumerate(passes):
        ports[row, : len(of_one)], weights[row, : len(of_one)] = list(of_one), list(of_one.values())
    assert max_min_rates(ports, weights, np.array(capacity)) == pytest.approx(few, rel=1e-9)
    assert few == pytest.approx(fill_ports(passes, capacity, steps=2000), rel=0.1)


@settings(deadline=None)
@given(flows())
def test_rates_are_feasible_and_every_transfer_has_a_full_port_where_nobody_has_more(
    case: tuple[list[dict[int, float]], tuple[float, ...]],
) -> None:
    passes, capacity = case
    rates = few_rates([tuple(p.items()) for p in passes], capacity)
    load = [sum(rates[i] * w.get(port, 0.0) for i, w in enumerate(passes)) for port in range(len(capacity))]
    assert all(used <= full * (1 + 1e-9) for used, full in zip(load, capacity, strict=True))
    for i, of_one in enumerate(passes):
        assert any(
            load[port] >= capacity[port] * (1 - 1e-9)
            and all(rates[j] <= rates[i] * (1 + 1e-9) for j, other in enumerate(passes) if port in other)
            for port in of_one
        )


@st.composite
def small_jobs(draw: st.DrawFn) -> tuple[list[Op], World]:
    """Times are multiples of 0.25 s, so that the steps of the oracle meet them."""
    num_ports = draw(st.integers(1, 3))
    world = World(
        ports=tuple(draw(st.sampled_from([1.0, 2.0, 4.0])) for _ in range(num_ports)),
        base=(draw(st.sampled_from([0, 40])), 0),
        capacity=(100, draw(st.sampled_from([60, 100]))),
        devices=2,
    )
    ops = []
    for number in range(draw(st.integers(1, 6))):
        size = draw(st.sampled_from([0, 1, 2, 3]))
        ports = tuple(sorted(draw(st.sets(st.integers(0, num_ports - 1), min_size=1, max_size=2)))) if size else ()
        space = draw(st.sampled_from([-1, 0, 1]))
        device = draw(st.sampled_from([-1, -1, 0, 1]))
        ops.append(
            Op(
                fixed_s=0.25 * draw(st.integers(1, 4)) + 0.001 * number,
                num_bytes=size,
                ports=ports,
                space=space,
                acquired=draw(st.sampled_from([0, 20, 50])) if space >= 0 else 0,
                released=draw(st.sampled_from([0, 10, 20])) if space >= 0 else 0,
                takes=device,
                gives=device,
                after=tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=2)))) if number else (),
            )
        )
    return ops, world


@settings(max_examples=40, deadline=None)
@given(small_jobs(), st.booleans())
def test_small_jobs_run_as_in_tiny_steps(case: tuple[list[Op], World], blocking: bool) -> None:
    ops, world = case
    step_s = 1 / 512
    outcome = simulate(make_job(ops, world, blocking=blocking))
    wanted, peak, over = step_by_step(ops, world, step_s, blocking=blocking)
    near = 2 * step_s * (len(ops) + 2)
    # Where two ends are nearer than the steps can tell apart, the order of arrival may differ: such cases say nothing.
    ends = sorted(t for t in outcome.finish_s.tolist() if t == t)
    if any(0 < b - a < 2 * near for a, b in itertools.pairwise(ends)):
        return
    found = [np.inf if np.isnan(t) else t for t in outcome.finish_s.tolist()]
    assert found == pytest.approx(wanted, abs=near)
    assert outcome.peak_bytes.tolist() == peak and bool(outcome.overflows) == over


@settings(max_examples=60, deadline=None)
@given(small_jobs(), st.integers(0, 99))
def test_arrays_and_lists_run_alike(case: tuple[list[Op], World], seed: int) -> None:
    job = make_job(*case)
    timing = Timing(seed=seed, fixed_spread=0.3, rate_spread=0.3)
    few = simulate(job, timing)
    before = engine.FEW_TRANSFERS, engine.FEW_PORTS
    engine.FEW_TRANSFERS = engine.FEW_PORTS = -1
    try:
        many = simulate(job, timing)
    finally:
        engine.FEW_TRANSFERS, engine.FEW_PORTS = before
    assert many.finish_s == pytest.approx(few.finish_s, abs=CLOSE, nan_ok=True)
    assert many.peak_bytes.tolist() == few.peak_bytes.tolist()


def test_a_coarse_quantum_costs_at_most_two_quanta_per_operation_in_a_chain() -> None:
    generator = np.random.default_rng(5)
    ops = [
        Op(
            num_bytes=int(generator.integers(1, 9)),
            ports=tuple(generator.choice(6, 2, replace=False).tolist()),
            after=(number - 6,) if number >= 6 else (),
        )
        for number in range(300)
    ]
    job = make_job(ops, World(ports=(2.0,) * 6))
    exact = simulate(job)
    quantum_s = coarse_quantum_s(job, refreshes=150)
    coarse = simulate(job, quantum_s=quantum_s)
    assert quantum_s > 1e-6 and coarse.num_refreshes < exact.num_refreshes
    assert exact.makespan_s == pytest.approx(coarse.makespan_s, abs=2 * quantum_s * 300 / 6)
    assert coarse_quantum_s(job) == 1e-9
