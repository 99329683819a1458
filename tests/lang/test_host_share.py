"""State that lies partly in host memory: the words, and the bytes that the memory model counts."""

from __future__ import annotations

from math import ceil

import pytest
from lang_support import HEAD, codes, good, only

from nereus.ir.plan import Plan
from nereus.lang.api import format_text, placed_plan_text, resolve_text
from nereus.models.memory import steady_state
from nereus.models.memory.state import copies, device_state_bytes, host_state_bytes, slot_bytes
from nereus.passes.hold import hold

STAGE = "stage actor.train {{ on = n0  tp = 4  backend = megatron  zero = 1  {more}\n  state {{ {state} }} }}"
HALF = "master = fp32 @host(0.5)  exp_avg = fp32 @host(0.5)  exp_avg_sq = fp32 @host(0.25)"


def plan_of(state: str, more: str = "") -> Plan:
    return good(HEAD + STAGE.format(state=state, more=more))


def test_share_is_read_written_and_formatted() -> None:
    plan = plan_of(HALF)
    slots = {slot.name: slot for slot in plan.stage("actor.train").slots}
    assert [(s.host, s.host_share) for s in slots.values()] == [(False, 1), (True, 0.5), (True, 0.5), (True, 0.25)]
    again = resolve_text(placed_plan_text(plan)).plan
    assert again is not None and again.stage("actor.train").slots == plan.stage("actor.train").slots
    text = format_text("stage a.train { state { master=fp32 @ host( 0.50 ) exp_avg = fp32@host } }").text
    assert text is not None and "master = fp32 @host(0.50)" in text and "exp_avg = fp32 @host }" in text
    assert format_text(text).text == text
    assert (
        plan_of("master = fp32 @host(1)").stage("actor.train").slots
        == plan_of("master = fp32 @host").stage("actor.train").slots
    )


@pytest.mark.parametrize("share", ["0", "-0.5", "1.5", "2"])
def test_a_share_is_above_0_and_at_most_1(share: str) -> None:
    text = HEAD + STAGE.format(state=f"master = fp32 @host({share})", more="")
    assert "between 0 and 1" in only(text, "NRS2010").headline


@pytest.mark.parametrize("value", ["fp32 @disk(0.5)", "fp32 @host(half)", "fp32 @host()", "fp32 @host(0.5 GiB)"])
def test_other_words_are_refused(value: str) -> None:
    assert codes(HEAD + STAGE.format(state=f"master = {value}", more=""))


def test_memory_counts_the_share_on_both_sides() -> None:
    every, half, none = (plan_of(s) for s in ("master = fp32 @host", "master = fp32 @host(0.3)", "master = fp32"))
    (copy,) = copies(half)
    (master,) = (s for s in copy.slots if s.name == "master")
    total = slot_bytes(copy, master, 0)
    least = ceil(total // 4 * 0.3) * 4
    largest = max(rows * cols for rows, cols, _ in copy.shapes[0].dense) * 4
    # The walk stops at the first part that reaches the share: whichever that is, both memories are counted in full.
    most = least - 4 + largest
    assert host_state_bytes(copy, 0) == most
    assert device_state_bytes(copies(none)[0], 0) - device_state_bytes(copy, 0) == least
    assert host_state_bytes(copies(every)[0], 0) == total
    reports = [steady_state(p) for p in (every, half, none)]
    masters = [report.worst("actor.train").part_bytes("master") for report in reports]
    assert masters == [0, total - least, total]
    assert reports[1].hosts[0].need_bytes == 8 * most and reports[2].hosts[0].need_bytes == 0


def test_a_stage_that_is_offloaded_is_wholly_in_host_memory_at_a_change() -> None:
    offloaded = plan_of(HALF, "idle = offload")
    assert all(slot.host and slot.host_share == 1 for s in hold(offloaded).sets for slot in s.slots)
