"""GPUs and hosts on which the old plan cannot stay whole: the tight mode that the compiler then takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, event, given
from hypothesis import strategies as st
from passes.cycles import Case, check_tight
from passes.execute import check_transition, compile_or_confirm, pipeline
from passes.plans import pairs
from passes.profiles import examples

from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.plan import Plan
from nereus.passes.manager import Pipeline
from nereus.passes.pipeline import compile_transition
from nereus.passes.tight import Stuck


def with_capacity(plan: Plan, gpu_bytes: int, host_bytes: int) -> Plan:
    nodes = tuple(
        replace(n, gpu=replace(n.gpu, mem_gb=gpu_bytes / 0.9e9), host_mem_bytes=host_bytes) for n in plan.cluster.nodes
    )
    return replace(plan, cluster=replace(plan.cluster, nodes=nodes))


OPTIONS = st.builds(pipeline, st.just(400), st.just(40), st.sampled_from([400, 2000]), st.just("auto"))


@examples(30)
@given(pairs(rich=False), OPTIONS, st.integers(0, 999), st.floats(0, 1))
def test_too_little_memory_for_reversible_mode(
    pair: tuple[Plan, Plan], options: Pipeline, seed: int, slack: float
) -> None:
    roomy = compile_or_confirm(*pair, options)
    assume(roomy is not None)
    assert roomy is not None
    memory, count = roomy.memory, roomy.topology.num_devices
    least, most = int(memory.tight_bound[:count].max()), int(memory.reversible_peak[:count].max())
    assume(most > least + 4)
    host = int(memory.reversible_peak[count:].max(initial=0)) or 1
    old, new = (with_capacity(plan, int(least + slack * (most - 1 - least)), host) for plan in pair)
    try:
        transition = compile_transition(old, new, options, allow_destroy=True)
    except DiagnosticError as error:
        # NRS4001, NRS4002: the new plan itself does not fit while it runs; NRS5002: the greedy order found no way.
        codes = {d.code for d in error.diagnostics}
        event(f"refused {codes}")
        assert codes <= {"NRS4001", "NRS4002", "NRS5002"}
        return
    event(transition.schedule.mode)
    assert transition.schedule.mode == "tight"
    assert transition.certificate.point_of_no_return is not None or not transition.schedule.release
    check_transition(transition, seed)
    assert transition.certificate.peak_bytes_max <= transition.certificate.capacity_bytes


@examples(20)
@given(pairs(), OPTIONS, st.integers(0, 999))
def test_tight_mode_where_asked_for(pair: tuple[Plan, Plan], options: Pipeline, seed: int) -> None:
    transition = compile_or_confirm(*pair, replace(options, mode="tight"))
    assume(transition is not None)
    assert transition is not None
    check_transition(transition, seed)


@examples(15)
@given(pairs(), st.integers(0, 999))
def test_the_bound_is_enough(pair: tuple[Plan, Plan], seed: int) -> None:
    """Within max(before, after), staging and the largest storage everything gets through, and hardly ever by way of
    host memory; with no spare at all, by way of host memory, where the full device has anything that may go there."""
    options = pipeline(400, 40, 4000)
    roomy = compile_or_confirm(*pair, options)
    assume(roomy is not None)
    assert roomy is not None
    case = Case.from_transition(roomy, options)
    count, state = roomy.topology.num_devices, case.memory.state
    bound = case.memory.tight_bound.copy()
    bound[count:] = case.memory.tight_base[count:] + state.new[count:] + state.old.sum()
    none = bound.copy()
    none[:count] = case.memory.tight_base[:count] + np.maximum(state.new - state.old, 0)[:count]
    for capacity in (bound, none):
        done = case.tight(replace(case.memory, capacity=capacity))
        if isinstance(done, Stuck):
            assert capacity is none and done.need_bytes > done.free_bytes and done.host_short_bytes is None, done
            event("no spare, refused")
            continue
        event(f"{'bound' if capacity is bound else 'no spare'}, staged {bool(done.schedule.staged)}")
        check_tight(done, seed)
