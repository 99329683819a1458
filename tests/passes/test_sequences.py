"""Several changes in a row, and there and back again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, event, given
from hypothesis import strategies as st
from passes.execute import check_transition, compile_or_confirm, pipeline
from passes.oracle import State, Universe, dropped
from passes.plans import ARCHS, chains, cluster, pairs, trainer
from passes.profiles import examples

from nereus.ir.plan import Plan
from nereus.passes.manager import Pipeline
from nereus.passes.place import pin

OPTIONS = st.builds(pipeline, st.just(400), st.just(40), st.just(1024), st.sampled_from(["auto", "tight"]))


@examples(10)
@given(pairs(), OPTIONS, st.integers(0, 999))
def test_there_and_back_is_the_identity(pair: tuple[Plan, Plan], options: Pipeline, seed: int) -> None:
    old, new = pair
    assume(set(old.cluster.devices) <= set(new.cluster.devices))
    universe = Universe(old, new)
    assume(not dropped(State(pin(old), universe), State(pin(new), universe)))
    there = compile_or_confirm(old, new, options)
    assert there is not None, "nothing was lost"
    middle = check_transition(there, seed, universe=universe)
    again = replace(there.old, cluster=there.new.cluster)
    universe_of_both = State(again, universe)
    assume(not dropped(State(there.new, universe), universe_of_both))
    back = compile_or_confirm(there.new, again, options)
    assert back is not None
    after = check_transition(back, seed + 1, universe=universe, before=middle)
    start = universe_of_both.storages
    assert after.keys() == start.keys()
    for key, ids in start.items():
        assert np.array_equal(after[key], ids)


@examples(10)
@given(chains(3), OPTIONS, st.integers(0, 999))
def test_three_plans_in_a_row(plans: tuple[Plan, Plan, Plan], options: Pipeline, seed: int) -> None:
    """The end of one change is the start of the next, with whatever placement the compiler chose."""
    a, b, c = plans
    universe = Universe(a, b, c)
    one = compile_or_confirm(a, b, options)
    assume(one is not None)
    assert one is not None
    middle = check_transition(one, seed, universe=universe)
    two = compile_or_confirm(one.new, c, options)
    event("second refused" if two is None else "second done")
    if two is not None:
        check_transition(two, seed + 1, universe=universe, before=middle)


def test_a_chain_of_sizes_and_degrees() -> None:
    """Growth, shrinking, uneven pipelines, ZeRO and FSDP after each other, each from where the last one ended."""
    on = cluster(4, 4, 8)
    d = on.devices
    steps = [
        trainer(on, d[:4], tp=2, pp=2),
        trainer(on, d[:8], tp=4, zero=1),
        trainer(on, d[4:10], tp=1, pp=3, pp_split=(1, 1, 1), zero=3),
        trainer(on, d, tp=2, pp=1, fsdp=4, order="tp-cp-ep-dp-pp"),
        trainer(on, d[:1]),
        trainer(on, d[1:13], tp=2, pp=3, idle="offload", zero=2),
        trainer(on, d[:4], tp=2, pp=2),
    ]
    universe = Universe(*steps)
    current, buffers = pin(steps[0]), State(pin(steps[0]), universe).storages
    for number, step in enumerate(steps[1:]):
        mode = "tight" if number % 2 else "auto"
        transition = compile_or_confirm(current, step, pipeline(200, 20, 600, mode))
        assert transition is not None
        buffers = check_transition(transition, number, universe=universe, before=buffers)
        current = transition.new


def test_tied_embeddings_over_the_pipeline() -> None:
    """pp 1 -> 2 -> 1: the last stage gets a second copy of the embedding and drops it again, moving nothing back."""
    on = cluster(2)
    arch = ARCHS[1]
    one, two = trainer(on, on.devices[:1], arch), trainer(on, on.devices, arch, pp=2)
    there = compile_or_confirm(one, two, pipeline())
    assert there is not None
    check_transition(there, 0)
    back = compile_or_confirm(there.new, one, pipeline())
    assert back is not None
    check_transition(back, 1)
    embedding = arch.vocab * arch.hidden
    upper = there.certificate.moved_bytes - back.certificate.moved_bytes
    assert upper == embedding * 12  # master and moments of the copy; its weights are derived
