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

    def rows(self, numbers: IntArray) -> Share:
        """Where there are several, as rows: those."""
        return Share(start=self.start[numbers], stop=self.stop[numbers], host=self.host[numbers])


#: Devices whose storages are compared in one go.
ROWS_AT_ONCE = 1024


class SetShares:
    """Shares of one state set."""

    def __init__(self, state_set: StateSet, topology: Topology) -> None:
        self.state_set = state_set
        layout = state_set.bound.layout
        self.boxes: LocalBoxes = local_boxes(state_set.tensors, layout)
        self.coord_of_rank = layout.coord_of_rank()
        self.shard_of_rank = layout.shard_of_rank()
        numbers = topology.numbers_of(state_set.bound.ranks).tolist()
        self.rank_of_device = {device: rank for rank, device in enumerate(numbers)}
        self._shares: dict[tuple[object, int], tuple[Share, IntArray]] = {}
        self._rules: dict[str, tuple[object, ...]] = {}

    def class_of(self, device: int) -> tuple[int, int]:
        rank = self.rank_of_device[device]
        return int(self.coord_of_rank[rank]), int(self.shard_of_rank[rank])

    def share(self, slot: str, coord: int, shard: int) -> Share:
        every, row_of = self.shares(slot, coord)
        row = int(row_of[shard])
        return Share(start=every.start[row], stop=every.stop[row], host=every.host[row])

    def shares(self, slot: str, coord: int) -> tuple[Share, IntArray]:
        """(the different shares of a coordinate as rows, the row of every shard)."""
        key = (self.rule(slot), coord)
        if key not in self._shares:
            state_set = self.state_set
            absent = state_set.absent_mask(slot)
            found = shares_of(state_set.tensors, self.boxes, state_set.bound.layout, slot, coord, absent)
            host = state_set.host_mask(slot, coord, found.stop - found.start)
            row_of = np.zeros(int(self.shard_of_rank.max()) + 1, dtype=np.int64)
            if int(found.share[0]) >= 0:
                row_of[found.share] = np.arange(len(found.share))
            self._shares[key] = Share(start=found.start, stop=found.stop, host=host), row_of
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
    """Elements of one (state set, slot) in memory spaces of one kind: those of ``device[i]`` lie in ``space[i]``."""

    device: IntArray
    space: IntArray
    kept: IntArray
    old: IntArray
    new: IntArray
    largest_old: IntArray
    largest_new: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Old against new of one (state set, slot) on a device: elements per tensor that stay, go and come, and which of
    those before and after are in host memory. Or of many devices, as rows."""

    kept: IntArray
    old: IntArray  # not kept
    new: IntArray
    old_host: BoolArray
    new_host: BoolArray


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
        old, new = (self._lies(side.get(stage), slot, device) for side in (self.old, self.new))
        rules = (side[stage].rule(slot) if stage in side else None for side in (self.old, self.new))
        key = (stage, self._alike(stage, slot), *rules, old, new)
        if key not in self._fits:
            one = self._compared(stage, slot, *(at and (at[0], np.array([at[1]])) for at in (old, new)))
            columns = (one.kept, one.old, one.new, one.old_host, one.new_host)
            kept, before, after, old_host, new_host = (column[0] for column in columns)
            self._fits[key] = Fit(kept=kept, old=before, new=after, old_host=old_host, new_host=new_host)
        return self._fits[key]

    @staticmethod
    def _lies(shares: SetShares | None, slot: str, device: int) -> tuple[int, int] | None:
        """(coordinate, row of its shares) of the device, None where it has nothing."""
        if shares is None or shares.state_set.slot(slot) is None or device not in shares.rank_of_device:
            return None
        coord, shard = shares.class_of(device)
        return coord, int(shares.shares(slot, coord)[1][shard])

    def _alike(self, stage: str, slot: str) -> bool:
        """Whether storages can stay: the same processes, the same dtype."""
        old, new = self.old.get(stage), self.new.get(stage)
        if old is None or new is None or old.state_set.owner != new.state_set.owner:
            return False
        before, after = old.state_set.slot(slot), new.state_set.slot(slot)
        return before is not None and after is not None and before.dtype == after.dtype

    def _compared(
        self, stage: str, slot: str, old: tuple[int, IntArray] | None, new: tuple[int, IntArray] | None
    ) -> Fit:
        """``old``, ``new``: coordinate, and rows of its shares; one of both per row of the result."""
        parts = [
            side[stage].shares(slot, at[0])[0].rows(at[1]) if at is not None else None
            for side, at in ((self.old, old), (self.new, new))
        ]
        before, after = parts
        some = before or after
        assert some is not None
        nothing = np.zeros_like(some.start)
        had = before.numel if before is not None else nothing
        gets = after.numel if after is not None else nothing
        kept = nothing
        if before is not None and after is not None and self._alike(stage, slot):
            same = (before.start == after.start) & (before.stop == after.stop) & (before.host == after.host)
            assert old is not None and new is not None
            was, becomes = self.old[stage].boxes, self.new[stage].boxes
            for bound in ("row_lo", "row_hi", "col_lo", "col_hi"):
                same &= getattr(was, bound)[old[0]] == getattr(becomes, bound)[new[0]]
            kept = np.where(same, gets, 0)
        hosts = [part.host if part is not None else np.zeros(nothing.shape, dtype=bool) for part in parts]
        return Fit(kept=kept, old=had - kept, new=gets - kept, old_host=hosts[0], new_host=hosts[1])

    def totals(self, stage: str, slot: str) -> Iterator[Total]:
        """Of all devices of the stage; what two of them compare alike is compared once."""
        devices = np.array(self.devices_of(stage), dtype=np.int64)
        sides = [self._all_lie(side.get(stage), slot, devices) for side in (self.old, self.new)]
        (old_coord, old_row), (new_coord, new_row) = sides
        coords = (old_coord + 1) * (int(new_coord.max(initial=0)) + 2) + new_coord + 1
        for pair in np.unique(coords[coords > 0]).tolist():
            mine = np.flatnonzero(coords == pair)
            at = int(old_coord[mine[0]]), int(new_coord[mine[0]])
            row_pairs = (old_row[mine] + 1) * (int(new_row[mine].max()) + 2) + new_row[mine] + 1
            _, example, kind = np.unique(row_pairs, return_index=True, return_inverse=True)
            rows = np.stack((old_row[mine[example]], new_row[mine[example]]), axis=1)
            for first in range(0, len(rows), ROWS_AT_ONCE):
                part = rows[first : first + ROWS_AT_ONCE]
                old, new = ((coord, part[:, i]) if coord >= 0 else None for i, coord in enumerate(at))
                chosen = (kind >= first) & (kind < first + len(part))
                fit = self._compared(stage, slot, old, new)
                yield from self._total(fit, kind[chosen] - first, devices[mine[chosen]])

    def _total(self, fit: Fit, row: IntArray, device: IntArray) -> Iterator[Total]:
        """``row``: of ``fit``, per device."""
        topology = self.topology
        split = bool(fit.old_host.any() or fit.new_host.any())
        for host in (False, True) if split else (False,):
            kept, old, new = fit.kept, fit.old, fit.new
            if split:
                kept, new = (np.where(fit.new_host == host, column, 0) for column in (kept, new))
                old = np.where(fit.old_host == host, old, 0)
            sums = [column.sum(axis=1)[row] for column in (kept, old, new)]
            largest = [column.max(axis=1, initial=0)[row] for column in (old, new)]
            space = topology.num_devices + topology.node_of[device] if host else device
            yield Total(
                device=device,
                space=space,
                kept=sums[0],
                old=sums[1],
                new=sums[2],
                largest_old=largest[0],
                largest_new=largest[1],
            )

    @staticmethod
    def _all_lie(shares: SetShares | None, slot: str, devices: IntArray) -> tuple[IntArray, IntArray]:
        """(coordinate, row of its shares) of every device, -1 where it has nothing."""
        coord, row = np.full_like(devices, -1), np.full_like(devices, -1)
        if shares is None or shares.state_set.slot(slot) is None:
            return coord, row
        rank = np.array([shares.rank_of_device.get(device, -1) for device in devices.tolist()], dtype=np.int64)
        there = rank >= 0
        coord[there] = shares.coord_of_rank[rank[there]]
        shard = shares.shard_of_rank[rank]
        for number in np.unique(coord[there]).tolist():
            mine = coord == number
            row[mine] = shares.shares(slot, number)[1][shard[mine]]
        return coord, row

    def devices_of(self, stage: str) -> tuple[int, ...]:
        """Living devices that have a part of the stage before or after."""
        found: set[int] = set()
        for side in (self.old, self.new):
            if stage in side:
                found |= set(side[stage].rank_of_device)
        return tuple(sorted(d for d in found if self.topology.alive[int(self.topology.node_of[d])]))
