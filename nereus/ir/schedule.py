"""The schedule: one total order of all communication, cut into waves, and when storages come and go.

The total order is (wave, move number). A rank posts its part of wave k + 1 when its part of wave k is complete;
inside a wave the transport progresses everything that is posted. An operation waits only for operations of earlier
waves, so the earliest unfinished one can always proceed.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereus.ir.transition import Move

#: A storage: (device, stage, slot, tensor number).
StorageKey = tuple[int, str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """``acquire`` and ``release``: wave of every new / old storage, tight mode only; in reversible mode all are
    acquired before wave 0 and released after the commit."""

    mode: str  # reversible | tight
    moves: tuple[Move, ...]
    wave: tuple[int, ...]  # per move
    num_waves: int
    window_bytes: int
    acquire: dict[StorageKey, int]
    release: dict[StorageKey, int]
    transfer_s: float

    def wave_of_storage(self, key: StorageKey) -> int:
        return self.acquire.get(key, 0)
