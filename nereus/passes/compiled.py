"""The result of compiling: everything that the passes decided, and the certificate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from nereus.ir.diagnostic import Diagnostic
from nereus.ir.holdings import Holdings, Topology
from nereus.ir.plan import Plan
from nereus.ir.schedule import Schedule
from nereus.ir.transition import Certificate
from nereus.passes.atoms import AtomTable, ModelGeometry
from nereus.passes.bound import Bounds
from nereus.passes.dag import Dag
from nereus.passes.diff import Diff
from nereus.passes.lifecycle import Lifecycle
from nereus.passes.lower import StageChange
from nereus.passes.memory import MemoryPlan
from nereus.passes.place import Choice, Together
from nereus.passes.same import Pair
from nereus.passes.storages import StorageMap
from nereus.passes.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the programs of a change follow from. Not slotted: per-device indices are built once and kept."""

    topology: Topology
    diff: Diff
    storages: StorageMap = field(repr=False)
    schedule: Schedule
    digest: str

    def geometry_of(self, table: AtomTable) -> ModelGeometry:
        return self._geometry[id(table)]

    @cached_property
    def _geometry(self) -> dict[int, ModelGeometry]:
        diff = self.diff
        return {id(t): diff.geometries[g] for t, g in zip(diff.tables, diff.geometry_of, strict=True)}

    def moves_of_device(self, device: int) -> tuple[int, ...]:
        """Numbers of the moves that ``device`` sends or receives, ascending."""
        return self._moves_by_device.get(device, ())

    @cached_property
    def _moves_by_device(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for number, move in enumerate(self.schedule.moves):
            for device in {move.src % self.topology.num_devices, move.dst % self.topology.num_devices}:
                found.setdefault(device, []).append(number)
        return {device: tuple(numbers) for device, numbers in found.items()}


@dataclass(frozen=True, kw_only=True)
class Transition(Exchange):
    """A change of plan. ``old`` and ``new`` are placed."""

    old: Plan
    new: Plan
    old_holdings: Holdings
    new_holdings: Holdings
    changes: tuple[StageChange, ...]
    choices: tuple[Choice, ...]
    together: Together
    life: Lifecycle
    memory: MemoryPlan
    dag: Dag
    bound: Bounds
    certificate: Certificate
    timeline: Timeline
    #: Models whose weights are equal now, as the job stated: (the name that stands for both, the other).
    same: tuple[Pair, ...] = ()
    #: What the user should know although it compiles.
    warnings: tuple[Diagnostic, ...] = ()
    #: Seconds of each pass, in order.
    timings: tuple[tuple[str, float], ...] = ()


def transition_digest(old: Plan, new: Plan, schedule: Schedule, same: tuple[Pair, ...] = ()) -> str:
    """SHA-256 over both placed plans (not their file names), what is stated to be the same, and every move with its
    wave: equal programs, equal digest."""
    digest = hashlib.sha256()
    for plan in (old, new):
        digest.update(repr(replace(plan, path="")).encode())
    if same:
        digest.update(repr(same).encode())
    return schedule_digest(digest, schedule)


def schedule_digest(digest: hashlib._Hash, schedule: Schedule) -> str:
    """``digest`` of what the schedule was made from, and every move with its waves."""
    digest.update(schedule.mode.encode())
    head = [
        (
            wave,
            slices,
            m.src,
            m.dst,
            m.table,
            m.num_bytes,
            -1 if m.slots is None else sum(1 << i for i in m.slots),
            len(m.intervals),
        )
        for m, wave, slices in zip(schedule.moves, schedule.wave, schedule.slices, strict=True)
    ]
    digest.update(np.array(head, dtype=np.int64).tobytes())
    known: dict[int, bytes] = {}  # many moves carry one region
    for move in schedule.moves:
        region = move.intervals
        if id(region) not in known:
            known[id(region)] = b"".join(column.tobytes() for column in (region.cell, region.start, region.stop))
        digest.update(known[id(region)])
    for key, wave in sorted((*schedule.acquire.items(), *schedule.release.items())):
        digest.update(repr((key, wave)).encode())
    for key, waves in sorted(schedule.staged.items()):
        digest.update(repr((key, waves)).encode())
    return digest.hexdigest()
