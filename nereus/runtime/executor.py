"""Execute the programs of this process's devices: the wave semantics of ``nereus.ir.program`` on real tensors.

Before the first byte all processes agree on the digest and every program is checked against the state at hand. In
reversible mode nothing old is written or released before all have verified all; any failure drops the new storages and
leaves the old state as it was. In tight mode each wave ends with an agreement, and only then releases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from nereus.ir.cluster import Device
from nereus.ir.program import LocalCopy, Message, Program, StorageSpec, Wave
from nereus.kernels.flow import Flow
from nereus.kernels.move import copy, gather, land, stored
from nereus.kernels.pack import in_place_bytes
from nereus.runtime.account import (
    Account,
    ExecutionReport,
    Progress,
    Released,
    Stopwatch,
    resident_bytes,
)
from nereus.runtime.cut import Cut, Piece, cut
from nereus.runtime.faults import DAMAGED_MESSAGE, DIFFERENT_DIGEST, WRONG_STATE, Fault, first_line
from nereus.runtime.state import Allocate, DeviceState, allocate, key_of, same_place
from nereus.runtime.transports.base import NO_DATA, TURNS, Outgoing, Parcel, Transport

TIGHT = "tight"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """``deadline_s``: longest wait for anything that others do. ``on_wave`` is called before each wave's work."""

    deadline_s: float = 60.0
    allocate: Allocate = allocate
    progress: Callable[[Progress], None] | None = None
    on_wave: Callable[[int], None] | None = None
    #: Addresses of storages, by number, of an earlier run of the same programs on the same memory; filled in.
    bases: dict[Device, npt.NDArray[np.int64]] = field(default_factory=dict)


class ExecutionFailed(Exception):
    """``old_whole``: the old plan's tensors are all still there and untouched."""

    def __init__(self, fault: Fault, *, old_whole: bool) -> None:
        super().__init__(str(fault))
        self.fault = fault
        self.old_whole = old_whole


@dataclass(slots=True)
class _Participant:
    """One device at work. ``bases``: by storage number, the address of those in CPU memory that flows may use."""

    program: Program
    state: DeviceState
    bases: npt.NDArray[np.int64]
    cut: Cut = field(init=False)  # once it is known that the program is sound
    data: dict[int, torch.Tensor] = field(default_factory=dict)
    account: Account = field(default_factory=Account)

    @property
    def device(self) -> Device:
        return self.program.device

    def spec(self, number: int) -> StorageSpec:
        return self.program.storages[number]

    def flow(self, piece: Piece, least_row_bytes: int | None) -> Flow | None:
        """The piece on its way from or to where it lies, if it can go so."""
        course = piece.course
        if course is None or least_row_bytes is None or course.row_bytes < min(least_row_bytes, course.num_bytes):
            return None
        for number in course.storages.tolist():
            if not self.bases[number]:
                data = self.data[number]
                if data.device.type != "cpu" or not data.is_contiguous() or data.nbytes != self.cut.sizes[number]:
                    return None
                self.bases[number] = data.data_ptr()
        return course.at(self.bases)


@dataclass(slots=True)
class _InFlight:
    """A message under way. Of each piece: a flow, or bytes in ``buffers``; ``staged``: whether those are staging, not
    the storage itself. Staged pieces share memory in turns: a core still has it in its cache."""

    owner: _Participant
    message: Message
    pieces: tuple[Piece, ...]
    flows: list[Flow | None] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    staged: list[bool] = field(default_factory=list)
    staged_bytes: int = 0
    room: torch.Tensor | None = None

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
        self.participants = [
            _Participant(
                programs[device], states[device], options.bases.setdefault(device, _no_bases(programs[device]))
            )
            for device in sorted(programs)
        ]
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
            promised=tuple((p.device, p.cut.promised) for p in self.participants),
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
                p.cut = cut(p.program)
                self._adopt(p)
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
            p.account.add(p.cut.sizes[spec.id], host=spec.host)

    # -- waves --------------------------------------------------------------------------------------------------------

    def _wave(self, number: int) -> None:
        if self.options.on_wave is not None:
            self.options.on_wave(number)
        steps = [(p, p.program.waves[number]) for p in self.participants if number < len(p.program.waves)]
        self._timed("acquire", lambda: self._acquire(steps))
        self._timed("copy", lambda: self._copies((p, c) for p, w in steps for c in w.copies))
        incoming = [(p, m) for p, w in steps for m in w.receives]
        receives = self._timed("pack", lambda: self._flights(incoming))
        outgoing = [(p, m) for p, w in steps for m in w.sends]
        sends = self._timed("pack", lambda: self._flights(outgoing, sends=True))
        self._exchange(receives, sends)
        for flight in (*sends, *receives):
            flight.owner.account.stage(-flight.staged_bytes)
            flight.buffers.clear()
            if flight.room is not None:
                self.transport.staging.give(flight.room)
                flight.room = None
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
                p.account.add(p.cut.sizes[number], host=spec.host)

    def _copies(self, copies: Iterable[tuple[_Participant, LocalCopy]]) -> None:
        for p, blocks in copies:
            self._blame(p)
            copy(p.data, blocks.src.table, blocks.dst.table, cast=blocks.cast)
            self.copied += _bytes_of(blocks.dst.table, p.cut.widths)

    def _flights(self, messages: Iterable[tuple[_Participant, Message]], *, sends: bool = False) -> list[_InFlight]:
        """The messages cut, and staging for all pieces that the transport cannot take from or put to their place: for
        as many pieces of each message as are under way at one time."""
        flights = []
        for p, message in messages:
            self._blame(p)
            flight = _InFlight(p, message, p.cut.of(message))
            ends = (p.device, message.peer) if sends else (message.peer, p.device)
            least, direct = self.transport.least_row_bytes(*ends), self.transport.direct(*ends)
            flight.flows = [p.flow(piece, least) for piece in flight.pieces]
            flight.staged = [
                flow is None and not piece.what.in_place
                for flow, piece in zip(flight.flows, flight.pieces, strict=True)
            ]
            sizes = [piece.num_bytes for piece, staged in zip(flight.pieces, flight.staged, strict=True) if staged]
            size, few = _aligned(max(sizes, default=0)), min(TURNS if sends and direct else 1, len(sizes))
            room = flight.room = self.transport.staging.take(size * few)
            flight.staged_bytes = min(sum(sizes), size * few)
            p.account.stage(flight.staged_bytes)
            turn = 0
            for piece, flow, staged in zip(flight.pieces, flight.flows, flight.staged, strict=True):
                place = NO_DATA
                if staged:
                    place = room.narrow(0, turn % few * size, piece.num_bytes)
                    turn += 1
                elif flow is None:
                    place = in_place_bytes(p.data, piece.what)
                flight.buffers.append(place)
            flights.append(flight)
        return flights

    def _exchange(self, receives: list[_InFlight], sends: list[_InFlight]) -> None:
        """Each piece is packed when it can go, and what arrives is put to its place, and read back from there for the
        checksum, while others are under way. A flow is summed on its way."""
        flights = {flight.message.tag: flight for flight in receives}
        parcels = [
            Parcel(flight.message.tag, flight.message.peer, flight.owner.device, data, part=part, flow=flow)
            for flight in receives
            for part, (data, flow) in enumerate(zip(flight.buffers, flight.flows, strict=True))
        ]
        outgoing = [Outgoing(f.message.tag, f.owner.device, f.message.peer, self._packed(f)) for f in sends]

        def arrived(parcel: Parcel, checksum: int) -> None:
            flight = flights[parcel.tag]
            p, what = flight.owner, flight.pieces[parcel.part].what
            self._blame(p)
            if parcel.flow is not None:
                found = parcel.flow.total()
            elif flight.staged[parcel.part]:
                found = self._timed("unpack", lambda: land(p.data, what, p.cut.keys, parcel.data))
            else:
                found = self._timed("verify", lambda: stored(p.data, what, p.cut.keys))
            if found != checksum:
                raise self._damaged(flight)
            self._blame(None)

        self._blame(None)
        before, begin = self.clock.total_s, time.monotonic()
        try:
            self.transport.exchange(outgoing, parcels, arrived, self.options.deadline_s)
        finally:
            self.clock.add("transfer", time.monotonic() - begin - (self.clock.total_s - before))
        for flight in receives:
            self.received[flight.message.tag] = flight.num_bytes
            if self.transport.direct(flight.message.peer, flight.owner.device):
                self.direct += flight.num_bytes

    def _packed(self, flight: _InFlight) -> Iterator[Parcel]:
        p, message = flight.owner, flight.message
        direct = self.transport.direct(p.device, message.peer)
        for part, (piece, flow, data, staged) in enumerate(
            zip(flight.pieces, flight.flows, flight.buffers, flight.staged, strict=True)
        ):
            self._blame(p)
            begin, total = time.monotonic(), 0
            if staged:
                total = gather(p.data, piece.what, p.cut.keys, data)
            elif flow is None:
                total = stored(p.data, piece.what, p.cut.keys)
            elif direct:
                total = flow.summed()
            self.clock.add("pack", time.monotonic() - begin)
            self._blame(None)
            yield Parcel(message.tag, p.device, message.peer, data, total, part, staged, flow)

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
            p.account.add(-p.cut.sizes[number], host=spec.host)
            del p.data[number]
            held = p.state.held.get(key_of(spec))
            if held is not None and held.spec.numel == spec.numel and same_place(held.spec, spec):
                del p.state.held[key_of(spec)]

    def _commit(self) -> int:
        """Bytes let go."""
        accounted = 0
        for p in self.participants:
            accounted += sum(p.cut.sizes[number] for number in p.program.commit_release)
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


def _no_bases(program: Program) -> npt.NDArray[np.int64]:
    return np.zeros(len(program.storages), dtype=np.int64)


def _aligned(num_bytes: int) -> int:
    """Room for that many bytes, so that the next piece's elements are aligned."""
    return -(-num_bytes // 8) * 8


def _bytes_of(table: npt.NDArray[np.int64], widths: npt.NDArray[np.int64]) -> int:
    if not len(table):
        return 0
    return int((table[:, 2] * table[:, 3] * widths[table[:, 0]]).sum())
