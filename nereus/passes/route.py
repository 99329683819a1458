"""route: which place sends what to whom.

Node first: a node that lacks bytes takes each of them in once, in one stripe per wanter, and exchanges the stripes
inside. Sources are the least loaded holders; a node that receives a piece in this transition is a source for the next
one (pipelined by pieces), which pays where few nodes hold what many want. All moves of one demand together carry each
of its bytes to each wanter once, so moved bytes equal the bound for the placement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.intervals import Intervals, union
from nereus.ir.layout import BoolArray, IntArray
from nereus.ir.transition import INTER, LOCAL, Move
from nereus.ir.units import MIB
from nereus.passes.bound import Bounds, bounds
from nereus.passes.diff import Demand, Diff
from nereus.passes.links import MESSAGE_S, Links


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Seconds that the moves so far keep each port busy."""

    gpu_out: list[float]
    gpu_in: list[float]
    nic_out: list[float]
    nic_in: list[float]

    @property
    def busiest_s(self) -> float:
        return max((max(p, default=0.0) for p in (self.gpu_out, self.gpu_in, self.nic_out, self.nic_in)), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    moves: tuple[Move, ...]
    ports: Ports
    links: Links
    bound: Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Options: the largest piece that travels as one move; stripes smaller than ``min_stripe_bytes`` are not cut
    further."""

    piece_bytes: int = 512 * MIB
    min_stripe_bytes: int = 1 * MIB

    name = "route"

    def apply(self, diff: Diff) -> Routed:
        return _Router(self, diff).run()


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A part of a piece that a node took in: a place that may relay it."""

    place: int
    intervals: Intervals
    move: int
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class _ClassPieces:
    """A class cut into pieces: its interval numbers, where each begins in the class's element order (and the total),
    the cut positions, and the pieces."""

    numbers: IntArray
    begins: IntArray
    cuts: IntArray
    pieces: list[Intervals]


class _Router:
    def __init__(self, options: Route, diff: Diff) -> None:
        self.options = options
        self.diff = diff
        self.links = Links(diff.topology)
        self.bound = bounds(diff, self.links)
        devices, nodes = diff.topology.num_devices, len(diff.topology.nodes)
        self.ports = Ports(gpu_out=[0.0] * devices, gpu_in=[0.0] * devices, nic_out=[0.0] * nodes, nic_in=[0.0] * nodes)
        self.moves: list[Move] = []
        self.widths = [table.element_bytes for table in diff.tables]
        # (table, class, piece) -> node -> what it took in
        self.relays: dict[tuple[int, int, int], dict[int, list[_Delivery]]] = {}
        self.holders_by_node: dict[tuple[int, int], dict[int, list[int]]] = {}
        self.class_pieces: dict[tuple[int, int], _ClassPieces] = {}
        # The piece is kept beside its stripes: an id names it only while it lives.
        self.stripes: dict[tuple[int, int], tuple[Intervals, list[Intervals]]] = {}

    def run(self) -> Routed:
        tables = self.diff.tables
        self.regions = [Intervals(t.cell, t.start, t.stop) for t in tables]
        # Demands with least choice first, among equals the large ones: what can go either way then fills the other
        # ports.
        for demand in sorted(
            self.diff.demands,
            key=lambda d: (min(len(self._holders(d)), 2), -d.num_bytes, d.table, d.cls, d.node, d.wanters),
        ):
            self._route(demand)
        return Routed(moves=tuple(self.moves), ports=self.ports, links=self.links, bound=self.bound)

    def _region(self, table: int, intervals: IntArray | BoolArray) -> Intervals:
        whole = self.regions[table]
        return Intervals(whole.cell[intervals], whole.start[intervals], whole.stop[intervals])

    def _pieces(self, demand: Demand) -> list[tuple[int, Intervals]]:
        """(number, piece), cut at fixed places of the class, so that what a node takes in is what the next wants.

        A demand is the whole class or lacks a little that its wanters derive: pieces that it has in full are the
        class's.
        """
        if demand.num_bytes <= self.options.piece_bytes:
            return [(-1, self._region(demand.table, demand.intervals))]
        whole = self._class_pieces(demand)
        if len(demand.intervals) == len(whole.numbers):
            return list(enumerate(whole.pieces))
        absent = np.flatnonzero(~np.isin(whole.numbers, demand.intervals, assume_unique=True))
        first = np.searchsorted(whole.cuts, whole.begins[absent], side="right")
        last = np.searchsorted(whole.cuts, whole.begins[absent + 1], side="left")
        touched = {number for a, b in zip(first.tolist(), last.tolist(), strict=True) for number in range(a, b + 1)}
        missing = self._region(demand.table, whole.numbers[absent])
        result: list[tuple[int, Intervals]] = []
        for number, piece in enumerate(whole.pieces):
            part = piece.subtract(missing) if number in touched else piece
            if len(part):
                result.append((number, part))
        return result

    def _class_pieces(self, demand: Demand) -> _ClassPieces:
        key = (demand.table, demand.cls)
        if key not in self.class_pieces:
            table = self.diff.tables[demand.table]
            numbers = np.flatnonzero(table.cls == demand.cls)
            whole = self._region(demand.table, numbers)
            count = -(-whole.numel * table.element_bytes // self.options.piece_bytes)
            cuts = np.array([whole.numel * i // count for i in range(1, count)], dtype=np.int64)
            begins = np.concatenate(([0], np.cumsum(whole.stop - whole.start)))
            self.class_pieces[key] = _ClassPieces(numbers, begins, cuts, whole.cut_at(cuts.tolist()))
        return self.class_pieces[key]

    def _stripes(self, piece: Intervals, count: int) -> list[Intervals]:
        """Cut once per piece, so that stripes of several nodes are the same objects and relays match at a glance."""
        if count == 1:
            return [piece]
        key = (id(piece), count)
        if key not in self.stripes:
            self.stripes[key] = (piece, piece.split(count))
        return self.stripes[key][1]

    def _holders(self, demand: Demand) -> dict[int, list[int]]:
        key = (demand.table, demand.cls)
        if key not in self.holders_by_node:
            by_node: dict[int, list[int]] = {}
            for place in self.diff.holders[demand.table][demand.cls]:
                by_node.setdefault(self.links.node(place), []).append(place)
            self.holders_by_node[key] = by_node
        return self.holders_by_node[key]

    def _route(self, demand: Demand) -> None:
        """Wanters in one host memory are one: they take the pieces in turns and copy the others' from each other."""
        gpus = tuple(place for place in demand.wanters if place < self.links.num_devices)
        hosts = demand.wanters[len(gpus) :]  # ascending: host places follow the GPUs
        pieces = self._pieces(demand)
        if len(hosts) < 2:
            for number, piece in pieces:
                self._route_piece(demand, number, piece)
            return
        taken: list[list[Intervals]] = [[] for _ in hosts]
        arrived: list[list[int]] = [[] for _ in hosts]
        for turn, (number, piece) in enumerate(pieces):
            at = turn % len(hosts)
            start = len(self.moves)
            self._route_piece(replace(demand, wanters=(*gpus, hosts[at])), number, piece)
            taken[at].append(piece)
            arrived[at] += (i for i in range(start, len(self.moves)) if self.moves[i].dst == hosts[at])
        for at, source in enumerate(hosts):
            if taken[at]:
                region = union(taken[at])
                for other in hosts:
                    if other != source:
                        self._add(source, other, demand.table, region, tuple(arrived[at]))

    def _route_piece(self, demand: Demand, number: int, piece: Intervals) -> None:
        holders = self._holders(demand)
        if demand.node in holders:
            for wanter in demand.wanters:
                self._add(self._nearest(holders[demand.node], wanter), wanter, demand.table, piece, ())
            return
        element_bytes = self.widths[demand.table]
        count = len(demand.wanters)
        if piece.numel * element_bytes < self.options.min_stripe_bytes * count:
            stripes = [piece]
        else:
            stripes = self._stripes(piece, count)
        # Rotate who takes the first stripe: it may be a byte larger, and single stripes should not pile up on one
        # wanter.
        first = min(range(count), key=lambda i: (self._in_load(demand.wanters[i]), i)) if len(stripes) == 1 else 0
        taken: list[_Delivery] = []
        for index, stripe in enumerate(stripes):
            taken += self._take_in(demand, number, holders, demand.wanters[(first + index) % count], stripe)
        for delivery in taken:
            for wanter in demand.wanters:
                if wanter != delivery.place:
                    self._add(delivery.place, wanter, demand.table, delivery.intervals, (delivery.move,))
        relays = self.relays.setdefault((demand.table, demand.cls, number), {})
        relays.setdefault(demand.node, []).extend(taken)

    def _take_in(
        self, demand: Demand, number: int, holders: dict[int, list[int]], wanter: int, stripe: Intervals
    ) -> list[_Delivery]:
        """Bring ``stripe`` from another node to ``wanter``, through relays where that is faster."""
        element_bytes = self.widths[demand.table]
        result: list[_Delivery] = []
        rest = stripe
        holder_node = min(holders, key=self.ports.nic_out.__getitem__)
        relays = self.relays.get((demand.table, demand.cls, number), {})
        hop_s = MESSAGE_S + stripe.numel * element_bytes * self.links.nic[demand.node]
        # Nothing ends before the bound, so a holder's NIC may be busy until then; beyond it a relay takes over.
        if relays and self.ports.nic_out[holder_node] + hop_s > self.bound.transfer_s:
            candidates = [
                (self.ports.nic_out[node] + hop_s * (1 + parts[0].depth), node)
                for node, parts in relays.items()
                if parts and node != demand.node
            ]
            cost, relay_node = min(candidates, default=(float("inf"), -1))
            if cost < self.ports.nic_out[holder_node]:
                for part in list(relays[relay_node]):
                    if part.intervals is rest:
                        move = self._add(part.place, wanter, demand.table, rest, (part.move,))
                        return [*result, _Delivery(wanter, rest, move, part.depth + 1)]
                    common = part.intervals.intersect(rest)
                    if len(common):
                        move = self._add(part.place, wanter, demand.table, common, (part.move,))
                        result.append(_Delivery(wanter, common, move, part.depth + 1))
                        rest = rest.subtract(common)
        if len(rest):
            places = holders[holder_node]
            source = places[0]
            if len(places) > 1:
                source = min(places, key=lambda p: (self.ports.gpu_out[p % self.links.num_devices], p))
            move = self._add(source, wanter, demand.table, rest, ())
            result.append(_Delivery(wanter, rest, move, 1))
        return result

    def _nearest(self, places: list[int], wanter: int) -> int:
        """A holder in the wanter's node: one in its own memory space if there is one, else the least loaded."""
        num_devices = self.links.num_devices
        return min(
            places,
            key=lambda p: (
                self.links.link(p, wanter) != LOCAL,
                self.ports.gpu_out[p % num_devices],
                (p - wanter) % (2 * num_devices),
            ),
        )

    def _in_load(self, place: int) -> float:
        return self.ports.gpu_in[place % self.links.num_devices]

    def _add(self, src: int, dst: int, table: int, intervals: Intervals, after: tuple[int, ...]) -> int:
        num_bytes = intervals.numel * self.widths[table]
        link, out_rate, in_rate, nic_rate = self.links.rates(src, dst)
        ports, num_devices = self.ports, self.links.num_devices
        ports.gpu_out[src % num_devices] += num_bytes * out_rate
        ports.gpu_in[dst % num_devices] += num_bytes * in_rate
        if link == INTER:
            ports.nic_out[self.links.node(src)] += num_bytes * nic_rate
            ports.nic_in[self.links.node(dst)] += num_bytes * nic_rate
        self.moves.append(Move(src, dst, table, intervals, num_bytes, link, after))
        return len(self.moves) - 1
