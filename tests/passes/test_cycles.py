"""Full GPUs whose model-stages trade places: rotation through the spares, host memory where there are none."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from passes.cycles import Case, check_tight, cycle, findings
from passes.execute import pipeline
from passes.plans import ARCHS, offloaded

from nereus.ir.moves import Moves
from nereus.passes.compiled import Transition
from nereus.passes.emit import emit_program
from nereus.passes.tight import Stuck

#: Every element of every layout change is executed; windows are larger than any storage, so that memory alone decides.
OPTIONS = pipeline(400, 40, 4000)
LAYOUTS = {
    "one": {"group": 1},
    "tp-pp": {"group": 2, "settings": ({"tp": 2}, {"pp": 2})},
    "dp-tp": {"group": 2, "settings": ({}, {"tp": 2})},
}


@pytest.mark.parametrize("num_stages", range(2, 9))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_gpus_rotate(num_stages: int, layout: str) -> None:
    """With a spare of the largest storage no host memory is needed and the bound is kept; with none, one storage of
    each cycle (or a few, where their sizes differ) goes through host memory."""
    case = Case.of(cycle(num_stages, **LAYOUTS[layout]), OPTIONS)  # type: ignore[arg-type]
    spared = case.tight(case.within(case.largest))
    assert isinstance(spared, Transition) and not spared.schedule.staged
    check_tight(spared, num_stages)
    total = int(case.memory.state.old.max())
    full = case.tight(case.within(0, host_spare=total))
    assert isinstance(full, Transition)
    check_tight(full, num_stages)
    half = case.tight(case.within(case.largest // 2, host_spare=total))
    assert isinstance(half, Transition)
    check_tight(half, num_stages)


@pytest.mark.parametrize("num_stages", [2, 5])
def test_models_of_different_sizes_and_training_state(num_stages: int) -> None:
    for trained, archs in ((True, ARCHS[:1]), (False, ARCHS), (True, ARCHS[1:])):
        case = Case.of(cycle(num_stages, archs=archs, trained=trained), OPTIONS)
        spare = np.full(len(case.largest), int(case.largest.max()))
        for memory in (case.within(spare), case.within(0, host_spare=10 * int(case.memory.state.old.max()))):
            done = case.tight(memory)
            assert isinstance(done, Transition)
            check_tight(done, 1)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.5, 0.2), (0.3, 0.8)])
def test_state_partly_in_host_memory_goes_through_it_too(shares: tuple[float, float]) -> None:
    """What passes through host memory on the way lies beside parts that stay there."""
    pair = cycle(3, trained=True)
    # Masters in host memory: no weight can be made on its GPU, so that none can go before it was sent.
    old, new = (offloaded(plan, 1.0, share) for plan, share in zip(pair, shares, strict=True))
    case = Case.of((old, new), OPTIONS)
    done = case.tight(case.within(0, host_spare=10 * int(case.memory.state.old.max())))
    assert isinstance(done, Transition)
    assert bool(done.schedule.staged) == (shares[1] <= shares[0])  # else the GPUs become emptier
    check_tight(done, 1)


def test_a_full_cycle_without_host_memory_is_refused_with_its_witness() -> None:
    case = Case.of(cycle(2), OPTIONS)
    stuck = case.tight(case.within(0))
    assert isinstance(stuck, Stuck)
    assert stuck.need_bytes > stuck.free_bytes == 0 and stuck.space < 2
    short = stuck.host_short_bytes
    assert short is not None and short > 0
    # As much host memory as the largest storage is enough where both sides have the same ones.
    again = case.tight(case.within(0, host_spare=2 * int(case.largest.max())))
    assert isinstance(again, Transition) and again.schedule.staged
    # What does not fit at the end cannot be helped.
    less = case.within(-1, host_spare=10**6)
    refused = case.tight(less)
    assert isinstance(refused, Stuck)


@pytest.fixture(scope="module")
def staged() -> Transition:
    case = Case.of(cycle(3), OPTIONS)
    found = case.tight(case.within(0, host_spare=1000))
    assert isinstance(found, Transition) and found.schedule.staged
    return found


def test_faults_of_staging_are_caught(staged: Transition) -> None:
    assert all(f.holds for f in findings(staged).values())
    schedule = staged.schedule
    key, (out, back) = next(iter(schedule.staged.items()))
    early = replace(schedule, staged={**schedule.staged, key: (out, out)})
    assert not findings(replace(staged, schedule=early))["lifetimes"].holds
    forgotten = replace(schedule, staged={k: w for k, w in schedule.staged.items() if k != key})
    assert not findings(replace(staged, schedule=forgotten))["sources"].holds
    late = replace(schedule, staged={**schedule.staged, key: (back, back)})
    assert not findings(replace(staged, schedule=late))["sources"].holds
    count = staged.topology.num_devices
    number = next(i for i, m in enumerate(schedule.moves) if m.src >= count)
    moves = list(schedule.moves)
    moves[number] = dataclasses.replace(moves[number], src=moves[number].src - count)
    assert not findings(replace(staged, schedule=replace(schedule, moves=Moves.of(moves))))["sources"].holds
    memory = staged.memory
    hosts = memory.capacity.copy()
    hosts[count:] = memory.tight_base[count:]
    assert not findings(replace(staged, memory=replace(memory, capacity=hosts)))["memory"].holds


def test_the_executor_takes_storages_through_host_memory_bit_for_bit(staged: Transition) -> None:
    """Real tensors: every element of every shard is where the new plan has it, and nothing stays in host memory."""
    pytest.importorskip("torch")
    from nereus.runtime.executor import execute
    from nereus.runtime.reference import check, fill
    from nereus.runtime.reference_values import Values
    from nereus.runtime.transports.inprocess import InProcess

    programs = {device: emit_program(staged, at) for at, device in enumerate(staged.topology.devices)}
    values = Values([staged.old, staged.new])
    states = fill(programs.values(), staged.old, values)
    report = execute(programs, states, InProcess())
    result = check(states, staged.new, values)
    assert result.failures == () and result.num_elements > 0
    waiting = {key[0] for key in staged.schedule.staged}
    for device, _, host_bytes, _ in report.peaks:
        assert (host_bytes > 0) == (staged.topology.index()[device] in waiting)
