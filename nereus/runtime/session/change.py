"""One change of plan, as each process makes it: all of them end in the new plan, or all in the old one.

    offer     quiesced, or a veto; what each holds                                      \
    probe     figures of the old objects                                                |
    prepare   communicators, framework objects for the new layout, their memory         |  any failure, any deadline:
    move      stage by stage, every byte verified at its receiver                       |  abort, old objects untouched
    finish    job state set, rebuild checklist, probe                                   /
    decide    the first write of one entry: commit, or why not
    commit    the new objects serve, the old ones are let go

Everything that can fail comes before the decision. A process votes once it is ready to commit; only when all have
voted is "commit" proposed. Past a deadline, or on any failure, a process proposes to abort, and does what the entry
then says: if the others had all votes by then, it commits with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nereus.ir.plan import Model, Plan
from nereus.ir.tensor import LogicalTensor
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.base import Adapter
from nereus.runtime.executor import ExecutionFailed
from nereus.runtime.faults import CANNOT_START, PARTICIPANT_FAILED, VETOED, WRONG_AFTER, WRONG_STATE, Fault
from nereus.runtime.groups import Groups, give_up
from nereus.runtime.live import ALL, Connections, MoveError, prepare_among
from nereus.runtime.session.journal import Journal
from nereus.runtime.session.members import BoundStage, Command, Losses, View
from nereus.runtime.session.record import Record
from nereus.runtime.session.snapshot import Snapshot

COMMIT = "commit"
REHEARSED = "rehearsed: everything up to the first byte went well"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``fault``: why it was aborted; None: committed. ``phases_s``: seconds of this process in each phase.
    ``moved_bytes``: that arrived here. ``peak_bytes``: most that old and new objects and staging of a stage held here
    while it was moved; ``promised_bytes``: what its program said, never less."""

    epoch: int
    plan: Plan
    fault: Fault | None
    phases_s: Mapping[str, float]
    moved_bytes: int = 0
    peak_bytes: int = 0
    promised_bytes: int = 0

    @property
    def committed(self) -> bool:
        return self.fault is None


@dataclass(slots=True)
class Built:
    """The objects of one epoch in this process."""

    groups: Groups
    views: dict[str, View] = field(default_factory=dict)
    adapters: dict[str, Adapter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Offer:
    """``states``: job state of each stage held; ``had``: stages that the plan before has. ``veto``: why not now."""

    base: int
    loop: Any
    states: dict[str, Any]
    had: tuple[str, ...]
    veto: str = ""


#: Called before each phase with its name; for tests that break things there.
OnPhase = Callable[[str], None]


class Change:
    """``base``: the epoch whose plan this process serves; ``old``: what it holds of the version that counts, None if
    nothing; ``had``: stages of the plan that it serves; ``serving``: its objects, for the probe, None where their
    communicators are broken.
    ``loop``, after ``run``: the training loop's state, the same in all."""

    def __init__(
        self,
        command: Command,
        *,
        record: Record,
        stages: Mapping[str, BoundStage],
        base: int,
        old: Snapshot | None,
        had: tuple[str, ...],
        serving: Built | None,
        losses: Losses,
        journal: Journal,
        quiesce: Sequence[Callable[[Command], str | None]],
        deadline_s: float,
        address: str,
        transport: str,
        on_phase: OnPhase,
    ) -> None:
        self.command, self.record, self.stages, self.base = command, record, stages, base
        self.old, self.had, self.serving, self.losses, self.journal = old, had, serving, losses, journal
        self.quiesce, self.deadline_s, self.address, self.on_phase = quiesce, deadline_s, address, on_phase
        self.key = f"epoch/{command.epoch}"
        self.built: Built | None = None
        self.loop: Mapping[str, Any] = {}
        self.before: dict[str, tuple[float, ...] | None] = {}
        self.phases_s: dict[str, float] = {}
        self.moved_bytes = self.peak_bytes = self.promised_bytes = 0
        self.connections = Connections(stop=self._ended, kind=transport)

    def run(self) -> tuple[Outcome, Built | None]:
        """The outcome, and the new objects where it committed."""
        epoch = self.command.epoch
        self.journal.write(epoch, "begun", base=self.command.base, why=self.command.why)
        fault: Fault | None = None
        try:
            self._phase("offer", self._offer)
            if not self.command.rehearsal:
                self._phase("probe", self._probe)
            self._phase("prepare", self._prepare)
            self._phase("move", self._move)
            if self.command.rehearsal:
                raise Fault(VETOED, REHEARSED)
            self._phase("finish", self._finish)
            self._phase("vote", self._vote)
        except Exception as error:
            fault = Fault.of(error, self.record.where)
        if fault is not None:  # outside the handler: its frames hold objects that are to go
            fault = self._heard(fault)
            if self.built is None:  # others may be making communicators with this process
                with suppress(RuntimeError):
                    give_up(self.record.store, epoch, fault)
        decision = self._decide(fault)
        self.connections.close()
        if decision == COMMIT:
            self.on_phase("commit")
            self.journal.write(epoch, "committed", plan=self.command.plan.path)
            return self._outcome(None), self.built
        said = Fault.decode(decision)
        self.journal.write(epoch, "aborted", fault=decision)
        self._undo(said)
        return self._outcome(said), None

    def abort(self, reason: str) -> None:
        """From another thread: end the waits on the new communicators, and in a move."""
        self.connections.abort(reason)
        if (built := self.built) is not None:
            built.groups.abort(reason)

    def _outcome(self, fault: Fault | None) -> Outcome:
        return Outcome(
            epoch=self.command.epoch,
            plan=self.command.plan,
            fault=fault,
            phases_s=self.phases_s,
            moved_bytes=self.moved_bytes,
            peak_bytes=self.peak_bytes,
            promised_bytes=self.promised_bytes,
        )

    def _phase(self, name: str, work: Callable[[], None]) -> None:
        self.record.doing = name
        self.on_phase(name)
        begin = time.monotonic()
        try:
            work()
        finally:
            self.phases_s[name] = time.monotonic() - begin

    def _gather(self, phase: str, value: object) -> dict[int, Any]:
        """Every member's value; raises what any of them failed with."""
        said = self.record.gather(
            f"{self.key}/{phase}", value, self.command.numbers(), self.deadline_s, stop=self._ended
        )
        for answer in said.values():
            if isinstance(answer, str) and answer:
                raise Fault.decode(answer)
        return said

    def _ended(self) -> Fault | None:
        """Why not to wait any longer."""
        decision = self.record.decided(f"{self.key}/decision")
        if decision is not None and decision != COMMIT:
            return Fault.decode(decision)
        return self.losses.among(self.command.members)

    def _heard(self, fault: Fault) -> Fault:
        """A broken connection is somebody's end: name whose."""
        if fault.code == PARTICIPANT_FAILED:
            return self.losses.among(self.command.members) or fault
        return fault

    # -- offer --------------------------------------------------------------------------------------------------------

    def _offer(self) -> None:
        vetoes = [text for hook in self.quiesce if (text := hook(self.command))]
        old = self.old if self.old is not None and self.old.version == self.command.version else None
        if old is None:
            self.old = None
        self.journal.write(self.command.epoch, "quiesced", veto="; ".join(vetoes), holds=old is not None)
        mine = _Offer(
            base=self.base,
            loop=dict(old.loop) if old is not None else None,
            states=_states(old) if old is not None else {},
            had=self.had,
            veto="; ".join(vetoes),
        )
        said: dict[int, _Offer] = self._gather("offer", mine)
        for number, offer in said.items():
            if offer.veto:
                raise Fault(VETOED, f"not now: {offer.veto}", where=f"process {number}")
            if offer.base != self.command.base:
                text = f"it served epoch {offer.base}, not {self.command.base}"
                raise Fault(WRONG_STATE, text, where=f"process {number}")
        if self.command.loop is not None:
            self.loop = self.command.loop
        else:
            self.loop = _same("the loop's state", {n: o.loop for n, o in said.items() if o.loop is not None}) or {}
        names = dict.fromkeys(name for o in said.values() for name in o.states)
        self.states: dict[str, Any] = {
            name: united(f"the job state of {name}", {n: o.states[name] for n, o in said.items() if name in o.states})
            for name in names
        }

        # Not a fresh start, nor weights from an engine: whoever had the state is gone.
        had = {name for o in said.values() for name in o.had} & {s.name for s in self.command.plan.owners()}
        if lost := sorted(name for name in had if name not in self.states and not self._is_cache(name)):
            raise Fault(WRONG_STATE, f"{', '.join(lost)}: nobody who is left holds any of it", where="job")

    def _probe(self) -> None:
        """Only once all are here: it is collective on the communicators of the old plan."""
        if not any(bound.probe is not None for bound in self.stages.values()):
            return
        mine = self._figures(self.serving) if self.serving is not None else {}
        said: dict[int, dict[str, tuple[float, ...]]] = self._gather("probed", mine)
        self.before = {name: _first(figures.get(name) for figures in said.values()) for name in self.stages}

    def _figures(self, built: Built) -> dict[str, tuple[float, ...]]:
        return {
            name: tuple(map(float, probe(built.adapters[name], view)))
            for name, view in built.views.items()
            if (probe := self.stages[name].probe) is not None
        }

    def _is_cache(self, stage: str) -> bool:
        bound = self.stages.get(stage)
        return bound is not None and bound.cache

    def _source(self, stage: str) -> str | None:
        """The stage whose state becomes ``stage``'s: itself, else the one that trains the model, else any of it."""
        return source_of(stage, self.states)

    def _state_for(self, stage: str) -> Mapping[str, Any] | None:
        source = self._source(stage)
        if source is None:
            return None
        state: Mapping[str, Any] = self.states[source]
        return state if source == stage else weights_alone(state)

    # -- prepare, move, finish ----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        command = self.command
        groups = Groups(
            self.record.store, command.epoch, self.record.me, deadline_s=self.deadline_s, address=self.address
        )
        self.built = Built(groups)
        problem = ""
        try:
            for stage in command.plan.owners():
                bound = self.stages.get(stage.name)
                place = groups.place(stage, command.process_of(bound.part if bound is not None else ""))
                if place is None:
                    continue
                if bound is None:
                    raise Fault(CANNOT_START, f"{stage.name} is bound to nothing here", where=self.record.where)
                state = self._state_for(stage.name)
                view = View(
                    plan=command.plan, stage=stage, place=place, job_state=state, loop=self.loop, epoch=command.epoch
                )
                adapter = bound.build(view)
                prepare = getattr(adapter, "prepare", None)
                if prepare is not None and state is not None and state.get("optimizer"):
                    prepare(state)
                self.built.views[stage.name], self.built.adapters[stage.name] = view, adapter
        except Exception as error:
            fault = Fault.of(error, self.record.where)
            groups.abort(fault.text)  # whoever waits for this process in a builder's collective waits no longer
            problem = fault.encode()
        self._gather("prepared", problem)
        self.journal.write(command.epoch, "prepared", stages=list(self.built.views))

    def _move(self) -> None:
        assert self.built is not None
        numbers = self.command.numbers()
        for stage in self.command.plan.owners():
            source = self._source(stage.name)
            if source is None or self._is_cache(stage.name):
                continue
            held = self.old.held(source) if self.old is not None else ()
            adapter = self.built.adapters.get(stage.name)
            try:
                name = f"{self.key}/move/{stage.name}"
                prepared = prepare_among(
                    tuple(each.binding for each in held),
                    adapter.bind if adapter is not None else None,
                    tensors_of(self.command.plan.model(stage.model)),
                    store=self.record.store,
                    name=name,
                    rank=numbers.index(self.record.me),
                    size=len(numbers),
                    drop=() if source == stage.name else (ALL,),
                    model=stage.model,
                    deadline_s=self.deadline_s,
                    stop=self._ended,
                )
                if self.command.rehearsal:
                    continue
                report = prepared.run(self.record.store, name, self.deadline_s, self.connections)
            except (MoveError, ExecutionFailed) as error:
                fault = error.fault if isinstance(error, ExecutionFailed) else Fault(WRONG_STATE, str(error))
                raise Fault(fault.code, f"{stage.name}: {fault.text}", where=fault.where or "job") from None
            self.moved_bytes += report.received_bytes
            for (_, peak, host, _), (_, promised) in zip(report.peaks, report.promised, strict=True):
                self.peak_bytes = max(self.peak_bytes, peak + host)
                self.promised_bytes = max(self.promised_bytes, promised + host)
        self.journal.write(self.command.epoch, "moved", bytes=self.moved_bytes)

    def _finish(self) -> None:
        assert self.built is not None
        problem = ""
        try:
            for name, adapter in self.built.adapters.items():
                state = self._state_for(name)
                if state is None or self._is_cache(name):
                    continue
                adapter.finish(dict(state))
                for condition in adapter.checklist():
                    if (wrong := condition.check()) is not None:
                        raise Fault(WRONG_AFTER, f"{name}: {condition.name}: {wrong}", where=self.record.where)
            self._compare(self._figures(self.built) if any(self.before.values()) else {})
        except Exception as error:
            problem = Fault.of(error, self.record.where).encode()
            self.built.groups.abort("the new objects are wrong")
        self._gather("finished", problem)

    def _compare(self, after: Mapping[str, Sequence[float]]) -> None:
        for name, figures in after.items():
            before, most = self.before.get(name), self.stages[name].tolerance
            if before is None:
                continue
            if len(before) != len(figures):
                text = f"{name}: the probe gave {len(before)} figures before and {len(figures)} after"
                raise Fault(WRONG_AFTER, text, where=self.record.where)
            for number, (a, b) in enumerate(zip(before, figures, strict=True)):
                if not abs(a - b) <= most * max(abs(a), abs(b), 1e-6):
                    text = f"{name}: figure {number} of the probe was {a:.6g} and is {b:.6g}"
                    raise Fault(WRONG_AFTER, text, where=self.record.where)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _vote(self) -> None:
        self.journal.write(self.command.epoch, "voted")
        self._gather("vote", "")

    def _decide(self, fault: Fault | None) -> str:
        self.on_phase("decide")
        if fault is None:
            self.record.doing = "decide"
        wish = COMMIT if fault is None else fault.encode()
        try:
            return str(self.record.first(f"{self.key}/decision", wish))
        except Fault as lost:  # with the store: whether the others committed nobody can say here
            self.journal.write(self.command.epoch, "undecided", fault=lost.encode())
            raise

    def _undo(self, fault: Fault) -> None:
        """Nothing of the new plan stays."""
        if self.built is not None:
            self.built.adapters.clear()
            self.built.views.clear()
            self.built.groups.abort(fault.text)
            self.built.groups.close(0.0)
            self.built = None
        # The same in all processes, wherever each of them stood: a rehearsal has no probe.
        probes = not self.command.rehearsal and any(bound.probe is not None for bound in self.stages.values())
        if self.serving is not None and probes and self.losses.among(self.command.members) is None:
            # Some may have begun the probe and some not: what stands where on the old connections nobody knows.
            with suppress(Fault):  # a member is gone: the next collective says so
                self.serving.groups.renew(f"{self.command.epoch}-aborted")


def source_of(stage: str, stages: Iterable[str]) -> str | None:
    """Which of ``stages`` has what becomes ``stage``'s: itself, else the one that trains the model, else any of it."""
    model = stage.partition(".")[0]
    others = [name for name in stages if name.partition(".")[0] == model]
    if stage in others:
        return stage
    return next((name for name in others if name.endswith(".train")), others[0] if others else None)


def weights_alone(state: Mapping[str, Any]) -> dict[str, Any]:
    """A job state for objects that do not train."""
    return {**state, "optimizer": {}, "scheduler": None, "scaler": None}


def tensors_of(model: Model) -> tuple[LogicalTensor, ...]:
    return logical_tensors(model.arch, model.head, model.lora)


def _states(old: Snapshot) -> dict[str, Any]:
    """Job states by stage, of this process and of a lost one whose parts it keeps."""
    found = {}
    for name in dict.fromkeys((*old.stages, *old.ward)):
        said = {number: dict(held.job_state) for number, held in enumerate(old.held(name))}
        found[name] = united(f"the job state of {name}", said)
    return found


def _same(what: str, said: Mapping[int, Any]) -> Any:
    """The one value that all said; Fault where they differ. None: nobody said anything."""
    items = list(said.items())
    for number, value in items[1:]:
        if value != items[0][1]:
            text = f"{what} differs between processes {items[0][0]} and {number}"
            raise Fault(WRONG_STATE, text, where="job")
    return items[0][1] if items else None


def united(what: str, said: Mapping[int, Any]) -> Any:
    """Of mappings all keys that any process has (a pipeline stage knows the parameters of its own layers); what several
    have must be the same."""
    items = list(said.items())
    first, found = items[0]
    for number, value in items[1:]:
        if isinstance(found, Mapping) and isinstance(value, Mapping):
            both = {first: found, number: value}
            found = {
                key: united(f"{what}: {key}", {n: v[key] for n, v in both.items() if key in v})
                for key in dict.fromkeys((*found, *value))
            }
        elif found != value:
            raise Fault(WRONG_STATE, f"{what} differs between processes {first} and {number}", where="job")
    return found


def _first(values: Any) -> Any:
    return next((value for value in values if value is not None), None)
