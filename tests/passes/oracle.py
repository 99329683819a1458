"""A transition worked out element by element, with sets and nested loops: no cells, no intervals, no classes.

Every element of every (model, slot, tensor) has a global number. What a place holds is a boolean vector over these
numbers, what a storage holds an array of them in storage order. Nothing here imports the passes or ``nereus.ir.cells``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nereus.ir.arch import Arch
from nereus.ir.cluster import Device
from nereus.ir.plan import Plan, Slot, Stage
from nereus.ir.tensor import LogicalTensor
from nereus.ir.units import DTYPE_BYTES
from nereus.models.tensors import logical_tensors

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: A storage: (device, stage, slot, tensor name).
Key = tuple[Device, str, str, str]
#: A place: (device, in host memory).
Place = tuple[Device, bool]

BY_HEAD_ROWS, BY_KV_ROWS = ("q_proj.",), ("k_proj.", "v_proj.")
BY_ROWS = ("gate_proj.", "up_proj.", "embed_tokens.", "lm_head.")
BY_COLUMNS = ("o_proj.", "down_proj.")


def tensor_parallel_part(tensor: LogicalTensor, arch: Arch, tp: int, rank: int) -> Ids:
    """Flat indices of the part of ``tensor`` that tp rank ``rank`` holds, in local row-major order."""
    index = np.arange(tensor.numel, dtype=np.int64).reshape(tensor.shape)
    if any(word in tensor.name for word in BY_COLUMNS):
        width = tensor.shape[1] // tp
        return index[:, rank * width : (rank + 1) * width].reshape(-1)
    if any(word in tensor.name for word in BY_KV_ROWS) and tp > arch.num_kv_heads:
        head = rank // (tp // arch.num_kv_heads)  # a whole kv head, the same on several ranks
        return index[head * arch.head_dim : (head + 1) * arch.head_dim].reshape(-1)
    if any(word in tensor.name for word in (*BY_HEAD_ROWS, *BY_KV_ROWS, *BY_ROWS)):
        height = tensor.shape[0] // tp
        return index[rank * height : (rank + 1) * height].reshape(-1)
    return index.reshape(-1)


def on_pipeline_stage(tensor: LogicalTensor, arch: Arch, head: str, stage: Stage, rank: int) -> bool:
    if ".layers." in tensor.name:
        layer = int(tensor.name.split(".layers.")[1].split(".")[0])
        return sum(stage.pp_split[:rank]) <= layer < sum(stage.pp_split[: rank + 1])
    if "embed_tokens" in tensor.name:
        return rank == 0 or (arch.tied_embeddings and head == "lm" and rank == stage.pp - 1)
    return rank == stage.pp - 1  # final norm, lm_head, value head


def coordinate_of_rank(stage: Stage) -> list[dict[str, int]]:
    axes = [axis for axis in stage.order.split("-") if axis in ("tp", "cp", "pp", "dp")]
    ranges = [range(getattr(stage, axis)) for axis in reversed(axes)]
    return [dict(zip(reversed(axes), values, strict=True)) for values in itertools.product(*ranges)]


def rank_share(stage: Stage, arch: Arch, head: str, slot: str, coord: dict[str, int]) -> dict[str, Ids]:
    """Tensor name -> flat indices that a rank of ``stage`` at ``coord`` holds of ``slot``, in storage order."""
    local = {
        t.name: tensor_parallel_part(t, arch, stage.tp, coord["tp"])
        for t in logical_tensors(arch, head)
        if on_pipeline_stage(t, arch, head, stage, coord["pp"])
    }
    everyone = coordinate_of_rank(stage)
    alike = [c for c in everyone if (c["tp"], c["pp"]) == (coord["tp"], coord["pp"])]  # dp x cp, in the order of ranks
    shards = stage.fsdp or (len(alike) if stage.zero else 1)
    mine = alike.index(coord) % shards
    if stage.fsdp:
        result = {}
        for tensor in logical_tensors(arch, head):
            if tensor.name not in local:
                continue
            part = local[tensor.name]
            sharded_rows = _local_rows(tensor, arch, stage.tp)
            chunk = -(-sharded_rows // shards)
            width = len(part) // sharded_rows
            result[tensor.name] = part[
                min(mine * chunk, sharded_rows) * width : min((mine + 1) * chunk, sharded_rows) * width
            ]
        return result
    if stage.zero >= 3:
        return {name: _equal_range(part, shards, mine) for name, part in local.items()}
    if stage.zero and slot != "weight":
        flat = [(name, int(i)) for name, part in local.items() for i in part]
        size = -(-len(flat) // shards)
        chosen = flat[mine * size : (mine + 1) * size]
        return {name: np.array([i for n, i in chosen if n == name], dtype=np.int64) for name in local}
    return local


def _local_rows(tensor: LogicalTensor, arch: Arch, tp: int) -> int:
    if any(word in tensor.name for word in BY_KV_ROWS):
        return max(tensor.shape[0] // tp, arch.head_dim)
    if any(word in tensor.name for word in (*BY_HEAD_ROWS, *BY_ROWS)):
        return tensor.shape[0] // tp
    return tensor.shape[0]


def _equal_range(part: Ids, shards: int, mine: int) -> Ids:
    size = -(-len(part) // shards)
    return part[mine * size : (mine + 1) * size]


# -- plans -----------------------------------------------------------------------------------------------------------


def host_stage(plan: Plan, stage: Stage) -> Stage:
    while stage.with_ is not None:
        stage = plan.stage(stage.with_)
    return stage


def copies(plan: Plan) -> Iterator[Stage]:
    """One stage for every copy of a model's state at a safe boundary: where it lies, with the slots that it has."""
    users: dict[tuple[str, str], list[Stage]] = {}
    for stage in plan.stages:
        if stage.service is None:
            users.setdefault((host_stage(plan, stage).name, stage.model), []).append(stage)
    trains = {model: any(s.model == model and s.kind == "train" for s in plan.stages) for _, model in users}
    for (host, model), stages in users.items():
        fullest = sorted(stages, key=lambda s: -len(s.slots))[0]
        lead = ([s for s in stages if s.name == host] or [fullest])[0]
        trainers = [s for s in stages if s.kind == "train"]
        if trains[model] and not trainers and plan.workload.mode == "sync":
            continue
        if lead.idle != "discard":
            yield replace(lead, kind=(trainers or [lead])[0].kind, slots=fullest.slots)


def in_host(slot: Slot, held: dict[str, Ids]) -> set[str]:
    """Tensors whose part goes to host memory: one after the other, until those there are enough."""
    if not slot.host or slot.host_share == 1:
        return set(held) if slot.host else set()
    enough = sum(len(ids) for ids in held.values()) * slot.host_share
    found: set[str] = set()
    for name, ids in held.items():
        if sum(len(held[other]) for other in found) < enough and len(ids):
            found.add(name)
    return found


class Universe:
    """Numbers for every element of every slot that either plan has."""

    def __init__(self, *plans: Plan) -> None:
        self.first: dict[tuple[str, str, str], int] = {}
        widths: list[Ids] = []
        total = 0
        for plan in plans:
            for stage in copies(plan):
                model = plan.model(stage.model)
                for slot in stage.slots:
                    for tensor in logical_tensors(model.arch, model.head):
                        key = (model.name, slot.name, tensor.name)
                        if key not in self.first:
                            self.first[key] = total
                            widths.append(np.full(tensor.numel, DTYPE_BYTES[slot.dtype], dtype=np.int64))
                            total += tensor.numel
        self.width: Ids = np.concatenate(widths)
        self.numel = total
        #: Number of the weight element that each master element rounds to; -1 elsewhere.
        self.weight_of: Ids = np.full(total, -1, dtype=np.int64)
        for (model_name, slot_name, tensor_name), begin in self.first.items():
            weight = self.first.get((model_name, "weight", tensor_name))
            if slot_name == "master" and weight is not None:
                size = self._size(begin)
                self.weight_of[begin : begin + size] = np.arange(weight, weight + size)

    def _size(self, begin: int) -> int:
        later = [b for b in self.first.values() if b > begin]
        return min(later, default=self.numel) - begin


@dataclass(frozen=True)
class Copy:
    """One rank's part of one slot of one copy in one memory, wherever the rank lies."""

    stage: str
    host_stage: str
    rank: int
    slot: str
    in_host: bool
    tensors: dict[str, Ids]


class State:
    """What a plan holds: per copy and rank, and, on its placement, per storage and place."""

    def __init__(self, plan: Plan, universe: Universe) -> None:
        self.plan, self.universe = plan, universe
        self.copies: list[Copy] = []
        self.ranks = {s.name: host_stage(plan, s).ranks for s in plan.stages if s.service is None}
        for stage in copies(plan):
            model, host = plan.model(stage.model), host_stage(plan, stage)
            to_host = stage.idle == "offload" or stage.swap == "host"
            for rank, coord in enumerate(coordinate_of_rank(host)):
                for slot in stage.slots:
                    share = rank_share(host, model.arch, model.head, slot.name, coord)
                    ids = {
                        name: universe.first[model.name, slot.name, name] + flat
                        for name, flat in share.items()
                        if len(flat)
                    }
                    offloaded = set(ids) if to_host else in_host(slot, ids)
                    for memory in (False, True):
                        part = {name: flat for name, flat in ids.items() if (name in offloaded) == memory}
                        if part:
                            self.copies.append(Copy(stage.name, host.name, rank, slot.name, memory, part))

    @cached_property
    def storages(self) -> dict[Key, Ids]:
        return {
            (self.ranks[c.stage][c.rank], c.stage, c.slot, name): ids
            for c in self.copies
            for name, ids in c.tensors.items()
        }

    def places(self) -> dict[Place, Mask]:
        result: dict[Place, Mask] = {}
        for c in self.copies:
            place = (self.ranks[c.stage][c.rank], c.in_host)
            mask = result.setdefault(place, np.zeros(self.universe.numel, dtype=bool))
            for ids in c.tensors.values():
                mask[ids] = True
        return result

    def slots(self) -> set[tuple[str, str]]:
        return {(self.plan.stage(c.stage).model, c.slot) for c in self.copies}


@dataclass(frozen=True)
class Truth:
    moved_bytes: int
    node_in_bytes: dict[str, int]
    lost: Mask  # wanted, held before, and no living place has it
    fresh: Mask  # of slots that nothing held before: the framework fills them
    derived_bytes: int


def living(old: Plan, new: Plan) -> set[Device]:
    return set(new.cluster.devices) & set(old.cluster.devices)


def truth(old: State, new: State) -> Truth:
    """What must move from ``old`` to ``new``, each on its placement."""
    universe = old.universe
    alive = living(old.plan, new.plan)
    before = {place: mask for place, mask in old.places().items() if place[0] in alive}
    wanted = new.places()
    fresh = _fresh(old, new)
    derivable = {place: _derivable(new, place, fresh) for place in wanted}
    anywhere = np.zeros(universe.numel, dtype=bool)
    for mask in before.values():
        anywhere |= mask
    nothing = np.zeros(universe.numel, dtype=bool)
    moved = derived = 0
    node_in: dict[str, int] = {}
    lost = nothing.copy()
    for node in {place[0].node for place in wanted}:
        near = [mask for place, mask in before.items() if place[0].node == node]
        on_node = np.logical_or.reduce(near) if near else nothing
        hosts = [mask for place, mask in before.items() if place[0].node == node and place[1]]
        in_host = np.logical_or.reduce(hosts) if hosts else nothing
        lacks, host_lacks = nothing.copy(), nothing.copy()
        for place, mask in wanted.items():
            if place[0].node != node:
                continue
            own = before.get(place, nothing)
            lacking = mask & ~own & ~derivable[place] & ~fresh
            derived += int(universe.width[mask & ~own & derivable[place]].sum())
            lacks |= lacking
            lost |= lacking & ~anywhere
            if place[1]:
                host_lacks |= lacking & ~in_host
            else:
                moved += int(universe.width[lacking].sum())
        moved += int(universe.width[host_lacks].sum())
        node_in[node] = int(universe.width[lacks & ~on_node].sum())
    return Truth(moved, node_in, lost, fresh & np.logical_or.reduce([*wanted.values(), nothing]), derived)


def _derivable(new: State, place: Place, fresh: Mask) -> Mask:
    """Weight elements whose master arrives at ``place``. A fresh master is made from the weights, so they cannot be
    made from it."""
    universe = new.universe
    mask = np.zeros(universe.numel, dtype=bool)
    for c in new.copies:
        if c.slot == "master" and (new.ranks[c.stage][c.rank], c.in_host) == place:
            for ids in c.tensors.values():
                mask[universe.weight_of[ids[~fresh[ids]]]] = True
    return mask


def _fresh(old: State, new: State) -> Mask:
    universe = new.universe
    known = old.slots()
    mask = np.zeros(universe.numel, dtype=bool)
    for (model, slot, _), begin in universe.first.items():
        if (model, slot) not in known:
            mask[begin : begin + universe._size(begin)] = True
    return mask


def dropped(old: State, new: State) -> set[tuple[str, str]]:
    """(model, slot) pairs of the old plan that the new one keeps nowhere."""
    return old.slots() - new.slots()


# -- placements ------------------------------------------------------------------------------------------------------


def allowed_placements(stage: Stage) -> Iterator[tuple[Device, ...]]:
    """Every assignment of ranks to ``stage.devices`` with as many tp groups inside a node as can be."""
    coords = coordinate_of_rank(stage)
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank, coord in enumerate(coords):
        groups.setdefault((coord["pp"], coord["dp"], coord["cp"]), []).append(rank)
    nodes = [d.node for d in stage.devices]
    room = sum(nodes.count(node) // stage.tp for node in set(nodes))
    for order in itertools.permutations(stage.devices):
        whole = sum(1 for ranks in groups.values() if len({order[r].node for r in ranks}) == 1)
        if whole == min(room, len(groups)):
            yield order
