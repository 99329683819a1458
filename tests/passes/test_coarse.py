"""The coarse estimate against the compiler: exact where it says so, within stated factors elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from passes.plans import ARCHS, cluster, describe, even_split, node, offloaded, pairs, trainer
from passes.profiles import examples

from nereus.ir.cluster import Cluster
from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.plan import ORDER_MEGATRON, Plan
from nereus.ir.units import GIB
from nereus.models.presets import preset
from nereus.models.tensors import num_params
from nereus.passes.coarse import coarse, forget
from nereus.passes.compiled import Transition
from nereus.passes.pipeline import compile_transition


def compiled(old: Plan, new: Plan) -> Transition:
    try:
        return compile_transition(old, new, verify=False, allow_destroy=True)
    except DiagnosticError:
        assume(False)
        raise


def is_split(plan: Plan) -> bool:
    """Whether state lies partly in host memory, where the estimate takes the share for what whole tensors make of
    it."""
    return any(slot.is_split for stage in plan.stages for slot in stage.slots)


def whole(plan: Plan) -> Plan:
    """``plan`` with nothing sharded over data parallelism, and no tied embedding in two places."""
    return replace(plan, stages=tuple(replace(s, zero=0, fsdp=0) for s in plan.stages))


def divides(plan: Plan) -> bool:
    if is_split(plan):
        return False
    for stage in plan.stages:
        arch = plan.model(stage.model).arch
        if arch.num_kv_heads % stage.tp or (arch.tied_embeddings and stage.pp > 1):
            return False
    return True


@examples(25)
@given(pairs(most=8))
def test_unsharded_state_is_exact(pair: tuple[Plan, Plan]):
    old, new = (whole(plan) for plan in pair)
    assume(divides(old) and divides(new))
    found = compiled(old, new)
    guess = coarse(found.old, found.new)
    certificate = found.certificate
    shown = f"\n{describe(found.old)}\n->\n{describe(found.new)}"
    assert guess.moved_bytes == certificate.moved_bytes, shown
    bound = certificate.bound_node_in_bytes_max
    assert bound <= guess.node_in_bytes_max <= bound + made_beside_others(found.new), shown


def made_beside_others(plan: Plan) -> int:
    """Bytes of weights that one copy makes from its masters on a node where another copy wants them, or parts of them:
    how much of that need not come from outside, the estimate does not know. 0 where it is exact."""
    found = 0
    for one in plan.owners():
        beside = [s for s in plan.owners() if s.model == one.model and s.name != one.name]
        nodes = {d.node for s in beside for d in s.ranks} & {d.node for d in one.ranks}
        if nodes and any(slot.name == "master" for slot in one.slots):
            model = plan.model(one.model)
            found += num_params(model.arch, model.head) * 2
    return found


@examples(25)
@given(pairs(most=8))
def test_sharded_state_is_within_a_third(pair: tuple[Plan, Plan]):
    """Tiny tensors: padding and rows that do not divide weigh far more than in a real model."""
    assume(not any(map(is_split, pair)))
    found = compiled(*pair)
    guess, certificate = coarse(found.old, found.new), found.certificate
    state = sum(s.bound.layout.num_ranks for s in found.new_holdings.sets)
    assume(state)
    wanted = certificate.kept_bytes + certificate.moved_bytes + certificate.derived_bytes
    assert abs(guess.moved_bytes - certificate.moved_bytes) <= 0.34 * wanted, (
        f"{guess.moved_bytes} for {certificate.moved_bytes} of {wanted}\n{describe(found.old)}\n->\n"
        f"{describe(found.new)}"
    )


@examples(25)
@given(pairs(most=8))
def test_set_up_and_drain_are_the_compilers(pair: tuple[Plan, Plan]):
    found = compiled(*pair)
    guess, certificate = coarse(found.old, found.new), found.certificate
    if certificate.mode == "none":
        return
    assert guess.drain_s == certificate.drain_s
    assert guess.commit_s == pytest.approx(certificate.commit_s)
    assert guess.background_s == certificate.background_s
    assert max(guess.setup_s, guess.groups_s) <= certificate.setup_s + 1e-9


SPLITS: list[tuple[dict[str, int], float, dict[str, int], float]] = [
    ({"tp": 2, "zero": 1}, 0.5, {"pp": 2, "zero": 1}, 0.5),
    ({"tp": 2, "zero": 1}, 0.5, {"tp": 2, "zero": 1}, 0.0),
    ({"tp": 4}, 0.5, {"tp": 2}, 0.3),
    ({"tp": 4, "zero": 1}, 0.0, {"tp": 2, "zero": 1}, 0.75),
]


@pytest.mark.parametrize(("before", "share", "after", "then"), SPLITS)
def test_state_partly_in_host_memory(before: dict[str, int], share: float, after: dict[str, int], then: float):
    arch = preset("qwen2.5-7b")
    on = Cluster(nodes=tuple(node(f"n{i}", 8, host_mem=2048 * GIB) for i in range(2)))
    old, new = (
        offloaded(trainer(on, arch=arch, pp_split=even_split(arch.num_layers, at.get("pp", 1)), **at), part)
        for at, part in ((before, share), (after, then))
    )
    found = compiled(old, new)
    guess = coarse(found.old, found.new)
    assert guess.moved_bytes == pytest.approx(found.certificate.moved_bytes, rel=0.2)
    assert guess.peak_bytes_max == pytest.approx(found.certificate.peak_bytes_max, rel=0.1)
    assert guess.mode == found.certificate.mode


def test_nothing_changes():
    plan = trainer(cluster(4, 4), tp=2, pp=2, zero=1)
    guess = coarse(plan, plan)
    assert (guess.mode, guess.moved_bytes, guess.stop_s, guess.transfer_s) == ("none", 0, 0.0, 0.0)


@pytest.mark.parametrize("order", [None, ORDER_MEGATRON])
def test_a_doubled_pool_takes_in_one_copy_a_node(order: str | None):
    """Two nodes of one replica each become four: each new node takes in the whole state once."""
    settings = {"order": order} if order else {}
    nodes = cluster(4, 4, 4, 4)
    old = trainer(nodes, nodes.devices[:8], tp=2, pp=2, **settings)
    new = trainer(nodes, nodes.devices, tp=2, pp=2, **settings)
    found = compiled(old, new)
    guess = coarse(found.old, found.new)
    assert guess.moved_bytes == found.certificate.moved_bytes
    assert guess.node_in_bytes_max == found.certificate.node_in_bytes_max
    assert guess.bound_transfer_s == pytest.approx(found.certificate.bound_transfer_s)


def test_equal_whatever_was_asked_before():
    """What is remembered of plans and layouts changes no figure."""
    on = cluster(4, 4)
    plans = [trainer(on, arch=ARCHS[0], tp=tp, pp=pp, zero=zero) for tp, pp, zero in ((1, 1, 1), (2, 2, 0), (2, 1, 3))]
    first = {}
    for i, old in enumerate(plans):
        for j, new in enumerate(plans):
            forget()
            first[i, j] = coarse(old, new)
    for (i, j), expected in first.items():
        assert coarse(plans[i], plans[j]) == expected
