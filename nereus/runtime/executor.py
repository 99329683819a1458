"""Execute the programs of this process's devices: the wave semantics of ``nereus.ir.program`` on real tensors.

Before the first byte all processes agree on the digest and every program is checked against the state at hand. In
reversible mode nothing old is written or released before all have verified all; any failure drops the new storages and
leaves the old state as it was. In tight mode each wave ends with an agreement, and only then releases.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from nereus.ir.cluster import Device
from nereus.ir.program import LocalCopy, Message, Program, StorageSpec, Wave
from nereus.ir.units import DTYPE_BYTES
from nereus.kernels.checksum import tensor_key
from nereus.kernels.move import copy, gather, land, pieces, stored
from nereus.kernels.pack import Packing, in_place_bytes, rows_in_place
from nereus.runtime.account import (
    Account,
    ExecutionReport,
    Progress,
    Released,
    Stopwatch,
    promised_peak,
    resident_bytes,
)
from nereus.runtime.faults import DAMAGED_MESSAGE, DIFFERENT_DIGEST, WRONG_STATE, Fault, first_line
from nereus.runtime.state import Allocate, DeviceState, allocate, fresh_bytes, key_of, same_place
from nereus.runtime.transports.attach import LEAST_ROW_BYTES
from nereus.runtime.transports.base import CHECKSUM_MASK, Parcel, Transport
from nereus.runtime.validate import validate

TIGHT = "tight"

#: Pieces of a message under way at one time from staging that is used again: one is packed while another is sent.
_STREAM = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """``deadline_s``: longest wait for anything that others do. ``on_wave`` is called before each wave's work."""

    deadline_s: float = 60.0
    allocate: Allocate = allocate
    progress: Callable[[Progress], None] | None = None
    on_wave: Callable[[int], None] | None = None


class ExecutionFailed(Exception):
    """``old_whole``: the old plan's tensors are all still there and untouched."""

    def __init__(self, fault: Fault, *, old_whole: bool) -> None:
        super().__init__(str(fault))
        self.fault = fault
        self.old_whole = old_whole


@dataclass(slots=True)
class _Participant:
    """One device at work. Arrays are by storage number."""

    program: Program
    state: DeviceState
    widths: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]
    data: dict[int, torch.Tensor] = field(default_factory=dict)
    account: Account = field(default_factory=Account)

    @property
    def device(self) -> Device:
        return self.program.device

    def spec(self, number: int) -> StorageSpec:
        return self.program.storages[number]


@dataclass(slots=True)
class _InFlight:
    """A message under way. ``buffers``: one for each piece; ``staged``: whether it is staging, not the storage itself.
    ``total``: checksum of what has arrived so far. ``in_turn``: pieces use the same staging one after another, a
    sender's once the one before is settled, of those ``under_way``."""

    owner: _Participant
    message: Message
    pieces: tuple[Packing, ...]
    buffers: list[torch.Tensor] = field(default_factory=list)
    staged: list[bool] = field(default_factory=list)
    staged_bytes: int = 0
    in_turn: bool = False
    under_way: deque[Parcel] = field(default_factory=deque)
    total: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def execute(
    programs: Mapping[Device, Program],
    states: Mapping[Device, DeviceState],
    transport: Transport,
    options: ExecutorOptions | None = None,
) -> ExecutionReport:
    """Bring ``states`` (of this process's devices) from the old plan to the new one.

    Raises ExecutionFailed. Devices without a state yet get an empty one by the caller.
    """
    return _Executor(programs, states, transport, options or ExecutorOptions()).run()


class _Executor:
    def __init__(
        self,
        programs: Mapping[Device, Program],
        states: Mapping[Device, DeviceState],
        transport: Transport,
        options: ExecutorOptions,
    ) -> None:
        self.transport = transport
        self.options = options
        self.participants = [_participant(programs[device], states[device]) for device in sorted(programs)]
        self.clock = Stopwatch()
        self.sent = self.copied = self.num_messages = self.direct = 0
        self.received: dict[int, int] = {}
        self.released = False
        self.now = f"process {transport.process}"  # what a failure is blamed on

    def run(self) -> ExecutionReport:
        begin = time.monotonic()
        failure: ExecutionFailed | None = None
        try:
            self._prepare()
            num_waves = max((len(p.program.waves) for p in self.participants), default=0)
            for wave in range(num_waves):
                self._wave(wave)
                if self.options.progress is not None:
                    self.options.progress(Progress(wave=wave + 1, num_waves=num_waves, received_bytes=self._arrived()))
            self._timed("commit", lambda: self.transport.decide(self.options.deadline_s))
        except Exception as error:
            failure = self._abort(error)
        if failure is not None:  # outside the handler: the first error's frames hold tensors that are to go
            raise failure
        before = resident_bytes()
        accounted = self._commit()
        after = resident_bytes()
        read = None if before is None or after is None else before - after
        try:
            self.transport.close(self.options.deadline_s)
        except Exception as error:  # the decision stands; only the farewell failed
            self.clock.add(f"close failed: {first_line(error)}", 0.0)
        return ExecutionReport(
            seconds=time.monotonic() - begin,
            sent_bytes=self.sent,
            received=tuple(sorted(self.received.items())),
            copied_bytes=self.copied,
            peaks=tuple(
                (p.device, p.account.peak_bytes, p.account.peak_host_bytes, p.account.peak_staging_bytes)
                for p in self.participants
            ),
            num_messages=self.num_messages,
            promised=tuple((p.device, promised_peak(p.program)) for p in self.participants),
            released=Released(accounted=accounted, read=read),
            phases_s=tuple(self.clock.phases.items()),
            direct_bytes=self.direct,
            notes=self.transport.notes,
        )

    # -- before byte one ----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        problem = ""
        try:
            for p in self.participants:
                self._adopt(p)
                validate(p.program)
        except Fault as fault:
            problem = fault.encode()
        digests = sorted({p.program.digest for p in self.participants})
        said = self.transport.gather(problem or "digest\t" + ",".join(digests), self.options.deadline_s)
        for number, text in enumerate(said):
            if not text.startswith("digest\t"):
                raise Fault.decode(text)
            theirs = [d for d in text.removeprefix("digest\t").split(",") if d]
            if len({*theirs, *digests}) > 1:
                text = f"process {number} has the transition {' and '.join(theirs)}, not {' and '.join(digests)}"
                raise Fault(DIFFERENT_DIGEST, text, where=self.now)

    def _adopt(self, p: _Participant) -> None:
        """Old and kept storages are those of the state; anything else in the state is none of ours."""
        for spec in p.program.storages:
            if spec.role not in ("old", "kept"):
                continue
            held = p.state.held.get(key_of(spec))
            if held is None:
                raise Fault(WRONG_STATE, f"{key_of(spec)} is not there", where=str(p.device))
            if not same_place(spec, held.spec) or held.data.numel() != spec.numel:
                text = f"{key_of(spec)} has another extent than the old plan says"
                raise Fault(WRONG_STATE, text, where=str(p.device))
            p.data[spec.id] = held.data
            p.account.add(_num_bytes(held.data), host=spec.host)

    # -- waves --------------------------------------------------------------------------------------------------------

    def _wave(self, number: int) -> None:
        if self.options.on_wave is not None:
            self.options.on_wave(number)
        steps = [(p, p.program.waves[number]) for p in self.participants if number < len(p.program.waves)]
        self._timed("acquire", lambda: self._acquire(steps))
        self._timed("copy", lambda: self._copies((p, c) for p, w in steps for c in w.copies))
        receives = self._timed(
            "pack", lambda: self._flights(((p, m) for p, w in steps for m in w.receives), sends=False)
        )
        sends = self._timed("pack", lambda: self._flights(((p, m) for p, w in steps for m in w.sends), sends=True))
        self._receive(number, receives)
        self._send(number, sends)
        self._verify(receives, self._wait(receives))
        for flight in (*sends, *receives):
            flight.owner.account.stage(-flight.staged_bytes)
            flight.buffers.clear()
            flight.under_way.clear()
        self.num_messages += len(sends)
        self.sent += sum(flight.num_bytes for flight in sends)
        self._timed("copy", lambda: self._copies((p, c) for p, w in steps for c in w.derives))
        self._blame(None)
        if any(p.program.mode == TIGHT for p in self.participants):
            self._timed("commit", lambda: self.transport.gather("", self.options.deadline_s))
            for p, wave in steps:
                self._release(p, wave.release)

    def _acquire(self, steps: list[tuple[_Participant, Wave]]) -> None:
        for p, wave in steps:
            self._blame(p)
            for number in wave.acquire:
                spec = p.spec(number)
                data = self.options.allocate(spec)
                p.data[number] = data
                p.account.add(_num_bytes(data), host=spec.host)

    def _copies(self, copies: Iterable[tuple[_Participant, LocalCopy]]) -> None:
        for p, blocks in copies:
            self._blame(p)
            copy(p.data, blocks.src.table, blocks.dst.table, cast=blocks.cast)
            self.copied += _bytes_of(blocks.dst.table, p.widths)

    def _flights(self, messages: Iterable[tuple[_Participant, Message]], *, sends: bool) -> list[_InFlight]:
        """The messages cut, and staging for all pieces that the transport cannot take from or put to their place."""
        flights = []
        for p, message in messages:
            self._blame(p)
            flight = _InFlight(p, message, pieces(message.blocks.table, p.widths))
            direct = self.transport.direct(p.device, message.peer)
            streams = sends and self.transport.streams(p.device, message.peer)
            places = [_place(p.data, what, direct=direct) for what in flight.pieces]
            flight.staged = [place is None for place in places]
            sizes = [
                _aligned(w.num_bytes) if place is None else 0 for w, place in zip(flight.pieces, places, strict=True)
            ]
            # Pieces that take turns share memory, which then stays in a core's cache: a stream's go in few buffers, and
            # what is read from a sender's memory is read, and put to its place, one after another.
            few = _STREAM if streams else 1 if direct and not sends else len(sizes)
            size, turns = max(sizes, default=0), sum(map(bool, sizes))
            room = fresh_bytes(min(sum(sizes), min(few, turns) * size))
            flight.in_turn = sum(sizes) > len(room)
            payload = sum(w.num_bytes for w, place in zip(flight.pieces, places, strict=True) if place is None)
            flight.staged_bytes = min(payload, len(room))
            p.account.stage(flight.staged_bytes)
            turn = position = 0
            for what, place in zip(flight.pieces, places, strict=True):
                if place is None:
                    place = room.narrow(0, turn % few * size if flight.in_turn else position, what.num_bytes)
                    turn, position = turn + 1, position + _aligned(what.num_bytes)
                flight.buffers.append(place)
            flights.append(flight)
        return flights

    def _receive(self, wave: int, flights: list[_InFlight]) -> None:
        """All receives first: whatever a peer sends from now on has a place to go."""
        parcels = [
            Parcel(flight.message.tag, flight.message.peer, flight.owner.device, data, part=part)
            for flight in flights
            for part, data in enumerate(flight.buffers)
        ]
        self._blame(None)
        self._timed("transfer", lambda: self.transport.post(wave, [], parcels))

    def _send(self, wave: int, flights: list[_InFlight]) -> None:
        """Pieces of all messages in turn, so that every peer has something to receive; each goes when it is packed."""
        most = max((len(flight.pieces) for flight in flights), default=0)
        for part in range(most):
            for flight in flights:
                if part < len(flight.pieces):
                    if flight.staged[part] and flight.in_turn and len(flight.under_way) == _STREAM:
                        before = flight.under_way.popleft()
                        self._timed("transfer", lambda p=before: self.transport.settle(p, self.options.deadline_s))  # type: ignore[misc]
                    self._blame(flight.owner)
                    parcel = self._timed("pack", lambda f=flight, i=part: self._pack(f, i))  # type: ignore[misc]
                    self._blame(None)
                    self._timed("transfer", lambda p=parcel: self.transport.post(wave, [p], []))  # type: ignore[misc]

    def _pack(self, flight: _InFlight, part: int) -> Parcel:
        p, what, data = flight.owner, flight.pieces[part], flight.buffers[part]
        total = gather(p.data, what, p.keys, data) if flight.staged[part] else stored(p.data, what, p.keys)
        parcel = Parcel(flight.message.tag, p.device, flight.message.peer, data, total, part, flight.staged[part])
        if parcel.staged:
            flight.under_way.append(parcel)
        return parcel

    def _wait(self, receives: list[_InFlight]) -> Mapping[int, int]:
        """What arrives goes to its place, and is read back from there for the checksum, while the rest is under way."""
        flights = {flight.message.tag: flight for flight in receives}
        worked_s = 0.0

        def arrived(parcel: Parcel) -> None:
            nonlocal worked_s
            begin = time.monotonic()
            flight = flights[parcel.tag]
            p, what = flight.owner, flight.pieces[parcel.part]
            self._blame(p)
            if flight.staged[parcel.part]:
                flight.total += self._timed("unpack", lambda: land(p.data, what, p.keys, parcel.data))
            else:
                flight.total += self._timed("verify", lambda: stored(p.data, what, p.keys))
            self._blame(None)
            worked_s += time.monotonic() - begin

        begin = time.monotonic()
        self._blame(None)
        try:
            return self.transport.wait(self.options.deadline_s, arrived)
        finally:
            self.clock.add("transfer", time.monotonic() - begin - worked_s)

    def _verify(self, receives: list[_InFlight], checksums: Mapping[int, int]) -> None:
        """What lies in the storages now, read back through the same blocks, is what was sent."""
        for flight in receives:
            self._blame(flight.owner)
            tag = flight.message.tag
            if flight.pieces and flight.total & CHECKSUM_MASK != checksums[tag]:
                raise self._damaged(flight)
            self.received[tag] = flight.num_bytes
            if self.transport.direct(flight.message.peer, flight.owner.device):
                self.direct += flight.num_bytes

    def _damaged(self, flight: _InFlight) -> Fault:
        first = flight.owner.spec(int(flight.message.blocks.table[0, 0]))
        text = (
            f"message {flight.message.tag} from {flight.message.peer} arrived damaged: {flight.num_bytes:,} bytes, "
            f"from {first.stage} {first.tensor} {first.slot} on"
        )
        return Fault(DAMAGED_MESSAGE, text, where=str(flight.owner.device))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _release(self, p: _Participant, numbers: Iterable[int]) -> None:
        for number in numbers:
            spec = p.spec(number)
            self.released = True
            p.account.add(-_num_bytes(p.data.pop(number)), host=spec.host)
            held = p.state.held.get(key_of(spec))
            if held is not None and held.spec.numel == spec.numel and same_place(held.spec, spec):
                del p.state.held[key_of(spec)]

    def _commit(self) -> int:
        """Bytes let go."""
        accounted = 0
        for p in self.participants:
            accounted += sum(_num_bytes(p.data[number]) for number in p.program.commit_release)
            self._release(p, p.program.commit_release)
            for number, data in p.data.items():
                if p.spec(number).role in ("new", "kept"):
                    p.state.put(p.spec(number), data)
        return accounted

    def _abort(self, error: Exception) -> ExecutionFailed:
        """Drop what is new; what is old was never written."""
        fault = self.transport.fail(error if isinstance(error, Fault) else Fault.of(error, self.now))
        assert isinstance(fault, Fault)
        fault.with_traceback(None)
        for p in self.participants:
            p.data.clear()
        return ExecutionFailed(fault, old_whole=not self.released)

    # -- small things -------------------------------------------------------------------------------------------------

    def _blame(self, p: _Participant | None) -> None:
        self.now = f"process {self.transport.process}" if p is None else str(p.device)

    def _timed(self, phase: str, work: Callable[[], T]) -> T:
        begin = time.monotonic()
        try:
            return work()
        finally:
            self.clock.add(phase, time.monotonic() - begin)

    def _arrived(self) -> int:
        return sum(self.received.values())


def _participant(program: Program, state: DeviceState) -> _Participant:
    widths = np.array([DTYPE_BYTES[s.dtype] for s in program.storages], dtype=np.int64)
    keys = np.array([tensor_key(s.model, s.tensor, s.slot) for s in program.storages], dtype=np.uint64)
    return _Participant(program=program, state=state, widths=widths, keys=keys)


def _aligned(num_bytes: int) -> int:
    """Room for that many bytes, so that the next piece's elements are aligned."""
    return -(-num_bytes // 8) * 8


def _place(data: Mapping[int, torch.Tensor], what: Packing, *, direct: bool) -> torch.Tensor | None:
    """A piece's bytes where they lie, if they can travel from or to there: one run, or rows that are long enough for a
    transport that is ``direct``."""
    if what.in_place:
        return in_place_bytes(data, what)
    rows = rows_in_place(data, what) if direct else None
    return rows if rows is not None and rows.shape[1] >= LEAST_ROW_BYTES else None


def _num_bytes(data: torch.Tensor) -> int:
    return data.numel() * data.element_size()


def _bytes_of(table: npt.NDArray[np.int64], widths: npt.NDArray[np.int64]) -> int:
    if not len(table):
        return 0
    return int((table[:, 2] * table[:, 3] * widths[table[:, 0]]).sum())
