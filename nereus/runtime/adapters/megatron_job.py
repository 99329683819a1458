"""Job state of a Megatron trainer beside tensors: per-group step and rates, scheduler, gradient scaler, batch, streams.

A rank sees only part of it: its stage may have no experts, its shard may be padding. So all ranks put together what
they know, and must agree.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nereus.runtime.adapters import megatron_hybrid
from nereus.runtime.adapters.base import BindError
from nereus.runtime.adapters.megatron_layout import Leaf, MegatronLayout, counts_per_parameter

#: What makes a parameter group the one it is: older versions have no list of their own.
IDENTIFIERS = ("wd_mult", "lr_mult", "is_decoupled_lr")
#: A fact of one layout: without expert parallelism Megatron has experts in the groups of the dense parameters.
_LAYOUT = "is_expert_parallel"
RATES = ("lr", "weight_decay")
#: What Megatron's scheduler does not put into its own state dict, but computes rates from.
_SCHEDULER_MORE = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")

_CALCULATOR = "megatron.core.num_microbatches_calculator"
_RANDOM = "megatron.core.tensor_parallel.random"


def group_key(group: Mapping[str, Any]) -> str:
    """A global name of a parameter group, from what the framework itself tells groups apart by. Groups of dense and of
    expert parameters share one: they have the same step and rates, or ``merged`` refuses."""
    module = sys.modules.get("megatron.core.optimizer.optimizer")
    names = getattr(module, "param_group_identifier_keys", IDENTIFIERS)
    values = ((name, group.get(name, group.get(f"pre_{name}"))) for name in names if name != _LAYOUT)
    return ", ".join(f"{name}={value}" for name, value in values if value is not None) or "all"


def step_of(leaf: Leaf, group: Mapping[str, Any]) -> int | None:
    """Updates that the group has seen; None where this rank has none of its parameters. BindError where they differ."""
    if not group["params"]:
        return None
    if megatron_hybrid.is_hybrid(leaf.inner):
        counts = megatron_hybrid.steps(leaf.inner, group)
    elif not counts_per_parameter(leaf.inner):
        return int(group.get("step", 0))
    else:
        counts = {int(leaf.inner.state[p]["step"]) for p in group["params"] if "step" in leaf.inner.state.get(p, {})}
    if len(counts) > 1:
        raise BindError(f"parameters of group ({group_key(group)}) count different steps: {sorted(counts)}")
    return counts.pop() if counts else 0


def set_step(leaf: Leaf, group: dict[str, Any], step: int) -> None:
    if megatron_hybrid.is_hybrid(leaf.inner):
        megatron_hybrid.set_steps(leaf.inner, group, step)
    elif counts_per_parameter(leaf.inner):
        for param in group["params"]:
            state = leaf.inner.state.get(param)
            if state:
                old = state.get("step")
                state["step"] = (
                    torch.full_like(old, step) if isinstance(old, torch.Tensor) else torch.tensor(float(step))
                )
    elif group["params"] or "step" in group:
        old = group.get("step")
        group["step"] = torch.full_like(old, step) if isinstance(old, torch.Tensor) else step


def read_local(layout: MegatronLayout, scheduler: Any) -> dict[str, Any]:
    """What this rank knows."""
    groups: dict[str, dict[str, Any]] = {}
    scalers: dict[str, dict[str, Any]] = {}
    for leaf in layout.leaves:
        for group in leaf.inner.param_groups:
            values: dict[str, Any] = {name: float(group[name]) for name in RATES if name in group}
            step = step_of(leaf, group)
            if step is not None:
                values["step"] = step
            _merge(groups, {group_key(group): values}, "this rank")
        scaler = read_scaler(leaf)
        if scaler is not None:
            _merge(scalers, {leaf.label: scaler}, "this rank")
    found: dict[str, Any] = {"groups": groups}
    if scalers:
        found["scalers"] = scalers
    if scheduler is not None:
        found["scheduler"] = {"state": read_scheduler(scheduler)}
    calculator = calculator_of()
    if calculator is not None:
        found["batch"] = {
            "size": {"class": type(calculator).__name__, "global": int(calculator.get_current_global_batch_size())}
        }
    names = stream_names()
    if names:
        found["streams"] = {"tracker": {"names": names}}
    return found


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same on every rank. BindError where ranks disagree."""
    found: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        for section, values in part.items():
            _merge(found.setdefault(section, {}), values, f"rank {rank}", section)
    return found


def _merge(found: dict[str, Any], more: Mapping[str, Any], who: str, section: str = "groups") -> None:
    for key, values in more.items():
        held = found.setdefault(key, {})
        for name, value in values.items():
            if held.setdefault(name, value) != value:
                raise BindError(f"{section} ({key}): {name} is {value} on {who}, but {held[name]} elsewhere")


def read_scheduler(scheduler: Any) -> dict[str, Any]:
    more = {name: getattr(scheduler, name) for name in _SCHEDULER_MORE if hasattr(scheduler, name)}
    return {**scheduler.state_dict(), **more}


def read_scaler(leaf: Leaf) -> dict[str, Any] | None:
    scaler = getattr(leaf.wrapper, "grad_scaler", None)
    if scaler is None:
        return None
    plain = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in scaler.state_dict().items()}
    return {"class": type(scaler).__name__, "scale": float(scaler.scale), **plain}


def scaler_for(leaf: Leaf, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scaler that a leaf goes on with: experts that had none of their own shared that of the dense parameters."""
    held: Mapping[str, dict[str, Any]] = state.get("scalers", {})
    return held.get(leaf.label, held.get("dense"))


def calculator_of() -> Any:
    """Megatron's calculator of micro-batches: one for the process, None where it was not set up."""
    return getattr(sys.modules.get(_CALCULATOR), "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)


def stream_names() -> tuple[str, ...]:
    module = sys.modules.get(_RANDOM)
    if module is None or not getattr(module, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False):
        return ()
    return tuple(sorted(module.get_cuda_rng_tracker().get_states()))


# -- writing ----------------------------------------------------------------------------------------------------------


def write(layout: MegatronLayout, scheduler: Any, state: Mapping[str, Any], dp: int) -> None:
    """BindError, with nothing written, where a group has no counterpart in ``state`` or the batch cannot be cut."""
    groups = state.get("groups", {})
    missing = [
        group_key(g)
        for leaf in layout.leaves
        for g in leaf.inner.param_groups
        if g["params"] and group_key(g) not in groups
    ]
    if missing:
        raise BindError(
            f"parameter groups ({'), ('.join(dict.fromkeys(missing))}) are none of the job's ({'), ('.join(groups)}): "
            "build the optimizer with the same multipliers"
        )
    _check_batch(state, dp)
    if scheduler is not None and "scheduler" in state:
        # Its own load_state_dict adds the steps to those it has, and obeys flags that keep other values.
        for name, value in state["scheduler"]["state"].items():
            setattr(scheduler, name, value)
        scheduler.step(0)
    for leaf in layout.leaves:
        for group in leaf.inner.param_groups:
            values = groups.get(group_key(group), {})
            for name in RATES:
                if name in values:
                    old = group.get(name)
                    group[name] = torch.full_like(old, values[name]) if isinstance(old, torch.Tensor) else values[name]
            if "step" in values:
                set_step(leaf, group, int(values["step"]))
        scaler, held = getattr(leaf.wrapper, "grad_scaler", None), scaler_for(leaf, state)
        if scaler is not None and held is not None:
            _write_scaler(scaler, held)
    _write_batch(state, dp)


def _write_scaler(scaler: Any, held: Mapping[str, Any]) -> None:
    device = scaler.scale.device
    scaler._scale = torch.tensor([held["scale"]], dtype=torch.float32, device=device)
    for key in scaler.state_dict():
        if key != "scale" and key in held:
            setattr(scaler, f"_{key}", held[key])


def _constant_batch(state: Mapping[str, Any]) -> tuple[Any, int] | None:
    """(calculator, global batch) where both sides have a constant one."""
    calculator, held = calculator_of(), state.get("batch", {}).get("size")
    kind = "ConstantNumMicroBatchesCalculator"
    if calculator is None or held is None or held["class"] != kind or type(calculator).__name__ != kind:
        return None
    return calculator, int(held["global"])


def _check_batch(state: Mapping[str, Any], dp: int) -> None:
    found = _constant_batch(state)
    if found is None:
        return
    micro, size = int(found[0].get_micro_batch_size()), found[1]
    if size % (micro * dp):
        legal = [n for n in range(1, size + 1) if size % (micro * n) == 0]
        raise BindError(
            f"a global batch of {size} cannot be cut into micro-batches of {micro} over dp {dp}; with them dp "
            f"may be {', '.join(map(str, legal)) or 'nothing'}"
        )


def _write_batch(state: Mapping[str, Any], dp: int) -> None:
    found = _constant_batch(state)
    if found is None:
        return
    module = sys.modules[_CALCULATOR]
    module.reconfigure_num_microbatches_calculator(
        rank=1,  # it prints on rank 0
        rampup_batch_size=None,
        global_batch_size=found[1],
        micro_batch_size=int(found[0].get_micro_batch_size()),
        data_parallel_size=dp,
        decrease_batch_size_if_needed=False,
    )
