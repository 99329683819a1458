"""What must hold of a torch module and optimizer before training goes on after a change."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from nereus.runtime.adapters import torch_state
from nereus.runtime.adapters.base import BindError, PostCondition
from nereus.runtime.adapters.classify import local_tensor

if TYPE_CHECKING:
    from nereus.runtime.adapters.torch_plain import PlainTorch

#: (module or parameter path, kind of hook, number of the hook) -> hook, held so that its identity stays its own.
Hooks = dict[tuple[str, str, int], object]

_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks(module: torch.nn.Module) -> Hooks:
    """Every hook that is registered on the module, its parts and its parameters."""
    found: Hooks = {}
    for path, owner in module.named_modules():
        for kind in _MODULE_HOOKS:
            found |= {(path, kind, key): hook for key, hook in getattr(owner, kind).items()}
    for path, parameter in module.named_parameters():
        for kind in _TENSOR_HOOKS:
            found |= {(path, kind, key): hook for key, hook in (getattr(parameter, kind, None) or {}).items()}
    return found


def conditions(adapter: PlainTorch) -> tuple[PostCondition, ...]:
    """The checklist of every torch adapter. A condition names the first few faults that it finds."""

    def condition(name: str, faults: Callable[[PlainTorch, dict[str, Any]], Iterator[str]]) -> PostCondition:
        def check() -> str | None:
            if adapter.finished is None:
                return "finish was not called"
            try:
                found = list(faults(adapter, adapter.finished))
            except BindError as error:
                return str(error)
            more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
            return "; ".join(found[:3]) + more if found else None

        return PostCondition(name=name, check=check)

    checks = [
        ("everything classed", _classed),
        ("gradients dropped", _gradients),
        ("hooks present", _hooks),
        ("gradient exchange on", _exchange),
        ("derived tensors made", _derived),
        ("version", _version),
    ]
    if adapter.optimizer is not None:
        checks += [
            ("optimizer parameters", _parameters),
            ("optimizer slots", _slots),
            ("optimizer groups", _groups),
            ("step per parameter", _steps),
        ]
    if adapter.scheduler is not None:
        checks.append(("scheduler bound", _scheduler))
    if adapter.scaler is not None:
        checks.append(("grad scaler", _scaler))
    return tuple(condition(name, faults) for name, faults in checks)


def _classed(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    yield from (f"{path}: {why}" for path, why in adapter.inventory().census.unknown.items())


def _gradients(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    for name, parameter in adapter.module.named_parameters():
        if parameter.grad is not None:
            yield f"{name} still has a gradient of before the change"


def _hooks(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    now = hooks(adapter.module)
    for (path, kind, number), hook in adapter.hooks.items():
        if now.get((path, kind, number)) is not hook:
            yield f"{path or 'the module'} lost one of its {kind.strip('_').replace('_', ' ')}"


def _exchange(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    for path, owner in adapter.module.named_modules():
        if getattr(owner, "require_backward_grad_sync", True) is False:
            yield f"{path or 'the module'} does not exchange gradients (no_sync was left on)"


def _derived(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    for name, buffer in adapter.module.named_buffers():
        if buffer.is_meta:
            yield f"{name} is on the meta device"
        elif buffer.is_floating_point() and not bool(buffer.isfinite().all()):
            yield f"{name} has values that are not finite"


def _version(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    if adapter.version() != job_state["version"]:
        yield f"the weights are version {adapter.version()}, not {job_state['version']}"


def _trained(adapter: PlainTorch) -> tuple[Any, torch_state.Restored, dict[str, tuple[str, ...]]]:
    assert adapter.finished is not None
    inventory = adapter.inventory()
    return inventory, torch_state.Restored(adapter.finished["optimizer"]), inventory.logical()


def _parameters(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    inventory, restored, logical = _trained(adapter)
    for name, parameter, _ in inventory.weights:
        was = [tensor for tensor in logical[name] if tensor in job_state["optimizer"]["tensors"]]
        if was and name not in inventory.optimizer.group:
            yield f"{name} was trained and is in no group of the optimizer"
        if was and (frozen := restored.was_frozen(was[0])) == parameter.requires_grad:
            yield f"{name} was {'frozen and is trained' if frozen else 'trained and is frozen'} now"


def _slots(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    inventory, restored, logical = _trained(adapter)
    have: dict[str, dict[str, torch.Tensor]] = {}
    for name, slot, tensor in inventory.optimizer.slots:
        have.setdefault(name, {})[slot] = tensor
    parameters = {name: tensor for name, tensor, _ in inventory.weights}
    for name in inventory.optimizer.group:
        wanted, mine = restored.slots(name, logical[name]), have.get(name, {})
        for slot in sorted(wanted.keys() - mine.keys()):
            yield f"{name} has no {slot}"
        for slot, tensor in mine.items():
            if slot not in wanted:
                yield f"{name} has a {slot} that it had not before"
            elif tensor.dtype != wanted[slot]:
                yield f"{name} {slot} is {tensor.dtype}, not {wanted[slot]}"
            elif local_tensor(tensor).shape != local_tensor(parameters[name]).shape:
                yield f"{name} {slot} lies otherwise than its parameter"


def _groups(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    inventory, restored, logical = _trained(adapter)
    names = {id(tensor): name for name, tensor, _ in inventory.weights}
    assert adapter.optimizer is not None
    for number, (group, members) in enumerate(torch_state.group_members(adapter.optimizer, names)):
        have = torch_state.options(group)
        source = restored.source_group((name, logical[name]) for name, _ in members)
        for key, value in restored.options(source).items():
            if have.get(key) != value:
                yield f"group {number} has {key} {have.get(key)}, not {value}"


def _steps(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    inventory, restored, logical = _trained(adapter)
    for name in inventory.optimizer.group:
        have, wanted = inventory.optimizer.scalars.get(name, {}), restored.scalars(name, logical[name])
        for key in sorted(have.keys() | wanted.keys()):
            if have.get(key) != wanted.get(key):
                yield f"{name} has {key} {have.get(key)}, not {wanted.get(key)}"


def _scheduler(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    scheduler, optimizer = adapter.scheduler, adapter.optimizer
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if part.optimizer is not optimizer:
            yield f"{type(part).__name__} drives another optimizer than the one that steps"
    if torch_state.plain_state(scheduler) != job_state["scheduler"]:
        yield f"the {type(scheduler).__name__} is not where it was"
    if optimizer is not None and hasattr(scheduler, "get_last_lr"):
        rates = [torch_state.plain(group["lr"]) for group in optimizer.param_groups]
        last = [torch_state.plain(rate) for rate in scheduler.get_last_lr()]
        if last != rates:
            yield f"the scheduler's learning rates {last} are not the optimizer's {rates}"


def _scaler(adapter: PlainTorch, job_state: dict[str, Any]) -> Iterator[str]:
    if torch_state.plain_state(adapter.scaler) != job_state["scaler"]:
        yield "the grad scaler is not where it was"


def rebuild_rotary(module: torch.nn.Module) -> None:
    """Compute the rotary tables of transformers again: a module that came from the meta device has none."""
    parts = [
        part
        for part in module.modules()
        if "RotaryEmbedding" in type(part).__name__ and hasattr(part, "original_inv_freq") and hasattr(part, "config")
    ]
    for part in parts:
        current: Any = part.inv_freq
        values = _frequencies(part)
        if values is None:
            if current.is_meta:
                raise BindError(f"{type(part).__name__}: its frequencies cannot be computed again; give `rebuild`")
            continue
        device = next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
        for name in ("inv_freq", "original_inv_freq"):
            buffer = getattr(part, name)
            if isinstance(buffer, torch.Tensor) and buffer.is_meta:
                part._buffers[name] = values.to(device=device, dtype=buffer.dtype)
            else:
                buffer.copy_(values.to(buffer.dtype))


def _frequencies(part: Any) -> torch.Tensor | None:
    kind = getattr(part, "rope_type", None)
    if kind == "default" and hasattr(part, "compute_default_rope_parameters"):
        return part.compute_default_rope_parameters(part.config)[0]
    try:
        functions = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    except ImportError:
        return None
    return functions[kind](part.config)[0] if kind in functions else None
