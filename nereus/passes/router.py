"""The router: one demand at a time.

Node first: a node that lacks bytes takes each of them in once, in one stripe per wanter, and exchanges the stripes
inside. Nothing ends before the lower bound, so every port is filled up to it before another is tried: holders by their
load, then nodes that receive the same bytes (relays, which the schedule pipelines slice by slice), the shallowest
first. All moves of one demand together carry each of its bytes to each wanter once, so moved bytes equal the bound for
the placement.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from nereus.ir.layout import IntArray
from nereus.ir.transition import INTER, LINK_NUMBER, LOCAL
from nereus.passes.bound import bounds
from nereus.passes.class_order import ClassOrder, class_order
from nereus.passes.demands import Demand
from nereus.passes.diff import Diff
from nereus.passes.links import Links
from nereus.passes.relays import HolderRails, Ports, Relays, Taken
from nereus.passes.senders import Loads, Relayable
from nereus.passes.stripes import Stripe, Stripes

#: A relay is taken for a holder where its port is less loaded by more than the target / this, per sending more.
DEPTH_COSTS = 4


@dataclass(frozen=True, slots=True)
class Class:
    """What demands of one class have in common. ``holders``, ``by_rail``: places by node, and by rail. ``taken``: what
    many at once took in and ``relays`` has not heard of."""

    region: int
    order: ClassOrder
    holders: dict[int, list[int]]
    by_rail: dict[int, list[int]]
    rails: HolderRails
    relays: Relays | None  # None where nobody else wants what one takes in
    taken: list[Relayable]


class Router:
    """``min_stripe_bytes``: stripes smaller than this are not cut further. ``depth_costs``: see ``DEPTH_COSTS``."""

    def __init__(self, diff: Diff, min_stripe_bytes: int, depth_costs: int) -> None:
        self.min_stripe_bytes, self.depth_costs = min_stripe_bytes, depth_costs
        self.diff = diff
        self.links = Links(diff.topology)
        self.num_devices = self.links.num_devices
        self.bound = bounds(diff, self.links)
        self.target_s = self.bound.transfer_s
        devices, rails = diff.topology.num_devices, len(self.links.rail)
        self.ports = Ports(gpu_out=[0.0] * devices, gpu_in=[0.0] * devices, nic_out=[0.0] * rails, nic_in=[0.0] * rails)
        self.stripes = Stripes()
        self.widths = [table.element_bytes for table in diff.tables]
        self.sizes = [table.stop - table.start for table in diff.tables]
        self.regions: list[tuple[int, IntArray]] = []  # table, interval numbers of it
        self.region_holders: list[tuple[int, ...]] = []  # of the class that each region is of

    def _class(self, rows: IntArray, places: IntArray) -> Class:
        """``rows``: demands of the class; ``places``: who holds it."""
        demands = self.diff.demands
        table = int(demands.table[rows[0]])
        needs = dict.fromkeys(demands.need[rows].tolist())
        order = class_order([demands.needs[need] for need in needs], self.sizes[table])
        self.regions.append((table, order.rows))
        self.region_holders.append(tuple(places.tolist()))
        holders: dict[int, list[int]] = {}
        by_rail = holders if len(self.links.rail) == len(self.links.nic) else {}
        node_of, rail_of, num_devices = self.links.node_of, self.links.rail_of, self.num_devices
        for place in places.tolist():
            holders.setdefault(node_of[place % num_devices], []).append(place)
            if by_rail is not holders:
                by_rail.setdefault(rail_of[place % num_devices], []).append(place)
        return Class(
            region=len(self.regions) - 1,
            order=order,
            holders=holders,
            by_rail=by_rail,
            rails=HolderRails(by_rail, self.ports.nic_out),
            relays=Relays(order.numel, self.ports) if len(rows) > 1 else None,
            taken=[],
        )

    def _route(self, demand: Demand, of: Class) -> None:
        """Wanters in one host memory are one: each takes in a part and copies the others' from each other; or, where
        parts would be small, one takes in all."""
        num_gpus = bisect_left(demand.wanters, self.num_devices)  # ascending: host places follow the GPUs
        gpus, hosts = demand.wanters[:num_gpus], demand.wanters[num_gpus:]
        region = of.region
        for lo, hi in of.order.ranges(demand.intervals):
            if len(hosts) < 2:
                self._deliver(demand, of, demand.wanters, lo, hi)
                continue
            if gpus:
                self._deliver(demand, of, gpus, lo, hi)
            takers = hosts
            if (hi - lo) * self.widths[demand.table] < self.min_stripe_bytes * len(hosts):
                takers = (min(hosts, key=self._in_load),)
            arrived: list[tuple[int, range]] = []
            for at, host in enumerate(takers):
                first = len(self.stripes)
                a, b = (lo + (hi - lo) * i // len(takers) for i in (at, at + 1))
                self._deliver(demand, of, (host,), a, b)
                arrived.append((host, range(first, len(self.stripes))))
            for source, numbers in arrived:
                for number in numbers:
                    stripe = self.stripes.since(number)[0]
                    if stripe.dst == source:
                        for other in hosts:
                            if other != source:
                                self._add(source, other, demand.table, region, stripe.lo, stripe.hi, number)

    def _deliver(self, demand: Demand, of: Class, wanters: tuple[int, ...], lo: int, hi: int) -> None:
        """Elements ``lo..hi`` of the class's region to every one of ``wanters``."""
        if hi <= lo:
            return
        region = of.region
        inside = of.holders.get(demand.node)
        count = len(wanters)
        num_bytes = (hi - lo) * self.widths[demand.table]
        if inside is not None and not self._scatter_inside(demand, inside, wanters, num_bytes):
            for wanter in wanters:
                for a, b, source in self._fill(inside, wanter, demand.table, lo, hi):
                    self._add(source, wanter, demand.table, region, a, b, -1)
            return
        shares = [(lo, hi)]
        if count > 1 and num_bytes >= self.min_stripe_bytes * count:
            shares = [(lo + (hi - lo) * i // count, lo + (hi - lo) * (i + 1) // count) for i in range(count)]
        # Single stripes should not pile up on one wanter.
        first = 0
        if count > len(shares):
            first = min(range(count), key=lambda i: (self._in_load(wanters[i]), i))
        taken: list[Taken] = []
        for index, (a, b) in enumerate(shares):
            wanter = wanters[(first + index) % count]
            if inside is not None:
                for x, y, source in self._fill(inside, wanter, demand.table, a, b):
                    number = self._add(source, wanter, demand.table, region, x, y, -1)
                    taken.append(Taken(wanter, demand.node, self.links.rail_number(wanter), x, y, number, 1))
            else:
                taken += self._take_in(demand.table, demand.node, of, wanter, a, b)
        self._exchange(demand.table, of, taken, wanters)
        if inside is None and of.relays is not None:
            of.relays.add(taken)

    def _exchange(self, table: int, of: Class, taken: Iterable[Taken], wanters: Sequence[int]) -> None:
        for part in taken:
            for wanter in wanters:
                if wanter != part.place:
                    self._add(part.place, wanter, table, of.region, part.lo, part.hi, part.stripe)

    def _scatter_inside(self, demand: Demand, inside: list[int], wanters: tuple[int, ...], num_bytes: int) -> bool:
        """Whether the node's holders had better send each wanter a part, to be exchanged: where sending all to all
        would keep one of them busy beyond the target."""
        if len(wanters) <= len(inside) or num_bytes < self.min_stripe_bytes * len(wanters):
            return False
        if any(place >= self.num_devices for place in wanters):
            return False
        each_s = max(self.links.rates(place, wanters[0])[1] for place in inside)
        seconds = num_bytes * each_s * -(-len(wanters) // len(inside))
        return min(self._out_load(place) for place in inside) + seconds > self.target_s

    def _fill(self, places: list[int], wanter: int, table: int, lo: int, hi: int) -> Iterable[tuple[int, int, int]]:
        """(lo, hi, source): from the nearest holder in the wanter's node; what would keep it busy beyond the target
        comes from the next."""
        if len(places) == 1:
            yield lo, hi, places[0]
            return
        width, least = self.widths[table], self.min_stripe_bytes
        order = sorted(places, key=lambda p: self._nearness(p, wanter))
        for source in order[:-1]:
            rate = self.links.rates(source, wanter)[1] * width
            if rate == 0.0:
                yield lo, hi, source
                return
            room = int((self.target_s - self.ports.gpu_out[source % self.num_devices]) / rate)
            if room >= hi - lo:
                yield lo, hi, source
                return
            if room * width >= least:
                yield lo, lo + room, source
                lo += room
        yield lo, hi, min(order, key=lambda p: self._nearness(p, wanter))

    def _nearness(self, place: int, wanter: int) -> tuple[bool, float, int]:
        """In the wanter's own memory space first, then by load."""
        return (
            self.links.link(place, wanter) != LOCAL,
            self.ports.gpu_out[place % self.num_devices],
            (place - wanter) % (2 * self.num_devices),
        )

    def _take_in(self, table: int, node: int, of: Class, wanter: int, lo: int, hi: int) -> list[Taken]:
        """Bring elements ``lo..hi`` from other nodes to ``wanter`` in ``node``."""
        if of.relays is not None:
            for many in of.taken:
                of.relays.add(many.rows(self.links.node_of))
            of.taken.clear()
        result: list[Taken] = []
        # Parts that are small against the stripe cost more messages than the balance that they buy.
        least = max(self.min_stripe_bytes // self.widths[table], (hi - lo) // 4, 1)
        while lo < hi:
            source, stop, parent, depth = self._source(table, node, of, lo, hi, least)
            number = self._add(source, wanter, table, of.region, lo, stop, parent)
            result.append(Taken(wanter, node, self.links.rail_number(wanter), lo, stop, number, depth))
            lo = stop
        return result

    def _source(self, table: int, node: int, of: Class, lo: int, hi: int, least: int) -> tuple[int, int, int, int]:
        """(place, how far it sends, stripe that it relays or -1, depth) for the elements from ``lo``."""
        width, rails, pcie = self.widths[table], self.links.rail, self.links.pcie
        busy = self.ports.nic_out
        least = min(least, hi - lo)
        rail = of.rails.least()
        places = of.by_rail[rail]
        # Ascending, so among equals the first place.
        place = places[0] if len(places) == 1 else min(places, key=self._out_load)
        out = self._out_load(place)
        rate, gpu_rate = rails[rail] * width, pcie[self.links.node(place)] * width
        while True:
            target = self.target_s
            #: A sending more delays the end by a slice: worth it only for a port that is clearly less loaded.
            deeper_s = target / self.depth_costs
            room = int(min((target - busy[rail]) / rate, (target - out) / gpu_rate))
            best: tuple[int, int, int, int] | None = None
            below = inf
            if room >= least:
                best, below = (place, hi if hi - lo - room < least else lo + room, -1, 1), max(busy[rail], out)
            for load, part in of.relays.cheapest(lo, target, deeper_s, below) if of.relays is not None else ():
                if part.node == node:
                    continue
                each = rails[part.rail] * width
                room = int(min((target - busy[part.rail]) / each, (target - load) / (pcie[part.node] * width)))
                stop = min(part.hi, hi, lo + room)
                if stop - lo >= least:
                    best = part.place, stop, part.stripe, part.depth + 1
                    break
            if best is not None:
                return best
            # No port ends in time: all of them must last longer.
            self.target_s *= 1.02

    def _out_load(self, place: int) -> float:
        return self.ports.gpu_out[place % self.num_devices]

    def _in_load(self, place: int) -> float:
        """Of its own port, and of its rail where others of the node have another."""
        load = self.ports.gpu_in[place % self.num_devices]
        if self.diff.topology.nodes[self.links.node(place)].rails > 1:
            load = max(load, self.ports.nic_in[self.links.rail_number(place)])
        return load

    def _add(self, src: int, dst: int, table: int, region: int, lo: int, hi: int, parent: int) -> int:
        num_bytes = (hi - lo) * self.widths[table]
        link, out_rate, in_rate, nic_rate = self.links.rates(src, dst)
        ports, num_devices = self.ports, self.num_devices
        if link != LOCAL:
            ports.gpu_out[src % num_devices] += num_bytes * out_rate
            ports.gpu_in[dst % num_devices] += num_bytes * in_rate
        if link == INTER:
            rail, rail_of = self.links.rail, self.links.rail_of
            ports.nic_out[rail_of[src % num_devices]] += num_bytes * nic_rate
            ports.nic_in[rail_of[dst % num_devices]] += num_bytes * rail[rail_of[dst % num_devices]]
        return self.stripes.add(Stripe(src, dst, table, region, lo, hi, LINK_NUMBER[link], parent))

    def _add_all(
        self,
        src: IntArray,
        dst: IntArray,
        table: IntArray | int,
        region: IntArray | int,
        lo: int,
        hi: IntArray | int,
        parent: IntArray | int,
        loads: Loads | None = None,
    ) -> int:
        """``_add`` of many; the number of the first. ``loads`` are kept with the ports'."""
        rates = self.links.rates_of(src, dst)
        num_bytes = (hi - lo) * np.array(self.widths, dtype=np.int64)[table]
        at, to = src % self.num_devices, dst % self.num_devices
        rail_of, ports = self.links.rails, self.ports
        for port, ends, seconds, known in (
            (ports.gpu_out, at, rates.gpu_out, loads.gpu_out if loads else None),
            (ports.gpu_in, to, rates.gpu_in, None),
            (ports.nic_out, rail_of[at], rates.nic_out, loads.nic_out if loads else None),
            (ports.nic_in, rail_of[to], rates.nic_in, None),
        ):
            busy = num_bytes * seconds
            some = np.flatnonzero(busy)
            for number, value in zip(ends[some].tolist(), busy[some].tolist(), strict=True):
                port[number] += value
            if known is not None:
                np.add.at(known, ends, busy)
        return self.stripes.extend(src, dst, table, region, lo, hi, rates.link, parent)
