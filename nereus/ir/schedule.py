"""The schedule: one total order of all communication, cut into waves, and when storages come and go.

A move travels in equal slices, one a wave. A rank posts its part of wave k + 1 when its part of wave k is complete;
inside a wave the transport progresses everything that is posted. An operation waits only for operations of earlier
waves, so the earliest unfinished one, in the order (wave, move number), can always proceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nereus.ir.layout import IntArray
from nereus.ir.transition import LOCAL, Move

#: A storage: (device, stage, slot, tensor number).
StorageKey = tuple[int, str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """``wave``: first wave of each move; ``slices``: in how many consecutive waves it travels. Slice k, elements
    ``numel * k // slices`` up to ``numel * (k + 1) // slices`` of its intervals, goes in wave ``wave + k``.

    ``acquire`` and ``release``: wave of every new / old storage, tight mode only; in reversible mode all are acquired
    before wave 0 and released after the commit."""

    mode: str  # reversible | tight
    moves: tuple[Move, ...]
    wave: tuple[int, ...]
    slices: tuple[int, ...]
    num_waves: int
    window_bytes: int
    acquire: dict[StorageKey, int]
    release: dict[StorageKey, int]
    transfer_s: float
    #: Old storages that go to host memory on the way: (wave in which each is copied there and leaves its GPU, wave
    #: after which it leaves host memory).
    staged: dict[StorageKey, tuple[int, int]] = field(default_factory=dict)


def expand_slices(
    num_bytes: IntArray, wave: IntArray, slices: IntArray, quantum: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """(move, wave, bytes) of every slice, in move order. ``quantum``: bytes per element of each move; a slice is a
    whole number of elements."""
    move = np.repeat(np.arange(len(slices), dtype=np.int64), slices)
    part = np.arange(len(move), dtype=np.int64) - np.repeat(np.cumsum(slices) - slices, slices)
    numel, count = (num_bytes // quantum)[move], slices[move]
    size = (numel * (part + 1) // count - numel * part // count) * quantum[move]
    return move, wave[move] + part, size


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveColumns:
    """Moves as columns."""

    src: IntArray
    dst: IntArray
    num_bytes: IntArray
    crosses: IntArray  # 1 where the move crosses a link, 0 where it stays in one memory space

    @classmethod
    def of(cls, moves: Sequence[Move]) -> MoveColumns:
        rows = np.array([(m.src, m.dst, m.num_bytes, m.link != LOCAL) for m in moves], dtype=np.int64).reshape(-1, 4)
        return cls(src=rows[:, 0], dst=rows[:, 1], num_bytes=rows[:, 2], crosses=rows[:, 3])


def posted_bytes(
    columns: MoveColumns,
    part: tuple[IntArray, IntArray, IntArray],
    num_devices: int,
    num_waves: int,
    *,
    copies: bool = False,
) -> tuple[IntArray, IntArray]:
    """Most bytes that each device sends, and receives, in one wave. ``part``: (move, wave, bytes) of every slice.
    ``copies``: copies between processes inside one host memory too, which cross no link and are packed all the same."""
    move, wave, size = part
    crossing = (columns.crosses[move] > 0) | copies
    result = []
    for ends in (columns.src, columns.dst):
        load = np.zeros(num_devices * max(num_waves, 1), dtype=np.int64)
        np.add.at(load, ((ends % num_devices)[move] * max(num_waves, 1) + wave)[crossing], size[crossing])
        result.append(load.reshape(num_devices, -1).max(axis=1))
    return result[0], result[1]


def follows_slice_by_slice(schedule: Schedule, before: int, after: int) -> bool:
    """Whether move ``after`` relays what move ``before`` brings: the same elements in equally many slices."""
    alike = schedule.moves[before].intervals is schedule.moves[after].intervals
    return alike and schedule.slices[before] == schedule.slices[after]


def follows(schedule: Schedule, before: int, after: int) -> bool:
    """Whether every slice of move ``after`` goes in a later wave than what it relays of move ``before``."""
    one_by_one = follows_slice_by_slice(schedule, before, after)
    return schedule.wave[after] >= schedule.wave[before] + (1 if one_by_one else schedule.slices[before])


def schedule_parts(schedule: Schedule, columns: MoveColumns) -> tuple[IntArray, IntArray, IntArray]:
    """(move, wave, bytes) of every slice of a schedule."""
    quantum = np.array([m.num_bytes // m.intervals.numel for m in schedule.moves], dtype=np.int64)
    wave, slices = np.array(schedule.wave, dtype=np.int64), np.array(schedule.slices, dtype=np.int64)
    return expand_slices(columns.num_bytes, wave, slices, quantum)
