"""Through a vLLM engine's own loading: local shards in the loader's layout become what its kernels run on.

vLLM's layer-wise reload restores a layer's loader-side parameters, loads into them, lets the layer's method process
them again, and copies the result into the memory that was there before, so that captured graphs stay valid. It expects
whole checkpoint tensors; here each parameter's loader is exchanged for a plain copy of the local shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nereus.runtime.adapters.base import BindError
from nereus.runtime.adapters.vllm_layout import recorded_shapes


def reload_module(name: str, module: torch.nn.Module, shards: Mapping[str, torch.Tensor], model_config: Any) -> None:
    """Give ``module`` the local ``shards`` (by leaf name, in the loader's layout) of all its recorded parameters.

    Raises BindError, before the module is touched, where a recorded parameter has no shard.
    """
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    recorded = recorded_shapes(module)
    missing = sorted(set(recorded) - set(shards))
    if missing:
        raise BindError(f"{name}: {', '.join(missing)} would be loaded without values; move all parameters of a layer")
    # vLLM registers the recorded tensors themselves, so what is changed on them is put back.
    saved = {leaf: dict(tensor.__dict__) for leaf, tensor in recorded.items()}
    _forget_kernel(module)
    try:
        with torch.no_grad():
            layerwise.initialize_layerwise_reload(module)
            for leaf in recorded:
                setattr(getattr(module, leaf), "weight_loader", default_weight_loader)  # noqa: B010
            layerwise.initialize_online_processing(module)
            for leaf in recorded:
                parameter = getattr(module, leaf)
                parameter.weight_loader(parameter, shards[leaf])
            layerwise.finalize_layerwise_processing(module, model_config)
    finally:
        for leaf, attributes in saved.items():
            recorded[leaf].__dict__.clear()
            recorded[leaf].__dict__.update(attributes)
    for leaf, shard in shards.items():
        if leaf not in recorded:  # biases are never taken apart; a kernel may keep them in another dtype
            getattr(module, leaf).data.copy_(shard)


def _forget_kernel(module: torch.nn.Module) -> None:
    """Expert kernels that pack weights themselves do it when they are built, and only then: without this, a second
    load would leave loader-side weights under a kernel that expects packed ones."""
    method = getattr(module, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if experts is None:
        return
    from vllm.model_executor.layers.fused_moe import modular_kernel

    own = type(experts).process_weights_after_loading
    if own is not modular_kernel.FusedMoEExperts.process_weights_after_loading:
        method.moe_kernel = None  # type: ignore[union-attr]


def refresh_copies(module: torch.nn.Module) -> None:
    """Make a CPU kernel's packed copy of a written weight again."""
    module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]


def refresh_attention(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """What attention layers derive from weights (absorbed projections of latent attention), into the same memory."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    with torch.no_grad():
        for module in model.modules():
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(dtype)  # type: ignore[operator]
