"""Many sendings of equal size at once: what the router would choose one after the other, as a level to which water
rises.

Each sending goes to whoever then costs least, and a sender's cost grows by the same step each time; so the first n
choices are the n least of all senders' rows of costs. What is sent can be relayed by those who took it in, which the
router sees at once and this from the next part on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.ir.columns import runs
from nereus.ir.layout import IntArray
from nereus.passes.lists import Lists
from nereus.passes.relays import Taken

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Senders:
    """Rails through which the same bytes can be sent, each once. ``places``: who has them, by rail; ``depth``: how many
    sendings brought them there (0: holders), by which stripe (-1)."""

    rail: IntArray
    places: Lists
    depth: IntArray
    stripe: IntArray

    def __add__(self, other: Senders) -> Senders:
        return Senders(
            rail=np.concatenate((self.rail, other.rail)),
            places=Lists(
                np.concatenate((self.places.first, other.places.first[1:] + len(self.places.item))),
                np.concatenate((self.places.item, other.places.item)),
            ),
            depth=np.concatenate((self.depth, other.depth)),
            stripe=np.concatenate((self.stripe, other.stripe)),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relayable:
    """Elements ``lo..hi`` of a region that places took in. Columns, as ``relays.Taken``."""

    place: IntArray
    rail: IntArray
    lo: IntArray
    hi: IntArray
    stripe: IntArray
    depth: IntArray

    @classmethod
    def joined(cls, parts: list[Relayable]) -> Relayable:
        names = ("place", "rail", "lo", "hi", "stripe", "depth")
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @classmethod
    def of_rows(cls, rows: Sequence[Taken]) -> Relayable:
        place, _, rail, lo, hi, stripe, depth = np.array(rows, dtype=np.int64).reshape(-1, len(Taken._fields)).T
        return cls(place=place, rail=rail, lo=lo, hi=hi, stripe=stripe, depth=depth)

    def rows(self, node_of: Sequence[int]) -> list[Taken]:
        """``node_of``: of every device."""
        columns = (self.place, self.rail, self.lo, self.hi, self.stripe, self.depth)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Taken(place, node_of[place % len(node_of)], *rest) for place, *rest in rows]

    def senders(self, lo: int, hi: int) -> Senders:
        """Those that have all of ``lo..hi``, the nearest to a holder of each rail."""
        mine = np.flatnonzero((self.lo <= lo) & (self.hi >= hi))
        mine = mine[np.lexsort((self.stripe[mine], self.depth[mine], self.rail[mine]))]
        mine = mine[np.flatnonzero(np.diff(self.rail[mine], prepend=-1))]
        first = np.arange(len(mine) + 1, dtype=np.int64)
        return Senders(
            rail=self.rail[mine],
            places=Lists(first, self.place[mine]),
            depth=self.depth[mine],
            stripe=self.stripe[mine],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """Seconds that ports are busy, and what one sending adds: to a rail, to a GPU's port."""

    nic_out: FloatArray
    gpu_out: FloatArray
    rail_s: FloatArray  # per rail
    gpu_s: FloatArray  # per device

    def choose(self, senders: Senders, count: int, target_s: float, deeper_s: float) -> tuple[IntArray, IntArray]:
        """(sender, place of it) of up to ``count`` sendings, the cheapest first; none goes beyond the target.
        ``deeper_s``: what a sending more on the way costs."""
        rail, owner = senders.rail, senders.places.owner
        device = senders.places.item % len(self.gpu_out)
        out, room_s = self.gpu_out[device], target_s - self.gpu_out[device]
        first = senders.places.first[:-1]
        most = np.floor(np.maximum(room_s, 0.0) / self.gpu_s[device]).astype(np.int64)
        step = self.rail_s[rail]
        by_rail = np.floor(np.maximum(target_s - self.nic_out[rail], 0.0) / step).astype(np.int64)
        most_of = np.minimum(by_rail, np.add.reduceat(most, first))
        cost = np.maximum(self.nic_out[rail], np.minimum.reduceat(out, first)) + senders.depth * deeper_s
        able = np.flatnonzero(most_of > 0)
        if not len(able):
            return able, able
        # No choice costs more than this: so many senders cost less, or all of them after as many rounds.
        level = np.partition(cost[able], min(count, len(able)) - 1)[min(count, len(able)) - 1]
        level += float(step.max()) * (count // len(able))
        below = np.floor(np.maximum(level - cost[able], 0.0) / step[able]).astype(np.int64) + 1
        at, turn = runs(np.minimum(np.minimum(below, most_of[able]), count))
        order = np.argsort(cost[able[at]] + turn * step[able[at]], kind="stable")[:count]
        chosen = able[at[order]]
        if len(device) == len(rail):
            return chosen, senders.places.item[chosen]
        return chosen, self._places(senders, chosen, owner, device, most)

    def _places(
        self, senders: Senders, chosen: IntArray, owner: IntArray, device: IntArray, most: IntArray
    ) -> IntArray:
        """Of each of the ``chosen`` senders, a place that has most room then."""
        times = np.bincount(chosen, minlength=len(senders.rail))
        at, turn = runs(np.minimum(most, times[owner]))
        cost = self.gpu_out[device[at]] + turn * self.gpu_s[device[at]]
        order = np.lexsort((cost, owner[at]))
        _, rank = runs(np.bincount(owner[at], minlength=len(times)))
        used = order[rank < times[owner[at[order]]]]
        place = np.empty(len(chosen), dtype=np.int64)
        place[np.argsort(chosen, kind="stable")] = senders.places.item[at[used]]
        return place
