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
whether a change is made there. Leading is no more than writing first; where the leader is lost another does it. In a
job that has a controller (``controller.py``), that one leads, and the script is the same.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereus.ir.plan import Plan
from nereus.passes.place import pin
from nereus.runtime.adapters.base import Adapter
from nereus.runtime.faults import (
    CANNOT_START,
    EXPELLED,
    PARTICIPANT_FAILED,
    STORE_LOST,
    WRONG_STATE,
    Fault,
)
from nereus.runtime.session.change import COMMIT, REHEARSED, Built, Change, OnPhase, Outcome, tensors_of
from nereus.runtime.session.checkpoint import FORMS, SAFETENSORS, Storage
from nereus.runtime.session.controller import said_by
from nereus.runtime.session.journal import Journal
from nereus.runtime.session.lead import Lead, Spawn, names
from nereus.runtime.session.members import (
    ENDED,
    Arrivals,
    BoundStage,
    Builder,
    Command,
    Losses,
    Member,
    Probe,
    Seat,
    View,
    Word,
    tell_failure,
)
from nereus.runtime.session.peers import Peers
from nereus.runtime.session.record import Record
from nereus.runtime.session.recovery import Replan, Turn, no_replan
from nereus.runtime.session.snapshot import Snapshot, copied, live
from nereus.runtime.session.syncs import Sync, Syncs
from nereus.runtime.session.watch import Watch

#: Longest wait for others to be done with communicators that nobody needs any more.
_FAREWELL_S = 1.0

#: What a step may raise because another process is gone: recover from these. (torch's own are RuntimeErrors.)
COMMUNICATION = (Fault, RuntimeError)


class Aborted(Exception):
    """A change was asked for and aborted; the old plan goes on."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome.fault))
        self.outcome = outcome


class Job:
    """See ``attach``. ``loop``: the training loop's own state (plain values); the same in every process."""

    def __init__(
        self,
        plan: Plan | None,
        *,
        store: Any,
        seat: Seat,
        name: str,
        deadline_s: float,
        journal: str | os.PathLike[str] | None,
        snapshots: bool,
        peers: int,
        spawn: Spawn | None,
        address: str,
        transport: str,
        on_phase: OnPhase,
    ) -> None:
        number = Record(store, name, 0).count("members")
        self.record = Record(store, name, number)
        self.me = Member(number=number, seat=seat, host=socket.gethostname(), pid=os.getpid())
        first = said_by(self.record)
        #: Whether a controller leads.
        self.led = first is not None
        if (plan := plan or first) is None:
            raise Fault(CANNOT_START, "no plan is given, and no controller has one", where=self.record.where)
        self.plan = pin(plan)
        self.loop: dict[str, Any] = {}
        #: The epoch whose plan is served.
        self.epoch = 0
        self.version = 0
        self.outcomes: list[Outcome] = []
        self.members: tuple[Member, ...] = ()
        self._stages: dict[str, BoundStage] = {}
        self._quiesce: list[Callable[[Command], str | None]] = []
        self._losses = Losses(self.record)
        self._lead = Lead(self.record, self._losses, deadline_s=deadline_s, spawn=spawn)
        self._journal = Journal(journal)
        self._deadline_s, self._address, self._on_phase = deadline_s, address, on_phase
        self._transport = transport
        self._keep = snapshots
        self._built: Built | None = None
        self._changing: Change | None = None
        self._on_loss: list[Callable[[Fault], None]] = []
        #: Newest last; the one before stays until all have passed the boundary.
        self._snapshots: list[Snapshot] = []
        self._touched = False
        self._turn = 0
        self._copies = peers
        self._syncs, self._peers = self._syncs_of(0), self._peers_of(0)
        self._checkpoints = 0
        self._requested: Plan | None = None
        self._rehearses = False
        self.record.put(f"member/{number}", self.me)
        self._pulse = self.record.watched(deadline_s)
        self._watch = Watch(self.record, self._told_of_loss)

    # -- what the script says ------------------------------------------------------------------------------------------

    def bind(
        self,
        stage: str,
        build: Builder,
        *,
        probe: Probe | None = None,
        tolerance: float = 1e-3,
        cache: bool = False,
        part: str = "",
    ) -> None:
        """How to build a stage's objects for a layout. All processes bind all stages, whatever they serve now.

        ``cache``: the stage holds a copy of weights that ``sync`` brings (an engine): nothing of it is kept or moved
        by a change, and it must be synced after each, and after a recovery, before it is used. Its builder may hand
        out again the objects that there are, where their layout is the same. ``part``: whose stage it is, on devices
        that have several processes (``attach``)."""
        self._stages[stage] = BoundStage(build=build, probe=probe, tolerance=tolerance, cache=cache, part=part)
        self._lead.parts[stage] = part

    def quiesce(self, hook: Callable[[Command], str | None]) -> None:
        """``hook`` brings to rest what must not run beside a change (a checkpoint being written, prefetching), or
        returns why the change cannot be now."""
        self._quiesce.append(hook)

    def on_loss(self, hook: Callable[[Fault], None]) -> None:
        """``hook`` ends, from another thread, waits that this process may be in with a process that is gone and that
        are no communicators of Nereus (a framework's own)."""
        self._on_loss.append(hook)

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
        return self.loss() is None

    def loss(self) -> Fault | None:
        """Names the first member that is gone: for waits of the script's own."""
        return self._losses.among(self.members)

    @property
    def leads(self) -> bool:
        return self._speaks and not self.led

    @property
    def _speaks(self) -> bool:
        """Whether this process has the lowest number."""
        return bool(self.members) and self.members[0].number == self.me.number

    @contextmanager
    def updating(self) -> Iterator[None]:
        """``with job.updating():`` around what writes weights: until the next boundary the objects do not count, but
        for the snapshot of the last one."""
        self._touched = True
        yield

    def sync(self, source: str, target: str, replicas: Sequence[int] = ()) -> int:
        """The weights of stage ``source`` into stage ``target`` of the same model, bit for bit: compiled at the first
        call after a change, and run again from then on. ``replicas``: data-parallel ranks of ``target`` that get them,
        () for all. All processes of the two (of these replicas) call it; in others it does nothing. The number of bytes
        that arrived here. Objects that replace their own memory (an engine that reloads) are bound anew by the next
        change.

        Raises Fault; the target's weights are then not to be used."""
        self._check_serves()
        self.record.doing = f"sync of {target}"
        sync = Sync(source, target, tuple(replicas))
        numbers = sync.members(self.plan, self.members, self._lead.parts)
        if self.me.number not in numbers:
            return 0
        # A device of both stages may have the target of another replica.
        new = self.stage(target) if self._gets(sync) else None
        tensors = tensors_of(self.plan.model(target.partition(".")[0]))
        num_bytes = self._syncs.run(sync, self.stage(source), new, tensors, numbers)
        if new is not None:
            new.finish({**new.job_state(), "version": self.version})
        return num_bytes

    def sync_waits(self, source: str, target: str, replicas: Sequence[int] = ()) -> bool:
        """Whether the trainers have come to the next such ``sync`` and wait: for an engine that asks between its steps
        (asynchronous mode)."""
        self._check_serves()
        if (fault := self._gone()) is not None:
            raise fault
        return self._syncs.waits(Sync(source, target, tuple(replicas)))

    def _gets(self, sync: Sync) -> bool:
        view = self.view(sync.target)
        return view is not None and (not sync.replicas or view.place.at.dp[0] in sync.replicas)

    def checkpoint(self, path: str | os.PathLike[str], form: str = SAFETENSORS) -> int:
        """Write the job's state, between two steps, in all processes of the plan: compiled moves into files, a share
        for each process. ``form``: "safetensors", or "dcp", a folder for each stage that torch.distributed.checkpoint
        reads. The number of bytes that this one wrote. Raises Fault; then an older checkpoint is still there."""
        if form not in FORMS:
            raise ValueError(f"a checkpoint is written as {' or '.join(FORMS)}, not {form}")
        return self._storage().save(Path(path), self.loop, form)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """After ``start``, in all processes of the plan, whatever plan the checkpoint was written in: the objects'
        state and ``loop``. A folder that torch.distributed.checkpoint wrote of the trained model is read too, and
        leaves ``loop`` as it is. All must see ``path``. Raises Fault; the objects are then not to be used."""
        self._peers.forget()  # a part of the state before must not be brought together with the others' from here on
        loop = self._storage().load(Path(path))
        self.loop = self.loop if loop is None else loop
        self._touched = False
        if self._keep:
            self._snapshots[:] = [copied(self._kept(), dict(self.loop), self.version)]

    def _syncs_of(self, epoch: int) -> Syncs:
        return Syncs(self.record, epoch=epoch, deadline_s=self._deadline_s, stop=self.loss, transport=self._transport)

    def _peers_of(self, epoch: int) -> Peers:
        return Peers(
            self.record,
            epoch=epoch,
            every=self._copies,
            deadline_s=self._deadline_s,
            stop=self.loss,
            transport=self._transport,
        )

    def _storage(self) -> Storage:
        self._check_serves()
        self._checkpoints += 1
        self.record.doing = "checkpoint"
        return Storage(
            record=self.record,
            key=f"epoch/{self.epoch}/checkpoint/{self._checkpoints}",
            numbers=tuple(m.number for m in self.members),
            stages=tuple(s for s in self.plan.owners() if not self._stages[s.name].cache),
            plan=self.plan,
            adapters=self._kept(),
            deadline_s=self._deadline_s,
            stop=self.loss,
            transport=self._transport,
        )

    # -- start, boundaries, changes ------------------------------------------------------------------------------------

    def start(self, loop: Mapping[str, Any] | None = None) -> Outcome:
        """Build the objects of the plan; returns once this process serves. At the beginning of a job all devices of
        the plan must have a process within the deadline; later, a process waits here until a plan needs it.

        Raises Fault; Aborted where a change that was to take it in was aborted at the job's beginning; SystemExit (0)
        where the others have closed the job meanwhile.
        """
        if loop is not None and not self.loop:
            self.loop = dict(loop)
        if self._lead.ended == 0 and not self.led and self.record.decided("epoch/1/command") is None:
            self._lead.begin(self.plan)
        while True:
            epoch = self._lead.ended + 1
            command: Command = self._wait_long(f"epoch/{epoch}/command")
            if any(m.number == self.me.number for m in command.members):
                outcome = self._change(command)
                if not outcome.committed and epoch == 1:
                    raise Aborted(outcome)
                if self.serves:
                    return outcome
            elif self._wait_long(f"epoch/{epoch}/decision") == COMMIT:
                self.epoch, self.plan = epoch, command.plan
            self._lead.ended = max(self._lead.ended, epoch)

    def _wait_long(self, key: str) -> Any:
        """As long as it takes: a spare process waits for the plan that needs it."""
        return self.record.wait(key, float("inf"), of="the job", decided=True, stop=self._not_needed)

    def _not_needed(self) -> Fault | None:
        if isinstance(self.record.decided(ENDED), tuple):
            self.close()
            raise SystemExit(0)
        return self._expelled()

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
        self.record.doing = "boundary"
        self.version += 1
        if self._keep:
            self._snapshots.append(copied(self._kept(), dict(self.loop), self.version))
        key = f"epoch/{self.epoch}/boundary/{self.version}"
        numbers = [m.number for m in self.members]
        if self.led:
            Arrivals(self.record, key).come(self.loop, speaks=self._speaks)
        else:
            self.record.put(f"{key}/{self.me.number}", self.version)
        if self.leads:
            for number in numbers:
                self.record.wait(
                    f"{key}/{number}", self._deadline_s, of=f"process {number} at the boundary", stop=self.loss
                )
            self.record.first(key, self._word())
        self._requested = None  # in all of them: who leads next must not serve it again
        # The leader waits for the slowest, and may then wait for a new process.
        word: Word = self.record.wait(
            key, 3 * self._deadline_s, of="the leader at the boundary", decided=True, stop=self._gone
        )
        if word.stop:
            raise Fault.decode(word.stop)
        if not self.led:  # all have come here, and so have read the word before
            before = f"epoch/{self.epoch}/boundary/{self.version - 1}"
            self.record.forget(f"{before}/{self.me.number}", *((before,) if self.leads else ()))
        if word.loop is not None:
            self.loop = dict(word.loop)
            self._snapshots[-1:] = [replace(kept, loop=dict(word.loop)) for kept in self._snapshots[-1:]]
        self._snapshots = [s for s in self._snapshots if s.version in (self.version, self._peers.version)]
        self._touched = False
        if word.refused:
            refused = Outcome(epoch=self._lead.ended, plan=self.plan, fault=Fault.decode(word.refused), phases_s={})
            self.outcomes.append(refused)
            return refused
        if not word.epoch:
            if self._peers.due(self.version):
                self._peers.copy(self.plan, self.members, self._kept(), self.version)
            return None
        outcome = self._change(self.record.decided(f"epoch/{word.epoch}/command"))
        if self.led and outcome.fault is not None and outcome.fault.text == REHEARSED:
            self.outcomes.remove(outcome)
            return None
        return outcome

    def request(self, plan: Plan) -> None:
        """Ask for a change at the next boundary; any process may, and whoever has the store."""
        self.record.put(f"request/{self.record.count('requests')}", pin(plan))

    def transition(self, plan: Plan) -> Outcome:
        """Every process, at the same place, between steps: change to ``plan`` now. Raises Aborted."""
        if not self.led:
            self._requested = pin(plan)
        elif self._speaks:
            self.request(plan)
        outcome = self.boundary()
        assert outcome is not None
        if not outcome.committed:
            raise Aborted(outcome)
        return outcome

    def rehearse(self, plan: Plan) -> Outcome:
        """Every process, at the same place, between steps: make the change to ``plan`` up to where bytes would move,
        and go back; what was compiled on the way is kept. Raises Aborted where the change could not be made as things
        are now. In a job with a controller that one rehearses, not its processes."""
        self._requested, self._rehearses = pin(plan), True
        try:
            outcome = self.boundary()
        finally:
            self._rehearses = False
        assert outcome is not None
        if outcome.fault is None or outcome.fault.text != REHEARSED:
            raise Aborted(outcome)
        self.outcomes.remove(outcome)
        return outcome

    def _word(self) -> Word:
        """What the leader says at this boundary."""
        plan = self._requested or self._lead.requested()
        if plan is None:
            return Word()
        try:
            command = self._lead.command(plan, self.members, base=self.epoch, version=self.version, why="asked for")
        except Fault as fault:
            if fault.code != CANNOT_START:
                raise
            return Word(refused=fault.encode())
        return Word(epoch=self._lead.tell(replace(command, rehearsal=self._rehearses)))

    def _change(self, command: Command, *, serving: bool = True) -> Outcome:
        change = Change(
            command,
            record=self.record,
            stages=self._stages,
            base=self.epoch,
            old=self._with_ward(self._holding(command.version, serving=serving), command),
            had=tuple(stage.name for stage in self.plan.owners()) if self.epoch else (),
            serving=self._built if serving else None,
            losses=self._losses,
            journal=self._journal,
            quiesce=self._quiesce,
            deadline_s=self._deadline_s,
            address=self._address,
            transport=self._transport,
            on_phase=self._on_phase,
        )
        self._changing = change
        try:
            outcome, built = change.run()
        finally:
            self._changing = None
        if self.led:
            said = (dict(outcome.phases_s), outcome.moved_bytes)
            self.record.put(f"epoch/{command.epoch}/outcome/{self.me.number}", said)
        self.outcomes.append(outcome)
        self._lead.ended = command.epoch
        if built is None:
            return outcome
        old, self._built = self._built, built if built.adapters else None
        self.epoch, self.plan, self.version = command.epoch, command.plan, command.version
        self.members = self._lead.serving(command.plan, command.members)
        if command.base or command.loop is not None:
            self.loop = dict(change.loop)
        self._turn, self._touched, self._checkpoints = 0, False, 0
        self._syncs.close()
        self._peers.close()
        self._syncs, self._peers = self._syncs_of(command.epoch), self._peers_of(command.epoch)
        self._snapshots.clear()
        if self._keep and self._built is not None:
            self._snapshots.append(copied(self._kept(), dict(self.loop), self.version))
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
            return live(self._kept(), dict(self.loop), version)
        return None

    def _with_ward(self, old: Snapshot | None, command: Command) -> Snapshot | None:
        """And what this process keeps of one that is lost."""
        mirror = self._peers.mirror
        if old is None or mirror is None or mirror.version != old.version or mirror.ward in command.numbers():
            return old
        return replace(old, ward=mirror.stages)

    def _kept(self) -> dict[str, Adapter]:
        """Objects whose state is the job's: all but caches."""
        assert self._built is not None
        return {name: a for name, a in self._built.adapters.items() if not self._stages[name].cache}

    def _check_serves(self) -> None:
        if self._built is None:
            raise Fault(WRONG_STATE, "this process serves no plan: start() first", where=self.record.where)

    def _told_of_loss(self, losses: Losses) -> None:
        """In the watching thread. gloo tells a process of its neighbours' end only, and of a machine's not before the
        deadline."""
        changing, built = self._changing, self._built
        if built is not None and (fault := losses.among(self.members)) is not None:
            built.groups.abort(fault.text)
            self._syncs.abort(fault.text)
            self._peers.abort(fault.text)
            for hook in self._on_loss:
                hook(fault)
        if changing is not None and (fault := losses.among(changing.command.members)) is not None:
            changing.abort(fault.text)

    def _gone(self) -> Fault | None:
        return self.loss() or self._expelled()

    # -- after a loss -------------------------------------------------------------------------------------------------

    def recover(self, error: BaseException, replan: Replan = no_replan) -> Outcome:
        """After a step or a boundary failed since another process is gone: the survivors agree who they are, go back
        to the newest boundary that they have in common, and change to ``replan``'s plan (a controller has its own). All
        survivors call it.

        Raises ``error`` again where nobody is lost; Fault where the state cannot be had from the survivors (it names
        what is lost), or this process counts as lost itself.
        """
        if self._built is not None:
            self._built.groups.abort(str(error))
        if isinstance(error, Fault) and error.code == STORE_LOST:
            raise error  # there is nothing to agree through
        self.record.doing = "recovery"
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
                mirror = self._peers.mirror
                ward = (mirror.ward, mirror.version) if mirror is not None else None
                survivors = turn.survivors(self._versions(), ward)
            except Fault as fault:
                if fault.code == EXPELLED:
                    self._journal.write(self.epoch, "left")
                raise
            if len(survivors) == len(self.members):
                tell_failure(self.record, Fault.of(error, self.record.where))
                raise error
            gone = tuple(m.device for m in self.members if m not in survivors)
            self._journal.write(self.epoch, "lost", devices=names(gone))

            def lead(turn: Turn = turn, survivors: tuple[Member, ...] = survivors, gone: Any = gone) -> int:
                plan, version = pin(replan(self.plan, gone)), turn.common_version(survivors)
                why = f"lost {names(gone)}"
                return self._lead.tell(self._lead.command(plan, survivors, base=self.epoch, version=version, why=why))

            epoch = turn.agreed_epoch(survivors, None if self.led else lead)
            if epoch is None:  # the leader is lost too
                continue
            outcome = self._change(self.record.decided(f"epoch/{epoch}/command"), serving=False)
            if outcome.committed:
                return outcome
            if not self._losses.among(survivors):
                assert outcome.fault is not None
                tell_failure(self.record, outcome.fault)
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
            # Whoever owns the processes need not wait for those that no plan will call any more.
            with suppress(Fault):
                self.record.first(ENDED, tuple((m.host, m.pid) for m in self.members))
        self._watch.close()
        if self.led:
            self.record.put(f"closed/{self.me.number}", self.version)
            self.record.count(f"epoch/{self.epoch}/closed")
        self._pulse.close()
        self._journal.close()
