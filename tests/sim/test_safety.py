"""No timing makes a compiled transition hang, overflow by a byte, or lose, double or hurry one; planted faults do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from passes.execute import compile_or_confirm, pipeline
from passes.plans import cluster, pairs, trainer
from passes.profiles import examples

from nereus.ir.moves import Moves
from nereus.ir.plan import Plan
from nereus.passes.compiled import Transition
from nereus.passes.pipeline import compile_transition
from nereus.runtime.run import squeezed
from nereus.sim.engine import simulate
from nereus.sim.from_transition import job_of
from nereus.sim.ledger import follow
from nereus.sim.safety import faults_of, with_promised_memory

TIMINGS = 10


# Without shrinking: a case is one of a few plans on up to eight GPUs anyway.
@settings(examples(100), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    pairs(most=8),
    st.sampled_from(["reversible", "tight", "tight"]),
    st.sampled_from([64, 256, 4096]),
    st.integers(0, 10_000),
)
def test_random_transitions_on_random_timings(pair: tuple[Plan, Plan], mode: str, window: int, seed: int) -> None:
    options = pipeline(window=window, mode=mode)
    transition = compile_or_confirm(*pair, options)
    if transition is None:
        return
    transition = squeezed(transition, options)
    event(f"{transition.schedule.mode}, {len(transition.schedule.moves) > 0}")
    assert faults_of(transition, range(seed, seed + TIMINGS)) == []


def one(mode: str = "reversible") -> Transition:
    """Four GPUs of two nodes, pipeline to tensor parallelism, with relays where a node takes bytes in once."""
    on = cluster(2, 2)
    options = pipeline(mode=mode, window=256, stripe=16, slice_bytes=16)
    transition = compile_transition(trainer(on, tp=1, pp=2), trainer(on, tp=2, pp=1), options)
    return squeezed(transition, options)


def test_runs_of_both_modes_are_safe_and_deliver_what_moves() -> None:
    for mode in ("reversible", "tight"):
        transition = one(mode)
        assert transition.schedule.mode == mode
        job = job_of(transition)
        ledger = follow(transition, job)
        assert ledger.delivered_bytes == transition.certificate.moved_bytes + transition.certificate.local_bytes > 0
        assert len(ledger.finished_before_start) > 0 or mode == "reversible"
        assert faults_of(transition, range(24)) == []


def rescheduled(transition: Transition, **changes: object) -> Transition:
    return replace(transition, schedule=replace(transition.schedule, **changes))  # type: ignore[arg-type]


def test_a_move_that_is_dropped_or_doubled_is_found() -> None:
    transition = one("tight")
    schedule = transition.schedule
    number = max(range(len(schedule.moves)), key=lambda i: schedule.moves[i].num_bytes)
    for moves in (
        [*schedule.moves[:number], *schedule.moves[number + 1 :]],
        [*schedule.moves, replace(schedule.moves[number], after=())],
    ):
        count = len(moves)
        waves = schedule.wave[np.minimum(np.arange(count), len(schedule.wave) - 1)]
        broken = rescheduled(transition, moves=Moves.of(moves), wave=waves, slices=np.ones_like(waves))
        ledger = follow(broken, job_of(broken))
        assert ledger.faults
        assert any(("never arrive" if count < len(schedule.moves) else "second time") in f for f in ledger.faults)


def test_a_source_that_never_has_the_bytes_is_found() -> None:
    transition = one("tight")
    schedule = transition.schedule
    # Devices 0 and 2 hold one half, 1 and 3 the other: device 3 has what 0 sends to 1 only once 2 has sent it.
    moves = [replace(m, src=(m.src + 3) % 4) for m in schedule.moves]
    broken = rescheduled(transition, moves=Moves.of(moves))
    job = job_of(broken)
    assert any("started before" in text for text in follow(broken, job).problems(simulate(job.job), job))
    alone = rescheduled(transition, moves=Moves.of(moves[:1]), wave=schedule.wave[:1], slices=schedule.slices[:1])
    assert any("never has" in fault for fault in follow(alone, job_of(alone)).faults)


def test_the_promised_memory_less_one_byte_overflows() -> None:
    """Where the transfer is the peak: a device that sends and receives in its fullest wave uses all of its staging."""
    transition = with_promised_memory(one())
    memory = transition.memory
    space = int((memory.reversible["during the transfer"] - memory.reversible["after the commit"]).argmax())
    capacity = memory.capacity.copy()
    capacity[space] = memory.reversible_peak[space] - 1
    short = replace(transition, memory=replace(memory, capacity=capacity))
    job = job_of(short)
    (found,) = simulate(job.job).overflows
    assert (found.space, found.excess_bytes) == (space, 1)
    assert simulate(job_of(transition).job).overflows == ()


def test_staging_that_is_forgotten_shows_in_the_peak() -> None:
    transition = one()
    memory = transition.memory
    with_it = simulate(job_of(transition).job).peak_bytes
    without = simulate(job_of(replace(transition, memory=replace(memory, staging=memory.staging * 0))).job).peak_bytes
    assert (with_it[: len(memory.staging)] - without[: len(memory.staging)] == memory.staging).all()


def test_a_release_before_its_readers_are_done_is_found_on_some_timing() -> None:
    transition = one("tight")
    job = job_of(transition)
    ledger = follow(transition, job)
    releases = set(job.releases.values())
    into = [row for row, (_, later) in enumerate(job.job.edges.tolist()) if later in releases]
    hasty = replace(
        job, job=replace(job.job, edges=job.job.edges[[r for r in range(len(job.job.edges)) if r not in into]])
    )
    assert any("started before" in text for text in ledger.problems(simulate(hasty.job), hasty))


def test_a_message_that_does_not_wait_for_its_posts_is_found() -> None:
    transition = one("tight")
    job = job_of(transition)
    ledger = follow(transition, job)
    messages = set(ledger.messages.tolist())
    kept = [row for row, (_, later) in enumerate(job.job.edges.tolist()) if later not in messages]
    hasty = replace(job, job=replace(job.job, edges=job.job.edges[kept]))
    assert any("started before" in text for text in ledger.problems(simulate(hasty.job), hasty))


def test_a_relay_waits_for_what_it_relays() -> None:
    """One copy for four GPUs of another node: it enters once and is passed on inside."""
    on = cluster(2, 4)
    transition = compile_transition(
        trainer(on, on.devices[:1]), trainer(on, on.devices[2:], tp=1), pipeline(stripe=16, slice_bytes=16)
    )
    assert any(move.after for move in transition.schedule.moves)
    job = job_of(transition)
    ledger = follow(transition, job)
    assert len(ledger.finished_before_start) > 0 and not ledger.faults
    assert faults_of(transition, range(12)) == []
    posts = [row for row, (_, later) in enumerate(job.job.edges.tolist()) if later not in set(ledger.messages.tolist())]
    hasty = replace(job, job=replace(job.job, edges=job.job.edges[posts]))
    assert any("started before" in text for text in ledger.problems(simulate(hasty.job), hasty))


def test_two_operations_that_wait_for_each_other_are_named() -> None:
    transition = one()
    job = job_of(transition)
    edges = [*job.job.edges.tolist(), (job.commit, job.ready)]
    stuck = replace(job, job=replace(job.job, edges=np.array(edges)))
    text = follow(transition, job).problems(simulate(stuck.job), stuck)[0]
    assert "ready waits for commit" in text or "commit waits for" in text
