"""Models that the job says are equal now: each is a source of the other's weights, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from passes.execute import pipeline, run
from passes.oracle import State, Universe
from passes.plans import ARCHS, WORKLOAD, cluster, stage

from nereus.cli.transition.saved import saved_document
from nereus.ir.cluster import Cluster, Device
from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.plan import Model, Plan, Stage
from nereus.passes.compiled import Transition
from nereus.passes.pipeline import compile_transition
from nereus.verify.api import verify

ACTOR = Model(name="actor", arch=ARCHS[0], source="tiny")
REF = Model(name="ref", arch=ARCHS[0], source="tiny", base="actor", frozen=True)
WHERE = cluster(4, 4)
TRAIN = stage(ACTOR, "train", WHERE.devices[:4], tp=2, zero=1)


def plan(*stages: Stage, mode: str = "sync", models: tuple[Model, ...] = (ACTOR, REF), on: Cluster = WHERE) -> Plan:
    return Plan(cluster=on, models=models, workload=replace(WORKLOAD, mode=mode), stages=stages)


def execute(transition: Transition, universe: Universe) -> None:
    """In-process, every element by position: what ``ref`` has afterwards are the actor's elements, or its own."""
    start, end = State(transition.old, universe), State(transition.new, universe)
    outcome = run(transition, start.storages, universe.weight_of, seed=1)
    had_ref = ("ref", "weight") in start.slots()
    assert set(outcome.buffers) == set(end.storages)
    for (device, name, slot, tensor), ids in end.storages.items():
        values = outcome.buffers[device, name, slot, tensor]
        to_actor = universe.first["actor", slot, tensor] - universe.first.get(("ref", slot, tensor), 0)
        if name.startswith("ref"):
            equal = values == ids + to_actor
            assert bool((equal | (values == ids) if had_ref else equal).all())
        elif had_ref and slot == "weight":
            assert bool(((values == ids) | (values == ids - to_actor)).all())
        else:
            assert np.array_equal(values, ids)


def start_ref(devices: tuple[Device, ...], **settings: object) -> tuple[Plan, Plan]:
    return plan(TRAIN, models=(ACTOR,)), plan(TRAIN, stage(REF, "infer", devices, **settings))


@pytest.mark.parametrize("mode", ["reversible", "tight"])
@pytest.mark.parametrize("pair", [("actor", "ref"), ("ref", "actor")])
@pytest.mark.parametrize(
    "make",
    [
        lambda: start_ref(WHERE.devices[4:], tp=4),
        lambda: start_ref(WHERE.devices, pp=2, tp=2),
        lambda: start_ref(WHERE.devices[2:6], tp=2, idle="offload"),
        lambda: (
            plan(TRAIN, models=(ACTOR,)),
            plan(
                replace(TRAIN, devices=WHERE.devices, dp=4, zero=1),
                stage(REF, "infer", WHERE.devices[:2], tp=2),
            ),
        ),
    ],
    ids=["beside", "everywhere", "host memory", "trainer moves too"],
)
def test_a_new_reference_model_starts_from_the_actor(
    make: Callable[[], tuple[Plan, Plan]], pair: tuple[str, str], mode: str
) -> None:
    old, new = make()
    transition = compile_transition(old, new, pipeline(mode=mode), same=[pair])
    assert transition.same == (("actor", "ref"),)
    assert transition.certificate.safe
    assert not transition.diff.fresh
    execute(transition, Universe(old, new))
    unstated = compile_transition(old, new, pipeline(mode=mode))
    assert ("ref.infer", "weight") in unstated.diff.fresh
    assert unstated.digest != transition.digest


def test_bytes_are_those_of_one_more_copy() -> None:
    """Nothing else enters node n1 than one copy of the weights."""
    old, new = start_ref(WHERE.devices[4:], tp=4)
    certificate = compile_transition(old, new, pipeline(), same=[("actor", "ref")]).certificate
    weights = sum(t.numel for s in compile_transition(old, new).new_holdings.sets[:1] for t in s.tensors) * 2
    assert certificate.bound_node_in_bytes_max == certificate.node_in_bytes_max == weights


def test_both_are_sources_of_each_other() -> None:
    """A reference model on node n1 grows there, and the actor's trainer moves there: weights come from beside."""
    infer = stage(REF, "infer", WHERE.devices[4:6], tp=2)
    old = plan(stage(ACTOR, "train", WHERE.devices[:2], tp=2), infer)
    new = plan(stage(ACTOR, "train", WHERE.devices[6:], tp=2), replace(infer, devices=WHERE.devices[4:], dp=2))
    transition = compile_transition(old, new, pipeline(), same=[("actor", "ref")])
    execute(transition, Universe(old, new))
    across = {t.slots for t in transition.diff.tables if "weight" not in t.slots}
    moved = {transition.diff.tables[m.table].slots for m in transition.schedule.moves if m.src < 4 <= m.dst}
    assert moved <= across
    alone = compile_transition(old, new, pipeline()).certificate
    assert transition.certificate.moved_bytes <= alone.moved_bytes


@pytest.mark.parametrize(
    ("pairs", "models", "stages", "says"),
    [
        ([("actor", "critic")], (ACTOR, REF), "infer", "neither plan has a model critic"),
        ([("ref", "ref")], (ACTOR, REF), "infer", "they are one model"),
        ([("actor", "ref")], (ACTOR, replace(REF, arch=ARCHS[2])), "infer", "other tensors"),
        ([("actor", "ref")], (ACTOR, replace(REF, head="value")), "infer", "other tensors"),
        ([("actor", "ref")], (ACTOR, replace(REF, precision="fp16")), "infer", "actor is bf16 and ref is fp16"),
        ([("actor", "ref")], (ACTOR, replace(REF, frozen=False)), "train", "both keep more than weights"),
        ([("ref", "third")], (ACTOR, REF, replace(REF, name="third")), "infer", "the old plan holds neither"),
    ],
)
def test_what_cannot_be_the_same_is_refused(
    pairs: list[tuple[str, str]], models: tuple[Model, ...], stages: str, says: str
) -> None:
    one = stage(models[1], stages, WHERE.devices[4:])
    old, new = plan(TRAIN, models=(ACTOR,)), plan(TRAIN, one, models=models)
    with pytest.raises(DiagnosticError) as caught:
        compile_transition(old, new, pipeline(), same=pairs)
    (found,) = caught.value.diagnostics
    assert found.code == "NRS5010"
    assert says in found.headline


def test_a_model_is_the_same_as_one_other() -> None:
    third = replace(REF, name="third")
    new = plan(
        TRAIN,
        stage(REF, "infer", WHERE.devices[4:]),
        stage(third, "infer", WHERE.devices[4:]),
        models=(ACTOR, REF, third),
    )
    with pytest.raises(DiagnosticError) as caught:
        compile_transition(plan(TRAIN, models=(ACTOR,)), new, same=[("actor", "ref"), ("ref", "third")])
    assert [d.code for d in caught.value.diagnostics] == ["NRS5010"]
    found = compile_transition(plan(TRAIN, models=(ACTOR,)), new, same=[("actor", "ref"), ("third", "actor")])
    assert found.same == (("actor", "ref"), ("actor", "third"))
    assert not found.diff.fresh


def test_the_verifier_accepts_such_sources_only_where_they_are_stated() -> None:
    plans = start_ref(WHERE.devices[4:], tp=4)
    transition = compile_transition(*plans, pipeline(), same=[("actor", "ref")])
    saved = saved_document(transition, pipeline=pipeline(), allow_destroy=False, old_path="a", new_path="b")
    value = json.loads(json.dumps(saved))
    assert value["options"]["same"] == [["actor", "ref"]]
    sides = (transition.old, transition.new)
    verdict = verify(value, sides)
    assert verdict.holds, [f for f in verdict.findings if not f.holds]
    del value["options"]["same"]
    broken = {f.name for f in verify(value, sides).findings if not f.holds}
    assert {"digest", "elements"} <= broken
    value["options"]["same"] = [["ref", "actor"]]  # then the trainer's masters would be the reference's
    assert any("actor.train is said to have ref's weights" in f.evidence for f in verify(value, sides).findings)
