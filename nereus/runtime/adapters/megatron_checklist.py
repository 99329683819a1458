"""What must hold of a Megatron trainer before training goes on after a change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from nereus.runtime.adapters import megatron_hybrid
from nereus.runtime.adapters.base import BindError, PostCondition
from nereus.runtime.adapters.megatron_job import (
    RATES,
    calculator_of,
    group_key,
    read_scaler,
    read_scheduler,
    scaler_for,
    step_of,
    stream_names,
)
from nereus.runtime.adapters.megatron_layout import Chunk, Leaf, MegatronLayout
from nereus.runtime.adapters.together import Ranks


def checklist(
    layout: MegatronLayout, optimizer: Any, scheduler: Any, expected: Mapping[str, Any] | None, num_layers: int, dp: int
) -> tuple[PostCondition, ...]:
    """``expected``: the job state that was set, None before ``finish``. ``layer coverage`` is a collective over the
    pipeline: every rank checks all of the list."""
    state = expected or {}
    return (
        PostCondition("parameter groups", lambda: _groups(layout)),
        PostCondition("steps and rates", lambda: _steps(layout, state)),
        PostCondition("scheduler", lambda: _scheduler(optimizer, scheduler, state)),
        PostCondition("micro-batches", lambda: _batch(state, dp)),
        PostCondition("random streams", lambda: _streams(state)),
        PostCondition("gradient scaler", lambda: _scaler(layout, state)),
        PostCondition("DDP hooks", lambda: _first(_hooks(chunk) for chunk in layout.chunks)),
        PostCondition("weights and masters", lambda: _first(_masters(leaf) for leaf in layout.leaves)),
        PostCondition("layer coverage", lambda: _coverage(layout, num_layers)),
        PostCondition("pipeline sends", lambda: _sends(layout)),
    )


def _first(results: Any) -> str | None:
    return next((text for text in results if text is not None), None)


def _groups(layout: MegatronLayout) -> str | None:
    shards = {}
    for leaf in layout.leaves:
        listed = Counter(id(tensor) for group in leaf.inner.param_groups for tensor in group["params"])
        for shard in leaf.shards:
            shards[id(shard.param.tensor)] = leaf
            if listed[id(shard.tensor)] != 1:
                return (
                    f"{shard.param.name} is in {listed[id(shard.tensor)]} parameter groups of {leaf.kind}, not in one"
                )
            if shard.tensor not in leaf.inner.state and "betas" in leaf.inner.param_groups[0]:
                return f"{leaf.kind} has no state of {shard.param.name}"
        known = {id(shard.tensor) for shard in leaf.shards}
        if set(listed) - known:
            return f"{leaf.kind} steps {len(set(listed) - known)} tensors that are no part of this model"
    if any(leaf.distributed for leaf in layout.leaves) or not layout.leaves:
        return None  # another rank may have a parameter's shard
    for param in layout.params:
        if param.tensor.requires_grad and not param.buffer and id(param.tensor) not in shards:
            return f"{param.name} is trained, but in no parameter group"
    return None


def _steps(layout: MegatronLayout, state: Mapping[str, Any]) -> str | None:
    groups = state.get("groups", {})
    for leaf in layout.leaves:
        for group in leaf.inner.param_groups:
            key = group_key(group)
            if key not in groups:
                if state and group["params"]:
                    return f"the job has no group ({key})"
                continue
            try:
                step = step_of(leaf, group)
            except BindError as error:
                return str(error)
            if step is not None and step != groups[key].get("step", step):
                return f"group ({key}) is at step {step}, not {groups[key]['step']}"
            for name in RATES:
                if name in groups[key] and float(group[name]) != groups[key][name]:
                    return f"group ({key}): {name} is {float(group[name])}, not {groups[key][name]}"
    return None


def _scheduler(optimizer: Any, scheduler: Any, state: Mapping[str, Any]) -> str | None:
    if scheduler is None:
        return "the job has a scheduler, this trainer was given none" if "scheduler" in state else None
    if scheduler.optimizer is not optimizer:
        return f"{type(scheduler).__name__} steps another optimizer than this trainer's"
    wanted = state.get("scheduler", {}).get("state")
    if wanted is None:
        return None
    here = read_scheduler(scheduler)
    for name, value in wanted.items():
        if here.get(name) != value:
            return f"scheduler: {name} is {here.get(name)}, not {value}"
    for group in optimizer.param_groups:
        rate = scheduler.get_lr(group)
        if abs(rate - float(group["lr"])) > 1e-6 * abs(rate):
            return f"the scheduler gives lr {rate}, the group has {float(group['lr'])}"
    return None


def _batch(state: Mapping[str, Any], dp: int) -> str | None:
    held, calculator = state.get("batch", {}).get("size"), calculator_of()
    if held is None:
        return None
    if calculator is None:
        return "the job has a calculator of micro-batches, this process has none: init_num_microbatches_calculator"
    if type(calculator).__name__ != held["class"]:
        return f"the calculator is a {type(calculator).__name__}, not {held['class']}"
    size = int(calculator.get_current_global_batch_size())
    if size != held["global"]:
        return f"the global batch is {size}, not {held['global']}"
    count, micro = int(calculator.get()), int(calculator.get_micro_batch_size())
    if count * micro * dp != size:
        return f"{count} micro-batches of {micro} on each of {dp} data-parallel ranks are not a batch of {size}"
    return None


def _streams(state: Mapping[str, Any]) -> str | None:
    names = state.get("streams", {}).get("tracker", {}).get("names", ())
    missing = sorted(set(names) - set(stream_names()))
    if missing:
        return (
            f"the tracker has no stream {', '.join(missing)}: model_parallel_cuda_manual_seed after the groups are made"
        )
    return None


def _scaler(layout: MegatronLayout, state: Mapping[str, Any]) -> str | None:
    for leaf in layout.leaves:
        here, held = read_scaler(leaf), scaler_for(leaf, state)
        if (here is None) != (held is None) and state:
            return f"{leaf.kind} has {'no ' if here is None else 'a '}gradient scaler, unlike the job"
        if held is not None and here != held:
            return f"the gradient scaler of {leaf.kind} is at {here}, not {held}"
    return None


def _hooks(chunk: Chunk) -> str | None:
    ddp = chunk.ddp
    if ddp is None:
        return None
    trained = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
    if len(ddp.grad_accs) != len(trained) and not getattr(ddp.ddp_config, "delay_wgrad_compute", False):
        return f"chunk {chunk.number}: {len(ddp.grad_accs)} gradient hooks for {len(trained)} trained parameters"
    live = {id(p) for _, p in trained}
    accumulated = {id(getattr(acc, "variable", None)) for acc in ddp.grad_accs}
    for name, param in trained:
        if hasattr(ddp.grad_accs[0], "variable") and id(param) not in accumulated:
            return f"chunk {chunk.number}: the gradient hook of {name} is on another tensor"
        group = ddp.param_to_bucket_group.get(param)
        if group is None or param not in group.param_to_bucket:
            return f"chunk {chunk.number}: {name} is in no bucket: its gradients would not be reduced"
        bucket = group.param_to_bucket[param]
        if not _inside(param.main_grad, bucket.grad_data):
            return f"chunk {chunk.number}: main_grad of {name} lies outside its bucket"
        if bucket.param_data is not None and not _inside(param.data, bucket.param_data):
            return f"chunk {chunk.number}: {name} lies outside its bucket's parameters"
    stale = [p for p in ddp.param_to_bucket_group if id(p) not in live]
    if stale:
        return f"chunk {chunk.number}: {len(stale)} parameters in buckets are not the model's"
    return None


def _inside(part: torch.Tensor, whole: torch.Tensor) -> bool:
    lo, hi = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
    return whole.data_ptr() <= lo and hi <= whole.data_ptr() + whole.numel() * whole.element_size()


def _masters(leaf: Leaf) -> str | None:
    for shard in leaf.shards:
        if shard.master is not None:
            weight = shard.param.tensor.detach().view(-1)[shard.start : shard.stop]
            if not torch.equal(shard.master.detach().view(-1).to(weight), weight):
                return f"{shard.param.name}: the weight is not its rounded master"
    return megatron_hybrid.stale(leaf.inner) if megatron_hybrid.is_hybrid(leaf.inner) else None


def _coverage(layout: MegatronLayout, num_layers: int) -> str | None:
    group = getattr(getattr(layout.chunks[0].model, "pg_collection", None), "pp", None)
    here = [layer for chunk in layout.chunks for layer in chunk.where.layers or ()]
    counts = Counter(layer for layers in Ranks(group).gather(here) for layer in layers)
    wrong = {layer: counts[layer] for layer in range(num_layers) if counts[layer] != 1}
    wrong |= {layer: count for layer, count in counts.items() if not 0 <= layer < num_layers}
    if wrong:
        text = ", ".join(f"layer {layer} {count} times" for layer, count in sorted(wrong.items()))
        return f"the pipeline's stages hold {text} instead of once"
    return None


def _sends(layout: MegatronLayout) -> str | None:
    """Of two interleaved stages each is both before and after the other. Batched, a send forward and one backward are
    told apart only by their order, which differs between sender and receiver: from the third micro-batch on activations
    and gradients change places, and nothing fails. Megatron-LM's arguments forbid it, megatron-core does not look."""
    model = layout.chunks[0].model
    group, config = getattr(getattr(model, "pg_collection", None), "pp", None), model.config
    if len(layout.chunks) < 2 or group is None or group.size() != 2 or not config.batch_p2p_comm:
        return None
    return "interleaved stages on 2 ranks need overlap_p2p_comm=True and batch_p2p_comm=False in their configuration"
