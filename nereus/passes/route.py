"""route: which place sends what to whom.

Node first: a node that lacks bytes takes each of them in once, in one stripe per wanter, and exchanges the stripes
inside. Nothing ends before the lower bound, so every port is filled up to it before another is tried: holders by their
load, then nodes that receive the same bytes (relays, which the schedule pipelines slice by slice), the shallowest
first. All moves of one demand together carry each of its bytes to each wanter once, so moved bytes equal the bound for
the placement.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter

from nereus.ir.layout import IntArray
from nereus.ir.moves import Moves
from nereus.ir.transition import INTER, LINK_NUMBER, LOCAL
from nereus.ir.units import MIB
from nereus.passes.bound import Bounds, bounds
from nereus.passes.class_order import ClassOrder, class_order
from nereus.passes.commodities import Flow
from nereus.passes.diff import Demand, Diff
from nereus.passes.diff_flows import DiffFlows
from nereus.passes.hops import Hop
from nereus.passes.links import Links
from nereus.passes.rebalance import rebalance
from nereus.passes.relays import HolderRails, Ports, Relays, Taken
from nereus.passes.stripes import Stripe, to_moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    moves: Moves
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
        router = _Router(self, diff)
        routed = router.run()
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
        if routed.ports.busiest_s > bound.transfer_s * FAR:
            other = router.repaired(bound.transfer_s)
            if _expected_s(other) < _expected_s(routed):
                routed = other
        return replace(routed, bound=bound)


#: Up to so many GPUs the flow programme's own shares are tried where the router does not come near the bound.
MAX_SPLIT_DEVICES = 256
#: Beyond so many times the bound the router's own result is repaired.
FAR = 1.05
#: How many sendings more than before may then bring bytes from their holder.
_DEEPER = 2
#: Waves into which a transfer is cut about: what a sending more costs.
_WAVES = 64
#: A relay is taken for a holder where its port is less loaded by more than the target / this, per sending more.
_DEPTH_COSTS = 4


def _expected_s(routed: Routed) -> float:
    return routed.ports.busiest_s * (1 + int(routed.moves.depth.max(initial=0)) / _WAVES)


@dataclass(frozen=True, slots=True)
class _Class:
    """What demands of one class have in common. ``holders``, ``by_rail``: places by node, and by rail."""

    region: int
    order: ClassOrder
    holders: dict[int, list[int]]
    by_rail: dict[int, list[int]]
    rails: HolderRails
    relays: Relays | None  # None where nobody else wants what one takes in


class _Router:
    def __init__(self, options: Route, diff: Diff) -> None:
        self.options = options
        self.diff = diff
        self.links = Links(diff.topology)
        self.num_devices = self.links.num_devices
        self.bound = bounds(diff, self.links)
        self.target_s = self.bound.transfer_s
        devices, rails = diff.topology.num_devices, len(self.links.rail)
        self.ports = Ports(gpu_out=[0.0] * devices, gpu_in=[0.0] * devices, nic_out=[0.0] * rails, nic_in=[0.0] * rails)
        self.stripes: list[Stripe] = []
        self.widths = [table.element_bytes for table in diff.tables]
        self.sizes = [table.stop - table.start for table in diff.tables]
        self.regions: list[tuple[int, IntArray]] = []  # table, interval numbers of it
        self.classes: list[_Class] = []  # by region

    def follow(self, found: DiffFlows, hops: Sequence[Hop]) -> Routed:
        """What the flow programme decided."""
        self.regions += zip(found.tables, found.intervals, strict=True)
        for hop in hops:
            self._add(hop.src, hop.dst, found.tables[hop.atom], hop.atom, hop.lo, hop.hi, hop.parent)
        return self._routed()

    def repaired(self, target_s: float) -> Routed:
        """What was routed, with other senders for what keeps ports busy beyond ``target_s``."""
        flows = []
        for number, of in enumerate(self.classes):
            places = tuple(place for found in of.holders.values() for place in found)
            width = self.widths[self.regions[number][0]]
            flows.append(
                Flow(
                    atom=number,
                    num_bytes=of.order.numel * width,
                    holders=places,
                    wanters=(),
                    element_bytes=width,
                )
            )
        hops = [Hop(s.region, s.lo, s.hi, s.src, s.dst, s.parent) for s in self.stripes]
        deepest = int(self._routed().moves.depth.max(initial=0)) + _DEEPER
        found = _Router(self.options, self.diff)
        found.regions = self.regions
        least = self.options.min_stripe_bytes
        for hop in rebalance(hops, flows, self.links, target_s, least_bytes=least, max_depth=deepest):
            found._add(hop.src, hop.dst, self.regions[hop.atom][0], hop.atom, hop.lo, hop.hi, hop.parent)
        return found._routed()

    def run(self) -> Routed:
        for demand, of in self._order():
            self._route(demand, of)
        return self._routed()

    def _routed(self) -> Routed:
        moves = to_moves(self.stripes, self.regions, self.diff.tables)
        return Routed(
            moves=moves,
            ports=self.ports,
            links=self.links,
            bound=self.bound,
            foregone_bytes=self.diff.foregone.moved_bytes,
        )

    def _order(self) -> list[tuple[Demand, _Class]]:
        """Bytes that several nodes want go to one of them first, which can then relay them: to the one that had least
        to send so far. What can come from few holders goes before what has a choice, large before small."""
        by_class: dict[tuple[int, int], list[Demand]] = {}
        for demand in self.diff.demands:
            by_class.setdefault((demand.table, demand.cls), []).append(demand)
        expected = [0] * len(self.links.nic)  # bytes that each node holds for others, or is to relay
        classes: list[tuple[list[Demand], _Class]] = []
        for demands in by_class.values():
            of = self._class(demands)
            self.classes.append(of)
            classes.append((demands, of))
            share = max(d.num_bytes for d in demands) // len(of.holders)
            for node in of.holders:
                expected[node] += share
        classes.sort(key=lambda entry: (-entry[0][0].num_bytes, entry[0][0].table, entry[0][0].cls))
        order: list[tuple[tuple[object, ...], Demand, _Class]] = []
        for demands, of in classes:
            few = min(len(of.holders), 2)
            outside = [d for d in demands if d.node not in of.holders]
            first = None
            if outside:
                first = min(outside, key=lambda d: (-d.num_bytes, expected[d.node], d.node))
                expected[first.node] += first.num_bytes * (len(outside) - 1)
            for d in demands:
                order.append(((d is not first, few, -d.num_bytes, d.table, d.cls, d.node, d.wanters), d, of))
        order.sort(key=itemgetter(0))
        return [(demand, of) for _, demand, of in order]

    def _class(self, demands: list[Demand]) -> _Class:
        table, cls = demands[0].table, demands[0].cls
        order = class_order([d.intervals for d in demands], self.sizes[table])
        self.regions.append((table, order.rows))
        holders: dict[int, list[int]] = {}
        by_rail = holders if len(self.links.rail) == len(self.links.nic) else {}
        node_of, rail_of, num_devices = self.links.node_of, self.links.rail_of, self.num_devices
        for place in self.diff.holders[table][cls]:
            holders.setdefault(node_of[place % num_devices], []).append(place)
            if by_rail is not holders:
                by_rail.setdefault(rail_of[place % num_devices], []).append(place)
        return _Class(
            region=len(self.regions) - 1,
            order=order,
            holders=holders,
            by_rail=by_rail,
            rails=HolderRails(by_rail, self.ports.nic_out),
            relays=Relays(order.numel, self.ports) if len(demands) > 1 else None,
        )

    def _route(self, demand: Demand, of: _Class) -> None:
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
            if (hi - lo) * self.widths[demand.table] < self.options.min_stripe_bytes * len(hosts):
                takers = (min(hosts, key=self._in_load),)
            arrived: list[tuple[int, range]] = []
            for at, host in enumerate(takers):
                first = len(self.stripes)
                a, b = (lo + (hi - lo) * i // len(takers) for i in (at, at + 1))
                self._deliver(demand, of, (host,), a, b)
                arrived.append((host, range(first, len(self.stripes))))
            for source, numbers in arrived:
                for number in numbers:
                    stripe = self.stripes[number]
                    if stripe.dst == source:
                        for other in hosts:
                            if other != source:
                                self._add(source, other, demand.table, region, stripe.lo, stripe.hi, number)

    def _deliver(self, demand: Demand, of: _Class, wanters: tuple[int, ...], lo: int, hi: int) -> None:
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
        if count > 1 and num_bytes >= self.options.min_stripe_bytes * count:
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
                taken += self._take_in(demand, of, wanter, a, b)
        for part in taken:
            for wanter in wanters:
                if wanter != part.place:
                    self._add(part.place, wanter, demand.table, region, part.lo, part.hi, part.stripe)
        if inside is None and of.relays is not None:
            of.relays.add(taken)

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

    def _take_in(self, demand: Demand, of: _Class, wanter: int, lo: int, hi: int) -> list[Taken]:
        """Bring elements ``lo..hi`` from other nodes to ``wanter``."""
        result: list[Taken] = []
        # Parts that are small against the stripe cost more messages than the balance that they buy.
        least = max(self.options.min_stripe_bytes // self.widths[demand.table], (hi - lo) // 4, 1)
        while lo < hi:
            source, stop, parent, depth = self._source(demand, of, lo, hi, least)
            number = self._add(source, wanter, demand.table, of.region, lo, stop, parent)
            result.append(Taken(wanter, demand.node, self.links.rail_number(wanter), lo, stop, number, depth))
            lo = stop
        return result

    def _source(self, demand: Demand, of: _Class, lo: int, hi: int, least: int) -> tuple[int, int, int, int]:
        """(place, how far it sends, stripe that it relays or -1, depth) for the elements from ``lo``."""
        width, rails, pcie = self.widths[demand.table], self.links.rail, self.links.pcie
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
            deeper_s = target / _DEPTH_COSTS
            room = int(min((target - busy[rail]) / rate, (target - out) / gpu_rate))
            best: tuple[int, int, int, int] | None = None
            below = inf
            if room >= least:
                best, below = (place, hi if hi - lo - room < least else lo + room, -1, 1), max(busy[rail], out)
            for load, part in of.relays.cheapest(lo, target, deeper_s, below) if of.relays is not None else ():
                if part.node == demand.node:
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
        self.stripes.append(Stripe(src, dst, table, region, lo, hi, LINK_NUMBER[link], parent))
        return len(self.stripes) - 1
