"""A learning-rate schedule carried over to the scheduler and the optimizer of another layout."""

from __future__ import annotations

from typing import Any

import torch

from nereus.runtime.job_state import Schedule
from nereus.runtime.job_values import JobStateError, encode


def capture(scheduler: Any) -> Schedule:
    """The schedule of a torch or DeepSpeed scheduler or Megatron's ``OptimizerParamScheduler``. Functions (the lambdas
    of LambdaLR) are code, not state: the new scheduler brings its own. Raises JobStateError for a schedule that drives
    the momentum too."""
    if getattr(scheduler, "cycle_momentum", False):
        raise JobStateError(f"{type(scheduler).__name__} cycles the momentum too, which is not carried over")
    return Schedule(
        kind=type(scheduler).__name__,
        state=_plain(scheduler.state_dict()),
        lrs=tuple(float(group["lr"]) for group in scheduler.optimizer.param_groups),
    )


def bind(schedule: Schedule, scheduler: Any, optimizer: Any) -> None:
    """Let ``scheduler``, new and bound to ``optimizer``, go on where ``schedule`` stands.

    Raises JobStateError where the scheduler is of another class, drives another optimizer, or ends up elsewhere.
    Numbers of param groups may differ between layouts as long as all groups of the old one stand alike.
    """
    kind = type(scheduler).__name__
    if kind != schedule.kind:
        raise JobStateError(f"schedule.kind: the job follows {schedule.kind}, the new scheduler is a {kind}")
    driven: Any = getattr(scheduler, "optimizer", None)
    if driven is not optimizer:
        raise JobStateError("the new scheduler drives another optimizer than the one that will train")
    groups: list[Any] = optimizer.param_groups
    state: dict[str, Any] = {name: _fitted(value, name, len(groups)) for name, value in schedule.state.items()}
    # Megatron's computes the rates of its groups, known by their own limits, when it loads.
    computes = hasattr(scheduler, "num_steps")
    lrs = [] if computes else _fitted(list(schedule.lrs), "lrs", len(groups))
    if computes:
        scheduler.num_steps = 0  # it adds what it loads to what it has
    scheduler.load_state_dict(_like(state, scheduler.state_dict()))
    if computes:
        if wrong := {float(group["lr"]) for group in groups}.difference(schedule.lrs):
            raise JobStateError(f"schedule.lrs: a group has the rate {wrong.pop()!r}, not one of {schedule.lrs}")
        lrs = [group["lr"] for group in groups]
    for number, (group, lr) in enumerate(zip(groups, lrs, strict=True)):
        # A captured graph reads the rate from a tensor: keep the tensor.
        if hasattr(group["lr"], "fill_"):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
        if "base_lrs" in state:
            group["initial_lr"] = _like(state["base_lrs"][number], group.get("initial_lr"))
    if "_last_lr" not in state and hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = list(lrs)  # DeepSpeed's answer from it, and do not save it
    after = _plain(scheduler.state_dict())
    for name, value in state.items():
        if encode(after.get(name), name) != encode(value, name):
            raise JobStateError(f"schedule.state.{name}: is {after.get(name)!r} after loading {value!r}")


#: What torch's schedulers keep per param group.
_PER_GROUP = ("lrs", "lr_lambdas", "base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def _plain(value: Any, name: str = "") -> Any:
    """Without tensors (rates are tensors where the optimizer is captured in a graph) and without functions."""
    if name == "lr_lambdas":
        return [None] * len(value)
    if type(value) is dict:
        return {key: _plain(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _like(value: Any, own: Any) -> Any:
    """``value`` with tensors where ``own``, of the new scheduler, has some: their arithmetic rounds otherwise."""
    if isinstance(own, torch.Tensor) and isinstance(value, int | float):
        return own.new_tensor(value)
    if isinstance(value, dict) and isinstance(own, dict):
        return type(value)({key: _like(item, own.get(key)) for key, item in value.items()})
    if isinstance(value, list) and isinstance(own, list) and len(value) == len(own):
        return [_like(item, mine) for item, mine in zip(value, own, strict=True)]
    return value


def _fitted(value: Any, name: str, num_groups: int) -> Any:
    """``value`` with its lists per param group as long as the new optimizer needs; schedules of schedules too."""
    if type(value) is dict:
        return {key: _fitted(item, key, num_groups) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if name not in _PER_GROUP:
        return [_fitted(item, name, num_groups) for item in value]
    if len(value) == num_groups:
        return value
    if not value or any(item != value[0] for item in value):
        raise JobStateError(
            f"schedule.{name}: {len(value)} param groups with {value}, and the new optimizer has {num_groups}: "
            f"which continues which is not known"
        )
    return [value[0]] * num_groups
