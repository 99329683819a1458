"""State of a torch optimizer under logical names: slots (tensors like the parameter), scalars (step), group options.

Read from the objects and written back into those of another layout, whose parameter groups may be cut and ordered
otherwise. What is neither is refused by name: block-quantised moments, factored second moments, state that belongs to
no parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nereus.runtime.adapters.base import DTYPE_NAMES, BindError
from nereus.runtime.adapters.classify import Census, Known

#: Names that optimizers give the fp32 copy of a parameter -> slot. Every other tensor keeps its name.
SLOT_NAMES: Mapping[str, str] = dict.fromkeys(
    ("master", "master_param", "master_params", "master_weight", "fp32_param"), "master"
)

#: Options of a group that say how a step is computed, not what: those of the new optimizer stay.
_HOW = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

#: Which of the two is an option of the group (``decoupled_weight_decay``), and options are set.
_ALIKE = frozenset({"torch.optim.adam.Adam", "torch.optim.adamw.AdamW"})


@dataclass(slots=True)
class OptimizerView:
    """``slots``: (parameter name, slot, tensor) in the order of the groups; ``scalars``: parameter name -> name ->
    value; ``kinds``: parameter name -> scalar -> dtype name, with ``/1`` behind it for each dim that the one-element
    tensor has, or int, float, bool for a plain value; ``group``: parameter name -> its group; ``keys``: slot -> the
    optimizer's own name of it."""

    slots: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)
    scalars: dict[str, dict[str, float | int | bool]] = field(default_factory=dict)
    kinds: dict[str, dict[str, str]] = field(default_factory=dict)
    group: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)  # in a group, and no gradient reaches them


def view(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    census: Census,
    known: Known,
    slot_names: Mapping[str, str],
) -> OptimizerView:
    """Everything in ``optimizer``; ``names``: id of a parameter -> its name. What is not understood goes to
    ``census``."""
    found = OptimizerView()
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                census.refuse(f"optimizer.param_groups.{number}.params.{position}", "no parameter of the module")
            elif name in found.group:
                census.refuse(f"optimizer.param_groups.{number}.params.{position}", f"{name} is in two groups")
            else:
                found.group[name] = number
                if not parameter.requires_grad:
                    found.frozen.add(name)
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                known.add(value)  # lr as a tensor
            if key not in ("params", "param_names") and not is_plain(plain(value)):
                census.take(f"optimizer.param_groups.{number}.{key}", value, f"a group option ({type(value).__name__})")
    entries: Mapping[Any, Any] = optimizer.state
    for parameter, state in entries.items():
        name = names.get(id(parameter))
        if name is None or not isinstance(state, Mapping):
            key = name or (parameter if isinstance(parameter, str) else type(parameter).__name__)
            census.take(f"optimizer.state.{key}", state, "optimizer state that belongs to no parameter")
            continue
        for key, value in state.items():
            _entry(found, census, known, name, parameter, str(key), value, slot_names)
    return found


def _entry(
    found: OptimizerView,
    census: Census,
    known: Known,
    name: str,
    parameter: torch.Tensor,
    key: str,
    value: object,
    slot_names: Mapping[str, str],
) -> None:
    path = f"optimizer.state.{name}.{key}"
    if value is None:  # momentum before the first step
        return
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
        if type(value) is not type(parameter.data) and type(value) is not torch.Tensor:
            census.take(path, value, f"state stored as {type(value).__name__}, whose elements do not follow a cut")
            return
        slot = slot_names.get(key, key)
        found.slots.append((name, slot, value))
        found.keys[slot] = key
        known.add(value)
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        found.scalars.setdefault(name, {})[key] = value.item()
        found.kinds.setdefault(name, {})[key] = DTYPE_NAMES.get(value.dtype, "fp32") + "/1" * value.dim()
        known.add(value)
    elif isinstance(value, (bool, int, float)):
        found.scalars.setdefault(name, {})[key] = value
        found.kinds.setdefault(name, {})[key] = type(value).__name__
    elif isinstance(value, torch.Tensor):
        census.take(path, value, f"{list(value.shape)} of {value.dtype} is not shaped like {list(parameter.shape)}")
    else:
        census.take(path, value, f"an entry of the optimizer's state ({type(value).__name__})")


def plain(value: object) -> object:
    """One-element tensors as numbers, inside containers too."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(part) for part in value)  # type: ignore[call-arg, attr-defined]
    return value


def plain_state(owner: Any) -> dict[str, Any]:
    """The state of a scheduler or a grad scaler."""
    return {key: plain(value) for key, value in owner.state_dict().items()}


def is_plain(value: object) -> bool:
    """Numbers, strings and containers of them: what a job state may hold."""
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, int)) and is_plain(part) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return all(is_plain(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str))


def options(group: Mapping[str, Any]) -> dict[str, object]:
    """What decides the result of a step in a group: lr, betas, weight decay, initial lr, ..."""
    return {key: plain(value) for key, value in group.items() if key not in _HOW and is_plain(plain(value))}


def to_job_state(
    optimizer: torch.optim.Optimizer, found: OptimizerView, logical: Mapping[str, Sequence[str]]
) -> dict[str, object]:
    """``logical``: parameter name -> its logical tensors."""
    slots: dict[str, dict[str, str]] = {}
    for name, slot, tensor in found.slots:
        slots.setdefault(name, {})[slot] = DTYPE_NAMES[tensor.dtype]
    kinds: dict[str, str] = {}
    for own in found.kinds.values():
        for key, kind in own.items():
            kinds.setdefault(key, kind)
    tensors: dict[str, dict[str, object]] = {}
    for name, group in found.group.items():
        entry = {"group": group, "slots": slots.get(name, {}), "scalars": found.scalars.get(name, {})}
        if other := {key: kind for key, kind in found.kinds.get(name, {}).items() if kinds[key] != kind}:
            entry["kinds"] = other
        if name in found.frozen:
            entry["frozen"] = True
        tensors.update(dict.fromkeys(logical[name], entry))
    return {
        "class": class_name(optimizer),
        "groups": [options(group) for group in optimizer.param_groups],
        "scalar_kinds": kinds,
        "keys": dict(found.keys),
        "tensors": tensors,
    }


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Of the class that computes the step. Schedulers and wrappers change the object, not that."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


class Restored:
    """A job state's optimizer part, looked up for the parameters of another layout."""

    def __init__(self, job_state: Any) -> None:
        """BindError for what is no such part, another adapter's for example."""
        parts = ("tensors", "groups", "scalar_kinds", "keys")
        if missing := [part for part in parts if not isinstance(job_state, Mapping) or part not in job_state]:
            raise BindError(
                f"the job state's optimizer has no {', '.join(missing)}: it is not of a torch adapter's job_state()"
            )
        self._tensors: Mapping[str, Mapping[str, Any]] = job_state["tensors"]
        self._groups: Sequence[Mapping[str, object]] = job_state["groups"]
        self._kinds: Mapping[str, str] = job_state["scalar_kinds"]
        self.keys: Mapping[str, str] = job_state["keys"]
        self._class: str | None = job_state.get("class")  # checkpoints that torch wrote do not say it

    def check_class(self, optimizer: torch.optim.Optimizer) -> None:
        """BindError where another kind of optimizer would go on with this state: slots of the same name mean something
        else there, and nothing fails."""
        mine = class_name(optimizer)
        alike = self._class in _ALIKE and mine in _ALIKE
        if self._class is not None and self._class != mine and not alike:
            raise BindError(
                f"optimizer: the state is of {self._class}, and the new optimizer is a {mine}: build the same class"
            )

    def slots(self, name: str, logical: Sequence[str]) -> dict[str, torch.dtype]:
        found = self._agreed(name, logical, "slots")
        if unknown := sorted(set(found.values()) - _DTYPES.keys()):
            raise BindError(f"optimizer: {name} has slots of dtype {', '.join(unknown)}, which is not known")
        if lost := sorted(found.keys() - self.keys.keys()):
            raise BindError(f"optimizer: the job state does not say what the optimizer calls {', '.join(lost)}")
        return {slot: _DTYPES[dtype] for slot, dtype in found.items()}

    def scalars(self, name: str, logical: Sequence[str]) -> dict[str, float | int | bool]:
        return dict(self._agreed(name, logical, "scalars"))

    def kind(self, scalar: str, logical: Sequence[str]) -> str:
        """Of a scalar of a parameter that holds ``logical``."""
        own = self._tensors[logical[0]].get("kinds", {})
        return str(own[scalar] if scalar in own else self._kinds[scalar])

    def was_frozen(self, tensor: str) -> bool:
        return bool(self._tensors[tensor].get("frozen", False))

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def options(self, group: int | None) -> dict[str, object]:
        """Options of an old group; of none where a new one is empty."""
        return {} if group is None else dict(self._groups[group])

    def source_group(self, members: Iterable[tuple[str, Sequence[str]]]) -> int | None:
        """The old group that a new group with these parameters continues; None for an empty one. BindError where they
        come from groups that differ."""
        chosen: int | None = None
        first = ""
        for name, logical in members:
            for tensor in logical:
                number = int(self._entry(name, tensor)["group"])
                if chosen is None:
                    chosen, first = number, name
                mine, theirs = self._groups[number], self._groups[chosen]
                if mine != theirs:
                    differ = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
                    raise BindError(
                        f"optimizer: {first} and {name} are in one group now and had different {', '.join(differ)} "
                        "before; build the new optimizer with groups that do not mix them"
                    )
        return chosen

    def _entry(self, name: str, tensor: str) -> Mapping[str, Any]:
        if tensor not in self._tensors:
            raise BindError(f"optimizer: {name} is trained now, and {tensor} was not: it has no state to go on with")
        return self._tensors[tensor]

    def _agreed(self, name: str, logical: Sequence[str], what: str) -> Mapping[str, Any]:
        values = [self._entry(name, tensor)[what] for tensor in logical]
        for tensor, value in zip(logical, values, strict=True):
            if value != values[0]:
                raise BindError(
                    f"optimizer: {name} holds {logical[0]} and {tensor}, whose {what} differ: {values[0]} and {value}"
                )
        return values[0] if values else {}


def scalar(kind: str, value: float | int | bool, parameter: torch.Tensor, group: Mapping[str, Any]) -> object:
    """A scalar of the optimizer's state as torch's optimizers keep it: on the CPU, but beside the parameter where a
    fused or captured step reads it."""
    if kind in ("int", "float", "bool"):
        return {"int": int, "float": float, "bool": bool}[kind](value)
    dtype, *dims = kind.split("/")
    beside = bool(group.get("fused") or group.get("capturable"))
    device = parameter.device if beside else "cpu"
    return torch.tensor(value, dtype=_DTYPES[dtype], device=device).reshape((1,) * len(dims))


def set_options(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Write options into a live group; a tensor lr keeps its tensor."""
    for key, value in values.items():
        current = group.get(key)
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        else:
            group[key] = value


def group_members(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[dict[str, Any], list[tuple[str, torch.Tensor]]]]:
    """(group, its (name, parameter) pairs)."""
    for group in optimizer.param_groups:
        yield group, [(names[id(parameter)], parameter) for parameter in group["params"] if id(parameter) in names]


#: Lists in the state of torch's schedulers that have an entry for each group of the optimizer.
_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"},
)


def regrouped(state: Mapping[str, Any], sources: Sequence[int | None], num_groups: int) -> dict[str, Any]:
    """A scheduler's state for an optimizer whose group i continues old group ``sources[i]`` of ``num_groups``.

    BindError where an entry for each group cannot be told from another list.
    """
    if list(sources) == list(range(num_groups)):
        return dict(state)
    found = {}
    for key, value in state.items():
        if key == "_schedulers":
            value = [regrouped(inner, sources, num_groups) for inner in value]
        elif key in _PER_GROUP and isinstance(value, (list, tuple)) and len(value) == num_groups:
            if None in sources:
                raise BindError(f"scheduler: a group of the new optimizer is empty, so it has no {key}")
            value = [value[source] for source in sources if source is not None]
        elif isinstance(value, (list, tuple)) and len(value) == num_groups and key != "milestones":
            raise BindError(
                f"scheduler: '{key}' may have an entry for each of the optimizer's groups, which are ordered otherwise "
                "now; build the new optimizer with the old groups in the old order"
            )
        found[key] = value
    return found
