"""The contract of an adapter: what a framework's objects hold, and how they go on after a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nereus.ir.fragment import Fragment, FrameworkStorage, RankState


class BindError(RuntimeError):
    """The objects cannot be bound. The text names each tensor or object that is not understood, and what to do."""


class FrameworkMissing(BindError):
    """A framework, or a feature of it that the adapter needs, is absent. The text says which, and how to get it."""


@dataclass(slots=True)
class Binding:
    """Storages of one rank as live memory. ``memory[i]`` is 1-D, contiguous, and *is* the framework's memory of
    ``state.storages[i]`` (an alias, not a copy): writing it writes the framework's tensor."""

    state: RankState
    memory: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class BindingBuilder:
    """Collects storages and fragments while an adapter walks its framework's objects."""

    rank: int
    storages: list[FrameworkStorage] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)
    fragments: list[Fragment] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)

    def storage(self, name: str, data: torch.Tensor, *, host: bool = False) -> int:
        """Number of a new storage over ``data`` (contiguous). Raises BindError where it cannot be seen as 1-D."""
        if not data.is_contiguous():
            raise BindError(f"{name}: strides {tuple(data.stride())} of shape {tuple(data.shape)} are not contiguous")
        flat = data.detach().view(-1)
        dtype = DTYPE_NAMES.get(flat.dtype)
        if dtype is None:
            raise BindError(f"{name}: state of dtype {flat.dtype} is not known")
        self.storages.append(FrameworkStorage(name=name, dtype=dtype, numel=flat.numel(), host=host))
        self.memory.append(flat)
        return len(self.storages) - 1

    def finish(self) -> Binding:
        state = RankState(
            rank=self.rank,
            storages=tuple(self.storages),
            fragments=tuple(self.fragments),
            derived=tuple(self.derived),
            caches=tuple(self.caches),
        )
        return Binding(state, tuple(self.memory))


DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.int64: "int64",
    torch.float32: "fp32",
    torch.int32: "int32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
}


@dataclass(frozen=True, slots=True)
class PostCondition:
    """One line of the rebuild checklist: what must hold before training goes on. ``check`` returns None where it
    does, else what is wrong."""

    name: str
    check: Callable[[], str | None]


class Adapter(Protocol):
    """One stage's objects in one process.

    ``adopt``: the module takes over tensors that Nereus allocated and filled; ``fill``: the framework has built its
    buffers and Nereus writes into them. Every adapter here fills; those that can also adopt have ``adopt``.
    """

    def bind(self) -> Binding:
        """Live storages and fragments. BindError names every tensor or object reachable from module and optimizer
        that is not classed as state, derived or cache."""
        ...

    def job_state(self) -> dict[str, object]:
        """Small state beside tensors (optimizer step per group, lr, scheduler, scaler), the same on every rank that
        trains the model, plain picklable values under global names; per-rank facts never go in here."""
        ...

    def finish(self, job_state: dict[str, object]) -> None:
        """After the storages were written: set ``job_state`` and make again everything derived."""
        ...

    def checklist(self) -> tuple[PostCondition, ...]:
        """What must hold after ``finish``."""
        ...

    def version(self) -> int: ...

    def set_version(self, version: int) -> None: ...
