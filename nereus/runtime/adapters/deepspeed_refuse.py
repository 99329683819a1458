"""What of a DeepSpeed engine is not understood, by name and with what to do; state must never be guessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nereus.runtime.adapters.base import BindError, FrameworkMissing

#: Optimizer state that keeps one element per element of its parameter.
ELEMENTWISE = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "exp_inf",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "sum",
)
#: Optimizer classes whose state begins as zeros at step 0, so that making it early changes nothing.
ADAM = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
#: Attributes of every module: what hooks close over is DeepSpeed's own.
_INTERNAL = frozenset(vars(torch.nn.Module()))
#: Engine classes that hold state of their own.
OTHER_ENGINES = {
    "PipelineEngine": "pipeline stages name layers locally",
    "DeepSpeedHybridEngine": "it keeps inference copies of the weights",
}


def require_engine(engine: Any) -> None:
    """Raises FrameworkMissing without deepspeed, BindError for anything but a DeepSpeedEngine."""
    try:
        from deepspeed.runtime.engine import DeepSpeedEngine
    except ImportError as error:
        raise FrameworkMissing("deepspeed is not installed: pip install deepspeed (tested with 0.19.8)") from error
    if not isinstance(engine, DeepSpeedEngine):
        raise BindError(f"expected the DeepSpeedEngine of deepspeed.initialize, not {type(engine).__name__}")


def refuse_unknown(engine: Any) -> None:
    """One BindError with every reason why the engine cannot be bound now."""
    reasons = [*_modes(engine), *_at_rest(engine), *_module(engine.module), *_optimizer_state(engine)]
    if reasons:
        raise BindError("this DeepSpeed engine cannot be bound: " + "; ".join(reasons))


def _modes(engine: Any) -> Iterator[str]:
    zero = engine._config.zero_config
    for kind in type(engine).__mro__:
        if kind.__name__ in OTHER_ENGINES:
            yield f"{kind.__name__} ({OTHER_ENGINES[kind.__name__]}); use a plain engine"
    if getattr(engine, "has_moe_layers", False):
        yield "DeepSpeed's own MoE layers number experts locally per rank; use experts that every rank holds"
    if int(getattr(engine, "mp_world_size", 1)) > 1 or int(getattr(engine, "autotp_size", lambda: 0)() or 0) > 1:
        yield "tensor parallelism (mpu or AutoTP) cuts parameters in ways that have no segment map; use ZeRO alone"
    if getattr(zero, "zero_quantized_weights", False) or getattr(zero, "zero_quantized_nontrainable_weights", False):
        yield "ZeRO++ quantised weights (zero_quantized_weights, zero_quantized_nontrainable_weights); turn them off"
    if int(getattr(zero, "zero_hpz_partition_size", 1) or 1) > 1:
        yield "ZeRO++ secondary partitions (zero_hpz_partition_size > 1); set it to 1"
    if int(getattr(engine._config, "mics_shard_size", 0) or getattr(zero, "mics_shard_size", 0) or 0) > 0:
        yield "MiCS shard groups (mics_shard_size); unset it"
    if getattr(zero, "zenflow", None) is not None:
        yield "ZenFlow updates some channels apart from the rest; turn it off"
    for name in ("offload_optimizer", "offload_param"):
        config = getattr(zero, name, None)
        device = getattr(getattr(config, "device", None), "value", None)
        if device == "nvme":
            yield f"{name} to NVMe keeps state in files; set its device to cpu or none"
    if float(getattr(getattr(zero, "offload_optimizer", None), "ratio", 1.0) or 0.0) < 1.0:
        yield "offload_optimizer.ratio < 1 updates with two optimizers; set it to 1"
    if getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None:
        yield "torch.autocast in fp16 keeps a torch GradScaler; use the fp16 block of the configuration"


def _at_rest(engine: Any) -> Iterator[str]:
    offloaded = getattr(engine.optimizer, "offloaded_states", ())
    if offloaded:
        yield f"offload_states() moved {sorted(str(s) for s in offloaded)} away; call engine.reload_states() first"
    if engine.optimizer is not None and engine.micro_steps % engine.gradient_accumulation_steps():
        done = engine.micro_steps % engine.gradient_accumulation_steps()
        yield (
            f"{done} of {engine.gradient_accumulation_steps()} micro-batches are accumulated; a change is legal only "
            "after the optimizer step"
        )


def _module(module: torch.nn.Module) -> Iterator[str]:
    """Tensors and opaque state of modules that are neither parameter nor a buffer that construction makes again."""
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for prefix, child in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, buffer in child.named_buffers(recurse=False):
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield f"buffer {dot}{name} is saved in checkpoints and no naming knows it; declare it or unregister it"
        if type(child).get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{dot or 'the module'} keeps opaque state (get_extra_state); it cannot be cut, so remove it"
        for name, value in vars(child).items():
            if name not in _INTERNAL and not name.startswith(("ds_", "_ds_")) and _holds_tensors(value, set(own)):
                yield f"{dot}{name} holds tensors that are no parameter or buffer; register or delete them"


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    """Whether a tensor not in ``seen`` (ids) hides in ``value``: an average of the weights in a list, say."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensors(item, seen) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(_holds_tensors(item, seen) for item in value)
    if isinstance(value, torch.nn.Module):
        return any(id(tensor) not in seen for tensor in (*value.parameters(), *value.buffers()))
    return False


def made_again(module: torch.nn.Module) -> list[str]:
    """Buffers that construction computes (rotary tables): derived, the same in every layout."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in sorted(child._non_persistent_buffers_set)
        if child._buffers.get(name) is not None
    ]


def _optimizer_state(engine: Any) -> Iterator[str]:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        return
    kind = type(inner).__name__
    for param, state in inner.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or (value.numel() == 1 and key == "step"):
                if not isinstance(value, torch.Tensor | int | float | bool | str | None):
                    yield f"optimizer {kind} keeps a {type(value).__name__} under '{key}'; its meaning is not known"
            elif key not in ELEMENTWISE:
                yield f"optimizer state '{key}' of {kind} is not known; known are {', '.join(ELEMENTWISE)}"
            elif value.numel() != param.numel():
                yield f"optimizer state '{key}' of {kind} has {value.numel()} elements for {param.numel()}"
