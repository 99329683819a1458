"""route: which place sends what to whom, and how near to the bound that is.

What has no choice is put on the ports first; the rest follows in an order, decided by the router (``router``, and
``bulk`` for many demands at once). Where the ports then end late, the flow programme's own shares and a repair are
tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from nereus.ir.layout import IntArray
from nereus.ir.moves import Moves
from nereus.ir.units import MIB
from nereus.models.priors import MESSAGE_S
from nereus.passes.bound import Bounds
from nereus.passes.bulk import BulkRouter
from nereus.passes.commodities import Flow
from nereus.passes.diff import Diff, holders_by_class
from nereus.passes.diff_flows import DiffFlows
from nereus.passes.hops import Hop
from nereus.passes.links import Links
from nereus.passes.lists import Lists, contains
from nereus.passes.rebalance import TOLERANCE, rebalance
from nereus.passes.relays import Ports
from nereus.passes.router import DEPTH_COSTS, Class
from nereus.passes.stripes import to_moves


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
    never). ``bulk``: so many demands of one class and size are routed together; fewer are as fast one by one."""

    min_stripe_bytes: int = 1 * MIB
    flow_bound: int = 1
    bulk: int = 64

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
        if _expected_s(routed) > bound.transfer_s * FAR:
            routed = self._nearer(routed, router, bound.transfer_s)
        return replace(routed, bound=bound)

    def _nearer(self, best: Routed, router: _Router, bound_s: float) -> Routed:
        """The best of ``best`` and repairs. A repair that aims at the bound itself may strand a port far beyond it, for
        all others are full by then."""
        for start in self._starts(router):
            for aim in AIMS:
                other = start.repaired(bound_s * aim)
                if _expected_s(other) < _expected_s(best):
                    best = other
                if _expected_s(best) <= bound_s * FAR:
                    return best
                if other.ports.busiest_out_s <= bound_s * aim * (1 + TOLERANCE):
                    break
        return best

    def _starts(self, router: _Router) -> Iterator[_Router]:
        """The router's own result, and one with fewer relays: it ends later before its repair, and sends less deep."""
        yield router
        shallow = _Router(self, router.diff, depth_costs=1)
        shallow.run()
        yield shallow


#: Up to so many GPUs the flow programme's own shares are tried where the router does not come near the bound.
MAX_SPLIT_DEVICES = 256
#: Beyond so many times the bound, repairs are tried that aim at so many times it.
FAR = 1.07
AIMS = (1.0, 1.03, 1.06)
#: Waves into which a transfer is cut at most: what a sending more costs.
_WAVES = 64


def _expected_s(routed: Routed) -> float:
    """Seconds on the busiest port, to fill the pipeline of relays, and for the messages of its waves."""
    busiest_s = routed.ports.busiest_s
    fill_s = busiest_s * max(int(routed.moves.depth.max(initial=0)) - 1, 0)
    waves = min(_WAVES, sqrt(fill_s / MESSAGE_S))
    return busiest_s + (fill_s / waves + waves * MESSAGE_S if waves else MESSAGE_S)


class _Router(BulkRouter):
    def __init__(self, options: Route, diff: Diff, *, depth_costs: int = DEPTH_COSTS) -> None:
        super().__init__(diff, options.min_stripe_bytes, options.bulk, depth_costs)
        self.options = options

    def run(self) -> Routed:
        """First what has no choice, then class by class what has."""
        demands, holders = self.diff.demands, holders_by_class(self.diff)
        classes = demands.classes
        alone = np.flatnonzero((classes.counts == 1) & (holders.counts == 1))
        alone = alone[demands.wanters.counts[classes.first[alone]] == 1]
        self._without_choice(classes.first[alone], holders.item[holders.first[alone]])
        for numbers, of in self._order(np.setdiff1d(np.arange(len(classes)), alone), holders):
            left = self._many(numbers, of) if len(numbers) >= self.least and of.relays is not None else numbers
            for number in left.tolist():
                self._route(demands[number], of)
        return self._routed()

    def follow(self, found: DiffFlows, hops: Sequence[Hop]) -> Routed:
        """What the flow programme decided."""
        self.regions += zip(found.tables, found.intervals, strict=True)
        for hop in hops:
            self._add(hop.src, hop.dst, found.tables[hop.atom], hop.atom, hop.lo, hop.hi, hop.parent)
        return self._routed()

    def repaired(self, target_s: float) -> Routed:
        """What was routed, with other senders for what keeps ports busy beyond ``target_s``."""
        flows = [
            Flow(
                atom=number,
                num_bytes=int(self.sizes[table][rows].sum()) * self.widths[table],
                holders=holders,
                wanters=(),
                element_bytes=self.widths[table],
            )
            for number, ((table, rows), holders) in enumerate(zip(self.regions, self.region_holders, strict=True))
        ]
        stripes = self.stripes.columns()
        columns = (stripes.region, stripes.lo, stripes.hi, stripes.src, stripes.dst, stripes.parent)
        hops = [Hop(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        deepest = int(self._routed().moves.depth.max(initial=0))
        found = _Router(self.options, self.diff)
        found.regions = self.regions
        least = self.min_stripe_bytes
        for hop in rebalance(hops, flows, self.links, target_s, least_bytes=least, max_depth=deepest):
            found._add(hop.src, hop.dst, self.regions[hop.atom][0], hop.atom, hop.lo, hop.hi, hop.parent)
        return found._routed()

    def _routed(self) -> Routed:
        moves = to_moves(self.stripes.columns(), self.regions, self.diff.tables)
        return Routed(
            moves=moves,
            ports=self.ports,
            links=self.links,
            bound=self.bound,
            foregone_bytes=self.diff.foregone.moved_bytes,
        )

    def _order(self, chosen: IntArray, holders: Lists) -> Iterator[tuple[IntArray, Class]]:
        """(demands of one size, their class) of the ``chosen`` classes. Bytes that several nodes want go to one of them
        first, which can then relay them: to the one that had least to send so far. What can come from few holders goes
        before what has a choice, large before small."""
        demands, num_nodes = self.diff.demands, len(self.links.nic)
        if not len(demands):
            return
        first_of, cls = demands.classes.first, demands.classes.owner
        nodes = Lists.of_pairs(holders.owner, self.links.nodes[holders.item % self.num_devices], len(holders))
        outside = ~contains(nodes, cls, demands.node)
        share = np.maximum.reduceat(demands.num_bytes, first_of[:-1]) // np.maximum(nodes.counts, 1)
        #: Bytes that each node holds for others, or is to relay.
        expected = np.bincount(nodes.item, weights=share[nodes.owner], minlength=num_nodes)
        begin = first_of[chosen]
        of_class: dict[int, Class] = {}
        is_first = np.zeros(len(demands), dtype=bool)
        for number in chosen[
            np.lexsort((demands.cls[begin], demands.table[begin], -demands.num_bytes[begin]))
        ].tolist():
            rows = np.arange(first_of[number], first_of[number + 1])
            of_class[number] = self._class(rows, holders.item[holders.first[number] : holders.first[number + 1]])
            rows = rows[outside[rows]]
            if len(rows):
                node, num_bytes = demands.node[rows], demands.num_bytes[rows]
                first = rows[np.lexsort((node, expected[node], -num_bytes))[0]] if len(rows) > 1 else rows[0]
                is_first[first] = True
                expected[demands.node[first]] += demands.num_bytes[first] * (len(rows) - 1)
        rows = np.flatnonzero(np.isin(cls, chosen))
        wanter = demands.wanters.item[demands.wanters.first[rows]]
        keys = (~is_first[rows], np.minimum(nodes.counts, 2)[cls[rows]], -demands.num_bytes[rows], cls[rows])
        order = np.lexsort((wanter, demands.node[rows], *reversed(keys)))
        rows = rows[order]
        other = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
        for part in np.split(rows, np.flatnonzero(other) + 1):
            if len(part):
                yield part, of_class[int(cls[part[0]])]
