"""The flow programme: which share of each demand takes which way, so that the busiest port is done first.

Per-wanter flows (a unit from the holders to each wanter, and edges that carry the largest of them) are not written out.
Ports belong to places and nodes, never to edges, and every place that handles bytes keeps them; then the loads that
per-wanter flows can cause are exactly these (a tree over receivers may be exchanged for one in which the first
receiver feeds all others, stripe by stripe, with the same loads):

* every wanter takes each byte in once, from outside its node, from a GPU or from host memory inside;
* a node that holds nothing takes each byte in from outside at least once; what is sent between nodes is what is taken
  in, and the holders' nodes send each byte that leaves them at least once;
* what is sent inside a node is what is taken in inside, and where one GPU takes bytes in from outside, it sends them
  on at least once.

So n wanters cost O(n) columns instead of O(n^3), and feeding each other without a source is not possible. Where a node
takes a byte in by several GPUs, or both GPUs and host memory want it, "sends on at least once" is stated only in part:
the programme is then a relaxation, its value still a bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.layout import BoolArray, IntArray
from nereus.passes.commodities import Commodities, FloatArray
from nereus.passes.flow_merge import labels_of, mix
from nereus.passes.flow_prices import Prices
from nereus.passes.linear_program import LinearProgram
from nereus.passes.links import Links

INF = np.inf
#: A link inside a node that is no faster than the host link: bytes may as well come from other nodes.
SLOW = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of the demand's bytes, per wanter incidence of the commodities, and of ``unit`` bytes per sender."""

    outside: FloatArray  # wanter: taken in from other nodes
    from_gpu: FloatArray
    from_host: FloatArray
    sender_class: IntArray  # who sends between nodes
    sender_place: IntArray
    sender_bytes: FloatArray
    inner_demand: IntArray  # who sends inside the node
    inner_place: IntArray
    inner_to_host: BoolArray
    inner_share: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSolution:
    value_s: float  # busiest port, seconds
    prices: Prices
    shares: Shares


@dataclass(frozen=True, slots=True)
class _Senders:
    demand: IntArray
    place: IntArray
    holds: BoolArray
    columns: IntArray


class FlowProgramme:
    def __init__(self, commodities: Commodities, links: Links, unit_s: float, *, wide: bool = False) -> None:
        """``unit_s``: the order of magnitude of the result; numbers near 1 suit the solver. ``wide``: nodes that hold
        bytes may take them in from outside too, although links inside are faster."""
        self.c, self.links, self.unit_s, self.wide = commodities, links, unit_s, wide
        c = commodities
        self.devices, self.num = links.num_devices, c.num_demands
        self.node = np.tile(np.array(links.node_of, dtype=np.int64), 2)
        self.rail = np.tile(np.array(links.rail_of, dtype=np.int64), 2)
        self.pcie, self.intra = (np.array(r)[self.node] for r in (links.pcie, links.intra))
        self.nic = np.array(links.rail)[self.rail]
        self.gpu, self.near_gpu = c.wanter_place < self.devices, c.near_place < self.devices
        num_gpus = self._count(c.wanter_demand, self.gpu)
        self.wants_gpu, self.wants_host = num_gpus > 0, self._count(c.wanter_demand, ~self.gpu) > 0
        self.gpu_holds, self.host_holds = (self._count(c.near_demand, m) > 0 for m in (self.near_gpu, ~self.near_gpu))
        self.several = self.gpu & (num_gpus[c.wanter_demand] > 1)
        # Bytes of a class are counted in units of its largest demand.
        self.class_unit = np.zeros(c.num_classes)
        np.maximum.at(self.class_unit, c.demand_class, c.demand_bytes)
        labels = labels_of(c, links)
        self.place_label, self.rail_label, self.demand_label = labels.place, labels.rail, labels.demand
        self.class_label = mix(np.arange(c.num_classes))
        self.lp = LinearProgram()
        self.time = self.lp.add_columns(mix(np.zeros(1, dtype=np.int64)))
        self._ways()
        self._intake_rows()
        self._inner_rows()
        self._class_rows()
        self._port_rows()
        self.lp.minimise(int(self.time[0]))

    def solve(self, *, merge: bool) -> FlowSolution:
        solution = self.lp.solve(merge=merge)
        x, price = solution.columns, np.maximum(-solution.duals, 0.0)
        gpu_in, gpu_out, nic_in, nic_out = self.ports
        inner = (self.to_gpu, self.to_host, self.from_host)
        sender_class, sender_place, columns = self.senders
        return FlowSolution(
            value_s=solution.value * self.unit_s,
            prices=Prices(gpu_out=price[gpu_out], gpu_in=price[gpu_in], nic_out=price[nic_out], nic_in=price[nic_in]),
            shares=Shares(
                outside=self._spread(x, self.ways[0]),
                from_gpu=self._spread(x, self.ways[1]),
                from_host=self._spread(x, self.ways[2]),
                sender_class=sender_class,
                sender_place=sender_place,
                sender_bytes=x[columns] * self.class_unit[sender_class],
                inner_demand=np.concatenate([s.demand for s in inner]),
                inner_place=np.concatenate([s.place for s in inner]),
                inner_to_host=np.repeat([False, True, False], [len(s.demand) for s in inner]),
                inner_share=np.concatenate([x[s.columns] for s in inner]),
            ),
        )

    def _count(self, index: IntArray, mask: BoolArray) -> IntArray:
        return np.bincount(index[mask], minlength=self.num)

    def _spread(self, x: FloatArray, way: tuple[IntArray, IntArray]) -> FloatArray:
        result = np.zeros(len(self.c.wanter_place))
        result[way[0]] = x[way[1]]
        return result

    def _ways(self) -> None:
        """Columns: how each wanter takes in (outside, from a GPU, from host memory), who sends inside, who outside."""
        c, gpu, demand = self.c, self.gpu, self.c.wanter_demand
        slow = (self.intra >= self.pcie * SLOW)[c.wanter_place]
        outside = ~c.inside[demand] | slow | self.wide
        from_gpu = self.gpu_holds[demand] | np.where(gpu, self.several, self.wants_gpu[demand])
        from_host = gpu & (self.host_holds | self.wants_host)[demand]
        self.ways = []
        for kind, mask in enumerate((outside, from_gpu, from_host)):
            found = np.flatnonzero(mask)
            label = mix(self.demand_label[demand[found]] + self.place_label[c.wanter_place[found]], 10 + kind)
            self.ways.append((found, self.lp.add_columns(label)))
        near = self.c.near_demand
        self.to_gpu = self._inner_senders(20, self.near_gpu & self.wants_gpu[near], self.several)
        self.to_host = self._inner_senders(21, self.near_gpu & self.wants_host[near], gpu & self.wants_host[demand])
        self.from_host = self._inner_senders(22, ~self.near_gpu & self.wants_gpu[near], ~gpu & self.wants_gpu[demand])
        # With one demand there is nobody to relay to.
        relay = (np.bincount(c.demand_class, minlength=c.num_classes) > 1)[c.demand_class[demand]]
        sender_class = np.concatenate((c.holder_class, c.demand_class[demand[relay]]))
        sender_place = np.concatenate((c.holder_place, c.wanter_place[relay]))
        self.beside = np.concatenate((np.ones(len(c.holder_class), dtype=bool), c.inside[demand[relay]]))
        label = self.class_label[sender_class] + self.place_label[sender_place]
        label = label + mix(self.beside.astype(np.int64))
        label = mix(label + mix((np.arange(len(label)) < len(c.holder_class)).astype(np.int64)), 30)
        self.senders = (sender_class, sender_place, self.lp.add_columns(label))

    def _inner_senders(self, kind: int, near: BoolArray, wanters: BoolArray) -> _Senders:
        c = self.c
        demand = np.concatenate((c.near_demand[near], c.wanter_demand[wanters]))
        place = np.concatenate((c.near_place[near], c.wanter_place[wanters]))
        holds = np.arange(len(demand)) < int(near.sum())
        label = mix(self.demand_label[demand] + self.place_label[place] + mix(holds.astype(np.int64)), kind)
        return _Senders(demand, place, holds, self.lp.add_columns(label))

    def _intake_rows(self) -> None:
        """Each GPU takes in all of it, and so does host memory, through any of its processes."""
        c, gpu = self.c, self.gpu
        row = np.zeros(len(gpu), dtype=np.int64)
        label = self.demand_label[c.wanter_demand[gpu]] + self.place_label[c.wanter_place[gpu]]
        row[gpu] = self.lp.add_rows(np.ones(len(label)), np.ones(len(label)), mix(label, 40))
        group = np.zeros(self.num, dtype=np.int64)
        label = self.demand_label[self.wants_host]
        group[self.wants_host] = self.lp.add_rows(np.ones(len(label)), np.ones(len(label)), mix(label, 41))
        row[~gpu] = group[c.wanter_demand[~gpu]]
        for incidence, columns in self.ways:
            self.lp.add_terms(row[incidence], columns, 1.0)

    def _inner_rows(self) -> None:
        """What is taken in inside a node is sent inside it; each byte enters; who takes it in alone sends it on."""
        demand, terms = self.c.wanter_demand, self.lp.add_terms
        (outside, out_columns), (near, gpu_columns), (far, host_columns) = self.ways
        zero = np.zeros(self.num)
        to_gpu = self.gpu[near]
        taken = ((near[to_gpu], gpu_columns[to_gpu]), (near[~to_gpu], gpu_columns[~to_gpu]), (far, host_columns))
        entry = self.lp.add_rows(np.ones(self.num), np.full(self.num, INF), mix(self.demand_label, 42))
        terms(entry[demand[outside]], out_columns, 1.0)
        inner = (self.to_gpu, self.to_host, self.from_host)
        for kind, ((incidence, columns), senders) in enumerate(zip(taken, inner, strict=True)):
            balance = self.lp.add_rows(zero, zero, mix(self.demand_label, 43 + kind))
            terms(balance[demand[incidence]], columns, 1.0)
            terms(balance[senders.demand], senders.columns, -1.0)
            terms(entry[senders.demand[senders.holds]], senders.columns[senders.holds], 1.0)
        self._cut_rows()

    def _cut_rows(self) -> None:
        """GPUs that want together do not feed each other: into every set T of them goes each byte at least once, from
        outside the node, from host memory, or from a GPU not in T. Written out for T = one of them, T = all but one and
        T = all: every T there is up to three GPUs, a relaxation beyond."""
        c, demand, terms = self.c, self.c.wanter_demand, self.lp.add_terms
        own = np.flatnonzero(self.several)
        label = self.demand_label[demand[own]] + self.place_label[c.wanter_place[own]]
        sent = np.full(len(demand), -1)
        sent[own] = self.to_gpu.columns[~self.to_gpu.holds]
        taking = [np.full(len(demand), -1), np.full(len(demand), -1)]
        for column, (incidence, columns) in zip(taking, (self.ways[0], self.ways[2]), strict=True):
            column[incidence] = columns
        # Pairs (position in own, GPU incidence of the same demand).
        gpus = np.bincount(demand[own], minlength=self.num)
        begin = np.cumsum(gpus) - gpus
        size = gpus[demand[own]]
        which = np.repeat(np.arange(len(own)), size)
        other = own[begin[demand[own]][which] + np.arange(len(which)) - (np.cumsum(size) - size)[which]]
        same = other == own[which]
        for kind, inside in enumerate((same, ~same, np.ones(len(same), dtype=bool))):
            row = self.lp.add_rows(np.ones(len(own)), np.full(len(own), INF), mix(label, 54 + kind))
            for column in taking:
                pairs = inside & (column[other] >= 0)
                terms(row[which[pairs]], column[other[pairs]], 1.0)
            terms(row[which[~inside]], sent[other[~inside]], 1.0)
            self._add_holders(row, own)

    def _add_holders(self, row: IntArray, own: IntArray) -> None:
        """What GPUs that hold send to GPUs of the node, to the row of each wanter of ``own``."""
        demand, inner = self.c.wanter_demand[own], self.to_gpu
        held = inner.demand[inner.holds]  # ascending
        first, last = np.searchsorted(held, demand), np.searchsorted(held, demand, side="right")
        size = last - first
        which = np.repeat(np.arange(len(own)), size)
        at = first[which] - (np.cumsum(size) - size)[which] + np.arange(len(which))
        self.lp.add_terms(row[which], inner.columns[inner.holds][at], 1.0)

    def _class_rows(self) -> None:
        c, terms = self.c, self.lp.add_terms
        incidence, columns = self.ways[0]
        demand = c.wanter_demand[incidence]
        cls = c.demand_class[demand]
        zero = np.zeros(c.num_classes)
        sender_class, sender_place, sending = self.senders
        total = self.lp.add_columns(mix(self.class_label, 31))
        for kind in (0, 1):  # what is taken in, and what is sent
            balance = self.lp.add_rows(zero, zero, mix(self.class_label, 46 + kind))
            terms(balance, total, -1.0)
            if kind == 0:
                terms(balance[cls], columns, c.demand_bytes[demand] / self.class_unit[cls])
            else:
                terms(balance[sender_class], sending, 1.0)
        # Nobody sends to the own node what it takes in from outside.
        key = c.demand_class * len(self.links.nic) + c.demand_node
        pairs, pair_of_demand = np.unique(key, return_inverse=True)
        label = np.zeros(len(pairs), dtype=np.uint64)
        label[pair_of_demand] = self.demand_label
        row = self.lp.add_rows(np.full(len(pairs), -INF), np.zeros(len(pairs)), mix(label, 49))
        terms(row, total[pairs // len(self.links.nic)], -1.0)
        terms(row[pair_of_demand[demand]], columns, c.demand_bytes[demand] / self.class_unit[cls])
        key = sender_class * len(self.links.nic) + self.node[sender_place]
        at = np.minimum(np.searchsorted(pairs, key), len(pairs) - 1)
        wants = pairs[at] == key
        terms(row[at[wants]], sending[wants], 1.0)
        # What leaves the holders' nodes is sent by a holder, or by a wanter that has it from a holder beside it.
        leaving, free = c.first_bytes / self.class_unit, np.full(c.num_classes, INF)
        beside = self.lp.add_rows(leaving, free, mix(self.class_label, 48))
        terms(beside[sender_class[self.beside]], sending[self.beside], 1.0)
        held = self.lp.add_rows(leaving, free, mix(self.class_label, 50))
        holders = len(c.holder_class)
        terms(held[c.holder_class], sending[:holders], 1.0)
        for inner in (self.to_gpu, self.to_host, self.from_host):
            inside = inner.demand[inner.holds]
            cls = c.demand_class[inside]
            terms(held[cls], inner.columns[inner.holds], c.demand_bytes[inside] / self.class_unit[cls])

    def _port_rows(self) -> None:
        c, devices, terms = self.c, self.devices, self.lp.add_terms
        # A device's port serves its GPU and its part of host memory: the label of either names the pair.
        labels = (*(mix(self.place_label[:devices], k) for k in (60, 61)), *(mix(self.rail_label, k) for k in (62, 63)))
        self.ports = [self.lp.add_rows(np.full(len(n), -INF), np.zeros(len(n)), n) for n in labels]
        gpu_in, gpu_out, nic_in, nic_out = self.ports
        for number, (incidence, columns) in enumerate(self.ways):
            place = c.wanter_place[incidence]
            num = c.demand_bytes[c.wanter_demand[incidence]] / self.unit_s
            rate = (
                np.where(self.gpu[incidence], self.intra[place], self.pcie[place]) if number == 1 else self.pcie[place]
            )
            terms(gpu_in[place % devices], columns, rate * num)
            if number == 0:
                terms(nic_in[self.rail[place]], columns, self.nic[place] * num)
        for senders, rates in ((self.to_gpu, self.intra), (self.to_host, self.pcie), (self.from_host, self.pcie)):
            num = c.demand_bytes[senders.demand] / self.unit_s
            terms(gpu_out[senders.place % devices], senders.columns, rates[senders.place] * num)
        cls, place, columns = self.senders
        num = self.class_unit[cls] / self.unit_s
        terms(gpu_out[place % devices], columns, self.pcie[place] * num)
        terms(nic_out[self.rail[place]], columns, self.nic[place] * num)
        every = np.concatenate(self.ports)
        terms(every, np.repeat(self.time, len(every)), -1.0)
