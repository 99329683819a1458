"""Nodes whose GPUs have problems: when they are unfit, and what the advisor makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.test_advisor import OVERHEAD, text
from planner.test_rl_step import PRIOR, plan_of

from nereus.ir.plan import Plan
from nereus.planner.advisor import Advisor
from nereus.planner.decisions import GO, STAY, Decision
from nereus.planner.health import Health, Problem
from nereus.planner.live import Live
from nereus.planner.online import Online
from nereus.planner.pools import nodes_of
from nereus.planner.rl_step import step_time

HOT = Problem(text="GPU 1 slowed by hardware: too hot", slows=True)
BROKEN = Problem(text="GPU 1 has 2 uncorrected memory errors", slows=False)
NODES = ("n0", "n1", "n2", "n3")


@given(st.lists(st.sampled_from(((), (HOT,), (BROKEN,), (HOT, BROKEN))), max_size=30))
def test_a_node_is_unfit_by_what_was_reported_last(reports: Sequence[tuple[Problem, ...]]) -> None:
    """Against the rule said of the whole history: unfit from a fault, or three slowed boundaries in a row, until ten
    good ones in a row."""
    health = Health(sick=3, well=10)
    for number, report in enumerate(reports):
        health.observe({"n0": report, "n1": ()})
        past = reports[: number + 1]
        good = next((back for back, seen in enumerate(reversed(past)) if seen), len(past))
        ever = good >= 10 or not any(past)
        since = max((at + 10 for at in range(len(past) - 9) if not any(past[at : at + 10])), default=0)
        faulty = any(BROKEN in seen for seen in past[since:])
        slowed = any(all(past[at : at + 3]) for at in range(since, len(past) - 2))
        assert set(health.unfit) == (set() if ever or not (faulty or slowed) else {"n0"})
        assert set(health.faulty) == (set() if ever or not faulty else {"n0"})
        assert health.ill == ({"n0"} if report else frozenset())


def watched(**words: object) -> Advisor:
    return Advisor(plan_of(text().replace("n[0-1] {", "n[0-3] {")), PRIOR, pool=NODES[:3], **words)  # type: ignore[arg-type]


def took(plan: Plan, slowed: Mapping[str, float] | None = None) -> float:
    """Seconds of a step; the slowest node sets the pace."""
    at = replace(plan, workload=replace(plan.workload, response_len=1100))
    return OVERHEAD * step_time(at, PRIOR).seconds * max((slowed or {}).get(node, 1.0) for node in nodes_of(plan))


def drive(advisor: Advisor, num: int, problems: Mapping[str, Sequence[Problem]], slower: float = 1.0) -> list[Decision]:
    slowed = dict.fromkeys(problems, slower)
    return [
        advisor.observe(step=0, response_len=1100, step_s=took(advisor.plan, slowed), problems=problems)
        for _ in range(num)
    ]


def test_a_node_with_a_fault_is_left_at_once_and_stays_left() -> None:
    advisor = watched()
    assert nodes_of(advisor.plan) == {"n0", "n1"}
    drive(advisor, 2, {})
    (decision,) = drive(advisor, 1, {"n1": [BROKEN]})
    assert decision.trigger == "health" and decision.action == GO and "n1: GPU 1 has 2 uncorr" in decision.reason
    assert decision.plan is not None and "n1" not in nodes_of(decision.plan)
    assert not decision.plan.cluster.lost, "its memory can still be read"
    assert decision.unfit == (("n1", BROKEN.text),)
    assert {d.action for d in drive(advisor, 5, {"n1": [BROKEN]})} == {STAY}
    assert "n1" not in nodes_of(advisor.plan)


def test_a_node_that_is_hot_for_a_moment_is_kept() -> None:
    advisor = watched()
    drive(advisor, 5, {})
    said = [*drive(advisor, 2, {"n1": [HOT]}, 1.3), *drive(advisor, 1, {}), *drive(advisor, 2, {"n1": [HOT]}, 1.3)]
    assert {d.action for d in said} == {STAY} and not any(d.unfit for d in said)


def test_a_slow_node_is_left_where_that_pays_and_what_is_expected_elsewhere_comes_true() -> None:
    """Steps take twice as long with the node; there is a spare one. The trial of the new plan misses nothing."""
    advisor = watched()
    drive(advisor, 10, {})
    pace = took(advisor.plan)
    said = drive(advisor, 6, {"n1": [HOT]}, 2.0)
    (moved,) = [d for d in said if d.action == GO]
    assert said.index(moved) >= 2 and moved.unfit == (("n1", HOT.text),)
    assert "n1" not in nodes_of(advisor.plan) and took(advisor.plan) <= 1.01 * pace
    assert {d.action for d in drive(advisor, 6, {"n1": [HOT]}, 2.0)} == {STAY}


def test_a_slow_node_is_kept_where_the_others_would_take_longer() -> None:
    advisor = Advisor(plan_of(text()), PRIOR)  # two nodes, both used
    drive(advisor, 10, {})
    said = drive(advisor, 12, {"n1": [HOT]}, 1.1)
    assert said[-1].unfit and nodes_of(advisor.plan) == {"n0", "n1"}
    assert all(d.plan is None or nodes_of(d.plan) == {"n0", "n1"} for d in said), "other layouts there may be better"


def test_where_nothing_fits_without_the_faulty_node_the_job_goes_on_with_it() -> None:
    small = text().replace("n[0-1] { gpus = 8", "n[0-1] { gpus = 2")
    advisor = Advisor(plan_of(small), PRIOR)
    (first, second) = drive(advisor, 2, {"n1": [BROKEN]})
    assert first.trigger == "health" and first.action == STAY and "no layout fits without" in first.reason
    assert second.trigger != "health" and second.unfit, "looked for once"
    # Unfit nodes are better than none.
    lost = advisor.observe(step=3, response_len=1100, pool=["n1"], problems={"n1": [BROKEN]})
    assert lost.trigger == "lost"


def test_the_log_has_what_was_told_and_repeats() -> None:
    def live() -> Live:
        return Live(watched(), Online(PRIOR))

    first = live()
    for problems in ({}, {"n1": [HOT]}, {"n1": [HOT, BROKEN]}, None):
        first.observe(step=0, response_len=1100, step_s=40.0, pool=NODES, problems=problems)
    log = json.loads(json.dumps(first.log))
    assert log[2]["unfit"] == {"n1": f"{HOT.text}; {BROKEN.text}"} and log[2]["action"] == GO
    again = live()
    for said in log:
        told = said["problems"]
        again.observe(
            **{key: said[key] for key in ("step", "response_len", "step_s", "pool")},
            problems=None if told is None else {node: [Problem(**p) for p in of] for node, of in told.items()},
        )
    assert again.log == first.log == log


def test_settings_of_health_are_the_advisors() -> None:
    advisor = watched(settings=replace(watched().settings, sick=1))
    (decision,) = drive(advisor, 1, {"n1": [HOT]})
    assert decision.unfit == (("n1", HOT.text),)
    with pytest.raises(ValueError, match="m9"):
        drive(advisor, 1, {"m9": [HOT]})
