"""What hangs on a module and its optimizer beside the parameters: every tensor, and every object that may hold state.

Each is state, carried (small, the same on every rank, travels with the job state), derived (made again) or a cache;
what is none of them is refused by name, all at once. An exponential average that is forgotten looks like a good run
until it is evaluated, so nothing is skipped in silence.
"""

from __future__ import annotations

import enum
import functools
import pathlib
import random
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from nereus.runtime.adapters.base import BindError


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What the user says about objects that an adapter does not know. Patterns (``*``, ``?``) match whole paths such
    as ``model.rotary.table``, ``ema.model.norm.weight`` or ``optimizer.state.rng``; list items and dict keys are path
    components.

    ``state``: pattern with one ``*`` -> slot name; what the ``*`` matches is the name of the parameter whose slot the
    tensor is, as ``{"ema.*": "ema"}``. ``carried``: small values, the same on all ranks; a module's extra state under
    ``<module>._extra_state``.
    """

    state: Mapping[str, str] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()

    def slot(self, path: str) -> tuple[str, str] | None:
        """(parameter name, slot) where ``path`` is declared state."""
        for pattern, slot in self.state.items():
            before, star, after = pattern.partition("*")
            if star and path.startswith(before) and path.endswith(after) and len(path) >= len(before) + len(after):
                return path[len(before) : len(path) - len(after)], slot
        return None

    def kind(self, path: str) -> str | None:
        """state, carried, derived or caches; None: not declared."""
        if self.slot(path) is not None:
            return "state"
        for kind in ("carried", "derived", "caches"):
            if any(fnmatchcase(path, pattern) for pattern in getattr(self, kind)):
                return kind
        return None


#: Buffers and attributes that a module computes from its configuration, and gradients.
DERIVED = (
    "*inv_freq",
    "*cos_cached",
    "*sin_cached",
    "*position_ids",
    "*.grad",
    "*.main_grad",
    "*._saved_grad",
)

#: Values that hold no state of a model.
_PLAIN: tuple[type, ...] = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    enum.Enum,
    range,
    slice,
    pathlib.PurePath,
    re.Pattern,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.GenericAlias,
    types.UnionType,
    np.generic,
    np.dtype,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)

#: Machinery whose objects belong to the process, not to the model: groups, hooks, compilers, locks, loggers. What they
#: hold of a model is reached through the model.
_MACHINERY = (
    "nereus.runtime.groups",
    "torch._C",
    "torch._dynamo",
    "torch._ops",
    "torch._functorch",
    "torch.autograd",
    "torch.cuda.graphs",
    "torch.cuda.streams",
    "torch.distributed",
    "torch.nn.modules.module",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch.utils.hooks",
    "torch.utils.weak",
    "_thread",
    "_weakref",
    "concurrent",
    "logging",
    "threading",
    "typing",
    "weakref",
)

#: Attributes of every ``nn.Module`` that are walked on their own, or are flags.
_MODULE_ATTRIBUTES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})

_STREAMS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)


@dataclass(slots=True)
class Census:
    """The outcome: what was found of each kind (path, object), and what is not understood (path, why)."""

    declared: Declared
    state: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    carried: list[tuple[str, object]] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)

    def refuse(self, path: str, why: str) -> None:
        self.unknown.setdefault(path, why)

    def take(self, path: str, value: object, what: str) -> None:
        """Class one object that is not a parameter, a buffer with a known name or optimizer state."""
        kind = self.declared.kind(path)
        if kind == "state":
            if isinstance(value, torch.Tensor):
                self.state.append((path, value))
            else:
                self.refuse(path, f"{what}, declared state, is no tensor")
        elif kind == "carried":
            self.carried.append((path, value))
        elif kind == "derived" or any(fnmatchcase(path, pattern) for pattern in DERIVED):
            self.derived.append(path)
        elif kind == "caches":
            self.caches.append(path)
        else:
            self.refuse(path, what)

    def raise_if_unknown(self) -> None:
        """BindError that names everything not understood."""
        if not self.unknown:
            return
        lines = [f"  {path}: {why}" for path, why in self.unknown.items()]
        raise BindError(
            f"{len(lines)} objects are reachable from the module or the optimizer and are not known to be state, "
            "derived or a cache:\n"
            + "\n".join(lines)
            + "\nParameters belong in the naming; say what each other is with "
            "Declared(state=..., carried=..., derived=..., caches=...), or take it off the module; nothing is guessed."
        )


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's memory; 0: it has none (meta, empty)."""
    local = local_tensor(tensor)
    try:
        return int(local.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # wrapper subclasses without storage
        return 0


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local part, detached; another tensor as it is."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor.detach() if local is None else local.detach()


def take_module(census: Census, module: torch.nn.Module, prefix: str, known: Known) -> None:
    """Class everything below ``module`` that is not ``known``: extra state, attributes, what hooks close over."""
    for name, owner in module.named_modules(remove_duplicate=True):
        path = f"{prefix}{name}." if name else prefix
        for hook in ("get_extra_state", "set_extra_state"):
            if getattr(type(owner), hook) is not getattr(torch.nn.Module, hook):
                census.take(f"{path}_extra_state", owner, f"extra state of {type(owner).__name__} ({hook})")
                break
        for parameter, value in owner._parameters.items():
            if value is not None:
                _take_parameter_attributes(census, value, f"{path}{parameter}", known)
        for attribute, value in vars(owner).items():
            if attribute not in _MODULE_ATTRIBUTES:
                take_object(census, value, f"{path}{attribute}", known)


def _take_parameter_attributes(census: Census, parameter: torch.Tensor, path: str, known: Known) -> None:
    if parameter.grad is not None:
        census.take(f"{path}.grad", parameter.grad, "a gradient")
    for attribute, value in getattr(parameter, "__dict__", {}).items():
        if attribute not in ("_local_tensor", "_spec"):
            take_object(census, value, f"{path}.{attribute}", known)


@dataclass(slots=True)
class Known:
    """Objects and memory that are classed already. ``keep`` holds what ``ids`` names alive, so no id is used twice."""

    ids: set[int] = field(default_factory=set)
    memory: set[int] = field(default_factory=set)
    keep: list[object] = field(default_factory=list)

    def add(self, value: object) -> None:
        self.ids.add(id(value))
        self.keep.append(value)
        if isinstance(value, torch.Tensor) and (key := storage_key(value)):
            self.memory.add(key)

    def has(self, value: object) -> bool:
        return id(value) in self.ids

    def aliases(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self.memory


def take_object(census: Census, root: object, path: str, known: Known) -> None:
    """Class every tensor and opaque object reachable from ``root`` that is not known."""
    pending: list[tuple[str, object]] = [(path, root)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, _PLAIN) or known.has(value):
            continue
        if isinstance(value, torch.Tensor):
            if not known.aliases(value) and not (local_tensor(value).is_meta or value.numel() == 0):
                census.take(path, value, f"a tensor {list(value.shape)} of {value.dtype}")
            known.add(value)
            continue
        known.add(value)
        what = _opaque(value)
        if what is not None:
            census.take(path, value, what)
        else:
            pending.extend((f"{path}.{name}" if name else path, part) for name, part in _parts(value))


def _opaque(value: object) -> str | None:
    """What to call an object that may hold state which a walk over its attributes does not show; None: walk it."""
    kind = type(value)
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)} of {value.dtype}"
    if isinstance(value, _STREAMS):
        return "a random stream"
    if isinstance(value, torch.optim.Optimizer):
        return "another optimizer"
    if isinstance(value, (torch.nn.Module, Mapping, list, tuple, set, frozenset)) or _is_machinery(kind):
        return None
    if callable(getattr(value, "state_dict", None)):
        return f"an object with a state_dict ({kind.__module__}.{kind.__qualname__})"
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)) or kind is object:
        return None
    if not hasattr(value, "__dict__") and not _slots(kind) and not _is_iterable_container(value):
        return f"an opaque object ({kind.__module__}.{kind.__qualname__})"
    return None


def _is_machinery(kind: type) -> bool:
    return any(kind.__module__ == name or kind.__module__.startswith(f"{name}.") for name in _MACHINERY)


def _is_iterable_container(value: object) -> bool:
    return type(value).__module__ == "collections"


def _slots(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """(path component, object) of what ``value`` holds directly; an empty component adds nothing to the path."""
    if isinstance(value, torch.nn.Module):  # one that is not registered: in a list, or behind a plain object
        for group in (value._parameters, value._buffers, value._modules):
            yield from group.items()
        yield from ((name, part) for name, part in vars(value).items() if name not in _MODULE_ATTRIBUTES)
    elif isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)) or _is_iterable_container(value):
        items: Any = value
        yield from ((str(number), part) for number, part in enumerate(items))
    elif isinstance(value, types.FunctionType):
        if not _is_torch(value.__module__):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    yield name, cell.cell_contents
                except ValueError:  # a cell that is not filled yet
                    continue
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, functools.partial):
        yield "func", value.func
        yield from ((str(number), part) for number, part in enumerate(value.args))
        yield from value.keywords.items()
    elif not _is_machinery(type(value)):
        yield from getattr(value, "__dict__", {}).items()
        for name in _slots(type(value)):
            if hasattr(value, name):
                yield name, getattr(value, name)


def _is_torch(module: str | None) -> bool:
    return module is not None and (module == "torch" or module.startswith("torch."))
