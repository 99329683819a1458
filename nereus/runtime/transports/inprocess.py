"""All devices in one process: messages are matched by tag, and are copies of memory."""

from __future__ import annotations

from collections.abc import Sequence

from nereus.ir.cluster import Device
from nereus.runtime.faults import PROGRAM_FAULT, Fault
from nereus.runtime.staging import Staging
from nereus.runtime.transports.base import Arrived, Outgoing, Parcel


def hand_over(sends: Sequence[Outgoing], receives: Sequence[Parcel], arrived: Arrived) -> None:
    """Every piece to its receiver's buffer, as soon as it is made."""
    expected = {(parcel.tag, parcel.part): parcel for parcel in receives}
    for outgoing in sends:
        for source in outgoing.pieces:
            target = expected.pop((source.tag, source.part), None)
            if target is None:
                text = f"message {source.tag} to {source.dst} is never received"
                raise Fault(PROGRAM_FAULT, text, where=str(source.src))
            if (source.src, source.dst) != (target.src, target.dst) or len(source.data) != len(target.data):
                text = (
                    f"message {source.tag}: {source.src} sends {len(source.data)} bytes to {source.dst}, "
                    f"{target.dst} expects {len(target.data)} from {target.src}"
                )
                raise Fault(PROGRAM_FAULT, text, where=str(target.dst))
            target.data.copy_(source.data)
            arrived(target, source.checksum)
    for target in expected.values():
        text = f"message {target.tag} from {target.src} was never sent"
        raise Fault(PROGRAM_FAULT, text, where=str(target.dst))


class InProcess:
    """A transport without other processes."""

    process = 0
    num_processes = 1
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.staging = Staging()

    def direct(self, src: Device, dst: Device) -> bool:
        return False

    def least_row_bytes(self, src: Device, dst: Device) -> int | None:
        return None

    def exchange(
        self, sends: Sequence[Outgoing], receives: Sequence[Parcel], arrived: Arrived, deadline_s: float
    ) -> None:
        hand_over(sends, receives, arrived)

    def gather(self, text: str, deadline_s: float) -> tuple[str, ...]:
        return (text,)

    def decide(self, deadline_s: float) -> None:
        """The only process has come this far, so it commits."""

    def fail(self, error: Exception) -> Exception:
        return error

    def abort(self, reason: str) -> None:
        """Nothing waits here."""

    def close(self, deadline_s: float) -> None:
        """Nothing is open here."""
