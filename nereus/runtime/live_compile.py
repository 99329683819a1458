"""Compiling a live move, in one process for all: what each brings becomes its part of the exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nereus.ir.cluster import Cluster, Device, GpuType, Node
from nereus.ir.described import DescribedLayout, DescriptionError, describe_layout
from nereus.ir.fragment import Fragment, RankState
from nereus.ir.holdings import Holdings, StateSet, Topology, join_clusters
from nereus.ir.layout import BoundLayout
from nereus.ir.plan import Slot
from nereus.ir.program import Program
from nereus.ir.tensor import LogicalTensor, matrix_shape
from nereus.models.hardware import gpu_type
from nereus.passes.emit import emit_program
from nereus.passes.exchange import ExchangeError, compile_exchange
from nereus.passes.replicas import Region, replicated_regions
from nereus.runtime.codec import encode
from nereus.runtime.leftover import Box, boxes, outside

#: Rates decide who sends what, by their ratios alone; this data sheet stands for any machine with fast links inside
#: nodes until the plan's own cluster is given.
DEFAULT_GPU = "h100-sxm-80gb"

#: For ``drop``: whatever nobody wants.
ALL = "*"


class MoveError(RuntimeError):
    """The move cannot be made, or its descriptions do not fit; nothing was written."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one process brings: its machine, what it holds and what it wants, and what it says of the move. ``more``:
    what it holds beside ``old``, where that has parts of one tensor in several places."""

    host: str
    old: RankState | None
    new: RankState | None
    more: tuple[RankState, ...] = ()
    drop: tuple[str, ...] = ()
    check_replicas: bool = True
    fault: str = ""  # why it cannot take part


@dataclass(frozen=True, slots=True)
class Part:
    """One process's part of a compiled move. ``programs``: its own, then one for each of ``Offer.more``, which takes
    part like a process; ``devices``: of every process, in the same order. ``shared``: what it has in common with
    others, to be compared."""

    programs: tuple[Program, ...]
    devices: tuple[tuple[Device, ...], ...]
    shared: tuple[Region, ...]
    dropped: tuple[tuple[str, int], ...]


class Remembered:
    """This process's parts of moves that were compiled before, newest last. A key stands for all that the compiler was
    given, by every process; a process that is new, or has forgotten, makes all of them compile anew."""

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._parts: dict[tuple[str, int], Part] = {}

    def keys(self, rank: int) -> tuple[str, ...]:
        return tuple(key for key, at in self._parts if at == rank)

    def get(self, key: str, rank: int) -> Part:
        part = self._parts.pop((key, rank))
        self._parts[key, rank] = part
        return part

    def put(self, key: str, rank: int, part: Part) -> None:
        self._parts.pop((key, rank), None)
        self._parts[key, rank] = part
        while len(self._parts) > self._most:
            del self._parts[next(iter(self._parts))]


def fingerprint(*values: object) -> str:
    """Equal for equal values, also in other processes."""
    return hashlib.blake2b(encode(values), digest_size=16).hexdigest()


def answers(offers: Sequence[Offer], tensors: tuple[LogicalTensor, ...], model: str, gpu: str) -> list[Part | str]:
    """For every process its part, or a text for all of them."""
    try:
        return list(_compile(offers, tensors, model, gpu))
    except (DescriptionError, ExchangeError, MoveError) as error:
        return [str(error)] * len(offers)


def _compile(offers: Sequence[Offer], tensors: tuple[LogicalTensor, ...], model: str, gpu: str) -> Iterable[Part]:
    devices = _devices(offers)
    topology = _topology([device for own in devices for device in own], gpu_type(gpu))
    sides: list[tuple[StateSet, ...]] = []
    for side in _SIDES:
        members = [
            (device, state)
            for own, offer in zip(devices, offers, strict=True)
            for device, state in zip(own, _states(offer, side), strict=False)
            if state is not None
        ]
        sides.append((_state_set(side, members, tensors, model),) if members else ())
    old, new = (Holdings(sets=sets) for sets in sides)
    if not new.sets:
        raise DescriptionError("no process wants anything")
    if not old.sets:
        raise DescriptionError("no process holds anything")
    exchange = compile_exchange(old, new, topology, origin=repr([(o.old, o.more, o.new) for o in offers]).encode())
    dropped = _dropped(offers, tensors)
    check = all(o.check_replicas for o in offers)
    index = topology.index()
    for own in devices:
        shared = replicated_regions(exchange, index[own[0]]) if check else ()
        programs = tuple(emit_program(exchange, index[device]) for device in own)
        yield Part(programs, devices, shared, dropped)


def _dropped(offers: Sequence[Offer], tensors: Sequence[LogicalTensor]) -> tuple[tuple[str, int], ...]:
    """(slot, how many tensors have elements of it that nobody wants). MoveError for those that nobody said to drop,
    and for parts of a tensor that nobody describes at all."""
    held, wanted = (_covered([s for o in offers for s in _states(o, side) if s is not None]) for side in _SIDES)
    shapes = {tensor.name: matrix_shape(tensor.shape) for tensor in tensors}
    said = {slot for o in offers for slot in o.drop}
    gone: dict[str, list[str]] = {}
    parts: dict[str, list[str]] = {}
    nowhere: dict[str, list[str]] = {}
    for slot, tensor in sorted(held.keys() | wanted.keys()):
        mine, theirs = held.get((slot, tensor), set()), wanted.get((slot, tensor), set())
        if slot == "weight" and ("master", tensor) in wanted:  # the new objects make that weight from its master
            continue
        num, where = outside(mine, theirs)
        if num and not theirs:
            gone.setdefault(slot, []).append(tensor)
        elif num:
            parts.setdefault(slot, []).append(f"{tensor} ({num:,} elements: {where})")
        elif tensor in shapes:  # an unknown one is named where layouts are described
            rows, cols = shapes[tensor]
            num, where = outside({(0, rows, 0, cols)}, theirs)
            if num:
                nowhere.setdefault(slot, []).append(f"{tensor} ({num:,} of {rows * cols:,} elements: {where})")
    silent = {slot: names for slot, names in gone.items() if not said & {slot, ALL}}
    if silent:
        raise MoveError(
            f"held by the old objects and wanted by none of the new: {_listed(silent)}. A new optimizer has its slots "
            f"after prepare(); to leave them behind pass drop={tuple(silent)}"
        )
    for found, what in ((parts, "held by the old objects and wanted by none of the new"), (nowhere, _NOWHERE)):
        silent = {slot: names for slot, names in found.items() if not said & {slot, ALL}}
        if silent:
            raise MoveError(
                f"{what}: parts of {_listed(silent)}. The naming leaves them out, a process that wants them takes no "
                f"part, or the list of tensors is another model's; to leave them behind pass drop={tuple(silent)}"
            )
    return tuple((slot, len(gone.get(slot, ())) + len(parts.get(slot, ()))) for slot in sorted({**gone, **parts}))


_SIDES = ("old", "new")
_NOWHERE = "in the model, and in no description of old or new objects"


def _listed(found: Mapping[str, Sequence[str]]) -> str:
    texts = (
        f"{slot} of {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1) for slot, names in found.items()
    )
    return "; ".join(texts)


def _covered(states: Sequence[RankState]) -> dict[tuple[str, str], set[Box]]:
    """(slot, tensor) -> what of it is described."""
    fragments: dict[tuple[str, str], dict[tuple[int, ...], Fragment]] = {}
    for state in states:
        for f in state.fragments:  # most processes hold the same parts as others
            key = (f.row_lo, f.row_hi, f.col_lo, f.col_hi, f.start, f.stop)
            fragments.setdefault((f.slot, f.tensor), {})[key] = f
    return {key: boxes(parts.values()) for key, parts in fragments.items()}


def _states(offer: Offer, side: str) -> tuple[RankState | None, ...]:
    return (offer.old, *offer.more) if side == "old" else (offer.new,)


def _devices(offers: Sequence[Offer]) -> tuple[tuple[Device, ...], ...]:
    names = {host: f"n{number}" for number, host in enumerate(dict.fromkeys(o.host for o in offers))}
    counts: dict[str, int] = {}
    found = []
    for offer in offers:
        node = names[offer.host]
        first = counts.get(node, 0)
        counts[node] = first + 1 + len(offer.more)
        found.append(tuple(Device(node, first + number) for number in range(1 + len(offer.more))))
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
    states = [by_dtype(state) for _, state in members]
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


def by_dtype(state: RankState) -> RankState:
    """Slots named with their dtype: a framework may keep a few tensors of a slot (norms, routers) in another one."""
    return replace(
        state,
        fragments=tuple(replace(f, slot=f"{f.slot}:{state.storages[f.storage].dtype}") for f in state.fragments),
    )
