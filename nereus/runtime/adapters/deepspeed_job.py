"""Job state of a DeepSpeed engine beside tensors: counters, per-group step and hyper-parameters, scheduler, scaler."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from nereus.runtime.adapters.base import BindError
from nereus.runtime.adapters.deepspeed_layout import EngineLayout

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
#: What moves of a loss scaler; whether it is dynamic is a matter of configuration and must agree.
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
#: DeepSpeed's classes that update all tensors of a group in one call.
FUSED = ("FusedAdam", "FusedLion")
#: Keys of a parameter group that are not hyper-parameters.
_NOT_MOVED = ("params", "step", "foreach", "fused", "capturable", "differentiable", "_ds_source_param_group_id")


def counts_per_group(inner: Any) -> bool:
    """Whether an optimizer counts its updates in the parameter groups: Apex's FusedAdam does. DeepSpeed's of the same
    name counts in the states, and the group's number stays what they began with."""
    return type(inner).__name__ == "FusedAdam" and type(inner).__module__.partition(".")[0] == "apex"


def step_of(layout: EngineLayout, group: int) -> int:
    """Updates that a group has seen. Some optimizers count per parameter, some per group, and DeepSpeed cuts a group
    into parts: all counts must agree. BindError where they do not."""
    states = [layout.inner.state.get(m.tensor, {}) for m in layout.masters if m.group == group]
    if any("step" in state for state in states):
        found = {int(state.get("step", 0)) for state in states}
    else:
        per_group = layout.inner.param_groups[group].get("step", 0)
        found = {int(s) for s in (per_group if isinstance(per_group, list | tuple) else [per_group])}
    if type(layout.inner).__name__ in FUSED and layout.kind in ("plain", "unfused"):
        # Of several tensors that these update at once, only the last one's state counts.
        found = {max(found)}
    if len(found) > 1:
        raise BindError(f"parts of parameter group {group} count different steps: {sorted(found)}")
    return found.pop()


def set_step(layout: EngineLayout, group: int, step: int) -> None:
    """In the places where this optimizer counts already."""
    for master in layout.masters:
        state = layout.inner.state.get(master.tensor, {})
        if master.group == group and "step" in state:
            old = state["step"]
            state["step"] = torch.full_like(old, step) if isinstance(old, torch.Tensor) else step
    groups = layout.inner.param_groups
    if "step" in groups[group]:
        old = groups[group]["step"]
        groups[group]["step"] = [step] * len(old) if isinstance(old, list | tuple) else step


def read(engine: Any, layout: EngineLayout) -> dict[str, object]:
    """Plain values, the same on every rank."""
    found: dict[str, object] = {name: int(getattr(engine, name)) for name in COUNTERS}
    found["train_batch_size"] = int(engine.train_batch_size())
    if layout.inner is None:
        return found
    found["groups"] = tuple(
        {
            "parameters": layout.groups[number],
            "step": step_of(layout, number),
            **{key: _plain(value) for key, value in group.items() if key not in _NOT_MOVED},
        }
        for number, group in enumerate(layout.inner.param_groups)
    )
    scheduler = engine.lr_scheduler
    found["scheduler"] = None
    if scheduler is not None:
        if not hasattr(scheduler, "state_dict"):
            raise BindError(f"lr scheduler {type(scheduler).__name__} has no state_dict; its position cannot be moved")
        found["scheduler"] = {
            "class": type(scheduler).__name__,
            "state": {key: _plain(value) for key, value in scheduler.state_dict().items()},
        }
    found["loss_scaler"] = scaler_state(engine)
    return found


def scaler_state(engine: Any) -> dict[str, object] | None:
    """None where the optimizer scales no loss."""
    scaler = _scaler(engine)
    if scaler is None:
        return None
    if not getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)):
        # Set by the configuration; without fp16 some optimizers have one that scales by 1, others none.
        return None if scaler.cur_scale == 1.0 else {"dynamic": False, "cur_scale": float(scaler.cur_scale)}
    values = {key: getattr(scaler, key) for key in SCALER if getattr(scaler, key, None) is not None}
    return {"dynamic": True, **{key: _plain(value) for key, value in values.items()}}


def write(engine: Any, layout: EngineLayout, state: Mapping[str, Any]) -> None:
    """Set what ``read`` gave, matching groups by their parameters. BindError where the engines do not fit."""
    for name in COUNTERS:
        setattr(engine, name, state[name])
    # Micro-batches of the new accumulation, so that the engine stands on its boundary.
    engine.micro_steps = state["global_steps"] * engine.gradient_accumulation_steps()
    if layout.inner is None or "groups" not in state:
        return
    new = {frozenset(names): number for number, names in enumerate(layout.groups)}
    for group in state["groups"]:
        number = new.get(frozenset(group["parameters"]))
        if number is None:
            first = group["parameters"][0] if group["parameters"] else "none"
            raise BindError(
                f"no parameter group of the new engine holds exactly the {len(group['parameters'])} parameters of the "
                f"old group that begins with {first}; give deepspeed.initialize the same groups"
            )
        target = layout.inner.param_groups[number]
        for key, value in group.items():
            if key in ("parameters", "step"):
                continue
            if key not in target and value in (False, None):
                continue  # an option that one class knows and both leave off
            if key not in target:
                raise BindError(f"the new optimizer's groups have no '{key}'; use the same optimizer class")
            if isinstance(target[key], torch.Tensor):
                target[key].fill_(value)
            else:
                target[key] = copy.copy(value)
        set_step(layout, number, group["step"])
    _write_scheduler(engine, layout, state["scheduler"])
    _write_scaler(engine, state["loss_scaler"])


def _write_scheduler(engine: Any, layout: EngineLayout, state: Mapping[str, Any] | None) -> None:
    scheduler = engine.lr_scheduler
    old, new = (state["class"] if state else None), (type(scheduler).__name__ if scheduler is not None else None)
    if old != new:
        raise BindError(f"the old engine's lr scheduler is {old}, the new one's {new}; configure the same")
    if state is None:
        return
    scheduler.load_state_dict(copy.deepcopy(dict(state["state"])))
    if hasattr(scheduler, "_last_lr"):
        # DeepSpeed's schedulers do not save it; get_lr() answers from it until the next step.
        scheduler._last_lr = [group["lr"] for group in layout.inner.param_groups]


def _write_scaler(engine: Any, state: Mapping[str, Any] | None) -> None:
    scaler, here = _scaler(engine), scaler_state(engine)
    if (state or {}).get("dynamic", False) != (here or {}).get("dynamic", False):
        raise BindError("one engine scales its loss dynamically, the other does not; configure fp16 alike")
    if state is None or scaler is None:
        return
    for key in SCALER:
        if key in state and hasattr(scaler, key):
            setattr(scaler, key, state[key])


def _scaler(engine: Any) -> Any:
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _plain(value: Any) -> Any:
    """Without tensors of the process."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.detach().cpu().tolist()
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
