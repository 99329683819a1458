"""coarse, one plan: where its copies of models lie, as columns over ranks. Nothing here depends on the other plan.

A *side* is what ``hold`` says, without tensors: every copy at the boundary with its layout's coordinates per rank (one
array per axis, closed forms of the rank order) and the node and GPU of every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from nereus.ir.cluster import Device
from nereus.ir.layout import SHARD_NONE, IntArray, Layout, layout_of
from nereus.ir.plan import Model, Plan, Slot, Stage
from nereus.models.memory.state import Copy, copies, device_state_bytes
from nereus.models.memory.steady import Place, kv_cache_bytes, mem_bytes_of, place_parts
from nereus.passes.coarse_grid import FloatArray

_NODE, _INDEX = attrgetter("node"), attrgetter("index")


@dataclass(frozen=True, slots=True, eq=False)
class RankCoordinates:
    """Per rank: pipeline stage, tensor-parallel column, share; and the same for experts that have their own."""

    pp: IntArray
    tp: IntArray
    shard: IntArray
    expert: IntArray  # ep * etp degree + etp
    expert_shard: IntArray


@lru_cache(maxsize=256)
def rank_coordinates(layout: Layout) -> RankCoordinates:
    coords = layout.coordinates()
    share = layout.shard_of_rank()
    if not layout.splits_experts:
        return RankCoordinates(coords["pp"], coords["tp"], share, coords["tp"], share)
    experts = layout.expert_coordinates()
    return RankCoordinates(
        pp=coords["pp"],
        tp=coords["tp"],
        shard=share % layout.num_shards,
        expert=experts["ep"] * layout.expert_tp + experts["etp"],
        expert_shard=share // layout.num_shards,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Where:
    """Devices of a stage's ranks: ``node`` counts in ``Side.nodes``, ``gpu`` inside the node."""

    node: IntArray
    gpu: IntArray
    #: What follows from it and a layout alone, remembered.
    memo: dict[object, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One copy of a model at the boundary (a state set)."""

    stage: str
    model: Model
    layout: Layout
    where: Where
    slots: tuple[Slot, ...]
    optimizer: str | None

    def slot(self, name: str, dtype: str) -> Slot | None:
        return next((s for s in self.slots if s.name == name and s.dtype == dtype), None)

    def shards(self, slot: str, *, expert: bool) -> tuple[str, int]:
        """(rule, size of the shard group) of a slot."""
        rule = self.layout.shard_rule(slot)
        if rule == SHARD_NONE:
            return rule, 1
        return rule, self.layout.num_expert_shards if expert else self.layout.num_shards


@dataclass(frozen=True, slots=True, eq=False)
class PortRates:
    """Of a cluster: the node and bytes of every device; seconds per byte into it by the best link and by its host
    link, and, per node, through its NICs."""

    node_of: IntArray
    capacity: IntArray
    gpu_s: FloatArray
    pcie_s: FloatArray
    nic_s: FloatArray


@dataclass(frozen=True, eq=False)
class Side:
    """Devices are numbered node by node, as the cluster lists them."""

    plan: Plan
    node_names: tuple[str, ...]
    node_gpus: IntArray
    copies: tuple[Copy, ...]
    parts: tuple[Part, ...]
    #: Stages with processes, and where their ranks lie.
    owners: tuple[tuple[Stage, Where], ...]

    @cached_property
    def first_device(self) -> IntArray:
        first: IntArray = np.cumsum(self.node_gpus) - self.node_gpus
        return first

    @cached_property
    def ports(self) -> PortRates:
        rates: dict[int, tuple[int, float, float]] = {}
        rows = []
        for node in self.plan.cluster.nodes:
            gpu = node.gpu
            if id(gpu) not in rates:
                inside = max(min(gpu.intra_bytes_per_s, gpu.intra_peer_bytes_per_s), gpu.pcie_bytes_per_s)
                rates[id(gpu)] = (gpu.capacity_bytes, 1.0 / inside, 1.0 / gpu.pcie_bytes_per_s)
            rows.append((*rates[id(gpu)], 1.0 / node.nic_bytes_per_s))
        table = np.array(rows)
        node_of = np.repeat(np.arange(len(rows)), self.node_gpus)
        return PortRates(node_of, table[node_of, 0].astype(np.int64), table[node_of, 1], table[node_of, 2], table[:, 3])

    @cached_property
    def needs(self) -> IntArray:
        """Most bytes in use on every device while any stage runs, once per class of devices that hold the same."""
        kinds = list(dict.fromkeys((mem_bytes_of(n), n.gpu.capacity_bytes) for n in self.plan.cluster.nodes))
        of_node = [kinds.index((mem_bytes_of(n), n.gpu.capacity_bytes)) for n in self.plan.cluster.nodes]
        key = np.repeat(np.array(of_node, dtype=np.int64), self.node_gpus)
        stride = len(kinds)
        for stage, where in self.owners:
            key[self.first_device[where.node] + where.gpu] += (1 + rank_coordinates(layout_of(stage)).pp) * stride
            stride *= stage.pp + 1
        values, inverse = np.unique(key, return_inverse=True)
        return np.array([self._need(int(value), kinds) for value in values.tolist()], dtype=np.int64)[inverse]

    def _need(self, key: int, kinds: list[tuple[int, int]]) -> int:
        key, kind = divmod(key, len(kinds))
        coordinates = {}
        for stage, _ in self.owners:
            key, index = divmod(key, stage.pp + 1)
            if index:
                coordinates[stage.name] = index - 1
        if not coordinates:
            return 0
        mem_bytes, capacity_bytes = kinds[kind]
        place = Place(coordinates=tuple(coordinates.items()), mem_bytes=mem_bytes, capacity_bytes=capacity_bytes)
        most = 0
        for copy in self.copies:
            index = coordinates.get(copy.owner.name, -1)
            for user in copy.users if index >= 0 else ():
                parts = place_parts(self.plan, self.copies, user, copy.owner.name, place, index)
                most = max(most, sum(part.num_bytes for part in parts))
        return most

    def engine_bytes(self, owner: Stage) -> tuple[IntArray, IntArray]:
        """Per pipeline stage of an engine, on its first GPU's kind: weights, and KV cache (0 unless it generates)."""
        copy = next(c for c in self.copies if c.owner.name == owner.name and any(u.name == owner.name for u in c.users))
        mem_bytes = mem_bytes_of(self.plan.cluster.node(owner.ranks[0].node))
        weights = [device_state_bytes(copy, index) for index in range(copy.stage.pp)]
        cache = [0] * copy.stage.pp
        if owner.kind == "generate":
            cache = [kv_cache_bytes(self.plan, copy, owner, index, mem_bytes) for index in range(copy.stage.pp)]
        return np.array(weights, dtype=np.int64), np.array(cache, dtype=np.int64)


def side_of(plan: Plan) -> Side:
    names = tuple(node.name for node in plan.cluster.nodes)
    number = {name: i for i, name in enumerate(names)}
    known: dict[int, Where] = {}  # stages often share one tuple of devices

    def where(ranks: tuple[Device, ...]) -> Where:
        if id(ranks) not in known:
            known[id(ranks)] = _where(ranks, number)
        return known[id(ranks)]

    trained = {s.model for s in plan.stages if s.is_train}
    parts: list[Part] = []
    found = copies(plan)
    for copy in found:
        trainer = next((user for user in copy.users if user.is_train), None)
        stale = trainer is None and copy.model.name in trained and plan.workload.mode == "sync"
        if stale or copy.idle == "discard":
            continue
        in_host = copy.idle == "offload" or copy.swap
        parts.append(
            Part(
                stage=(trainer or copy.stage).name,
                model=copy.model,
                layout=layout_of(copy.stage, experts=copy.model.arch.moe is not None),
                where=where(copy.owner.ranks),
                slots=tuple(replace(slot, host=True, host_share=1.0) for slot in copy.slots) if in_host else copy.slots,
                optimizer=copy.optimizer,
            )
        )
    return Side(
        plan=plan,
        node_names=names,
        node_gpus=np.array([node.num_gpus for node in plan.cluster.nodes], dtype=np.int64),
        copies=found,
        parts=tuple(parts),
        owners=tuple((stage, where(stage.ranks)) for stage in plan.owners()),
    )


def _where(ranks: Sequence[Device], number: dict[str, int]) -> Where:
    node = np.fromiter(map(number.__getitem__, map(_NODE, ranks)), dtype=np.int64, count=len(ranks))
    gpu = np.fromiter(map(_INDEX, ranks), dtype=np.int64, count=len(ranks))
    return Where(node, gpu)
