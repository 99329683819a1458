"""The bound on the transfer's seconds, proved from the prices of ports in the document (weak duality).

Let a byte pay, at each port that it passes, the seconds that it keeps the port busy times the port's price. The ports
are busy for at most T seconds each, so all bytes together pay at most T times the sum of all prices; and whatever the
routing, each element pays at least what its cheapest delivery costs: a tree from the places that hold it to all that
take it in (``trees``). So T is at least the sum of the cheapest deliveries over the sum of the prices. Nothing else of
the compiler is trusted: the prices may be any numbers, bad ones only prove little.

Deliveries are those in which only places that hold an element or take it in touch it, each GPU takes it in once, and so
does the host memory of a node, through any of its processes: those that move the fewest bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nereus.models.priors import HOST_COPY_BYTES_PER_S
from nereus.verify.case import Case, Stream, Wants
from nereus.verify.finding import Violation
from nereus.verify.links import FloatArray
from nereus.verify.segments import BoolArray, IntArray, Segments, ints, within
from nereus.verify.trees import ROOT, Way, cheapest

_KINDS = ("gpu-in", "gpu-out", "nic-in", "nic-out", "host-copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prices:
    gpu_in: FloatArray
    gpu_out: FloatArray
    nic_in: FloatArray
    nic_out: FloatArray
    host_copy: FloatArray
    total: float


def proved_seconds(case: Case) -> float:
    """No routing of what arrives is done earlier. Raises Violation."""
    prices = _prices(case)
    if prices is None:
        return 0.0
    costs = _Costs(case, prices)
    paid = 0.0
    for stream, wants, num_bytes in _streams(case):
        paid += _deliveries(case, costs, _arriving(case, stream, wants), wants.held, stream.model) * num_bytes
    return paid / prices.total


def _prices(case: Case) -> _Prices | None:
    world = case.world
    devices = {str(device): number for number, device in enumerate(world.devices)}
    nodes = {node.name: number for number, node in enumerate(world.nodes)}
    every = [(node, number) for node in world.nodes for number in range(node.rails)]
    rails = {node.name if node.rails == 1 else f"{node.name}.nic{i}": at for at, (node, i) in enumerate(every)}
    numbers = {kind: {"gpu": devices, "nic": rails}.get(kind[:3], nodes) for kind in _KINDS}
    columns = {kind: np.zeros(len(known)) for kind, known in numbers.items()}
    if case.document.prices is None:
        raise Violation("nothing in the document proves the bound on seconds: it is from before there were proofs")
    for kind, name, weight in case.document.prices:
        if name not in numbers.get(kind, {}):
            raise Violation(f"{kind} of {name} is no port, and has a price")
        number = numbers[kind][name]
        if columns[kind][number]:
            raise Violation(f"two prices for {kind} of {name}")
        columns[kind][number] = weight
    total = float(sum(int(weight) for _, _, weight in case.document.prices))
    if total <= 0:
        return None
    return _Prices(**{kind.replace("-", "_"): column for kind, column in columns.items()}, total=total)


def _streams(case: Case) -> list[tuple[Stream, Wants, int]]:
    """(stream, wants, bytes of an element): streams with the same moves and wants go together."""
    groups: dict[tuple[object, ...], tuple[Stream, Wants, int]] = {}
    for stream in case.streams:
        wants = case.wants(stream.model, stream.kind)
        key = (stream.model, id(wants), stream.carries.tobytes())
        num_bytes = groups[key][2] if key in groups else 0
        groups[key] = (stream, wants, num_bytes + stream.kind.num_bytes)
    return list(groups.values())


def _arriving(case: Case, stream: Stream, wants: Wants) -> Segments:
    """What a place lacks, and what it could make and fetches all the same."""
    if not wants.derived.total:
        return wants.need
    chosen = np.zeros(len(case.document.moves), dtype=bool)
    chosen[stream.carries] = True
    mine = case.rows.of_moves(chosen)
    stride = case.grounds[stream.model].stride
    dst = case.document.moves.dst[mine.move]
    fetched = Segments.union(dst * stride + mine.lo, dst * stride + mine.hi).common(wants.derived)
    return Segments.union(np.concatenate((wants.need.lo, fetched.lo)), np.concatenate((wants.need.hi, fetched.hi)))


class _Costs:
    """Per place: what a byte pays for passing its ports, by way: between nodes, from or to a GPU of the node, from or
    to host memory of the node."""

    def __init__(self, case: Case, prices: _Prices) -> None:
        world = case.world
        node = world.node_of
        gpus = [n.gpu for n in world.nodes]
        intra = np.array([1 / min(g.intra_bytes_per_s, g.intra_peer_bytes_per_s) for g in gpus])[node]
        pcie = np.array([1 / g.pcie_bytes_per_s for g in gpus])[node]
        rail = world.rail_of
        nic = np.array([n.rails / n.nic_bytes_per_s for n in world.nodes])[node]
        self.give_inter, self.take_inter = (
            np.tile(gpu * pcie + far[rail] * nic, 2)
            for gpu, far in ((prices.gpu_out, prices.nic_out), (prices.gpu_in, prices.nic_in))
        )
        self.give_gpu, self.take_gpu = prices.gpu_out * intra, prices.gpu_in * intra
        self.give_host, self.take_host = (np.tile(gpu * pcie, 2) for gpu in (prices.gpu_out, prices.gpu_in))
        self.copy = prices.host_copy / HOST_COPY_BYTES_PER_S
        self.takes_cost = np.tile(prices.gpu_in + prices.nic_in[rail], 2) > 0
        self.gives_cost = np.tile(prices.gpu_out + prices.nic_out[rail], 2) > 0


def _deliveries(case: Case, costs: _Costs, arriving: Segments, held: Segments, model: str) -> float:
    """What one byte per element pays at least, all elements together."""
    stride, num_devices = case.grounds[model].stride, case.world.num_devices
    kinds = _Kinds.of(arriving, held, stride)
    graph: list[IntArray] = []
    place: list[IntArray] = []
    holds: list[BoolArray] = []
    sizes: list[int] = []
    copies = 0.0
    for numel, takers, holders in kinds.classes():
        copies += numel * _copying(case, costs, takers, holders)
        free = not bool(costs.takes_cost[takers].any()) and not bool(costs.gives_cost[holders].all())
        if free:  # one holder gives to all
            continue
        rows = np.concatenate((takers, holders))
        graph.append(np.full(len(rows), len(sizes)))
        place.append(rows)
        holds.append(np.arange(len(rows)) >= len(takers))
        sizes.append(numel)
    if not sizes:
        return copies
    at, where, root = np.concatenate(graph), np.concatenate(place), np.concatenate(holds)
    node, host = case.world.node_of_places(where), where >= num_devices
    # A node's host memory is one vertex, which has it if any of its processes does.
    vertex = np.where(host, case.world.num_spaces + node, where)
    span = case.world.num_spaces + len(case.world.nodes)
    component = at * span + vertex
    component[np.isin(component, component[root])] = ROOT
    lacking = np.inf
    near = at * len(case.world.nodes) + node
    gpu = where % num_devices
    ways = (
        Way(at, costs.give_inter[where], costs.take_inter[where]),
        Way(near, np.where(host, lacking, costs.give_gpu[gpu]), np.where(host, lacking, costs.take_gpu[gpu])),
        Way(near, np.where(host, lacking, costs.give_host[where]), np.where(host, costs.take_host[where], lacking)),
        Way(near, np.where(host, costs.give_host[where], lacking), np.where(host, lacking, costs.take_host[where])),
    )
    least = cheapest(at, component, ways, len(sizes))
    return copies + float((np.where(np.isfinite(least), least, 0.0) * np.array(sizes)).sum())


def _copying(case: Case, costs: _Costs, takers: IntArray, holders: IntArray) -> float:
    """Inside a node's host memory: from process to process, all but the first where the bytes come from outside."""
    if not bool(costs.copy.any()):
        return 0.0
    num_devices, num_nodes = case.world.num_devices, len(case.world.nodes)
    takes, has = (
        np.bincount(case.world.node_of_places(places[places >= num_devices]), minlength=num_nodes)
        for places in (takers, holders)
    )
    return float((costs.copy * np.maximum(takes - (has == 0), 0)).sum())


@dataclass(frozen=True, slots=True, eq=False)
class _Kinds:
    """Places that take, or hold, the same elements are one kind of place. ``members``: places of each kind; kinds up to
    ``num_taking`` take. ``lo``, ``hi``: elements between two borders of any kind; ``first``, ``kind``: which kinds
    each such interval has, ascending."""

    members: list[IntArray]
    num_taking: int
    lo: IntArray
    hi: IntArray
    first: IntArray
    kind: IntArray

    @classmethod
    def of(cls, arriving: Segments, held: Segments, stride: int) -> _Kinds:
        members: list[IntArray] = []
        spans: list[tuple[IntArray, IntArray]] = []
        counts = []
        for line in (arriving, held):
            found: dict[tuple[bytes, bytes], int] = {}
            places: list[list[int]] = []
            place = line.lo // stride
            starts = np.flatnonzero(np.diff(place, prepend=-1)).tolist()
            for begin, end in pairwise([*starts, len(place)]):
                own = int(place[begin])
                lo, hi = line.lo[begin:end] - own * stride, line.hi[begin:end] - own * stride
                key = (lo.tobytes(), hi.tobytes())
                if key not in found:
                    found[key] = len(places)
                    places.append([])
                    spans.append((lo, hi))
                places[found[key]].append(own)
            members += [ints(one) for one in places]
            counts.append(len(places))
        if not counts[0]:
            empty = np.zeros(0, dtype=np.int64)
            return cls(members, 0, empty, empty, np.zeros(1, dtype=np.int64), empty)
        points = np.unique(np.concatenate([end for span in spans for end in span]))
        owner = np.repeat(np.arange(len(spans)), [len(lo) for lo, _ in spans])
        lo, hi = (np.concatenate([span[side] for span in spans]) for side in (0, 1))
        at = np.searchsorted(points, lo)
        parts = np.searchsorted(points, hi) - at
        interval = np.repeat(at, parts) + within(parts)
        kind = np.repeat(owner, parts)
        order = np.lexsort((kind, interval))
        first = np.searchsorted(interval[order], np.arange(len(points)))
        return cls(members, counts[0], points[:-1], points[1:], first, kind[order])

    def classes(self) -> list[tuple[int, IntArray, IntArray]]:
        """(elements, who takes, who holds) for everything that somebody takes."""
        found: dict[bytes, int] = {}
        for lo, hi, begin, end in zip(
            self.lo.tolist(), self.hi.tolist(), self.first[:-1].tolist(), self.first[1:].tolist(), strict=True
        ):
            if end > begin and self.kind[begin] < self.num_taking:
                key = self.kind[begin:end].tobytes()
                found[key] = found.get(key, 0) + hi - lo
        result = []
        empty = np.zeros(0, dtype=np.int64)
        for key, numel in found.items():
            kinds = np.frombuffer(key, dtype=np.int64)
            sides = (kinds[kinds < self.num_taking], kinds[kinds >= self.num_taking])
            takers, holders = (
                np.concatenate([self.members[k] for k in side]) if len(side) else empty for side in sides
            )
            result.append((numel, takers, holders))
        return result
