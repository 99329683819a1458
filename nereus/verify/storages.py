"""Storages: what every device allocates before and after, which of them stay, and that each is there while it is used.

A storage is (device, stage, slot, tensor). It stays where device, part, dtype, memory and process are the same before
and after.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nereus.verify.case import Case, Stream
from nereus.verify.copies import SlotKind, StateCopy
from nereus.verify.document import Key
from nereus.verify.finding import Violation
from nereus.verify.ground import Holdings
from nereus.verify.parts import RankClass
from nereus.verify.segments import BoolArray, IntArray, meeting


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One slot of one copy on devices that allocate alike. Per tensor: ``numel``; ``in_host``; ``stays``: which of the
    storages the other plan has too."""

    copy: StateCopy
    kind: SlotKind
    devices: IntArray
    numel: IntArray
    in_host: BoolArray
    stays: BoolArray


class Storages:
    def __init__(self, case: Case) -> None:
        self.world, self.document = case.world, case.document
        self.coming: list[Group] = []  # in the new plan; those that stay too
        self.going: list[Group] = []
        for holdings, others, groups in ((case.old, case.new, self.going), (case.new, case.old, self.coming)):
            for copy in holdings.copies:
                twin = next((c for c in others.copies if c.stage == copy.stage), None)
                alike: dict[tuple[object, ...], list[Group]] = {}  # master and both moments are worked out once
                for kind, share in copy.slots.items():
                    stays = twin is not None and twin.owner.name == copy.owner.name and kind in twin.slots
                    same = twin if stays else None
                    theirs = same and (*others.alike(same, kind.name), same.slots[kind])
                    key = (*holdings.alike(copy, kind.name), share, theirs)
                    if key not in alike:
                        alike[key] = list(self._groups(holdings, copy, kind, others, same))
                    groups += [replace(group, kind=kind) for group in alike[key]]

    def _groups(
        self, holdings: Holdings, copy: StateCopy, kind: SlotKind, others: Holdings, twin: StateCopy | None
    ) -> Iterator[Group]:
        """``twin``: the copy of the other plan whose storages may be the same ones."""
        twin_class = np.full(self.world.num_devices, -1, dtype=np.int64)
        if twin is not None:
            for number, rank_class in enumerate(twin.parts.classes):
                twin_class[twin.device_of_rank[rank_class.ranks]] = number
        for rank_class in copy.parts.classes:
            devices = copy.device_of_rank[rank_class.ranks]
            devices = devices[self.world.alive[devices]]
            start, stop = holdings.share(copy, rank_class, kind.name)
            in_host = holdings.in_host(copy, rank_class, kind)
            of_device = twin_class[devices]
            for other in set(of_device.tolist()):
                stays = np.zeros(len(start), dtype=bool)
                if other >= 0 and twin is not None:
                    theirs = twin.parts.classes[other]
                    stays = self._same(rank_class, start, stop, others, twin, theirs, kind)
                    stays &= in_host == others.in_host(twin, theirs, kind)
                yield Group(copy, kind, devices[of_device == other], stop - start, in_host, stays & (stop > start))

    @staticmethod
    def _same(
        mine: RankClass,
        start: IntArray,
        stop: IntArray,
        others: Holdings,
        twin: StateCopy,
        theirs: RankClass,
        kind: SlotKind,
    ) -> BoolArray:
        other_start, other_stop = others.share(twin, theirs, kind.name)
        same: BoolArray = (start == other_start) & (stop == other_stop)
        for name in ("row_lo", "row_hi", "col_lo", "col_hi"):
            same &= getattr(mine.boxes, name) == getattr(theirs.boxes, name)
        return same

    # Bytes

    def spaces_of(self, group: Group) -> tuple[tuple[IntArray, BoolArray], ...]:
        """Memory spaces of the group's storages, per device, and which tensors' lie there."""
        hosts = self.world.num_devices + self.world.node_of[group.devices]
        return (group.devices, ~group.in_host), (hosts, group.in_host)

    def bytes_per_space(self) -> tuple[IntArray, IntArray, IntArray]:
        """(staying, going, coming) bytes per space."""
        found = tuple(np.zeros(self.world.num_spaces, dtype=np.int64) for _ in range(3))
        for groups, changed in ((self.going, 1), (self.coming, 2)):
            for group in groups:
                width = group.kind.num_bytes
                for space, there in self.spaces_of(group):
                    np.add.at(found[changed], space, int(group.numel[there & ~group.stays].sum()) * width)
                    if changed == 2:
                        np.add.at(found[0], space, int(group.numel[there & group.stays].sum()) * width)
        return found[0], found[1], found[2]

    def keys(self, groups: list[Group]) -> dict[Key, tuple[int, int]]:
        """(space, bytes) of every storage of ``groups`` that comes or goes."""
        found: dict[Key, tuple[int, int]] = {}
        for group in groups:
            width = group.kind.num_bytes
            for spaces, there in self.spaces_of(group):
                changed = np.flatnonzero(there & ~group.stays & (group.numel > 0))
                sizes = [(t, int(group.numel[t]) * width) for t in changed.tolist()]
                for device, space in zip(group.devices.tolist(), spaces.tolist(), strict=True):
                    for tensor, size in sizes:
                        found[device, group.copy.stage, group.kind.name, tensor] = (space, size)
        return found

    @cached_property
    def coming_keys(self) -> dict[Key, tuple[int, int]]:
        return self.keys(self.coming)

    @cached_property
    def going_keys(self) -> dict[Key, tuple[int, int]]:
        return self.keys(self.going)

    @property
    def staged_bytes(self) -> int:
        """Of what passes through host memory on the way."""
        return sum(self.going_keys[key][1] for key in self.document.staged if key in self.going_keys)


def check_lifetimes(case: Case, storages: Storages) -> str:
    """Tight mode: a new storage is there when something arrives in it, an old one until all that reads it was
    verified. Reversible mode: nothing old goes before the commit."""
    document = case.document
    if document.mode != "tight":
        if document.acquire or document.release or document.staged:
            raise Violation(f"mode {document.mode} acquires everything first and releases nothing before the commit")
        return "nothing is released before the commit"
    for key in document.acquire:
        if key not in storages.coming_keys:
            raise Violation(f"{_text(case, key)} is acquired and does not come")
    for key in storages.coming_keys:
        if key not in document.acquire:
            raise Violation(f"{_text(case, key)} is never acquired")
    for key in document.release:
        if key not in storages.going_keys:
            raise Violation(f"{_text(case, key)} is released and does not go")
    for key, (first, last) in document.staged.items():
        if key not in storages.going_keys or storages.going_keys[key][0] >= case.world.num_devices:
            raise Violation(f"{_text(case, key)} passes through host memory and is no storage that leaves a GPU")
        if document.release.get(key, last) < first:
            raise Violation(f"{_text(case, key)} is released before it is in host memory")
    uses = sum(_check_stream(case, storages, stream) for stream in case.streams)
    return f"{uses:,} uses of storages, each while the storage is there; releases follow the verify of every reader"


def _check_stream(case: Case, storages: Storages, stream: Stream) -> int:
    document, rows = case.document, case.rows
    moves, stride = document.moves, case.grounds[stream.model].stride
    relays = np.zeros(len(moves), dtype=bool)
    relays[moves.relays] = True
    carried = np.zeros(len(moves), dtype=bool)
    carried[stream.carries] = True
    uses = 0
    last = moves.wave + moves.slices - 1
    # The process itself also finds what passes through host memory there.
    locally = {**document.release, **{key: final for key, (_, final) in document.staged.items()}}
    mine = rows.of_moves(carried)
    direct = rows.of_moves(carried & ~relays)
    for copy in case.new.of_model(stream.model):
        if stream.kind in copy.slots:
            place, tensor, lo, hi = _sorted(case.new, copy, stream)
            row, into = meeting(
                moves.dst[mine.move] * stride + mine.lo, moves.dst[mine.move] * stride + mine.hi, lo, hi
            )
            uses += len(row)
            _check_acquired(case, copy, stream, place[into], tensor[into], moves.wave[mine.move[row]])
    for copy in case.old.of_model(stream.model):
        if stream.kind in copy.slots:
            place, tensor, lo, hi = _sorted(case.old, copy, stream)
            keys = [moves.src[direct.move] * stride + end for end in (direct.lo, direct.hi)]
            row, out_of = meeting(keys[0], keys[1], lo, hi)
            uses += len(row)
            _check_released(case, document.release, copy, stream, place[out_of], tensor[out_of], last[direct.move[row]])
            for target in case.new.of_model(stream.model):
                if stream.kind in target.slots:
                    # What is there already is copied when the new storage comes.
                    to_place, to_tensor, to_lo, to_hi = _sorted(case.new, target, stream)
                    into, out_of = meeting(to_lo, to_hi, lo, hi)
                    wave = _waves(document.acquire, case, target, stream, to_place[into], to_tensor[into])
                    uses += int((wave >= 0).sum())
                    _check_released(case, locally, copy, stream, place[out_of], tensor[out_of], wave)
    return uses


def _sorted(holdings: Holdings, copy: StateCopy, stream: Stream) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    held = holdings.holding(copy, stream.kind)
    lo, hi = held.keys(holdings.grounds[copy.model].stride)
    order = np.argsort(lo, kind="stable")
    return held.place[order], held.tensor[order], lo[order], hi[order]


def _waves(
    waves: dict[Key, int], case: Case, copy: StateCopy, stream: Stream, place: IntArray, tensor: IntArray
) -> IntArray:
    """Wave of the storage of every (place, tensor); -1 where it has none: it stays, or goes with the commit."""
    if not len(place):
        return place
    pairs, where = np.unique(place * len(copy.tensors) + tensor, return_inverse=True)
    found = [
        waves.get(
            (
                pair // len(copy.tensors) % case.world.num_devices,
                copy.stage,
                stream.kind.name,
                pair % len(copy.tensors),
            ),
            -1,
        )
        for pair in pairs.tolist()
    ]
    of_pair: IntArray = np.array(found, dtype=np.int64)
    of_row: IntArray = of_pair[where.reshape(-1)]
    return of_row


def _check_acquired(
    case: Case, copy: StateCopy, stream: Stream, place: IntArray, tensor: IntArray, wave: IntArray
) -> None:
    there = _waves(case.document.acquire, case, copy, stream, place, tensor)
    late = np.flatnonzero(there > wave)
    if len(late):
        at = int(late[0])
        key = (int(place[at]) % case.world.num_devices, copy.stage, stream.kind.name, int(tensor[at]))
        raise Violation(f"{_text(case, key)} is acquired in wave {there[at]} and filled in wave {wave[at]}")


def _check_released(
    case: Case,
    release: dict[Key, int],
    copy: StateCopy,
    stream: Stream,
    place: IntArray,
    tensor: IntArray,
    wave: IntArray,
) -> None:
    gone = _waves(release, case, copy, stream, place, tensor)
    early = np.flatnonzero((gone >= 0) & (gone < wave))
    if len(early):
        at = int(early[0])
        key = (int(place[at]) % case.world.num_devices, copy.stage, stream.kind.name, int(tensor[at]))
        raise Violation(f"{_text(case, key)} is released in wave {gone[at]} and read in wave {wave[at]}")


def _text(case: Case, key: Key) -> str:
    device, stage, slot, tensor = key
    copies = [c for c in (*case.old.copies, *case.new.copies) if c.stage == stage]
    name = copies[0].tensors[tensor].name if copies and 0 <= tensor < len(copies[0].tensors) else f"tensor {tensor}"
    where = case.world.devices[device] if 0 <= device < case.world.num_devices else f"device {device}"
    return f"{where}: {stage} {slot} of {name}"
