"""Repair of a routing: what keeps a port busy beyond the target is sent by another place that has the same bytes.

Works on any list of hops. A hop between nodes may come from any holder, or from any place that another hop brings the
bytes to (not one that depends on this hop). It is cut where only a part has to move or fits elsewhere, and with it
whatever relays it.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereus.passes.commodities import Flow
from nereus.passes.hops import Hop
from nereus.passes.links import Links

#: Share of the target by which a port may miss it.
TOLERANCE = 1e-3
#: Sweeps over all ports.
SWEEPS = 4


def rebalance(
    hops: Sequence[Hop],
    flows: Sequence[Flow],
    links: Links,
    target_s: float,
    *,
    least_bytes: int,
    max_depth: int | None = None,
) -> list[Hop]:
    """``Hop.atom``: position of the flow. Parents come before what relays them. ``max_depth``: most sendings that bring
    bytes from their holder, where a hop gets another source."""
    repair = _Repair(hops, flows, links, target_s, least_bytes)
    repair.max_depth = max_depth
    return repair.run()


class _Repair:
    def __init__(
        self, hops: Sequence[Hop], flows: Sequence[Flow], links: Links, target_s: float, least_bytes: int
    ) -> None:
        self.flows, self.links, self.target_s, self.least_bytes = flows, links, target_s, least_bytes
        self.max_depth: int | None = None
        self.flow = [h.atom for h in hops]
        self.lo, self.hi = [h.lo for h in hops], [h.hi for h in hops]
        self.src, self.dst = [h.src for h in hops], [h.dst for h in hops]
        self.parent = [h.parent for h in hops]
        self.children: list[list[int]] = [[] for _ in hops]
        self.of_flow: list[list[int]] = [[] for _ in flows]
        self.gpu_out = [0.0] * links.num_devices
        self.nic_out = [0.0] * len(links.rail)
        for number, hop in enumerate(hops):
            if hop.parent >= 0:
                self.children[hop.parent].append(number)
            self.of_flow[hop.atom].append(number)
            self._load(number, 1.0)

    def _load(self, number: int, sign: float) -> None:
        src = self.src[number]
        _, out_rate, _, nic_rate = self.links.rates(src, self.dst[number])
        num_bytes = sign * (self.hi[number] - self.lo[number]) * self.flows[self.flow[number]].element_bytes
        self.gpu_out[src % self.links.num_devices] += num_bytes * out_rate
        self.nic_out[self.links.rail_number(src)] += num_bytes * nic_rate

    def run(self) -> list[Hop]:
        devices = self.links.num_devices
        from_gpu: dict[int, list[int]] = {}
        for number, src in enumerate(self.src):
            if self.links.rates(src, self.dst[number])[1] > 0.0:
                from_gpu.setdefault(src % devices, []).append(number)
        for _ in range(SWEEPS):
            before = self._worst()
            for device in sorted(from_gpu, key=lambda d: -self._busy(d)):
                # Large ones first: few cuts.
                for number in sorted(from_gpu[device], key=lambda n: self.lo[n] - self.hi[n]):
                    over = self._over(device)
                    if over <= 0.0:
                        break
                    if self.src[number] % devices == device:
                        moved = self._move(number, device)
                        if moved >= 0:
                            from_gpu.setdefault(self.src[moved] % devices, []).append(moved)
            if self._worst() <= self.target_s or self._worst() >= before:
                break
        return self._in_order()

    def _worst(self) -> float:
        return max(*self.gpu_out, *self.nic_out)

    def _busy(self, device: int) -> float:
        return max(self.gpu_out[device], self.nic_out[self.links.rail_number(device)])

    def _over(self, device: int) -> float:
        """Seconds beyond the target of the device's port or its node's NIC; 0 where it is hardly any."""
        over = self._busy(device) - self.target_s
        return over if over > self.target_s * TOLERANCE else 0.0

    def _move(self, number: int, device: int) -> int:
        """Let another place send the hop, or its end; the number of the hop that moved, or -1."""
        links, flow = self.links, self.flows[self.flow[number]]
        dst, width = self.dst[number], flow.element_bytes
        _, out_rate, _, nic_rate = links.rates(self.src[number], dst)
        excess = max(
            (self.gpu_out[device] - self.target_s) / out_rate if out_rate else 0.0,
            (self.nic_out[links.rail_number(device)] - self.target_s) / nic_rate if nic_rate else 0.0,
        )
        wanted = min(self.hi[number] - self.lo[number], -int(-excess // width))
        best, source, parent = 0, -1, -1
        for place, by in self._alternatives(number):
            room = min(self._room(place, number) // width, wanted)
            if room > best:
                best, source, parent = int(room), place, by
                if best >= wanted:
                    break
        least = max(1, self.least_bytes // width)
        if best < min(least, self.hi[number] - self.lo[number]):
            return -1
        whole = self.hi[number] - self.lo[number]
        if best < whole and whole - best >= least:
            number = self._cut(number, self.hi[number] - best)
            # What the source has may be cut now, too: the part of it that covers the moved end.
            parent = self._covering(parent, number)
        elif best < whole:
            return -1
        self._load(number, -1.0)
        if self.parent[number] >= 0:
            self.children[self.parent[number]].remove(number)
        self.src[number], self.parent[number] = source, parent
        if parent >= 0:
            self.children[parent].append(number)
        self._load(number, 1.0)
        return number

    def _room(self, place: int, number: int) -> float:
        """Bytes of the hop that ``place`` can send within the target; none through the port that is too busy."""
        links, src = self.links, self.src[number]
        _, out_rate, _, nic_rate = links.rates(place, self.dst[number])
        device, rail = place % links.num_devices, links.rail_number(place)
        if device == src % links.num_devices:
            return 0.0
        room = (self.target_s - self.gpu_out[device]) / out_rate if out_rate else float("inf")
        if nic_rate and rail != links.rail_number(src):
            room = min(room, (self.target_s - self.nic_out[rail]) / nic_rate)
        elif nic_rate and self.nic_out[rail] > self.target_s * (1 + TOLERANCE):
            return 0.0
        return room

    def _alternatives(self, number: int) -> list[tuple[int, int]]:
        """(place, hop that brings it the same elements or -1): in another node than the receiver's, or in it, as now,
        and no slower to take in."""
        links, dst, lo, hi = self.links, self.dst[number], self.lo[number], self.hi[number]
        home = links.node(dst)
        inside = links.node(self.src[number]) == home
        in_rate = links.rates(self.src[number], dst)[2]
        holders = [(place, -1) for place in self.flows[self.flow[number]].holders]
        relays = [
            (self.dst[other], other)
            for other in self.of_flow[self.flow[number]]
            if self.lo[other] <= lo and hi <= self.hi[other]
        ]
        return [
            (place, by)
            for place, by in (*holders, *relays)
            if place not in (self.src[number], dst)
            and (links.node(place) == home) == inside
            and links.rates(place, dst)[2] <= in_rate
            and not self._depends(by, number)
            and (self.max_depth is None or self._depth(by) + self._height(number) <= self.max_depth)
        ]

    def _depth(self, number: int) -> int:
        depth = 0
        while number >= 0:
            number = self.parent[number]
            depth += 1
        return depth

    def _height(self, number: int) -> int:
        """Sendings from the hop on, itself included."""
        return 1 + max((self._height(child) for child in self.children[number]), default=0)

    def _depends(self, number: int, on: int) -> bool:
        while number >= 0:
            if number == on:
                return True
            number = self.parent[number]
        return False

    def _cut(self, number: int, at: int) -> int:
        """Cut the hop and all that relays it at element ``at``; the number of the second part."""
        second = len(self.lo)
        for column in (self.flow, self.src, self.dst, self.parent):
            column.append(column[number])
        self.lo.append(at)
        self.hi.append(self.hi[number])
        self.hi[number] = at
        self.children.append([])
        self.of_flow[self.flow[number]].append(second)
        if self.parent[number] >= 0:
            self.children[self.parent[number]].append(second)
        for child in list(self.children[number]):
            if self.lo[child] >= at:
                moved = child
            elif self.hi[child] > at:
                moved = self._cut(child, at)
            else:
                continue
            self.children[number].remove(moved)
            self.children[second].append(moved)
            self.parent[moved] = second
        return second

    def _covering(self, hop: int, number: int) -> int:
        """The part of what was hop ``hop`` that has all elements of hop ``number``; hops are cut at one place only."""
        if hop < 0 or (self.lo[hop] <= self.lo[number] and self.hi[number] <= self.hi[hop]):
            return hop
        return next(
            other
            for other in self.of_flow[self.flow[hop]]
            if self.dst[other] == self.dst[hop]
            and self.lo[other] <= self.lo[number]
            and self.hi[number] <= self.hi[other]
        )

    def _in_order(self) -> list[Hop]:
        """Parents before children, else in the old order."""
        position = [-1] * len(self.lo)
        result: list[Hop] = []
        for root in range(len(self.lo)):
            chain = []
            number = root
            while number >= 0 and position[number] < 0:
                chain.append(number)
                number = self.parent[number]
            for number in reversed(chain):
                position[number] = len(result)
                above = self.parent[number]
                result.append(
                    Hop(
                        self.flows[self.flow[number]].atom,
                        self.lo[number],
                        self.hi[number],
                        self.src[number],
                        self.dst[number],
                        position[above] if above >= 0 else -1,
                    )
                )
        return result
