"""Random pairs of plans: compiled, executed in-process in random order, compared with the oracle element by element."""

from __future__ import annotations

from hypothesis import event, given
from hypothesis import strategies as st
from passes.execute import check_transition, compile_or_confirm, pipeline
from passes.plans import pairs
from passes.profiles import examples

from nereus.ir.plan import Plan

OPTIONS = st.builds(
    pipeline,
    slice_bytes=st.sampled_from([100, 400, 400, 2000]),
    stripe=st.sampled_from([4, 40, 200]),
    window=st.sampled_from([400, 1024, 4096]),
    bulk=st.sampled_from([1, 2, 64]),
)


@examples(40)
@given(pairs(rich=False), OPTIONS, st.integers(0, 2**16))
def test_one_trained_model(pair: tuple[Plan, Plan], options: object, seed: int) -> None:
    old, new = pair
    transition = compile_or_confirm(old, new, options)  # type: ignore[arg-type]
    event("refused" if transition is None else transition.schedule.mode)
    if transition is not None:
        check_transition(transition, seed)


@examples(40)
@given(pairs(), OPTIONS, st.integers(0, 2**16))
def test_several_models_and_stages(pair: tuple[Plan, Plan], options: object, seed: int) -> None:
    old, new = pair
    transition = compile_or_confirm(old, new, options)  # type: ignore[arg-type]
    event("refused" if transition is None else transition.schedule.mode)
    if transition is not None:
        check_transition(transition, seed)
