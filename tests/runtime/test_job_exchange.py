"""Job state between real processes: newcomers get it, copies that differ or are damaged stop everyone."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from frameworks.harness import run  # noqa: E402
from runtime.job_states import example  # noqa: E402

from nereus.runtime.job_exchange import exchange  # noqa: E402
from nereus.runtime.job_state import JobState, dumps  # noqa: E402
from nereus.runtime.job_values import JobStateError  # noqa: E402
from nereus.runtime.rng_streams import RngPlace, rederive, verify  # noqa: E402

pytestmark = pytest.mark.procs


def _refusal(held: JobState | str | None) -> str:
    try:
        exchange(held)
    except JobStateError as error:
        return str(error)
    return "agreed"


def _several(rank: int, world_size: int) -> dict[str, object]:
    """Many exchanges in one start of the processes."""
    state = example()
    found: dict[str, object] = {}
    found["all"] = exchange(state)
    found["one holder"] = exchange(state if rank == 2 else None)
    found["text"] = exchange(dumps(state) if rank in (1, 3) else None)
    part = dist.new_group([1, 3])
    if rank in (1, 3):
        found["group"] = exchange(state if rank == 3 else None, part)
    found["nobody"] = _refusal(None)

    behind = replace(state, step=6, models=(replace(state.models[0], weight_version=30), *state.models[1:]))
    found["differ"] = _refusal(behind if rank in (1, 2) else state if rank == 0 else None)
    fewer = replace(state, models=state.models[:1])
    found["fewer"] = _refusal(fewer if rank == 3 else state)
    damaged = dumps(state).replace('"step": 7', '"step": 8')
    found["damaged"] = _refusal(damaged if rank == 2 else state)
    own = replace(state, models=(replace(state.models[0], trainer={"tp_rank": rank}),))
    found["own"] = _refusal(own if rank == 1 else state)
    # After all the refusals the ranks are still in step.
    found["again"] = exchange(state if rank == 0 else None)
    return found


def test_exchange() -> None:
    results = run(4, _several)
    for rank, found in enumerate(results):
        for case in ("all", "one holder", "text", "again"):
            assert found[case] == example(), (rank, case)
        assert found["nobody"] == "no rank has the state of the job"
        assert found["differ"] == (
            "copies of the job state differ: models[actor].weight_version: 31 on rank 0, 30 on rank 1, 2; "
            "step: 7 on rank 0, 6 on rank 1, 2"
        )
        assert "models[critic].num_updates: 21 on rank 0, 1, 2, absent on rank 3" in str(found["fewer"])
        assert found["damaged"] == "rank 2: job state does not match its checksum: it was damaged or edited"
        assert str(found["own"]).startswith("rank 1: models[actor].trainer.tp_rank: `rank` names a fact")
    assert [results[rank]["group"] for rank in (1, 3)] == [example()] * 2


def _streams(rank: int, world_size: int, tp: int) -> tuple[str, str, float]:
    place = RngPlace(role="actor", rank=rank, alike=rank // tp * tp)
    rule, _ = rederive(example().rng, step=9, place=place)
    verify(rule, place)
    drawn = torch.rand(1).item()
    problems = []
    # Ranks 0 and 1 seeded alike where they must not be, and unlike where they must be.
    for wrong in (RngPlace(role="actor", rank=rank, alike=0), place):
        if wrong is place:
            torch.manual_seed(rank)
        try:
            if wrong is not place:
                rederive(example().rng, step=9, place=wrong)
            verify(rule, place)
            problems.append("agreed")
        except JobStateError as error:
            problems.append(str(error))
    return problems[0], problems[1], drawn


def test_streams_are_verified_between_ranks() -> None:
    results = run(4, _streams, 2)
    drawn = [result[2] for result in results]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    for repeated, apart, _ in results:
        assert "torch: actor rank 2 repeats actor rank 0, which must draw other numbers" in repeated
        assert "torch: actor rank 1 differs from actor rank 0, which must draw the same" in apart
