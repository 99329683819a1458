"""What the memory model says: which GPU needs what while which stage runs, and what lies in each node's host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nereus.ir.cluster import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """``stage``: whose bytes these are; empty for what belongs to no stage (contexts)."""

    label: str
    num_bytes: int
    stage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One class of GPUs with equal contents while ``stage`` runs; ``devices`` in cluster order."""

    stage: str
    devices: tuple[Device, ...]
    pp_index: int
    capacity_bytes: int
    parts: tuple[Part, ...]

    @property
    def device(self) -> Device:
        return self.devices[0]

    @property
    def need_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.need_bytes <= self.capacity_bytes

    def part_bytes(self, label: str) -> int:
        """Sum of the parts with this label; 0 if there is none."""
        return sum(part.num_bytes for part in self.parts if part.label == label)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    """One class of nodes with equal host memory contents (offloaded, swapped and host-resident state)."""

    nodes: tuple[str, ...]
    capacity_bytes: int
    parts: tuple[Part, ...]

    @property
    def need_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.need_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """``rows`` in plan order of stages, fullest class first within a stage."""

    rows: tuple[MemoryRow, ...]
    hosts: tuple[HostRow, ...]

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.stage for row in self.rows))

    @property
    def fits(self) -> bool:
        return all(row.fits for row in self.rows) and all(host.fits for host in self.hosts)

    def worst(self, stage: str) -> MemoryRow:
        """The row with the least room left. KeyError for a stage without GPUs."""
        rows = [row for row in self.rows if row.stage == stage]
        if not rows:
            raise KeyError(stage)
        return min(rows, key=lambda row: row.capacity_bytes - row.need_bytes)

    def worst_rows(self) -> Iterator[MemoryRow]:
        """The worst row of every stage, in plan order."""
        for stage in self.stages:
            yield self.worst(stage)

    def row(self, stage: str, device: Device) -> MemoryRow:
        for row in self.rows:
            if row.stage == stage and device in row.devices:
                return row
        raise KeyError((stage, str(device)))
