"""All devices in one process: messages are matched by tag in a mailbox, and are copies of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nereus.ir.cluster import Device
from nereus.runtime.faults import PROGRAM_FAULT, Fault
from nereus.runtime.transports.base import CHECKSUM_MASK, Parcel


class Mailbox:
    """Messages between devices of one process. In whatever order sender and receiver post, tag and part join them."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], Parcel] = {}
        self._expected: dict[tuple[int, int], Parcel] = {}

    def send(self, parcel: Parcel) -> None:
        if (parcel.tag, parcel.part) in self._sent:
            raise Fault(PROGRAM_FAULT, f"message {parcel.tag} is sent twice", where=str(parcel.src))
        self._sent[parcel.tag, parcel.part] = parcel

    def expect(self, parcel: Parcel) -> None:
        if (parcel.tag, parcel.part) in self._expected:
            raise Fault(PROGRAM_FAULT, f"message {parcel.tag} is received twice", where=str(parcel.dst))
        self._expected[parcel.tag, parcel.part] = parcel

    def deliver(self, arrived: Callable[[Parcel], None]) -> dict[int, int]:
        """Copy every piece to its receiver's buffer; checksums by tag."""
        checksums: dict[int, int] = {}
        for (tag, part), target in self._expected.items():
            source = self._sent.pop((tag, part), None)
            if source is None:
                text = f"message {tag} from {target.src} was never sent"
                raise Fault(PROGRAM_FAULT, text, where=str(target.dst))
            if (source.src, source.dst) != (target.src, target.dst) or len(source.data) != len(target.data):
                text = (
                    f"message {tag}: {source.src} sends {len(source.data)} bytes to {source.dst}, "
                    f"{target.dst} expects {len(target.data)} from {target.src}"
                )
                raise Fault(PROGRAM_FAULT, text, where=str(target.dst))
            target.data.copy_(source.data)
            checksums[tag] = (checksums.get(tag, 0) + source.checksum) & CHECKSUM_MASK
            arrived(target)
        if self._sent:
            parcel = next(iter(self._sent.values()))
            text = f"message {parcel.tag} to {parcel.dst} is never received"
            raise Fault(PROGRAM_FAULT, text, where=str(parcel.src))
        self._expected.clear()
        return checksums


class InProcess:
    """A transport without other processes."""

    process = 0
    num_processes = 1
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._mailbox = Mailbox()

    def direct(self, src: Device, dst: Device) -> bool:
        return False

    def streams(self, src: Device, dst: Device) -> bool:
        return False

    def settle(self, parcel: Parcel, deadline_s: float) -> None:
        """Nothing streams here."""

    def post(self, wave: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        for parcel in receives:
            self._mailbox.expect(parcel)
        for parcel in sends:
            self._mailbox.send(parcel)

    def wait(self, deadline_s: float, arrived: Callable[[Parcel], None]) -> dict[int, int]:
        return self._mailbox.deliver(arrived)

    def gather(self, text: str, deadline_s: float) -> tuple[str, ...]:
        return (text,)

    def decide(self, deadline_s: float) -> None:
        """The only process has come this far, so it commits."""

    def fail(self, error: Exception) -> Exception:
        return error

    def close(self, deadline_s: float) -> None:
        self._mailbox = Mailbox()
