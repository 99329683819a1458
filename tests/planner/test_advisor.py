"""Decisions over whole traces: what triggers, what is admitted, what goes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from planner.test_rl_step import COLOCATED, PRIOR, plan_of

from nereus.ir.plan import Plan
from nereus.models.memory import check_memory
from nereus.passes.coarse import coarse
from nereus.planner.advisor import Advisor
from nereus.planner.decisions import BACK, GO, STAY, Settings
from nereus.planner.rl_step import step_time

#: What a framework adds to every step that the model does not know of.
OVERHEAD = 1.6
#: Mean response lengths that grow as those of reasoning runs do.
GROWTH = [1100 + 120 * step for step in range(26)]


def text(response_len: int = 1100) -> str:
    return COLOCATED.replace("response_len = 1536", f"response_len = {response_len}").replace(
        "max_response = 4096", "max_response = 16384"
    )


def measured(plan: Plan, response_len: float) -> float:
    at = replace(plan, workload=replace(plan.workload, response_len=round(response_len)))
    return OVERHEAD * step_time(at, PRIOR).seconds


def drive(
    advisor: Advisor, lengths: list[int], truth: Callable[[Plan, float], float] = measured
) -> tuple[float, list[Plan]]:
    """(seconds of all steps and stops, plan of every step)."""
    seconds, plans = 0.0, []
    for step, length in enumerate(lengths):
        plan = advisor.plan
        plans.append(plan)
        took = truth(plan, length)
        seconds += took
        decision = advisor.observe(step=step, response_len=length, step_s=took)
        if decision.plan is not None:
            seconds += coarse(replace(plan, workload=decision.plan.workload), decision.plan).stop_s
    return seconds, plans


def test_drift_is_followed_and_pays() -> None:
    plan = plan_of(text())
    advisor = Advisor(plan, PRIOR)
    ours, _ = drive(advisor, GROWTH)
    static = sum(measured(plan, length) for length in GROWTH)
    assert ours < static
    assert any(decision.action == GO for decision in advisor.log)
    for decision in advisor.log:
        if decision.action == GO and decision.trigger != "memory":
            assert decision.regret_s >= advisor.settings.trust * min(row[2] for row in decision.considered)


def test_steady_lengths_trigger_nothing() -> None:
    advisor = Advisor(plan_of(text()), PRIOR)
    drive(advisor, [1100, 1150, 1060, 1200, 1100, 1000])
    assert [decision.action for decision in advisor.log] == [STAY] * 6
    assert not any(decision.trigger for decision in advisor.log)


def test_the_reference_moves_with_every_look() -> None:
    advisor = Advisor(plan_of(text()), PRIOR, pinned=["actor.train", "actor.generate", "ref.infer"])
    drive(advisor, [1500, 1500, 1500, 2100])
    assert [decision.trigger for decision in advisor.log] == ["drift", "", "", "drift"]
    assert advisor.horizon_steps == 2.0  # the last length was a jump: one change in four steps
    assert all(decision.action == STAY for decision in advisor.log)


def test_a_plan_that_would_not_fit_is_left_whatever_it_costs() -> None:
    plan = plan_of(text().replace("tp = 2  pp = 2", "tp = 2  pp = 2  micro_batch = 4"))
    lengths = [1100, 9000]
    grown = replace(plan, workload=replace(plan.workload, response_len=9000))
    assert any(d.severity.value == "error" for d in check_memory(grown))
    advisor = Advisor(plan, PRIOR)
    drive(advisor, lengths)
    assert advisor.log[1].trigger == "memory" and advisor.log[1].action == GO
    assert not any(d.severity.value == "error" for d in check_memory(advisor.plan))


def test_a_change_that_misses_its_prediction_is_taken_back_and_not_made_again() -> None:
    plan = plan_of(text())
    lengths = [1100, 1100, 1100, *[1500] * 12]

    def truth(running: Plan, length: float) -> float:
        same = all(a.tp == b.tp and a.pp == b.pp for a, b in zip(running.stages, plan.stages, strict=True))
        return measured(running, length) * (1.0 if same else 2.0)

    settings = Settings(share=10.0)  # admits at once
    advisor = Advisor(plan, PRIOR, settings=settings)
    _, plans = drive(advisor, lengths, truth)
    actions = [decision.action for decision in advisor.log]
    assert actions.count(BACK) == 1
    went = max(step for step in range(actions.index(BACK)) if actions[step] == GO)
    assert actions.index(BACK) - went == settings.missed_steps
    assert GO not in actions[actions.index(BACK) :]
    assert [s.tp for s in plans[-1].stages] == [s.tp for s in plan.stages]
    assert "were expected" in advisor.log[actions.index(BACK)].reason


def test_watching_decides_the_same_and_changes_nothing() -> None:
    plan = plan_of(text())
    watching = Advisor(plan, PRIOR, observe_only=True)
    drive(watching, [1100, 1500])
    acting = Advisor(plan, PRIOR)
    drive(acting, [1100, 1500])
    assert watching.plan == plan
    assert [d.action for d in watching.log] == [d.action for d in acting.log]


def test_watching_has_tried_nothing_that_could_miss() -> None:
    watching = Advisor(plan_of(text()), PRIOR, observe_only=True, settings=Settings(share=10.0))
    for step in range(6):
        watching.observe(step=step, response_len=1500, step_s=60.0 + 60.0 * step)
    assert watching.log[0].action == GO and BACK not in [d.action for d in watching.log]


def test_a_change_that_was_given_up_is_not_taken_for_made() -> None:
    plan = plan_of(text())
    advisor = Advisor(plan, PRIOR, settings=Settings(share=10.0))
    assert advisor.observe(step=0, response_len=1500, step_s=60.0).plan is not None
    for step in range(1, 5):
        advisor.observe(step=step, response_len=1500, step_s=600.0, plan=plan)
    assert advisor.plan == plan and BACK not in [d.action for d in advisor.log]


def test_replaying_the_observations_repeats_the_decisions() -> None:
    first = Advisor(plan_of(text()), PRIOR)
    drive(first, GROWTH[:12])
    again = Advisor(plan_of(text()), PRIOR)
    for decision in first.log:
        again.observe(step=decision.step, response_len=decision.response_len, step_s=decision.step_s)
    assert again.log == first.log


def test_observations_that_cannot_be_are_refused() -> None:
    advisor = Advisor(plan_of(text()), PRIOR)
    for wrong in (
        {"response_len": 0.0},
        {"response_len": float("nan")},
        {"response_len": float("inf")},
        {"response_len": 1e30},
        {"response_len": 1.0, "step_s": -1.0},
        {"response_len": 1.0, "step_s": float("inf")},
    ):
        with pytest.raises(ValueError, match="must be positive"):
            advisor.observe(step=0, **wrong)
