"""memory: what every memory space holds through a transition, and which mode fits.

*reversible*: the old plan stays whole until the commit, so a device holds before + all new storages at once. *tight*:
old storages go as soon as their receivers verified them; a device holds at least max(before, after) and, while
anything arrives, the largest arriving storage. Both add contexts, communicators, engines that start, and staging.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray
from nereus.ir.transition import LOCAL
from nereus.ir.units import MIB
from nereus.passes.lifecycle import Lifecycle
from nereus.passes.route import Routed
from nereus.passes.storages import StorageMap

PHASES = ("at the boundary", "at engine start", "during the transfer", "after the commit")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Per space (devices, then host memory of nodes): bytes of storages that stay, go and come, and the largest that
    comes."""

    kept: IntArray
    old: IntArray
    new: IntArray
    largest_new: IntArray


def state_bytes(storages: StorageMap, topology: Topology) -> StateBytes:
    num_spaces = topology.num_devices + len(topology.nodes)
    kept, old, new, largest = (np.zeros(num_spaces, dtype=np.int64) for _ in range(4))
    for stage in storages.stages:
        for device in storages.devices_of(stage):
            for name, old_slot, new_slot in storages.slots(stage):
                stay, gone, come, biggest = storages.fit(stage, name, device).totals
                old_width = old_slot.element_bytes if old_slot is not None else 0
                new_width = new_slot.element_bytes if new_slot is not None else 0
                host = topology.num_devices + int(topology.node_of[device])
                after = host if new_slot is not None and new_slot.host else device
                before = host if old_slot is not None and old_slot.host else device
                kept[after] += stay * new_width
                old[before] += gone * old_width
                new[after] += come * new_width
                largest[after] = max(largest[after], biggest * new_width)
    return StateBytes(kept=kept, old=old, new=new, largest_new=largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """``phases[name]``: bytes per space. ``fits``: per mode. Spaces as in ``StateBytes``."""

    state: StateBytes
    capacity: IntArray
    staging_bytes: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """``window_bytes``: most that a device sends, and receives, in one wave; staging is one window each way."""

    window_bytes: int = 256 * MIB

    name = "memory"

    def apply(self, storages: StorageMap, life: Lifecycle, routed: Routed, topology: Topology) -> MemoryPlan:
        state = state_bytes(storages, topology)
        num_devices, num_nodes = topology.num_devices, len(topology.nodes)

        def spaces(per_device: IntArray) -> IntArray:
            return np.concatenate((per_device, np.zeros(num_nodes, dtype=np.int64)))

        before = spaces(np.array(life.before_bytes, dtype=np.int64))
        after = spaces(np.array(life.after_bytes, dtype=np.int64))
        starting, lasting = np.zeros_like(before), np.zeros_like(before)
        for op in life.ops:
            for device, running, stays in zip(op.devices, op.running_bytes, op.after_bytes, strict=True):
                if op.kind == "engine-start":
                    starting[device] += running
                lasting[device] += stays
        sent, received = np.zeros(num_devices, dtype=np.int64), np.zeros(num_devices, dtype=np.int64)
        # A move larger than the window travels alone: then it, not the window, is what a wave stages.
        out_window, in_window = np.full_like(sent, self.window_bytes), np.full_like(sent, self.window_bytes)
        for move in routed.moves:
            if move.link == LOCAL:
                continue
            src, dst = move.src % num_devices, move.dst % num_devices
            sent[src] += move.num_bytes
            received[dst] += move.num_bytes
            out_window[src] = max(out_window[src], move.num_bytes)
            in_window[dst] = max(in_window[dst], move.num_bytes)
        staging = np.minimum(sent, out_window) + np.minimum(received, in_window)
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
        tight = state.kept + outer + before + lasting + spaces(staging) + state.largest_new
        return MemoryPlan(
            state=state,
            capacity=capacity,
            staging_bytes=int(staging.max(initial=0)),
            reversible=phases,
            tight_bound=np.maximum(tight, at_boundary + starting),
            tight_base=transfer,
        )
