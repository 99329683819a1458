"""The tensors that a device holds between transitions, and how they are allocated."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
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

_HUGE_PAGE = 2 << 20

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
    dtype = DTYPES[spec.dtype]
    data = fresh_bytes(spec.numel * dtype.itemsize)
    data.fill_(POISON)
    return data.view(dtype)


def fresh_bytes(num_bytes: int) -> torch.Tensor:
    """Memory with anything in it, uint8. Large ones lie on huge pages where the system has them: first touching memory
    page by page takes several times as long as filling it. RuntimeError or MemoryError where there is none."""
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes:,} bytes: {error.strerror}") from None
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    # Only whole pages of the part that is used, so that not a byte more than that is ever there.
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // _HUGE_PAGE * _HUGE_PAGE)
    return whole.narrow(0, start, num_bytes)


def same_place(a: StorageSpec, b: StorageSpec) -> bool:
    """Both describe the same elements in the same kind of memory."""
    return all(
        getattr(a, name) == getattr(b, name)
        for name in ("model", "tensor", "slot", "dtype", "row_lo", "row_hi", "col_lo", "col_hi", "start", "stop")
    )
