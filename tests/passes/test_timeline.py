"""The coarse schedule: against every schedule of small problems, and what overlaps in transitions."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from passes.plans import ARCHS, cluster, stage
from passes.profiles import examples
from passes.timeline_oracle import check_timeline

from nereus.ir.plan import Model, Plan, Workload
from nereus.passes.pipeline import compile_transition
from nereus.passes.timeline import Timeline, schedule_timeline
from nereus.passes.timeline_problem import EXCLUSIVE, CoarseOp, TimelineOptions

Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]


@st.composite
def problems(draw: st.DrawFn, most: int = 4) -> tuple[tuple[CoarseOp, ...], Bytes, Bytes]:
    """Up to ``most`` set-up operations on two devices, then a transfer; room for some of them at once."""
    count = draw(st.integers(1, most))
    ops: list[CoarseOp] = []
    for number in range(count):
        devices = draw(st.sampled_from([(0,), (1,), (0, 1)]))
        running = tuple(draw(st.integers(0, 5)) for _ in devices)
        ops.append(
            CoarseOp(
                kind=draw(st.sampled_from([*EXCLUSIVE, "transfer"])),
                stage=f"s{number}",
                devices=devices,
                seconds=float(draw(st.integers(0, 3))),
                running_bytes=running,
                after_bytes=tuple(draw(st.integers(0, size)) for size in running),
                after=tuple(draw(st.sets(st.integers(0, number - 1), max_size=2))) if number else (),
                rank=draw(st.integers(0, 2)),
            )
        )
    return tuple(ops), np.zeros(2, dtype=np.int64), np.array([draw(st.integers(4, 14)) for _ in range(2)])


def best_of_all(ops: tuple[CoarseOp, ...], base: Bytes, capacity: Bytes) -> float | None:
    """The shortest over all start times in whole seconds; an optimum has whole ones, since all durations are."""
    horizon = int(sum(op.seconds for op in ops))
    best = None
    for start in itertools.product(range(horizon + 1), repeat=len(ops)):
        stop = max((at + op.seconds for at, op in zip(start, ops, strict=True)), default=0.0)
        if best is not None and stop >= best:
            continue
        tried = Timeline(
            ops=ops,
            start_s=tuple(float(s) for s in start),
            stop_s=stop,
            background_s=0,
            bound_s=0,
            list_s=0,
            serial_s=0,
            solver="",
        )
        if check_timeline(tried, base, capacity) is None:
            best = stop
    return best


@examples(60)
@given(problems(3))
def test_cp_sat_finds_the_best_of_all(problem: tuple[tuple[CoarseOp, ...], Bytes, Bytes]) -> None:
    ops, base, capacity = problem
    found = schedule_timeline(ops, base, capacity)
    best = best_of_all(ops, base, capacity)
    if best is None:  # no order fits: nothing is promised
        return
    if check_timeline(found, base, capacity) is not None:
        # The list schedule ran out of room and nothing else was found: never where an order fits.
        raise AssertionError(check_timeline(found, base, capacity))
    assert found.stop_s == pytest.approx(best)
    assert found.bound_s <= found.stop_s + 1e-9 <= found.list_s + 1e-6
    assert found.bound_s == pytest.approx(best)


@examples(20)
@given(problems(6))
def test_never_worse_than_the_list_schedule(problem: tuple[tuple[CoarseOp, ...], Bytes, Bytes]) -> None:
    ops, base, capacity = problem
    roomy = np.full(2, 10**6)
    for room in (capacity, roomy):
        listed = schedule_timeline(ops, base, room, TimelineOptions(solve=False))
        solved = schedule_timeline(ops, base, room)
        again = schedule_timeline(ops, base, room)
        assert solved == again, "two runs differ"
        assert solved.bound_s <= solved.stop_s
        if check_timeline(listed, base, room) is None:  # else it ran out of room, and the solver may need longer
            assert solved.stop_s <= listed.stop_s + 1e-5
            assert listed.stop_s == pytest.approx(listed.list_s) == pytest.approx(solved.list_s)
    assert check_timeline(solved, base, roomy) is None
    assert check_timeline(listed, base, roomy) is None


def engine(stage: str, *devices: int, seconds: float = 35.0, running: int = 10, rest: int = 2) -> CoarseOp:
    count = len(devices)
    return CoarseOp(
        kind="engine-start",
        stage=stage,
        devices=devices,
        seconds=seconds,
        running_bytes=(running,) * count,
        after_bytes=(rest,) * count,
    )


def groups(stage: str, *devices: int, after: tuple[int, ...] = ()) -> CoarseOp:
    return CoarseOp(kind="build-groups", stage=stage, devices=devices, seconds=3.0, after=after)


def test_communicators_are_set_up_beside_engines_and_the_transfer() -> None:
    ops = (
        engine("rollout", 0, 1),
        groups("train", 2, 3),
        CoarseOp(kind="transfer", stage="", devices=(0, 1, 2, 3), seconds=2.0, after=(0,)),
        CoarseOp(kind="commit", stage="", devices=(), seconds=1.0, after=(0, 1, 2)),
    )
    room = np.full(4, 100)
    found = schedule_timeline(ops, np.zeros(4, dtype=np.int64), room)
    assert found.stop_s == pytest.approx(38.0) and found.serial_s == pytest.approx(41.0)
    assert found.bound_s == pytest.approx(38.0) and found.gap == pytest.approx(0.0) and found.solver == "list"
    same = (ops[0], groups("train", 0, 1), *ops[2:])
    found = schedule_timeline(same, np.zeros(4, dtype=np.int64), room)
    assert found.stop_s == pytest.approx(39.0), "on the engine's devices they follow it, beside the transfer"


def test_a_thousand_replicas_are_solved_as_one() -> None:
    count = 1000
    ops = [engine("rollout", 2 * i, 2 * i + 1) for i in range(count)]
    ops += [engine("judge", 2 * i, 2 * i + 1, seconds=20.0) for i in range(count)]
    every = tuple(range(2 * count))
    ops.append(CoarseOp(kind="transfer", stage="", devices=every, seconds=2.0, after=tuple(range(2 * count))))
    found = schedule_timeline(tuple(ops), np.zeros(2 * count, dtype=np.int64), np.full(2 * count, 15))
    assert found.stop_s == pytest.approx(57.0) and found.gap == pytest.approx(0.0)
    assert len(set(found.start_s)) == 3
    assert check_timeline(found, np.zeros(2 * count, dtype=np.int64), np.full(2 * count, 15)) is None


def test_memory_decides_the_order_of_two_engines() -> None:
    """Beside the small one's 6 bytes at rest the large one has no room to start; the other way round it has."""
    ops = (engine("small", 0, running=7, rest=6), engine("large", 0, running=10, rest=3))
    base, room = np.zeros(1, dtype=np.int64), np.array([12])
    found = schedule_timeline(ops, base, room)
    assert check_timeline(found, base, room) is None
    assert found.start_s[1] < found.start_s[0] and found.stop_s == pytest.approx(70.0)


def test_background_operations_have_their_own_timeline() -> None:
    ops = (
        replace(engine("rollout", 0), background=True),
        replace(engine("rollout", 0, seconds=10.0), background=True),
        CoarseOp(kind="transfer", stage="", devices=(0,), seconds=2.0),
    )
    found = schedule_timeline(ops, np.zeros(1, dtype=np.int64), np.array([100]))
    assert found.background_s == pytest.approx(45.0) and found.stop_s == pytest.approx(2.0)


def test_faults_are_found() -> None:
    ops = (engine("a", 0), engine("b", 0), CoarseOp(kind="commit", stage="", devices=(), seconds=1.0, after=(0, 1)))
    base, room = np.zeros(1, dtype=np.int64), np.array([13])
    found = schedule_timeline(ops, base, room)
    assert check_timeline(found, base, room) is None

    def at(*start: float) -> Timeline:
        return replace(found, start_s=start)

    assert "overlaps" in str(check_timeline(at(0.0, 34.0, 70.0), base, room))
    assert "before" in str(check_timeline(at(0.0, 35.0, 60.0), base, room))
    assert "stop" in str(check_timeline(at(0.0, 36.0, 80.0), base, room))
    assert "holds" in str(check_timeline(found, base, np.array([11])))


def test_an_engine_is_drained_before_its_gpus_change_hands() -> None:
    """An engine and a trainer swap GPUs. (That no GPU has two owners is the independent verifier's to prove.)"""
    on = cluster(4)
    actor = Model(name="actor", arch=ARCHS[0], source="tiny")
    plans = []
    for first, second in ((on.devices[:2], on.devices[2:]), (on.devices[2:], on.devices[:2])):
        stages = (stage(actor, "generate", first, tp=2), stage(actor, "train", second, tp=2))
        workload = Workload(prompts=64, samples=1, mini_batch=64, prompt_len=4, response_len=4, mode="async")
        plans.append(Plan(cluster=on, models=(actor,), workload=workload, stages=stages))
    transition = compile_transition(plans[0], plans[1])
    ops, start = transition.timeline.ops, transition.timeline.start_s
    (drain,) = [n for n, op in enumerate(ops) if op.kind == "drain"]
    ended = start[drain] + ops[drain].seconds
    assert transition.certificate.drain_s == ops[drain].seconds > 0
    after = [
        n for n, op in enumerate(ops) if n != drain and not op.background and set(op.devices) & set(ops[drain].devices)
    ]
    assert after and all(start[n] >= ended for n in after)
    assert transition.certificate.bound_downtime_s <= transition.certificate.downtime_s
