"""What must hold of a DeepSpeed engine before training goes on after a change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nereus.runtime.adapters.base import BindError, PostCondition
from nereus.runtime.adapters.deepspeed_job import read, scaler_state, step_of
from nereus.runtime.adapters.deepspeed_layout import EngineLayout, layout_of


def checklist(engine: Any, expected: Mapping[str, Any] | None) -> tuple[PostCondition, ...]:
    """``expected``: the job state that was set, None before ``finish``."""

    def groups() -> str | None:
        layout = layout_of(engine)
        if layout.inner is None:
            return None
        held = {id(t) for group in layout.inner.param_groups for t in group["params"]}
        for master in layout.masters:
            # Stage 3 puts a master into its group only while it steps.
            if layout.kind != "zero3" and id(master.tensor) not in held:
                return f"{master.name} is in no parameter group of the inner optimizer"
            if master.tensor not in layout.inner.state:
                return f"the inner optimizer has no state of {master.name}"
        if expected is None or "groups" not in expected:
            return None
        wanted = {frozenset(group["parameters"]): group for group in expected["groups"]}
        for number, names in enumerate(layout.groups):
            group = wanted.get(frozenset(names))
            if group is None:
                return f"parameter group {number} holds other parameters than before"
            try:
                step = step_of(layout, number)
            except BindError as error:
                return str(error)
            if step != group["step"]:
                return f"parameter group {number} is at step {step}, not {group['step']}"
            here = layout.inner.param_groups[number]["lr"]
            if float(here) != float(group["lr"]):
                return f"parameter group {number} has lr {float(here)}, not {group['lr']}"
        return None

    def scheduler() -> str | None:
        bound, inner = engine.lr_scheduler, layout_of(engine).inner
        if bound is None or inner is None:
            return None
        optimizer = getattr(bound, "optimizer", inner)
        if getattr(optimizer, "optimizer", optimizer) is not inner:
            return f"lr scheduler {type(bound).__name__} steps another optimizer than this engine's"
        if expected is None:
            return None
        here = read(engine, layout_of(engine))["scheduler"]
        return None if here == expected["scheduler"] else f"lr scheduler is at {here}, not {expected['scheduler']}"

    def loss_scaler() -> str | None:
        if expected is None or "loss_scaler" not in expected:
            return None
        here, wanted = scaler_state(engine) or {}, expected["loss_scaler"] or {}
        wrong = {key: (here[key], value) for key, value in wanted.items() if key in here and here[key] != value}
        return f"loss scaler: {wrong} (is, was)" if wrong else None

    return (
        PostCondition("every fp32 master is in its parameter group, at its step and lr", groups),
        PostCondition("the scheduler drives this engine's optimizer, at its position", scheduler),
        PostCondition("the loss scaler goes on where it was", loss_scaler),
        PostCondition("ZeRO's gradient and parameter hooks are registered", lambda: _hooks(engine)),
        PostCondition("no gradient is left over", lambda: _gradients(engine)),
        PostCondition("16-bit weights are the rounded masters", lambda: _rounded(layout_of(engine))),
        PostCondition("persisted parameters equal their partitions", lambda: _persisted(engine)),
        PostCondition("train batch = micro batch x accumulation x ranks, as before", lambda: _batch(engine, expected)),
    )


def _hooks(engine: Any) -> str | None:
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer":
        needed = any(
            getattr(optimizer, name)
            for name in ("partition_gradients", "overlap_comm", "use_grad_accum_attribute", "contiguous_gradients")
        )
        handles = optimizer._grad_acc_hooks
        wanted = sum(len(group) for group in optimizer.bit16_groups) if needed else 0
    elif kind == "BF16_Optimizer":
        handles = optimizer._grad_acc_hooks
        wanted = sum(len(group) for group in optimizer.bf16_groups) if optimizer.immediate_grad_update else 0
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        handles = [*optimizer._grad_acc_hooks, *_parameter_hooks(optimizer.parameter_offload)]
        wanted = sum(len(group) for group in optimizer.fp16_groups) + 2
    elif kind == "DeepSpeedZeRoOffload":
        handles, wanted = _parameter_hooks(optimizer), 2
    else:
        return None
    alive = sum(1 for handle in handles if _alive(handle))
    if alive < wanted or alive < len(handles):
        return f"{alive} of {max(wanted, len(handles))} hooks are registered; build the engine again"
    return None


def _parameter_hooks(offload: Any) -> list[Any]:
    return [*offload.forward_hooks, *offload.backward_hooks]


def _alive(handle: Any) -> bool:
    hooks = handle.hooks_dict_ref()
    return hooks is not None and handle.id in hooks


def _gradients(engine: Any) -> str | None:
    for name, param in engine.module.named_parameters():
        if param.grad is not None and bool(param.grad.count_nonzero()):
            return f"{name}.grad holds a gradient"
    optimizer = engine.optimizer
    for number, part in enumerate(getattr(optimizer, "fp32_groups_gradients_flat", ())):
        if bool(part.count_nonzero()):
            return f"fp32_groups_gradients_flat[{number}] holds a gradient"
    for number, found in getattr(optimizer, "averaged_gradients", {}).items():
        if found is not None and len(found):
            return f"averaged_gradients[{number}] holds gradients"
    return None


def _rounded(layout: EngineLayout) -> str | None:
    """On the elements whose master this rank holds."""
    weights = {run.parameter: run for run in layout.weights}
    for master in layout.masters:
        if master.tensor.is_meta:
            continue
        for run in master.runs:
            weight = weights.get(run.parameter)
            if weight is None or weight.start > run.start or weight.stop < run.stop:
                return f"{run.parameter}: this rank holds its master but not its weight"
            high = run.memory.detach().view(-1)[run.origin + run.start : run.origin + run.stop]
            low = weight.memory.detach().view(-1)[weight.origin + run.start : weight.origin + run.stop]
            if not torch.equal(high.to(low.dtype).to(low.device), low):
                return f"{run.parameter}: its weight is not its master in {low.dtype}"
    return None


def _persisted(engine: Any) -> str | None:
    for name, param in engine.module.named_parameters():
        if not getattr(param, "ds_persist", False):
            continue
        if param.ds_status.name != "AVAILABLE":
            if engine.optimizer is not None and hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
                return f"{name}: persisted, but {param.ds_status.name}"
            continue
        low = param.ds_tensor.ds_numel * param.ds_zero_partition_rank
        high = min(low + param.ds_tensor.ds_numel, param.ds_numel)
        if low < high and not torch.equal(
            param.data.view(-1)[low:high], param.ds_tensor.data[: high - low].to(param.device)
        ):
            return f"{name}: the persisted copy differs from its partition"
    return None


def _batch(engine: Any, expected: Mapping[str, Any] | None) -> str | None:
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    ranks, total = engine.dp_world_size, engine.train_batch_size()
    if micro * accumulation * ranks != total:
        return f"train batch {total} is not {micro} x {accumulation} x {ranks}"
    if engine.micro_steps % accumulation:
        return f"the engine stands {engine.micro_steps % accumulation} micro-batches into an accumulation"
    if expected is not None and total != expected["train_batch_size"]:
        per = micro * ranks
        wanted = expected["train_batch_size"]
        advice = (
            f"use gradient_accumulation_steps = {wanted // per}"
            if wanted % per == 0
            else (f"no accumulation gives it with {micro} x {ranks}; choose another micro batch or number of ranks")
        )
        return f"train batch {total} was {wanted}: {advice}"
    return None
