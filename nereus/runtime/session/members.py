"""Who takes part: processes by number, the change that they are told to make, and what a builder is told."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan, Stage
from nereus.runtime.adapters.base import Adapter
from nereus.runtime.faults import PROCESS_ENDED, WRONG_STATE, Fault
from nereus.runtime.groups import Place
from nereus.runtime.session.record import Record, digest_of

#: Entry of the record, written once: the processes (host, pid) of the plan with which the job ended in good order; or,
#: where an owner of processes wrote it, the exit code of the last one that was left.
ENDED = "ended"


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """Where a process of the job is: a device, and which of its processes, where it has several (a trainer's and an
    engine's, each with caches of its own). Those of one device have different ``part``s."""

    device: Device
    part: str = ""

    def __str__(self) -> str:
        return f"{self.device} ({self.part})" if self.part else str(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process of the job. ``number`` is never used again."""

    number: int
    seat: Seat
    host: str
    pid: int

    @property
    def device(self) -> Device:
        return self.seat.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """From the plan of epoch ``base`` to ``plan``, which epoch ``epoch`` serves if it commits.

    ``members``: who takes part, those of the old plan that live and those of the new one, by number. ``version``: of
    the state that counts (boundaries passed); what a process holds of another one is not asked for. ``loop``: the
    training loop's state there, where a controller keeps it; None: what the members say, which must be the same.
    """

    epoch: int
    base: int
    plan: Plan  # placed
    members: tuple[Member, ...]
    version: int
    why: str = ""
    loop: Mapping[str, Any] | None = None
    rehearsal: bool = False  # up to where bytes would move, and then back

    def numbers(self) -> tuple[int, ...]:
        return tuple(m.number for m in self.members)

    def process_of(self, part: str) -> dict[Device, int]:
        """The process of that part on each device of the new plan."""
        return {m.device: m.number for m in self.members if m.seat.part == part}


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What the leader says at a boundary. ``epoch``: the change to make there, 0 for none; ``refused``: why the plan
    that was asked for cannot be begun; ``stop``: why the job cannot go on (both encoded faults). ``loop``: what the
    training loop's state becomes, where the controller changed it."""

    epoch: int = 0
    refused: str = ""
    stop: str = ""
    loop: Mapping[str, Any] | None = None


class Arrivals:
    """What the processes of a plan say to a controller at the boundary ``key``: that they are there, and their loop's
    state, which one of them tells. However many they are, the controller reads four entries."""

    def __init__(self, record: Record, key: str) -> None:
        self._record, self._key = record, key

    def come(self, loop: Mapping[str, Any], *, speaks: bool) -> None:
        digest = digest_of(loop)
        if speaks:
            self._record.put(f"{self._key}/loop", dict(loop))
        if self._record.first(f"{self._key}/digest", digest) != digest:
            self._record.put(f"{self._key}/odd", self._record.me)
        self._record.count(f"{self._key}/arrived")

    def count(self) -> int:
        return self._record.counted(f"{self._key}/arrived")

    def forget(self) -> None:
        """Once all are there at the next one."""
        self._record.forget(*(f"{self._key}/{word}" for word in ("loop", "digest", "odd", "arrived")))

    def loop(self) -> dict[str, Any]:
        """Once all are there. Raises Fault where their loops differ."""
        if (number := self._record.get(f"{self._key}/odd")) is not None:
            text = f"the loop's state differs between process {number} and the first that came ({self._key})"
            raise Fault(WRONG_STATE, text, where="job")
        found: dict[str, Any] = self._record.get(f"{self._key}/loop")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a builder is told: this process's part of one stage of a placed plan.

    ``job_state``: that of the stage's state before the change (``Adapter.job_state``), None at the start; a new
    optimizer takes its slots from it. ``loop``: the training loop's own state at the boundary. ``epoch``: the change's
    number, which no other has: for names of a framework's own communicators.
    """

    plan: Plan
    stage: Stage
    place: Place
    job_state: Mapping[str, object] | None
    loop: Mapping[str, Any]
    epoch: int


#: Builds (all processes of the stage at once) the framework's objects for a layout, and gives their adapter.
Builder = Callable[[View], Adapter]
#: (the stage's adapter, its view) -> figures that must be the same before and after, e.g. log-probabilities of a fixed
#: batch. Collective in the stage.
Probe = Callable[[Any, View], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundStage:
    """``tolerance``: largest relative difference of the probe's figures, for another order of sums. The rest: see
    ``Job.bind``."""

    build: Builder
    probe: Probe | None = None
    tolerance: float = 1e-3
    cache: bool = False
    part: str = ""


def device_of(name: str | Device) -> Device:
    """``n0.gpu3``. Raises ValueError."""
    if isinstance(name, Device):
        return name
    node, _, index = name.rpartition(".gpu")
    if not node or not index.isdigit():
        raise ValueError(f"{name!r} is no device: write NODE.gpuNUMBER, as a plan does")
    return Device(node, int(index))


def joined(record: Record, known: dict[int, Member]) -> dict[int, Member]:
    """All members that ever announced themselves, by number. ``known`` is brought up to date."""
    number = 1
    while number in known or (found := record.get(f"member/{number}")) is not None:
        if number not in known:
            known[number] = found
        number += 1
    return known


class Losses:
    """Processes of which the provider (or a vote of the survivors) said that they are gone."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.seen = 0
        self.pids: set[tuple[str, int]] = set()
        self.numbers: set[int] = set()

    def look(self) -> None:
        while (said := self._record.decided(f"lost/{self.seen + 1}")) is not None:
            self.seen += 1
            if isinstance(said, int):
                self.numbers.add(said)
            else:
                self.pids.add(said)

    def has(self, member: Member) -> bool:
        return member.number in self.numbers or (member.host, member.pid) in self.pids

    def among(self, members: Sequence[Member]) -> Fault | None:
        """A fault that names the first of ``members`` that is gone."""
        self.look()
        for member in members:
            if self.has(member):
                return Fault(PROCESS_ENDED, f"process {member.number} on {member.seat} has ended", where="job")
        return None


def tell_failure(record: Record, fault: Fault) -> None:
    """Why this process is about to end, for whoever sees only that it does."""
    record.first(f"failed/{socket.gethostname()}/{os.getpid()}", fault.encode())


@contextmanager
def telling(record: Record) -> Iterator[None]:
    """Around a process's work: what it fails with is told."""
    try:
        yield
    except Exception as error:
        with suppress(Fault):  # the store is gone
            tell_failure(record, Fault.of(error, f"{socket.gethostname()} {os.getpid()}"))
        raise


def failure_of(record: Record, member: Member) -> Fault | None:
    said = record.decided(f"failed/{member.host}/{member.pid}")
    return Fault.decode(said) if said is not None else None


def report_loss(record: Record, who: int | tuple[str, int]) -> None:
    """``who``: a member's number, or host and pid."""
    number = 1
    while record.first(f"lost/{number}", who) != who:
        number += 1
