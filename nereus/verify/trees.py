"""The cheapest way to deliver something to all who want it, for many graphs at once: minimum-cost arborescences.

Chu-Liu/Edmonds: every component takes its cheapest way in; those that then feed each other in a circle are one
component, for which its members pay from now on only what is more than that. What all components pay together is the
optimum, and a lower bound at any time: each payment is for entering a set from outside, and every delivery enters it.

Edges are not listed. A *row* is a place in a graph; a *way* says which rows may feed which (they have one scope) and
what giving and taking cost; an edge costs the sum. So the cheapest way in is the cheapest giver of the scope outside
the own component: the best of all, or the best of those that are not of that one's component.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.verify.segments import BoolArray, IntArray

FloatArray = npt.NDArray[np.float64]

#: Component of rows that have it from the beginning.
ROOT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """Per row: its scope (equal for who may feed each other), what giving and taking cost; infinite where a row cannot
    give, or take, in this way."""

    scope: IntArray
    give: FloatArray
    take: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    """Of one way, for the rows ``at``: the cheapest giver outside the own component: what it asks, whose it is, and
    what taking from it costs beyond what was paid."""

    at: IntArray
    scope: IntArray
    give: FloatArray
    price: FloatArray
    giver: IntArray
    cost: FloatArray


def cheapest(graph: IntArray, component: IntArray, ways: tuple[Way, ...], num_graphs: int) -> FloatArray:
    """Least cost per graph. ``component``: rows with one number are one vertex; ``ROOT``: they have it. Infinite where
    somebody cannot be reached."""
    total = np.zeros(num_graphs)
    names, joined = np.unique(component, return_inverse=True)
    with_roots = int(len(names) > 0 and names[0] == ROOT)
    count = len(names) - with_roots
    member = joined.reshape(-1) - with_roots
    member = np.where(member < 0, count + graph, member)  # roots: one component per graph, after all others
    owner = np.concatenate((np.zeros(count, dtype=np.int64), np.arange(num_graphs)))
    owner[member] = graph
    paid = np.zeros(len(graph))
    rows = np.arange(len(graph))
    while len(rows):
        own = member[rows]
        takes = own < count
        offers = [offer for way in ways if (offer := _offer(way, rows, own, paid, takes)) is not None]
        least = np.full(len(owner), np.inf)
        for offer in offers:
            np.minimum.at(least, own[offer.at], offer.cost)
        parent = np.arange(len(owner))
        for offer in offers:
            good = takes[offer.at] & (offer.cost <= least[own[offer.at]])
            parent[own[offer.at[good]]] = offer.giver[good]
        present = np.unique(own)
        inner = present[present < count]
        np.add.at(total, owner[inner], least[inner])
        cut_off = inner[~np.isfinite(least[inner])]
        parent[cut_off] = count + owner[cut_off]
        paid[rows] += np.where(takes & np.isfinite(least[own]), least[own], 0.0)
        label = _circles(parent, present)
        if not bool((label >= 0).any()):
            break
        for offer in offers:
            _join(label, parent, own, offer, least)
        member = np.where(label[member] >= 0, label[member], member)
        busy = np.zeros(num_graphs, dtype=bool)
        busy[owner[label >= 0]] = True
        rows = np.flatnonzero(busy[graph])
    return total


def _offer(way: Way, rows: IntArray, own: IntArray, paid: FloatArray, takes: BoolArray) -> _Offer | None:
    give, take = way.give[rows], np.where(takes, way.take[rows], np.inf)
    at = np.flatnonzero(np.isfinite(give) | np.isfinite(take))
    if not len(at):
        return None
    scope, give, take, own = way.scope[rows[at]], give[at], take[at], own[at]
    order = np.lexsort((give, scope))
    new = np.diff(scope[order], prepend=-1) != 0
    which = np.empty(len(at), dtype=np.int64)
    which[order] = np.cumsum(new) - 1
    lowest, by = give[order[new]], own[order[new]]
    others = order[own[order] != by[which[order]]]
    second, second_by = np.full(len(lowest), np.inf), np.zeros(len(lowest), dtype=np.int64)
    first = np.diff(which[others], prepend=-1) != 0
    slot = which[others[first]]
    second[slot], second_by[slot] = give[others[first]], own[others[first]]
    mine = by[which] == own
    price, giver = np.where(mine, second[which], lowest[which]), np.where(mine, second_by[which], by[which])
    return _Offer(at, which, give, price, giver, take + price - paid[rows[at]])


def _circles(parent: IntArray, present: IntArray) -> IntArray:
    """Per component: the least number of the circle of parents that it lies on, or -1."""
    jump, least = parent.copy(), np.arange(len(parent))
    for _ in range(len(present).bit_length()):
        least = np.minimum(least, least[jump])
        jump = jump[jump]
    label = np.full(len(parent), -1, dtype=np.int64)
    ends = jump[present]
    ends = ends[parent[ends] != ends]
    label[ends] = least[ends]
    return label


def _join(label: IntArray, parent: IntArray, own: IntArray, offer: _Offer, least: FloatArray) -> None:
    """Who takes from a circle and gives to it for no more than the giver that it chose joins it at once: step by step
    that would cost nothing and take as many rounds as there are such givers."""
    owner = own[offer.at]
    chose = np.flatnonzero((label[owner] >= 0) & (offer.cost <= least[owner]))
    beside = np.where(label[owner] < 0, label[parent[owner]], -1)
    gives = np.flatnonzero(beside >= 0)
    if not len(chose) or not len(gives):
        return
    span = len(label)
    keys, slot = np.unique(offer.scope[chose] * span + label[owner[chose]], return_inverse=True)
    price = np.full(len(keys), -1.0)
    np.maximum.at(price, slot.reshape(-1), offer.price[chose])
    wanted = offer.scope[gives] * span + beside[gives]
    found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    joins = gives[(keys[found] == wanted) & (offer.give[gives] <= price[found])]
    label[owner[joins]] = beside[joins]
