"""Storages: what every device allocates for each state set, and which allocations a transition leaves alone.

Adapters of dense frameworks allocate per tensor and slot (Megatron's distributed optimizer too: every parameter's
shard is a tensor of its own), so a storage is (device, state set, slot, tensor). Shares are computed once per (state
set, coordinate, shard).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nereus.ir.cells import LocalBoxes, local_boxes, shares_of
from nereus.ir.holdings import Holdings, StateSet, Topology
from nereus.ir.layout import BoolArray, IntArray
from nereus.ir.plan import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of one slot: range ``start..stop`` of the local box of every tensor (empty where it holds none);
    ``host``: whether that lies in host memory."""

    start: IntArray
    stop: IntArray
    host: BoolArray

    @property
    def numel(self) -> IntArray:
        return self.stop - self.start


class SetShares:
    """Shares of one state set."""

    def __init__(self, state_set: StateSet, topology: Topology) -> None:
        self.state_set = state_set
        layout = state_set.bound.layout
        self.boxes: LocalBoxes = local_boxes(state_set.tensors, layout)
        index = topology.index()
        self.coord_of_rank = layout.coord_of_rank()
        self.shard_of_rank = layout.shard_of_rank()
        self.rank_of_device = {index[d]: rank for rank, d in enumerate(state_set.bound.ranks)}
        self._shares: dict[tuple[object, int, int], Share] = {}
        self._rules: dict[str, tuple[object, ...]] = {}
        self._shards_of: dict[int, list[int]] = {}
        for coord, shard in sorted(set(zip(self.coord_of_rank.tolist(), self.shard_of_rank.tolist(), strict=True))):
            self._shards_of.setdefault(coord, []).append(shard)

    def class_of(self, device: int) -> tuple[int, int]:
        rank = self.rank_of_device[device]
        return int(self.coord_of_rank[rank]), int(self.shard_of_rank[rank])

    def share(self, slot: str, coord: int, shard: int) -> Share:
        state_set = self.state_set
        rule = self.rule(slot)
        key = (rule, coord, shard)
        if key not in self._shares:
            absent = state_set.absent_mask(slot)
            found = shares_of(state_set.tensors, self.boxes, state_set.bound.layout, slot, coord, absent)
            host = state_set.host_mask(slot, coord, found.stop - found.start)
            for row, number in enumerate(found.share.tolist()):
                share = Share(start=found.start[row], stop=found.stop[row], host=host[row])
                for each in self._shards_of[coord] if number < 0 else (number,):
                    self._shares[rule, coord, each] = share
        return self._shares[key]

    def rule(self, slot: str) -> tuple[object, ...]:
        """Slots with equal rules lie alike."""
        found = self._rules.get(slot)
        if found is None:
            state_set, kind = self.state_set, self.state_set.slot(slot)
            absent = dict(state_set.absent).get(slot, ())
            found = state_set.bound.layout.shard_rule(slot), absent, kind and (kind.host, kind.host_share)
            self._rules[slot] = found
        return found

    def in_host(self, device: int, slot: str, tensor: int) -> bool:
        """Whether the device's storage of ``tensor`` lies in host memory."""
        return bool(self.share(slot, *self.class_of(device)).host[tensor])


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Elements in one memory."""

    kept: int
    old: int
    new: int
    largest_old: int
    largest_new: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Old against new of one (state set, slot) on a device: elements per tensor that stay, go and come, and which of
    those before and after are in host memory."""

    kept: IntArray
    old: IntArray  # not kept
    new: IntArray
    old_host: BoolArray
    new_host: BoolArray

    @cached_property
    def memories(self) -> tuple[tuple[bool, Total], ...]:
        """(in host memory, what stays, goes and comes there), for memories with any."""
        found = []
        split = bool(self.old_host.any() or self.new_host.any())
        for host in (False, True) if split else (False,):
            kept, old, new = self.kept, self.old, self.new
            if split:
                before, after = (self.old_host == host), (self.new_host == host)
                kept, old, new = kept[after], old[before], new[after]
            total = Total(
                kept=int(kept.sum()),
                old=int(old.sum()),
                new=int(new.sum()),
                largest_old=int(old.max(initial=0)),
                largest_new=int(new.max(initial=0)),
            )
            if total.kept or total.old or total.new:
                found.append((host, total))
        return tuple(found)


class StorageMap:
    """All storages of a transition, old and new."""

    def __init__(self, old: Holdings, new: Holdings, topology: Topology) -> None:
        self.topology = topology
        self.old = {s.stage: SetShares(s, topology) for s in old.sets}
        self.new = {s.stage: SetShares(s, topology) for s in new.sets}
        self._fits: dict[tuple[object, ...], Fit] = {}

    @cached_property
    def stages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.old, *self.new)))

    def slots(self, stage: str) -> Iterator[tuple[str, Slot | None, Slot | None]]:
        """(name, old slot, new slot) of a stage's state sets."""
        old = self.old[stage].state_set.slots if stage in self.old else ()
        new = self.new[stage].state_set.slots if stage in self.new else ()
        for name in dict.fromkeys(s.name for s in (*old, *new)):
            yield (
                name,
                next((s for s in old if s.name == name), None),
                next((s for s in new if s.name == name), None),
            )

    def fit(self, stage: str, slot: str, device: int) -> Fit:
        """A storage stays where device, box, range, dtype and memory are the same before and after."""
        old, new = self.old.get(stage), self.new.get(stage)
        old_slot = old.state_set.slot(slot) if old is not None and device in old.rank_of_device else None
        new_slot = new.state_set.slot(slot) if new is not None and device in new.rank_of_device else None
        alike = old_slot is not None and new_slot is not None and old_slot.dtype == new_slot.dtype
        old_class = old.class_of(device) if old is not None and old_slot is not None else None
        new_class = new.class_of(device) if new is not None and new_slot is not None else None
        key = (
            stage,
            old_class and old and (old.rule(slot), old_class),
            new_class and new and (new.rule(slot), new_class),
            alike,
        )
        if key not in self._fits:
            before = old.share(slot, *old_class) if old is not None and old_class is not None else None
            after = new.share(slot, *new_class) if new is not None and new_class is not None else None
            same = None
            in_place = alike and old and new and old.state_set.owner == new.state_set.owner
            if in_place and old and new and old_class and new_class and before and after:
                same = (before.start == after.start) & (before.stop == after.stop) & (before.host == after.host)
                for bound in ("row_lo", "row_hi", "col_lo", "col_hi"):
                    same &= getattr(old.boxes, bound)[old_class[0]] == getattr(new.boxes, bound)[new_class[0]]
            self._fits[key] = self._fit(stage, before, after, same)
        return self._fits[key]

    def _fit(self, stage: str, before: Share | None, after: Share | None, same: BoolArray | None) -> Fit:
        shares = self.new.get(stage) or self.old[stage]
        empty = np.zeros(len(shares.state_set.tensors), dtype=np.int64)
        old = before.numel if before is not None else empty
        new = after.numel if after is not None else empty
        kept = empty if same is None else np.where(same, new, 0)
        hosts = [share.host if share is not None else np.zeros(len(empty), dtype=bool) for share in (before, after)]
        return Fit(kept=kept, old=old - kept, new=new - kept, old_host=hosts[0], new_host=hosts[1])

    def devices_of(self, stage: str) -> tuple[int, ...]:
        """Living devices that have a part of the stage before or after."""
        found: set[int] = set()
        for side in (self.old, self.new):
            if stage in side:
                found |= set(side[stage].rank_of_device)
        return tuple(sorted(d for d in found if self.topology.alive[int(self.topology.node_of[d])]))
