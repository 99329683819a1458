"""The controller of a job, in a process that holds no part of any model: the one that launches the others.

    with RayActors("my_job:worker", cluster=plan.cluster, args=...) as provider:      # or LocalProcesses
        job = nereus.attach(plan, provider=provider, replan=replan)
        job.start({"step": 0})
        for boundary in job.boundaries():
            if wants_more(boundary.loop):
                job.request(other)          # is made at this boundary
        print(job.outcomes)

The workers run the training loop; their script is that of a job without a controller, which they attach to without a
plan. At every boundary they wait for the controller's word, so what the body of the loop asks for is made right there.
The controller keeps the loop's state: ``job.loop``, which the body may change, is what all workers go on with, and what
new ones and recovered ones begin with.

After a loss the survivors agree among themselves who is left (they do not need the controller to stop waiting for the
dead), and wait for the plan to go on with: ``replan``'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.passes.place import pin
from nereus.runtime.faults import CANNOT_START, DEADLINE, PROCESS_ENDED, WRONG_STATE, Fault
from nereus.runtime.providers.base import ProcessProvider
from nereus.runtime.session.change import COMMIT, REHEARSED, Outcome
from nereus.runtime.session.lead import Lead, devices_of, names
from nereus.runtime.session.members import Arrivals, Command, Losses, Member, Seat, Word, failure_of
from nereus.runtime.session.record import Record, digest_of
from nereus.runtime.session.recovery import Replan, Turn, no_replan

_POLL_S, _LONGEST_POLL_S = 0.0005, 0.01
#: A change has so many phases, each with the job's deadline.
_PHASES = 7
#: What members say of a change that is decided comes at once, or never.
_ACCOUNT_S = 2.0
_NODES_AT_ONCE = 64
_PLAN = "controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """All processes of the plan have passed ``version`` boundaries and wait. ``loop``: their loop's state; ``plan``:
    the placed plan that they serve; ``step_s``: seconds since they were let go from the boundary before."""

    version: int
    loop: Mapping[str, Any]
    plan: Plan
    step_s: float


class Controller:
    """See ``attach``. ``outcomes``: of every change so far: the longest phases of all processes, the sum of their
    bytes."""

    def __init__(
        self,
        plan: Plan,
        provider: ProcessProvider,
        *,
        replan: Replan | None,
        parts: Mapping[str, str],
        deadline_s: float,
    ) -> None:
        self.provider = provider
        self.record = Record(provider.store, provider.name, 0)
        self.plan = pin(plan)
        self.loop: dict[str, Any] = {}
        self.epoch = self.version = 0
        self.members: tuple[Member, ...] = ()
        self.outcomes: list[Outcome] = []
        self._replan, self._deadline_s = replan or no_replan, deadline_s
        self._pulse = self.record.watched(deadline_s)
        self._losses = Losses(self.record)
        self._lead = Lead(self.record, self._losses, deadline_s=deadline_s, spawn=provider.spawn)
        self._lead.parts.update(parts)
        self._requested: Plan | None = None
        self._rehearses = False
        self._turn = 0
        #: The loop's state at the last boundaries that were spoken at, by version.
        self._loops: dict[int, dict[str, Any]] = {}
        self._released = 0.0
        if self.record.first(_PLAN, self.plan) != self.plan:
            raise Fault(CANNOT_START, f"job {provider.name} has a controller already")

    # -- what the script says ------------------------------------------------------------------------------------------

    def start(self, loop: Mapping[str, Any] | None = None) -> Outcome:
        """Start the processes of all devices of the plan, and build the plan's objects in them; the workers begin to
        train. Raises Fault where that does not come about."""
        self.loop = dict(loop or {})
        nodes: dict[str, list[Seat]] = {}
        for seat in sorted(self._lead.seats(self.plan)):
            nodes.setdefault(seat.device.node, []).append(seat)
        with ThreadPoolExecutor(min(len(nodes), _NODES_AT_ONCE)) as pool:  # starting a node's first process takes long
            for _ in pool.map(lambda seats: [self.provider.spawn(s.device, s.part) for s in seats], nodes.values()):
                pass
        self._lead.begin(self.plan, dict(self.loop))
        self._loops[0] = dict(self.loop)
        outcome = self._follow(1)
        if outcome.fault is not None:
            raise outcome.fault
        return outcome

    def request(self, plan: Plan) -> None:
        """Change to ``plan`` at the boundary where the workers wait now, or the next."""
        self._requested, self._rehearses = pin(plan), False

    def rehearse(self, plan: Plan) -> None:
        """The same up to where bytes would move, and back (``Job.rehearse``). Its outcome is among ``outcomes`` only
        where the change could not be made as things are now."""
        self._requested, self._rehearses = pin(plan), True

    def retire(self, device: Device) -> None:
        """End the processes of a device that serves no plan now, so that its machine can go. Raises ValueError."""
        if device in devices_of(self.plan):
            raise ValueError(f"{device} serves the plan: change to one that does without it first")
        self.provider.retire(device)

    def boundaries(self) -> Iterator[Boundary]:
        """Every boundary, from the start until the workers close the job. Losses between two of them are dealt with on
        the way: the job goes back, so a ``version`` may come again. Raises Fault where the job cannot go on."""
        while True:
            key = f"epoch/{self.epoch}/boundary/{self.version + 1}"
            turn = self._new_turn()
            what = self._next(key, turn)
            if what == "closed":
                self._pulse.close()
                return
            if what == "lost":
                self._recover(turn)
                continue
            before = f"epoch/{self.epoch}/boundary/{self.version}"
            Arrivals(self.record, before).forget()
            self.record.forget(before)
            self.version += 1
            self.loop = self._arrived(key)
            was = digest_of(self.loop)
            yield Boundary(
                version=self.version, loop=self.loop, plan=self.plan, step_s=time.monotonic() - self._released
            )
            self._loops = {v: kept for v, kept in self._loops.items() if v == self.version - 1}
            self._loops[self.version] = dict(self.loop)
            word = self._word(dict(self.loop) if digest_of(self.loop) != was else None)
            self.record.first(key, word)
            self._released = time.monotonic()
            if word.epoch:
                self._follow(word.epoch)
            elif word.refused:
                fault = Fault.decode(word.refused)
                self.outcomes.append(Outcome(epoch=self._lead.ended, plan=self.plan, fault=fault, phases_s={}))

    # -- what happens --------------------------------------------------------------------------------------------------

    def _next(self, key: str, turn: Turn) -> str:
        """Waits for whatever comes first: all members at the boundary ``key``, the survivors of a loss at ``turn``, or
        the end of the job."""
        arrivals, pause, num_members = Arrivals(self.record, key), _POLL_S, len(self.members)
        while True:
            if turn.agreed() is not None:
                return "lost"
            if (arrived := arrivals.count()) == num_members:
                return "boundary"
            self._losses.look()
            lost = [m for m in self.members if self._losses.has(m)]
            gone = sum(not self.record.has(f"closed/{m.number}") for m in lost)
            closed = self.record.counted(f"epoch/{self.epoch}/closed")
            if closed and closed + arrived + gone >= num_members:
                return "closed"
            if gone == num_members:
                raise self._why_all_ended()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)

    def _why_all_ended(self) -> Fault:
        said = (failure_of(self.record, member) for member in self.members)
        first = next((fault for fault in said if fault is not None), None)
        return first or Fault(PROCESS_ENDED, "all processes of the plan have ended", where="job")

    def _arrived(self, key: str) -> dict[str, Any]:
        """The loop's state at a boundary; Fault, in all processes, where theirs differ."""
        try:
            return Arrivals(self.record, key).loop()
        except Fault as fault:
            if fault.code == WRONG_STATE:
                self.record.first(key, Word(stop=fault.encode()))
            raise

    def _word(self, loop: dict[str, Any] | None) -> Word:
        plan, rehearsal = self._requested, self._rehearses
        self._requested, self._rehearses = None, False
        if (plan := plan or self._lead.requested()) is None:
            return Word(loop=loop)
        try:
            command = self._command(plan, self.members, self.version, "asked for")
        except Fault as fault:
            if fault.code != CANNOT_START:
                raise
            return Word(loop=loop, refused=fault.encode())
        return Word(loop=loop, epoch=self._lead.tell(replace(command, rehearsal=rehearsal)))

    def _command(self, plan: Plan, members: tuple[Member, ...], version: int, why: str) -> Command:
        loop = self._loops.get(version)
        return self._lead.command(plan, members, base=self.epoch, version=version, why=why, loop=loop)

    def _follow(self, epoch: int) -> Outcome:
        """What becomes of a change that was begun."""
        command: Command = self.record.decided(f"epoch/{epoch}/command")
        key = f"epoch/{epoch}/decision"
        try:
            decision = self.record.wait(
                key,
                _PHASES * self._deadline_s,
                of="the processes that make the change",
                decided=True,
                stop=lambda: self._losses.among(command.members),
            )
        except Fault as problem:
            if problem.code not in (PROCESS_ENDED, DEADLINE):
                raise
            # Members that heard of the loss first may never have begun: somebody has to end it.
            decision = self.record.first(key, problem.encode())
        fault = None if decision == COMMIT else Fault.decode(decision)
        self._lead.ended = epoch
        outcome = self._account(epoch, command, fault)
        if fault is None or fault.text != REHEARSED:
            self.outcomes.append(outcome)
        if fault is None:
            self.epoch, self.plan, self.version, self._turn = epoch, command.plan, command.version, 0
            self.members = self._lead.serving(command.plan, command.members)
            self.loop = dict(self._loops.get(self.version, self.loop))
        self._released = time.monotonic()
        return outcome

    def _account(self, epoch: int, command: Command, fault: Fault | None) -> Outcome:
        phases: dict[str, float] = {}
        moved = 0
        end = time.monotonic() + _ACCOUNT_S
        for member in command.members:
            try:
                said, num_bytes = self.record.wait(
                    f"epoch/{epoch}/outcome/{member.number}",
                    max(0.0, end - time.monotonic()),
                    of=f"process {member.number}",
                    stop=partial(self._losses.among, (member,)),
                )
            except Fault as missing:
                if missing.code not in (PROCESS_ENDED, DEADLINE):
                    raise
                continue
            moved += num_bytes
            phases = {name: max(said.get(name, 0.0), phases.get(name, 0.0)) for name in {**phases, **said}}
        return Outcome(epoch=epoch, plan=command.plan, fault=fault, phases_s=phases, moved_bytes=moved)

    # -- after a loss --------------------------------------------------------------------------------------------------

    def _new_turn(self) -> Turn:
        return Turn(
            record=self.record,
            losses=self._losses,
            members=self.members,
            key=f"epoch/{self.epoch}/recovery/{self._turn + 1}",
            deadline_s=self._deadline_s,
        )

    def _recover(self, turn: Turn) -> None:
        """The survivors have agreed who they are: say how they go on."""
        self._turn += 1
        agreed = turn.agreed() or ()
        survivors = tuple(m for m in self.members if m.number in agreed)
        gone = tuple(m.device for m in self.members if m.number not in agreed)
        if not gone:  # a failure of their own; they end, and say why
            return

        def lead() -> int:
            plan, version = pin(self._replan(self.plan, gone)), turn.common_version(survivors)
            return self._lead.tell(self._command(plan, survivors, version, f"lost {names(gone)}"))

        word = turn.say(lead)
        if isinstance(word, str):
            raise Fault.decode(word)
        self._follow(word)  # where it is aborted, the survivors take another turn, or end and say why


def said_by(record: Record) -> Plan | None:
    """The plan that the job's controller begins with; None where the job has no controller."""
    found: Plan | None = record.decided(_PLAN)
    return found
