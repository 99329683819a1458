"""What a vLLM worker's model holds: every tensor reachable from it, and whether its memory has the loader's layout.

vLLM has three layouts of a weight: the checkpoint's, the loader's (the local shard that ``VllmNaming`` knows), and the
one that its kernels run on after ``process_weights_after_loading``: packed, shuffled, with swapped halves, or an empty
tensor beside a handle. The kernel's may have the loader's very shape. So memory counts as the loader's only where the
method in charge is known to leave it alone; everything else has to go through the engine's own loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nereus.models.naming.base import Where
from nereus.runtime.adapters.base import BindError, FrameworkMissing

#: The versions that the tests run against, for messages.
TESTED = "0.32.0"

#: Parameters that ``process_weights_after_loading`` of attention layers makes from kv_b_proj.
DERIVED_PARAMETERS = frozenset({"W_UV", "W_UK_T", "W_UK_T_dcp_qrep", "W_K", "W_K_scale", "W_V", "W_V_scale"})
#: Buffers and bare tensors that follow from the configuration (rotary tables, expert maps, scales of the cache).
DERIVED_BUFFERS = frozenset(
    {
        "cos_sin_cache",
        "_expert_map",
        "expert_mask",
        "expert_global_to_physical",
        "expert_physical_to_global",
        "expert_local_to_global",
        "_k_scale",
        "_v_scale",
        "_q_scale",
        "_prob_scale",
        "_k_scale_cpu",
        "_v_scale_cpu",
        "_q_scale_cpu",
    }
)
#: Attributes of attention layers that hold generated keys and values, not weights.
CACHES = frozenset({"kv_cache"})
#: Expert kernels that run on the loader's layout.
PLAIN_EXPERTS = frozenset({"TRITON", "BATCHED_TRITON"})


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter: the module's ``leaf``. ``shape`` and ``dtype`` are the loader's; ``packed`` says why the live
    memory is not the loader's layout, None where it is."""

    name: str
    module: torch.nn.Module
    leaf: str
    live: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: str | None


@dataclass(slots=True)
class Reached:
    """All that a walk over the model's modules found."""

    held: list[Held] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    #: Modules whose kernels keep a copy beside the weight: made again after the weight was written.
    copied: list[tuple[str, torch.nn.Module]] = field(default_factory=list)


def require_vllm() -> Any:
    """The module, or FrameworkMissing."""
    try:
        import vllm
        from vllm.model_executor.model_loader.reload import layerwise
    except ImportError as error:
        raise FrameworkMissing(
            f"vLLM with layer-wise weight reloading is needed ({error}); install vllm (tested: {TESTED})"
        ) from error
    for name in ("get_layerwise_info", "initialize_layerwise_reload", "initialize_online_processing"):
        if not hasattr(layerwise, name):
            raise FrameworkMissing(f"vllm {vllm.__version__} has no reload.layerwise.{name}; tested with {TESTED}")
    return vllm


def walk(model: torch.nn.Module) -> Reached:
    """Every parameter, buffer and bare tensor of the model's modules, classed."""
    found = Reached()
    seen: set[int] = set()
    storages: set[int] = set()
    modules = list(model.named_modules())
    for prefix, module in modules:
        dot = f"{prefix}." if prefix else ""
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in seen:  # a tied head is the embedding
                seen.add(id(parameter))
                storages.add(parameter.data_ptr())
                if leaf in DERIVED_PARAMETERS:
                    found.derived.append(dot + leaf)
                else:
                    found.held.append(_held(dot + leaf, module, leaf, parameter))
            if leaf == "weight" and _kernel_copies(module) and parameter.numel():
                found.copied.append((prefix, module))
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                known = leaf in DERIVED_BUFFERS and not _calibrated(module, leaf, buffer)
                (found.derived if known else found.unknown).append(dot + leaf)
    for prefix, module in modules:
        for leaf, tensor in _bare_tensors(module):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if leaf in CACHES:
                found.caches.append(name)
            elif leaf in DERIVED_BUFFERS:
                found.derived.append(name)
            elif tensor.numel() and tensor.data_ptr() not in storages:
                found.unknown.append(name)
    return found


def _calibrated(module: torch.nn.Module, leaf: str, scale: torch.Tensor) -> bool:
    """Whether a cache scale came with a checkpoint: it would be wrong for other weights."""
    return (
        leaf.endswith("_scale")
        and not getattr(module, "calculate_kv_scales", False)
        and bool((scale.float() != 1.0).any())
    )


def _bare_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for leaf, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            yield leaf, value
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, torch.Tensor):
                    yield leaf, item


def _held(name: str, module: torch.nn.Module, leaf: str, live: torch.Tensor) -> Held:
    shape, dtype = tuple(live.shape), live.dtype
    recorded = recorded_shapes(module).get(leaf)
    if recorded is not None:
        shape, dtype = tuple(recorded.shape), recorded.dtype
    held = Held(name, module, leaf, live, shape, dtype, None)
    if recorded is not None and (tuple(live.shape) != shape or live.dtype != dtype):
        return replace(
            held, packed=f"the engine replaced {shape} {dtype} by {tuple(live.shape)} {live.dtype} after loading"
        )
    wanted = getattr(module, "params_dtype", None)
    if leaf == "bias" and isinstance(wanted, torch.dtype) and live.dtype != wanted:
        return replace(held, dtype=wanted, packed=f"the engine keeps it in {live.dtype} instead of {wanted}")
    return replace(held, packed=_packed_by_method(module, leaf))


def recorded_shapes(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """The parameters as vLLM's loader made them (meta tensors that vLLM recorded before its kernels changed them)."""
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.LAYERWISE_INFO.get(module)
    return {} if info is None else info.restore_metadata[0]


def _packed_by_method(module: torch.nn.Module, leaf: str) -> str | None:
    method = getattr(module, "quant_method", None)
    name = type(method).__name__
    if method is None or name in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
        return None
    if name == "UnquantizedFusedMoEMethod":
        if leaf not in ("w13_weight", "w2_weight"):
            return None
        backend = getattr(getattr(method, "unquantized_backend", None), "name", "?")
        kernel = getattr(method, "moe_kernel", None)
        if kernel is None or backend in PLAIN_EXPERTS:
            return None  # without a kernel nothing was rearranged yet
        return f"expert kernels of backend {backend} rearrange it in its own shape"
    return f"{name} rearranges weights for its kernels"


def _kernel_copies(module: torch.nn.Module) -> bool:
    """Whether a CPU kernel of a linear or embedding runs on a packed copy of the weight, not on the weight."""
    run = getattr(module, "cpu_linear", None)
    closure, defaults = getattr(run, "__closure__", None), getattr(run, "__defaults__", None)
    return run is not None and bool(closure or defaults)


def experts_of(module: Any) -> tuple[int, ...]:
    """Global numbers of a ``RoutedExperts`` module's experts, in its local order. BindError where they move."""
    parallel = module.moe_config.moe_parallel_config
    if parallel.enable_eplb:
        raise BindError(
            f"{module.layer_name}: expert load balancing (EPLB) renumbers experts while the engine runs; start it "
            "without enable_eplb, or pass `experts`"
        )
    expert_map = module.expert_map_manager.expert_map
    if expert_map is None:
        return tuple(range(module.expert_map_manager.global_num_experts))
    local = [(int(slot), number) for number, slot in enumerate(expert_map.tolist()) if slot >= 0]
    return tuple(number for _, number in sorted(local))


def where_of(model: torch.nn.Module, experts: Mapping[str, Sequence[int]] | None = None) -> dict[str, Where]:
    """Coordinates of this process: under ``""`` those of everything outside of experts, and one entry for each
    ``RoutedExperts`` module, by its name. ``experts``: global numbers by module name, where the caller knows better."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    layers = sorted(
        {
            int(name.split(".")[2])
            for name, _ in model.named_parameters()
            if name.startswith("model.layers.") and name.split(".")[2].isdigit()
        }
    )
    base = Where(
        tp=get_tensor_model_parallel_world_size(), tp_rank=get_tensor_model_parallel_rank(), layers=tuple(layers)
    )
    found = {"": base}
    for name, module in model.named_modules():
        if "w13_weight" in module._parameters and hasattr(module, "expert_map_manager"):
            parallel = module.moe_config.moe_parallel_config
            given = None if experts is None else experts.get(name)
            found[name] = replace(
                base,
                etp=parallel.tp_size,
                etp_rank=parallel.tp_rank,
                experts=experts_of(module) if given is None else tuple(given),
            )
    return found
