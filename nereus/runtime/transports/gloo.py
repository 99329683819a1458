"""Between processes: torch.distributed's gloo, and reads of each other's memory where they share a host (``attach``).
Devices of one process exchange copies of memory.

A process posts all that it receives in a wave before it sends anything, the pieces of a message in order under the
message's tag (gloo keeps the order of equal tags between two processes), and waits only after all of it is posted;
gloo's own thread moves whatever is posted, so that no order of posting can make two processes wait for each other.

Of pieces for a process that can read this one's memory, only tickets go, several in a message: where each lies, and its
checksum. The receiver copies them from there, and where staging is among them it says when it is done, so that the
sender may use that again. Failures and deadlines are the same; a sender that dies is found by the read, by its
connections, or by its silence.

Failures: whoever stops writes why into the store (the first one wins) and closes its connections; that ends the waits
of its peers at once, and they read the store. A process that neither speaks nor closes runs into the others' deadlines.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from nereus.ir.cluster import Device
from nereus.runtime.faults import DEADLINE, PARTICIPANT_FAILED, PROGRAM_FAULT, Fault, first_line
from nereus.runtime.transports.attach import Card, Rows, meet, read
from nereus.runtime.transports.base import CHECKSUM_MASK, Parcel
from nereus.runtime.transports.inprocess import Mailbox

#: Untyped in part.
dist: Any = torch.distributed

#: Tags above this one carry the checksums of one wave from process to process.
_FIRST_CHECK_TAG = 1 << 30
#: And these the word that a process has read all that was lent to it in one.
_FIRST_READ_TAG = _FIRST_CHECK_TAG + (1 << 29)
#: Pieces in a message of tickets, so that a receiver of much begins before its sender has summed all of it.
_TICKETS = 16
#: Bytes of a text in a gather; longer ones are cut.
_TEXT_BYTES = 1024
_CLOSED_TEXT = "the connection was closed"
#: A process that only noticed that another closed its connection waits this long for that one's own words.
_HEARSAY_S = 1.0
_ERROR, _DECISION, _CLOSED, _COMMIT = "error", "decision", "closed", "commit"


class Gloo:
    """``name``: unique among transitions that use ``store``. ``process_of``: where each device lives. ``keep``: after a
    ``close`` the connections stay, for ``again``; ``drop`` ends them.

    Raises Fault if the processes do not find each other within ``deadline_s``.
    """

    def __init__(
        self,
        *,
        store: Any,
        name: str,
        process: int,
        num_processes: int,
        process_of: Mapping[Device, int],
        deadline_s: float,
        address: str = "127.0.0.1",
        keep: bool = False,
    ) -> None:
        self.process = process
        self._keep, self._whole_store = keep, store
        self.num_processes = num_processes
        self._process_of = process_of
        self._store = dist.PrefixStore(name, store)
        self._mailbox = Mailbox()
        self._wave = 0
        #: What is under way, in the order in which it was posted; of a receive its parcel, or the tickets of several.
        self._works: deque[tuple[Any, str, tuple[Parcel, ...], torch.Tensor | None]] = deque()
        #: Pieces on their way out, by tag and part.
        self._sends: dict[tuple[int, int], Any] = {}
        #: Pieces whose tickets are not posted yet: (is it a send, tag) -> in order.
        self._tickets: dict[tuple[bool, int], list[Parcel]] = {}
        self._sums: dict[int, int] = {}  # of what was read, by tag
        #: Processes whose memory this one reads, by number, with their process numbers; and those that read this one's.
        self._reads: dict[int, int] = {}
        self._read_by: set[int] = set()
        #: Who has staging of this process, and whose staging this one has read.
        self._lent_to: set[int] = set()
        self._read_from: set[int] = set()
        self.notes: tuple[str, ...] = ()
        #: By peer: checksums by tag of what goes out, and the tags of what comes in.
        self._checks_out: dict[int, dict[int, int]] = {}
        self._checks_in: dict[int, dict[int, int]] = {}
        self._posted: list[torch.Tensor] = []
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=deadline_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        try:
            self._group: Any = dist.ProcessGroupGloo(self._store, process, num_processes, options)
        except RuntimeError as error:
            raise self._fault(error, "the processes did not find each other", deadline_s) from None
        self._card = Card()
        try:
            self._meet(deadline_s)
        except Fault:
            self.drop()
            raise

    @property
    def where(self) -> str:
        return f"process {self.process}"

    def again(self, name: str, process_of: Mapping[Device, int]) -> bool:
        """Ready for another transition among the same processes; False where the last one broke it."""
        if self._group is None:
            return False
        self._store = dist.PrefixStore(name, self._whole_store)
        self._process_of, self._wave = process_of, 0
        return True

    def _meet(self, deadline_s: float) -> None:
        """Who can read whose memory: each tries, and tells."""
        mine = self._card.text()
        found = [meet(mine, card) for card in self.gather(mine, deadline_s)]
        found[self.process] = (0, "")
        self._reads = {number: pid for number, (pid, _) in enumerate(found) if pid}
        said = self.gather(f"{sum(1 << number for number in self._reads):x}", deadline_s)
        self._read_by = {number for number, mask in enumerate(said) if int(mask, 16) >> self.process & 1}
        self.notes = tuple(f"process {number} over gloo: {why}" for number, (_, why) in enumerate(found) if why)

    def direct(self, src: Device, dst: Device) -> bool:
        """The two ends agree: the receiver said what it reads."""
        there, here = self._process_of[src], self._process_of[dst]
        return (here == self.process and there in self._reads) or (there == self.process and here in self._read_by)

    def streams(self, src: Device, dst: Device) -> bool:
        return self._process_of[src] != self._process_of[dst] and not self.direct(src, dst)

    def settle(self, parcel: Parcel, deadline_s: float) -> None:
        if (found := self._sends.pop((parcel.tag, parcel.part), None)) is not None:
            self._works.appendleft(found)
            self._finish_one(time.monotonic() + deadline_s, deadline_s, lambda _: None)

    def post(self, wave: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        self._wave = wave
        for parcels, is_send in ((receives, False), (sends, True)):
            for parcel in parcels:
                peer = self._process_of[parcel.dst if is_send else parcel.src]
                if peer == self.process:
                    (self._mailbox.send if is_send else self._mailbox.expect)(parcel)
                    continue
                if not 0 <= parcel.tag < _FIRST_CHECK_TAG:
                    raise Fault(PROGRAM_FAULT, "message tags are outside the transport's range", where=self.where)
                if peer in (self._read_by if is_send else self._reads):
                    lot = self._tickets.setdefault((is_send, parcel.tag), [])
                    lot.append(parcel)
                    if len(lot) == _TICKETS:
                        self._hand_over(is_send, parcel.tag)
                    continue
                sums = (self._checks_out if is_send else self._checks_in).setdefault(peer, {})
                sums[parcel.tag] = (sums.get(parcel.tag, 0) + parcel.checksum) & CHECKSUM_MASK
                self._start(is_send, parcel.data, peer, parcel.tag, () if is_send else (parcel,))
                if is_send:  # waited for alone, where its sender wants the memory again
                    self._sends[parcel.tag, parcel.part] = self._works.pop()

    def _hand_over(self, is_send: bool, tag: int) -> None:
        """Post the tickets of some pieces of one message; both ends have as many."""
        lot = tuple(self._tickets.pop((is_send, tag)))
        peer = self._process_of[lot[0].dst if is_send else lot[0].src]
        if not is_send:
            tickets = torch.empty((len(lot), 6), dtype=torch.int64)
            self._start(False, tickets, peer, tag, lot, tickets)
            return
        lines = []
        for parcel in lot:
            rows = Rows.of(parcel.data)
            lines.append((rows.address, rows.num, rows.num_bytes, rows.stride, parcel.staged, _signed(parcel.checksum)))
            self._posted.append(parcel.data)
        if any(parcel.staged for parcel in lot):
            self._lent_to.add(peer)
        self._start(True, torch.tensor(lines, dtype=torch.int64), peer, tag)

    def _exchange_checks(self) -> list[tuple[list[int], torch.Tensor]]:
        """Start sending every peer the checksums of what was sent to it; (tags, where theirs will be) of every peer."""
        expected = []
        for peer in sorted({*self._checks_out, *self._checks_in}):
            tag = _FIRST_CHECK_TAG + self._wave
            if peer in self._checks_in:
                tags = sorted(self._checks_in[peer])
                sums = torch.empty(len(tags), dtype=torch.int64)
                expected.append((tags, sums))
                self._start(False, sums, peer, tag)
            if peer in self._checks_out:
                values = [value for _, value in sorted(self._checks_out[peer].items())]
                self._start(True, torch.tensor([_signed(v) for v in values], dtype=torch.int64), peer, tag)
        return expected

    def _start(
        self,
        is_send: bool,
        data: torch.Tensor,
        peer: int,
        tag: int,
        parcels: tuple[Parcel, ...] = (),
        tickets: torch.Tensor | None = None,
    ) -> None:
        if self._group is None:
            raise Fault(PARTICIPANT_FAILED, "the transport is closed", where=self.where)
        self._posted.append(data)  # gloo reads or fills it until the work is done
        try:
            work = self._group.send([data], peer, tag) if is_send else self._group.recv([data], peer, tag)
        except RuntimeError as error:
            raise self._fault(error, f"process {peer} is gone", 0.0) from None
        doing = f"{'sending to' if is_send else 'receiving from'} process {peer}"
        self._works.append((work, doing, parcels, tickets))

    def wait(self, deadline_s: float, arrived: Callable[[Parcel], None]) -> dict[int, int]:
        end = time.monotonic() + deadline_s
        for is_send, tag in list(self._tickets):
            self._hand_over(is_send, tag)
        expected = self._exchange_checks()
        checksums = self._mailbox.deliver(arrived)
        self._finish(end, deadline_s, arrived)
        self._works.extend(self._sends.values())
        self._sends.clear()
        for peer in sorted(self._read_from):
            self._start(True, torch.zeros(1), peer, _FIRST_READ_TAG + self._wave)
        for peer in sorted(self._lent_to):
            self._start(False, torch.zeros(1), peer, _FIRST_READ_TAG + self._wave)
        self._finish(end, deadline_s, arrived)
        checksums.update(self._sums)
        for tags, sums in expected:
            checksums.update((tag, value & CHECKSUM_MASK) for tag, value in zip(tags, sums.tolist(), strict=True))
        self._forget()
        return checksums

    def _finish(self, end: float, deadline_s: float, arrived: Callable[[Parcel], None]) -> None:
        """All that is under way."""
        while self._works:
            self._finish_one(end, deadline_s, arrived)

    def _finish_one(self, end: float, deadline_s: float, arrived: Callable[[Parcel], None]) -> None:
        work, doing, parcels, tickets = self._works.popleft()
        fault = self._wait(work, end, doing, deadline_s)
        del work
        if fault is not None:
            raise fault
        lines: list[list[int]] = [] if tickets is None else tickets.tolist()
        for number, parcel in enumerate(parcels):
            if lines:
                self._read(parcel, *lines[number])
            arrived(parcel)

    def _read(
        self, parcel: Parcel, address: int, num: int, num_bytes: int, stride: int, staged: int, checksum: int
    ) -> None:
        peer = self._process_of[parcel.src]
        if staged:
            self._read_from.add(peer)
        self._sums[parcel.tag] = (self._sums.get(parcel.tag, 0) + checksum) & CHECKSUM_MASK
        try:
            read(self._reads[peer], Rows(address, num, num_bytes, stride), Rows.of(parcel.data))
        except OSError as error:
            text = f"{_CLOSED_TEXT} while reading the memory of process {peer}: {error.strerror}"
            raise Fault(PARTICIPANT_FAILED, text, where=self.where) from None

    def _wait(self, work: Any, end: float, doing: str, deadline_s: float) -> Fault | None:
        """The failure is returned, not raised: a traceback would keep gloo's connections open."""
        try:
            work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError as error:
            return self._fault(error, doing, deadline_s)
        return None

    def gather(self, text: str, deadline_s: float) -> tuple[str, ...]:
        if self._group is None:
            raise Fault(PARTICIPANT_FAILED, "the transport is closed", where=self.where)
        raw = text.encode()[:_TEXT_BYTES]
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else mine[:0]
        rows = [torch.zeros_like(mine) for _ in range(self.num_processes)]
        try:
            work = self._group.allgather([rows], [mine])
        except RuntimeError as error:
            raise self._fault(error, "agreeing with all processes", deadline_s) from None
        fault = self._wait(work, time.monotonic() + deadline_s, "agreeing with all processes", deadline_s)
        del work
        if fault is not None:
            raise fault
        return tuple(row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows)

    def decide(self, deadline_s: float) -> None:
        wish = _COMMIT
        try:
            self.gather("", deadline_s)  # whoever comes here has verified all that it received
        except Fault as fault:
            wish = fault.encode()
        decision = self._first(_DECISION, wish)
        if decision != _COMMIT:
            raise Fault.decode(decision)

    def fail(self, error: Exception) -> Exception:
        fault = Fault.of(error, self.where)
        try:
            if fault.text.startswith(_CLOSED_TEXT):  # whoever closed it is about to say why, if it still can
                end = time.monotonic() + _HEARSAY_S
                while time.monotonic() < end and not self._store.check([_ERROR]):
                    time.sleep(0.01)
            first = Fault.decode(self._first(_ERROR, fault.encode()))
        except (RuntimeError, ValueError):  # the store went with the process that kept it
            first = fault
        self.drop()
        return first

    def close(self, deadline_s: float) -> None:
        """Connections stay until all are done: closing one with unread data would cut a slower peer off."""
        if self._keep:
            self._forget()
            return
        end = time.monotonic() + deadline_s
        count = self._store.add(_CLOSED, 1)
        while count < self.num_processes and time.monotonic() < end and not self._store.check([_ERROR]):
            time.sleep(0.005)
            count = self._store.add(_CLOSED, 0)
        self.drop()

    def _first(self, key: str, value: str) -> str:
        """What the first process to write ``key`` wrote."""
        return bytes(self._store.compare_set(key, "", value)).decode()

    def _fault(self, error: RuntimeError, doing: str, deadline_s: float) -> Fault:
        """A failure of gloo in our words; a peer that said why it stopped is quoted by ``fail``."""
        text = str(error)
        if "imed out" in text or "imeout" in text:
            return Fault(DEADLINE, f"no answer within {deadline_s:g} s while {doing}", where=self.where)
        detail = _CLOSED_TEXT if "losed" in text or "reset" in text else first_line(error)
        return Fault(PARTICIPANT_FAILED, f"{detail} while {doing}", where=self.where)

    def drop(self) -> None:
        """End the connections."""
        self._works.clear()
        self._sends.clear()
        self._forget()
        self._mailbox = Mailbox()
        self._group = None
        self._card.close()

    def _forget(self) -> None:
        self._checks_out.clear()
        self._checks_in.clear()
        self._posted.clear()
        self._tickets.clear()
        self._sums.clear()
        self._lent_to.clear()
        self._read_from.clear()


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return value - (1 << 64) if value >> 63 else value


def open_store(path: str, num_processes: int) -> Any:
    """The store that processes of one machine share, in a file."""
    return dist.FileStore(path, num_processes)
