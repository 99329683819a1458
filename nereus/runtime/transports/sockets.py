"""Between processes: a TCP connection for every two of them, and reads of each other's memory where they share a host
(``attach``). Devices of one process exchange copies of memory.

One thread does all of it and never waits for one connection alone, so that no order of messages can make two processes
wait for each other. Bytes go from and to where they lie, rows with strides included, a megabyte at a time,
and are summed just before they go and just after they came: while they lie in a core's cache (``kernels/flow.py``). The
checksum follows them. Pieces of short rows, and all without a C compiler, are packed when the connection has room for
them, and put to their place when the last has come. What comes for a wave that this process has not reached stays where
it is.

Of pieces for a process that can read this one's memory only tickets go: where each lies, and its checksum. The receiver
copies them from there, and says when it is done with staging. Failures and deadlines are the same; a sender that dies
is found by the read, by its connections, or by its silence.

Failures: whoever stops writes why into the store (the first one wins) and closes its connections; that ends the waits
of its peers at once, and they read the store. A process that neither speaks nor closes runs into the others' deadlines,
unless somebody knows that it is gone: ``abort``, from another thread, ends whatever this process waits for, and so does
``stop``, which is asked while nothing comes.

Why not torch's gloo, which carries nothing of this: it has no abort, two threads for each process, a message of its own
before every receive, and no room for a checksum in one (docs/benchmarks.md has both).
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed

from nereus.ir.cluster import Device
from nereus.kernels import flow
from nereus.kernels.flow import NUM_PLACE, Flow
from nereus.runtime.faults import DEADLINE, PARTICIPANT_FAILED, PROGRAM_FAULT, Fault, first_line
from nereus.runtime.staging import Staging
from nereus.runtime.transports import agreement
from nereus.runtime.transports.agreement import CLOSED_TEXT
from nereus.runtime.transports.attach import LEAST_ROW_BYTES, Card, meet, place_of, read
from nereus.runtime.transports.base import TURNS, Arrived, Outgoing, Parcel
from nereus.runtime.transports.inprocess import hand_over
from nereus.runtime.transports.link import BYTES, DONE, LENT, TEXT, TICKET, Frame, Link
from nereus.runtime.transports.mesh import connected

#: Untyped in part.
dist: Any = torch.distributed

#: A wait looks at least so often whether it is to end.
_SLICE_S = 0.1
_MOST_TEXT_BYTES = 1 << 20
_NOTHING = memoryview(b"")
#: Shorter rows go through staging: to the system each is a piece of memory of its own.
_LEAST_ROW_BYTES = 64


class _Peer:
    """Another process, and what is under way between it and this one."""

    def __init__(self, number: int) -> None:
        self.number = number
        #: Messages to it that are not made yet, the first one perhaps in part.
        self.outgoing: deque[Iterator[Parcel]] = deque()
        self.expected: dict[tuple[int, int], Parcel] = {}
        #: Pieces in staging that it has not read yet: their memory has to stay.
        self.lent: deque[Parcel] = deque()
        self.texts: deque[str] = deque()
        self.owes_text = False

    def busy(self, link: Link) -> bool:
        return bool(self.outgoing or self.expected or self.lent or self.owes_text or link.writing)


class Sockets:
    """``name``: unique among transitions that use ``store``. ``process_of``: where each device lives. ``keep``: after a
    ``close`` the connections stay, for ``again``; ``drop`` ends them. ``stop``: asked in every wait, ten times a
    second; what it returns is raised.

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
        stop: Callable[[], Fault | None] = lambda: None,
    ) -> None:
        self.process, self.num_processes = process, num_processes
        self._keep, self._whole_store, self._process_of = keep, store, process_of
        self._store = dist.PrefixStore(name, store)
        self._ended: Fault | None = None
        #: Nothing of an earlier transition is under way.
        self._whole = True
        self._stop = stop
        self._arrived: Arrived = _unasked
        self.notes: tuple[str, ...] = ()
        self.staging = Staging()
        #: Processes whose memory this one reads, with their process numbers; and those that read this one's.
        self._reads: dict[int, int] = {}
        self._read_by: set[int] = set()
        self._links: dict[int, tuple[_Peer, Link]] = {}  # by file descriptor
        self._poll, self._masks = select.poll(), dict[int, int]()
        self._card = Card()
        try:
            found = connected(self._store, process, num_processes, address=address, deadline_s=deadline_s, stop=stop)
            for number, connection in found.items():
                self._add(_Peer(number), connection)
            self._meet(deadline_s)
        except (OSError, RuntimeError) as error:
            self.drop()
            text = f"the processes did not find each other: {first_line(error)}"
            raise Fault(PARTICIPANT_FAILED, text, where=self.where) from None
        except BaseException:
            self.drop()
            raise

    def _add(self, peer: _Peer, connection: socket.socket) -> None:
        link = Link(connection, lambda frame: self._place(peer, frame), lambda *came: self._came(peer, *came))
        self._links[connection.fileno()] = peer, link

    @property
    def where(self) -> str:
        return f"process {self.process}"

    def again(self, name: str, process_of: Mapping[Device, int]) -> bool:
        """Ready for another transition among the same processes; False where the last one broke it."""
        if self._ended is not None or not self._whole:
            return False
        self._store, self._process_of = dist.PrefixStore(name, self._whole_store), process_of
        return True

    def _meet(self, deadline_s: float) -> None:
        """Who can read whose memory: each tries, and tells."""
        mine = self._card.text()
        found = [meet(mine, card) for card in self.gather(mine, deadline_s)]
        found[self.process] = (0, "")
        self._reads = {number: pid for number, (pid, _) in enumerate(found) if pid}
        said = self.gather(f"{sum(1 << number for number in self._reads):x}", deadline_s)
        self._read_by = {number for number, mask in enumerate(said) if int(mask, 16) >> self.process & 1}
        self.notes = tuple(f"process {number} over TCP: {why}" for number, (_, why) in enumerate(found) if why)

    def direct(self, src: Device, dst: Device) -> bool:
        """The two ends agree: the receiver said what it reads."""
        there, here = self._process_of[src], self._process_of[dst]
        return (here == self.process and there in self._reads) or (there == self.process and here in self._read_by)

    def least_row_bytes(self, src: Device, dst: Device) -> int | None:
        there, here = self._process_of[dst], self._process_of[src]
        if flow.calls() is None or here == there:
            return None
        return LEAST_ROW_BYTES if here == self.process and there in self._read_by else _LEAST_ROW_BYTES

    # -- one wave -----------------------------------------------------------------------------------------------------

    def exchange(
        self, sends: Sequence[Outgoing], receives: Sequence[Parcel], arrived: Arrived, deadline_s: float
    ) -> None:
        peers = {peer.number: peer for peer, _ in self._links.values()}
        mine_out: list[Outgoing] = []
        mine_in: list[Parcel] = []
        for outgoing in sends:
            to = self._process_of[outgoing.dst]
            if to == self.process:
                mine_out.append(outgoing)
            else:
                peers[to].outgoing.append(outgoing.pieces)
        for parcel in receives:
            source = self._process_of[parcel.src]
            if source == self.process:
                mine_in.append(parcel)
            else:
                peers[source].expected[parcel.tag, parcel.part] = parcel
        self._arrived = arrived
        for _, link in self._links.values():  # what came before it was expected
            link.resume()
        self._push()
        hand_over(mine_out, mine_in, arrived)
        self._run(deadline_s)
        self._arrived = _unasked

    def _push(self) -> bool:
        """A piece for every connection that has room. Whether there may be room for more of them at once."""
        more = False
        for peer, link in self._links.values():
            if link.ended:
                continue
            direct = peer.number in self._read_by
            if peer.outgoing and len(peer.lent) < TURNS and (direct or not link.writing):
                parcel = next(peer.outgoing[0], None)
                if parcel is None:
                    peer.outgoing.popleft()
                else:
                    self._put(peer, link, parcel, direct=direct)
                more = True
            if link.writing:
                try:
                    link.write()
                except OSError:
                    link.ended = True
                # What it took was the last of a piece: nobody tells that there is room for the next one.
                more = more or (bool(peer.outgoing) and not link.writing)
        return more

    def _put(self, peer: _Peer, link: Link, parcel: Parcel, *, direct: bool) -> None:
        if direct:
            places = place_of(parcel.data) if parcel.flow is None else parcel.flow.places
            raw = memoryview(places.tobytes())
            link.put(Frame(LENT if parcel.staged else TICKET, parcel.tag, parcel.part, len(raw), parcel.checksum), raw)
            if parcel.staged:
                peer.lent.append(parcel)
        else:
            link.put(Frame(BYTES, parcel.tag, parcel.part, parcel.num_bytes, parcel.checksum), _bytes_of(parcel))

    def _place(self, peer: _Peer, frame: Frame) -> memoryview | Flow | None:
        if frame.kind not in (BYTES, TICKET, LENT, DONE, TEXT) or (
            frame.kind != BYTES and frame.size > _MOST_TEXT_BYTES
        ):
            raise Fault(PROGRAM_FAULT, f"process {peer.number} sends no frames of ours", where=self.where)
        parcel = None
        if frame.kind in (BYTES, TICKET, LENT):
            parcel = peer.expected.get((frame.tag, frame.part))
            if parcel is None:
                return None
        if parcel is None or frame.kind != BYTES:
            return memoryview(bytearray(frame.size))
        if frame.size != parcel.num_bytes:
            text = f"message {frame.tag}: process {peer.number} sends {frame.size} bytes, not {parcel.num_bytes}"
            raise Fault(PROGRAM_FAULT, text, where=self.where)
        return _bytes_of(parcel)

    def _came(self, peer: _Peer, frame: Frame, body: memoryview | Flow) -> None:
        if frame.kind == DONE:
            peer.lent.popleft()
        elif frame.kind == TEXT:
            peer.texts.append(_text_of(body))
            peer.owes_text = False
        else:
            parcel = peer.expected.pop((frame.tag, frame.part))
            if not isinstance(body, Flow) and frame.kind != BYTES:
                self._read(peer, frame, body, parcel)
            self._arrived(parcel, frame.checksum)

    def _read(self, peer: _Peer, frame: Frame, said: memoryview, parcel: Parcel) -> None:
        try:
            places = np.frombuffer(said, dtype=np.int64).reshape(-1, NUM_PLACE)
            read(self._reads[peer.number], places, parcel.data if parcel.flow is None else parcel.flow)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            text = f"{CLOSED_TEXT} while reading the memory of process {peer.number}: {reason}"
            raise Fault(PARTICIPANT_FAILED, text, where=self.where) from None
        if frame.kind == LENT:
            link = next(link for other, link in self._links.values() if other is peer)
            link.put(Frame(DONE))

    def _run(self, deadline_s: float) -> None:
        """Until nothing is under way."""
        end = time.monotonic() + deadline_s
        while True:
            more = self._push()
            busy = [(peer, link) for peer, link in self._links.values() if peer.busy(link)]
            if self._ended is not None:
                raise Fault(self._ended.code, self._ended.text, where=self._ended.where)
            for peer, link in busy:
                if link.ended:
                    text = f"{CLOSED_TEXT} while {_doing(peer)} process {peer.number}"
                    raise Fault(PARTICIPANT_FAILED, text, where=self.where)
            if not busy:
                return
            left = end - time.monotonic()
            if left <= 0:
                text = f"no answer within {deadline_s:g} s while {_doing(busy[0][0])} process {busy[0][0].number}"
                raise Fault(DEADLINE, text, where=self.where)
            self._watch()
            events = self._poll.poll(0 if more else 1e3 * min(left, _SLICE_S))
            if not events and not more and (fault := self._stop()) is not None:
                raise fault
            for number, event in events:
                _, link = self._links[number]
                if event & ~select.POLLOUT:
                    try:
                        link.read()
                    except OSError:
                        link.ended = True

    def _watch(self) -> None:
        """Whatever a connection can do now is waited for; one that stands still says nothing, not even its end."""
        for number, (_, link) in self._links.items():
            mask = 0 if link.halted or link.ended else select.POLLIN | (select.POLLOUT if link.writing else 0)
            if mask == self._masks.get(number, 0):
                continue
            self._masks[number] = mask
            if mask:
                self._poll.register(number, mask)
            else:
                self._poll.unregister(number)

    # -- agreements ---------------------------------------------------------------------------------------------------

    def gather(self, text: str, deadline_s: float) -> tuple[str, ...]:
        raw = memoryview(text.encode())[:_MOST_TEXT_BYTES]
        for peer, link in self._links.values():
            link.put(Frame(TEXT, size=len(raw)), raw)
            peer.owes_text = not peer.texts
        self._run(deadline_s)
        said = {peer.number: peer.texts.popleft() for peer, _ in self._links.values()}
        return tuple(said.get(number, text) for number in range(self.num_processes))

    def decide(self, deadline_s: float) -> None:
        self._whole = False
        self._whole = agreement.decide(self._store, lambda: self.gather("", deadline_s), self.where)

    def fail(self, error: Exception) -> Exception:
        first = agreement.first_failure(self._store, Fault.of(error, self.where))
        self.drop()
        return first

    def abort(self, reason: str) -> None:
        self._ended = self._ended or Fault(PARTICIPANT_FAILED, reason, where=self.where)
        for _, link in list(self._links.values()):
            link.shut()

    def close(self, deadline_s: float) -> None:
        """Where the connections go, all processes are done with the store of this transition first."""
        if not self._keep:
            self.gather("", deadline_s)
            self.drop()

    def drop(self) -> None:
        """End the connections."""
        self._ended = self._ended or Fault(PARTICIPANT_FAILED, "the transport is closed", where=self.where)
        for _, link in self._links.values():
            link.close()
        self._links, self._masks, self._poll = {}, {}, select.poll()
        self._arrived = _unasked
        self.staging.clear()
        self._card.close()


def _doing(peer: _Peer) -> str:
    if peer.expected:
        return "receiving from"
    return "agreeing with" if peer.owes_text else "sending to"


def _text_of(body: memoryview | Flow) -> str:
    assert not isinstance(body, Flow)  # no text has a place among what is expected
    return bytes(body).decode(errors="replace")


def _bytes_of(parcel: Parcel) -> memoryview | Flow:
    if parcel.flow is not None:
        return parcel.flow
    array: Any = parcel.data.numpy()
    return memoryview(array)


def _unasked(parcel: Parcel, checksum: int) -> None:
    raise Fault(PROGRAM_FAULT, f"message {parcel.tag} arrives outside a wave", where=str(parcel.dst))


def open_store(path: str, num_processes: int) -> Any:
    """The store that processes of one machine share, in a file."""
    return dist.FileStore(path, num_processes)
