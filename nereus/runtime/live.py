"""Move state between live objects: what adapters describe before is brought into what they describe after.

Every process of a group says what it holds (or nothing) and what it wants (or nothing). One process compiles the
exchange, each executes its part on the frameworks' own memory. What is read is never written: until the exchange has
been verified everywhere the old objects are whole, and after a failure they still are.
"""

from __future__ import annotations

import itertools
import pickle
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from nereus.ir.cluster import Cluster, Device, GpuType, Node
from nereus.ir.described import DescribedLayout, DescriptionError, describe_layout, primary_fragments
from nereus.ir.fragment import RankState
from nereus.ir.holdings import Holdings, StateSet, Topology, join_clusters
from nereus.ir.layout import BoundLayout
from nereus.ir.plan import Slot
from nereus.ir.program import Program, StorageSpec
from nereus.ir.tensor import LogicalTensor
from nereus.models.hardware import gpu_type
from nereus.passes.emit import emit_program
from nereus.passes.exchange import ExchangeError, compile_exchange
from nereus.runtime.account import ExecutionReport
from nereus.runtime.adapters.base import BindError, Binding
from nereus.runtime.executor import ExecutorOptions, execute
from nereus.runtime.faults import first_line
from nereus.runtime.footprint import check_memory, row_starts, zero_padding
from nereus.runtime.relocate import Home, homes, relocate
from nereus.runtime.state import DeviceState
from nereus.runtime.transports.gloo import Gloo
from nereus.runtime.transports.inprocess import InProcess

dist: Any = torch.distributed

#: Rates decide who sends what, by their ratios alone; this data sheet stands for any machine with fast links inside
#: nodes until the plan's own cluster is given.
DEFAULT_GPU = "h100-sxm-80gb"

#: How many moves a group has made: all its processes count alike.
_counts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class MoveError(RuntimeError):
    """The move cannot be made, or its descriptions do not fit; nothing was written."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one process brings: its machine, what it holds and what it wants."""

    host: str
    old: RankState | None
    new: RankState | None
    fault: str = ""  # why its memory cannot take part


def move(
    old: Binding | None,
    new: Binding | None,
    tensors: Sequence[LogicalTensor],
    group: Any = None,
    *,
    model: str = "model",
    deadline_s: float = 60.0,
    gpu: str = DEFAULT_GPU,
) -> ExecutionReport:
    """Fill ``new`` of all processes of ``group`` (None: the default group) from ``old`` of all of them, bit for bit.

    Called by every process of the group. ``tensors``: the model's logical tensors. Elements of new storages that are
    no state (padding) become zero. Raises BindError (where a process's own memory is at fault) or MoveError before
    anything is written, ExecutionFailed where an execution fails: then ``old`` is untouched, and ``new`` is not to be
    used.
    """
    # Everything through the group's own store and ranks: a process may stand in worlds of several jobs, where torch's
    # object collectives would take its rank in its own job's world for its rank here.
    group = dist.group.WORLD if group is None else group
    rank, size = group.rank(), group.size()
    store = dist.distributed_c10d._get_process_group_store(group)
    name = f"nereus/move/{next(_counts.setdefault(group, itertools.count()))}"
    said = _Exchange(dist.PrefixStore(name, store), rank, size, deadline_s)
    fault = ""
    try:
        check_memory([old] if old else [], [new] if new else [])
    except BindError as error:
        fault = str(error)
    offer = _Offer(socket.gethostname(), old.state if old else None, new.state if new else None, fault)
    offers = said.gather("offer", offer)
    if fault:
        raise BindError(fault)
    faults = [f"process {number}: {o.fault}" for number, o in enumerate(offers) if o.fault]
    if faults:  # known everywhere, so that nobody waits for a process that has given up
        raise MoveError("; ".join(faults))
    answers: list[Any] | None = None
    broken: Exception | None = None
    if rank == 0:
        try:
            answers = _answers(offers, tuple(tensors), model, gpu)
        except Exception as error:  # a fault here must not leave the others waiting
            broken, answers = error, [f"the exchange could not be compiled: {error!r}"] * size
    answer = said.scatter("answer", answers)
    if isinstance(answer, str):
        raise MoveError(answer) from broken
    program, devices = answer
    transport = Gloo(
        store=store,
        name=name,
        process=rank,
        num_processes=size,
        process_of={device: at for at, device in enumerate(devices)},
        deadline_s=deadline_s,
        address=_address(offers),
    )
    return _run(program, old, new, transport, deadline_s)


class _Exchange:
    """Objects over a group's store. Every wait ends with MoveError at the deadline."""

    def __init__(self, store: Any, rank: int, size: int, deadline_s: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._wait = timedelta(seconds=deadline_s)

    def gather(self, key: str, value: object) -> list[Any]:
        """Every process's value, by rank."""
        self._put(f"{key}/{self._rank}", value)
        return [self._get(f"{key}/{number}", number) for number in range(self._size)]

    def scatter(self, key: str, values: Sequence[object] | None) -> Any:
        """What rank 0 has for this process."""
        for number, value in enumerate(values or ()):
            self._put(f"{key}/{number}", value)
        return self._get(f"{key}/{self._rank}", 0)

    def _put(self, key: str, value: object) -> None:
        self._store.set(key, pickle.dumps(value))

    def _get(self, key: str, of: int) -> Any:
        try:
            self._store.wait([key], self._wait)
        except Exception as error:
            text = f"process {of} said nothing within {self._wait.total_seconds():g} s: {first_line(error)}"
            raise MoveError(text) from None
        return pickle.loads(self._store.get(key))


def move_here(
    old: Sequence[Binding | None],
    new: Sequence[Binding | None],
    tensors: Sequence[LogicalTensor],
    *,
    model: str = "model",
    gpu: str = DEFAULT_GPU,
) -> ExecutionReport:
    """The same with all participants in this process: ``old[p]`` and ``new[p]`` are those of participant p."""
    check_memory([a for a in old if a], [b for b in new if b])
    offers = [_Offer("here", a.state if a else None, b.state if b else None) for a, b in zip(old, new, strict=True)]
    answers = _answers(offers, tuple(tensors), model, gpu)
    if isinstance(answers[0], str):
        raise MoveError(answers[0])
    programs: dict[Device, Program] = {}
    states: dict[Device, DeviceState] = {}
    memory: dict[tuple[Device, int], torch.Tensor] = {}
    for (program, _), a, b in zip(answers, old, new, strict=True):
        programs[program.device], states[program.device] = _bound(program, a, b, memory)
    report = _execute(programs, states, memory, InProcess(), 60.0)
    _after([b for b in new if b])
    return report


# -- compiling, in one process ----------------------------------------------------------------------------------------


def _answers(offers: Sequence[_Offer], tensors: tuple[LogicalTensor, ...], model: str, gpu: str) -> list[Any]:
    """For every process its program and all devices, or a text for all of them."""
    try:
        return _compile(offers, tensors, model, gpu)
    except (DescriptionError, ExchangeError) as error:
        return [str(error)] * len(offers)


def _compile(offers: Sequence[_Offer], tensors: tuple[LogicalTensor, ...], model: str, gpu: str) -> list[Any]:
    devices = _devices(offers)
    topology = _topology(devices, gpu_type(gpu))
    sides: list[tuple[StateSet, ...]] = []
    for side in ("old", "new"):
        members = [(d, s) for d, s in zip(devices, (getattr(o, side) for o in offers), strict=True) if s is not None]
        sides.append((_state_set(side, members, tensors, model),) if members else ())
    old, new = (Holdings(sets=sets) for sets in sides)
    if not new.sets:
        raise DescriptionError("no process wants anything")
    if not old.sets:
        raise DescriptionError("no process holds anything")
    exchange = compile_exchange(old, new, topology, origin=repr([(o.old, o.new) for o in offers]).encode())
    index = topology.index()
    return [(emit_program(exchange, index[device]), devices) for device in devices]


def _devices(offers: Sequence[_Offer]) -> tuple[Device, ...]:
    names = {host: f"n{number}" for number, host in enumerate(dict.fromkeys(o.host for o in offers))}
    counts: dict[str, int] = {}
    found = []
    for offer in offers:
        node = names[offer.host]
        found.append(Device(node, counts.get(node, 0)))
        counts[node] = counts.get(node, 0) + 1
    return tuple(found)


def _topology(devices: Sequence[Device], gpu: GpuType) -> Topology:
    counts: dict[str, int] = {}
    for device in devices:
        counts[device.node] = counts.get(device.node, 0) + 1
    nodes = tuple(
        Node(
            name=name,
            gpu=gpu,
            num_gpus=count,
            host_mem_bytes=1 << 40,
            nic_bytes_per_s=gpu.default_nic_bytes_per_s * count,
        )
        for name, count in counts.items()
    )
    return join_clusters(Cluster(nodes=nodes), Cluster(nodes=nodes))


def _state_set(
    side: str, members: Sequence[tuple[Device, RankState]], tensors: tuple[LogicalTensor, ...], model: str
) -> StateSet:
    states = [_by_dtype(state) for _, state in members]
    layout: DescribedLayout = describe_layout(tensors, states, name=side)
    slots = dict.fromkeys(slot for state in states for slot in state.slots())
    return StateSet(
        stage=f"{model}@{side}",
        owner=side,  # another owner on either side: nothing is in place already
        model=model,
        tensors=tensors,
        bound=BoundLayout(layout=layout, ranks=tuple(device for device, _ in members)),
        slots=tuple(Slot(name=slot, dtype=slot.rpartition(":")[2]) for slot in slots),
    )


def _by_dtype(state: RankState) -> RankState:
    """Slots named with their dtype: a framework may keep a few tensors of a slot (norms, routers) in another one."""
    return replace(
        state,
        fragments=tuple(replace(f, slot=f"{f.slot}:{state.storages[f.storage].dtype}") for f in state.fragments),
    )


# -- executing, in every process --------------------------------------------------------------------------------------


def _run(
    program: Program, old: Binding | None, new: Binding | None, transport: Any, deadline_s: float
) -> ExecutionReport:
    memory: dict[tuple[Device, int], torch.Tensor] = {}
    bound, state = _bound(program, old, new, memory)
    report = _execute({program.device: bound}, {program.device: state}, memory, transport, deadline_s)
    _after([new] if new else [])
    return report


def _execute(
    programs: dict[Device, Program],
    states: dict[Device, DeviceState],
    memory: dict[tuple[Device, int], torch.Tensor],
    transport: Any,
    deadline_s: float,
) -> ExecutionReport:
    by_key = {
        id(spec): memory[device, spec.id] for device, p in programs.items() for spec in p.storages if spec.role == "new"
    }

    def give(spec: StorageSpec) -> torch.Tensor:
        return by_key[id(spec)]

    return execute(programs, states, transport, ExecutorOptions(deadline_s=deadline_s, allocate=give))


def _bound(
    program: Program, old: Binding | None, new: Binding | None, memory: dict[tuple[Device, int], torch.Tensor]
) -> tuple[Program, DeviceState]:
    """The program on this participant's memory, and the state that it starts from."""
    found: dict[str, tuple[Binding, dict[tuple[str, str], Home]]] = {}
    for role, binding in (("old", old), ("new", new)):
        if binding is not None:
            state = _by_dtype(binding.state)
            numel = [s.numel for s in state.storages]
            found[role] = (binding, homes(primary_fragments(state)[0], numel))
    home_of = {s.id: found[s.role][1][s.tensor, s.slot] for s in program.storages}
    bound = relocate(program, home_of)
    state_of = DeviceState(program.device)
    for spec in bound.storages:
        data = found[spec.role][0].memory[home_of[spec.id].storage]
        memory[program.device, spec.id] = data
        if spec.role == "old":
            state_of.put(spec, data)
    return bound, state_of


def _after(new: Sequence[Binding]) -> None:
    """Repeats of what arrived, and zeros where a storage holds no state."""
    for binding in new:
        for copy, first in primary_fragments(binding.state)[1]:
            for begin, count in row_starts(copy):
                source = binding.memory[first.storage].narrow(0, first.offset(begin), count)
                binding.memory[copy.storage].narrow(0, copy.offset(begin), count).copy_(source)
    zero_padding(new)


def _address(offers: Sequence[_Offer]) -> str:
    """One machine: the loopback; several: this one's address among them."""
    if len({o.host for o in offers}) == 1:
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())
