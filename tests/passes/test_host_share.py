"""State that lies partly in host memory, through every change: compiled, executed, judged, by position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given, note
from hypothesis import strategies as st
from passes.execute import check_transition, compile_or_confirm, pipeline
from passes.oracle import State, Universe
from passes.plans import ARCHS, cluster, clusters, describe, layouts, node, offloaded, trainer
from passes.profiles import examples
from verify.documents import document_of

from nereus.ir.cluster import Cluster, Device
from nereus.ir.holdings import join_clusters
from nereus.ir.plan import Plan
from nereus.models.memory.state import copies, device_state_bytes, host_state_bytes, pipeline_index_of_ranks
from nereus.passes.hold import hold
from nereus.passes.storages import SetShares
from nereus.verify.api import verify


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Two trainers of one model on one cluster, at least one of them with state partly in host memory."""
    on, arch = draw(clusters(most=8)), draw(st.sampled_from(ARCHS))
    share = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
    found = []
    for _ in range(2):
        count = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if n <= len(on.devices)]))
        devices = tuple(draw(st.permutations(on.devices)))[:count]
        plan = trainer(on, devices, arch, **draw(layouts(arch, count, train=True)))
        if draw(st.booleans()):
            found.append(offloaded(plan, draw(share)))
        else:  # other shares for other slots
            found.append(offloaded(plan, draw(share), draw(share), draw(share)))
    if not any(slot.is_split for plan in found for slot in plan.stages[0].slots):
        found[draw(st.integers(0, 1))] = offloaded(found[0], 0.5)
    return found[0], found[1]


@examples(60)
@given(pairs(), st.sampled_from(["auto", "tight"]), st.integers(0, 2**16))
def test_there_and_back(pair: tuple[Plan, Plan], mode: str, seed: int) -> None:
    for plan in pair:
        note(describe(plan))
    forth = compile_or_confirm(*pair, pipeline(400, 40, 1024, mode))
    assert forth is not None
    event(forth.schedule.mode)
    verdict = verify(document_of(forth), plans=(forth.old, forth.new))
    assert verdict.holds, [f for f in verdict.findings if not f.holds]
    universe = Universe(forth.old, forth.new)
    there = check_transition(forth, seed, universe=universe)
    back = compile_or_confirm(forth.new, forth.old, pipeline(400, 40, 1024, mode))
    assert back is not None
    again = check_transition(back, seed, universe=universe, before=there)
    start = State(back.new, universe).storages
    assert set(again) == set(start)
    assert all(np.array_equal(values, start[key]) for key, values in again.items())


def test_where_places_derive_parts_the_bound_may_claim_less_than_is_proved() -> None:
    """Of the bytes that both nodes lack, n0.gpu1 derives a part: the compiler's closed form lets it relay them all."""
    on = Cluster(nodes=(node("n0", 3, rails=3), node("n1", 3)))
    first, second, far = Device("n0", 0), Device("n0", 1), Device("n1", 0)
    old = trainer(on, (first,))
    new = offloaded(trainer(on, (first, second, far), dp=3, zero=1), 0.1)
    found = compile_or_confirm(old, new, pipeline(400, 40, 1024, "auto"))
    assert found is not None
    verdict = verify(document_of(found), plans=(found.old, found.new))
    assert verdict.holds, [f for f in verdict.findings if not f.holds]


@examples(40)
@given(pairs())
def test_memory_counts_at_least_what_ranks_hold(pair: tuple[Plan, Plan]) -> None:
    for plan in pair:
        note(describe(plan))
        ((copy,), (state_set,)) = copies(plan), hold(plan).sets
        topology = join_clusters(plan.cluster, plan.cluster)
        shares = SetShares(state_set, topology)
        index = topology.index()
        for device, stage_index in zip(copy.owner.ranks, pipeline_index_of_ranks(copy.stage), strict=True):
            held = {False: 0, True: 0}
            for slot in state_set.slots:
                share = shares.share(slot.name, *shares.class_of(index[device]))
                for host in held:
                    held[host] += int(share.numel[share.host == host].sum()) * slot.element_bytes
            assert held[False] <= device_state_bytes(copy, stage_index)
            assert held[True] <= host_state_bytes(copy, stage_index)


def test_what_lies_alike_stays() -> None:
    """Only the parts that cross from the host to the GPU move."""
    on = cluster(4)
    plan = trainer(on, tp=2, zero=1)
    found = compile_or_confirm(offloaded(plan, 0.5), offloaded(plan, 0.25), pipeline())
    assert found is not None
    shares = [SetShares(side.sets[0], found.topology) for side in (found.old_holdings, found.new_holdings)]
    crossing = 0
    for device in range(4):
        for slot in found.old_holdings.sets[0].slots:
            before, after = (s.share(slot.name, *s.class_of(device)) for s in shares)
            crossing += int(before.numel[before.host != after.host].sum()) * slot.element_bytes
    assert 0 < crossing == found.certificate.moved_bytes
    check_transition(found, 0)


@pytest.mark.parametrize("mode", ["reversible", "tight"])
def test_from_the_host_to_gpus_and_partly_back(mode: str) -> None:
    on = cluster(2, 2)
    first, second, third = (
        offloaded(trainer(on, tp=2, zero=1), 1.0),
        trainer(on, pp=2, zero=1),
        offloaded(trainer(on, tp=4), 0.5, 0.0, 0.75),
    )
    universe = Universe(first, second, third)
    held, now = None, first
    for wanted in (second, third, first):
        found = compile_or_confirm(now, wanted, pipeline(mode=mode))
        assert found is not None and found.schedule.mode == mode
        held, now = check_transition(found, 3, universe=universe, before=held), found.new
        assert verify(document_of(found), plans=(found.old, found.new)).holds
