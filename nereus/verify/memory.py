"""What every memory space holds, at most, on any timing.

Before the transfer processes start; while it runs the old state, the new storages that were acquired, processes and
staging share a space; after the commit the new state remains. In tight mode each wave ends with an agreement of all
processes: a process releases wave w's storages after it, then acquires wave w + 1's. So at any moment there is a w
such that each process either has not yet released wave w, or has, and may have acquired wave w + 1: the fullest state
is the sum of the fuller of the two over the processes of a space.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.verify.case import Case
from nereus.verify.document import Key
from nereus.verify.finding import Violation
from nereus.verify.segments import IntArray, ints
from nereus.verify.storages import Storages

#: Phases of a transition, in order, as the certificate names them.
BOUNDARY, START, TRANSFER, COMMIT = "at the boundary", "at engine start", "during the transfer", "after the commit"
_STARTS = ("engine-start", "spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Most bytes per space (devices, then hosts of nodes) and phase; capacity; what the state itself takes."""

    phases: dict[str, IntArray]
    capacity: IntArray
    #: Setup where processes of a device start in any order, one after the other.
    setup: IntArray

    @property
    def peak(self) -> IntArray:
        found: IntArray = np.maximum.reduce(list(self.phases.values()))
        return found


def memory_use(case: Case, storages: Storages) -> Use:
    document, world = case.document, case.world
    kept, old, new = storages.bytes_per_space()
    promise = document.memory

    def spaces(per_device: IntArray) -> IntArray:
        return np.concatenate((per_device, np.zeros(len(world.nodes), dtype=np.int64)))

    starting, asleep, spawned, extra = (np.zeros(world.num_devices, dtype=np.int64) for _ in range(4))
    lasting = np.zeros(world.num_devices, dtype=np.int64)
    for op in document.lifecycle:
        if op.kind == "engine-start":
            np.maximum.at(starting, op.devices, asleep[op.devices] + op.running_bytes)
            np.add.at(asleep, op.devices, op.after_bytes)
        elif op.kind == "spawn":
            np.add.at(spawned, op.devices, op.after_bytes)
        if op.kind in _STARTS:
            np.maximum.at(extra, op.devices, op.running_bytes - op.after_bytes)
        np.add.at(lasting, op.devices, op.after_bytes)
    boundary = kept + old + spaces(promise.before)
    started = asleep + spawned
    starting = np.where(starting > 0, starting + spawned, 0)
    transfer = boundary + spaces(lasting + promise.staging)
    phases = {
        BOUNDARY: boundary,
        START: boundary + spaces(starting),
        TRANSFER: transfer + (_most_acquired(case, storages) if document.mode == "tight" else new),
        COMMIT: kept + new + spaces(promise.after),
    }
    capacity = np.concatenate(
        (promise.capacity, ints([promise.hosts.get(node.name, node.host_mem_bytes) for node in world.nodes]))
    )
    return Use(phases=phases, capacity=capacity, setup=boundary + spaces(started + extra))


def _most_acquired(case: Case, storages: Storages) -> IntArray:
    """Tight mode: most that a space holds beyond its state at the boundary, on any timing."""
    document, world = case.document, case.world
    num_devices = world.num_devices
    # (process, time, bytes): a storage is there from its wave on, and gone from the wave after its release on. Rows
    # from ``num_devices`` on are host memory; a device's own memory has one process.
    events: list[tuple[int, int, int]] = []
    for waves, known, later, sign in (
        (document.acquire, storages.coming_keys, 0, 1),
        (document.release, storages.going_keys, 1, -1),
    ):
        for key, wave in waves.items():
            space, num_bytes = _size(known, key)
            events.append((key[0] + (num_devices if space >= num_devices else 0), wave + later, sign * num_bytes))
    for key, (first, last) in document.staged.items():  # a copy in the host memory of the device's process
        num_bytes = _size(storages.going_keys, key)[1]
        events += [(key[0] + num_devices, first, num_bytes), (key[0] + num_devices, last + 1, -num_bytes)]
    most = np.zeros(world.num_spaces, dtype=np.int64)
    if not events:
        return most
    process, time, num_bytes_each = (ints([event[i] for event in events]) for i in range(3))
    times, at = np.unique(time, return_inverse=True)
    change = np.zeros((2 * num_devices, len(times) + 1), dtype=np.int64)
    np.add.at(change, (process, at.reshape(-1) + 1), num_bytes_each)
    state = np.cumsum(change, axis=1)
    most[:num_devices] = state[:num_devices].max(axis=1)
    either = np.maximum(state[:, :-1], state[:, 1:])[num_devices:]
    hosts = np.zeros((len(world.nodes), either.shape[1]), dtype=np.int64)
    np.add.at(hosts, world.node_of, either)
    most[num_devices:] = hosts.max(axis=1)
    return most


def _size(known: dict[Key, tuple[int, int]], key: Key) -> tuple[int, int]:
    if key not in known:
        raise Violation(f"a storage of {key[1]} {key[2]} is scheduled that is not there")
    return known[key]


def check_memory(case: Case, use: Use) -> str:
    """Every space in every phase, and capacities that are those of the new plan's machines."""
    world = case.world
    for device in np.flatnonzero(world.alive).tolist():
        node = world.nodes[int(world.node_of[device])]
        if int(use.capacity[device]) > node.gpu.capacity_bytes:
            raise Violation(
                f"{world.devices[device]} has {node.gpu.capacity_bytes:,} bytes and the document counts on "
                f"{int(use.capacity[device]):,}"
            )
    for number in np.unique(world.node_of[world.alive]).tolist():
        node = world.nodes[number]
        said = int(use.capacity[world.num_devices + number])
        if said > node.host_mem_bytes:
            raise Violation(f"{node.name}.host has {node.host_mem_bytes:,} bytes and the document counts on {said:,}")
    living = np.concatenate((world.alive, np.isin(np.arange(len(world.nodes)), world.node_of[world.alive])))
    for name, held in (*use.phases.items(), ("while processes start", use.setup)):
        over = np.flatnonzero((held > use.capacity) & living)
        if len(over):
            space = int(over[np.argmax((held - use.capacity)[over])])
            raise Violation(
                f"{world.space_name(space)} may hold {int(held[space]):,} of {int(use.capacity[space]):,} bytes {name}"
            )
    room = int((use.capacity - use.peak)[living].min())
    how = "acquired and released wave by wave" if case.document.mode == "tight" else "everything acquired at once"
    return f"{int(living.sum()):,} memory spaces in {len(use.phases)} phases, {how}; at least {room:,} bytes stay free"
