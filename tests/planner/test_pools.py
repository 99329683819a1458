"""Plans on other nodes, and what is made ready for the loss of each."""

from __future__ import annotations

import pytest
from planner.test_rl_step import COLOCATED, PRIOR, SPLIT, plan_of

from nereus.models.memory import check_memory
from nereus.passes.coarse import coarse
from nereus.passes.pipeline import compile_transition
from nereus.planner.contingency import contingencies
from nereus.planner.limits import Limits
from nereus.planner.pools import nodes_of, on_most_nodes, on_nodes
from nereus.planner.search import search

FOUR = COLOCATED.replace("n[0-1]", "n[0-3]")


def test_stages_keep_their_share_of_the_pool() -> None:
    plan = plan_of(SPLIT.replace("on = n0", "on = n[0-1]").replace("on = n1", "on = n[2-3]").replace(
        "node n[0-1]", "node n[0-3]"
    ))  # fmt: skip
    moved = on_nodes(plan, ["n1", "n3"])
    assert moved is not None
    assert {d.node for d in moved.stage("actor.generate").devices} == {"n1"}
    assert {d.node for d in moved.stage("actor.train").devices} == {"n3"}
    assert nodes_of(plan) == {"n0", "n1", "n2", "n3"}


@pytest.mark.parametrize("names", [["n0"], ["n1", "n2"], ["n0", "n1", "n2", "n3"]])
def test_a_moved_plan_is_one_that_compiles(names: list[str]) -> None:
    plan = plan_of(FOUR)
    moved = on_nodes(plan, names)
    assert moved is not None and nodes_of(moved) == set(names)
    assert all(stage.tp * stage.pp * stage.cp * stage.dp == len(stage.devices) for stage in moved.stages)
    compile_transition(plan, moved)


def test_a_batch_that_does_not_divide_takes_fewer_nodes() -> None:
    plan = plan_of(FOUR)  # 256 samples an update; 24 GPUs have no degrees for them
    assert on_nodes(plan, ["n0", "n1", "n2"]) is None
    moved = on_most_nodes(plan, ["n0", "n1", "n2"])
    assert moved is not None and nodes_of(moved) == {"n0", "n1"}
    assert on_most_nodes(plan, []) is None


def test_there_is_a_plan_for_the_loss_of_each_node() -> None:
    plan = plan_of(FOUR)
    found = contingencies(plan, PRIOR)
    assert [each.node for each in found] == ["n0", "n1", "n2", "n3"]
    for each in found:
        assert each.plan is not None and each.survives
        assert each.node not in nodes_of(each.plan) and each.plan.cluster.lost == (each.node,)
        assert not any(d.severity.value == "error" for d in check_memory(each.plan))
        assert each.stop_s == coarse(plan, each.plan).stop_s
        # What one search found for all of them is what a search for this one finds.
        placed = on_most_nodes(plan, nodes_of(plan) - {each.node}, lost=[each.node])
        assert placed is not None
        assert each.seconds == pytest.approx(search(placed, PRIOR, count=1).best[0].seconds)


def test_a_contingency_can_be_compiled() -> None:
    (first, *_) = contingencies(plan_of(FOUR), PRIOR, compiled=True)
    assert first.transition is not None and first.stop_s == first.transition.timeline.stop_s


def test_a_contingency_keeps_to_what_the_program_can_serve() -> None:
    limits = Limits(serves=lambda stage: stage.tp == 8)
    for each in contingencies(
        plan_of(FOUR.replace("tp = 2", "tp = 8").replace("pp = 2", "pp = 1")), PRIOR, limits=limits
    ):
        assert each.plan is not None and {stage.tp for stage in each.plan.stages} == {8}


def test_state_that_only_one_node_holds_does_not_survive_it() -> None:
    # Megatron's order puts each of the two pipeline stages on a node of its own.
    assert [each.survives for each in contingencies(plan_of(COLOCATED), PRIOR)] == [False, False]
    of_node = {each.node: each for each in contingencies(plan_of(SPLIT), PRIOR)}
    assert not of_node["n1"].survives  # the only trainer
    assert of_node["n0"].survives
