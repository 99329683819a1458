"""One GPU as its driver describes it, and a machine with its GPUs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nereus.models.hardware import gpu_ids, gpu_type
from nereus.planner.health import Problem

_GIB = 2**30
#: A GPU whose memory is further from the data sheet's is another part.
_FURTHEST = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """``slowed``: why its clock is lower than it could be, where that is no matter of power or idleness.
    ``uncorrected``: memory errors since the driver was loaded. ``remap``: what is wrong with the spare rows that
    replace bad ones. None: the driver does not tell."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    celsius: int | None = None
    slowed: tuple[str, ...] = ()
    uncorrected: int | None = None
    remap: str | None = None

    @property
    def hardware(self) -> str | None:
        """Its id in the hardware table, as plans write it."""
        return hardware_id(self.name, self.total_bytes)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why no plan should count on it."""
        return (*self.slowed, *self.faults)

    @property
    def faults(self) -> tuple[str, ...]:
        """Those that do more than to slow it."""
        errors = (f"{self.uncorrected} uncorrected memory errors",) if self.uncorrected else ()
        return (*errors, self.remap) if self.remap else errors


def problems_of(gpus: Iterable[Gpu], xids: Mapping[int, Iterable[int]] | None = None) -> tuple[Problem, ...]:
    """As the advisor is told of a node. ``xids``: by GPU, what ``Xids.seen`` says."""
    found = []
    for gpu in gpus:
        found += [Problem(text=f"GPU {gpu.index}: {why}", slows=True) for why in gpu.slowed]
        faults = (*gpu.faults, *(f"XID {xid}" for xid in (xids or {}).get(gpu.index, ())))
        found += [Problem(text=f"GPU {gpu.index}: {why}", slows=False) for why in faults]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """``hardware``: ids, one a GPU; None where the table has no such part. ``mem_bytes``: of the host; None: not
    told."""

    name: str
    hardware: tuple[str | None, ...]
    mem_bytes: int | None = None


class NotThere(Exception):
    """The driver's library is not on this machine, or has no device; says why. ``extra``: of this package, that would
    help."""

    def __init__(self, text: str, *, extra: str | None = None) -> None:
        super().__init__(text)
        self.extra = extra


def hardware_id(name: str, total_bytes: int | None = None) -> str | None:
    """``NVIDIA H100 80GB HBM3``, ``AMD Instinct MI300X``, Ray's ``A100-40G`` -> an id of the hardware table."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    found = [id for id in gpu_ids() if id.partition("-")[0] in words]
    in_slot = [id for id in found if ("-pcie-" in id) == ("pcie" in words)]
    found = in_slot or found
    told = [int(word.rstrip("gb")) for word in words if re.fullmatch(r"\d+gb?", word)]
    # What a driver counts is in GiB, or a little less.
    gib = total_bytes / _GIB if total_bytes is not None else (told[0] if told else None)
    if gib is None or not found:
        return found[0] if found else None
    off, nearest = min((abs(math.log(gib / gpu_type(id).mem_gb)), id) for id in found)
    return nearest if off <= _FURTHEST else None
