"""Whole replays: what is charged, who knows what, and that nobody beats the optimum."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from planner.test_rl_step import COLOCATED, PRIOR, plan_of

from nereus.ir.diagnostic import DiagnosticError
from nereus.planner.exports.read import Export, Step
from nereus.planner.rl_step import step_time
from nereus.replay.generator import LENGTHS, POOLS, Recipe, generate
from nereus.replay.policies import AnyGain, Ours, Static
from nereus.replay.recorded import recorded
from nereus.replay.run import run
from nereus.replay.space import Space
from nereus.replay.study import USUAL, study
from nereus.replay.trace import Row, Trace, read_trace, write_trace
from nereus.replay.world import INTERRUPTED_AT, RESTART_S, World

FOUR = COLOCATED.replace("n[0-1]", "n[0-3]").replace("max_response = 4096", "max_response = 16384")


def flat(num_nodes: list[int], *, notices: dict[int, float] | None = None, length: float = 1500.0) -> Trace:
    notices = notices or {}
    rows = (Row(response_mean=length, gpus=8 * n, notice_s=notices.get(step)) for step, n in enumerate(num_nodes))
    return Trace(name="flat", rows=tuple(rows))


@pytest.fixture(scope="module")
def space() -> Space:
    return Space(plan_of(FOUR), PRIOR)


@pytest.mark.parametrize("pool", ["fixed", "spot", "failing"])
def test_nobody_is_better_than_the_optimum(space: Space, pool: str) -> None:
    trace = generate(Recipe(lengths="growth", pool=pool, steps=30, losses=4, drift=True), [8] * 4)
    found = study(space.start, trace, PRIOR, space=space)
    assert [outcome.policy for outcome in found.outcomes] == [*USUAL, "offline"]
    for outcome in found.outcomes:
        assert found.regret(outcome) >= -1e-9
        assert len(outcome.plans) == 30 and outcome.total_s > 0
        for step, number in enumerate(outcome.plans):
            assert space.runs_on(number, found.world.num_nodes[step])
    again = study(space.start, trace, PRIOR, space=Space(space.start, PRIOR))
    assert [o.total_s for o in again.outcomes] == pytest.approx([o.total_s for o in found.outcomes])


def test_no_change_costs_more_than_its_stop_where_nothing_leaves(space: Space) -> None:
    world = World(space, flat([2, 2, 4, 4]), noise=0.0)
    (small, *_), (large, *_) = space.choices(2, 1500), space.choices(4, 1500)
    assert world.move_s(2, small, large) == space.stop_s(small, large) > 0
    assert world.move_s(2, small, small) == 0


def test_a_notice_decides_what_is_lost(space: Space) -> None:
    (large, *_), (small, *_) = space.choices(4, 1500), space.choices(2, 1500)
    stop_s = space.stop_s(large, small)

    def moved(notice_s: float | None) -> tuple[float, World]:
        world = World(space, flat([4, 4, 2], notices={} if notice_s is None else {2: notice_s}), noise=0.0)
        return world.move_s(2, large, small), world

    long, world = moved(1e6)
    step_s, again_s = world.seconds(1, large), world.seconds(1, small)
    assert long == stop_s
    in_step, _ = moved(stop_s + 0.01)
    assert in_step == pytest.approx(INTERRUPTED_AT * step_s + again_s - step_s + stop_s)
    none, _ = moved(0.01)
    assert none == pytest.approx(INTERRUPTED_AT * step_s + again_s - step_s + RESTART_S)
    failed, _ = moved(None)
    assert failed <= none and failed > long


def test_a_trace_without_change_is_only_steps(space: Space) -> None:
    world = World(space, flat([4] * 6), model_error=0.0, noise=0.0)
    outcome = run(AnyGain(), world)
    assert outcome.num_changes == 0 and outcome.worst_stall_s == 0
    assert outcome.total_s == pytest.approx(6 * world.seconds(0, outcome.plans[0]))


def test_a_fixed_layout_restarts_and_a_live_one_does_not(space: Space) -> None:
    world = World(space, flat([4, 4, 2, 2, 4, 4], notices={2: 1e6}), noise=0.0)
    static, live = run(Static(), world), run(Static(live=True), world)
    assert static.plans == live.plans and static.between_s.count(RESTART_S) == 2
    assert 0 < live.worst_stall_s < RESTART_S


def test_ours_goes_where_the_pool_goes(space: Space) -> None:
    world = World(space, flat([4, 4, 4, 2, 2, 2, 2, 4, 4, 4, 4, 4], notices={3: 1e6}), noise=0.0)
    policy = Ours()
    outcome = run(policy, world)
    assert outcome.overflows == 0
    assert not space.runs_on(outcome.plans[-1], 2) and space.runs_on(outcome.plans[4], 2)
    assert policy.advisor is not None
    assert [d.trigger for d in policy.advisor.log].count("lost") == 1


def test_running_out_of_memory_costs_half_a_step_and_a_restart() -> None:
    text = FOUR.replace("tp = 2  pp = 2", "tp = 2  pp = 2  micro_batch = 4")
    space = Space(plan_of(text), PRIOR)
    start = space.number(space.start)
    rows = tuple(Row(response_mean=length) for length in (1500.0, 9000.0))
    world = World(space, Trace(name="jump", rows=rows), noise=0.0)
    assert space.fits(start, 1500) and not space.fits(start, 9000)

    class Stays(AnyGain):
        def first(self, world: World) -> int:
            super().first(world)
            return start

        def choose(self, view: object) -> int:
            return start

    outcome = run(Stays(), world)
    assert outcome.overflows == 1
    assert outcome.between_s[1] == pytest.approx(INTERRUPTED_AT * world.seconds(1, start) + RESTART_S)


def test_generated_traces_are_what_their_seed_says() -> None:
    for lengths in LENGTHS:
        for pool in POOLS:
            recipe = Recipe(lengths=lengths, pool=pool, steps=40, drift=True, seed=3)
            trace = generate(recipe, [8] * 4)
            assert trace == generate(recipe, [8] * 4)
            assert len(trace.rows) == 40
            assert all(row.gpus is not None and 8 <= row.gpus <= 32 for row in trace.rows)
    with pytest.raises(ValueError, match="no such trace"):
        generate(Recipe(lengths="odd"), [8] * 4)


def test_a_trace_is_read_as_it_was_written() -> None:
    trace = generate(Recipe(lengths="growth", pool="spot", losses=9), [8] * 4)
    assert read_trace(write_trace(trace), trace.name) == trace


def test_exports_are_read_under_their_own_names() -> None:
    text = "step,response_length/mean,response_length/max,timing_s/step\n1,1200,4000,61.5\n2,1250,,60\n"
    rows = read_trace(text, "verl.csv").rows
    assert rows[0] == Row(response_mean=1200, response_max=4000, step_s=61.5)
    assert rows[1].response_max is None and rows[1].step_s == 60


def test_measured_steps_of_the_plan_set_the_pace(space: Space) -> None:
    rows = tuple(Row(response_mean=1500, step_s=100.0 + step) for step in range(3))
    world = World(space, Trace(name="own", rows=rows))
    start = space.number(space.start)
    assert [world.seconds(step, start) for step in range(3)] == pytest.approx([100, 101, 102])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no column response_mean"),
        ("step,tokens\n0,5\n", "no column response_mean"),
        ("response_mean\n", "no steps"),
        ("response_mean\n\n12\nx\n", "line 4: response_mean is 'x'"),
        ("response_mean,gpus\n12,\n,8\n", "line 3: response_mean is empty"),
        ("response_mean\n-5\n", "response_mean is '-5'"),
        ("response_mean\nnan\n", "response_mean is 'nan'"),
        ("response_mean,response_max\n100,50\n", "below the mean"),
        ("response_mean,gpus\n100,7.5\n", "7.5 gpus"),
        ('response_mean\n"1\n', "line"),
    ],
)
def test_what_is_no_trace_is_told(text: str, why: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_trace(text, "run.csv")
    assert why in caught.value.diagnostics[0].headline


def test_a_pool_that_the_cluster_does_not_have_is_told(space: Space) -> None:
    for gpus in (7, 40):
        with pytest.raises(DiagnosticError, match="NRS7005"):
            World(space, Trace(name="run.csv", rows=(Row(response_mean=100, gpus=gpus),)))


def test_lengths_at_which_nothing_fits_are_told(space: Space) -> None:
    with pytest.raises(DiagnosticError, match="no layout fits in step 0"):
        study(space.start, flat([1, 1], length=900_000.0), PRIOR, policies=["static"])


def test_where_nodes_are_unlike_the_fast_ones_alone_are_tried() -> None:
    """Eight H100 a node and four A100: nobody has to take the slow ones. GPUs are counted in the order of nodes."""
    text = COLOCATED.replace("cluster {", 'cluster { node m[0-1] { gpus = 4 x "a100-sxm-80gb" }').replace(
        "on = n[0-1]", "on = [n[0-1], m[0-1]]"
    ).replace("mini_batch = 256", "mini_batch = 192").replace("prompts = 64", "prompts = 96")  # fmt: skip
    text = text.replace("tp = 2  pp = 2", "tp = 4").replace("max_response = 4096", "max_response = 16384")
    space = Space(plan_of(text), PRIOR)
    assert space.nodes == ("m0", "m1", "n0", "n1")
    trace = Trace(
        name="unlike",
        rows=tuple(Row(response_mean=1500.0, gpus=gpus, notice_s=120.0) for gpus in (4, 8, 16, 24, 24, 24, 16, 24)),
    )
    world = World(space, trace, noise=0.0)
    assert world.num_nodes == [1, 2, 3, 4, 4, 4, 3, 4]
    (best, *_) = space.choices(4, 1500)
    assert {device.node for stage in space.plans[best].stages for device in stage.devices} == {"n0", "n1"}
    kept = space.placed(space.plans[best], 3)
    assert kept is not None and {d.node for stage in kept.stages for d in stage.devices} == {"n0"}
    found = study(space.start, trace, PRIOR, space=space, policies=("sleep-wake", "any-gain", "ours"))
    for outcome in found.outcomes:
        assert found.regret(outcome) >= -1e-9
        for step, number in enumerate(outcome.plans):
            assert space.runs_on(number, world.num_nodes[step])


def test_a_written_trace_keeps_the_seconds_of_a_run() -> None:
    rows = (Row(response_mean=900.0, step_s=40.0), Row(response_mean=950.0, efficiency=0.9))
    again = read_trace(write_trace(Trace(name="run", rows=rows)), "run.csv")
    assert again.rows == rows


def test_an_export_is_a_trace_of_what_it_took() -> None:
    """Machines that slow down by a fifth: predictions learn the usual pace, and the drift is what is left."""
    plan = plan_of(COLOCATED)
    lengths = [1000.0 + 50 * step for step in range(12)]
    slower = [1.0 + 0.2 * step / 11 for step in range(12)]
    steps = []
    for number, (length, factor) in enumerate(zip(lengths, slower, strict=True)):
        at = replace(plan, workload=replace(plan.workload, response_len=round(length), prompt_len=300))
        seconds = None if number == 5 else 1.7 * factor * step_time(at, PRIOR).seconds
        steps.append(Step(number=number, step_s=seconds, response_len=length, prompt_len=299.5, parts_s=()))
    ran = recorded(Export(framework="any", steps=tuple(steps)), plan, PRIOR, name="a run")
    assert ran.plan.workload.prompt_len == 300
    assert [row.step_s for row in ran.trace.rows] == [step.step_s for step in steps]
    assert [row.response_mean for row in ran.trace.rows] == lengths
    assert len(ran.drift) == 11 and ran.drift[-1] / ran.drift[0] == pytest.approx(1.2, rel=0.05)
    assert ran.trace.rows[5].efficiency == pytest.approx(1 / median(ran.drift))
    found = study(ran.plan, ran.trace, ran.calibration, policies=("as-run",), model_error=0, noise=0)
    took = found.outcomes[0].steps_s
    assert [s for n, s in enumerate(took) if n != 5] == pytest.approx([s.step_s for s in steps if s.step_s is not None])
    assert took[5] == pytest.approx((took[4] + took[6]) / 2, rel=0.1)
