"""``nereus.describe``: the placed plan of a live job, from its process groups and tensors.

What processes say of their coordinates is not believed: the plan that follows from it is laid out again and compared,
element by element, with what their tensors really hold. A weight elsewhere than the plan says is an error; optimizer
shards that follow a framework's own buckets are noted, and moves use the live description for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import floor, lcm
from typing import Any

from nereus.ir.arch import Arch, Lora
from nereus.ir.cluster import Cluster, Device, Node
from nereus.ir.described import DescribedLayout, describe_layout
from nereus.ir.fragment import RankState
from nereus.ir.layout import layout_of
from nereus.ir.plan import ORDER_MEGATRON, ORDER_REPLICA, Model, Plan, Slot, Stage, Workload
from nereus.lang.api import placed_plan_text
from nereus.models.hardware import gpu_type
from nereus.models.presets import preset, preset_names
from nereus.models.slots import default_slots, optimizer_names
from nereus.passes.hold import hold
from nereus.runtime.coordinates import Coordinates
from nereus.runtime.describe_check import DescribeError, differences


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStage:
    """What every process knows of a stage. ``zero`` as in the plan language; ``fsdp``: shard-group size."""

    model: str
    kind: str  # generate | logprob | infer | train
    arch: Arch
    head: str = "lm"
    source: str = ""  # preset or path; "": found by its shape
    frozen: bool = False
    lora: Lora | None = None
    backend: str | None = None
    engine: str | None = None
    zero: int = 0
    fsdp: int = 0
    order: str | None = None  # None: the first of the usual ones that agrees
    settings: tuple[tuple[str, Any], ...] = ()  # further fields of ``Stage``: sp, micro_batch, idle, kv_cache_bytes ...

    @property
    def name(self) -> str:
        return f"{self.model}.{self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one process says of one stage."""

    host: str
    index: int  # GPU of the host
    coordinates: Coordinates
    state: RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedJob:
    plan: Plan
    text: str  # the placed plan
    #: (stage, slots) that lie otherwise than the plan's rule: the framework's own buckets.
    notes: tuple[str, ...] = ()
    layouts: dict[str, DescribedLayout] = field(default_factory=dict, repr=False)


def describe(
    stages: Sequence[tuple[LiveStage, Coordinates | None, RankState | None]],
    *,
    gpu: str,
    workload: Workload | None = None,
    group: Any = None,
    host: str | None = None,
    index: int | None = None,
) -> DescribedJob:
    """Called by every process of ``group``; every process gets the same plan.

    ``stages``: all stages of the job in one order everywhere, with this process's coordinates and state in each, or
    None where it takes no part. ``gpu``: data-sheet id of the GPUs. ``index``: this process's GPU on its host; by
    default processes of a host are counted in rank order. ``workload``: None writes the smallest that fits the
    degrees. Raises DescribeError on every process.
    """
    import socket

    import torch.distributed as dist

    mine = [None if c is None or s is None else (c, s) for _, c, s in stages]
    offers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(offers, (host or socket.gethostname(), index, mine), group=group)
    counts: dict[str, int] = {}
    facts: list[list[Facts]] = [[] for _ in stages]
    for name, place, entries in offers:
        number = counts.get(name, 0) if place is None else place
        counts[name] = max(counts.get(name, 0), number + 1)
        for stage, entry in enumerate(entries):
            if entry is not None:
                facts[stage].append(Facts(host=name, index=number, coordinates=entry[0], state=entry[1]))
    live = [stage for stage, _, _ in stages]
    return plan_of(list(zip(live, facts, strict=True)), counts, gpu=gpu, workload=workload)


def plan_of(
    stages: Sequence[tuple[LiveStage, Sequence[Facts]]],
    gpus_of_host: dict[str, int],
    *,
    gpu: str,
    workload: Workload | None = None,
) -> DescribedJob:
    """The same from facts that were gathered already. ``gpus_of_host``: host -> number of GPUs."""
    kind = gpu_type(gpu)
    names = {host: f"n{number}" for number, host in enumerate(gpus_of_host)}
    cluster = Cluster(
        nodes=tuple(
            Node(
                name=names[host],
                gpu=kind,
                num_gpus=count,
                host_mem_bytes=1 << 40,
                nic_bytes_per_s=kind.default_nic_bytes_per_s * count,
            )
            for host, count in gpus_of_host.items()
        )
    )
    models: dict[str, Model] = {}
    found: list[Stage] = []
    for live, facts in stages:
        model = Model(
            name=live.model,
            arch=live.arch,
            source=live.source or _source(live.arch),
            head=live.head,
            frozen=live.frozen,
            lora=live.lora,
            precision=_dtype(live, facts),
        )
        if models.setdefault(live.model, model) != model:
            raise DescribeError(f"{live.name}: model {live.model} has another shape or precision than in other stages")
        found.append(_stage(live, facts, names))
    plan = Plan(
        cluster=cluster,
        models=tuple(models.values()),
        workload=workload or _least_workload(found),
        stages=tuple(found),
    )
    notes, layouts = _compare(plan, stages, {node: host for host, node in names.items()})
    return DescribedJob(plan=plan, text=placed_plan_text(plan), notes=tuple(notes), layouts=layouts)


def _least_workload(stages: Sequence[Stage]) -> Workload:
    """The smallest batch that every stage can train: a described job says nothing of its own."""
    size = lcm(*(stage.dp * stage.micro_batch for stage in stages))
    return Workload(prompts=size, mini_batch=size)


# -- one stage --------------------------------------------------------------------------------------------------------


def _stage(live: LiveStage, facts: Sequence[Facts], names: dict[str, str]) -> Stage:
    if not facts:
        raise DescribeError(f"{live.name}: no process takes part in it")
    sizes = {axis: _agreed(live, facts, axis) for axis in ("tp", "pp", "cp", "dp", "ep", "etp")}
    tp, pp, cp, dp = (sizes[axis] or 1 for axis in ("tp", "pp", "cp", "dp"))
    if tp * pp * cp * dp != len(facts):
        text = f"tp {tp} x pp {pp} x cp {cp} x dp {dp} is {tp * pp * cp * dp} processes, and {len(facts)} take part"
        raise DescribeError(f"{live.name}: {text}")
    by_coordinate: dict[tuple[int, ...], Facts] = {}
    for fact in facts:
        c = fact.coordinates
        key = (c.tp[0], c.pp[0], c.cp[0], c.dp[0])
        if key in by_coordinate:
            other = by_coordinate[key]
            raise DescribeError(
                f"{live.name}: {fact.host} GPU {fact.index} and {other.host} GPU {other.index} both are "
                f"tp {key[0]}, pp {key[1]}, cp {key[2]}, dp {key[3]}"
            )
        by_coordinate[key] = fact
    moe = live.arch.moe is not None
    ep = (sizes["ep"] or 1) if moe else 1
    etp = (sizes["etp"] or tp) if moe else 1
    chunks, split, vp = _layers(live, facts, pp)
    slots = _slots(live, facts)
    stage = Stage(
        model=live.model,
        kind=live.kind,
        devices=tuple(sorted(Device(names[f.host], f.index) for f in facts)),
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=ep,
        etp=etp,
        vp=vp,
        pp_split=split,
        chunks=chunks if vp > 1 else (),
        zero=live.zero,
        fsdp=live.fsdp,
        backend=live.backend,
        engine=live.engine,
        slots=slots,
        **{
            "sp": tp > 1 and live.kind != "generate",
            "optimizer": _optimizer(live, slots),
            **dict(live.settings),
        },
    )
    orders = _orders(live)
    for order in orders:
        placed = _placed(replace(stage, order=order), by_coordinate, names)
        if placed is not None:
            return placed
    raise DescribeError(f"{live.name}: the experts' groups follow none of the orders {', '.join(orders)}")


def _agreed(live: LiveStage, facts: Sequence[Facts], axis: str) -> int | None:
    sizes: dict[int | None, Facts] = {}
    for fact in facts:
        value = getattr(fact.coordinates, axis)
        sizes.setdefault(None if value is None else value[1], fact)
    if len(sizes) > 1:
        said = "; ".join(f"{size} on {f.host} GPU {f.index}" for size, f in sizes.items())
        raise DescribeError(f"{live.name}: processes disagree about {axis}: {said}")
    return next(iter(sizes))


def _orders(live: LiveStage) -> tuple[str, ...]:
    if live.order is not None:
        return (live.order,)
    usual = (ORDER_MEGATRON, ORDER_REPLICA) if live.backend == "megatron" else (ORDER_REPLICA, ORDER_MEGATRON)
    others = ("-".join(axes) for axes in itertools.permutations(("tp", "cp", "pp", "dp")))
    return tuple(dict.fromkeys((*usual, *others)))


def _placed(stage: Stage, by_coordinate: dict[tuple[int, ...], Facts], names: dict[str, str]) -> Stage | None:
    """The stage with every rank's device in its order, or None where the experts' coordinates are others."""
    layout = layout_of(stage, experts=stage.ep > 1 or stage.etp != 1)
    coords, experts = layout.coordinates(), layout.expert_coordinates()
    place = []
    for rank in range(layout.num_ranks):
        fact = by_coordinate[tuple(int(coords[axis][rank]) for axis in ("tp", "pp", "cp", "dp"))]
        for axis in ("ep", "etp"):
            said = getattr(fact.coordinates, axis)
            if said is not None and said[1] > 1 and said[0] != int(experts[axis][rank]):
                return None
        place.append(Device(names[fact.host], fact.index))
    return replace(stage, place=tuple(place))


def _layers(live: LiveStage, facts: Sequence[Facts], pp: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(layers of every chunk in model order, layers per pipeline stage, vp), from the tensors themselves."""
    owner: dict[int, set[int]] = {layer: set() for layer in range(live.arch.num_layers)}
    for fact in facts:
        for fragment in fact.state.fragments:
            parts = fragment.tensor.split(".layers.")
            if len(parts) == 2:
                owner[int(parts[1].split(".")[0])].add(fact.coordinates.pp[0])
    for layer, stages in owner.items():
        if len(stages) != 1:
            held = f"on pipeline stages {sorted(stages)}" if stages else "on none"
            raise DescribeError(f"{live.name}: layer {layer} lies {held}; every layer has exactly one")
    line = [next(iter(owner[layer])) for layer in range(live.arch.num_layers)]
    chunks = [(stage, len(list(run))) for stage, run in itertools.groupby(line)]
    split = tuple(line.count(stage) for stage in range(pp))
    if len(chunks) % pp or [stage for stage, _ in chunks] != [i % pp for i in range(len(chunks))]:
        raise DescribeError(f"{live.name}: layers lie on pipeline stages {line}, which is no interleaving")
    return tuple(count for _, count in chunks), split, len(chunks) // pp


#: A share in host memory is written in such parts.
SHARE_STEPS = 10_000


def _slots(live: LiveStage, facts: Sequence[Facts]) -> tuple[Slot, ...]:
    """The dtype that most elements of a slot have: routers and norms may be kept in another. Of what lies in host
    memory, the share that every process with any of it there reaches."""
    counts: dict[tuple[str, str], int] = {}
    shares: dict[str, list[float]] = {}
    for fact in facts:
        held: dict[str, list[int]] = {}
        for fragment in fact.state.fragments:
            storage = fact.state.storages[fragment.storage]
            key = (fragment.slot, storage.dtype)
            counts[key] = counts.get(key, 0) + fragment.numel
            held.setdefault(fragment.slot, [0, 0])[storage.host] += fragment.numel
        for name, (on_gpu, in_host) in held.items():
            if in_host:
                shares.setdefault(name, []).append(in_host / (on_gpu + in_host))
    best: dict[str, tuple[int, Slot]] = {}
    for (name, dtype), count in counts.items():
        if name not in best or best[name][0] < count:
            # Rounded down: a rank walks until the share is reached, so a little less gives the same parts.
            share = max(floor(min(shares.get(name, [0.0])) * SHARE_STEPS), 1) / SHARE_STEPS
            in_host = name in shares
            best[name] = (count, Slot(name=name, dtype=dtype, host=in_host, host_share=share if in_host else 1.0))
    if "weight" not in best:
        raise DescribeError(f"{live.name}: no process holds weights")
    return tuple(slot for _, slot in best.values())


def _optimizer(live: LiveStage, slots: Sequence[Slot]) -> str | None:
    """Of the optimizers that the language knows, the first with just these slots."""
    names = {slot.name for slot in slots} - {"weight", "master"}
    if live.kind != "train" or live.frozen:
        return None
    for name in optimizer_names():
        known = default_slots(trains=True, precision="bf16", optimizer=name)
        if names == {slot.name for slot in known} - {"weight", "master"}:
            return name
    return None


def _dtype(live: LiveStage, facts: Sequence[Facts]) -> str:
    return next(slot.dtype for slot in _slots(live, facts) if slot.name == "weight")


def _source(arch: Arch) -> str:
    same = [name for name in preset_names() if preset(name) == arch]
    if not same:
        raise DescribeError("the model's shape is no preset's; say where its configuration lies (source)")
    return same[0]


# -- plan against tensors ---------------------------------------------------------------------------------------------


def _compare(
    plan: Plan, stages: Iterable[tuple[LiveStage, Sequence[Facts]]], host_of: dict[str, str]
) -> tuple[list[str], dict[str, DescribedLayout]]:
    notes: list[str] = []
    layouts: dict[str, DescribedLayout] = {}
    sets = {s.stage: s for s in hold(replace(plan, workload=replace(plan.workload, mode="async"))).sets}
    for live, facts in stages:
        stage = plan.stage(live.name)
        by_device = {(f.host, f.index): f for f in facts}
        ordered = [by_device[host_of[d.node], d.index].state for d in stage.ranks]
        state_set = sets[live.name]
        described = describe_layout(state_set.tensors, ordered, name=live.name)
        layouts[live.name] = described
        notes += differences(stage, state_set, described)
    return notes, layouts
