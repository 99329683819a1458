"""Move state between live objects: what adapters describe before is brought into what they describe after.

Every process of a group says what it holds (or nothing) and what it wants (or nothing). One process compiles the
exchange, each executes its part on the frameworks' own memory. What is read is never written: until the exchange has
been verified everywhere the old objects are whole, and after a failure they still are. Whatever goes wrong in one
process before that is told to all, so that none waits for one that has given up.
"""

from __future__ import annotations

import itertools
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed

from nereus.ir.cluster import Device
from nereus.ir.described import primary_fragments
from nereus.ir.layout import IntArray
from nereus.ir.program import Program, StorageSpec
from nereus.ir.tensor import LogicalTensor
from nereus.runtime.account import ExecutionReport
from nereus.runtime.adapters.base import BindError, Binding
from nereus.runtime.codec import decode, encode
from nereus.runtime.executor import ExecutorOptions, execute
from nereus.runtime.faults import Fault, first_line
from nereus.runtime.footprint import check_memory, row_starts, zero_padding
from nereus.runtime.live_compile import (
    ALL,
    DEFAULT_GPU,
    MoveError,
    Offer,
    Part,
    Remembered,
    answers,
    by_dtype,
    fingerprint,
)
from nereus.runtime.relocate import Home, homes, relocate
from nereus.runtime.replicas import Sums, check_repeats, difference, sums
from nereus.runtime.state import DeviceState
from nereus.runtime.transports.choice import TCP, Kept, between
from nereus.runtime.transports.inprocess import InProcess

__all__ = ["ALL", "MoveError", "move", "move_here"]

dist: Any = torch.distributed

_POLL_S, _LONGEST_POLL_S = 0.0005, 0.005

#: What a process holds or wants, or how to bind it.
Side = Binding | Callable[[], Binding | None] | None

#: What it holds may be several things, each with parts of tensors that others of them have too (chunks of files).
Holding = Side | Sequence[Binding]

#: How many moves a group has made: all its processes count alike.
_counts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


#: What this process compiled before: a change back, or the same sync after it, costs no compilation.
_remembered = Remembered()


@dataclass(frozen=True, slots=True)
class _Word:
    """What a process says first. ``fingerprint``: of its offer and of all else that the compiler is given;
    ``known``: keys of moves that it has its part of."""

    fingerprint: str
    host: str
    fault: str
    known: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Bound:
    """A part on its process's memory. ``sums``: of what is shared."""

    programs: tuple[Program, ...]
    states: dict[Device, DeviceState]
    sums: Sums


def move(
    old: Holding,
    new: Side,
    tensors: Sequence[LogicalTensor],
    group: Any = None,
    *,
    drop: Sequence[str] = (),
    check_replicas: bool = True,
    model: str = "model",
    deadline_s: float = 60.0,
    gpu: str = DEFAULT_GPU,
    transport: str = TCP,
) -> ExecutionReport:
    """Fill ``new`` of all processes of ``group`` (None: the default group) from ``old`` of all of them, bit for bit.

    Called by every process of the group. ``tensors``: the model's logical tensors. Elements of new storages that are
    no state (padding) become zero. ``old`` and ``new`` may be functions that bind, so that a failure to bind reaches
    every process at once. ``drop``: slots that nobody has to want (``ALL``: any); it counts for all processes if one
    of them says it. ``check_replicas``: compare the copies of what is wanted before anything is written; off if one
    process says so. ``transport``: one of ``TRANSPORTS``, the same in every process.

    Raises MoveError, the same in every process, before anything is written; ExecutionFailed where an execution fails:
    then ``old`` is untouched, and ``new`` is not to be used.
    """
    # Everything through the group's own store and ranks: a process may stand in worlds of several jobs, where torch's
    # object collectives would take its rank in its own job's world for its rank here.
    group = dist.group.WORLD if group is None else group
    store = dist.distributed_c10d._get_process_group_store(group)
    name = f"nereus/move/{next(_counts.setdefault(group, itertools.count()))}"
    prepared = prepare_among(
        old,
        new,
        tensors,
        store=store,
        name=name,
        rank=group.rank(),
        size=group.size(),
        drop=drop,
        check_replicas=check_replicas,
        model=model,
        deadline_s=deadline_s,
        gpu=gpu,
    )
    return prepared.run(store, name, deadline_s, Connections(keep=False, kind=transport))


class Connections:
    """Between the processes of a job: made for its first move, there for the next ones. Not for two at a time.
    ``stop``: asked in every wait, ten times a second; what it returns is raised. ``kind``: which transport."""

    def __init__(self, *, keep: bool = True, stop: Callable[[], Fault | None] = lambda: None, kind: str = TCP) -> None:
        self._keep, self._stop, self._make = keep, stop, between(kind)
        self._made: Kept | None = None

    def transport(self, move: Prepared, store: Any, name: str, deadline_s: float) -> Kept:
        """Raises Fault where the processes do not find each other."""
        process_of = {device: at for at, own in enumerate(move.part.devices) for device in own}
        if self._keep and self._made is not None and self._made.again(name, process_of):
            return self._made
        self.close()
        self._made = self._make(
            store=store,
            name=name,
            process=move.rank,
            num_processes=move.size,
            process_of=process_of,
            deadline_s=deadline_s,
            address=move.address,
            keep=self._keep,
            stop=self._stop,
        )
        return self._made

    def abort(self, reason: str) -> None:
        """From another thread: whatever a move waits for ends at once, with ``reason``."""
        if (made := self._made) is not None:
            made.abort(reason)

    def close(self) -> None:
        """Once all processes are done with the last move."""
        if self._made is not None:
            self._made.drop()
            self._made = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prepared:
    """A move that is compiled and bound to this process's memory: it may run again and again, as long as the objects
    keep their memory."""

    part: Part
    programs: tuple[Program, ...]
    memory: dict[tuple[Device, int], torch.Tensor]
    after: Binding | None
    rank: int
    size: int
    address: str
    bases: dict[Device, IntArray] = field(default_factory=dict)

    def run(self, store: Any, name: str, deadline_s: float, connections: Connections | None = None) -> ExecutionReport:
        """All processes at once. ``name``: of this run, unique in the store. ``connections``: of an earlier run, or for
        a later one. Raises ExecutionFailed."""
        transport = (connections or Connections(keep=False)).transport(self, store, name, deadline_s)
        states = {program.device: DeviceState(program.device) for program in self.programs}
        for program in self.programs:
            for spec in program.storages:
                if spec.role == "old":
                    states[program.device].put(spec, self.memory[program.device, spec.id])
        programs = {program.device: program for program in self.programs}
        report = _execute(programs, states, self.memory, transport, deadline_s, self.bases)
        _after([self.after] if self.after else [])
        return replace(report, dropped=self.part.dropped)


def prepare_among(
    old: Holding,
    new: Side,
    tensors: Sequence[LogicalTensor],
    *,
    store: Any,
    name: str,
    rank: int,
    size: int,
    drop: Sequence[str] = (),
    check_replicas: bool = True,
    model: str = "model",
    deadline_s: float = 60.0,
    gpu: str = DEFAULT_GPU,
    stop: Callable[[], Exception | None] = lambda: None,
) -> Prepared:
    """All of ``move`` but the move, among ``size`` processes that share ``store`` and need no group. ``name``: of this
    move, unique in the store. ``stop``: asked while this process waits for others' words; what it returns is raised.
    Raises MoveError, the same in every process."""
    said = _Exchange(dist.PrefixStore(name, store), rank, size, deadline_s, stop)
    broken: Exception | None = None
    before: tuple[Binding, ...] = ()
    after: Binding | None = None
    offer = Offer(socket.gethostname(), None, None)
    try:
        before, after = _bindings(old), _binding(new)
        _check(before, [after] if after else [])
        offer = _offer(offer.host, before, after, drop, check_replicas)
    except Exception as error:
        broken, offer = error, replace(offer, fault=_text(error))
    own = "" if offer.fault else fingerprint(offer, tuple(tensors), model, gpu)
    words = said.gather("word", _Word(own, offer.host, offer.fault, _remembered.keys(rank)))
    _raise_faults([word.fault for word in words], broken)
    key = fingerprint(*(word.fingerprint for word in words))
    if all(key in word.known for word in words):
        part = _remembered.get(key, rank)
    else:
        part = _compiled(said, offer, tuple(tensors), model, gpu)
        _remembered.put(key, rank, part)
    memory: dict[tuple[Device, int], torch.Tensor] = {}
    ready: tuple[str, Sums] = "", {}
    try:
        bound = _bound(part, before, after, memory)
        ready = "", bound.sums
    except Exception as error:
        broken, ready = error, (_text(error), {})
    said_ready = said.gather("ready", ready)
    _raise_faults([fault for fault, _ in said_ready], broken)
    if found := difference([own for _, own in said_ready]):
        raise MoveError(found)
    return Prepared(
        part=part,
        programs=bound.programs,
        memory=memory,
        after=after,
        rank=rank,
        size=size,
        address=_address([word.host for word in words]),
    )


def _compiled(said: _Exchange, offer: Offer, tensors: tuple[LogicalTensor, ...], model: str, gpu: str) -> Part:
    """This process's part; rank 0 compiles for all. Raises MoveError, the same in every process."""
    offers = said.gather("offer", offer)
    broken: Exception | None = None
    parts: Sequence[Part | str] | None = None
    if said.rank == 0:
        try:
            parts = answers(offers, tensors, model, gpu)
        except Exception as error:  # a fault here must not leave the others waiting
            broken, parts = error, [f"the exchange could not be compiled: {error!r}"] * said.size
    answer = said.scatter("answer", parts)
    if isinstance(answer, str):
        raise MoveError(answer) from broken
    part: Part = answer
    return part


def _binding(side: Side) -> Binding | None:
    return side() if callable(side) else side


def _bindings(side: Holding) -> tuple[Binding, ...]:
    if isinstance(side, Sequence):
        return tuple(side)
    found = _binding(side)
    return () if found is None else (found,)


def _offer(host: str, old: Sequence[Binding], new: Binding | None, drop: Sequence[str], check_replicas: bool) -> Offer:
    return Offer(
        host,
        old[0].state if old else None,
        new.state if new else None,
        tuple(binding.state for binding in old[1:]),
        tuple(drop),
        check_replicas,
    )


def _check(old: Sequence[Binding], new: Sequence[Binding]) -> None:
    check_memory(old, new)
    for binding in old:
        check_repeats(binding)


def _text(error: Exception) -> str:
    """A framework's own errors say what they are by their type alone."""
    return str(error) if isinstance(error, BindError | MoveError) else repr(error)


def _raise_faults(faults: Sequence[str], own: Exception | None) -> None:
    """The same MoveError in every process."""
    said = [f"process {number}: {fault}" for number, fault in enumerate(faults) if fault]
    if said:
        raise MoveError("; ".join(said)) from own


class _Exchange:
    """Objects over a group's store. Every wait ends with MoveError at the deadline."""

    def __init__(
        self, store: Any, rank: int, size: int, deadline_s: float, stop: Callable[[], Exception | None]
    ) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._deadline_s, self._stop = deadline_s, stop

    def gather(self, key: str, value: object) -> list[Any]:
        """Every process's value, by rank."""
        self._put(f"{key}/{self.rank}", value)
        return [self._get(f"{key}/{number}", number) for number in range(self.size)]

    def scatter(self, key: str, values: Sequence[object] | None) -> Any:
        """What rank 0 has for this process."""
        for number, value in enumerate(values or ()):
            self._put(f"{key}/{number}", value)
        return self._get(f"{key}/{self.rank}", 0)

    def _put(self, key: str, value: object) -> None:
        self._store.set(key, encode(value))

    def _get(self, key: str, of: int) -> Any:
        end, pause = time.monotonic() + self._deadline_s, _POLL_S
        while not self._there(key, of):
            if (error := self._stop()) is not None:
                raise error
            if time.monotonic() > end:
                raise MoveError(f"process {of} said nothing within {self._deadline_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        return decode(self._store.get(key))

    def _there(self, key: str, of: int) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            text = f"the store does not answer while process {of} is waited for: {first_line(error)}"
        raise MoveError(text)


def move_here(
    old: Sequence[Binding | Sequence[Binding] | None],
    new: Sequence[Binding | None],
    tensors: Sequence[LogicalTensor],
    *,
    drop: Sequence[str] = (),
    check_replicas: bool = True,
    model: str = "model",
    gpu: str = DEFAULT_GPU,
) -> ExecutionReport:
    """The same with all participants in this process: ``old[p]`` and ``new[p]`` are those of participant p. Raises
    BindError too, of any participant."""
    if len(old) != len(new) or not old:
        raise MoveError(f"{len(old)} old and {len(new)} new: every participant has an entry in both, None for nothing")
    held = [_bindings(each) for each in old]
    _check([a for own in held for a in own], [b for b in new if b])
    offers = [_offer("here", own, b, drop, check_replicas) for own, b in zip(held, new, strict=True)]
    parts = answers(offers, tuple(tensors), model, gpu)
    first = parts[0]
    if isinstance(first, str):
        raise MoveError(first)
    programs: dict[Device, Program] = {}
    states: dict[Device, DeviceState] = {}
    memory: dict[tuple[Device, int], torch.Tensor] = {}
    bound = [_bound(part, a, b, memory) for part, a, b in zip(parts, held, new, strict=True) if isinstance(part, Part)]
    if found := difference([each.sums for each in bound]):
        raise MoveError(found)
    for each in bound:
        programs.update((program.device, program) for program in each.programs)
        states.update(each.states)
    report = _execute(programs, states, memory, InProcess(), 60.0, {})
    _after([b for b in new if b])
    return replace(report, dropped=first.dropped)


# -- executing, in every process --------------------------------------------------------------------------------------


def _execute(
    programs: dict[Device, Program],
    states: dict[Device, DeviceState],
    memory: dict[tuple[Device, int], torch.Tensor],
    transport: Any,
    deadline_s: float,
    bases: dict[Device, IntArray],
) -> ExecutionReport:
    by_key = {
        id(spec): memory[device, spec.id] for device, p in programs.items() for spec in p.storages if spec.role == "new"
    }

    def give(spec: StorageSpec) -> torch.Tensor:
        return by_key[id(spec)]

    return execute(programs, states, transport, ExecutorOptions(deadline_s=deadline_s, allocate=give, bases=bases))


def _bound(
    part: Part, old: Sequence[Binding], new: Binding | None, memory: dict[tuple[Device, int], torch.Tensor]
) -> _Bound:
    """The part on this participant's memory, and the state that it starts from."""
    programs: list[Program] = []
    states: dict[Device, DeviceState] = {}
    shared: Sums = {}
    for number, program in enumerate(part.programs):
        sides = {"old": old[number] if number < len(old) else None, "new": new if number == 0 else None}
        found: dict[str, tuple[Binding, dict[tuple[str, str], Home]]] = {}
        for role, binding in sides.items():
            if binding is not None:
                state = by_dtype(binding.state)
                numel = [s.numel for s in state.storages]
                found[role] = (binding, homes(primary_fragments(state)[0], numel))
        home_of = {s.id: found[s.role][1][s.tensor, s.slot] for s in program.storages}
        bound = relocate(program, home_of)
        state_of = states[program.device] = DeviceState(program.device)
        for spec in bound.storages:
            data = found[spec.role][0].memory[home_of[spec.id].storage]
            memory[program.device, spec.id] = data
            if spec.role == "old":
                state_of.put(spec, data)
        here = {spec.id: memory[program.device, spec.id] for spec in program.storages}
        if number == 0:
            shared = sums(program, part.shared, home_of, here)
        programs.append(bound)
    return _Bound(tuple(programs), states, shared)


def _after(new: Sequence[Binding]) -> None:
    """Repeats of what arrived, and zeros where a storage holds no state."""
    for binding in new:
        for copy, first in primary_fragments(binding.state)[1]:
            for begin, count in row_starts(copy):
                source = binding.memory[first.storage].narrow(0, first.offset(begin), count)
                binding.memory[copy.storage].narrow(0, copy.offset(begin), count).copy_(source)
    zero_padding(new)


def _address(hosts: Sequence[str]) -> str:
    """One machine: the loopback; several: this one's address among them."""
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())
