"""Megatron's HybridDeviceOptimizer (``optimizer_cpu_offload``): where it keeps the state of what it splits.

It walks the parameters of its groups in order and gives whole ones to the host until ``offload_fraction`` of the
elements are there. Each of those has a host copy that an optimizer of its own steps, and the result is copied back. So
of a parameter, or shard, ``p`` in its groups there may be

- an fp32 copy, if ``p`` is 16 bits wide: the master, on the host if ``p`` is offloaded, else on the GPU;
- a host copy in the dtype of ``p``, if that is fp32 and offloaded: no state of its own, since every step ends with
  both alike;
- moments and a step count, beside whichever of these is stepped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nereus.runtime.adapters.base import BindError

#: Attributes that hold tensors or objects with tensors: parameters, copies of them and maps between the two, the
#: optimizers of the parts, and gradients of the last step.
KNOWN = frozenset(
    (
        "gpu_params_map_cpu_copy",
        "cpu_copys_map_gpu_param",
        "param_to_fp32_param",
        "fp32_param_to_orig_param",
        "param_to_inner_param",
        "inner_param_to_orig_param",
        "cpu_param_groups",
        "gpu_param_groups",
        "cpu_optimizers",
        "gpu_optimizer",
        "cpu_copy_map_grad",
        "sub_optimizer_kwargs",
    )
)
#: Where it shows a master among the state of a parameter.
MASTER = "master_param"


def is_hybrid(optimizer: Any) -> bool:
    return type(optimizer).__name__ == "HybridDeviceOptimizer"


def in_host(hybrid: Any, param: torch.Tensor) -> bool:
    return param in hybrid.gpu_params_map_cpu_copy


def master_of(hybrid: Any, param: torch.Tensor) -> torch.Tensor | None:
    found: torch.Tensor | None = hybrid.param_to_fp32_param.get(param)
    return found


def host_copy_of(hybrid: Any, param: torch.Tensor) -> torch.Tensor | None:
    """A second copy of ``param`` in its own dtype, which is what is stepped; None where it has none."""
    copy: torch.Tensor | None = hybrid.gpu_params_map_cpu_copy.get(param)
    return None if copy is None or copy is master_of(hybrid, param) else copy


def stepped(hybrid: Any, param: torch.Tensor) -> torch.Tensor:
    """The tensor that an optimizer of its own updates for ``param``."""
    found: torch.Tensor = hybrid.param_to_inner_param.get(param, param)
    return found


def owners(hybrid: Any) -> dict[int, tuple[Any, dict[str, Any]]]:
    """By id of what is stepped: the optimizer that does, and its group."""
    return {
        id(tensor): (optimizer, group)
        for optimizer in hybrid.sub_optimizers
        for group in optimizer.param_groups
        for tensor in group["params"]
    }


def exchanged(hybrid: Any) -> str | None:
    """A fault if its groups were changed after it was built: nothing steps what is in them."""
    stepping = owners(hybrid)
    for group in hybrid.param_groups:
        for param in group["params"]:
            if param not in hybrid.param_to_inner_param or id(stepped(hybrid, param)) not in stepping:
                return (
                    f"HybridDeviceOptimizer has a parameter {list(param.shape)} in its groups that none of its "
                    "optimizers steps: it was exchanged after they were made, as Megatron does without "
                    "use_distributed_optimizer where weights are bf16"
                )
    return None


def stale(hybrid: Any) -> str | None:
    """A fault if a parameter was written past the copy that is stepped for it."""
    for group in hybrid.param_groups:
        for param in group["params"]:
            copy = host_copy_of(hybrid, param)
            if copy is not None and not torch.equal(copy, param.detach().to(copy.device)):
                return (
                    f"HybridDeviceOptimizer's host copy of a parameter {list(param.shape)} is not the parameter, which "
                    "was written after the copy was made; the next step would undo that"
                )
    return None


def make_state(hybrid: Any) -> None:
    """Zeros where there is no state yet, as the first step of an Adam would make them. BindError for others."""
    made = False
    for optimizer in hybrid.sub_optimizers:
        counts = type(optimizer).__module__.startswith("torch.optim")
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                state = optimizer.state[tensor]
                if any(isinstance(value, torch.Tensor) and value.numel() == tensor.numel() for value in state.values()):
                    continue
                if "betas" not in group:
                    if not group.get("momentum"):
                        continue  # plain SGD has no state
                    raise BindError(
                        f"HybridDeviceOptimizer over {type(optimizer).__name__} has no state yet, and how it begins is "
                        "not known; take one step first"
                    )
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
                if counts:
                    state.setdefault("step", torch.zeros((), dtype=torch.float32))
                made = True
    if made:
        hybrid._sync_sub_optimizers_state_to_hdo()


@torch.no_grad()
def copy_to_host(hybrid: Any) -> None:
    """Host copies again from the parameters."""
    for group in hybrid.param_groups:
        for param in group["params"]:
            copy = host_copy_of(hybrid, param)
            if copy is not None:
                copy.copy_(param)


def steps(hybrid: Any, group: Mapping[str, Any]) -> set[int]:
    """Updates that the parameters of one of its groups have seen. torch's optimizers count them with each parameter,
    the fused ones with the group."""
    stepping = owners(hybrid)
    found = set()
    for param in group["params"]:
        tensor = stepped(hybrid, param)
        optimizer, its_group = stepping[id(tensor)]
        state = optimizer.state.get(tensor, {})
        found.add(int(state["step"] if "step" in state else its_group.get("step", 0)))
    return found


def set_steps(hybrid: Any, group: dict[str, Any], step: int) -> None:
    # Its step copies all entries of its groups into those of its optimizers: a count there would never go on.
    group.pop("step", None)
    stepping = owners(hybrid)
    for param in group["params"]:
        tensor = stepped(hybrid, param)
        optimizer, its_group = stepping[id(tensor)]
        holder = optimizer.state[tensor] if "step" in optimizer.state.get(tensor, {}) else its_group
        old = holder.get("step")
        holder["step"] = torch.full_like(old, step) if isinstance(old, torch.Tensor) else step
