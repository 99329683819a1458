"""Where a DeepSpeed engine keeps its parameters: runs of local parameters inside its flat buffers, found by address.

All partitioned forms are flat: a group's parameters lie one after another (with alignment padding between or behind
them, in an order that options change), and a rank holds an interval of that run, so a parameter may begin on one rank
and end on the next, and the last intervals may hold padding only. Addresses say where a parameter really is; counting
offsets again would repeat DeepSpeed's rules and their changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nereus.runtime.adapters.base import BindError, FrameworkMissing


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements ``start .. stop`` of a parameter (row-major) in ``memory``, where its element 0 would lie at
    ``origin`` (it may be negative)."""

    parameter: str
    shape: tuple[int, ...]
    memory: torch.Tensor
    origin: int
    start: int
    stop: int


@dataclass(slots=True)
class Master:
    """One tensor that the inner optimizer updates, and the runs in it. ``group`` numbers its parameter group."""

    name: str
    group: int
    tensor: torch.Tensor
    runs: tuple[Run, ...]
    host: bool = False
    #: It is the parameters' own memory, or a copy in their dtype: no state beside the weights.
    copies_weights: bool = False


@dataclass(slots=True)
class EngineLayout:
    """``kind``: plain, unfused, fused, zero12, bf16 or zero3 (the class of optimizer). Names of storages by address."""

    kind: str
    inner: Any  # the torch optimizer, or None
    weights: list[Run] = field(default_factory=list)
    masters: list[Master] = field(default_factory=list)
    #: Parameters of each group of the inner optimizer, by name.
    groups: list[tuple[str, ...]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # address of a storage -> name
    host: set[int] = field(default_factory=set)  # addresses of storages in host memory
    #: Reachable memory that is not state.
    derived: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)

    def call(self, name: str, memory: torch.Tensor, *, host: bool = False) -> None:
        self.names.setdefault(memory.data_ptr(), name)
        if host:
            self.host.add(memory.data_ptr())


#: Class of ``engine.optimizer`` -> kind. Anything else is refused by name.
KINDS = {
    "DeepSpeedZeroOptimizer": "zero12",
    "BF16_Optimizer": "bf16",
    "DeepSpeedZeroOptimizer_Stage3": "zero3",
    "DeepSpeedZeRoOffload": "zero3",  # ZeRO-3 without an optimizer: reference and reward models
    "FP16_UnfusedOptimizer": "unfused",
    "FP16_Optimizer": "fused",
}


def layout_of(engine: Any) -> EngineLayout:
    """The layout of a live engine of a known kind. Raises BindError, and FrameworkMissing for an unfit version."""
    optimizer = engine.optimizer
    kind = KINDS.get(type(optimizer).__name__)
    if kind is None:
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise BindError(
                f"DeepSpeed optimizer {type(optimizer).__name__} is not known; known are "
                f"{', '.join(sorted(KINDS))} and plain torch optimizers (stage 0)"
            )
        kind = "plain"
    try:
        return {
            "plain": _plain,
            "unfused": _unfused,
            "fused": _flat_groups,
            "zero12": _flat_groups,
            "bf16": _flat_groups,
            "zero3": _partitioned,
        }[kind](engine, kind)
    except AttributeError as error:
        raise FrameworkMissing(
            f"this DeepSpeed lacks what the adapter reads ({error}); it is tested with deepspeed 0.19.8: "
            "install that, or report the version"
        ) from error


def _plain(engine: Any, kind: str) -> EngineLayout:
    """Stage 0 without mixed precision (or without an optimizer): a tensor each, the optimizer updates them itself."""
    layout = EngineLayout(kind, engine.optimizer)
    names = _names(engine)
    for name, param in engine.module.named_parameters():
        layout.weights.append(_whole(name, param, param.data))
        layout.call(name, param.data)
    for number, group in enumerate(engine.optimizer.param_groups if engine.optimizer is not None else ()):
        layout.groups.append(tuple(_name(names, p) for p in group["params"]))
        for param in group["params"]:
            name = _name(names, param)
            layout.masters.append(Master(name, number, param, (_whole(name, param, param),), copies_weights=True))
    return layout


def _unfused(engine: Any, kind: str) -> EngineLayout:
    """Stage 0 in 16 bits: a 32-bit copy of each parameter."""
    optimizer = engine.optimizer
    layout = EngineLayout(kind, optimizer.optimizer)
    names = _names(engine)
    for name, param in engine.module.named_parameters():
        layout.weights.append(_whole(name, param, param.data))
        layout.call(name, param.data)
    for number, (params, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        layout.groups.append(tuple(_name(names, p) for p in params))
        for param, master in zip(params, masters, strict=True):
            name = _name(names, param)
            layout.masters.append(Master(f"{name} (fp32)", number, master, (_whole(name, param, master),)))
    return layout


def _flat_groups(engine: Any, kind: str) -> EngineLayout:
    """Stages 0 (fused), 1 and 2, BF16_Optimizer: every rank holds a group's flat 16-bit run whole; the masters cover
    an equal interval of it."""
    optimizer = engine.optimizer
    layout = EngineLayout(kind, optimizer.optimizer)
    names = _names(engine)
    if kind == "zero12":
        groups, flats, parts = (
            optimizer.bit16_groups,
            optimizer.bit16_groups_flat,
            optimizer.single_partition_of_fp32_groups,
        )
        host = bool(optimizer.cpu_offload)
    elif kind == "bf16":
        groups, flats, parts = optimizer.bf16_groups, optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition
        host = False
        layout.caches.append("fp32_groups_gradients_flat")
    else:
        groups, flats, parts = optimizer.fp16_groups, optimizer.fp16_groups_flat, optimizer.fp32_groups_flat
        host = False
    in_groups = set()
    for number, (params, flat, part) in enumerate(zip(groups, flats, parts, strict=True)):
        low = 0
        if kind != "fused":
            low = dist.get_rank(group=optimizer.real_dp_process_group[number]) * part.numel()
        layout.call(f"bit16_groups_flat[{number}]", flat)
        runs = []
        for param in params:
            name = _name(names, param)
            in_groups.add(id(param))
            offset = _offset(param.data, flat)
            if offset is None:
                raise BindError(f"{name}: not in the flat buffer of its group {number}; do not replace param.data")
            shape, size = tuple(param.shape), param.numel()
            run = Run(parameter=name, shape=shape, memory=flat, origin=offset, start=0, stop=size)
            layout.weights.append(run)
            start, stop = max(low - offset, 0), min(low + part.numel() - offset, size)
            if start < stop:
                runs.append(Run(parameter=name, shape=shape, memory=part, origin=offset - low, start=start, stop=stop))
                _agree_with_mapping(optimizer, kind, param, name, offset - low + start, stop - start)
        layout.groups.append(tuple(_name(names, p) for p in params))
        copies = part.dtype == flat.dtype == torch.float32
        layout.masters.append(Master(f"fp32 partition[{number}]", number, part, tuple(runs), host, copies))
    for name, param in engine.module.named_parameters():
        if id(param) not in in_groups and param.numel():  # frozen: held whole, by itself
            layout.weights.append(_whole(name, param, param.data))
            layout.call(name, param.data)
    layout.caches += ["averaged_gradients", "ipg_buckets"]
    return layout


def _agree_with_mapping(optimizer: Any, kind: str, param: Any, name: str, start: int, numel: int) -> None:
    """DeepSpeed's own map of a parameter to its fragment must say the same.

    Not with round-robin gradients: there 0.19.8 builds the map in the order of the group, while the flat buffer is in
    round-robin order, so its safe_get_* functions answer with other elements. The addresses are right.
    """
    mapping = getattr(param, "_hp_mapping", None)
    if kind == "fused" or mapping is None or getattr(optimizer, "round_robin_gradients", False):
        return
    address = mapping.get_hp_fragment_address()
    if (address.start, address.numel) != (start, numel):
        raise BindError(
            f"{name}: DeepSpeed maps it to elements {address.start} .. {address.start + address.numel} of the fp32 "
            f"partition, its address says {start} .. {start + numel}"
        )


def _partitioned(engine: Any, kind: str) -> EngineLayout:
    """Stage 3: every parameter is padded to a multiple of the ranks and cut evenly; a rank's parts of all parameters
    lie in one flat buffer, the masters in one per sub-group."""
    optimizer = engine.optimizer
    trains = hasattr(optimizer, "fp32_partitioned_groups_flat")
    layout = EngineLayout(kind, optimizer.optimizer if trains else None)
    names = _names(engine)
    pools: list[torch.Tensor] = []
    if trains:
        buffer = getattr(optimizer, "lp_param_buffer", None)
        pools = [buffer] if buffer is not None else list(optimizer.fp16_partitioned_groups_flat)
        for number, pool in enumerate(pools):
            layout.call("lp_param_buffer" if buffer is not None else f"fp16_partitioned_groups_flat[{number}]", pool)
            if optimizer.offload_param:
                layout.host.add(pool.data_ptr())
    for name, param in engine.module.named_parameters():
        if not param.ds_numel:
            continue
        part = param.ds_tensor
        if part.status.name != "AVAILABLE":
            raise BindError(f"{name}: its partition is {part.status.name}, not in memory")
        memory = next((pool for pool in pools if _offset(part.data, pool) is not None), part.data)
        at = _offset(part.data, memory) or 0
        layout.call(f"{name}.ds_tensor", memory, host=part.device.type == "cpu" and engine.device.type != "cpu")
        start, stop = _interval(param)
        if start < stop:
            layout.weights.append(
                Run(
                    parameter=name,
                    shape=tuple(param.ds_shape),
                    memory=memory,
                    origin=at - _low(param),
                    start=start,
                    stop=stop,
                )
            )
        if param.ds_persist:
            layout.derived.append(f"{name}.data (persisted)")
    if trains:
        _partitioned_masters(optimizer, layout, names)
        layout.caches += ["grad_partitions_flat_buffer", "averaged_gradients", "ipg_buckets"]
    return layout


def _partitioned_masters(optimizer: Any, layout: EngineLayout, names: dict[int, str]) -> None:
    layout.groups = [() for _ in optimizer.optimizer.param_groups]
    for number, (params, flat) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        group = optimizer.sub_group_to_group_id[number]
        layout.groups[group] += tuple(_name(names, p) for p in params)
        at, runs = 0, []
        for param in params:
            name = _name(names, param)
            position = optimizer.grad_position[optimizer.get_param_id(param)]
            if tuple(position) != (number, at, param.ds_tensor.ds_numel):
                raise BindError(f"{name}: sub-group {number} keeps it at {at}, DeepSpeed's table says {position}")
            start, stop = _interval(param)
            if start < stop:
                shape = tuple(param.ds_shape)
                origin = at - _low(param)
                runs.append(Run(parameter=name, shape=shape, memory=flat, origin=origin, start=start, stop=stop))
            at += int(param.ds_tensor.ds_numel)
        copies = flat.dtype == params[0].ds_tensor.dtype == torch.float32
        device = getattr(optimizer, "subgroup_to_device", {}).get(number, "cpu")
        host = bool(optimizer.offload_optimizer) and device == "cpu"
        layout.masters.append(Master(f"fp32_partitioned_groups_flat[{number}]", group, flat, tuple(runs), host, copies))


def _low(param: Any) -> int:
    """First element of this rank's part of a stage-3 parameter."""
    return int(dist.get_rank(group=param.ds_process_group)) * int(param.ds_tensor.ds_numel)


def _interval(param: Any) -> tuple[int, int]:
    """True elements that this rank holds of a stage-3 parameter; none where its part is padding only."""
    low = _low(param)
    return min(low, param.ds_numel), min(low + int(param.ds_tensor.ds_numel), param.ds_numel)


def _whole(name: str, param: torch.Tensor, memory: torch.Tensor) -> Run:
    if not memory.is_contiguous():
        raise BindError(f"{name}: strides {tuple(memory.stride())} are not contiguous")
    shape = tuple(param.shape)
    return Run(parameter=name, shape=shape, memory=memory, origin=0, start=0, stop=param.numel())


def _offset(part: torch.Tensor, flat: torch.Tensor) -> int | None:
    """Element of ``flat`` where ``part`` begins; None where it lies elsewhere."""
    if part.dtype != flat.dtype or part.device != flat.device or not part.is_contiguous():
        return None
    distance = part.data_ptr() - flat.data_ptr()
    offset, odd = divmod(distance, flat.element_size())
    return None if odd or offset < 0 or offset + part.numel() > flat.numel() else offset


def _names(engine: Any) -> dict[int, str]:
    return {id(param): name for name, param in engine.module.named_parameters()}


def _name(names: dict[int, str], param: Any) -> str:
    name = names.get(id(param))
    if name is None:
        raise BindError(
            f"the optimizer holds a parameter of shape {tuple(getattr(param, 'ds_shape', param.shape))} that is not in "
            "the engine's module"
        )
    return name
