"""memory: what every memory space holds through a transition, and which mode fits.

*reversible*: the old plan stays whole until the commit, so a device holds before + all new storages at once. *tight*:
old storages go as soon as their receivers verified them; a device holds at least max(before, after) and, while
anything arrives, the largest storage that comes or goes: a storage that two read in parts goes when both are there.
Both add contexts, communicators, engines that start, and staging.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray
from nereus.ir.plan import Slot
from nereus.ir.schedule import Schedule, posted_bytes
from nereus.passes.lifecycle import Lifecycle
from nereus.passes.route import Routed
from nereus.passes.storages import StorageMap

PHASES = ("at the boundary", "at engine start", "during the transfer", "after the commit")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Per space (devices, then host memory of nodes): bytes of storages that stay, go and come, and the largest that
    comes or goes where any comes."""

    kept: IntArray
    old: IntArray
    new: IntArray
    largest: IntArray


def state_bytes(storages: StorageMap, topology: Topology) -> StateBytes:
    num_spaces = topology.num_devices + len(topology.nodes)
    kept, old, new, largest, largest_old = (np.zeros(num_spaces, dtype=np.int64) for _ in range(5))
    for stage in storages.stages:
        for name, old_slot, new_slot, old_width, new_width in _slots_alike(storages, stage):
            for total in storages.totals(stage, name):
                for column, count in ((kept, total.kept * new_width), (new, total.new * new_width)):
                    np.add.at(column, total.space, count)
                np.add.at(old, total.space, total.old * old_width)
                for most, slot, count in (
                    (largest, new_slot, total.largest_new),
                    (largest_old, old_slot, total.largest_old),
                ):
                    if slot is not None:
                        np.maximum.at(most, total.space, count * slot.element_bytes)
    comes = np.where(new > 0, np.maximum(largest, largest_old), 0)
    return StateBytes(kept=kept, old=old, new=new, largest=comes)


def _slots_alike(storages: StorageMap, stage: str) -> list[tuple[str, Slot | None, Slot | None, int, int]]:
    """One row per kind of slot (master and both moments are one): a name that stands for all, its old and new slot,
    and the bytes per element of all of them together, before and after."""
    rows: dict[tuple[object, ...], tuple[str, Slot | None, Slot | None, int, int]] = {}
    for name, old_slot, new_slot in storages.slots(stage):
        sides = [slot and (slot.dtype, slot.host, slot.host_share) for slot in (old_slot, new_slot)]
        key = (name == "weight", *sides)
        old_width = old_slot.element_bytes if old_slot is not None else 0
        new_width = new_slot.element_bytes if new_slot is not None else 0
        known = rows.get(key)
        if known is None:
            rows[key] = (name, old_slot, new_slot, old_width, new_width)
        else:
            rows[key] = (*known[:3], known[3] + old_width, known[4] + new_width)
    return list(rows.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """``phases[name]``: bytes per space. ``fits``: per mode. Spaces as in ``StateBytes``."""

    state: StateBytes
    capacity: IntArray
    staging: IntArray  # per device
    reversible: dict[str, IntArray]
    tight_bound: IntArray
    #: Bytes that tight mode may hand out to arriving storages beyond what lies there at the start of the transfer.
    tight_base: IntArray

    @property
    def reversible_peak(self) -> IntArray:
        peak: IntArray = np.maximum.reduce(list(self.reversible.values()))
        return peak

    def worst(self, values: IntArray) -> int:
        """Space with the least room left (the fullest of equals)."""
        return int(np.lexsort((-values, self.capacity - values))[0])

    def peak_phase(self, space: int) -> str:
        return max(self.reversible, key=lambda name: int(self.reversible[name][space]))


def plan_memory(storages: StorageMap, life: Lifecycle, staging: IntArray, topology: Topology) -> MemoryPlan:
    """``staging``: bytes per device of what it packs and unpacks, at most, in one wave."""
    state = state_bytes(storages, topology)
    num_nodes = len(topology.nodes)

    def spaces(per_device: IntArray) -> IntArray:
        return np.concatenate((per_device, np.zeros(num_nodes, dtype=np.int64)))

    before = spaces(np.array(life.before_bytes, dtype=np.int64))
    after = spaces(np.array(life.after_bytes, dtype=np.int64))
    starting, asleep, spawned, lasting = (np.zeros_like(before) for _ in range(4))
    for op in life.ops:
        for device, running, stays in zip(op.devices, op.running_bytes, op.after_bytes, strict=True):
            if op.kind == "engine-start":  # one after the other on a device; those started before sleep
                starting[device] = max(starting[device], asleep[device] + running)
                asleep[device] += stays
            elif op.kind == "spawn":  # it may be there before the engines start
                spawned[device] += stays
            lasting[device] += stays
    starting = np.where(starting > 0, starting + spawned, 0)
    at_boundary = state.kept + state.old + before
    transfer = at_boundary + lasting + spaces(staging)
    capacity = np.array(
        [n.gpu.capacity_bytes for n in topology.nodes for _ in range(n.num_gpus)]
        + [n.host_mem_bytes for n in topology.nodes],
        dtype=np.int64,
    )
    phases = {
        PHASES[0]: at_boundary,
        PHASES[1]: at_boundary + starting,
        PHASES[2]: transfer + state.new,
        PHASES[3]: state.kept + state.new + after,
    }
    outer = np.maximum(state.old, state.new)
    tight = state.kept + outer + before + lasting + spaces(staging) + state.largest
    return MemoryPlan(
        state=state,
        capacity=capacity,
        staging=staging,
        reversible=phases,
        tight_bound=np.maximum(tight, at_boundary + starting),
        tight_base=transfer,
    )


def window_staging(routed: Routed, window_bytes: int) -> IntArray:
    """Staging per device where waves are not known yet: a window each way, or all that it sends and receives."""
    moves, num_devices = routed.moves, routed.links.num_devices
    total = np.zeros(num_devices, dtype=np.int64)
    for ends in (moves.src, moves.dst):
        load = np.bincount(ends % num_devices, weights=moves.num_bytes, minlength=num_devices)
        total += np.minimum(load.astype(np.int64), window_bytes)
    return total


def schedule_staging(schedule: Schedule, num_devices: int) -> IntArray:
    """Staging per device: the most that it sends in one wave and the most that it receives."""
    waves = schedule.wave, schedule.slices
    sent, received = posted_bytes(schedule.moves, *waves, num_devices, schedule.num_waves, copies=True)
    return sent + received
