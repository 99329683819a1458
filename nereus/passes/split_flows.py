"""From the flow programme's shares to whole elements: which place sends which range of each flow to whom.

The programme says how much each place sends and takes in of a class; here that becomes trees. Between nodes a relay
sends on what it took in itself. Where few nodes want a flow, every node that relays is the first of a stripe of its own
width and feeds all others (depth 2, the construction by which the programme is exact); where many do, nodes are fed in
one row by whoever has something left to give, holders first, so the depth grows with the logarithm of their number.
Inside a node each wanter passes on what it took in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nereus.ir.units import MIB
from nereus.passes.commodities import Commodities, Flow, commodities_of_diff, commodities_of_flows
from nereus.passes.diff import Diff
from nereus.passes.diff_flows import DiffFlows, flows_of_diff
from nereus.passes.flow_bound import solve_flows
from nereus.passes.flow_programme import FlowSolution
from nereus.passes.hops import Hop
from nereus.passes.links import Links
from nereus.passes.rebalance import rebalance

#: Up to so many nodes every relaying node heads a stripe.
FEW_NODES = 8
#: A flow that is less than this share of what its class's nodes lack, over their number, is not cut into stripes.
ALONE = 2.0


class _Part(NamedTuple):
    """What ``place`` took in, and who in its node has it: ``have`` names the hop that brought it to each."""

    lo: int
    hi: int
    place: int
    have: dict[int, int]


def split_flows(flows: Sequence[Flow], links: Links, *, least_bytes: int = MIB) -> list[Hop]:
    """Hops that bring every flow to its wanters, each element once to each (host memory: once to one of the node's, and
    copies inside it). Parts smaller than ``least_bytes`` are not cut off."""
    commodities = commodities_of_flows(flows, links)
    solution = solve_flows(commodities, links)[1]
    return _split(flows, commodities.members, commodities, solution, links, least_bytes)


def split_diff(diff: Diff, links: Links, *, least_bytes: int = MIB) -> tuple[DiffFlows, list[Hop]]:
    """The flows of a diff, and their hops (``Hop.atom``: position of the flow)."""
    commodities = commodities_of_diff(diff, links)
    solution = solve_flows(commodities, links)[1]
    relay = _Quotas(commodities, solution, links).relay_of_member(commodities)
    found = flows_of_diff(diff, links, relay)
    members = [[flow for cls in classes for flow in found.classes[cls]] for classes in commodities.members]
    return found, _split(found.flows, members, commodities, solution, links, least_bytes)


def _split(
    flows: Sequence[Flow],
    members: Sequence[Sequence[int]],
    commodities: Commodities,
    solution: FlowSolution | None,
    links: Links,
    least_bytes: int,
) -> list[Hop]:
    """``members``: for each class of the commodities, the positions of the flows that make it up. Without a solution
    nobody has a quota, and what each sends is levelled class by class."""
    quotas = _Quotas(commodities, solution, links)
    splitter = _Splitter(links, least_bytes)
    known: set[int] = set()
    for cls, positions in enumerate(members):
        known.update(positions)
        for position in sorted(positions, key=lambda i: -flows[i].num_bytes):
            splitter.deliver(position, flows[position], quotas.of_class[cls])
    # What only host memory wants where it is already: copies, which the programme leaves out.
    for position, flow in enumerate(flows):
        if position not in known:
            splitter.deliver(position, flow, _Quota())
    if solution is None:
        return [h._replace(atom=flows[h.atom].atom) for h in splitter.hops]
    return rebalance(splitter.hops, flows, links, solution.value_s, least_bytes=least_bytes)


class _Quota:
    """Bytes of one class that are left for each place to send, and the part that each takes in."""

    def __init__(self) -> None:
        self.out: dict[int, float] = {}  # between nodes, holders and relays
        self.inner: dict[int, float] = {}  # holders, inside their node
        self.entry: dict[int, float] = {}  # wanters: bytes from outside
        self.relay: dict[int, float] = {}  # node: bytes left for its wanters to send to other nodes
        self.want: dict[int, float] = {}  # node: bytes left for its wanters to get
        self.pass_on: dict[int, float] = {}  # wanters beside holders: how often they send each byte to GPUs beside them


class _Quotas:
    def __init__(self, c: Commodities, solution: FlowSolution | None, links: Links) -> None:
        self.of_class = [_Quota() for _ in range(c.num_classes)]
        if solution is None:
            return
        shares = solution.shares
        holding = list(zip(c.holder_class.tolist(), c.holder_place.tolist(), strict=True))
        held = set(holding)
        homes = {(cls, links.node(place)) for cls, place in holding}
        wanted: dict[tuple[int, int], float] = {}
        for cls, node, num in zip(
            c.demand_class.tolist(), c.demand_node.tolist(), c.demand_bytes.tolist(), strict=True
        ):
            wanted[cls, node] = wanted.get((cls, node), 0.0) + num
        for (cls, node), num in wanted.items():
            self.of_class[cls].want[node] = num
        for cls, place, num in zip(
            shares.sender_class.tolist(), shares.sender_place.tolist(), shares.sender_bytes.tolist(), strict=True
        ):
            quota, node = self.of_class[cls], links.node(place)
            quota.out[place] = quota.out.get(place, 0.0) + num
            if (cls, node) not in homes:
                quota.relay[node] = quota.relay.get(node, 0.0) + num
        entering = shares.outside * c.demand_bytes[c.wanter_demand]
        for demand, place, num in zip(
            c.wanter_demand.tolist(), c.wanter_place.tolist(), entering.tolist(), strict=True
        ):
            quota = self.of_class[c.demand_class[demand]]
            quota.entry[place] = quota.entry.get(place, 0.0) + num
        sent = shares.inner_share * c.demand_bytes[shares.inner_demand]
        for demand, place, to_host, num in zip(
            shares.inner_demand.tolist(),
            shares.inner_place.tolist(),
            shares.inner_to_host.tolist(),
            sent.tolist(),
            strict=True,
        ):
            cls = int(c.demand_class[demand])
            quota, node = self.of_class[cls], links.node(place)
            if (cls, place) in held:
                quota.inner[place] = quota.inner.get(place, 0.0) + num
            elif not to_host:
                quota.pass_on[place] = quota.pass_on.get(place, 0.0) + num / wanted[cls, node]

    def relay_of_member(self, commodities: Commodities) -> list[dict[int, float]]:
        num = 1 + max((m for members in commodities.members for m in members), default=-1)
        found: list[dict[int, float]] = [{} for _ in range(num)]
        for cls, members in enumerate(commodities.members):
            for member in members:
                found[member] = self.of_class[cls].relay
        return found


class _Splitter:
    def __init__(self, links: Links, least_bytes: int) -> None:
        self.links, self.least_bytes = links, least_bytes
        self.hops: list[Hop] = []
        self.least = 1
        self.position = -1
        self.beside: list[_Part] = []  # what wanters beside holders have of the flow

    def deliver(self, position: int, flow: Flow, quota: _Quota) -> None:
        self.position, self.beside = position, []
        self.least = max(1, self.least_bytes // flow.element_bytes)
        holders, wanters = self._by_node(flow.holders), self._by_node(flow.wanters)
        outside = [node for node in wanters if node not in holders]
        for node, places in wanters.items():
            if node in holders:
                self._inside(flow, quota, holders[node], places, node)
        numel = flow.num_bytes // flow.element_bytes
        if outside:
            self._between(flow, quota, {node: wanters[node] for node in outside}, numel)

    def _by_node(self, places: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for place in places:
            found.setdefault(self.links.node(place), []).append(place)
        return found

    def _add(self, lo: int, hi: int, src: int, dst: int, parent: int) -> int:
        self.hops.append(Hop(self.position, lo, hi, src, dst, parent))
        return len(self.hops) - 1

    # Between nodes

    def _between(self, flow: Flow, quota: _Quota, wanters: dict[int, list[int]], numel: int) -> None:
        # What this flow takes of each node's quota: its share of what the node still has to get of the class.
        share = {n: min(1.0, flow.num_bytes / max(quota.want.get(n, 0.0), flow.num_bytes)) for n in wanters}
        nodes = sorted(wanters, key=lambda n: (-quota.relay.get(n, 0.0) * share[n], n))
        most = len(nodes) - 1
        got: dict[int, list[_Part]] = {node: [] for node in nodes}
        if max(share.values()) < ALONE / len(nodes):
            # One of many flows of the class: whole, behind the node with most left to relay.
            head = max(nodes, key=lambda n: quota.relay.get(n, 0.0))
            relayed = quota.relay.get(head, 0.0) > most * flow.num_bytes / 2
            self._stripe(flow, quota, wanters, got, 0, numel, head if relayed and most else None)
        else:
            relay = [quota.relay.get(n, 0.0) * share[n] / flow.num_bytes for n in nodes]
            if sum(relay) > most:
                relay = [r * most / sum(relay) for r in relay]
            if len(nodes) <= FEW_NODES and numel >= 2 * self.least:
                lo = 0
                for node, width in zip(nodes, [int(r / most * numel) if most else 0 for r in relay], strict=True):
                    if width >= self.least and lo < numel:
                        hi = lo + width if numel - lo - width >= self.least else numel
                        self._stripe(flow, quota, wanters, got, lo, hi, node)
                        lo = hi
                self._stripe(flow, quota, wanters, got, lo, numel, None)
            else:
                self._row(flow, quota, wanters, got, nodes, [int(r * numel) for r in relay], numel)
        for node in nodes:
            quota.want[node] = quota.want.get(node, 0.0) - flow.num_bytes

    def _stripe(
        self,
        flow: Flow,
        quota: _Quota,
        wanters: dict[int, list[int]],
        got: dict[int, list[_Part]],
        lo: int,
        hi: int,
        head: int | None,
    ) -> None:
        """The head takes in ``lo..hi`` and feeds all others; without one the holders feed all."""
        if lo >= hi:
            return
        if head is not None:
            got[head] += self._enter(flow, quota, wanters[head], (lo, hi), lo, hi, None)
            sent = (hi - lo) * flow.element_bytes * (len(wanters) - 1)
            quota.relay[head] = quota.relay.get(head, 0.0) - sent
        sources = None if head is None else got[head]
        for node, places in wanters.items():
            if node != head:
                got[node] += self._enter(flow, quota, places, (lo, hi), lo, hi, sources)

    def _row(
        self,
        flow: Flow,
        quota: _Quota,
        wanters: dict[int, list[int]],
        got: dict[int, list[_Part]],
        nodes: Sequence[int],
        relay: Sequence[int],
        numel: int,
    ) -> None:
        """Nodes one after another, each from the shallowest that has something left to give."""
        holders_left = int(sum(quota.out.get(p, 0.0) for p in flow.holders) / flow.element_bytes)
        holders_left = max(min(holders_left, len(nodes) * numel - sum(relay)), numel)
        queue: list[list[int]] = [[-1, holders_left]]
        at = 0
        for node, supply in zip(nodes, relay, strict=True):
            lo = 0
            while lo < numel:
                while at < len(queue) and queue[at][1] < min(self.least, numel - lo):
                    at += 1
                if at == len(queue):
                    source, hi = -1, numel
                else:
                    source = queue[at][0]
                    hi = min(numel, lo + queue[at][1])
                    if numel - hi < self.least:
                        hi = numel
                    queue[at][1] -= hi - lo
                    if source >= 0:
                        quota.relay[source] = quota.relay.get(source, 0.0) - (hi - lo) * flow.element_bytes
                parts = None if source < 0 else got[source]
                got[node] += self._enter(flow, quota, wanters[node], (0, numel), lo, hi, parts)
                lo = hi
            queue.append([node, supply])

    def _enter(
        self,
        flow: Flow,
        quota: _Quota,
        places: Sequence[int],
        stripe: tuple[int, int],
        lo: int,
        hi: int,
        sources: Sequence[_Part] | None,
    ) -> list[_Part]:
        """Bring ``lo..hi`` into a node: its wanters share the stripe that this is part of. From what another node took
        in (``sources``), or from holders."""
        taken: list[_Part] = []
        for place, a, b in self._shares(quota, places, stripe):
            a, b = max(a, lo), min(b, hi)
            if a >= b:
                continue
            if sources is None:
                origin = self._origins(flow, a, b)
                for x, y, src in self._from_places(flow, quota.out, tuple(origin), a, b):
                    taken.append(self._pass_on(places, x, y, place, self._add(x, y, src, place, origin[src])))
                continue
            for part in sources:
                x, y = max(a, part.lo), min(b, part.hi)
                if x >= y:
                    continue
                for begin, end, src in self._from_places(flow, quota.out, tuple(part.have), x, y):
                    hop = self._add(begin, end, src, place, part.have[src])
                    taken.append(self._pass_on(places, begin, end, place, hop))
        return taken

    def _shares(self, quota: _Quota, places: Sequence[int], stripe: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
        weights = np.array([quota.entry.get(place, 0.0) for place in places])
        lo, hi = stripe
        if (hi - lo) < self.least * len(places) or weights.sum() <= 0:
            best = max(range(len(places)), key=lambda i: weights[i])
            quota.entry[places[best]] = quota.entry.get(places[best], 0.0) - (hi - lo)
            yield places[best], lo, hi
            return
        ends = lo + np.rint(np.cumsum(weights / weights.sum()) * (hi - lo)).astype(np.int64)
        begin = lo
        for place, end in zip(places, ends.tolist(), strict=True):
            if end - begin >= self.least or end == hi:
                yield place, begin, end
                begin = end

    def _origins(self, flow: Flow, lo: int, hi: int) -> dict[int, int]:
        """Holders, and wanters beside them with the hop that brought ``lo..hi`` there."""
        origin = dict.fromkeys(flow.holders, -1)
        for part in self.beside:
            if part.lo <= lo and hi <= part.hi:
                for place, hop in part.have.items():
                    origin.setdefault(place, hop)
        return origin

    def _from_places(
        self, flow: Flow, left: dict[int, float], places: Sequence[int], lo: int, hi: int
    ) -> Iterator[tuple[int, int, int]]:
        """(lo, hi, place): from the first place if it has enough left to send, else from the one with most; what it has
        not left comes from the next."""
        width = flow.element_bytes
        while lo < hi:
            place = places[0]
            if len(places) > 1 and left.get(place, 0.0) < (hi - lo) * width:
                place = max(places, key=lambda p: left.get(p, 0.0))
            room = int(left.get(place, 0.0) // width)
            end = hi
            if len(places) > 1 and self.least <= room <= hi - lo - self.least:
                end = lo + room
            left[place] = left.get(place, 0.0) - (end - lo) * width
            yield lo, end, place
            lo = end

    # Inside a node

    def _inside(self, flow: Flow, quota: _Quota, near: Sequence[int], wanters: Sequence[int], node: int) -> None:
        numel = flow.num_bytes // flow.element_bytes
        gpus = [p for p in wanters if p < self.links.num_devices]
        hosts = wanters[len(gpus) :]
        in_host = [p for p in near if p >= self.links.num_devices]
        if in_host:
            for host in hosts:
                source = in_host[host % len(in_host)]
                self.beside.append(_Part(0, numel, host, {host: self._add(0, numel, source, host, -1)}))
        else:
            self._scatter(flow, quota, near, hosts, [numel / max(len(hosts), 1)] * len(hosts))
        # Wanters pass on parts as wide as the programme lets them; holders send the rest to all.
        passed = [quota.pass_on.get(gpu, 0.0) / max(len(gpus) - 1, 1) * numel for gpu in gpus]
        if numel - sum(passed) < self.least and sum(passed) > 0:
            passed = [p * numel / sum(passed) for p in passed]
        rest = self._scatter(flow, quota, near, gpus, passed)
        for gpu in gpus:
            for a, b, src in self._from_places(flow, quota.inner, near, rest, numel):
                self.beside.append(_Part(a, b, gpu, {gpu: self._add(a, b, src, gpu, -1)}))

    def _scatter(
        self, flow: Flow, quota: _Quota, near: Sequence[int], wanters: Sequence[int], widths: Sequence[float]
    ) -> int:
        """Holders of the node send each wanter a part, from the first element on, which it passes on; the result is
        where the last one ends."""
        begin = 0
        numel = flow.num_bytes // flow.element_bytes
        for place, end in zip(wanters, np.rint(np.cumsum(widths)).astype(np.int64).tolist(), strict=True):
            end = numel if numel - end < self.least else end
            if end - begin >= min(self.least, numel):
                for a, b, src in self._from_places(flow, quota.inner, near, begin, end):
                    self.beside.append(self._pass_on(wanters, a, b, place, self._add(a, b, src, place, -1)))
                begin = end
        return begin

    def _pass_on(self, wanters: Sequence[int], lo: int, hi: int, place: int, hop: int) -> _Part:
        """``place`` has ``lo..hi`` by ``hop``: to all other wanters of the node. Host memory gets it once and copies
        it."""
        devices = self.links.num_devices
        have = {place: hop}
        hosts = [p for p in wanters if p >= devices]
        for other in wanters:
            if other < devices and other != place:
                have[other] = self._add(lo, hi, place, other, hop)
        source = place
        if hosts and place < devices:
            source = place + devices if place + devices in hosts else hosts[place % len(hosts)]
            have[source] = self._add(lo, hi, place, source, hop)
        for host in hosts:
            if host != source:
                have[host] = self._add(lo, hi, source, host, have[source])
        return _Part(lo, hi, place, have)
