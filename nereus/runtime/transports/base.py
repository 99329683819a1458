"""What the executor asks of a transport. One object serves all devices of a process through one transition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nereus.ir.cluster import Device

#: Checksums are sums modulo 2^64.
CHECKSUM_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Parcel:
    """One piece of a message. ``data``: uint8, contiguous, or [rows, bytes of a row] where the transport is ``direct``;
    a sender's is read, a receiver's is filled; neither may change until the end of ``wait``, but a receiver's that has
    arrived may be read. ``checksum``: of a sender's piece; ``staged``: it may change after ``wait`` (a storage is left
    alone until all processes have agreed, which is later)."""

    tag: int
    src: Device
    dst: Device
    data: torch.Tensor
    checksum: int = 0
    part: int = 0
    staged: bool = True


class Transport(Protocol):
    """Every wait ends: with what it waited for, or, raising ``Fault``, with a peer's failure or at the deadline."""

    @property
    def process(self) -> int: ...

    @property
    def num_processes(self) -> int: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What somebody who wonders about its speed should know."""

    def direct(self, src: Device, dst: Device) -> bool:
        """Whether the receiver copies out of the sender's memory: rows need not be packed then."""

    def streams(self, src: Device, dst: Device) -> bool:
        """Whether a sender may use a piece's memory again once it is settled, not only after ``wait``."""

    def settle(self, parcel: Parcel, deadline_s: float) -> None:
        """Until that piece is sent; not for one whose receiver has not posted it by now, or will without waiting."""

    def post(self, wave: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Start pieces of a wave's messages; none waits for another. May be called several times in a wave; the pieces
        of one message in order of ``part``."""

    def wait(self, deadline_s: float, arrived: Callable[[Parcel], None]) -> dict[int, int]:
        """Until all that was posted is there and sent. ``arrived`` is called with every received piece, while others
        are still under way. Returns, for every received tag, the sum modulo 2^64 of its pieces' checksums."""

    def gather(self, text: str, deadline_s: float) -> tuple[str, ...]:
        """Every process's ``text``, in process order. Also a barrier."""

    def decide(self, deadline_s: float) -> None:
        """Commit, or raise the ``Fault`` for which all abort. Every process sees the same decision."""

    def fail(self, error: Exception) -> Exception:
        """Tell the others why this process stops, release those who wait for it, return the first failure of all."""

    def close(self, deadline_s: float) -> None:
        """End in good order: after it nothing of this transition is under way."""
