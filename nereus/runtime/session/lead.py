"""What whoever leads a job says: which change begins, and who takes part. A process of the job, or its controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.runtime.faults import CANNOT_START, PARTICIPANT_FAILED, Fault
from nereus.runtime.session.members import Command, Losses, Member, Seat, joined
from nereus.runtime.session.record import Record

#: Asks the owner of processes for one of a part on a device that the new plan uses and nobody serves.
Spawn = Callable[[Device, str], object]


class Lead:
    """``ended``: the newest epoch that is known to have ended. ``spawn``: None where no new process can be had.
    ``parts``: of stages whose processes are not those of the rest."""

    def __init__(self, record: Record, losses: Losses, *, deadline_s: float, spawn: Spawn | None) -> None:
        self.ended = 0
        self.parts: dict[str, str] = {}
        self._record, self._losses = record, losses
        self._deadline_s, self._spawn = deadline_s, spawn
        self._known: dict[int, Member] = {}
        self._asked = 0

    def begin(self, plan: Plan, loop: Mapping[str, Any] | None = None) -> None:
        """Epoch 1: from nothing to the plan, of the processes that are there first on its devices. Raises Fault where
        a device has none within the deadline."""
        needed = self.seats(plan)
        end = time.monotonic() + self._deadline_s
        while missing := needed - {m.seat for m in joined(self._record, self._known).values()}:
            if self._record.decided("epoch/1/command") is not None:
                return
            if time.monotonic() > end:
                text = f"no process for {', '.join(map(str, sorted(missing)))} within {self._deadline_s:g} s"
                raise Fault(CANNOT_START, text, where=self._record.where)
            time.sleep(0.01)
        members = _serving(needed, self._known.values())
        command = Command(epoch=1, base=0, plan=plan, members=members, version=0, why="start", loop=loop)
        self._record.first("epoch/1/command", command)

    def seats(self, plan: Plan) -> set[Seat]:
        """Where the plan's stages need processes."""
        return {Seat(device, self.parts.get(stage.name, "")) for stage in plan.owners() for device in stage.ranks}

    def serving(self, plan: Plan, members: Iterable[Member]) -> tuple[Member, ...]:
        """Those of ``members`` that the plan needs."""
        needed = self.seats(plan)
        return tuple(m for m in members if m.seat in needed)

    def requested(self) -> Plan | None:
        """The next plan that was asked for, if one was."""
        while (asked := self._record.get(f"request/{self._asked + 1}")) is not None:
            self._asked += 1
            # Another one may have led, and served it.
            if self._record.first(f"request/{self._asked}/taken", self._record.me) == self._record.me:
                assert isinstance(asked, Plan)
                return asked
        return None

    def tell(self, command: Command) -> int:
        """``command`` becomes the next epoch's; its number. One that was begun and not ended is ended: it cannot have
        been decided for, since one who is in it has not voted."""
        epoch = self.ended + 1
        # Without the loop: a NaN in it equals nothing.
        while replace(
            self._record.first(f"epoch/{epoch}/command", replace(command, epoch=epoch)), epoch=0, loop=None
        ) != replace(command, epoch=0, loop=None):
            fault = Fault(PARTICIPANT_FAILED, "another change took its place", where=self._record.where)
            self._record.first(f"epoch/{epoch}/decision", fault.encode())
            epoch += 1
        return epoch

    def command(
        self,
        plan: Plan,
        members: Sequence[Member],
        *,
        base: int,
        version: int,
        why: str,
        loop: Mapping[str, Any] | None = None,
    ) -> Command:
        """From the plan of epoch ``base``, which ``members`` serve, to ``plan``, with members for all its devices:
        those who serve, then spares; new processes are asked for. Raises Fault (CANNOT_START)."""
        needed = self.seats(plan)
        asked: set[Seat] = set()
        end = time.monotonic() + self._deadline_s
        while True:
            self._losses.look()
            spares = [m for m in joined(self._record, self._known).values() if not self._losses.has(m)]
            chosen = _serving(needed, [*members, *spares])
            if not (missing := needed - {m.seat for m in chosen}) or time.monotonic() > end:
                break
            if self._spawn is None and not asked:
                end = min(end, time.monotonic() + 1.0)  # none can come but those that are on their way
            for seat in sorted(missing - asked):
                asked.add(seat)
                if self._spawn is not None:
                    self._spawn(seat.device, seat.part)
            time.sleep(0.01)
        if missing:
            text = f"no process serves {', '.join(map(str, sorted(missing)))}"
            raise Fault(CANNOT_START, text, where=self._record.where)
        both = {m.number: m for m in (*members, *chosen)}
        return Command(
            epoch=0,
            base=base,
            plan=plan,
            members=tuple(both[number] for number in sorted(both)),
            version=version,
            why=why,
            loop=loop,
        )


def devices_of(plan: Plan) -> tuple[Device, ...]:
    """Those that the plan's stages use, each once."""
    return tuple(dict.fromkeys(device for stage in plan.owners() for device in stage.ranks))


def names(devices: Iterable[Device]) -> str:
    return ", ".join(map(str, devices))


def _serving(seats: set[Seat], members: Iterable[Member]) -> tuple[Member, ...]:
    """One member for each seat, the first in the given order."""
    found: dict[Seat, Member] = {}
    for member in members:
        if member.seat in seats:
            found.setdefault(member.seat, member)
    return tuple(sorted(found.values(), key=lambda m: m.number))
