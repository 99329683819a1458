"""Hetu (HotSPa): each slice from the least loaded holder, same node first.

Rules (PKU-DAIR/Hetu, ``switch_exec_graph``): the switch planner walks parameter by parameter and slice by slice. A
device that owns the slice copies it locally. Otherwise the sender is, among the owners in the receiver's node, the one
that has been given the least volume so far; only where the node has none, the least loaded of the remote owners. All
slices for one peer are packed into one buffer, all peers are served by one batched send/receive, and every new
parameter and every buffer is allocated at once. No placement: ranks as listed. A slice without a living owner is an
error. At most ``PORTIONS`` portions of a class are dealt out one by one.
"""

from __future__ import annotations

from nereus.ir.layout import IntArray
from nereus.sim.baselines.answer import Answer, Transfer, refusal
from nereus.sim.baselines.direct import lacks, lost, one_step, portions
from nereus.sim.baselines.problem import Problem

PORTIONS = 32


class LeastLoaded:
    name = "least loaded"
    system = "Hetu"

    def solve(self, problem: Problem) -> Answer:
        gone = lost(problem)
        if gone is not None:
            return refusal(self.name, problem, gone)
        links, devices = problem.links, problem.num_devices
        sent = [0] * (2 * devices)
        near_of: dict[tuple[tuple[int, ...], int], list[int]] = {}
        cut: tuple[IntArray | None, list[tuple[IntArray, int]]] = (None, [])
        transfers: list[Transfer] = []
        for lack in lacks(problem):
            node = links.node(lack.wanter)
            key = (lack.holders, node)
            if key not in near_of:
                near = [p for p in lack.holders if links.node(p) == node]
                near_of[key] = near or list(lack.holders)
            sources = near_of[key]
            if cut[0] is not lack.intervals:
                cut = (lack.intervals, portions(problem, lack.table, lack.intervals, PORTIONS))
            for intervals, num_bytes in cut[1]:
                source = min(sources, key=lambda p: (sent[p], p))
                sent[source] += num_bytes
                transfers.append(Transfer(source, lack.wanter, lack.table, intervals, num_bytes))
        return one_step(self.name, problem, transfers, in_place=False, packed=True)
