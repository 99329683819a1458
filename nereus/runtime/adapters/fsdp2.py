"""FSDP2 (``fully_shard``) and DTensor parameters: FSDP, HSDP, tensor parallelism, and both on one mesh.

A parameter's local tensor is a view of padded memory: the padding, which all ranks need for an all-gather of equal
parts, is in no fragment. With a MixedPrecisionPolicy the sharded parameters (fp32) are the only masters, and what
forward and backward see is cast from them: slot ``weight`` is fp32, and there is no slot ``master``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nereus.ir.fragment import Segment
from nereus.runtime.adapters.base import BindError, FrameworkMissing, PostCondition
from nereus.runtime.adapters.dtensor_box import AxisCut, held_intervals, local_extent, local_segments
from nereus.runtime.adapters.torch_plain import Local, PlainTorch, num_cols


class Fsdp2(PlainTorch):
    """``Adapter`` of a module whose parameters are DTensors, by ``fully_shard`` or by tensor parallelism, some or all;
    arguments as ``PlainTorch``. Fills. Every rank of the module's meshes binds; the others hold nothing.

    ``naming`` sees whole shapes (a DTensor's own). ``where`` is for tensor parallelism outside of DTensor.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any) -> None:
        _probe()
        super().__init__(module, optimizer, **more)

    def _settle(self) -> None:
        # After a forward without backward, and in the root module, parameters are the gathered ones.
        for _, module in _sharded_modules(self.module):
            module.reshard()

    def _local(self, name: str, tensor: torch.Tensor, segments: tuple[Segment, ...]) -> Local:
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return super()._local(name, tensor, segments)
        local = tensor._local_tensor.detach()
        if type(local) is not torch.Tensor:
            raise BindError(f"{name}: its shard is a {type(local).__name__}, which is not described")
        held = _held(name, tensor)
        extents = tuple(local_extent(intervals) for intervals in held)
        # A rank with no row of it keeps a local tensor of no elements, of whatever shape.
        if (tuple(local.shape) or (1,)) != extents and (local.numel() or 0 not in extents):
            raise BindError(
                f"{name}: the local tensor is {list(local.shape)}, and its placements {tensor.placements} of "
                f"{list(tensor.shape)} make it {list(extents)}"
            )
        return Local(
            data=local,
            segments=local_segments(segments, tuple(tensor.shape) or (1,), held),
            num_cols=num_cols(extents),
            host=local.device.type == "cpu" and tensor.device_mesh.device_type != "cpu",
        )

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for _, parameter in _sharded_parameters(self.module):
            parameter.unsharded_accumulated_grad = None

    def _invalidate(self) -> None:
        # Gathered copies are of the old values. Nothing else is kept: the next all-gather reads the shards.
        for _, module in _sharded_modules(self.module):
            module.reshard()

    def _conditions(self) -> tuple[PostCondition, ...]:
        return (
            PostCondition(name="sharded", check=lambda: _first(self._gathered_faults())),
            PostCondition(name="all-gather reads the shards", check=lambda: _first(self._alias_faults())),
            PostCondition(name="FSDP hooks", check=lambda: _first(self._hook_faults())),
            PostCondition(name="FSDP gradient exchange", check=lambda: _first(self._exchange_faults())),
        )

    def _gathered_faults(self) -> Iterator[str]:
        for path, module in _sharded_modules(self.module):
            for group in _groups(module):
                if not group.is_sharded:
                    yield f"{path}: parameters are gathered copies of old values"
                if group._all_gather_result is not None:
                    yield f"{path}: an all-gather of old values is under way"
        for name, parameter in _sharded_parameters(self.module):
            if parameter.unsharded_accumulated_grad is not None:
                yield f"{name}: an unsharded gradient of before the change"

    def _alias_faults(self) -> Iterator[str]:
        for name, parameter in _sharded_parameters(self.module):
            owner = parameter._module_info.module
            if owner._parameters.get(parameter._module_info.param_name) is not parameter.sharded_param:
                yield f"{name}: the module's parameter is not the one that FSDP gathers"
            local = parameter.sharded_param._local_tensor
            if local.numel() and local.data_ptr() != parameter._sharded_param_data.data_ptr():
                yield f"{name}: FSDP gathers other memory than the parameter's"

    def _hook_faults(self) -> Iterator[str]:
        for path, module in _sharded_modules(self.module):
            state = module._get_fsdp_state()
            for handle, kind in (("_pre_forward_hook_handle", "pre-forward"), ("_post_forward_hook_handle", "forward")):
                found = getattr(state, handle, None)
                if found is None or _dead(found):
                    yield f"{path}: the {kind} hook of fully_shard is gone"

    def _exchange_faults(self) -> Iterator[str]:
        for path, module in _sharded_modules(self.module):
            for group in _groups(module):
                if not group.reduce_grads or not getattr(group, "all_reduce_grads", True):
                    yield f"{path}: gradients are not exchanged (set_requires_gradient_sync was left off)"


def _probe() -> None:
    """Raises FrameworkMissing where torch lacks what is read here."""
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: F401
    except ImportError as error:
        raise FrameworkMissing(
            f"FSDP2 needs torch.distributed.fsdp.fully_shard and torch.distributed.tensor, which torch "
            f"{torch.__version__} lacks ({error}); install torch 2.6 or newer"
        ) from None
    if not hasattr(FSDPModule, "_get_fsdp_state"):
        raise FrameworkMissing(f"torch {torch.__version__}: FSDPModule keeps its state elsewhere than is known here")


def _held(name: str, tensor: Any) -> tuple[tuple[tuple[int, int], ...], ...]:
    """What this rank holds of each dim of a DTensor. BindError for a placement that is no cut and no copy."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tuple(() for _ in tensor.shape) or ((),)
    cuts: list[list[AxisCut]] = [[] for _ in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        strided = type(placement).__name__ == "_StridedShard"  # a Shard in some versions of torch, not in others
        if not (strided or type(placement) is Shard):
            raise BindError(f"{name}: placement {placement} is neither a shard nor a copy")
        if mesh.get_group(axis).rank() != coordinate[axis]:
            raise BindError(
                f"{name}: axis {axis} of mesh {mesh.mesh.tolist()} lists its ranks out of order: fully_shard cuts by "
                "the order of the process group, DTensor by that of the mesh, so torch itself reads the shards wrong; "
                "build the mesh from ascending ranks"
            )
        factor = int(placement.split_factor) if strided else 1
        dim = placement.dim % len(tensor.shape)
        cuts[dim].append(AxisCut(size=mesh.size(axis), rank=coordinate[axis], factor=factor))
    try:
        held = tuple(held_intervals(extent, cut) for extent, cut in zip(tensor.shape, cuts, strict=True))
    except ValueError as error:
        raise BindError(f"{name}: placements {tensor.placements} on mesh {tuple(mesh.shape)}: {error}") from None
    return held or (((0, 1),),)


def _sharded_modules(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, module) of every module that ``fully_shard`` was called on."""
    from torch.distributed.fsdp import FSDPModule

    for path, part in module.named_modules():
        if isinstance(part, FSDPModule):
            yield path or "the root", part


def _groups(module: Any) -> list[Any]:
    """FSDP's own parameter groups; torch 2.13 has a list of them where there was one."""
    state = module._get_fsdp_state()
    many = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (many if many is not None else [state._fsdp_param_group]) if group is not None]


def _sharded_parameters(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, FSDP's record) of every sharded parameter."""
    for path, part in _sharded_modules(module):
        for group in _groups(part):
            for parameter in group.fsdp_params:
                yield f"{path}: {parameter._param_fqn or parameter._module_info.param_name}", parameter


def _dead(handle: Any) -> bool:
    """Whether a hook handle's hook was removed. Handles of module groups know no hooks themselves."""
    reference = getattr(handle, "hooks_dict_ref", None)
    if reference is None:
        return False
    registered = reference()
    return registered is None or handle.id not in registered


def _first(faults: Iterator[str]) -> str | None:
    return "; ".join([fault for fault, _ in zip(faults, range(3), strict=False)]) or None
