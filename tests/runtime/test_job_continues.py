"""All of job state at work: a small job whose data-parallel degree changes twice trains as one that never changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from frameworks.harness import run  # noqa: E402

from nereus.runtime.data_position import DataPosition, RankSampler  # noqa: E402
from nereus.runtime.job_exchange import exchange  # noqa: E402
from nereus.runtime.job_state import JobState, ModelProgress, RngRule  # noqa: E402
from nereus.runtime.lr_schedule import bind, capture  # noqa: E402
from nereus.runtime.rng_streams import RngPlace, rederive, verify  # noqa: E402

pytestmark = pytest.mark.procs

BATCH, SIZE, NUM_EPOCHS = 12, 40, 3


def _built() -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))


def _inputs() -> Any:
    return torch.randn(SIZE, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _train(rank: int, world_size: int, degrees: list[tuple[int, int]]) -> dict[str, Any]:
    """``degrees``: (data-parallel degree, updates) of each phase; ranks beyond the degree have no part in it."""
    inputs = _inputs()
    torch.manual_seed(0)
    model, optimizer, scheduler = _built()
    state: JobState | None = None
    if rank < degrees[0][0]:
        progress = ModelProgress(model="actor", num_updates=0, weight_version=5, schedule=capture(scheduler))
        state = JobState(step=0, models=(progress,), data=DataPosition(seed=4, size=SIZE), rng=RngRule(seed=4))
    used: list[tuple[tuple[int, ...], float]] = []
    dropout: list[float] = []
    for phase, (dp, num_updates) in enumerate(degrees):
        group = dist.new_group(list(range(dp)))
        before = state
        state = exchange(state)
        if before is not None:
            state.check_follows(before)
        # Tensors are not what is tested here: rank 0, in every phase, hands out its own.
        box = [(model.state_dict(), optimizer.state_dict()["state"])]
        dist.broadcast_object_list(box, src=0)
        if rank >= dp:
            state = None  # it leaves, and what it knew grows old
            continue
        if phase:
            model, optimizer, scheduler = _built()
            model.load_state_dict(box[0][0])
            optimizer.load_state_dict({**optimizer.state_dict(), "state": box[0][1]})
            schedule = state.model("actor").schedule
            assert schedule is not None
            bind(schedule, scheduler, optimizer)
            place = RngPlace(role="actor", rank=rank, alike=rank)
            rule, _ = rederive(state.rng, step=state.step, place=place)
            verify(rule, place, group)
            state = replace(state, rng=rule)
            dropout.append(torch.rand(1).item())
        batches = RankSampler(batch=BATCH, dp=dp, rank=rank).batches(state.data, num_epochs=NUM_EPOCHS)
        for _ in range(num_updates):
            batch = next(batches)
            output = model(inputs[list(batch.samples)])
            # Each sample weighs 1 / (samples of all ranks), whatever the degree.
            loss = (output - inputs[list(batch.samples)].sum(1, keepdim=True)).square().sum() / batch.num_global
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
            used.append((batch.samples, optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
            was = state.model("actor")
            progress = ModelProgress(
                model="actor",
                num_updates=was.num_updates + 1,
                weight_version=was.weight_version + 1,
                schedule=capture(scheduler),
            )
            state = replace(state, step=state.step + 1, models=(progress,), data=batch.after)
    return {"state": state, "used": used, "weights": model.state_dict(), "dropout": dropout}


@pytest.mark.parametrize("degrees", [[(4, 3), (3, 3), (2, 4)], [(2, 4), (4, 2), (1, 1), (3, 3)]])
def test_training_continues(degrees: list[tuple[int, int]]) -> None:
    """Ten updates of 12 samples are three epochs of 40: the borders lie inside batches and phases."""
    (expected,) = run(1, _train, [(1, 10)])
    results = run(4, _train, degrees)
    left, last = results[0], expected["state"]
    assert left["state"].data == last.data == DataPosition(seed=4, size=SIZE, epoch=3, index=0, consumed=120)
    assert (left["state"].step, left["state"].models) == (last.step, last.models)
    assert last.models[0].num_updates == 10 and last.models[0].weight_version == 15
    assert left["state"].rng.derived_step == sum(n for _, n in degrees[:-1])
    assert [lr for _, lr in left["used"]] == [lr for _, lr in expected["used"]]
    # Together the ranks used in each update what one rank used.
    taken = [iter(result["used"]) for result in results]
    together = [
        sum((next(taken[rank])[0] for rank in range(dp)), ()) for dp, num_updates in degrees for _ in range(num_updates)
    ]
    assert together == [samples for samples, _ in expected["used"]]
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(left["weights"][name], weight, rtol=1e-12, atol=1e-14)
    drawn = [number for result in results for number in result["dropout"]]
    assert len(set(drawn)) == len(drawn) == sum(dp for dp, _ in degrees[1:])
