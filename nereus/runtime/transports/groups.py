"""Between processes: torch.distributed, gloo for what lies in host memory, NCCL (on AMD's GPUs RCCL) for what lies on
GPUs. The group is the transition's own, made on its store (``runtime/communicator.py``).

Bytes go in rounds of pairs, as players of a tournament meet: in a round a process swaps with one other, at most one
piece in each direction, each after a header that names it and has its checksum. Which piece that is both ends know: a
pair's messages go in order of tag, their pieces in order. So no order of messages can make two processes wait for each
other, and never is more posted than two rounds, whatever the size of a wave: large unbounded batches hang NCCL. While a
round is under way the next one's piece is packed, and the last one's is put to its place, if they are of other pairs:
the pieces of a message share memory.

What lies elsewhere than the backend sends from (host memory under NCCL) passes through a buffer of one piece.

Failures: whoever stops writes why into the store and ends its group. A peer sees that as a closed connection over gloo;
over NCCL, perhaps not at all. So a thread looks into the store while this process waits, and ends the wait; it asks
``stop`` too. A process that neither speaks nor closes runs into the others' deadlines.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, cycle, takewhile
from typing import Any

import torch
import torch.distributed

from nereus.ir.cluster import Device
from nereus.runtime.communicator import GLOO, Communicator
from nereus.runtime.faults import DEADLINE, PARTICIPANT_FAILED, PROGRAM_FAULT, Fault, first_line
from nereus.runtime.staging import Staging
from nereus.runtime.transports import agreement
from nereus.runtime.transports.agreement import CLOSED_TEXT
from nereus.runtime.transports.base import Arrived, Outgoing, Parcel
from nereus.runtime.transports.inprocess import hand_over
from nereus.runtime.transports.mesh import Wait

#: Untyped in part.
dist: Any = torch.distributed

#: A wait is looked after so often.
_SLICE_S = 0.1
_POLL_S = 0.005
#: Bytes of a text in a gather; longer ones are cut.
_TEXT_BYTES = 1024
_CLOSED = "closed"


@dataclass(slots=True)
class _Round:
    """``sent`` and ``expected``: the pieces; ``tensors``: all that torch reads or fills until ``works`` are done, of a
    receive the header and the bytes."""

    peer: int
    sent: Parcel | None
    expected: Parcel | None
    header: torch.Tensor | None = None
    landing: torch.Tensor | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)

    @property
    def doing(self) -> str:
        return f"{'sending to' if self.expected is None else 'receiving from'} process {self.peer}"


class ProcessGroups:
    """``name``: unique among transitions that use ``store``. ``process_of``: where each device lives. ``keep``: after a
    ``close`` the group stays, for ``again``; ``drop`` ends it. ``stop``: asked in every wait, ten times a second,
    from a thread that this one waits for; what it returns is raised.

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
        backend: str = GLOO,
    ) -> None:
        self.process, self.num_processes = process, num_processes
        self.notes: tuple[str, ...] = ()
        self.staging = Staging()
        self._keep, self._whole_store, self._process_of, self._stop = keep, store, process_of, stop
        # Its own connection: a look into the store must not queue behind a wait of the thread that it is to end.
        self._whole_words = store.clone() if hasattr(store, "clone") else store
        self._ended: Fault | None = None
        #: Nothing of an earlier transition is under way.
        self._whole = True
        self._group: Communicator | None = None
        self._name(name)
        #: Held while ``_waiting`` changes: what is asked in a wait is not asked outside it.
        self._lock, self._waiting, self._over = threading.Lock(), False, threading.Event()
        self._watch = threading.Thread(target=self._look, name=f"nereus {name}", daemon=True)
        fault: Fault | None = None
        try:
            wait = Wait(process, deadline_s, stop)
            self._store.set(f"here/{process}", "1")
            for other in range(num_processes):
                wait.told(self._store, f"here/{other}", other)
            self._group = Communicator(
                dist.PrefixStore("group", self._store),
                process,
                num_processes,
                timeout_s=deadline_s,
                backend=backend,
                address=address,
            )
            self._watch.start()
            self.gather("", deadline_s)  # NCCL connects a group in its first operation, which has to be everybody's
        except Fault as error:
            fault = error.with_traceback(None)
        except RuntimeError as error:  # raised below: a traceback through gloo's frames would keep its connections open
            text = f"the processes did not find each other: {first_line(error)}"
            fault = Fault(PARTICIPANT_FAILED, text, where=self.where)
        if fault is not None:
            self.drop()
            raise fault

    @property
    def where(self) -> str:
        return f"process {self.process}"

    def _name(self, name: str) -> None:
        self._store, self._words = (dist.PrefixStore(name, each) for each in (self._whole_store, self._whole_words))

    def again(self, name: str, process_of: Mapping[Device, int]) -> bool:
        """Ready for another transition among the same processes; False where the last one broke it."""
        if self._ended is not None or not self._whole:
            return False
        self._name(name)
        self._process_of = process_of
        return True

    def direct(self, src: Device, dst: Device) -> bool:
        return False

    def least_row_bytes(self, src: Device, dst: Device) -> int | None:
        return None

    # -- one wave -----------------------------------------------------------------------------------------------------

    def exchange(
        self, sends: Sequence[Outgoing], receives: Sequence[Parcel], arrived: Arrived, deadline_s: float
    ) -> None:
        here = self.process
        out: dict[int, list[Outgoing]] = {}
        into: dict[int, deque[Parcel]] = {}
        for outgoing in sorted(sends, key=lambda each: each.tag):
            out.setdefault(self._process_of[outgoing.dst], []).append(outgoing)
        for parcel in sorted(receives, key=lambda each: (each.tag, each.part)):
            into.setdefault(self._process_of[parcel.src], deque()).append(parcel)
        hand_over(out.pop(here, []), into.pop(here, deque()), arrived)
        made = {peer: chain.from_iterable(each.pieces for each in lot) for peer, lot in out.items()}
        end = time.monotonic() + deadline_s
        before: _Round | None = None
        left = {*made, *into}
        for peer in takewhile(lambda _: left, cycle(opponents(here, self.num_processes))):
            if peer not in left:
                continue
            if before is not None and before.peer == peer:  # its memory may be needed now
                self._finish(before, arrived, end, deadline_s)
                before = None
            sent = next(made[peer], None) if peer in made else None
            expected = into[peer].popleft() if into.get(peer) else None
            if sent is None and expected is None:
                left.discard(peer)
                continue
            now = _Round(peer, sent, expected)
            self._post(now)
            if before is not None:
                self._finish(before, arrived, end, deadline_s)
            before = now
        if before is not None:
            self._finish(before, arrived, end, deadline_s)

    def _post(self, now: _Round) -> None:
        group = self._alive()
        out, into = [], []
        if (sent := now.sent) is not None:
            header = torch.tensor([sent.tag, sent.part, len(sent.data), _signed(sent.checksum)], dtype=torch.int64)
            out = [header.to(group.memory), sent.data.to(group.memory)]
        if (expected := now.expected) is not None:
            now.header = torch.zeros(4, dtype=torch.int64, device=group.memory)
            now.landing = expected.data
            if expected.data.device != group.memory:
                now.landing = torch.empty_like(expected.data, device=group.memory)
            into = [now.header, now.landing]
        now.tensors = out + into
        fault: Fault | None = None
        try:
            now.works = group.swap(now.peer, out, into)
        except RuntimeError as error:
            fault = self._fault(error, now.doing, 0.0)
        if fault is not None:
            raise fault

    def _finish(self, done: _Round, arrived: Arrived, end: float, deadline_s: float) -> None:
        while done.works:
            self._wait(done.works.pop(), end, done.doing, deadline_s)
        expected, header, landing = done.expected, done.header, done.landing
        if expected is None or header is None or landing is None:
            return
        tag, part, size, checksum = header.tolist()
        if (tag, part, size) != (expected.tag, expected.part, len(expected.data)):
            text = (
                f"process {done.peer} sends piece {part} of message {tag}, {size} bytes; expected is piece "
                f"{expected.part} of {expected.tag}, {len(expected.data)} bytes"
            )
            raise Fault(PROGRAM_FAULT, text, where=self.where)
        if landing is not expected.data:
            expected.data.copy_(landing)
        arrived(expected, checksum % (1 << 64))

    # -- waits --------------------------------------------------------------------------------------------------------

    def _alive(self) -> Communicator:
        if self._ended is not None:
            raise Fault(self._ended.code, self._ended.text, where=self._ended.where)
        assert self._group is not None  # it goes only with an end
        return self._group

    def _wait(self, work: Any, end: float, doing: str, deadline_s: float) -> None:
        fault: Fault | None = None
        with self._watched():
            try:
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
            except RuntimeError as error:
                # Raised below: a traceback through gloo's frames would keep its connections open.
                fault = self._fault(error, doing, deadline_s)
        del work
        self._alive()  # NCCL's wait just returns where it was aborted
        if fault is not None:
            raise fault

    def _fault(self, error: RuntimeError, doing: str, deadline_s: float) -> Fault:
        """A failure of torch's in our words; a peer that said why it stopped is quoted by ``fail``."""
        text = str(error)
        if "imed out" in text or "imeout" in text:
            return Fault(DEADLINE, f"no answer within {deadline_s:g} s while {doing}", where=self.where)
        detail = CLOSED_TEXT if "losed" in text or "reset" in text else first_line(error)
        return Fault(PARTICIPANT_FAILED, f"{detail} while {doing}", where=self.where)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with self._lock:
            self._waiting = True
        try:
            yield
        finally:
            with self._lock:
                self._waiting = False

    def _look(self) -> None:
        """In a thread of its own: whether what this process waits for is to end."""
        while not self._over.wait(_SLICE_S):
            with self._lock:
                if not self._waiting:
                    continue
                with suppress(RuntimeError):  # the store has gone: the deadline is left
                    if (fault := self._stop() or agreement.failure(self._words)) is not None:
                        self._end(fault)

    # -- agreements ---------------------------------------------------------------------------------------------------

    def gather(self, text: str, deadline_s: float) -> tuple[str, ...]:
        group = self._alive()
        raw = text.encode()[:_TEXT_BYTES]
        mine = torch.frombuffer(bytearray(raw.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8).to(group.memory)
        rows = [torch.zeros_like(mine) for _ in range(self.num_processes)]
        doing, fault, works = "agreeing with all processes", None, []
        try:
            works.append(group.raw.allgather([rows], [mine]))
        except RuntimeError as error:
            fault = self._fault(error, doing, deadline_s)
        if fault is not None:
            raise fault
        self._wait(works.pop(), time.monotonic() + deadline_s, doing, deadline_s)
        return tuple(bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows)

    def decide(self, deadline_s: float) -> None:
        self._whole = False
        self._whole = agreement.decide(self._store, lambda: self.gather("", deadline_s), self.where)

    def fail(self, error: Exception) -> Exception:
        first = agreement.first_failure(self._store, Fault.of(error, self.where))
        self.drop()
        return first

    def abort(self, reason: str) -> None:
        self._end(Fault(PARTICIPANT_FAILED, reason, where=self.where))

    def _end(self, fault: Fault) -> None:
        self._ended = self._ended or fault
        if (group := self._group) is not None:
            group.abort()

    def close(self, deadline_s: float) -> None:
        """The group goes once all are done with it: its end may cut off what a slower peer has yet to read."""
        if self._keep:
            return
        end = time.monotonic() + deadline_s
        count = self._store.add(_CLOSED, 1)
        while count < self.num_processes and time.monotonic() < end and agreement.failure(self._store) is None:
            time.sleep(_POLL_S)
            count = self._store.add(_CLOSED, 0)
        self.drop()

    def drop(self) -> None:
        """End the group."""
        self._end(Fault(PARTICIPANT_FAILED, "the transport is closed", where=self.where))
        self._over.set()
        if self._watch.is_alive():
            self._watch.join()
        if self._group is not None:
            self._group.drop()
            self._group = None
        self.staging.clear()


def opponents(player: int, num_players: int) -> Iterator[int]:
    """Whom a player meets in the rounds of a tournament, in which each pair meets once and all play at a time; with an
    odd number of them one pauses in each round."""
    even = num_players + num_players % 2
    last = even - 1
    for number in range(last):
        if player == last:
            other = number * (even // 2) % last  # of whom the double is the number of the round
        else:
            other = (number - player) % last
            other = last if other == player else other
        if other < num_players:
            yield other


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return value - (1 << 64) if value >> 63 else value
