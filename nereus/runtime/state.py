"""The tensors that a device holds between transitions, and how they are allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from nereus.ir.cluster import Device
from nereus.ir.program import StorageSpec

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "int64": torch.int64,
    "fp32": torch.float32,
    "int32": torch.int32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}

#: New memory is filled with this byte, so that it is really there, and an element that nobody wrote shows.
POISON = 0xA5

Allocate = Callable[[StorageSpec], torch.Tensor]


@dataclass(frozen=True, slots=True, order=True)
class StorageKey:
    """One tensor of one slot in one stage's processes."""

    stage: str
    tensor: str
    slot: str

    def __str__(self) -> str:
        return f"{self.stage} {self.tensor} {self.slot}"


def key_of(spec: StorageSpec) -> StorageKey:
    return StorageKey(spec.stage, spec.tensor, spec.slot)


@dataclass(frozen=True, slots=True)
class Held:
    """``data``: 1-D, ``spec.numel`` elements."""

    spec: StorageSpec
    data: torch.Tensor


@dataclass(slots=True)
class DeviceState:
    """All that one device (its GPU and its part of host memory) holds."""

    device: Device
    held: dict[StorageKey, Held] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Held]:
        return iter(self.held.values())

    def put(self, spec: StorageSpec, data: torch.Tensor) -> None:
        self.held[key_of(spec)] = Held(spec, data)

    @property
    def num_bytes(self) -> int:
        return sum(h.data.numel() * h.data.element_size() for h in self)


def allocate(spec: StorageSpec) -> torch.Tensor:
    """Memory that is really there: every page is written. RuntimeError or MemoryError where there is none."""
    data = torch.empty(spec.numel, dtype=DTYPES[spec.dtype])
    data.view(torch.uint8).fill_(POISON)
    return data


def same_place(a: StorageSpec, b: StorageSpec) -> bool:
    """Both describe the same elements in the same kind of memory."""
    return all(
        getattr(a, name) == getattr(b, name)
        for name in ("model", "tensor", "slot", "dtype", "row_lo", "row_hi", "col_lo", "col_hi", "start", "stop")
    )
