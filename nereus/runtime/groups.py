"""Communicators of one world epoch over gloo, without torch's default group.

A change of layout needs new communicators while the old ones still stand, among processes that come and go. torch's
default group can do neither: it is one, and its ranks are fixed. So every epoch has a ``Groups`` of its own over the
job's store; it knows every communicator that it made, and ends them all.

    groups = Groups(store, epoch=3, me=1)
    world = groups.make("world", (0, 1, 2, 3))
    place = groups.place(stage, process_of)      # coordinate in a stage, and a communicator along each axis
    place.tp.all_reduce(tensor)
    groups.close()                               # or groups.abort("why"), also from another thread

Ends of waits: ``abort`` ends every wait on a communicator, here and in the peers, within milliseconds
(``communicator.py``); the reason stands in the store for them. A peer that neither speaks nor closes (a stopped
process) costs its peers their deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from nereus.ir.cluster import Device
from nereus.ir.layout import layout_of
from nereus.ir.plan import Stage
from nereus.runtime.communicator import Communicator, gloo_device
from nereus.runtime.coordinates import Coordinates
from nereus.runtime.faults import DEADLINE, PARTICIPANT_FAILED, Fault, first_line

#: Untyped in part.
dist: Any = torch.distributed

AXES = ("tp", "cp", "pp", "dp")

#: A process that only saw a connection close waits this long for the reason.
_HEARSAY_S = 0.5
_POLL_S = 0.003
_FAULT = "fault"


class Group:
    """A communicator: ``members`` (process numbers) in rank order, this process is ``rank``.

    Collectives work in place, end by the deadline at the latest, and raise Fault. With one member they do nothing.
    All members call them in the same order; one thread of a process at a time.
    """

    def __init__(self, owner: Groups, name: str, members: tuple[int, ...], held: Communicator | None):
        self.name, self.members = name, members
        self.rank, self.size = members.index(owner.me), len(members)
        self._owner, self._held = owner, held

    def __repr__(self) -> str:
        return f"Group({self.name}: {self.rank} of {list(self.members)})"

    @property
    def raw(self) -> Any:
        """torch's ProcessGroupGloo; None with one member. Raises Fault once closed or aborted."""
        self._owner.check(self)
        return self._held.raw if self._held is not None else None

    def all_reduce(self, data: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """``data`` itself, now the sum (``max``) over all members."""
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
            self._run("adding up", lambda raw: raw.allreduce([data], options))
        return data

    def all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Every member's ``data`` (equal shapes, contiguous), by rank."""
        if self.size == 1:
            return [data]
        parts = [torch.empty_like(data) for _ in self.members]
        self._run("gathering", lambda raw: raw.allgather([parts], [data]))
        return parts

    def broadcast(self, data: torch.Tensor, root: int = 0) -> torch.Tensor:
        """``data`` itself, now that of rank ``root``."""
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._run("handing out", lambda raw: raw.broadcast([data], options))
        return data

    def send(self, data: torch.Tensor, to: int, tag: int = 0) -> None:
        self._run(f"sending to process {self.members[to]}", lambda raw: raw.send([data], to, tag))

    def receive(self, data: torch.Tensor, source: int, tag: int = 0) -> torch.Tensor:
        self._run(f"receiving from process {self.members[source]}", lambda raw: raw.recv([data], source, tag))
        return data

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1))

    def _run(self, doing: str, start: Callable[[Any], Any]) -> None:
        self._owner.check(self)
        held, fault = self._held, None
        try:
            work = start(held.raw if held is not None else None)
            work.wait(timedelta(seconds=self._owner.deadline_s))
        except RuntimeError as error:
            # Made here and raised below: a traceback through gloo's frames would keep its connections open.
            fault = self._owner.fault(self, error, doing)
        if fault is not None:
            raise fault

    def _shut(self) -> None:
        """End the connections, whoever waits on them."""
        if (held := self._held) is not None:
            held.abort()

    def _drop(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.drop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands in a stage; a communicator along each axis. ``everyone``: all of the stage's."""

    stage: str
    at: Coordinates
    tp: Group
    cp: Group
    pp: Group
    dp: Group
    everyone: Group


class Groups:
    """Every communicator of one epoch in this process (number ``me`` of the job).

    ``store``: torch's, shared by the job's processes. ``epoch``: names are never used twice, so a number neither.
    ``deadline_s``: of every wait. ``address``: of this machine among the others.
    """

    def __init__(
        self, store: Any, epoch: int | str, me: int, *, deadline_s: float = 60.0, address: str = "127.0.0.1"
    ) -> None:
        self.epoch, self.me, self.deadline_s = epoch, me, deadline_s
        self._base = store
        self._store = _of_epoch(store, epoch)
        # Its own connection: an abort must not queue behind a wait of the thread that it is to end.
        self._words = self._store.clone() if hasattr(self._store, "clone") else self._store
        self._device = gloo_device(address)
        self._lock = threading.Lock()
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._ended: Fault | None = None

    @property
    def where(self) -> str:
        return f"process {self.me}"

    def __len__(self) -> int:
        """Open communicators (those of one member are none)."""
        with self._lock:
            return sum(group._held is not None for group in self._groups.values())

    def make(self, name: str, members: Sequence[int]) -> Group:
        """The communicator ``name`` of ``members``, one of which is this process; made once, then the same object.

        Every member calls it; processes that share several make them in the same order. Raises Fault where a member
        does not come within the deadline, or another process has aborted the epoch.
        """
        chosen = tuple(members)
        if self.me not in chosen or len(set(chosen)) != len(chosen):
            raise ValueError(f"group {name}: process {self.me} is to make it, its members are {list(chosen)}")
        with self._lock:
            found = self._groups.get((name, chosen))
        if found is not None:
            return found
        group = Group(self, name, chosen, None if len(chosen) == 1 else self._connected(name, chosen))
        with self._lock:
            self._groups[name, chosen] = group
            ended = self._ended
        if ended is not None:  # aborted while it was made
            group._shut()
            raise ended
        return group

    def place(self, stage: Stage, process_of: Mapping[Device, int]) -> Place | None:
        """This process's place in ``stage``, with its communicators; None where it has none of the stage's devices.

        Equal member lists share a communicator, in whatever stage: stages that share processes run one after another.
        """
        ranks = [process_of[device] for device in stage.ranks]
        mine = [rank for rank, process in enumerate(ranks) if process == self.me]
        if not mine:
            return None
        if len(mine) > 1:
            raise ValueError(f"{stage.name}: process {self.me} has {len(mine)} of its ranks; one process a rank")
        coords = {axis: [int(value) for value in values] for axis, values in layout_of(stage).coordinates().items()}
        here = {axis: coords[axis][mine[0]] for axis in AXES}
        groups, at = {}, {}
        for axis in AXES:
            others = [other for other in AXES if other != axis]
            line = [r for r in range(len(ranks)) if all(coords[other][r] == here[other] for other in others)]
            line.sort(key=coords[axis].__getitem__)
            groups[axis] = self.make("ranks", [ranks[r] for r in line])
            at[axis] = (here[axis], len(line))
        return Place(stage=stage.name, at=Coordinates(**at), everyone=self.make("ranks", ranks), **groups)

    def close(self, deadline_s: float = 10.0) -> None:
        """End all in good order: a connection goes only once all its members are done with it, or at the deadline."""
        with self._lock:
            groups, ended = list(self._groups.values()), self._ended
            self._groups.clear()
            self._ended = ended or Fault(PARTICIPANT_FAILED, "the communicators are closed", where=self.where)
        if ended is None:
            self._wait_for_members([group for group in groups if group._held is not None], deadline_s)
        for group in groups:
            group._drop()

    def abort(self, reason: str) -> None:
        """End every wait on every communicator, here and in the peers, which read ``reason``. Any thread may call it;
        ``close`` still frees what is left."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = Fault(PARTICIPANT_FAILED, f"communication was given up: {reason}", where=self.where)
            groups, told = list(self._groups.values()), self._ended
        with suppress(RuntimeError):  # the store may have gone with the process that kept it
            _tell(self._words, told)
        for group in groups:
            group._shut()

    def renew(self, epoch: int | str) -> None:
        """The same communicators over new connections, under a name that was not used before: after a failure nobody
        knows which collective of the old ones stands where, and two that do not match end a process. All members call
        it. Raises Fault; then they stay aborted."""
        self.abort("the connections are made anew")
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            group._drop()
        self.epoch = epoch
        self._store = _of_epoch(self._base, epoch)
        self._words = self._store.clone() if hasattr(self._store, "clone") else self._store
        with self._lock:
            ended, self._ended = self._ended, None
        try:
            for group in groups:
                if group.size > 1:
                    group._held = self._connected(group.name, group.members)
        except Fault:
            with self._lock:
                self._ended = ended
            raise

    def check(self, group: Group) -> None:
        """Raises Fault once this epoch is closed or aborted here."""
        if self._ended is not None:
            raise Fault(self._ended.code, f"{self._ended.text} ({group.name})", where=self._ended.where)

    def fault(self, group: Group, error: RuntimeError, doing: str) -> Fault:
        """What ended a wait, in our words: the reason of whoever gave up first, where one was left."""
        text = str(error)
        if "imed out" in text or "imeout" in text:
            return Fault(DEADLINE, f"no answer within {self.deadline_s:g} s while {doing}", where=self.where)
        closed = "losed" in text or "reset" in text
        end = time.monotonic() + (_HEARSAY_S if closed else 0.0)
        while True:
            if (said := self._said()) is not None:
                return said
            if time.monotonic() >= end:
                detail = "the connection was closed" if closed else first_line(error)
                return Fault(PARTICIPANT_FAILED, f"{detail} while {doing} ({group.name})", where=self.where)
            time.sleep(_POLL_S)

    def _said(self) -> Fault | None:
        with suppress(RuntimeError, ValueError):
            if self._words.check([_FAULT]):
                return Fault.decode(self._words.get(_FAULT).decode())
        return self._ended

    def _connected(self, name: str, members: tuple[int, ...]) -> Communicator:
        """torch's group, once all members have come: only then can no wait inside its constructor be long."""
        key = f"{name}/{'-'.join(map(str, members))}"
        fault: Fault | None = None
        try:
            self._gather_members(f"{key}/here", members, name)
            return Communicator(
                dist.PrefixStore(key, self._store),
                members.index(self.me),
                len(members),
                timeout_s=self.deadline_s,
                device=self._device,
            )
        except RuntimeError as error:
            fault = Fault(PARTICIPANT_FAILED, f"group {name} was not made: {first_line(error)}", where=self.where)
        raise self._said() or fault

    def _gather_members(self, key: str, members: tuple[int, ...], name: str) -> None:
        self._store.set(f"{key}/{self.me}", "1")
        end = time.monotonic() + self.deadline_s
        missing = list(members)
        while missing := [m for m in missing if not self._store.check([f"{key}/{m}"])]:
            if (said := self._said()) is not None:
                raise said
            if time.monotonic() > end:
                who = ", ".join(map(str, missing))
                text = f"group {name}: no word from process {who} within {self.deadline_s:g} s"
                raise Fault(DEADLINE, text, where=self.where)
            time.sleep(_POLL_S)

    def _wait_for_members(self, groups: Sequence[Group], deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        with suppress(RuntimeError):
            keys = {f"{g.name}/{'-'.join(map(str, g.members))}/closed": g.size for g in groups}
            for key in keys:
                self._store.add(key, 1)
            for key, size in keys.items():
                while self._store.add(key, 0) < size and time.monotonic() < end and self._said_by_another() is None:
                    time.sleep(_POLL_S)

    def _said_by_another(self) -> Fault | None:
        return Fault.decode(self._words.get(_FAULT).decode()) if self._words.check([_FAULT]) else None


def give_up(store: Any, epoch: int | str, fault: Fault) -> None:
    """Tell whoever makes communicators of ``epoch`` that this process never will. RuntimeError where the store is
    gone."""
    _tell(_of_epoch(store, epoch), fault)


def _of_epoch(store: Any, epoch: int | str) -> Any:
    return dist.PrefixStore(f"nereus/groups/{epoch}", store)


def _tell(store: Any, fault: Fault) -> None:
    store.compare_set(_FAULT, "", fault.encode())
