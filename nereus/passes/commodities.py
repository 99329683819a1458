"""What must flow, in columns: per class its holders, per node the places that lack bytes of it.

The flow bound and the splits work on these and on nothing else, so they do not depend on how a router cuts its
demands. A *class* has one set of holders; a *demand* is what the places of one node lack of a class. Classes with the
same holders and the same demands are one: their bytes add, and any fractional routing of the sum is one of the parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.ir.layout import BoolArray, IntArray
from nereus.passes.demands import Demand
from nereus.passes.diff import Diff
from nereus.passes.links import Links

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes with one set of holders that one set of places lacks. ``atom`` is the caller's number for them,
    ``element_bytes`` what cannot be cut; ``kin``: flows of one number (>= 0) have the same holders, and nearly the same
    places lack them, so that they are planned together."""

    atom: int
    num_bytes: int
    holders: tuple[int, ...]
    wanters: tuple[int, ...]
    element_bytes: int = 1
    kin: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Commodities:
    """Incidences are pairs of columns, grouped by their first."""

    #: What each class was made from: the position of its key (flows), or of its first demand's class (a diff).
    members: tuple[tuple[int, ...], ...]
    first_bytes: FloatArray  # class -> bytes that must leave the holders' nodes at least once
    holder_class: IntArray
    holder_place: IntArray
    demand_class: IntArray
    demand_node: IntArray
    demand_bytes: FloatArray
    inside: BoolArray  # demand -> a place of its node holds the class
    wanter_demand: IntArray
    wanter_place: IntArray
    near_demand: IntArray  # holders in the demand's own node
    near_place: IntArray
    host_copy_bytes: FloatArray  # per node: copies inside host memory, the same for every routing

    @property
    def num_classes(self) -> int:
        return len(self.first_bytes)

    @property
    def num_demands(self) -> int:
        return len(self.demand_class)


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """``num_bytes`` of a class that ``places`` of ``node`` lack."""

    node: int
    num_bytes: int
    places: tuple[int, ...]


def commodities_of_flows(flows: Iterable[Flow], links: Links) -> Commodities:
    """``members``: positions of the flows. Flows of one kin are one class: its demands are what each wanter lacks."""
    kin: dict[Hashable, list[tuple[int, Flow]]] = {}
    for position, flow in enumerate(flows):
        key: Hashable = (flow.holders, flow.wanters) if flow.kin < 0 else flow.kin
        kin.setdefault(key, []).append((position, flow))
    rows = []
    for members in kin.values():
        holders = members[0][1].holders
        nodes = {links.node(place) for place in holders}
        leaving = 0
        wants: dict[tuple[int, tuple[int, ...]], int] = {}
        for _, flow in members:
            by_node: dict[int, list[int]] = {}
            for place in flow.wanters:
                by_node.setdefault(links.node(place), []).append(place)
            for node, places in by_node.items():
                want = (node, tuple(places))
                wants[want] = wants.get(want, 0) + flow.num_bytes
            leaving += flow.num_bytes if any(node not in nodes for node in by_node) else 0
        rows.append(
            _Row(
                holders=holders,
                wants=[Want(node=node, num_bytes=n, places=places) for (node, places), n in wants.items()],
                leaving=leaving,
                members=tuple(position for position, _ in members),
            )
        )
    return _columns(rows, links)


def commodities_of_diff(diff: Diff, links: Links) -> Commodities:
    """Demands of a class may lack different parts of it (what a place derives it does not lack). ``members``: positions
    of the diff's classes that have demands, in the order of their first."""
    merged: dict[Hashable, _Row] = {}
    for number, (table, cls, demands) in enumerate(diff.demands.by_class()):
        holders = diff.holders[table][cls]
        nodes = {links.node(place) for place in holders}
        leaving = _union_bytes(diff, [d for d in demands if d.node not in nodes])
        wants = [Want(node=d.node, num_bytes=d.num_bytes, places=d.wanters) for d in demands]
        # Only demands of equal parts of a class add up: the shares of the sum are shares of each.
        equal = all(d.num_bytes == demands[0].num_bytes for d in demands)
        key: Hashable = (holders, tuple((w.node, w.places) for w in wants)) if equal else number
        members: tuple[int, ...] = (number,)
        known = merged.get(key)
        if known is not None:
            wants = [
                Want(node=a.node, num_bytes=a.num_bytes + b.num_bytes, places=a.places)
                for a, b in zip(wants, known.wants, strict=True)
            ]
            leaving += known.leaving
            members = (*known.members, number)
        merged[key] = _Row(holders=holders, wants=wants, leaving=leaving, members=members)
    return _columns(list(merged.values()), links)


def _union_bytes(diff: Diff, demands: Sequence[Demand]) -> int:
    """Bytes of one table's class that any of ``demands`` lacks."""
    if not demands:
        return 0
    largest = max(demands, key=lambda d: d.num_bytes)
    if all(d.intervals is largest.intervals for d in demands):
        return largest.num_bytes
    table = diff.tables[largest.table]
    wanted = np.zeros(len(table.cell), dtype=bool)
    for demand in demands:
        wanted[demand.intervals] = True
    return int(((table.stop - table.start)[wanted]).sum()) * table.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    holders: tuple[int, ...]
    wants: Sequence[Want]
    leaving: int
    members: tuple[int, ...]


def _columns(rows: Sequence[_Row], links: Links) -> Commodities:
    holder_class: list[int] = []
    holder_place: list[int] = []
    demand_class: list[int] = []
    demand_node: list[int] = []
    demand_bytes: list[int] = []
    wanter_demand: list[int] = []
    wanter_place: list[int] = []
    near_demand: list[int] = []
    near_place: list[int] = []
    inside: list[bool] = []
    first: list[int] = []
    copies = np.zeros(len(links.nic))
    members: list[tuple[int, ...]] = []
    for row in rows:
        cls = len(first)
        moves = leaves = False
        senders = list(row.holders)
        by_node: dict[int, list[int]] = {}
        for place in row.holders:
            by_node.setdefault(links.node(place), []).append(place)
        for want in row.wants:
            near = by_node.get(want.node, [])
            gpus = [p for p in want.places if p < links.num_devices]
            hosts = want.places[len(gpus) :]
            # Host memory is one space: bytes that are there are copied, not moved, and sent over any process's link.
            held = any(p >= links.num_devices for p in near)
            copies[want.node] += want.num_bytes * max(0, len(hosts) - (0 if held else 1))
            if held:
                senders += hosts
                near = [*near, *hosts]
            places = gpus if held else [*gpus, *hosts]
            if not places:
                continue
            number = len(demand_class)
            demand_class.append(cls)
            demand_node.append(want.node)
            demand_bytes.append(want.num_bytes)
            inside.append(bool(near))
            wanter_demand += [number] * len(places)
            wanter_place += places
            near_demand += [number] * len(near)
            near_place += near
            moves, leaves = True, leaves or not near
        if moves:
            first.append(row.leaving if leaves else 0)
            members.append(row.members)
            holder_class += [cls] * len(senders)
            holder_place += senders
    return Commodities(
        members=tuple(members),
        first_bytes=np.array(first, dtype=np.float64),
        holder_class=_ints(holder_class),
        holder_place=_ints(holder_place),
        demand_class=_ints(demand_class),
        demand_node=_ints(demand_node),
        demand_bytes=np.array(demand_bytes, dtype=np.float64),
        inside=np.array(inside, dtype=bool),
        wanter_demand=_ints(wanter_demand),
        wanter_place=_ints(wanter_place),
        near_demand=_ints(near_demand),
        near_place=_ints(near_place),
        host_copy_bytes=copies,
    )


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
