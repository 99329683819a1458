"""Decisions when nodes leave: in time, too late, without a word, and made ready before."""

from __future__ import annotations

import math
from typing import Any

import pytest
from planner.test_advisor import text
from planner.test_rl_step import PRIOR, plan_of

from nereus.ir.cluster import Device
from nereus.planner.advisor import Advisor
from nereus.planner.decisions import CHECKPOINT, GO, STAY
from nereus.planner.live import Live
from nereus.planner.online import Online
from nereus.planner.pools import nodes_of

NODES = ("n0", "n1", "n2", "n3")


def watched() -> Advisor:
    advisor = Advisor(plan_of(text().replace("n[0-1]", "n[0-3]")), PRIOR, pool=NODES)
    advisor.observe(step=0, response_len=1100, step_s=40.0)
    return advisor


def test_a_change_that_cannot_end_before_the_nodes_leave_is_a_checkpoint() -> None:
    for notice_s, action in ((1e6, GO), (0.01, CHECKPOINT)):
        decision = watched().observe(step=1, response_len=1100, step_s=40.0, pool=NODES[:2], notice_s=notice_s)
        assert decision.trigger == "lost" and decision.action == action
        assert decision.plan is not None and nodes_of(decision.plan) == {"n0", "n1"}


def test_what_was_made_ready_is_used_when_the_node_fails() -> None:
    advisor = watched()
    ready = {each.node: each for each in advisor.prepare(1100)}
    decision = advisor.observe(step=1, response_len=1120, step_s=40.0, pool=[n for n in NODES if n != "n1"])
    assert decision.action == GO and "ready" in decision.reason
    assert decision.plan is not None and ready["n1"].plan is not None
    assert decision.plan.stages == ready["n1"].plan.stages and decision.plan.cluster.lost == ("n1",)


#: Two of these nodes hold the job, one does not.
SMALL = text().replace("n[0-1] { gpus = 8", "n[0-3] { gpus = 2").replace("n[0-1]", "n[0-3]")


def test_a_session_asks_the_advisor_after_a_loss() -> None:
    advisor = watched()
    (ready, *_) = [each for each in advisor.prepare(1100, compiled=True) if each.node == "n2"]
    assert ready.transition is not None
    plan = advisor.replan(advisor.plan, [Device("n2", 3)])
    assert nodes_of(plan) <= {"n0", "n1", "n3"} and plan.cluster.lost == ("n2",)
    assert advisor.log[-1].trigger == "lost" and f"a stop of {ready.stop_s:.1f} s" in advisor.log[-1].reason
    with pytest.raises(ValueError, match="no layout fits on no node"):
        advisor.replan(plan, [Device(name, 0) for name in NODES])


def test_where_nothing_fits_the_job_is_saved_and_waits_until_something_does() -> None:
    advisor = Advisor(plan_of(SMALL), PRIOR, pool=NODES)
    advisor.observe(step=0, response_len=1100, step_s=40.0)
    noticed = advisor.observe(step=1, response_len=1100, step_s=40.0, pool=["n0"], notice_s=60)
    assert (noticed.trigger, noticed.action, noticed.plan, noticed.nodes_needed) == ("lost", CHECKPOINT, None, 2)
    assert "leave in 60 s" in noticed.reason and "no layout fits on n0 (2 GPUs)" in noticed.reason
    still = advisor.observe(step=2, response_len=1100, pool=["n0"])
    assert (still.action, still.plan, still.nodes_needed) == (CHECKPOINT, None, 2)
    # Also on the nodes that it had: what they held is gone.
    back = advisor.observe(step=2, response_len=1100, pool=NODES)
    assert back.action == CHECKPOINT and back.plan is not None and not back.plan.cluster.lost
    running = advisor.observe(step=3, response_len=1100, step_s=40.0)
    assert running.action == STAY


def test_a_failure_of_all_but_too_few_nodes_says_how_many_it_takes() -> None:
    advisor = Advisor(plan_of(SMALL), PRIOR, pool=NODES)
    advisor.observe(step=0, response_len=1100, step_s=40.0)
    decision = advisor.observe(step=1, response_len=1100, step_s=40.0, pool=[])
    assert (decision.trigger, decision.action, decision.nodes_needed) == ("lost", CHECKPOINT, 2)
    assert "failed; no layout fits on no node (0 GPUs): 2 nodes are needed" in decision.reason
    grown = advisor.observe(step=1, response_len=2e5, pool=NODES)
    assert (grown.action, grown.plan, grown.nodes_needed) == (CHECKPOINT, None, None)
    assert "nor on the whole cluster" in grown.reason


def test_observing_alone_waits_for_nothing() -> None:
    advisor = Advisor(plan_of(SMALL), PRIOR, pool=NODES, observe_only=True)
    assert advisor.observe(step=1, response_len=1100, pool=["n0"], notice_s=60).action == CHECKPOINT
    assert advisor.observe(step=2, response_len=1100, pool=NODES).action == STAY


@pytest.mark.parametrize(
    "wrong",
    [
        {"response_len": math.nan},
        {"response_len": math.inf},
        {"response_len": 0.0},
        {"step_s": math.nan},
        {"step_s": -1.0},
        {"notice_s": math.nan},
        {"pool": "n0"},
        {"pool": ["n0", "m9"]},
        {"problems": {"m9": ()}},
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(wrong: dict[str, Any]) -> None:
    live = Live(watched(), Online(PRIOR))
    with pytest.raises(ValueError, match=next(iter(wrong))):
        live.observe(**{"step": 1, "response_len": 1100.0, "step_s": 40.0, **wrong})
    assert not live.log and len(live.advisor.log) == 1 and live.online.between_s() == 0.0
    assert live.observe(step=1, response_len=1100.0, step_s=40.0, pool=NODES).action != CHECKPOINT


def test_a_plan_for_failures_wants_a_length_that_can_be() -> None:
    for length in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="response_len"):
            watched().prepare(length)
    with pytest.raises(ValueError, match="m9"):
        Advisor(plan_of(text()), PRIOR, pool=["m9"])
