"""What the executor asks of a transport. One object serves all devices of a process through one transition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nereus.ir.cluster import Device
from nereus.kernels.flow import Flow
from nereus.runtime.staging import Staging

#: Checksums are sums modulo 2^64.
CHECKSUM_MASK = (1 << 64) - 1

#: Pieces in staging that may be under way at one time, of a message that is ``direct``: as many buffers in turn are
#: enough for its sender. Of any other message one is.
TURNS = 2


#: Of a piece that is a flow.
NO_DATA = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Parcel:
    """One piece of a message: ``data``, uint8, contiguous, or a ``flow``; a sender's is read, a receiver's is filled.
    ``checksum``: of a sender's data, and of its flow where the transport is ``direct``; any other flow's is made on the
    way. ``staged``: its memory is used again for a later piece of the message (a storage is left alone until all
    processes have agreed, which is later)."""

    tag: int
    src: Device
    dst: Device
    data: torch.Tensor
    checksum: int = 0
    part: int = 0
    staged: bool = True
    flow: Flow | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.data) if self.flow is None else self.flow.num_bytes


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Message ``tag``, made while it is sent. ``pieces`` gives them in order of ``part``, and is asked for the next
    when there is room for it."""

    tag: int
    src: Device
    dst: Device
    pieces: Iterator[Parcel]


#: A receiver's piece that has arrived, and its checksum as its sender has it. Its memory may then be used again.
Arrived = Callable[[Parcel, int], None]


class Transport(Protocol):
    """Every wait ends: with what it waited for, or, raising ``Fault``, with a peer's failure or at the deadline."""

    @property
    def process(self) -> int: ...

    @property
    def num_processes(self) -> int: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What somebody who wonders about its speed should know."""

    @property
    def staging(self) -> Staging:
        """Kept as long as its connections are."""

    def direct(self, src: Device, dst: Device) -> bool:
        """Whether the receiver copies out of the sender's memory."""

    def least_row_bytes(self, src: Device, dst: Device) -> int | None:
        """On this side of a message, pieces may be flows if their rows are so long on average, and where they are one
        run; None: no piece may."""

    def exchange(
        self, sends: Sequence[Outgoing], receives: Sequence[Parcel], arrived: Arrived, deadline_s: float
    ) -> None:
        """The messages of one wave, until all that is received is there and all that is sent has left. Of one message
        the pieces arrive in order, each before the next has begun to; ``arrived`` is called with every one."""

    def gather(self, text: str, deadline_s: float) -> tuple[str, ...]:
        """Every process's ``text``, in process order. Also a barrier."""

    def decide(self, deadline_s: float) -> None:
        """Commit, or raise the ``Fault`` for which all abort. Every process sees the same decision."""

    def fail(self, error: Exception) -> Exception:
        """Tell the others why this process stops, release those who wait for it, return the first failure of all."""

    def abort(self, reason: str) -> None:
        """From another thread: whatever this process waits for ends at once, with ``reason``."""

    def close(self, deadline_s: float) -> None:
        """End in good order: after it nothing of this transition is under way."""
