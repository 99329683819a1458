"""route: which place sends what to whom.

Node first: a node that lacks bytes takes each of them in once, in one stripe per wanter, and exchanges the stripes
inside. Nothing ends before the lower bound, so every port is filled up to it before another is tried: holders by their
load, then nodes that receive the same bytes (relays, which the schedule pipelines slice by slice), the shallowest
first. All moves of one demand together carry each of its bytes to each wanter once, so moved bytes equal the bound for
the placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nereus.ir.intervals import Intervals
from nereus.ir.transition import INTER, LOCAL, Move
from nereus.ir.units import MIB
from nereus.passes.bound import Bounds, bounds
from nereus.passes.class_order import ClassOrder, class_order
from nereus.passes.diff import Demand, Diff
from nereus.passes.diff_flows import DiffFlows
from nereus.passes.hops import Hop
from nereus.passes.links import Links
from nereus.passes.relays import Ports, Relays, Taken
from nereus.passes.stripes import Stripe, to_moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    moves: tuple[Move, ...]
    ports: Ports
    links: Links
    bound: Bounds
    foregone_bytes: int  # of moves that deriving would have spared


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """``min_stripe_bytes``: stripes smaller than this are not cut further. ``flow_bound``: where routing does not come
    within so many percent of the bound of single ports, the better bound of the flow programme is worked out (0:
    never)."""

    min_stripe_bytes: int = 1 * MIB
    flow_bound: int = 1

    name = "route"

    def apply(self, diff: Diff) -> Routed:
        routed = _Router(self, diff).run()
        near = 1 + self.flow_bound / 100
        if not self.flow_bound or routed.ports.busiest_s <= routed.bound.transfer_s * near:
            return routed
        # Linear programming takes longer to import than most plans to compile, and few need it.
        from nereus.passes.flow_bound import diff_flow_bound
        from nereus.passes.split_flows import split_diff

        flow = diff_flow_bound(diff, routed.links)
        bound = routed.bound
        if flow.transfer_s > bound.transfer_s:
            bound = replace(bound, transfer_s=flow.transfer_s, limited_by=flow.limited_by, prices=flow.prices)
        if routed.ports.busiest_s > bound.transfer_s * near and diff.topology.num_devices <= MAX_SPLIT_DEVICES:
            flows, hops = split_diff(diff, routed.links, least_bytes=self.min_stripe_bytes)
            other = _Router(self, diff).follow(flows, hops)
            if _expected_s(other) < _expected_s(routed):
                routed = other
        return replace(routed, bound=bound)


#: Up to so many GPUs the flow programme's own shares are tried where the router does not come near the bound.
MAX_SPLIT_DEVICES = 256
#: Waves into which a transfer is cut about: what a sending more costs.
_WAVES = 64
#: A relay is taken for a holder where its port is less loaded by more than the target / this, per sending more.
_DEPTH_COSTS = 4


def _expected_s(routed: Routed) -> float:
    depth = max(relay_depths(routed.moves), default=0)
    return routed.ports.busiest_s * (1 + depth / _WAVES)


def relay_depths(moves: Sequence[Move]) -> list[int]:
    """How many moves, itself included, bring a move's bytes from their holder."""
    depth: list[int] = []
    for move in moves:
        depth.append(1 + max((depth[before] for before in move.after), default=0))
    return depth


class _Router:
    def __init__(self, options: Route, diff: Diff) -> None:
        self.options = options
        self.diff = diff
        self.links = Links(diff.topology)
        self.num_devices = self.links.num_devices
        self.bound = bounds(diff, self.links)
        self.target_s = self.bound.transfer_s
        devices, nodes = diff.topology.num_devices, len(diff.topology.nodes)
        self.ports = Ports(gpu_out=[0.0] * devices, gpu_in=[0.0] * devices, nic_out=[0.0] * nodes, nic_in=[0.0] * nodes)
        self.stripes: list[Stripe] = []
        self.widths = [table.element_bytes for table in diff.tables]
        self.sizes = [table.stop - table.start for table in diff.tables]
        self.regions: list[Intervals] = []
        self.orders: dict[tuple[int, int], ClassOrder] = {}
        self.relays: dict[int, Relays] = {}  # by region (a class)
        self.holders_by_node: dict[tuple[int, int], dict[int, list[int]]] = {}

    def follow(self, found: DiffFlows, hops: Sequence[Hop]) -> Routed:
        """What the flow programme decided."""
        for table, rows in zip(found.tables, found.intervals, strict=True):
            of = self.diff.tables[table]
            self.regions.append(Intervals(of.cell[rows], of.start[rows], of.stop[rows]))
        for hop in hops:
            self._add(hop.src, hop.dst, found.tables[hop.atom], hop.atom, hop.lo, hop.hi, hop.parent)
        return self._routed()

    def run(self) -> Routed:
        for demand in self._order():
            self._route(demand)
        return self._routed()

    def _routed(self) -> Routed:
        moves = to_moves(self.stripes, self.regions, self.widths)
        return Routed(
            moves=tuple(moves),
            ports=self.ports,
            links=self.links,
            bound=self.bound,
            foregone_bytes=self.diff.foregone.moved_bytes,
        )

    def _order(self) -> list[Demand]:
        """Bytes that several nodes want go to one of them first, which can then relay them: to the one that had least
        to send so far. What can come from few holders goes before what has a choice, large before small."""
        by_class: dict[tuple[int, int], list[Demand]] = {}
        for demand in self.diff.demands:
            by_class.setdefault((demand.table, demand.cls), []).append(demand)
        first: list[Demand] = []
        rest: list[Demand] = []
        expected = [0] * len(self.ports.nic_out)  # bytes that each node holds for others, or is to relay
        for key, demands in by_class.items():
            self.orders[key] = self._class_order(demands)
            holders = self._holders(demands[0])
            for node in holders:
                expected[node] += max(d.num_bytes for d in demands) // len(holders)
        for demands in sorted(by_class.values(), key=lambda ds: (-ds[0].num_bytes, ds[0].table, ds[0].cls)):
            outside = [d for d in demands if d.node not in self._holders(d)]
            rest += (d for d in demands if d.node in self._holders(d))
            if outside:
                chosen = min(outside, key=lambda d: (-d.num_bytes, expected[d.node], d.node))
                expected[chosen.node] += chosen.num_bytes * (len(outside) - 1)
                first.append(chosen)
                rest += (d for d in outside if d is not chosen)

        def rank(demand: Demand) -> tuple[object, ...]:
            few = min(len(self._holders(demand)), 2)
            return few, -demand.num_bytes, demand.table, demand.cls, demand.node, demand.wanters

        return [*sorted(first, key=rank), *sorted(rest, key=rank)]

    def _class_order(self, demands: list[Demand]) -> ClassOrder:
        table = self.diff.tables[demands[0].table]
        order = class_order(len(self.regions), [d.intervals for d in demands])
        self.regions.append(Intervals(table.cell[order.rows], table.start[order.rows], table.stop[order.rows]))
        return order.with_sizes(self.sizes[demands[0].table])

    def _ranges(self, demand: Demand) -> tuple[int, list[tuple[int, int]]]:
        """The region (all of the demand's class) and what the demand lacks of it, as ranges of its elements."""
        order = self.orders[demand.table, demand.cls]
        return order.region, order.ranges(demand.intervals)

    def _holders(self, demand: Demand) -> dict[int, list[int]]:
        key = (demand.table, demand.cls)
        if key not in self.holders_by_node:
            by_node: dict[int, list[int]] = {}
            for place in self.diff.holders[demand.table][demand.cls]:
                by_node.setdefault(self.links.node(place), []).append(place)
            self.holders_by_node[key] = by_node
        return self.holders_by_node[key]

    def _route(self, demand: Demand) -> None:
        """Wanters in one host memory are one: each takes in a part and copies the others' from each other."""
        gpus = tuple(place for place in demand.wanters if place < self.num_devices)
        hosts = demand.wanters[len(gpus) :]  # ascending: host places follow the GPUs
        region, ranges = self._ranges(demand)
        for lo, hi in ranges:
            if len(hosts) < 2:
                self._deliver(demand, region, demand.wanters, lo, hi)
                continue
            if gpus:
                self._deliver(demand, region, gpus, lo, hi)
            arrived: list[tuple[int, range]] = []
            for at, host in enumerate(hosts):
                first = len(self.stripes)
                a, b = (lo + (hi - lo) * i // len(hosts) for i in (at, at + 1))
                self._deliver(demand, region, (host,), a, b)
                arrived.append((host, range(first, len(self.stripes))))
            for source, numbers in arrived:
                for number in numbers:
                    stripe = self.stripes[number]
                    if stripe.dst == source:
                        for other in hosts:
                            if other != source:
                                self._add(source, other, demand.table, region, stripe.lo, stripe.hi, number)

    def _deliver(self, demand: Demand, region: int, wanters: tuple[int, ...], lo: int, hi: int) -> None:
        """Elements ``lo..hi`` of the region to every one of ``wanters``."""
        if hi <= lo:
            return
        holders = self._holders(demand)
        inside = holders.get(demand.node)
        count = len(wanters)
        num_bytes = (hi - lo) * self.widths[demand.table]
        if inside is not None and not self._scatter_inside(demand, inside, wanters, num_bytes):
            for wanter in wanters:
                for a, b, source in self._fill(inside, wanter, demand.table, lo, hi):
                    self._add(source, wanter, demand.table, region, a, b, -1)
            return
        shares = [(lo, hi)]
        if num_bytes >= self.options.min_stripe_bytes * count:
            shares = [(lo + (hi - lo) * i // count, lo + (hi - lo) * (i + 1) // count) for i in range(count)]
        # Single stripes should not pile up on one wanter.
        first = min(range(count), key=lambda i: (self._in_load(wanters[i]), i)) if len(shares) == 1 else 0
        taken: list[Taken] = []
        for index, (a, b) in enumerate(shares):
            wanter = wanters[(first + index) % count]
            if inside is not None:
                for x, y, source in self._fill(inside, wanter, demand.table, a, b):
                    number = self._add(source, wanter, demand.table, region, x, y, -1)
                    taken.append(Taken(wanter, demand.node, x, y, number, 1))
            else:
                taken += self._take_in(demand, region, holders, wanter, a, b)
        for part in taken:
            for wanter in wanters:
                if wanter != part.place:
                    self._add(part.place, wanter, demand.table, region, part.lo, part.hi, part.stripe)
        if inside is None:
            if region not in self.relays:
                self.relays[region] = Relays(self.regions[region].numel)
            self.relays[region].add(taken)

    def _scatter_inside(self, demand: Demand, inside: list[int], wanters: tuple[int, ...], num_bytes: int) -> bool:
        """Whether the node's holders had better send each wanter a part, to be exchanged: where sending all to all
        would keep one of them busy beyond the target."""
        if len(wanters) <= len(inside) or num_bytes < self.options.min_stripe_bytes * len(wanters):
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
        width, least = self.widths[table], self.options.min_stripe_bytes
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

    def _take_in(
        self, demand: Demand, region: int, holders: dict[int, list[int]], wanter: int, lo: int, hi: int
    ) -> list[Taken]:
        """Bring elements ``lo..hi`` from other nodes to ``wanter``."""
        result: list[Taken] = []
        # Parts that are small against the stripe cost more messages than the balance that they buy.
        least = max(self.options.min_stripe_bytes // self.widths[demand.table], (hi - lo) // 4, 1)
        while lo < hi:
            source, stop, parent, depth = self._source(demand, region, holders, lo, hi, least)
            number = self._add(source, wanter, demand.table, region, lo, stop, parent)
            result.append(Taken(wanter, demand.node, lo, stop, number, depth))
            lo = stop
        return result

    def _source(
        self, demand: Demand, region: int, holders: dict[int, list[int]], lo: int, hi: int, least: int
    ) -> tuple[int, int, int, int]:
        """(place, how far it sends, stripe that it relays or -1, depth) for the elements from ``lo``."""
        width, nic, pcie = self.widths[demand.table], self.links.nic, self.links.pcie
        busy = self.ports.nic_out
        least = min(least, hi - lo)
        node = min(holders, key=busy.__getitem__)
        places = holders[node]
        place = places[0] if len(places) == 1 else min(places, key=lambda p: (self._out_load(p), p))
        rate, gpu_rate = max(nic[node], nic[demand.node]) * width, pcie[node] * width
        relays = self.relays.get(region)
        while True:
            target = self.target_s
            #: A sending more delays the end by a slice: worth it only for a port that is clearly less loaded.
            deeper_s = target / _DEPTH_COSTS
            load = max(busy[node], self._out_load(place))
            room = int(min((target - busy[node]) / rate, (target - self._out_load(place)) / gpu_rate))
            best: tuple[float, int, int, int, int] | None = None
            if room >= least:
                best = (load, place, hi if hi - lo - room < least else lo + room, -1, 1)
            for load, part in relays.open_at(lo, self.ports, target) if relays is not None else ():
                cost = load + part.depth * deeper_s
                if part.node == demand.node or (best is not None and cost >= best[0]):
                    continue
                each = max(nic[part.node], nic[demand.node]) * width
                room = int(min((target - busy[part.node]) / each, (target - load) / (pcie[part.node] * width)))
                stop = min(part.hi, hi, lo + room)
                if stop - lo >= least:
                    best = (cost, part.place, stop, part.stripe, part.depth + 1)
            if best is not None:
                return best[1:]
            # No port ends in time: all of them must last longer.
            self.target_s *= 1.02

    def _out_load(self, place: int) -> float:
        return self.ports.gpu_out[place % self.num_devices]

    def _in_load(self, place: int) -> float:
        return self.ports.gpu_in[place % self.num_devices]

    def _add(self, src: int, dst: int, table: int, region: int, lo: int, hi: int, parent: int) -> int:
        num_bytes = (hi - lo) * self.widths[table]
        link, out_rate, in_rate, nic_rate = self.links.rates(src, dst)
        ports, num_devices = self.ports, self.num_devices
        ports.gpu_out[src % num_devices] += num_bytes * out_rate
        ports.gpu_in[dst % num_devices] += num_bytes * in_rate
        if link == INTER:
            ports.nic_out[self.links.node(src)] += num_bytes * nic_rate
            ports.nic_in[self.links.node(dst)] += num_bytes * nic_rate
        self.stripes.append(Stripe(src, dst, table, region, lo, hi, link, parent))
        return len(self.stripes) - 1
