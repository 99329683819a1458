"""A living job in one of its processes: attach, bind, start; a boundary after every step; changes and recoveries there.

    job = attach(plan, store=store, device="n0.gpu1")
    job.bind("actor.train", build_actor)
    job.start()
    while job.loop["step"] < 100:
        try:
            train_one_step(job.stage("actor.train"), job.loop)
            job.boundary()
        except COMMUNICATION as error:
            job.recover(error, replan)

Every process runs the same script. One of them, the member with the lowest number, leads: it says at each boundary
whether a change is made there. Leading is no more than writing first; where the leader is lost another does it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.passes.place import pin
from nereus.runtime.adapters.base import Adapter
from nereus.runtime.executor import ExecutionFailed
from nereus.runtime.faults import (
    CANNOT_START,
    EXPELLED,
    PARTICIPANT_FAILED,
    WRONG_STATE,
    Fault,
)
from nereus.runtime.live import ALL, MoveError, Prepared, prepare_among
from nereus.runtime.session.change import COMMIT, Built, Change, OnPhase, Outcome, tensors_of
from nereus.runtime.session.journal import Journal
from nereus.runtime.session.members import (
    BoundStage,
    Builder,
    Command,
    Losses,
    Member,
    Probe,
    View,
    device_of,
    joined,
)
from nereus.runtime.session.record import Record
from nereus.runtime.session.recovery import Turn
from nereus.runtime.session.snapshot import Snapshot, copied, live

#: Old plan and lost devices -> the plan to go on with.
Replan = Callable[[Plan, tuple[Device, ...]], Plan]
#: Asks the owner of processes for one on a device that the new plan uses and nobody serves.
Spawn = Callable[[Device], None]

#: Longest wait for others to be done with communicators that nobody needs any more.
_FAREWELL_S = 1.0

#: What a step may raise because another process is gone: recover from these. (torch's own are RuntimeErrors.)
COMMUNICATION = (Fault, RuntimeError)


class Aborted(Exception):
    """A change was asked for and aborted; the old plan goes on."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome.fault))
        self.outcome = outcome


def attach(
    plan: Plan,
    *,
    store: Any,
    device: str | Device,
    name: str = "nereus",
    deadline_s: float = 60.0,
    journal: str | os.PathLike[str] | None = None,
    snapshots: bool = False,
    spawn: Spawn | None = None,
    address: str = "127.0.0.1",
    on_phase: OnPhase = lambda phase: None,
) -> Job:
    """Join the job ``name`` of ``store`` as the process of ``device``. Nothing is waited for before ``start``.

    ``snapshots``: keep a copy of the state of each boundary in host memory, so that a process lost in the middle of a
    step loses no more than the step. ``deadline_s``: of every wait for others; whoever is silent for so long counts as
    lost where the others agree on that.
    """
    return Job(
        plan,
        store=store,
        device=device_of(device),
        name=name,
        deadline_s=deadline_s,
        journal=journal,
        snapshots=snapshots,
        spawn=spawn,
        address=address,
        on_phase=on_phase,
    )


class Job:
    """See ``attach``. ``loop``: the training loop's own state (plain values); the same in every process."""

    def __init__(
        self,
        plan: Plan,
        *,
        store: Any,
        device: Device,
        name: str,
        deadline_s: float,
        journal: str | os.PathLike[str] | None,
        snapshots: bool,
        spawn: Spawn | None,
        address: str,
        on_phase: OnPhase,
    ) -> None:
        number = Record(store, name, 0).count("members")
        self.record = Record(store, name, number)
        self.me = Member(number=number, device=device, host=socket.gethostname(), pid=os.getpid())
        self.plan = pin(plan)
        self.loop: dict[str, Any] = {}
        #: The epoch whose plan is served, and the newest that this process knows to have ended.
        self.epoch = self._ended = 0
        self.version = 0
        self.outcomes: list[Outcome] = []
        self.members: tuple[Member, ...] = ()
        self._known: dict[int, Member] = {}
        self._stages: dict[str, BoundStage] = {}
        self._quiesce: list[Callable[[Command], str | None]] = []
        self._losses = Losses(self.record)
        self._journal = Journal(journal)
        self._deadline_s, self._address, self._on_phase = deadline_s, address, on_phase
        self._keep, self._spawn = snapshots, spawn
        self._built: Built | None = None
        #: Newest last; the one before stays until all have passed the boundary.
        self._snapshots: list[Snapshot] = []
        self._touched = False
        self._turn = 0
        self._syncs = 0
        self._prepared: dict[tuple[str, str], Prepared] = {}
        self._requested: Plan | None = None
        self._asked = 0
        self.record.put(f"member/{number}", self.me)

    # -- what the script says ------------------------------------------------------------------------------------------

    def bind(self, stage: str, build: Builder, *, probe: Probe | None = None, tolerance: float = 1e-3) -> None:
        """How to build a stage's objects for a layout. All processes bind all stages, whatever they serve now."""
        self._stages[stage] = BoundStage(build=build, probe=probe, tolerance=tolerance)

    def quiesce(self, hook: Callable[[Command], str | None]) -> None:
        """``hook`` brings to rest what must not run beside a change (a checkpoint being written, prefetching), or
        returns why the change cannot be now."""
        self._quiesce.append(hook)

    def stage(self, name: str) -> Adapter | None:
        """The adapter of a stage as it is now; None where this process has no part of it. Ask anew after a boundary."""
        return self._built.adapters.get(name) if self._built is not None else None

    def view(self, name: str) -> View | None:
        return self._built.views.get(name) if self._built is not None else None

    @property
    def serves(self) -> bool:
        """Whether this process is in the plan; one that is not waits in ``start`` until it is needed again."""
        return self._built is not None

    @property
    def all_alive(self) -> bool:
        """Whether all members still run, as far as anyone has said."""
        return self._losses.among(self.members) is None

    @property
    def leads(self) -> bool:
        return bool(self.members) and self.members[0].number == self.me.number

    @contextmanager
    def updating(self) -> Iterator[None]:
        """``with job.updating():`` around what writes weights: until the next boundary the objects do not count, but
        for the snapshot of the last one."""
        self._touched = True
        yield

    def sync(self, source: str, target: str) -> int:
        """The weights of stage ``source`` into stage ``target`` of the same model, bit for bit, in all processes of the
        plan: compiled at the first call after a change, and run again from then on. The number of bytes that arrived
        here. Objects that replace their own memory (an engine that reloads) are bound anew by the next change.

        Raises Fault; the target's weights are then not to be used."""
        self._check_serves()
        assert self._built is not None
        numbers = [m.number for m in self.members]
        self._syncs += 1
        name = f"epoch/{self.epoch}/sync/{self._syncs}"
        old, new = self.stage(source), self.stage(target)
        try:
            prepared = self._prepared.get((source, target))
            if prepared is None:
                prepared = self._prepared[source, target] = prepare_among(
                    old.bind if old is not None else None,
                    new.bind if new is not None else None,
                    tensors_of(self.plan.model(target.partition(".")[0])),
                    store=self.record.store,
                    name=name,
                    rank=numbers.index(self.me.number),
                    size=len(numbers),
                    drop=(ALL,),
                    deadline_s=self._deadline_s,
                    stop=self._member_lost,
                )
            report = prepared.run(self.record.store, name, self._deadline_s)
        except MoveError as error:
            raise Fault(WRONG_STATE, f"{source} to {target}: {error}", where=self.record.where) from None
        except ExecutionFailed as error:
            raise error.fault from None
        if new is not None:
            new.finish({**new.job_state(), "version": self.version})
        return report.received_bytes

    # -- start, boundaries, changes ------------------------------------------------------------------------------------

    def start(self, loop: Mapping[str, Any] | None = None) -> Outcome:
        """Build the objects of the plan; returns once this process serves. At the beginning of a job all devices of
        the plan must have a process within the deadline; later, a process waits here until a plan needs it.

        Raises Fault; Aborted where a change that was to take it in was aborted at the job's beginning.
        """
        if loop is not None and not self.loop:
            self.loop = dict(loop)
        if self._ended == 0 and self.record.decided("epoch/1/command") is None:
            self._first_command()
        while True:
            epoch = self._ended + 1
            command: Command = self._wait_long(f"epoch/{epoch}/command")
            if any(m.number == self.me.number for m in command.members):
                outcome = self._change(command)
                if not outcome.committed and epoch == 1:
                    raise Aborted(outcome)
                if self.serves:
                    return outcome
            elif self._wait_long(f"epoch/{epoch}/decision") == COMMIT:
                self.epoch, self.plan = epoch, command.plan
            self._ended = max(self._ended, epoch)

    def _first_command(self) -> None:
        """Epoch 1: from nothing to the plan, of the processes that are there first on its devices."""
        needed = set(_devices(self.plan))
        end = time.monotonic() + self._deadline_s
        while missing := needed - {m.device for m in joined(self.record, self._known).values()}:
            if self.record.decided("epoch/1/command") is not None:
                return
            if time.monotonic() > end:
                text = f"no process for {', '.join(map(str, sorted(missing)))} within {self._deadline_s:g} s"
                raise Fault(CANNOT_START, text, where=self.record.where)
            time.sleep(0.01)
        members = self._serving(needed, self._known.values())
        command = Command(epoch=1, base=0, plan=self.plan, members=members, version=0, why="start")
        self.record.first("epoch/1/command", command)

    def _wait_long(self, key: str) -> Any:
        """As long as it takes: a spare process waits for the plan that needs it."""
        return self.record.wait(key, float("inf"), of="the job", decided=True, stop=self._expelled)

    def _expelled(self) -> Fault | None:
        self._losses.look()
        if self.me.number in self._losses.numbers:
            return Fault(EXPELLED, "the others count this process as lost", where=self.record.where)
        return None

    def boundary(self) -> Outcome | None:
        """All processes of the plan, after every step, with equal ``loop``. Makes the change that was requested, if
        one was: its outcome, else None. Where a change was aborted the old plan goes on.

        Raises Fault where another process is lost: ``recover``.
        """
        self._check_serves()
        self.version += 1
        if self._keep:
            assert self._built is not None
            self._snapshots.append(copied(self._built.adapters, dict(self.loop), self.version))
        key = f"epoch/{self.epoch}/boundary/{self.version}"
        numbers = [m.number for m in self.members]
        self.record.put(f"{key}/{self.me.number}", self.version)
        if self.leads:
            for number in numbers:
                self.record.wait(
                    f"{key}/{number}", self._deadline_s, of=f"process {number} at the boundary", stop=self._member_lost
                )
            self.record.first(key, self._ordered())
        # The leader waits for the slowest, and may then wait for a new process.
        word = self.record.wait(
            key, 3 * self._deadline_s, of="the leader at the boundary", decided=True, stop=self._gone
        )
        del self._snapshots[:-1]
        self._touched = False
        if isinstance(word, str):  # the plan that was asked for cannot be begun
            refused = Outcome(epoch=self._ended, plan=self.plan, fault=Fault.decode(word), phases_s={})
            self.outcomes.append(refused)
            return refused
        if not word:
            return None
        return self._change(self.record.decided(f"epoch/{word}/command"))

    def request(self, plan: Plan) -> None:
        """Ask for a change at the next boundary; any process may, and whoever has the store."""
        self.record.put(f"request/{self.record.count('requests')}", pin(plan))

    def transition(self, plan: Plan) -> Outcome:
        """Every process, at the same place, between steps: change to ``plan`` now. Raises Aborted."""
        self._requested = pin(plan)
        outcome = self.boundary()
        assert outcome is not None
        if not outcome.committed:
            raise Aborted(outcome)
        return outcome

    def _ordered(self) -> int | str:
        """The leader: the number of the epoch to begin at this boundary, 0 for none; a fault's text where the plan that
        is asked for cannot be begun."""
        plan, self._requested = self._requested, None
        while plan is None:
            asked = self.record.get(f"request/{self._asked + 1}")
            if asked is None:
                return 0
            self._asked += 1
            # Another one may have led, and served it.
            if self.record.first(f"request/{self._asked}/taken", self.me.number) == self.me.number:
                plan = asked
        try:
            return self._tell(self._command(plan, self.members, self.version, "asked for"))
        except Fault as fault:
            if fault.code != CANNOT_START:
                raise
            return fault.encode()

    def _tell(self, command: Command) -> int:
        """The leader: ``command`` becomes the next epoch's; its number. One that was begun and not ended is ended: it
        cannot have been decided for, since one who is in it has not voted."""
        epoch = self._ended + 1
        while (said := self.record.first(f"epoch/{epoch}/command", replace(command, epoch=epoch))) != replace(
            command, epoch=epoch
        ):
            assert isinstance(said, Command)
            fault = Fault(PARTICIPANT_FAILED, "another change took its place", where=self.record.where)
            self.record.first(f"epoch/{epoch}/decision", fault.encode())
            epoch += 1
        return epoch

    def _command(self, plan: Plan, members: Sequence[Member], version: int, why: str) -> Command:
        """With members for all devices of ``plan``: those who serve, then spares; new processes are asked for."""
        needed = set(_devices(plan))
        asked: set[Device] = set()
        end = time.monotonic() + self._deadline_s
        while True:
            self._losses.look()
            spares = [m for m in joined(self.record, self._known).values() if not self._losses.has(m)]
            chosen = self._serving(needed, [*members, *spares])
            if not (missing := needed - {m.device for m in chosen}) or time.monotonic() > end:
                break
            if self._spawn is None and not asked:
                end = min(end, time.monotonic() + 1.0)  # none can come but those that are on their way
            for device in sorted(missing - asked):
                asked.add(device)
                if self._spawn is not None:
                    self._spawn(device)
            time.sleep(0.01)
        if missing:
            text = f"no process serves {', '.join(map(str, sorted(missing)))}"
            raise Fault(CANNOT_START, text, where=self.record.where)
        both = {m.number: m for m in (*members, *chosen)}
        return Command(
            epoch=0,
            base=self.epoch,
            plan=plan,
            members=tuple(both[number] for number in sorted(both)),
            version=version,
            why=why,
        )

    def _serving(self, devices: set[Device], members: Any) -> tuple[Member, ...]:
        """One member for each device, the first in the given order."""
        found: dict[Device, Member] = {}
        for member in members:
            if member.device in devices:
                found.setdefault(member.device, member)
        return tuple(sorted(found.values(), key=lambda m: m.number))

    def _change(self, command: Command, *, serving: bool = True) -> Outcome:
        change = Change(
            command,
            record=self.record,
            stages=self._stages,
            base=self.epoch,
            old=self._holding(command.version, serving=serving),
            serving=self._built if serving else None,
            losses=self._losses,
            journal=self._journal,
            quiesce=self._quiesce,
            deadline_s=self._deadline_s,
            address=self._address,
            on_phase=self._on_phase,
        )
        outcome, built = change.run()
        self.outcomes.append(outcome)
        self._ended = command.epoch
        if built is None:
            return outcome
        old, self._built = self._built, built if built.adapters else None
        self.epoch, self.plan, self.version = command.epoch, command.plan, command.version
        needed = set(_devices(command.plan))
        self.members = tuple(m for m in command.members if m.device in needed)
        self.loop = dict(change.loop) if command.base else self.loop
        self._turn, self._touched, self._syncs = 0, False, 0
        self._prepared.clear()
        self._snapshots.clear()
        if self._keep and self._built is not None:
            self._snapshots.append(copied(self._built.adapters, dict(self.loop), self.version))
        if old is not None:
            old.adapters.clear()
            old.views.clear()
            # All have voted, and nobody uses the old ones since.
            old.groups.close(_FAREWELL_S if serving else 0.0)
        if self._built is None:
            built.groups.close(_FAREWELL_S)
        self._journal.write(command.epoch, "released")
        return outcome

    def _holding(self, version: int, *, serving: bool) -> Snapshot | None:
        """What this process has of the state of ``version``: the objects where nothing wrote them since, or a
        snapshot."""
        clean = self._built is not None and not self._touched and self.version == version
        if not (clean and serving):
            for snapshot in self._snapshots:
                if snapshot.version == version:
                    return snapshot
        if clean:
            assert self._built is not None
            return live(self._built.adapters, dict(self.loop), version)
        return None

    def _check_serves(self) -> None:
        if self._built is None:
            raise Fault(WRONG_STATE, "this process serves no plan: start() first", where=self.record.where)

    def _member_lost(self) -> Fault | None:
        return self._losses.among(self.members)

    def _gone(self) -> Fault | None:
        return self._member_lost() or self._expelled()

    # -- after a loss -------------------------------------------------------------------------------------------------

    def recover(self, error: BaseException, replan: Replan) -> Outcome:
        """After a step or a boundary failed since another process is gone: the survivors agree who they are, go back
        to the newest boundary that they have in common, and change to ``replan``'s plan. All survivors call it.

        Raises ``error`` again where nobody is lost; Fault where the state cannot be had from the survivors (it names
        what is lost), or this process counts as lost itself.
        """
        if self._built is not None:
            self._built.groups.abort(str(error))
        while len(self.members) > 1:
            self._turn += 1
            turn = Turn(
                record=self.record,
                losses=self._losses,
                members=self.members,
                key=f"epoch/{self.epoch}/recovery/{self._turn}",
                deadline_s=self._deadline_s,
            )
            try:
                survivors = turn.survivors(self._versions())
            except Fault as fault:
                if fault.code == EXPELLED:
                    self._journal.write(self.epoch, "left")
                raise
            if len(survivors) == len(self.members):
                raise error
            gone = tuple(m.device for m in self.members if m not in survivors)
            self._journal.write(self.epoch, "lost", devices=_names(gone))

            def lead(turn: Turn = turn, survivors: tuple[Member, ...] = survivors, gone: Any = gone) -> int:
                plan, version = pin(replan(self.plan, gone)), turn.common_version(survivors)
                return self._tell(self._command(plan, survivors, version, f"lost {_names(gone)}"))

            epoch = turn.agreed_epoch(survivors, lead)
            if epoch is None:  # the leader is lost too
                continue
            outcome = self._change(self.record.decided(f"epoch/{epoch}/command"), serving=False)
            if outcome.committed:
                return outcome
            if not self._losses.among(survivors):
                assert outcome.fault is not None
                raise outcome.fault
        raise Fault(PARTICIPANT_FAILED, "no other process is left", where=self.record.where) from error

    def _versions(self) -> list[int]:
        """The boundaries whose state this process holds."""
        known = {snapshot.version for snapshot in self._snapshots}
        if self._built is not None and not self._touched and not self._keep:
            known.add(self.version)
        return sorted(known)

    def close(self) -> None:
        """In good order, at the end of the script."""
        if self._built is not None:
            self._built.groups.close(self._deadline_s)
            self._built = None
        self._journal.close()


def _devices(plan: Plan) -> tuple[Device, ...]:
    return tuple(dict.fromkeys(device for stage in plan.owners() for device in stage.ranks))


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(map(str, devices))
