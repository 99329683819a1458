"""Steady-state memory of a plan: every running stage on every GPU, computed once per class of identical GPUs.

While a stage runs on a GPU, the GPU holds:

- the stage's own state, with fp32 gradients if it trains, its activations (or forward working set), logits, KV cache;
- every other copy that lives there: resident ones whole but without gradients (an engine also keeps its cache),
  offloaded, swapped and discarded ones not at all;
- a context and the communicators of every process, asleep or not.

In sync mode stages that share a GPU run one after another; in async mode generation shares no GPU with the others (the
front end refuses that). So one stage at a time is the rule for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nereus.ir.arch import Arch
from nereus.ir.cluster import Device, Node
from nereus.ir.plan import Plan, Stage
from nereus.ir.units import GB
from nereus.models.memory import activations
from nereus.models.memory.report import HostRow, MemoryReport, MemoryRow, Part
from nereus.models.memory.state import (
    Copy,
    copies,
    device_slot_bytes,
    device_state_bytes,
    gathered_bytes,
    gradient_bytes,
    host_state_bytes,
    owner_of,
    pipeline_index_of_ranks,
)

CONTEXT_BYTES = GB // 2
#: All communicators of one process.
COMMUNICATOR_BYTES = GB // 2
#: Share of the GPU that an engine takes where the plan gives neither ``kv_cache`` nor ``mem``: vLLM's own default.
DEFAULT_ENGINE_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A class of GPUs: the pipeline coordinate of each owner that has a process there, and what kind of GPU it is."""

    coordinates: tuple[tuple[str, int], ...]  # (owner, pp index)
    mem_bytes: int
    capacity_bytes: int


def steady_state(plan: Plan) -> MemoryReport:
    """``plan`` is resolved and legal (degrees divide, devices exist)."""
    all_copies = copies(plan)
    classes = _device_classes(plan)
    rows: list[MemoryRow] = []
    for stage in plan.stages:
        if stage.service is not None:
            continue
        owner = owner_of(plan, stage).name
        of_stage = []
        for place, devices in classes.items():
            index = dict(place.coordinates).get(owner)
            if index is not None:
                parts = place_parts(plan, all_copies, stage, owner, place, index)
                of_stage.append(
                    MemoryRow(
                        stage=stage.name,
                        devices=tuple(devices),
                        pp_index=index,
                        capacity_bytes=place.capacity_bytes,
                        parts=parts,
                    )
                )
        rows.extend(sorted(of_stage, key=lambda row: row.need_bytes - row.capacity_bytes, reverse=True))
    return MemoryReport(rows=tuple(rows), hosts=_hosts(plan, all_copies))


def process_count(plan: Plan, device: Device) -> int:
    """Processes with a context on ``device``; stages joined by ``with`` are one."""
    return sum(device in owner.ranks for owner in plan.owners())


def resident_state_bytes(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """State of the copy that ``stage`` runs on, per rank, when it lies in GPU memory: all its slots, no gradients."""
    copy = _copy_of(copies(plan), owner_of(plan, stage).name, stage)
    per_index = [device_state_bytes(copy, index) for index in range(copy.stage.pp)]
    return tuple(per_index[index] for index in pipeline_index_of_ranks(owner_of(plan, stage)))


def running_bytes(plan: Plan, all_copies: tuple[Copy, ...], stage: Stage, mem_bytes: int) -> tuple[int, ...]:
    """What the processes of ``stage`` hold while it runs, by pipeline stage, contexts apart. ``mem_bytes``: of the GPU
    (an engine's cache may be a share of it)."""
    owner = owner_of(plan, stage)
    running = _copy_of(all_copies, owner.name, stage)
    beside = [copy for copy in all_copies if copy is not running and copy.owner.name == owner.name]
    return tuple(
        _sum(_running_parts(plan, running, stage, index, mem_bytes))
        + sum(_sum(_resident_parts(plan, copy, index, mem_bytes)) for copy in beside)
        for index in range(owner.pp)
    )


def idle_bytes(plan: Plan, all_copies: tuple[Copy, ...], owner: Stage, mem_bytes: int) -> tuple[int, ...]:
    """What the processes of ``owner`` hold while none of their stages runs, by pipeline stage, contexts apart."""
    inside = [copy for copy in all_copies if copy.owner.name == owner.name]
    return tuple(
        sum(_sum(_resident_parts(plan, copy, index, mem_bytes)) for copy in inside) for index in range(owner.pp)
    )


def host_bytes(all_copies: tuple[Copy, ...], owner: Stage) -> tuple[int, ...]:
    """What a process of ``owner`` keeps in host memory, by pipeline stage."""
    inside = [copy for copy in all_copies if copy.owner.name == owner.name]
    return tuple(sum(host_state_bytes(copy, index) for copy in inside) for index in range(owner.pp))


def _sum(parts: Iterable[Part]) -> int:
    return sum(part.num_bytes for part in parts)


def engine_running_bytes(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """Weight shard and KV cache of a running engine, per rank of ``stage``."""
    copy = _copy_of(copies(plan), owner_of(plan, stage).name, stage)
    nodes = {node.name: node for node in plan.cluster.nodes}
    owner = owner_of(plan, stage)
    known: dict[tuple[int, int], int] = {}
    per_rank = []
    for device, index in zip(owner.ranks, pipeline_index_of_ranks(owner), strict=True):
        mem_bytes = mem_bytes_of(nodes[device.node])
        if (index, mem_bytes) not in known:
            known[index, mem_bytes] = device_state_bytes(copy, index) + kv_cache_bytes(
                plan, copy, stage, index, mem_bytes
            )
        per_rank.append(known[index, mem_bytes])
    return tuple(per_rank)


def kv_cache_bytes(plan: Plan, copy: Copy, stage: Stage, index: int, mem_bytes: int) -> int:
    """``kv_cache`` as written; else what the engine's share of the GPU leaves beside weights, workspace and context."""
    if stage.kv_cache_bytes is not None:
        return stage.kv_cache_bytes
    share = DEFAULT_ENGINE_SHARE if stage.mem_fraction is None else stage.mem_fraction
    weights = device_state_bytes(copy, index)
    workspace = sum(part.num_bytes for part in _forward_parts(plan, copy, stage, index))
    return max(0, int(share * mem_bytes) - weights - workspace - CONTEXT_BYTES - COMMUNICATOR_BYTES)


def _device_classes(plan: Plan) -> Mapping[Place, list[Device]]:
    """GPUs that hold some process, grouped; groups and their members in cluster order."""
    held: dict[Device, list[tuple[str, int]]] = {}
    for owner in plan.owners():
        for device, index in zip(owner.ranks, pipeline_index_of_ranks(owner), strict=True):
            held.setdefault(device, []).append((owner.name, index))
    classes: dict[Place, list[Device]] = {}
    for node in plan.cluster.nodes:
        mem_bytes, capacity_bytes = mem_bytes_of(node), node.gpu.capacity_bytes
        for device in node.devices:
            if device in held:
                place = Place(coordinates=tuple(held[device]), mem_bytes=mem_bytes, capacity_bytes=capacity_bytes)
                classes.setdefault(place, []).append(device)
    return classes


def place_parts(
    plan: Plan, all_copies: tuple[Copy, ...], stage: Stage, owner: str, place: Place, index: int
) -> tuple[Part, ...]:
    running = _copy_of(all_copies, owner, stage)
    parts = [*_running_parts(plan, running, stage, index, place.mem_bytes)]
    indices = dict(place.coordinates)
    for copy in all_copies:
        if copy is not running and copy.owner.name in indices:
            parts.extend(_resident_parts(plan, copy, indices[copy.owner.name], place.mem_bytes))
    num_processes = len(place.coordinates)
    label = "1 process" if num_processes == 1 else f"{num_processes} processes"
    parts.append(Part(label=label, num_bytes=num_processes * (CONTEXT_BYTES + COMMUNICATOR_BYTES)))
    return tuple(part for part in parts if part.num_bytes)


def _running_parts(plan: Plan, copy: Copy, stage: Stage, index: int, mem_bytes: int) -> list[Part]:
    name = stage.name
    # A copy that is brought in for a forward pass comes without its optimizer; one that stays resident has it there.
    all_slots = stage.is_train or (copy.idle == "resident" and not copy.swap)
    state: dict[str, int] = {}
    for slot in copy.slots:
        if all_slots or slot.name == "weight":
            label = {"weight": "weights", "master": "master"}.get(slot.name, "moments")
            state[label] = state.get(label, 0) + device_slot_bytes(copy, slot, index)
    parts = [Part(label=label, num_bytes=num_bytes, stage=name) for label, num_bytes in state.items()]
    parts.append(Part(label="gathered layers", num_bytes=gathered_bytes(copy, index), stage=name))
    if stage.is_train:
        parts.append(Part(label="gradients", num_bytes=gradient_bytes(copy, index), stage=name))
        parts.extend(_train_parts(plan, copy, stage, index))
    else:
        parts.extend(_forward_parts(plan, copy, stage, index))
    if stage.kind == "generate":
        num_bytes = kv_cache_bytes(plan, copy, stage, index, mem_bytes)
        parts.append(Part(label="kv cache", num_bytes=num_bytes, stage=name))
    return parts


def _train_parts(plan: Plan, copy: Copy, stage: Stage, index: int) -> list[Part]:
    arch, shapes = copy.model.arch, copy.shapes[index]
    batch = activations.batch_of(stage, plan.workload)
    kept, working = activations.train_activation_bytes(
        arch, stage, batch, index, shapes.num_layers, shapes.num_expert_layers
    )
    return [
        Part(label="activations", num_bytes=kept, stage=stage.name),
        Part(label="working set", num_bytes=working, stage=stage.name),
        Part(label="logits", num_bytes=_logits(copy, stage, index, batch.tokens, train=True), stage=stage.name),
    ]


def _forward_parts(plan: Plan, copy: Copy, stage: Stage, index: int) -> list[Part]:
    shapes = copy.shapes[index]
    tokens = activations.batch_of(stage, plan.workload).tokens
    working = activations.forward_bytes(copy.model.arch, stage, tokens, shapes.num_layers, shapes.num_expert_layers)
    # An engine needs the logits of one token per sequence only, not of all of them.
    logits = 0 if stage.kind == "generate" else _logits(copy, stage, index, tokens, train=False)
    return [
        Part(label="working set", num_bytes=working, stage=stage.name),
        Part(label="logits", num_bytes=logits, stage=stage.name),
    ]


def _logits(copy: Copy, stage: Stage, index: int, tokens: int, *, train: bool) -> int:
    if copy.model.head != "lm" or index != stage.pp - 1:
        return 0
    arch: Arch = copy.model.arch
    return activations.logits_bytes(arch, stage, tokens, train=train)


def _resident_parts(plan: Plan, copy: Copy, index: int, mem_bytes: int) -> list[Part]:
    """What a copy keeps on the GPU while a stage of another copy runs."""
    if copy.idle != "resident" or copy.swap:
        return []
    name = copy.stage.name
    parts = [Part(label=f"{name} resident", num_bytes=device_state_bytes(copy, index), stage=name)]
    for user in copy.users:
        if user.kind == "generate":
            num_bytes = kv_cache_bytes(plan, copy, user, index, mem_bytes)
            parts.append(Part(label=f"{user.name} kv cache", num_bytes=num_bytes, stage=user.name))
    return parts


def _hosts(plan: Plan, all_copies: tuple[Copy, ...]) -> tuple[HostRow, ...]:
    per_node: dict[str, dict[str, int]] = {node.name: {} for node in plan.cluster.nodes}
    for copy in all_copies:
        per_index = [host_state_bytes(copy, index) for index in range(copy.stage.pp)]
        if not any(per_index):
            continue
        for device, index in zip(copy.owner.ranks, pipeline_index_of_ranks(copy.owner), strict=True):
            on_node = per_node[device.node]
            on_node[copy.stage.name] = on_node.get(copy.stage.name, 0) + per_index[index]
    classes: dict[tuple[int, tuple[tuple[str, int], ...]], list[str]] = {}
    for node in plan.cluster.nodes:
        key = (node.host_mem_bytes, tuple(per_node[node.name].items()))
        classes.setdefault(key, []).append(node.name)
    return tuple(
        HostRow(
            nodes=tuple(names),
            capacity_bytes=capacity,
            parts=tuple(Part(label=f"{stage} in host memory", num_bytes=size, stage=stage) for stage, size in held),
        )
        for (capacity, held), names in classes.items()
    )


def _copy_of(all_copies: tuple[Copy, ...], owner: str, stage: Stage) -> Copy:
    return next(c for c in all_copies if c.owner.name == owner and any(u.name == stage.name for u in c.users))


def mem_bytes_of(node: Node) -> int:
    return round(node.gpu.mem_gb * GB)
