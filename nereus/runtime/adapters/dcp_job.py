"""Job state beside tensors in a torch.distributed.checkpoint folder: the form of torch's get_state_dict for whoever
reads it with torch, and our own whole job state in one entry, which is what counts when we read it back."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping
from typing import Any

import torch

from nereus.models.naming.base import Naming, Where
from nereus.runtime.adapters.base import BindError
from nereus.runtime.adapters.dcp import Holding
from nereus.runtime.adapters.regions import listed
from nereus.runtime.adapters.safetensors_files import TORCH_DTYPES
from nereus.runtime.adapters.torch_state import options

#: Key of our own entry.
JOB_STATE = "nereus_job_state"
_DIGEST = 32  # bytes of SHA-256 before what torch.save wrote

#: Options that say how a step is computed. torch's loader wants them in the file because a live group has them.
_HOW = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


def entries_of(
    job_state: Mapping[str, Any], naming: Naming, *, optimizer: str = "optim", flatten: bool = False
) -> dict[str, Any]:
    """``entries`` for ``dcp_write.save``. ``flatten``: the groups in the style of flatten_optimizer_state_dict (an
    entry for each option of each parameter) instead of the nested one."""
    packed = io.BytesIO()
    torch.save(dict(job_state), packed)
    found: dict[str, Any] = {JOB_STATE: hashlib.sha256(packed.getvalue()).digest() + packed.getvalue()}
    state = job_state.get("optimizer")
    if not state:
        return found
    scalars: dict[str, dict[str, object]] = {}
    members: dict[int, list[str]] = {number: [] for number in range(len(state["groups"]))}
    for name, shape in naming.parameters(Where()).items():
        parts = dict.fromkeys(segment.tensor for segment in naming.segments(name, shape, Where()))
        held = [state["tensors"][part] for part in parts if part in state["tensors"]]
        if not held:  # frozen, or a buffer
            continue
        if len(held) < len(parts) or any((one["group"], one["scalars"]) != _same(held[0]) for one in held):
            raise BindError(f"optimizer: the tensors that make up {name} differ in group or step")
        members[held[0]["group"]].append(name)
        kinds = {**state["scalar_kinds"], **held[0].get("kinds", {})}
        scalars[name] = {key: _scalar(value, kinds[key]) for key, value in held[0]["scalars"].items()}
    groups = [{**_HOW, **group} for group in state["groups"]]
    listed_groups: Any
    if flatten:
        listed_groups = {name: groups[number] for number, names in members.items() for name in names}
    else:
        listed_groups = [{**group, "params": members[number]} for number, group in enumerate(groups)]
    found[optimizer] = {"state": scalars, "param_groups": listed_groups}
    return found


def has_entries(job_state: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state is told by tensors, as torch's own state dict tells it."""
    state = job_state.get("optimizer")
    return not state or {"groups", "tensors", "scalar_kinds"} <= set(state)


def _same(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    return entry["group"], entry["scalars"]


def _scalar(value: Any, kind: str) -> object:
    dtype, *dims = kind.split("/")  # a dim of size 1 each
    return torch.tensor(value, dtype=TORCH_DTYPES[dtype]).reshape((1,) * len(dims)) if dtype in TORCH_DTYPES else value


def job_state_of(holding: Holding, *, version: int = 0) -> dict[str, Any]:
    """For an adapter's ``prepare`` and ``finish``. Of a folder that torch alone wrote: the optimizer, read from either
    style of its state dict; schedulers are then in ``holding.entries``. BindError where groups cannot be told."""
    packed = holding.entries.get(JOB_STATE)
    if JOB_STATE in holding.unread or packed is not None:
        # Torch reads a damaged pickle without a word, and a rate that lost a bit looks like any other.
        if not isinstance(packed, bytes) or hashlib.sha256(packed[_DIGEST:]).digest() != packed[:_DIGEST]:
            raise BindError(f"{JOB_STATE} of the checkpoint does not match its checksum: it is damaged")
        own: Any = torch.load(io.BytesIO(packed[_DIGEST:]), weights_only=True)
        return dict(own)
    return {"optimizer": _optimizer(holding), "scheduler": None, "scaler": None, "carried": {}, "version": version}


def _optimizer(holding: Holding) -> dict[str, Any]:
    prefix = "|".join(re.escape(p) for p in holding.optimizer_prefixes)
    groups: dict[str, dict[str, Any]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    kinds: dict[str, str] = {}
    for key, value in holding.entries.items():
        match = re.fullmatch(rf"(?:{prefix})(param_groups|state)\.(.+)\.(\w+)", key)
        if match is None:
            continue
        if match[1] == "param_groups":
            groups.setdefault(match[2], {})[match[3]] = value
        elif match[2] in holding.parameters:
            scalars.setdefault(match[2], {})[match[3]] = value
            kinds[match[3]] = holding.kinds.get(key, type(value).__name__)
    if not groups and not holding.slots:
        return {}
    numbers, different = _groups(groups)
    unknown = sorted(name for name in {**holding.slots, **scalars} if name not in numbers)
    if unknown:
        raise BindError(f"optimizer: no parameter group of the checkpoint has {listed(unknown)}")
    # A tied head is stored under two names, and only one of them has state: that one is written last.
    names = sorted((name for name in holding.parameters if name in numbers), key=lambda name: name in holding.slots)
    return {
        "groups": different,
        "scalar_kinds": kinds,
        "keys": {slot: slot for slots in holding.slots.values() for slot in slots},
        "tensors": {
            tensor: {
                "group": numbers[name],
                "slots": dict(holding.slots.get(name, {})),
                "scalars": scalars.get(name, {}),
            }
            for name in names
            for tensor in holding.parameters[name]
        },
    }


def _groups(groups: Mapping[str, dict[str, Any]]) -> tuple[dict[str, int], list[dict[str, object]]]:
    """(parameter -> number of its group, options of each group)."""
    numbers: dict[str, int] = {}
    found: list[dict[str, object]] = []
    for label, group in groups.items():
        if label.isdecimal():
            names = group.get("params")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise BindError(f"optimizer: group {label} of the checkpoint does not list the names of its parameters")
            found.append(options(group))
            numbers.update(dict.fromkeys(names, len(found) - 1))
        else:
            chosen = options(group)
            if chosen not in found:
                found.append(chosen)
            numbers[label] = found.index(chosen)
    return numbers, found
