"""The schedule: one total order of all communication, cut into waves, and when storages come and go.

A move travels in equal slices, one a wave. A rank posts its part of wave k + 1 when its part of wave k is complete;
inside a wave the transport progresses everything that is posted. An operation waits only for operations of earlier
waves, so the earliest unfinished one, in the order (wave, move number), can always proceed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from nereus.ir.columns import runs
from nereus.ir.layout import BoolArray, IntArray
from nereus.ir.moves import Moves

#: A storage: (device, stage, slot, tensor number).
StorageKey = tuple[int, str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """``wave``: first wave of each move; ``slices``: in how many consecutive waves it travels. Slice k, elements
    ``numel * k // slices`` up to ``numel * (k + 1) // slices`` of its intervals, goes in wave ``wave + k``.

    ``acquire`` and ``release``: wave of every new / old storage, tight mode only; in reversible mode all are acquired
    before wave 0 and released after the commit."""

    mode: str  # reversible | tight
    moves: Moves
    wave: IntArray
    slices: IntArray
    num_waves: int
    window_bytes: int
    acquire: dict[StorageKey, int]
    release: dict[StorageKey, int]
    transfer_s: float
    #: Old storages that go to host memory on the way: (wave in which each is copied there and leaves its GPU, wave
    #: after which it leaves host memory).
    staged: dict[StorageKey, tuple[int, int]] = field(default_factory=dict)


#: Slices that are looked at in one go.
_SLICES_AT_ONCE = 1 << 20


def slices_of(
    moves: Moves, wave: IntArray, slices: IntArray, chosen: IntArray
) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """(move, wave, bytes) of every slice of the ``chosen`` moves, in their order, in parts. A slice is a whole number
    of elements."""
    chunk = np.cumsum(slices[chosen]) // _SLICES_AT_ONCE
    for mine in np.split(chosen, np.flatnonzero(np.diff(chunk)) + 1):
        at, part = runs(slices[mine])
        move = mine[at]
        end = moves.numel[move] * (part + 1) // slices[move]
        size = np.diff(end, prepend=0)
        np.copyto(size, end, where=part == 0)
        yield move, wave[move] + part, size * moves.width[move]


def posted_bytes(
    moves: Moves, wave: IntArray, slices: IntArray, num_devices: int, num_waves: int, *, copies: bool = False
) -> tuple[IntArray, IntArray]:
    """Most bytes that each device sends, and receives, in one wave. ``copies``: copies between processes inside one
    host memory too, which cross no link and are packed all the same."""
    waves = max(num_waves, 1)
    loads = [np.zeros((num_devices, waves + 1)) for _ in range(2)]
    chosen = np.arange(len(moves)) if copies else np.flatnonzero(moves.crosses)
    # Whole numbers below 2^53: sums of floats are exact.
    even = moves.numel[chosen] % slices[chosen] == 0
    same = chosen[even]  # slices of one size: so much from a wave on, and no longer from another
    each = moves.num_bytes[same] // slices[same]
    for load, ends in zip(loads, (moves.src, moves.dst), strict=True):
        row = (ends[same] % num_devices) * (waves + 1) + wave[same]
        change = np.bincount(row, weights=each, minlength=load.size)
        change -= np.bincount(row + slices[same], weights=each, minlength=load.size)
        load += np.cumsum(change.reshape(load.shape), axis=1)
    for move, at, size in slices_of(moves, wave, slices, chosen[~even]):
        for load, ends in zip(loads, (moves.src, moves.dst), strict=True):
            row = (ends % num_devices)[move] * (waves + 1) + at
            load += np.bincount(row, weights=size, minlength=load.size).reshape(load.shape)
    sent, received = (load.astype(np.int64).max(axis=1) for load in loads)
    return sent, received


def follows_slice_by_slice(schedule: Schedule, before: IntArray, after: IntArray) -> BoolArray:
    """Whether each of the moves ``after`` relays what that of ``before`` brings: the same elements in equally many
    slices."""
    region, slices = schedule.moves.region, schedule.slices
    found: BoolArray = (region[before] == region[after]) & (slices[before] == slices[after])
    return found


def follows(schedule: Schedule, before: IntArray, after: IntArray) -> BoolArray:
    """Whether every slice of the moves ``after`` goes in a later wave than what it relays of those of ``before``."""
    one_by_one = follows_slice_by_slice(schedule, before, after)
    wave, slices = schedule.wave, schedule.slices
    found: BoolArray = wave[after] >= wave[before] + np.where(one_by_one, 1, slices[before])
    return found
