"""Placement against brute force over every allowed assignment of coordinates to devices."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
from hypothesis import assume, event, given
from hypothesis import strategies as st
from passes.execute import compile_or_confirm, pipeline
from passes.oracle import Ids, State, Universe, allowed_placements, living, truth
from passes.plans import pairs
from passes.profiles import examples

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.passes.place import pin

HORIZON = 100


def lacking(old: State, new: State) -> Ids:
    """[device in the order of the stage's ``on``, rank]: bytes that rank lacks there. GPU state of one copy only."""
    stage = new.plan.stages[0]
    alive = living(old.plan, new.plan)
    before = {place: mask for place, mask in old.places().items() if place[0] in alive}
    universe = new.universe
    table = np.zeros((len(stage.devices), len(stage.devices)), dtype=np.int64)
    for copy in new.copies:
        assert not copy.in_host
        wanted = np.zeros(universe.numel, dtype=bool)
        for ids in copy.tensors.values():
            wanted[ids] = True
        if copy.slot == "weight":
            for other in new.copies:
                if (other.rank, other.slot) == (copy.rank, "master"):
                    for ids in other.tensors.values():
                        wanted[universe.weight_of[ids]] = False
        for row, device in enumerate(stage.devices):
            own = before.get((device, False))
            table[row, copy.rank] += int(universe.width[wanted if own is None else wanted & ~own].sum())
    return table


def fewest_bytes(old: State, new: State) -> int:
    table = lacking(old, new)
    stage = new.plan.stages[0]
    row = {device: number for number, device in enumerate(stage.devices)}
    return min(
        sum(int(table[row[device], rank]) for rank, device in enumerate(placement))
        for placement in allowed_placements(stage)
    )


@st.composite
def resident_pairs(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """One train stage without host memory before and after, on at most six devices after."""
    old, new = draw(pairs(rich=False, most=10))
    stages = [next((s for s in plan.stages if s.kind == "train"), None) for plan in (old, new)]
    assume(all(stages))
    before, after = (
        replace(s, idle="resident", slots=tuple(replace(slot, host=False) for slot in s.slots)) for s in stages if s
    )
    assume(len(after.devices) <= 6)
    sync = replace(old.workload, mode="sync")
    return (
        replace(old, stages=(before,), workload=sync),
        replace(new, stages=(after,), workload=sync),
    )


@examples(40)
@given(resident_pairs())
def test_best_bound_is_the_optimum_over_all_allowed_placements(pair: tuple[Plan, Plan]) -> None:
    old, new = pair
    transition = compile_or_confirm(old, new, pipeline())
    assume(transition is not None)
    assert transition is not None
    universe = Universe(old, new)
    optimum = fewest_bytes(State(pin(old), universe), State(pin(new), universe))
    (choice,) = transition.choices
    certificate = transition.certificate
    event(f"exact {choice.exact}")
    assert certificate.best_bound_moved_bytes <= optimum
    assert certificate.bound_moved_bytes == choice.moved_bytes
    if choice.exact:
        assert choice.best_moved_bytes == optimum
        assert certificate.best_bound_moved_bytes == min(optimum, certificate.bound_moved_bytes)


def joint_optimum(old: Plan, new: Plan, most: int) -> int | None:
    """Fewest moved bytes over the allowed placements of all stages together; None where these are too many."""
    owners = [s for s in new.stages if s.with_ is None and s.service is None]
    if math.prod(math.factorial(len(s.devices)) for s in owners) > most:
        return None
    universe = Universe(old, new)
    start = State(pin(old), universe)
    best: int | None = None
    for chosen in itertools.product(*(list(allowed_placements(s)) for s in owners)):
        place: dict[str, tuple[Device, ...]] = dict(zip((s.name for s in owners), chosen, strict=True))
        stages = []
        for one in new.stages:
            host = one
            while host.with_ is not None:
                host = new.stage(host.with_)
            stages.append(replace(one, place=place[host.name]))
        moved = truth(start, State(replace(new, stages=tuple(stages)), universe)).moved_bytes
        best = moved if best is None else min(best, moved)
    return best


@examples(40)
@given(pairs(most=6))
def test_best_bound_of_several_stages_is_a_bound(pair: tuple[Plan, Plan]) -> None:
    old, new = pair
    optimum = joint_optimum(old, new, most=40)
    assume(optimum is not None)
    transition = compile_or_confirm(old, new, pipeline())
    assume(transition is not None)
    assert transition is not None
    assert transition.certificate.best_bound_moved_bytes <= optimum


@examples(60)
@given(pairs(rich=False))
def test_predicted_time_is_never_worse_than_the_listed_orders(pair: tuple[Plan, Plan]) -> None:
    transition = compile_or_confirm(*pair, pipeline())
    assume(transition is not None)
    assert transition is not None
    together = transition.together
    event(f"exact {together.exact}")
    assert together.seconds <= together.listed_seconds + 1e-6
    if together.listed_seconds - together.seconds < 1e-7:
        assert together.moved_bytes <= together.listed_moved_bytes
    assert together.bound_s <= together.seconds
    certificate = transition.certificate
    # What several processes make of one another's share in host memory is counted as if it came from outside.
    in_host = any(copy.in_host for copy in State(pin(pair[1]), Universe(*pair)).copies)
    assert together.moved_bytes >= certificate.bound_moved_bytes
    assert in_host or together.moved_bytes == certificate.bound_moved_bytes
    assert certificate.best_bound_placement_s <= certificate.placement_s
