"""Small jobs written as lists of operations, and a simulator so plain that it is right: tiny steps of time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nereus.sim.job import PORTS_PER_OP, Job, Resources


@dataclass
class Op:
    fixed_s: float = 0.0
    num_bytes: int = 0
    ports: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    space: int = -1
    acquired: int = 0
    released: int = 0
    takes: int = -1
    gives: int = -1
    after: tuple[int, ...] = ()


@dataclass
class World:
    ports: tuple[float, ...] = (1.0,)
    base: tuple[int, ...] = (0,)
    capacity: tuple[int, ...] = (100,)
    devices: int = 4
    owned: tuple[int, ...] = field(default=())


def make_job(ops: list[Op], world: World | None = None, *, blocking: bool = False) -> Job:
    world = world or World()
    edges = [(before, number) for number, op in enumerate(ops) for before in op.after]
    weighted = any(op.weights for op in ops)
    return Job(
        resources=Resources(
            port_bytes_per_s=np.array(world.ports, dtype=np.float64),
            space_base_bytes=np.array(world.base, dtype=np.int64),
            space_capacity_bytes=np.array(world.capacity, dtype=np.int64),
            num_devices=world.devices,
            owned=world.owned,
        ),
        name=tuple(f"op{number}" for number in range(len(ops))),
        fixed_s=np.array([op.fixed_s for op in ops], dtype=np.float64),
        num_bytes=np.array([op.num_bytes for op in ops], dtype=np.int64),
        ports=np.array([[*op.ports, *[-1] * (PORTS_PER_OP - len(op.ports))] for op in ops], dtype=np.int64),
        weights=np.array(
            [[*(op.weights or [1.0] * len(op.ports)), *[1.0] * (PORTS_PER_OP - len(op.ports))] for op in ops]
        )
        if weighted
        else None,
        space=np.array([op.space for op in ops], dtype=np.int64),
        acquired=np.array([op.acquired for op in ops], dtype=np.int64),
        released=np.array([op.released for op in ops], dtype=np.int64),
        takes=np.array([op.takes for op in ops], dtype=np.int64),
        gives=np.array([op.gives for op in ops], dtype=np.int64),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        blocking=blocking,
    )


def fill_ports(passes: list[dict[int, float]], capacity: tuple[float, ...], steps: int = 20_000) -> list[float]:
    """Max-min rates by raising all rates in small, equal steps until a port of the transfer is full."""
    step = min(capacity) / steps
    left = list(capacity)
    rates = [0.0] * len(passes)
    rising = set(range(len(passes)))
    while rising:
        for i in sorted(rising):
            if any(left[p] < w * step for p, w in passes[i].items()):
                rising.discard(i)
                continue
            rates[i] += step
            for p, w in passes[i].items():
                left[p] -= w * step
    return rates


def step_by_step(
    ops: list[Op], world: World, step_s: float, *, blocking: bool = False
) -> tuple[list[float], list[int], bool]:
    """(finish times, peak bytes per space, whether an overflow happened) by steps of ``step_s``; infinite where an
    operation never finished."""
    state = ["waiting"] * len(ops)
    fixed_left = [op.fixed_s for op in ops]
    bytes_left = [float(op.num_bytes) for op in ops]
    finish = [float("inf")] * len(ops)
    owned = set(world.owned)
    used, peak, over = list(world.base), list(world.base), False
    arrival: list[int] = []
    has_device: set[int] = set()
    now, idle = 0.0, 0
    rates: dict[frozenset[int], list[float]] = {}
    while idle < 3:
        moved = True
        while moved:  # everything that takes no time
            moved = False
            for i, op in enumerate(ops):
                if state[i] == "running" and fixed_left[i] <= step_s / 2 and bytes_left[i] <= 0:
                    state[i], finish[i], moved = "done", now, True
                    if op.released:
                        used[op.space] -= op.released
                    owned.discard(op.gives)
            for i, op in enumerate(ops):
                if state[i] == "waiting" and i not in arrival and all(state[b] == "done" for b in op.after):
                    arrival.append(i)
            for i in list(arrival):
                op = ops[i]
                if op.takes >= 0 and i not in has_device:
                    if op.takes in owned:
                        continue
                    owned.add(op.takes)
                    has_device.add(i)
                if op.acquired:
                    if used[op.space] + op.acquired > world.capacity[op.space]:
                        if blocking:
                            continue
                        over = True
                    used[op.space] += op.acquired
                    peak[op.space] = max(peak[op.space], used[op.space])
                arrival.remove(i)
                state[i], moved = "running", True
        flowing = frozenset(i for i, s in enumerate(state) if s == "running" and fixed_left[i] <= step_s / 2)
        if flowing not in rates:
            passes = [
                dict(zip(ops[i].ports, ops[i].weights or [1.0] * len(ops[i].ports), strict=True))
                for i in sorted(flowing)
            ]
            rates[flowing] = fill_ports(passes, world.ports)
        for i, rate in zip(sorted(flowing), rates[flowing], strict=True):
            bytes_left[i] -= rate * step_s
        for i, s in enumerate(state):
            if s == "running" and i not in flowing:
                fixed_left[i] -= step_s
        idle = 0 if "running" in state else idle + 1
        now += step_s
    return finish, peak, over
