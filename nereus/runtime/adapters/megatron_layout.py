"""Where megatron-core keeps state: model chunks, their parameters, and the optimizers' shards of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nereus.models.naming.base import Where
from nereus.models.naming.megatron import MegatronNaming, unwrapped
from nereus.runtime.adapters import megatron_hybrid
from nereus.runtime.adapters.base import BindError, FrameworkMissing

#: State of the inner optimizer that has one number for each of the parameter's elements.
ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One model chunk: several where stages are interleaved. ``ddp``: Megatron's wrapper with its buffers, if any."""

    number: int
    outer: Any
    ddp: Any | None
    model: Any
    where: Where


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter, or a buffer that is state. ``name``: unique in the process; ``local``: as GPTModel calls it."""

    name: str
    local: str
    tensor: torch.Tensor
    chunk: Chunk
    buffer: bool = False

    @property
    def num_cols(self) -> int:
        return 1 if self.tensor.dim() < 2 else self.tensor.shape[-1]


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements ``start .. stop`` of a parameter as the inner optimizer knows them: ``tensor`` is one of its own
    parameters, a master copy or (``is_weight``) the weight itself. ``master``: the fp32 copy, wherever it is kept.
    ``host``: state of the inner optimizer, and a master that it keeps itself, lie in host memory."""

    param: Param
    tensor: torch.Tensor
    start: int
    stop: int
    is_weight: bool
    master: torch.Tensor | None
    host: bool = False


@dataclass(frozen=True, slots=True)
class Leaf:
    """One of Megatron's optimizers. ``label``: dense or expert parameters, as its gradient scaler serves."""

    label: str
    kind: str  # class name
    wrapper: Any
    inner: Any
    shards: tuple[Shard, ...]

    @property
    def distributed(self) -> bool:
        return self.kind == "DistributedOptimizer"


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    chunks: tuple[Chunk, ...]
    params: tuple[Param, ...]
    leaves: tuple[Leaf, ...]
    unknown: tuple[str, ...] = field(default=())

    def by_id(self) -> dict[int, Param]:
        return {id(p.tensor): p for p in self.params}


def require_megatron() -> tuple[Any, Any, Any]:
    """Classes (GPTModel, DistributedDataParallel, Float16Module). FrameworkMissing where they are not there."""
    try:
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.module import Float16Module
    except ImportError as error:
        raise FrameworkMissing(
            f"megatron-core cannot be imported ({error}); install megatron-core 0.16 or newer into this environment"
        ) from error
    return GPTModel, DistributedDataParallel, Float16Module


def layout_of(chunks: Sequence[Any], optimizer: Any, naming: MegatronNaming) -> MegatronLayout:
    """BindError where modules or optimizers are of a kind that is not known; ``unknown`` lists what can be listed."""
    found = tuple(_chunk(number, outer) for number, outer in enumerate(chunks))
    params = tuple(param for chunk in found for param in _params(chunk))
    by_id = {id(p.tensor): p for p in params}
    unknown: list[str] = []
    leaves = tuple(_leaf(wrapper, by_id, unknown) for wrapper in wrappers_of(optimizer))
    return MegatronLayout(found, params, tuple(leaf for leaf in leaves if leaf is not None), tuple(unknown))


def wrappers_of(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain, chains inside chains included, without the stubs of ranks that train nothing."""
    if optimizer is None:
        return
    if type(optimizer).__name__ == "ChainedOptimizer":
        for each in optimizer.chained_optimizers:
            yield from wrappers_of(each)
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


# -- modules ----------------------------------------------------------------------------------------------------------


def _chunk(number: int, outer: Any) -> Chunk:
    gpt, ddp_class, half = require_megatron()
    ddp, model = None, outer
    while not isinstance(model, gpt):
        if isinstance(model, ddp_class):
            ddp, model = model, model.module
        elif isinstance(model, half):
            model = model.module
        else:
            raise BindError(
                f"model chunk {number} is a {type(model).__module__}.{type(model).__name__}; known are GPTModel, plain "
                "or in Megatron's Float16Module and DistributedDataParallel"
            )
    return Chunk(number, outer, ddp, model, where_of(number, model))


def where_of(number: int, model: Any) -> Where:
    """Coordinates from the module's own groups, layer and expert numbers: nothing is counted here."""
    groups = getattr(model, "pg_collection", None)
    tp, tp_rank = _group(groups, "tp", "tensor_model_parallel")
    etp, etp_rank = _group(groups, "expt_tp", "expert_tensor_parallel")
    layers = tuple(int(layer.layer_number) - 1 for layer in model.decoder.layers)
    if len(set(layers)) != len(layers):
        raise BindError(f"model chunk {number} holds layers {layers}: one of them twice")
    experts: dict[tuple[int, ...], int] = {}
    for layer, module in zip(layers, model.decoder.layers, strict=True):
        indices = getattr(module.mlp, "local_expert_indices", None)
        if indices is not None:
            experts.setdefault(tuple(int(i) for i in indices), layer)
    if len(experts) > 1:
        raise BindError(f"model chunk {number}: layers hold different experts: {experts}")
    return Where(tp=tp, tp_rank=tp_rank, etp=etp, etp_rank=etp_rank, layers=layers, experts=next(iter(experts), None))


def _group(groups: Any, attribute: str, name: str) -> tuple[int, int]:
    """(size, this process's rank) of a group: the module's, or the process's own where a module knows none."""
    group = getattr(groups, attribute, None) if groups is not None else None
    if group is not None:
        return int(group.size()), int(group.rank())
    from megatron.core import parallel_state

    size = getattr(parallel_state, f"get_{name}_world_size", None)
    rank = getattr(parallel_state, f"get_{name}_rank", None)
    if size is None or rank is None:  # a version without such groups
        return 1, 0
    return int(size() or 1), int(rank() or 0)


def _params(chunk: Chunk) -> Iterator[Param]:
    for name, tensor in chunk.outer.named_parameters():
        yield Param(_unique(chunk, name), unwrapped(name), tensor, chunk)
    for name, tensor in chunk.outer.named_buffers():
        if name.endswith("router.expert_bias"):
            yield Param(_unique(chunk, name), unwrapped(name), tensor, chunk, buffer=True)


def _unique(chunk: Chunk, name: str) -> str:
    return f"chunk{chunk.number}.{unwrapped(name)}"


# -- optimizers -------------------------------------------------------------------------------------------------------


def _leaf(wrapper: Any, by_id: dict[int, Param], unknown: list[str]) -> Leaf | None:
    kind = type(wrapper).__name__
    readers = {
        "FP32Optimizer": _fp32,
        "Float16OptimizerWithFloat16Params": _float16,
        "DistributedOptimizer": _distributed,
    }
    reader = readers.get(kind)
    if reader is None:
        known = ", ".join((*readers, "ChainedOptimizer"))
        unknown.append(f"optimizer {type(wrapper).__module__}.{kind} is not known (known are {known})")
        return None
    hybrid = wrapper.optimizer if megatron_hybrid.is_hybrid(wrapper.optimizer) else None
    if hybrid is None and getattr(wrapper.config, "use_precision_aware_optimizer", False):
        unknown.append(f"{kind}: use_precision_aware_optimizer keeps masters inside the optimizer; switch it off")
        return None
    if getattr(getattr(wrapper, "ddp_config", None), "use_megatron_fsdp", False):
        unknown.append(f"{kind}: use_megatron_fsdp shards parameters in a way that is not described; switch it off")
        return None
    fault = megatron_hybrid.exchanged(hybrid) if hybrid is not None else None
    if fault is not None:
        unknown.append(f"{kind}: {fault}")
        return None
    shards = []
    for param, tensor, start, stop, is_weight in reader(wrapper):
        known_param = by_id.get(id(param))
        if known_param is None:
            unknown.append(f"{kind} trains a parameter {list(param.shape)} that is in none of the model chunks")
            continue
        if is_weight and tensor.data_ptr() != known_param.tensor.data_ptr() + start * tensor.element_size():
            unknown.append(f"{kind}: its shard of {known_param.name} is no longer part of the parameter's memory")
            continue
        master, host = None if is_weight else tensor, False
        if hybrid is not None:
            own = megatron_hybrid.master_of(hybrid, tensor)
            master, host = master if own is None else own, megatron_hybrid.in_host(hybrid, tensor)
        shards.append(Shard(known_param, tensor, start, stop, is_weight, master, host))
    expert = any(group.get("is_expert_parallel") for group in wrapper.optimizer.param_groups)
    return Leaf("expert" if expert else "dense", kind, wrapper, wrapper.optimizer, tuple(shards))


_Found = Iterator[tuple[torch.Tensor, torch.Tensor, int, int, bool]]


def _fp32(wrapper: Any) -> _Found:
    for group in wrapper.optimizer.param_groups:
        for param in group["params"]:
            yield param, param, 0, param.numel(), True


def _float16(wrapper: Any) -> _Found:
    for params, masters in zip(wrapper.float16_groups, wrapper.fp32_from_float16_groups, strict=True):
        for param, master in zip(params, masters, strict=True):
            yield param, master, 0, param.numel(), False
    for params in wrapper.fp32_from_fp32_groups:
        for param in params:
            yield param, param, 0, param.numel(), True


def _distributed(wrapper: Any) -> _Found:
    """Only what lies in this rank's part of each bucket: maybe nothing, maybe padding only."""
    half = (wrapper.model_float16_groups, wrapper.shard_fp32_from_float16_groups, False)
    if getattr(wrapper.config, "use_precision_aware_optimizer", False):  # the inner optimizer has the masters
        half = (wrapper.model_float16_groups, wrapper.shard_float16_groups, True)
    pairs = (half, (wrapper.model_fp32_groups, wrapper.shard_fp32_groups, True))
    for models, shards, is_weight in pairs:
        for params, tensors in zip(models, shards, strict=True):
            for param, tensor in zip(params, tensors, strict=True):
                gbuf, dtype, bucket = wrapper.model_param_gbuf_map[param]
                held = wrapper.gbuf_ranges[gbuf][dtype][bucket]["param_map"][param]["param"]
                yield param, tensor, held.start, held.end, is_weight


# -- inner optimizers -------------------------------------------------------------------------------------------------


def counts_per_parameter(inner: Any) -> bool:
    """torch's own optimizers keep ``step`` with each parameter; the fused ones of Apex and Transformer Engine with the
    group."""
    return type(inner).__module__.startswith("torch.optim")


def make_state(leaf: Leaf) -> None:
    """State of shards that have none yet, as the first step would make it. BindError where that is not known."""
    if megatron_hybrid.is_hybrid(leaf.inner):
        megatron_hybrid.make_state(leaf.inner)
        return
    missing = [shard for shard in leaf.shards if not _elementwise(leaf.inner.state.get(shard.tensor))]
    if not missing:
        return
    group = leaf.inner.param_groups[0]
    if group.get("momentum") == 0 and "betas" not in group:
        return  # plain SGD has no state
    init = getattr(leaf.wrapper, "init_state_fn", None)
    if init is not None:
        init(leaf.inner, leaf.wrapper.config)
    for shard in missing:
        if not _elementwise(leaf.inner.state.get(shard.tensor)):
            raise BindError(
                f"{type(leaf.inner).__name__} has no state of {shard.param.name} yet, and how it begins is not known; "
                "take one step first"
            )
    if counts_per_parameter(leaf.inner):
        for shard in missing:
            leaf.inner.state[shard.tensor].setdefault("step", torch.zeros((), dtype=torch.float32))


def _elementwise(state: Any) -> bool:
    return bool(state) and any(name in state for name in ELEMENTWISE)
