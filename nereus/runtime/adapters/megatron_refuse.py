"""Everything reachable from Megatron's modules and optimizers is state, derived, a cache, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nereus.models.naming.megatron import MegatronNaming, unwrapped
from nereus.runtime.adapters import megatron_hybrid
from nereus.runtime.adapters.megatron_layout import ELEMENTWISE, Chunk, Leaf, MegatronLayout

#: Buffers and tensors that layers compute from the configuration.
DERIVED = frozenset({"inv_freq", "cos_cached", "sin_cached", "_mscale", "softmax_offset_cache"})
#: Counted between two optimizer steps, and cleared by the step.
COUNTERS = frozenset({"local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"})
#: Activations of the last step that modules keep: what a pipeline stage received.
ACTIVATIONS = frozenset({"input_tensor", "encoder_hidden_state"})

#: Attributes of the optimizers' classes that hold tensors or objects with tensors, all classed: parameters and their
#: shards (state), buffers (the modules' and gradients), maps of them, scratch.
_OPTIMIZER = frozenset(
    (
        "optimizer",
        "config",
        "model_chunks",
        "buffers",
        "per_model_buffers",
        "per_model_bucket_groups",
        "gbuf_ranges",
        "model_param_gbuf_map",
        "model_param_group_index_map",
        "opt_group_ranges",
        "model_float16_groups",
        "model_fp32_groups",
        "shard_float16_groups",
        "shard_fp32_groups",
        "shard_fp32_from_float16_groups",
        "float16_groups",
        "fp32_from_float16_groups",
        "fp32_from_fp32_groups",
        "grad_scaler",
        "found_inf",
        "_dummy_overflow_buf",
        "_scale_one",
        "_scale",
        "init_state_fn",
        "ddp_config",
        "data_parallel_group",
        "data_parallel_group_gloo",
        "grad_stats_parallel_group",
        "tp_group",
        "expert_tp_group",
        "chained_optimizers",
    )
)
_INNER = frozenset({"state", "param_groups", "defaults", "_dummy_overflow_buf"})
_DDP = frozenset(
    (
        "module",
        "config",
        "ddp_config",
        "buffers",
        "expert_parallel_buffers",
        "bucket_groups",
        "expert_parallel_bucket_groups",
        "param_to_bucket_group",
        "params_with_grad",
        "full_param_layout",
        "grad_accs",
        "remove_forward_pre_hook_handles",
    )
)


@dataclass(slots=True)
class Classes:
    """``refused``: texts; ``derived`` and ``caches``: names."""

    refused: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)


def classify(layout: MegatronLayout, optimizer: Any, naming: MegatronNaming) -> Classes:
    found = Classes(refused=list(layout.unknown))
    trained = {id(shard.param.tensor) for leaf in layout.leaves for shard in leaf.shards}
    for chunk in layout.chunks:
        found.refused += _configuration(chunk, naming)
        _modules(chunk, found)
    for param in layout.params:
        if type(param.tensor.data) is not torch.Tensor:
            found.refused.append(f"{param.name} is a {type(param.tensor.data).__name__}, not plain memory")
        if id(param.tensor) in trained and not param.tensor.requires_grad:
            found.refused.append(f"{param.name} is frozen, but the optimizer trains it")
    for leaf in layout.leaves:
        _optimizer(leaf, found)
    if optimizer is not None and type(optimizer).__name__ == "ChainedOptimizer":
        found.refused += _others(optimizer, _OPTIMIZER, "ChainedOptimizer")
    for chunk in layout.chunks:
        if chunk.ddp is not None:
            found.derived += [f"chunk{chunk.number}: gradient buffers"]
    return found


def _configuration(chunk: Chunk, naming: MegatronNaming) -> Iterator[str]:
    """Facts that shapes do not show."""
    arch, config, text = naming.arch, chunk.model.config, f"model chunk {chunk.number}"
    pairs: list[tuple[str, Any, Any]] = [("num_layers", config.num_layers, arch.num_layers)]
    if arch.mla is None:
        kv_heads = config.num_query_groups or config.num_attention_heads
        pairs += [("num_query_groups", kv_heads, arch.num_kv_heads), ("kv_channels", config.kv_channels, arch.head_dim)]
    pairs.append(("num_attention_heads", config.num_attention_heads, arch.num_heads))
    pairs.append(("num_moe_experts", config.num_moe_experts or 0, arch.moe.num_experts if arch.moe else 0))
    if naming.head == "lm":
        tied = bool(chunk.model.share_embeddings_and_output_weights)
        pairs.append(("share_embeddings_and_output_weights", tied, arch.tied_embeddings))
    for name, real, declared in pairs:
        if real != declared:
            yield f"{text}: {name} is {real}, but {declared} by the architecture"
    # Options that put other numbers, or the same in another order, into weights of the same shape.
    if getattr(config, "rotary_interleaved", False) and arch.mla is None:
        yield f"{text}: rotary_interleaved orders the rows of q and k in another way; not described"
    if getattr(config, "layernorm_zero_centered_gamma", False):
        yield f"{text}: layernorm_zero_centered_gamma stores the norms' weights less one; not described"
    for name in ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"):
        if getattr(config, name, None) is not None:
            yield f"{text}: {name} mixes gate and up rows; not described"


def _modules(chunk: Chunk, found: Classes) -> None:
    text = f"chunk{chunk.number}."
    for name, _ in chunk.outer.named_buffers():
        last = name.rsplit(".", 1)[-1]
        if last in DERIVED:
            found.derived.append(text + unwrapped(name))
        elif last in COUNTERS:
            found.caches.append(text + unwrapped(name))
        elif not name.endswith("router.expert_bias"):
            found.refused.append(f"buffer {text}{unwrapped(name)} is not known: state, derived or cache?")
    if chunk.ddp is not None:
        found.refused += _others(chunk.ddp, _DDP | _TORCH, f"{text}DistributedDataParallel")
    parameters = {id(p) for p in chunk.outer.parameters()}
    for name, module in chunk.model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            value = module.get_extra_state()
            if _empty(value):
                found.derived.append(f"{text}{name}._extra_state (empty)")
            else:
                found.refused.append(
                    f"{text}{name}._extra_state holds Transformer Engine's FP8 scales and history, which are not "
                    "described; train without fp8, or leave them out by recalibrating in the new layout"
                )
        for attribute, value in vars(module).items():
            if attribute in _TORCH:
                continue
            if attribute in DERIVED | ACTIVATIONS:
                listed = found.derived if attribute in DERIVED else found.caches
                listed += [f"{text}{name}.{attribute}"] if value is not None else []
                continue
            for path, tensor in _tensors(value):
                if id(tensor) not in parameters:
                    found.refused.append(
                        f"tensor {text}{name}{'.' if name else ''}{attribute}{path} is not known: state, derived or "
                        "cache?"
                    )
                    break


def _optimizer(leaf: Leaf, found: Classes) -> None:
    found.refused += _others(leaf.wrapper, _OPTIMIZER, leaf.kind)
    hybrid = megatron_hybrid.is_hybrid(leaf.inner)
    if hybrid:
        found.refused += _others(leaf.inner, _INNER | megatron_hybrid.KNOWN, type(leaf.inner).__name__)
        for own in leaf.inner.sub_optimizers:
            found.refused += _others(own, _INNER, f"{type(leaf.inner).__name__}: {type(own).__name__}")
        if (fault := megatron_hybrid.stale(leaf.inner)) is not None:
            found.refused.append(f"{leaf.kind}: {fault}")
        if leaf.inner.cpu_copy_map_grad:
            found.caches.append(f"{leaf.kind}: gradients on the host")
    else:
        found.refused += _others(leaf.inner, _INNER, type(leaf.inner).__name__)
    known = {id(shard.tensor): shard for shard in leaf.shards}
    listed: set[int] = set()
    for group in leaf.inner.param_groups:
        listed |= {id(tensor) for tensor in group["params"]}
    for shard in leaf.shards:
        if id(shard.tensor) not in listed:
            found.refused.append(f"{leaf.kind}: its shard of {shard.param.name} is in no parameter group")
    if listed - set(known):
        found.refused.append(f"{leaf.kind}: {len(listed - set(known))} tensors in its parameter groups are not known")
    for tensor, state in leaf.inner.state.items():
        owner = known.get(id(tensor))
        if owner is None:
            found.refused.append(f"{leaf.kind} keeps state of a tensor {list(tensor.shape)} that it does not train")
            continue
        for name, value in state.items():
            if name == "step" or value is None or (hybrid and name == megatron_hybrid.MASTER):
                continue
            sized = isinstance(value, torch.Tensor) and value.numel() == tensor.numel()
            if name not in ELEMENTWISE or not sized:
                found.refused.append(
                    f"state '{name}' of {owner.param.name} in {type(leaf.inner).__name__} is not known"
                )


#: What torch itself keeps in a module.
_TORCH = frozenset(vars(torch.nn.Module())) | {"_is_full_backward_hook", "_compiled_call_impl"}


def _others(owner: Any, known: frozenset[str], text: str) -> list[str]:
    """Attributes with tensors that the class does not have by itself."""
    found = []
    for name, value in vars(owner).items():
        if name not in known and any(True for _ in _tensors(value)):
            found.append(f"{text}.{name} holds tensors and is not known: state, derived or cache?")
    return found


def _tensors(value: Any, depth: int = 3, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in containers, in modules that are not registered, and in objects of the user's own classes. Megatron's
    own helpers (dispatchers, groups, configurations) hold activations of the last step at most."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth == 0 or value is None or isinstance(value, str | bytes | int | float | type):
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, depth - 1, f"{path}[{key!r}]")
            yield from _tensors(key, 1) if isinstance(key, torch.Tensor) else ()
    elif isinstance(value, list | tuple | set):
        for number, item in enumerate(value):
            yield from _tensors(item, depth - 1, f"{path}[{number}]")
    elif isinstance(value, torch.nn.Module):
        for name, tensor in value.named_parameters():
            yield f"{path}.{name}", tensor
    elif not type(value).__module__.startswith(("torch", "megatron", "transformer_engine", "builtins")):
        for name, item in getattr(value, "__dict__", {}).items():
            yield from _tensors(item, depth - 1, f"{path}.{name}")


def _empty(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    size = getattr(value, "getbuffer", None)
    return size is not None and size().nbytes == 0
