"""A diff's demands as flows: intervals that the same places hold and exactly the same places lack.

Where places derive a part each of what they want, every demand of a class lacks a little less than the class. All nodes
together would cut it into as many pieces as there are nodes, each wanted by all others but one; so nodes are taken in
groups, and only nodes of one group relay to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nereus.ir.layout import IntArray
from nereus.passes.commodities import Flow
from nereus.passes.demands import Demand
from nereus.passes.diff import Diff
from nereus.passes.links import Links

#: Demands of one class that are cut against each other.
GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffFlows:
    flows: tuple[Flow, ...]  # ``atom``: position here
    tables: tuple[int, ...]  # per flow
    intervals: tuple[IntArray, ...]  # per flow: ascending interval numbers of its table
    classes: tuple[tuple[int, ...], ...]  # per class with demands, in the order of their first: its flows


def flows_of_diff(diff: Diff, links: Links, relay: Sequence[Mapping[int, float]] | None = None) -> DiffFlows:
    """``relay``: per class, what each node is to send on; nodes that relay much and little then share a group."""
    flows: list[Flow] = []
    tables: list[int] = []
    found: list[IntArray] = []
    classes: list[tuple[int, ...]] = []
    for number, (table, cls, demands) in enumerate(diff.demands.by_class()):
        holders = diff.holders[table][cls]
        homes = {links.node(place) for place in holders}
        begin = len(flows)
        parts: list[tuple[IntArray, tuple[int, ...]]] = []
        if all(np.array_equal(d.intervals, demands[0].intervals) for d in demands[1:]):
            parts.append((demands[0].intervals, tuple(sorted(p for d in demands for p in d.wanters))))
        else:
            outside = [d for d in demands if d.node not in homes]
            parts += [(d.intervals, d.wanters) for d in demands if d.node in homes]
            weight = relay[number] if relay is not None else {}
            outside.sort(key=lambda d: (-weight.get(d.node, 0.0), d.node, d.wanters))
            groups = -(-len(outside) // GROUP)
            for first in range(groups):
                parts += _cut(outside[first::groups])
        width = diff.tables[table].element_bytes
        sizes = diff.tables[table].num_bytes
        for intervals, wanters in parts:
            flows.append(
                Flow(
                    atom=len(flows),
                    num_bytes=int(sizes[intervals].sum()),
                    holders=holders,
                    wanters=wanters,
                    element_bytes=width,
                    kin=number,
                )
            )
            tables.append(table)
            found.append(intervals)
        classes.append(tuple(range(begin, len(flows))))
    return DiffFlows(flows=tuple(flows), tables=tuple(tables), intervals=tuple(found), classes=tuple(classes))


def _cut(demands: Sequence[Demand]) -> list[tuple[IntArray, tuple[int, ...]]]:
    """(intervals, who lacks them), by which of up to 63 demands have them."""
    every = np.unique(np.concatenate([d.intervals for d in demands]))
    code = np.zeros(len(every), dtype=np.int64)
    for bit, demand in enumerate(demands):
        code[np.searchsorted(every, demand.intervals)] += 1 << bit
    kinds, kind = np.unique(code, return_inverse=True)
    return [
        (every[kind == i], tuple(sorted(p for bit, d in enumerate(demands) if bits >> bit & 1 for p in d.wanters)))
        for i, bits in enumerate(kinds.tolist())
    ]
