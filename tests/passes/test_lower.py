"""The paper's worked examples come out as its primitives."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from passes.plans import ARCHS, Model, cluster, pairs, stage, trainer
from passes.profiles import examples

from nereus.ir.plan import Plan
from nereus.passes.lower import StageChange, emus, lower
from nereus.passes.place import pin

ARCH = replace(ARCHS[0], num_layers=8, num_heads=8, ffn=16, vocab=16)


def primitives(change: StageChange) -> list[tuple[str, int, tuple[int, int], tuple[int, int]]]:
    return [(p.kind, p.count, p.before, p.after) for p in change.primitives]


def test_8b_training_from_4_2_2_to_4_4_1() -> None:
    """(DP, TP, PP): each of four replicas splits along the pipeline into (TP2, PP1) halves, and merges to TP4."""
    on = cluster(8, 8)
    (change,) = lower(pin(trainer(on, arch=ARCH, tp=2, pp=2)), pin(trainer(on, arch=ARCH, tp=4)))
    assert primitives(change) == [("split", 4, (2, 2), (2, 1)), ("merge", 4, (2, 1), (4, 1))]
    assert change.marks == "/&"


def test_reward_inference_shrinks_from_32_to_16() -> None:
    """(TP4, PP8) on 32 -> four (TP4, PP2), two destroyed, two merged into one (TP8, PP2)."""
    on = cluster(8, 8, 8, 8)
    reward = Model(name="reward", arch=ARCH, source="tiny", head="value", frozen=True)
    base = trainer(on)

    def plan(count: int, tp: int, pp: int) -> Plan:
        return replace(base, models=(reward,), stages=(stage(reward, "infer", on.devices[:count], tp=tp, pp=pp),))

    (change,) = lower(pin(plan(32, 4, 8)), pin(plan(16, 8, 2)))
    assert primitives(change) == [
        ("split", 1, (4, 8), (4, 2)),
        ("destroy", 2, (4, 2), (4, 2)),
        ("merge", 1, (4, 2), (8, 2)),
    ]
    assert len(change.primitives[1].devices) == 16


def test_actor_grows_by_extend_then_merge() -> None:
    """(TP1, PP4, DP2) on 8 -> (TP2, PP4, DP2) on 16: two replicas are extended, then pairs merge."""
    on = cluster(8, 8)
    old, new = trainer(on, on.devices[:8], arch=ARCH, pp=4), trainer(on, arch=ARCH, tp=2, pp=4)
    (change,) = lower(pin(old), pin(new))
    assert primitives(change) == [("extend", 2, (1, 4), (1, 4)), ("merge", 2, (1, 4), (2, 4))]
    assert set(change.primitives[0].devices) == set(on.devices[8:])


def test_critic_grows_by_two_extends() -> None:
    on = cluster(8, 8)
    old, new = trainer(on, on.devices[:8], arch=ARCH, pp=4), trainer(on, arch=ARCH, pp=4)
    (change,) = lower(pin(old), pin(new))
    assert primitives(change) == [("extend", 2, (1, 4), (1, 4))]


def test_what_the_four_cannot_say_is_a_reshape() -> None:
    on = cluster(8)
    for settings in ({"zero": 1}, {"fsdp": 8}, {"cp": 2}, {"pp": 2, "pp_split": (3, 5)}):
        old = trainer(on, arch=ARCH, pp=settings.get("pp", 1))  # type: ignore[arg-type]
        (change,) = lower(pin(old), pin(trainer(on, arch=ARCH, **settings)))
        assert "#" in change.marks, settings


def test_nothing_changes() -> None:
    on = cluster(8)
    (change,) = lower(pin(trainer(on, arch=ARCH, tp=2)), pin(trainer(on, arch=ARCH, tp=2)))
    assert not change.changed and not change.primitives


@examples(60)
@given(pairs())
def test_any_pair_has_an_explanation(pair: tuple[Plan, Plan]) -> None:
    """No pair crashes; EMUs partition a stage; devices that come and go are those that the plans say."""
    old, new = pin(pair[0]), pin(pair[1])
    for change in lower(old, new):
        for one in (change.old, change.new):
            if one is not None and one.service is None:
                found = [d for emu in emus(one) for d in emu]
                assert sorted(found) == sorted(one.devices) and len(emus(one)) == one.num_emus
        if change.old is None or change.new is None:
            continue
        gone, fresh = set(change.old.ranks) - set(change.new.ranks), set(change.new.ranks) - set(change.old.ranks)
        by_kind = {p.kind: set(p.devices) for p in change.primitives}
        assert by_kind.get("destroy", set()) == gone and by_kind.get("extend", set()) == fresh
        assert all(p.count > 0 for p in change.primitives)
