"""Random small plans and pairs of plans, built without the front end."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from nereus.ir.arch import Arch
from nereus.ir.cluster import Cluster, Device, GpuType, Node
from nereus.ir.plan import ORDER_MEGATRON, ORDER_REPLICA, Model, Plan, Slot, Stage, Workload
from nereus.ir.units import GIB
from nereus.models.hardware import gpu_type
from nereus.models.legality import legal_tp
from nereus.models.slots import default_slots

#: Tiny models that between them have kv replication (tp 4 and 8 on 2 kv heads), tied embeddings, biases, a q/k norm,
#: odd widths and degrees that are no powers of two.
ARCHS = (
    Arch(family="llama", num_layers=3, hidden=6, num_heads=4, num_kv_heads=2, head_dim=2, ffn=12, vocab=20),
    Arch(
        family="qwen2",
        num_layers=3,
        hidden=5,
        num_heads=8,
        num_kv_heads=2,
        head_dim=1,
        ffn=8,
        vocab=16,
        tied_embeddings=True,
        qkv_bias=True,
    ),
    Arch(
        family="qwen3", num_layers=2, hidden=7, num_heads=6, num_kv_heads=3, head_dim=1, ffn=6, vocab=18, qk_norm=True
    ),
)
ORDERS = (ORDER_REPLICA, ORDER_MEGATRON, "dp-tp-cp-pp")
WORKLOAD = Workload(prompts=64, samples=1, mini_batch=64, prompt_len=4, response_len=4)


def gpu(mem_gb: float = 80.0) -> GpuType:
    return replace(gpu_type("h100-sxm-80gb"), mem_gb=mem_gb)


def node(
    name: str, gpus: int, *, mem_gb: float = 80.0, nic: float = 25e9, host_mem: int = 64 * GIB, rails: int = 1
) -> Node:
    return Node(name=name, gpu=gpu(mem_gb), num_gpus=gpus, host_mem_bytes=host_mem, nic_bytes_per_s=nic, rails=rails)


def cluster(*sizes: int, mem_gb: float = 80.0) -> Cluster:
    return Cluster(nodes=tuple(node(f"n{i}", size, mem_gb=mem_gb) for i, size in enumerate(sizes)))


def even_split(layers: int, pp: int) -> tuple[int, ...]:
    return tuple(layers // pp + (i < layers % pp) for i in range(pp))


def stage(model: Model, kind: str, devices: tuple[Device, ...], **settings: object) -> Stage:
    """A stage with everything filled in that the resolver would fill in; dp follows from the degrees."""
    tp, pp, cp = (int(settings.get(key, 1)) for key in ("tp", "pp", "cp"))  # type: ignore[call-overload]
    trains = kind == "train" and not model.frozen
    defaults: dict[str, object] = {
        "dp": len(devices) // (tp * pp * cp),
        "pp_split": even_split(model.arch.num_layers, pp),
        "slots": default_slots(trains=trains, precision=model.precision, optimizer=None),
        "kv_cache_bytes": 1_000_000 if kind == "generate" else None,
    }
    return Stage(model=model.name, kind=kind, devices=devices, **{**defaults, **settings})  # type: ignore[arg-type]


def guest(of: Stage, model: Model, kind: str, **settings: object) -> Stage:
    """A stage ``with`` another: its devices and degrees."""
    slots = default_slots(trains=False, precision=model.precision, optimizer=None)
    return replace(of, model=model.name, kind=kind, with_=of.name, slots=slots, **settings)  # type: ignore[arg-type]


def trainer(on: Cluster, devices: tuple[Device, ...] | None = None, arch: Arch = ARCHS[0], **settings: object) -> Plan:
    """A plan of one train stage."""
    actor = Model(name="actor", arch=arch, source="tiny")
    one = stage(actor, "train", devices or on.devices, **settings)
    return Plan(cluster=on, models=(actor,), workload=WORKLOAD, stages=(one,))


_OPTIMIZER = ("master", "exp_avg", "exp_avg_sq")


def offloaded(plan: Plan, *shares: float) -> Plan:
    """``plan`` with so much of each optimizer slot in host memory (the last share for all that follow)."""

    def slot(one: Slot) -> Slot:
        if one.name not in _OPTIMIZER:
            return one
        share = shares[min(_OPTIMIZER.index(one.name), len(shares) - 1)]
        return replace(one, host=True, host_share=share) if share else replace(one, host=False, host_share=1.0)

    return replace(plan, stages=tuple(replace(s, slots=tuple(map(slot, s.slots))) for s in plan.stages))


#: Share of a slot in host memory, for slots that lie there.
SHARES = st.sampled_from([1.0, 1.0, 0.5, 0.3, 0.75])


# -- strategies ------------------------------------------------------------------------------------------------------


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def layouts(draw: st.DrawFn, arch: Arch, num_devices: int, *, train: bool) -> dict[str, object]:
    tp = draw(st.sampled_from([t for t in legal_tp(arch, limit=8) if num_devices % t == 0]))
    pp = draw(st.sampled_from([p for p in _divisors(num_devices // tp) if p <= arch.num_layers]))
    cp = draw(st.sampled_from([c for c in (1, 1, 1, 2) if num_devices // (tp * pp) % c == 0]))
    dp = num_devices // (tp * pp * cp)
    found: dict[str, object] = {"tp": tp, "pp": pp, "cp": cp, "order": draw(st.sampled_from(ORDERS))}
    cuts = sorted(draw(st.sets(st.integers(1, arch.num_layers - 1), min_size=pp - 1, max_size=pp - 1)))
    found["pp_split"] = tuple(b - a for a, b in zip([0, *cuts], [*cuts, arch.num_layers], strict=True))
    shard = draw(st.sampled_from(["none", "zero1", "zero2", "zero3", "fsdp"] if train else ["none", "none", "fsdp"]))
    if shard.startswith("zero"):
        found["zero"] = int(shard[-1])
    elif shard == "fsdp" and dp * cp > 1:
        found["fsdp"] = draw(st.sampled_from([d for d in _divisors(dp * cp) if d > 1]))
    return found


@st.composite
def device_sets(draw: st.DrawFn, available: tuple[Device, ...], most: int = 16) -> tuple[Device, ...]:
    count = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n <= min(len(available), most)]))
    style = draw(st.sampled_from(["first", "last", "some", "shuffled"]))
    if style == "first":
        return available[:count]
    if style == "last":
        return available[-count:]
    chosen = draw(st.permutations(available))[:count]
    return tuple(chosen) if style == "shuffled" else tuple(sorted(chosen))


@st.composite
def clusters(draw: st.DrawFn, first: int = 0, most: int = 16) -> Cluster:
    nodes: list[Node] = []
    for number in range(draw(st.integers(1, 4))):
        room = most - sum(n.num_gpus for n in nodes)
        size = (
            draw(st.sampled_from([2, 4, 8, 3]))
            if nodes
            else draw(st.sampled_from([s for s in (2, 4, 8, 3) if s <= room]))
        )
        if size <= room:
            nic, rails = draw(st.sampled_from([25e9, 200e9, 2e9])), draw(st.sampled_from([1, 1, size]))
            nodes.append(node(f"n{first + number}", size, nic=nic, rails=rails))
    return Cluster(nodes=tuple(nodes))


@st.composite
def changed_clusters(draw: st.DrawFn, old: Cluster) -> Cluster:
    """The same cluster, a larger one, or one that lost nodes (also all of them, replaced)."""
    change = draw(st.sampled_from(["same", "same", "grow", "lose", "replace", "fewer"]))
    used = sum(n.num_gpus for n in old.nodes)
    if change == "grow" and used < 16:
        more = draw(clusters(first=10 * len(old.nodes), most=max(2, 16 - used)))
        return Cluster(nodes=(*old.nodes, *more.nodes))
    if change == "lose" and len(old.nodes) > 1:
        lost = draw(st.sampled_from(old.nodes))
        return Cluster(nodes=tuple(n for n in old.nodes if n != lost), lost=(lost.name,))
    if change == "replace" and len(old.nodes) > 1:
        lost = draw(st.sampled_from(old.nodes))
        fresh = node(f"m{len(old.nodes)}", lost.num_gpus)
        return Cluster(nodes=(*(n for n in old.nodes if n != lost), fresh), lost=(lost.name,))
    if change == "fewer":  # the nodes stay, one of them with half of its GPUs
        less = draw(st.sampled_from(old.nodes))
        half = (less.num_gpus + 1) // 2
        fewer = replace(less, num_gpus=half, rails=1 if less.rails == 1 else half)
        return Cluster(nodes=tuple(fewer if n == less else n for n in old.nodes))
    return old


@st.composite
def plans(draw: st.DrawFn, on: Cluster, archs: tuple[Arch, Arch], mode: str, *, rich: bool = True) -> Plan:
    """``archs``: of actor (and its reference) and of the critic. ``rich``: more than one trained model."""
    actor = Model(name="actor", arch=archs[0], source="tiny", precision=draw(st.sampled_from(["bf16", "bf16", "fp32"])))
    critic = Model(name="critic", arch=archs[1], source="tiny", head="value")
    ref = Model(name="ref", arch=archs[0], source="tiny", frozen=True, base="actor")
    chosen: list[Stage] = []
    models = {actor.name: actor}
    available = on.devices
    if mode == "async" and len(available) > 2:
        engine_devices = draw(device_sets(available[: len(available) // 2]))
        available = available[len(available) // 2 :]
        settings = {"idle": draw(st.sampled_from(["resident", "resident", "offload"]))}
        engine = stage(actor, "generate", engine_devices, **draw(layouts(actor.arch, len(engine_devices), train=False)))
        chosen.append(replace(engine, **settings))  # type: ignore[arg-type]
    if draw(st.integers(0, 9)):
        owner = draw(trained(actor, available))
    else:  # not trained yet, or no more
        devices = draw(device_sets(available))
        owner = stage(actor, "infer", devices, **draw(layouts(actor.arch, len(devices), train=False)))
    own_copy = rich and owner.is_train and draw(st.integers(0, 5)) == 0
    if own_copy:
        devices = draw(device_sets(available))
        idle = draw(st.sampled_from(["resident", "offload"]))
        infer = stage(actor, "infer", devices, **draw(layouts(actor.arch, len(devices), train=False)), idle=idle)
        chosen += [infer, owner] if draw(st.booleans()) else [owner, infer]
    else:
        chosen.append(owner)
    if mode == "sync" and draw(st.booleans()):
        devices = draw(device_sets(available))
        chosen.append(stage(actor, "generate", devices, **draw(layouts(actor.arch, len(devices), train=False))))
    if rich and draw(st.booleans()):
        chosen.append(guest(owner, actor, "logprob"))
    if rich and draw(st.booleans()):
        models[critic.name] = critic
        chosen.append(draw(trained(critic, available)))
    if rich and draw(st.booleans()):
        models[ref.name] = ref
        if draw(st.booleans()):
            chosen.append(guest(owner, ref, "infer", swap=draw(st.sampled_from([None, "host"])), idle="resident"))
        else:
            devices = draw(device_sets(available))
            idle = draw(st.sampled_from(["resident", "offload", "discard"]))
            chosen.append(stage(ref, "infer", devices, **draw(layouts(ref.arch, len(devices), train=False)), idle=idle))
    workload = replace(WORKLOAD, mode=mode)
    return Plan(cluster=on, models=tuple(models.values()), workload=workload, stages=tuple(chosen))


@st.composite
def trained(draw: st.DrawFn, model: Model, available: tuple[Device, ...]) -> Stage:
    devices = draw(device_sets(available))
    found = stage(model, "train", devices, **draw(layouts(model.arch, len(devices), train=True)))
    idle = draw(st.sampled_from(["resident", "resident", "resident", "offload"]))
    slots: tuple[Slot, ...] = found.slots
    if draw(st.integers(0, 4)) == 0:
        names = draw(st.sampled_from([("exp_avg", "exp_avg_sq"), ("master", "exp_avg", "exp_avg_sq")]))
        slots = tuple(
            replace(s, host=s.name in names, host_share=draw(SHARES)) if s.name in names else s for s in slots
        )
    return replace(found, idle=idle, slots=slots)


@st.composite
def chains(draw: st.DrawFn, length: int = 2, *, rich: bool = True, most: int = 16) -> tuple[Plan, ...]:
    """Plans of the same models, each on what became of the cluster before."""
    archs = (draw(st.sampled_from(ARCHS)), draw(st.sampled_from(ARCHS)))
    mode = draw(st.sampled_from(["sync", "sync", "async"]))
    on = draw(clusters(most=most))
    found = [draw(plans(on, archs, mode, rich=rich))]
    while len(found) < length:
        on = draw(changed_clusters(on))
        found.append(_same_precision(found[0], draw(plans(on, archs, mode, rich=rich))))
    return tuple(found)


def pairs(*, rich: bool = True, most: int = 16) -> st.SearchStrategy[tuple[Plan, Plan]]:
    return chains(2, rich=rich, most=most)  # type: ignore[return-value]


def _same_precision(old: Plan, new: Plan) -> Plan:
    """``new`` with the slots' dtypes of ``old``: a transition converts nothing."""
    precision = old.model("actor").precision
    models = tuple(replace(m, precision=precision) if m.name == "actor" else m for m in new.models)
    stages = []
    for one in new.stages:
        if one.model == "actor":
            model = next(m for m in models if m.name == "actor")
            known = {s.name: s for s in one.slots}
            slots = default_slots(trains=one.kind == "train", precision=model.precision, optimizer=None)
            one = replace(one, slots=tuple(replace(known.get(s.name, s), dtype=s.dtype) for s in slots))
        stages.append(one)
    return replace(new, models=models, stages=tuple(stages))


def describe(plan: Plan) -> str:
    """A plan in a few lines, for the report of a failed example."""
    lines = ["cluster " + " ".join(f"{n.name}x{n.num_gpus}" for n in plan.cluster.nodes) + f" {plan.workload.mode}"]
    for one in plan.stages:
        settings = {
            key: getattr(one, key)
            for key in ("with_", "tp", "pp", "cp", "dp", "zero", "fsdp", "order", "idle", "swap", "pp_split")
            if getattr(one, key)
        }
        held = " ".join(f"{s.name}:{s.text}" for s in one.slots)
        lines.append(f"  {one.name} on {' '.join(map(str, one.ranks))} {settings} {held}")
    return "\n".join(lines)
