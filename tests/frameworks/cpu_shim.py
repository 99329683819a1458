"""Lets code that hard-codes the CUDA device run on a CPU build of torch. Tests only; no framework is edited.

``install()``, once per process and before megatron-core builds anything: a torch function mode turns device "cuda" and
device numbers into "cpu", and the helpers of torch.cuda that concern the host become no-ops. ``install_megatron()``
then repairs what megatron-core's optimizer and MoE layers assume of Apex and TransformerEngine.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class HostTensor(torch.Tensor):
    """A tensor in host memory, where ``apart_from_host`` was called. What is computed from it alone is one too."""


class CudaToCpu(TorchFunctionMode):
    #: Whether other tensors say that they lie on a GPU, and ``cpu()`` copies them into host memory.
    apart = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "pin_memory" and args:
            return args[0]
        if self.apart and func == torch.Tensor.is_cuda.__get__:
            return not isinstance(args[0], HostTensor)
        if self.apart and name == "cpu" and not isinstance(args[0], HostTensor):
            return args[0].detach().clone().as_subclass(HostTensor)
        if name == "type" and len(args) == 1 and not kwargs:  # optimizers compare with "torch.cuda.FloatTensor"
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory") is True:
            kwargs["pin_memory"] = False
        if name == "to" and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Generators:
    """``torch.cuda.default_generators`` of one device: the CPU's."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


#: The mode that ``install`` entered: at most one.
_installed: list[CudaToCpu] = []


def install() -> None:
    """Does nothing the second time, or where there is a GPU."""
    if _installed or torch.cuda.is_available():
        return
    stream = _Stream()

    def constant(value: Any) -> Callable[..., Any]:
        # A function of its own for every name: dynamo refuses to know one function under two.
        return lambda *args, **kwargs: value

    def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed() -> Callable[[int], None]:
        return lambda number: (torch.default_generator.manual_seed(int(number)), None)[1]

    def now() -> Callable[..., Any]:
        return lambda call=None, **kwargs: call() if call else None

    replaced: dict[str, Any] = {
        "current_device": constant(_CPU),
        "device_count": constant(1),
        "current_stream": constant(stream),
        "default_stream": constant(stream),
        "stream": lambda stream=None: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "get_device_capability": constant((9, 0)),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": seed(),
        "manual_seed_all": seed(),
        "_lazy_init": now(),
        "_lazy_call": now(),
        "default_generators": _Generators(),
        "is_current_stream_capturing": constant(False),
    }
    for name in ("set_device", "synchronize", "empty_cache"):
        replaced[name] = constant(None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        replaced[name] = constant(0)
    for kind in ("Float", "Int", "Long", "Half", "BFloat16", "Double", "Byte"):
        if hasattr(torch, f"{kind}Tensor"):
            replaced[f"{kind}Tensor"] = getattr(torch, f"{kind}Tensor")
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    # Imported before, it took these two under names of its own.
    streams: Any = sys.modules.get("megatron.core.tensor_parallel.random")
    if streams is not None:
        streams._lazy_call, streams._lazy_init = torch.cuda._lazy_call, torch.cuda._lazy_init
    cuda: Any = torch.cuda
    cuda.random.get_rng_state, cuda.random.set_rng_state = get_rng_state, set_rng_state
    cuda.nvtx.range_push, cuda.nvtx.range_pop = constant(0), constant(0)
    module: Any = torch.nn.Module
    module.cuda = lambda self, device=None: self
    mode = CudaToCpu()
    mode.__enter__()
    _installed.append(mode)


def apart_from_host() -> None:
    """From now on the CPU's memory stands for a GPU's, and only what ``cpu()`` returns lies in host memory: for
    optimizers that put some of their state there. After ``install()``."""
    for mode in _installed:
        mode.apart = True


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW that keeps ``step`` in the param group, as the fused Adams of Apex and TransformerEngine do. Megatron's
    distributed optimizer expects that; torch's own AdamW keeps a step per parameter, which it cannot reload."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **ignored: Any,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction
        }  # fmt: skip
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(param.grad.to(param.dtype), 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                root = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
                param.sub_(group["lr"] * (state["exp_avg"] / correction1) / root)


def install_megatron() -> None:
    """For megatron-core's distributed optimizer and MoE layers; after ``install()``."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    optimizer.Adam = distributed.Adam = GroupStepAdamW
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 leaves the name undefined without TransformerEngine

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # Upstream converts only what lies on a GPU.
        return tensor.cpu().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_cpu
    _norms_of_sequence_parallelism()


def _norms_of_sequence_parallelism() -> None:
    """torch's norms where a rank has a part of the sequence: computed alike, and their weights marked for the sum of
    gradients over tp, as TransformerEngine's norms are. Upstream refuses torch's there."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    upstream = WrappedTorchNorm.__new__
    if upstream.__module__ == __name__:
        return

    def marked(cls: Any, config: Any, *args: Any, **more: Any) -> Any:
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm: Any = upstream(cls, config, *args, **more)
        finally:
            config.sequence_parallel = parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = parallel
        return norm

    WrappedTorchNorm.__new__ = marked  # type: ignore[method-assign]
