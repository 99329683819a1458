"""Which copies are sources of each other: same model, same version; and never what only looks alike."""

from __future__ import annotations

from dataclasses import replace

from passes.plans import ARCHS, WORKLOAD, cluster, stage

from nereus.ir.cluster import Cluster, Device
from nereus.ir.holdings import join_clusters
from nereus.ir.plan import Model, Plan, Stage
from nereus.passes.diff import Diff, diff
from nereus.passes.hold import hold
from nereus.passes.place import pin
from nereus.passes.route import Route

ACTOR = Model(name="actor", arch=ARCHS[0], source="tiny")
REF = Model(name="ref", arch=ARCHS[0], source="tiny", base="actor", frozen=True)


def on(node: int, *gpus: int) -> tuple[Device, ...]:
    return tuple(Device(f"n{node}", gpu) for gpu in gpus)


def plan(where: Cluster, *stages: Stage, mode: str = "async", models: tuple[Model, ...] = (ACTOR,)) -> Plan:
    return Plan(cluster=where, models=models, workload=replace(WORKLOAD, mode=mode), stages=stages)


def difference(old: Plan, new: Plan) -> Diff:
    old, new = pin(old), pin(new)
    return diff(hold(old), hold(new), join_clusters(old.cluster, new.cluster))


def weight_holders(found: Diff) -> set[tuple[int, ...]]:
    """Holders of everything that some place lacks, for tables that have weights."""
    return {found.holders[d.table][d.cls] for d in found.demands if "weight" in found.tables[d.table].slots}


def test_at_a_weight_sync_generation_is_a_source_beside_the_trainer() -> None:
    """A second engine starts next to the first: it gets its weights from there, not over the NIC."""
    where = cluster(1, 2)
    train = stage(ACTOR, "train", on(0, 0))
    old = plan(where, train, stage(ACTOR, "generate", on(1, 0)))
    found = difference(old, plan(where, train, stage(ACTOR, "generate", on(1, 0, 1))))
    assert weight_holders(found) == {(0, 1)}
    assert {(move.src, move.dst) for move in Route().apply(found).moves} == {(1, 2)}


def test_after_a_synchronous_step_generation_is_a_cache() -> None:
    """The trainer has just stepped: the engine's copy is older, no source, and not wanted before the next sync."""
    where = cluster(1, 2)
    train = stage(ACTOR, "train", on(0, 0))
    old = plan(where, train, stage(ACTOR, "generate", on(1, 0)), mode="sync")
    found = difference(old, plan(where, train, stage(ACTOR, "generate", on(1, 0, 1)), mode="sync"))
    assert not found.demands
    moved = replace(train, devices=on(1, 1), place=None)
    found = difference(old, plan(where, moved, stage(ACTOR, "generate", on(1, 0)), mode="sync"))
    assert found.demands
    assert {found.holders[d.table][d.cls] for d in found.demands} == {(0,)}
    assert all(1 not in places for table in found.holders for places in table)


def test_at_a_weight_sync_the_trainer_moves_to_where_generation_has_its_weights() -> None:
    """The trainer moves onto an engine's GPU: weights are there already, masters and moments come from the trainer."""
    where = cluster(1, 2)
    old = plan(where, stage(ACTOR, "train", on(0, 0)), stage(ACTOR, "generate", on(1, 0)))
    new = plan(where, stage(ACTOR, "train", on(1, 0)), stage(ACTOR, "generate", on(1, 1)))
    found = difference(old, new)
    lacking = {(found.tables[d.table].slots, d.wanters) for d in found.demands}
    assert all(1 not in wanters for slots, wanters in lacking if "weight" in slots)
    assert weight_holders(found) == {(0, 1)}
    assert {d.wanters for d in found.demands if "weight" not in found.tables[d.table].slots} == {(1,)}


def test_copies_of_a_model_that_nobody_trains_are_sources_of_each_other() -> None:
    """Also after a synchronous step, and when the node of one is lost."""
    where = cluster(1, 1, 1)
    infer, logprob = stage(REF, "infer", on(0, 0)), stage(REF, "logprob", on(1, 0))
    old = plan(where, infer, logprob, mode="sync", models=(ACTOR, REF))
    found = difference(old, plan(where, infer, replace(logprob, devices=on(2, 0)), mode="sync", models=(ACTOR, REF)))
    assert weight_holders(found) == {(0, 1)}
    left = replace(where, nodes=where.nodes[1:], lost=("n0",))
    found = difference(old, plan(left, replace(infer, devices=on(2, 0)), logprob, mode="sync", models=(ACTOR, REF)))
    assert not found.lost
    assert weight_holders(found) == {(1,)}


def test_models_with_equal_initial_weights_are_no_sources_of_each_other() -> None:
    """``ref = actor { frozen = true }`` was the actor at step 0 only; a plan does not say that no step was taken."""
    where = cluster(1, 1, 1)
    train, infer = stage(ACTOR, "train", on(0, 0)), stage(REF, "infer", on(1, 0))
    for mode in ("sync", "async"):
        old = plan(where, train, infer, mode=mode, models=(ACTOR, REF))
        new = plan(where, train, replace(infer, devices=on(2, 0)), mode=mode, models=(ACTOR, REF))
        assert weight_holders(difference(old, new)) == {(1,)}
