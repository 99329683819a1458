"""Max-min fair rates of transfers that share ports, and how far each has come.

A transfer's rate is the same at all of its ports. Rates are raised together until a port is full; its transfers keep
what they have, and the rest goes on (progressive filling): the only allocation in which nobody can gain but at the cost
of one that has no more.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from nereus.sim.job import FloatArray, IntArray

#: Shares that differ by less (relatively) are one level; they differ by rounding only.
_SAME = 1e-12
#: Up to so many transfers, lists are faster than arrays.
_FEW = 40


def max_min_rates(ports: IntArray, weights: FloatArray, capacity: FloatArray) -> FloatArray:
    """Rates of transfers ``[n]``; ``ports`` and ``weights`` are ``[n, ports of one]``, port -1: none; infinite where a
    transfer passes no port.

    Every round fills all ports at once that are the narrowest for each of their transfers, so there are as many rounds
    as levels that depend on each other, each O(n).
    """
    num_ports = len(capacity)
    ports = np.where(ports < 0, num_ports, ports)
    weights = np.where(ports == num_ports, 0.0, weights)
    left = np.append(capacity, np.inf)
    rates = np.full(len(ports), np.inf)
    rows = np.flatnonzero((weights > 0).any(axis=1))
    while len(rows):
        at, weight = ports[rows], weights[rows]
        load = np.bincount(at.ravel(), weights=weight.ravel(), minlength=num_ports + 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(load > 0, left / load, np.inf)
        narrowest = share[at].min(axis=1)
        lowest = np.full(num_ports + 1, np.inf)
        np.minimum.at(lowest, at, narrowest[:, None])
        full = lowest >= share * (1 - _SAME)
        done = (full[at] & (share[at] <= narrowest[:, None] * (1 + _SAME)) & (weight > 0)).any(axis=1)
        rates[rows[done]] = narrowest[done]
        used = np.bincount(
            at[done].ravel(), weights=(weight[done] * narrowest[done][:, None]).ravel(), minlength=len(left)
        )
        left = np.maximum(left - used, 0.0)
        rows = rows[~done]
    return rates


def few_rates(passes: Sequence[Sequence[tuple[int, float]]], capacity: Sequence[float]) -> list[float]:
    """The same for a handful of transfers, without arrays: ``passes[i]`` are the (port, weight) of transfer i."""
    if len(passes) == 1:
        return [min((capacity[port] / weight for port, weight in passes[0]), default=np.inf)]
    left: dict[int, float] = {}
    members: dict[int, list[int]] = {}
    load: dict[int, float] = {}
    open_on: dict[int, int] = {}  # how many of a port's transfers have no rate yet
    for i, of_one in enumerate(passes):
        for port, weight in of_one:
            if port in load:
                load[port] += weight
                open_on[port] += 1
                members[port].append(i)
            else:
                load[port], left[port], members[port], open_on[port] = weight, capacity[port], [i], 1
    rates = [-1.0 if of_one else np.inf for of_one in passes]
    while load:
        narrow, share = -1, np.inf
        for port, weight in load.items():
            if left[port] < share * weight:
                narrow, share = port, left[port] / weight
        for i in members[narrow]:
            if rates[i] >= 0:
                continue
            rates[i] = share
            for port, weight in passes[i]:
                if port == narrow:
                    continue
                left[port] = max(left[port] - share * weight, 0.0)
                load[port] -= weight
                open_on[port] -= 1
                if not open_on[port]:
                    del load[port]
        del load[narrow]
    return rates


class Fluid(Protocol):
    """Transfers under way. ``refresh`` shares the ports anew; until then who has joined waits, and what one that has
    left had is nobody's."""

    def join(self, op: int, now: float) -> None: ...

    def leave(self, op: int) -> None: ...

    def refresh(self, now: float) -> None: ...

    def next_end(self) -> float:
        """When the next transfer ends if nothing changes; infinite where none is under way."""
        ...

    def pop_until(self, time: float) -> list[int]:
        """Transfers that end by then."""
        ...


class FewFluid:
    """For small jobs: only transfers that are connected with a change by shared ports are shared anew.

    A change costs O(c log n) for c connected transfers.
    """

    def __init__(self, ports: IntArray, weights: FloatArray, capacity: FloatArray, work: FloatArray) -> None:
        self._passes = [
            tuple((p, w) for p, w in zip(of_one, weight, strict=True) if p >= 0 and w > 0)
            for of_one, weight in zip(ports.tolist(), weights.tolist(), strict=True)
        ]
        self._columns = ports, weights, capacity
        self._capacity: list[float] = capacity.tolist()
        self._left: list[float] = work.tolist()
        self._rate = [0.0] * len(self._left)
        self._since = [0.0] * len(self._left)
        self._version = [0] * len(self._left)
        self._on_port: dict[int, dict[int, None]] = {}
        self._changed: dict[int, None] = {}  # ports
        self._alone: list[int] = []  # joined, and pass no port
        self._ends: list[tuple[float, int, int]] = []

    def join(self, op: int, now: float) -> None:
        self._since[op] = now
        if not self._passes[op]:
            self._alone.append(op)
        for port, _ in self._passes[op]:
            self._on_port.setdefault(port, {})[op] = None
            self._changed[port] = None

    def leave(self, op: int) -> None:
        self._version[op] += 1
        for port, _ in self._passes[op]:
            del self._on_port[port][op]
            self._changed[port] = None

    def refresh(self, now: float) -> None:
        for op in self._alone:
            heapq.heappush(self._ends, (now, op, self._version[op]))
        self._alone.clear()
        seen: set[int] = set()
        for port in self._changed:
            if port not in seen:
                self._share(self._connected(port, seen), now)
        self._changed.clear()

    def _connected(self, port: int, seen: set[int]) -> list[int]:
        found: dict[int, None] = {}
        stack = [port]
        seen.add(port)
        while stack:
            for op in self._on_port.get(stack.pop(), ()):
                if op not in found:
                    found[op] = None
                    for other, _ in self._passes[op]:
                        if other not in seen:
                            seen.add(other)
                            stack.append(other)
        return list(found)

    def _share(self, ops: list[int], now: float) -> None:
        if len(ops) > _FEW:
            ports, weights, capacity = self._columns
            rates = max_min_rates(ports[ops], weights[ops], capacity).tolist()
        else:
            rates = few_rates([self._passes[op] for op in ops], self._capacity)
        for op, rate in zip(ops, rates, strict=True):
            left = max(self._left[op] - self._rate[op] * (now - self._since[op]), 0.0)
            self._left[op], self._since[op] = left, now
            if rate != self._rate[op]:
                self._rate[op] = rate
                self._version[op] += 1
                if rate > 0:
                    heapq.heappush(self._ends, (now + left / rate, op, self._version[op]))

    def next_end(self) -> float:
        ends = self._ends
        while ends and ends[0][2] != self._version[ends[0][1]]:
            heapq.heappop(ends)
        return ends[0][0] if ends else np.inf

    def pop_until(self, time: float) -> list[int]:
        found = []
        while self.next_end() <= time:
            found.append(heapq.heappop(self._ends)[1])
        return found


class ManyFluid:
    """For large jobs: all transfers under way are shared anew, with arrays. A refresh costs O(a log a) for a transfers
    under way, whatever the number of changes since the last one."""

    def __init__(self, ports: IntArray, weights: FloatArray, capacity: FloatArray, work: FloatArray) -> None:
        self._ports, self._weights, self._capacity = ports, weights, capacity
        self._left = work.copy()
        self._rate = np.zeros(len(work))
        self._since = np.zeros(len(work))
        self._active: dict[int, None] = {}
        self._ends: list[tuple[float, int]] = []  # the next one last

    def join(self, op: int, now: float) -> None:
        self._active[op] = None
        self._since[op] = now

    def leave(self, op: int) -> None:
        del self._active[op]

    def refresh(self, now: float) -> None:
        ops = np.fromiter(self._active, dtype=np.int64, count=len(self._active))
        left = np.maximum(self._left[ops] - self._rate[ops] * (now - self._since[ops]), 0.0)
        rate = max_min_rates(self._ports[ops], self._weights[ops], self._capacity)
        self._left[ops], self._since[ops], self._rate[ops] = left, now, np.where(np.isinf(rate), 0.0, rate)
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = np.where(np.isinf(rate) | (left <= 0), now, now + left / rate)
        order = np.lexsort((ops, ends))[::-1]
        self._ends = list(zip(ends[order].tolist(), ops[order].tolist(), strict=True))

    def next_end(self) -> float:
        return self._ends[-1][0] if self._ends else np.inf

    def pop_until(self, time: float) -> list[int]:
        found = []
        while self._ends and self._ends[-1][0] <= time:
            found.append(self._ends.pop()[1])
        return found
