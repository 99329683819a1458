"""The result of compiling: everything that the passes decided, and the certificate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

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
from nereus.passes.lists import Lists
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
        return self._moves_by_device[device]

    @cached_property
    def _moves_by_device(self) -> list[tuple[int, ...]]:
        moves, num_devices = self.schedule.moves, self.topology.num_devices
        number = np.arange(len(moves), dtype=np.int64)
        ends = Lists.of_pairs(
            np.concatenate((moves.src, moves.dst)) % num_devices, np.concatenate((number, number)), num_devices
        )
        first, item = ends.first.tolist(), ends.item.tolist()
        return [tuple(item[a:b]) for a, b in pairwise(first)]


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
    moves, regions = schedule.moves, schedule.moves.regions
    counts = regions.counts[moves.region]
    head = (schedule.wave, schedule.slices, moves.src, moves.dst, moves.table, moves.num_bytes, moves.slots, counts)
    digest.update(np.stack(head, axis=1).tobytes())
    columns = [column.tobytes() for column in (regions.cell, regions.start, regions.stop)]
    size = regions.cell.itemsize
    bounds = [(a * size, b * size) for a, b in pairwise(regions.first.tolist())]
    # Many moves carry one region: each is read once, and stands for itself whatever its number.
    content = [hashlib.sha256(b"".join(column[a:b] for column in columns)).digest() for a, b in bounds]
    digest.update(np.frombuffer(b"".join(content), dtype="S32")[moves.region].tobytes())
    for key, wave in sorted((*schedule.acquire.items(), *schedule.release.items())):
        digest.update(repr((key, wave)).encode())
    for key, waves in sorted(schedule.staged.items()):
        digest.update(repr((key, waves)).encode())
    return digest.hexdigest()
