from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from runtime.tiny import ARCH, build_programs, cluster, ppo, trainer  # noqa: E402

from nereus.ir.plan import ORDER_MEGATRON, Plan  # noqa: E402
from nereus.runtime.executor import ExecutionFailed, ExecutorOptions, execute  # noqa: E402
from nereus.runtime.faults import Fault  # noqa: E402
from nereus.runtime.job import Job, Step, run_job  # noqa: E402
from nereus.runtime.reference import check, fill  # noqa: E402
from nereus.runtime.reference_values import Values  # noqa: E402
from nereus.runtime.state import fresh_bytes  # noqa: E402
from nereus.runtime.transports.base import Outgoing, Parcel  # noqa: E402
from nereus.runtime.transports.inprocess import InProcess  # noqa: E402

EIGHT = cluster(4, 4)
#: Layouts that differ in every way the language knows, on eight devices unless said.
LAYOUTS: dict[str, Plan] = {
    "tp2 pp2": trainer(EIGHT, tp=2, pp=2),
    "tp4": trainer(EIGHT, tp=4),
    "tp8 (kv heads replicated)": trainer(EIGHT, tp=8),
    "pp3 uneven, 6 devices": trainer(EIGHT, 6, pp=3, dp=2),
    "pp2 split 3-1": trainer(EIGHT, pp=2, pp_split=(3, 1), tp=2),
    "zero1": trainer(EIGHT, zero=1, tp=2),
    "zero1 pp2 megatron order": trainer(EIGHT, zero=1, tp=2, pp=2, order=ORDER_MEGATRON),
    "zero3": trainer(EIGHT, zero=3),
    "fsdp8": trainer(EIGHT, fsdp=8),
    "fsdp5 of 5 devices": trainer(EIGHT, 5, fsdp=5),
    "fsdp2 in 4 groups": trainer(EIGHT, fsdp=2),
    "cp2 tp2": trainer(EIGHT, cp=2, tp=2),
    "one device": trainer(EIGHT, 1),
}


def run(old: Plan, new: Plan, **how: Any) -> Any:
    programs = build_programs(old, new, **how)
    values = Values([old, new])
    states = fill(programs.values(), old, values)
    report = execute(programs, states, InProcess())
    result = check(states, new, values)
    assert result.failures == ()
    assert result.num_elements > 0
    return report, states


@pytest.mark.parametrize("new", LAYOUTS)
@pytest.mark.parametrize("old", ["tp2 pp2", "zero1 pp2 megatron order", "fsdp5 of 5 devices"])
def test_every_element_of_every_shard(old: str, new: str) -> None:
    run(LAYOUTS[old], LAYOUTS[new])


def test_several_models_in_host_and_device_memory() -> None:
    old = ppo(EIGHT, actor={"tp": 2, "pp": 2, "zero": 1}, critic={"tp": 2}, ref={"tp": 4})
    new = ppo(EIGHT, actor={"tp": 4, "zero": 1}, critic={"fsdp": 8}, ref={"on": EIGHT.devices[4:], "pp": 2})
    report, _ = run(old, new)
    assert report.received_bytes == report.sent_bytes > 0
    assert any(host for _, _, host, _ in report.peaks)


@pytest.mark.parametrize("derive", [True, False])
def test_tight_mode_ends_in_the_same_state(derive: bool) -> None:
    run(LAYOUTS["tp2 pp2"], LAYOUTS["fsdp8"], mode="tight", derive=derive)


def test_peaks_are_exact() -> None:
    """Both copies of the state at once, and no more than all messages of a wave on top."""
    old, new = LAYOUTS["tp4"], LAYOUTS["tp2 pp2"]
    programs = build_programs(old, new)
    report, _ = run(old, new)
    for device, peak, host, staging in report.peaks:
        width = {"bf16": 2, "fp32": 4}
        both = sum(s.numel * width[s.dtype] for s in programs[device].storages)
        assert both <= peak <= both + staging
        assert host == 0


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS)), st.sampled_from(["reversible", "tight"]))
def test_no_device_holds_more_than_its_program_promises(old: str, new: str, mode: str) -> None:
    report, _ = run(LAYOUTS[old], LAYOUTS[new], mode=mode)
    assert report.within_promise
    assert {device for device, _ in report.promised} == {device for device, *_ in report.peaks}


def test_what_is_released_is_given_back_as_the_system_reads_it() -> None:
    """Of storages in mappings of their own, which no allocator keeps for later."""
    wide = replace(ARCH, vocab=1 << 17, hidden=32, num_layers=1)
    old, new = (trainer(EIGHT, count, arch=wide) for count in (1, 2))
    new = replace(new, stages=(replace(new.stages[0], devices=EIGHT.devices[1:3]),))
    programs = build_programs(old, new)
    states = fill(programs.values(), old, Values([old, new]))
    large = 0
    for state in states.values():
        for held in list(state):
            if held.data.nbytes >= 4 << 20:
                data = fresh_bytes(held.data.nbytes).view(held.data.dtype).copy_(held.data)
                state.put(held.spec, data)
                large += data.nbytes
                del data
    released = execute(programs, states, InProcess()).released
    assert released.accounted >= large > 50 << 20
    if released.read is not None:
        assert released.read > 0.9 * large


class Damaging(InProcess):
    """Flips one bit of one piece on its way."""

    def exchange(self, sends: Any, receives: Any, arrived: Any, deadline_s: float) -> None:
        def damaged(pieces: Any) -> Any:
            for first in pieces:
                data = first.data.clone()
                data[-1] ^= 1
                yield Parcel(first.tag, first.src, first.dst, data, first.checksum, first.part)
                break
            yield from pieces

        broken = [Outgoing(each.tag, each.src, each.dst, damaged(each.pieces)) for each in sends[:1]]
        super().exchange([*broken, *sends[1:]], receives, arrived, deadline_s)


class Losing(InProcess):
    def exchange(self, sends: Any, receives: Any, arrived: Any, deadline_s: float) -> None:
        super().exchange(sends[:-1], receives, arrived, deadline_s)


def refuse_third() -> Any:
    calls = []

    def allocate(spec: Any) -> Any:
        calls.append(spec)
        if len(calls) > 2:
            raise MemoryError("no memory left")
        return torch.empty(spec.numel)

    return allocate


def raise_in_wave(wave: int) -> None:
    if wave == 2:
        raise ZeroDivisionError("something of ours")


@pytest.mark.parametrize(
    ("transport", "options", "code"),
    [
        (Damaging(), ExecutorOptions(), "NRS6003"),
        (Losing(), ExecutorOptions(), "NRS9601"),
        (InProcess(), ExecutorOptions(allocate=refuse_third()), "NRS6002"),
        (InProcess(), ExecutorOptions(on_wave=raise_in_wave), "NRS6004"),
    ],
)
def test_a_failure_before_the_commit_leaves_the_old_state_whole(transport: Any, options: Any, code: str) -> None:
    old, new = LAYOUTS["zero1"], LAYOUTS["tp2 pp2"]
    programs = build_programs(old, new)
    values = Values([old, new])
    states = fill(programs.values(), old, values)
    before = {(d, key): held.data.data_ptr() for d, s in states.items() for key, held in s.held.items()}
    with pytest.raises(ExecutionFailed) as caught:
        execute(programs, states, transport, options)
    assert caught.value.fault.code == code
    assert caught.value.old_whole
    assert check(states, old, values).failures == ()
    assert before == {(d, key): held.data.data_ptr() for d, s in states.items() for key, held in s.held.items()}


def test_new_storages_are_dropped_after_a_failure() -> None:
    import gc
    import weakref

    old, new = LAYOUTS["zero1"], LAYOUTS["tp2 pp2"]
    programs = build_programs(old, new)
    states = fill(programs.values(), old, Values([old, new]))
    made = []

    def allocate(spec: Any) -> Any:
        from nereus.runtime.state import allocate as real

        data = real(spec)
        made.append(weakref.ref(data))
        return data

    with pytest.raises(ExecutionFailed) as caught:
        execute(programs, states, Damaging(), ExecutorOptions(allocate=allocate))
    gc.collect()
    assert made
    assert [ref() for ref in made if ref() is not None] == []
    assert caught.value.fault.text


def test_a_failure_past_the_point_of_no_return_says_so() -> None:
    old, new = LAYOUTS["tp4"], LAYOUTS["tp2 pp2"]
    programs = build_programs(old, new, mode="tight")
    for (
        device,
        program,
    ) in programs.items():  # releases in its first wave what nobody needs any more, and fails in the third
        waves = list(program.waves)
        used = {int(i) for w in waves for m in w.sends for i in m.blocks.table[:, 0]}
        used |= {int(i) for w in waves for c in (*w.copies, *w.derives) for i in c.src.table[:, 0]}
        early = tuple(i for i in waves[-1].release if i not in used)
        late = tuple(i for i in waves[-1].release if i in used)
        waves[0], waves[-1] = replace(waves[0], release=early), replace(waves[-1], release=late)
        programs[device] = replace(program, waves=tuple(waves))
    assert any(p.waves[0].release for p in programs.values())
    states = fill(programs.values(), old, Values([old, new]))
    with pytest.raises(ExecutionFailed) as caught:
        execute(programs, states, InProcess(), ExecutorOptions(on_wave=raise_in_wave))
    assert not caught.value.old_whole


def test_different_digests_are_refused_before_anything_is_allocated() -> None:
    old, new = LAYOUTS["tp4"], LAYOUTS["tp2 pp2"]
    programs = build_programs(old, new)
    device = next(iter(programs))
    programs[device] = replace(programs[device], digest="f" * 64)
    states = fill(programs.values(), old, Values([old, new]))

    def never(spec: Any) -> Any:
        raise AssertionError(spec)

    with pytest.raises(ExecutionFailed) as caught:
        execute(programs, states, InProcess(), ExecutorOptions(allocate=never))
    assert caught.value.fault.code == "NRS6001"


def test_a_state_that_is_not_the_old_plans_is_refused() -> None:
    old, new = LAYOUTS["tp4"], LAYOUTS["tp2 pp2"]
    programs = build_programs(old, new)
    states = fill(programs.values(), old, Values([old, new]))
    device = next(iter(programs))
    states[device].held.pop(next(k for k in states[device].held if k.slot == "exp_avg"))
    with pytest.raises(ExecutionFailed) as caught:
        execute(programs, states, InProcess())
    assert caught.value.fault.code == "NRS6010"
    assert "exp_avg" in caught.value.fault.text


def test_the_check_sees_every_kind_of_fault() -> None:
    plan = LAYOUTS["zero1"]
    programs = build_programs(plan, plan)
    values = Values([plan])
    states = fill(programs.values(), plan, values)
    device = sorted(states)[3]
    keys = list(states[device].held)
    missing = states[device].held.pop(keys[0])
    states[device].held[keys[1]].data.view(torch.int16)[-1] ^= 1
    short = states[device].held[keys[2]]
    states[device].put(short.spec, short.data[:-1].clone())
    hosted = states[device].held[keys[3]]
    states[device].put(replace(hosted.spec, host=True), hosted.data)
    states[device].put(replace(missing.spec, stage="actor.nowhere"), missing.data)
    result = check(states, plan, values)
    assert result.num_failures == 5
    words = " ".join(result.failures)
    for word in ("missing", "elements are wrong", "elements instead of", "host", "device memory", "left over"):
        assert word in words or word == "host"


def test_old_programs_that_miss_a_shard_are_refused() -> None:
    plan = LAYOUTS["zero1"]
    programs = build_programs(plan, plan)
    other = build_programs(LAYOUTS["tp4"], LAYOUTS["tp4"])
    with pytest.raises(Fault, match="the old plan has"):
        fill(other.values(), plan, Values([plan]))
    with pytest.raises(Fault, match="the old plan has not"):
        small = replace(plan, stages=())
        fill(programs.values(), small, Values([plan]))


def job(plans: list[Plan], **more: Any) -> Job:
    steps = tuple(Step(old=a, new=b, programs=build_programs(a, b)) for a, b in pairwise(plans))
    devices = {d for s in steps for d in s.programs}
    return Job(process=0, num_processes=1, steps=steps, process_of=dict.fromkeys(devices, 0), deadline_s=10.0, **more)


def test_a_chain_with_growth_a_lost_node_and_a_new_model() -> None:
    small = trainer(cluster(4), tp=2)
    grown = trainer(EIGHT, tp=2, pp=2)
    lost = trainer(cluster(4, first=1), tp=4)  # n0 is gone
    fresh = ppo(cluster(4, first=1), actor={"tp": 2}, critic={"tp": 1}, ref={"tp": 1})
    result = run_job(job([small, grown, lost, fresh]), lambda step: InProcess(), lambda event: None)
    assert [s.fault for s in result.steps] == [None, None, None]
    assert all(s.check.ok and s.check.num_elements for s in result.steps)


def test_weights_follow_their_master_and_values_are_finite() -> None:
    values = Values([LAYOUTS["tp4"]])
    master = values.bits("actor", "x", "master", "fp32", 5000).view(torch.float32)
    weight = values.bits("actor", "x", "weight", "bf16", 5000).view(torch.bfloat16)
    assert torch.isfinite(master).all()
    assert torch.equal(master.bfloat16(), weight)
    assert len(torch.unique(master)) > 4990
    own = values.bits("reward", "x", "weight", "bf16", 5000).view(torch.bfloat16)
    assert torch.isfinite(own).all()
    assert not torch.equal(own, weight)


def test_arch_of_these_tests_replicates_kv_heads() -> None:
    assert ARCH.num_kv_heads < LAYOUTS["tp8 (kv heads replicated)"].stages[0].tp
