"""The router: many demands at once.

With replicated state a few classes have a demand in every node. Demands of one class and size are then routed together:
each takes in the same bytes, from holders and from whoever took them in before.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nereus.ir.layout import IntArray
from nereus.passes.diff import Diff
from nereus.passes.lists import Lists
from nereus.passes.router import Class, Router
from nereus.passes.senders import Loads, Relayable, Senders

#: At most such a part of them at once: what is taken in then can be relayed in the next.
PART = 1 / 16


class BulkRouter(Router):
    """``least``: fewer demands are routed one by one."""

    def __init__(self, diff: Diff, min_stripe_bytes: int, least: int, depth_costs: int) -> None:
        super().__init__(diff, min_stripe_bytes, depth_costs)
        self.least = max(least, 1)

    def _many(self, numbers: IntArray, of: Class) -> IntArray:
        """Demands of one class and size, as many together as can be, one a node; returns the others."""
        demands = self.diff.demands
        node, need, wanters = demands.node[numbers], demands.need[numbers], demands.wanters
        counts = wanters.counts[numbers]
        hosts = np.add.reduceat(wanters.item >= self.num_devices, wanters.first[:-1])[numbers]
        together = ~np.isin(node, np.array([*of.holders])) & (np.bincount(node)[node] == 1)
        for part in of.taken:
            together &= ~np.isin(node, self.links.nodes[part.place % self.num_devices])
        left = np.ones(len(numbers), dtype=bool)
        kinds, kind = np.unique(np.stack((need, counts, hosts))[:, together], axis=1, return_inverse=True)
        for at, (which, count, in_host) in enumerate(kinds.T.tolist()):
            rows = np.flatnonzero(together)[kind == at]
            ranges = of.order.ranges(demands.needs[which])
            if len(rows) < self.least or len(ranges) > 1:
                continue
            left[rows] = False
            chosen = numbers[rows]
            there = wanters.item[wanters.first[chosen][:, None] + np.arange(count)]
            # Wanters in one host memory are one, as below.
            for group in (there,) if in_host < 2 else (there[:, :-in_host], there[:, -in_host:]):
                self._deliver_many(chosen, of, group, *ranges[0])
        return numbers[left]

    def _deliver_many(self, numbers: IntArray, of: Class, wanters: IntArray, lo: int, hi: int) -> None:
        """Elements ``lo..hi`` from other nodes to all ``wanters`` ([demands, places of the node]): each takes in a part
        that the others get from it; where parts would be small, the least loaded takes in all."""
        count = wanters.shape[1]
        width = self.widths[int(self.diff.demands.table[numbers[0]])]
        if count > 1 and (hi - lo) * width < self.min_stripe_bytes * count:
            load = np.array(self.ports.gpu_in)[wanters % self.num_devices]
            several = np.array([node.rails > 1 for node in self.diff.topology.nodes])
            rail = np.array(self.ports.nic_in)[self.links.rails[wanters % self.num_devices]]
            load = np.where(several[self.links.nodes[wanters % self.num_devices]], np.maximum(load, rail), load)
            # The least loaded first.
            first = np.argmin(load, axis=1)
            order = (np.arange(count) + first[:, None]) % count
            self._take_in_many(numbers, of, np.take_along_axis(wanters, order, axis=1), lo, hi)
            return
        for at in range(count):
            a, b = (lo + (hi - lo) * i // count for i in (at, at + 1))
            self._take_in_many(numbers, of, np.roll(wanters, -at, axis=1), a, b)

    def _take_in_many(self, numbers: IntArray, of: Class, wanters: IntArray, lo: int, hi: int) -> None:
        """Elements ``lo..hi`` from other nodes to the first of each demand's ``wanters``, and from it to the others."""
        demands, links, table = self.diff.demands, self.links, int(self.diff.demands.table[numbers[0]])
        assert of.relays is not None
        num_bytes = (hi - lo) * self.widths[table]
        loads = Loads(
            nic_out=np.array(self.ports.nic_out),
            gpu_out=np.array(self.ports.gpu_out),
            rail_s=num_bytes * np.array(links.rail),
            gpu_s=num_bytes * np.array(links.pcie)[links.nodes],
        )
        holders = Senders(
            rail=np.array([*of.by_rail], dtype=np.int64),
            places=Lists.of_tuples([*of.by_rail.values()]),
            depth=np.zeros(len(of.by_rail), dtype=np.int64),
            stripe=np.full(len(of.by_rail), -1, dtype=np.int64),
        )
        part = max(self.least // 4, int(len(numbers) * PART), 1)
        begin = 0
        while begin < len(numbers):
            end = min(begin + part, len(numbers))
            senders = holders + Relayable.joined([Relayable.of_rows(of.relays.known), *of.taken]).senders(lo, hi)
            chosen, src = loads.choose(senders, end - begin, self.target_s, self.target_s / self.depth_costs)
            now = wanters[begin : begin + len(chosen)]
            first = self._add_all(src, now[:, 0], table, of.region, lo, hi, senders.stripe[chosen], loads)
            stripe = first + np.arange(len(chosen), dtype=np.int64)
            of.taken.append(
                Relayable(
                    place=now[:, 0],
                    rail=links.rails[now[:, 0] % self.num_devices],
                    lo=np.full_like(stripe, lo),
                    hi=np.full_like(stripe, hi),
                    stripe=stripe,
                    depth=senders.depth[chosen] + 1,
                )
            )
            for other in now.T[1:]:
                self._add_all(now[:, 0], other, table, of.region, lo, hi, stripe, loads)
            # Beyond what fits, parts of it or later ends are chosen one by one.
            for at in range(begin + len(chosen), end):
                there = wanters[at].tolist()
                taken = self._take_in(table, int(demands.node[numbers[at]]), of, there[0], lo, hi)
                self._exchange(table, of, taken, there)
                of.relays.add(taken)
            if len(chosen) < end - begin:
                loads = replace(loads, nic_out=np.array(self.ports.nic_out), gpu_out=np.array(self.ports.gpu_out))
            begin = end

    def _without_choice(self, numbers: IntArray, source: IntArray) -> None:
        """Demands of one wanter for what only ``source`` holds and nobody else wants."""
        demands, widths = self.diff.demands, np.array(self.widths, dtype=np.int64)
        table, wanter = demands.table[numbers], demands.wanters.item[demands.wanters.first[numbers]]
        region = len(self.regions) + np.arange(len(numbers), dtype=np.int64)
        for of, need in zip(table.tolist(), demands.need[numbers].tolist(), strict=True):
            self.regions.append((of, demands.needs[need]))
        self.region_holders += [(place,) for place in source.tolist()]
        self._add_all(source, wanter, table, region, 0, demands.num_bytes[numbers] // widths[table], -1)
