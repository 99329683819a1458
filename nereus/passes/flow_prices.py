"""A lower bound of the transfer time from prices of ports, whatever the prices.

Let a byte cost, at each port that it passes, the seconds it keeps the port busy times the port's price. If the prices
of one second of every port add up to 1, then the longest any port is busy is at least what all bytes cost together, and
that is at least what each class costs when it is delivered in its cheapest way (weak duality). The cheapest way of a
class is a closed form, since every port is a port of a single place or node:

* each node that lacks the bytes takes them in at least once, each wanter once, each from the cheapest side;
* who sends between nodes, or inside one, may be any place that has the bytes or lacks them and relays; only the first
  sending must be a holder's, since a tree can be turned so that its first receiver feeds all others.

So the figure needs no solver to be trusted: ``flow_bound`` looks for good prices, this says what they prove. Counted
are routings in which only holders and wanters touch bytes, each GPU takes in what it lacks once and so does each host
memory (moved bytes are least).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.layout import IntArray
from nereus.passes.bound import GPU_IN, GPU_OUT, NIC_IN, NIC_OUT
from nereus.passes.commodities import Commodities, FloatArray
from nereus.passes.links import Links

#: What rounded prices add up to: with 4,096 ports that count, rounding takes less than 1e-8 of the bound.
WEIGHTS = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Price of a second of each port; all together at most 1."""

    gpu_out: FloatArray
    gpu_in: FloatArray
    nic_out: FloatArray
    nic_in: FloatArray

    def total(self) -> float:
        return float(self.gpu_out.sum() + self.gpu_in.sum() + self.nic_out.sum() + self.nic_in.sum())


def as_weights(prices: Prices) -> tuple[Prices, tuple[tuple[str, int, int], ...]]:
    """Prices as whole weights, all together about ``WEIGHTS``, and those that are not 0 by kind and number of the port.
    Rounding makes what they prove a little lower, never wrong."""
    scale = WEIGHTS / max(prices.total(), 1e-300)
    kinds = (GPU_OUT, GPU_IN, NIC_OUT, NIC_IN)
    columns = [np.rint(column * scale) for column in (prices.gpu_out, prices.gpu_in, prices.nic_out, prices.nic_in)]
    rows = tuple(
        (kind, int(number), int(column[number]))
        for kind, column in zip(kinds, columns, strict=True)
        for number in np.flatnonzero(column)
    )
    gpu_out, gpu_in, nic_out, nic_in = columns
    return Prices(gpu_out=gpu_out, gpu_in=gpu_in, nic_out=nic_out, nic_in=nic_in), rows


class Costs:
    """Cost per byte of passing from or to a place, by way: between nodes (``inter``), from or to a GPU of the node
    (``gpu``), from or to its host memory (``host``)."""

    def __init__(self, links: Links, prices: Prices) -> None:
        devices = links.num_devices
        node = np.array(links.node_of, dtype=np.int64)
        pcie = np.array(links.pcie)[node]
        intra = np.array(links.intra)[node]
        rail = np.array(links.rail_of, dtype=np.int64)
        nic = np.array(links.rail)[rail]
        self.inter_out = np.tile(prices.gpu_out * pcie + prices.nic_out[rail] * nic, 2)
        self.inter_in = np.tile(prices.gpu_in * pcie + prices.nic_in[rail] * nic, 2)
        # Place p < devices is a GPU; a host place shares its device's port and passes it at PCIe's rate.
        self.gpu_out = np.concatenate((prices.gpu_out * intra, prices.gpu_out * pcie))
        self.gpu_in = np.concatenate((prices.gpu_in * intra, prices.gpu_in * pcie))
        self.host_out = np.tile(prices.gpu_out * pcie, 2)
        self.host_in = np.tile(prices.gpu_in * pcie, 2)
        self.devices = devices
        self.node = np.tile(node, 2)


def priced_bound(commodities: Commodities, links: Links, prices: Prices) -> float:
    """Seconds that no routing beats."""
    total = prices.total()
    if total <= 0 or not commodities.num_demands:
        return 0.0
    return _cheapest(commodities, Costs(links, prices)) / total


def _cheapest(c: Commodities, costs: Costs) -> float:
    cls = c.demand_class[c.wanter_demand]
    costs_out = costs.inter_out[c.wanter_place]
    # What is taken in is sent by anyone outside of the node.
    relays = (np.bincount(c.demand_class, minlength=c.num_classes) > 1)[cls]
    sender_class = np.concatenate((c.holder_class, cls[relays]))
    sender_place = np.concatenate((c.holder_place, c.wanter_place[relays]))
    node, cost = costs.node[sender_place], costs.inter_out[sender_place]
    best = _least(cost, sender_class, c.num_classes)
    best_node = np.zeros(c.num_classes, dtype=np.int64)
    here = cost == best[sender_class]
    best_node[sender_class[here]] = node[here]
    elsewhere = node != best_node[sender_class]
    second = _least(cost[elsewhere], sender_class[elsewhere], c.num_classes)
    from_any = np.where(best_node[c.demand_class] == c.demand_node, second[c.demand_class], best[c.demand_class])
    per_byte, if_holder_sends = _demand_costs(c, costs, from_any)
    # What leaves the holders' nodes is sent by a holder first, or by a wanter that has it from a holder beside it.
    beside = c.inside[c.wanter_demand]
    detour = costs_out + (if_holder_sends - per_byte)[c.wanter_demand]
    from_holders = np.minimum(
        _least(costs.inter_out[c.holder_place], c.holder_class, c.num_classes),
        _least(detour[beside], cls[beside], c.num_classes),
    )
    lacking = ~c.inside
    highest = -_least(-from_any[lacking], c.demand_class[lacking], c.num_classes)
    leaves = c.first_bytes > 0
    first = float((c.first_bytes[leaves] * (from_holders - highest)[leaves]).sum())
    return first + float((c.demand_bytes * per_byte).sum())


def _demand_costs(c: Commodities, costs: Costs, from_any: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Per byte of each demand: the least that bringing it to all wanters costs; the same where a holder of the node
    has to send (infinite where there is none)."""
    num, demand, place = c.num_demands, c.wanter_demand, c.wanter_place
    gpu, near_gpu = place < costs.devices, c.near_place < costs.devices
    num_gpus = np.bincount(demand[gpu], minlength=num)
    hosts = np.bincount(demand[~gpu], minlength=num) > 0
    # The cheapest sender inside the node: a holder, or anyone who gets the bytes.
    holder_to_gpu = _least(costs.gpu_out[c.near_place[near_gpu]], c.near_demand[near_gpu], num)
    holder_to_host = _least(costs.host_out[c.near_place[near_gpu]], c.near_demand[near_gpu], num)
    host_holder = _least(costs.host_out[c.near_place[~near_gpu]], c.near_demand[~near_gpu], num)
    several = gpu & (num_gpus[demand] > 1)
    to_gpu = np.minimum(holder_to_gpu, _least(costs.gpu_out[place[several]], demand[several], num))
    to_host = np.minimum(holder_to_host, _least(costs.host_out[place[gpu]], demand[gpu], num))
    from_host = np.minimum(host_holder, _least(costs.host_out[place[~gpu]], demand[~gpu], num))

    def inward(to_gpu: FloatArray, to_host: FloatArray, from_host: FloatArray) -> FloatArray:
        """Least cost of taking in from the own node, per wanter."""
        of_gpu = np.minimum(costs.gpu_in[place] + to_gpu[demand], costs.host_in[place] + from_host[demand])
        return np.where(gpu, of_gpu, costs.host_in[place] + to_host[demand])

    outside = costs.inter_in[place] + from_any[demand]
    chosen = np.minimum(outside, inward(to_gpu, to_host, from_host))
    held = inward(holder_to_gpu, holder_to_host, host_holder)
    entry = np.minimum(outside, held)
    # Where only GPUs want, relays get the bytes from one that took them in and sends first; or nobody relays.
    relayed = several & ~hosts[demand]
    first = entry + np.where(relayed, costs.gpu_out[place] - np.where(several, to_gpu[demand], 0.0), 0.0)
    # All processes of a node share its host memory: one of them takes the bytes in.
    once = np.where(hosts, _least(chosen[~gpu], demand[~gpu], num), 0.0)
    total = np.bincount(demand[gpu], chosen[gpu], num).astype(np.float64) + once

    def dearer(way: FloatArray) -> FloatArray:
        """What it costs more if one wanter, or host memory, takes the bytes in by ``way``."""
        of_host = np.where(hosts, _least(way[~gpu], demand[~gpu], num) - once, np.inf)
        return np.maximum(np.minimum(_least(way[gpu] - chosen[gpu], demand[gpu], num), of_host), 0.0)

    unrelayed = np.bincount(demand[gpu], entry[gpu], num) + np.where(hosts, np.inf, 0.0)
    per_byte = np.minimum(total + dearer(first), np.maximum(unrelayed, total))
    return per_byte, np.maximum(per_byte, total + dearer(held))


def _least(values: FloatArray, index: IntArray, num: int) -> FloatArray:
    found = np.full(num, np.inf)
    np.minimum.at(found, index, values)
    return found
