"""Schedules that go on with another optimizer: the same rates, step for step, as a run that was not moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dataclasses import replace  # noqa: E402

from runtime.job_states import example  # noqa: E402
from torch.optim import lr_scheduler as schedulers  # noqa: E402

from nereus.runtime.job_state import Schedule, dumps, loads  # noqa: E402
from nereus.runtime.job_values import JobStateError  # noqa: E402
from nereus.runtime.lr_schedule import bind, capture  # noqa: E402


def _optimizer(lrs: tuple[float, ...] = (1e-2, 3e-3), *, tensor_lr: bool = False) -> Any:
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2))], "lr": torch.tensor(lr) if tensor_lr else lr} for lr in lrs
    ]
    return torch.optim.AdamW(groups)


def _warmup(step: int) -> float:
    return min(1.0, (step + 1) / 8) * 0.97**step


MAKERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, _warmup),
    "lambdas": lambda o: schedulers.LambdaLR(o, [_warmup, lambda step: 1 / (1 + step)]),
    "multistep": lambda o: schedulers.MultiStepLR(o, [3, 7, 7, 12]),
    "step": lambda o: schedulers.StepLR(o, step_size=4, gamma=0.5),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 30),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "one-cycle": lambda o: schedulers.OneCycleLR(o, [1e-2, 3e-3], total_steps=30, cycle_momentum=False),
    "sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=6), schedulers.LambdaLR(o, _warmup)], [6]
    ),
}


def _train(scheduler: Any, optimizer: Any, num_steps: int) -> list[list[float]]:
    """The rates of each update."""
    used = []
    for _ in range(num_steps):
        used.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return used


def _stored(schedule: Schedule) -> Schedule:
    state = example()
    back = loads(dumps(replace(state, models=(replace(state.models[0], schedule=schedule),)))).models[0].schedule
    assert back is not None
    return back


@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_rates_continue(kind: str, tensor_lr: bool) -> None:
    """Two changes in a row."""
    unmoved = _optimizer(tensor_lr=tensor_lr)
    expected = _train(MAKERS[kind](unmoved), unmoved, 20)
    optimizer = _optimizer(tensor_lr=tensor_lr)
    scheduler = MAKERS[kind](optimizer)
    used = _train(scheduler, optimizer, 5)
    for _ in range(2):
        saved = _stored(capture(scheduler))
        optimizer = _optimizer(tensor_lr=tensor_lr)
        scheduler = MAKERS[kind](optimizer)
        bind(saved, scheduler, optimizer)
        assert all(torch.is_tensor(group["lr"]) == tensor_lr for group in optimizer.param_groups)
        used += _train(scheduler, optimizer, 5 if len(used) == 5 else 10)
    assert used == expected


def test_plateau_goes_on() -> None:
    losses = [3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]

    def rates(move_at: int) -> list[float]:
        optimizer = _optimizer((1.0,))
        scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=1)
        found = []
        for number, loss in enumerate(losses):
            if number == move_at:
                saved = _stored(capture(scheduler))
                optimizer = _optimizer((1.0,))
                scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=1)
                bind(saved, scheduler, optimizer)
            scheduler.step(loss)
            found.append(optimizer.param_groups[0]["lr"])
        return found

    assert len(set(rates(-1))) == 4
    assert all(rates(at) == rates(-1) for at in range(len(losses)))


@pytest.mark.parametrize("kind", ["lambda", "sequence"])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_other_numbers_of_param_groups(kind: str, num_groups: int) -> None:
    """A pipeline stage may have other groups than its predecessor: fine while all stand alike."""
    optimizer = _optimizer((1e-2, 1e-2))
    scheduler = MAKERS[kind](optimizer)
    _train(scheduler, optimizer, 5)
    moved = _optimizer((1e-2,) * num_groups)
    follower = MAKERS[kind](moved)
    bind(capture(scheduler), follower, moved)
    expected = _train(scheduler, optimizer, 6)
    assert _train(follower, moved, 6) == [[rates[0]] * num_groups for rates in expected]


def test_refusals() -> None:
    optimizer, other = _optimizer(), _optimizer()
    scheduler = MAKERS["lambda"](optimizer)
    saved = capture(scheduler)
    with pytest.raises(JobStateError, match="follows LambdaLR, the new scheduler is a ExponentialLR"):
        bind(saved, MAKERS["exponential"](other), other)
    with pytest.raises(JobStateError, match="drives another optimizer"):
        bind(saved, scheduler, other)
    three = _optimizer((1.0, 1.0, 1.0))
    with pytest.raises(JobStateError, match=r"2 param groups with .* and the new optimizer has 3"):
        bind(saved, MAKERS["lambda"](three), three)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9)
    with pytest.raises(JobStateError, match="OneCycleLR cycles the momentum too"):
        capture(schedulers.OneCycleLR(sgd, 1.0, total_steps=10))
