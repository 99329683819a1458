"""Layouts near the one that a plan has: other tp, pp, ep of a stage and of everything in its processes.

Each is what the front end would make of the plan with those keys written into it, so it is legal by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nereus.ir.plan import Plan, Stage
from nereus.models.batch import accumulation
from nereus.models.fp8 import fp8_refusals
from nereus.models.legality import etp_refusals, legal_ep, tp_refusals
from nereus.models.memory.state import owner_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """``text``: the keys to write. ``keys``: the degrees that differ; tp taken out of pp counts as tp alone."""

    text: str
    keys: tuple[str, ...]
    change: Callable[[Plan], Plan]


def members(plan: Plan, owner: Stage) -> tuple[Stage, ...]:
    """Stages in the processes of ``owner``, itself included."""
    return tuple(s for s in plan.stages if s.service is None and owner_of(plan, s).name == owner.name)


def neighbours(plan: Plan, owner: Stage) -> Iterator[Neighbour]:
    """More tensor parallelism (out of dp or out of the pipeline, inside a node), pipeline stages and expert
    parallelism; those that change one degree first."""
    inside = min(sum(d.node == node for d in owner.devices) for node in {d.node for d in owner.devices})
    moe = plan.model(owner.model).arch.moe is not None
    tps = [tp for tp in range(owner.tp, inside + 1) if tp == owner.tp or inside % tp == 0]
    most = min(len(owner.devices), plan.model(owner.model).arch.num_layers)
    pps = [pp for pp in range(owner.pp, most + 1) if pp % owner.pp == 0]
    eps = [ep for ep in legal_ep(plan.model(owner.model).arch) if ep >= owner.ep] if moe else [owner.ep]
    wanted: dict[tuple[int, int, int], tuple[str, ...]] = {}
    for tp in tps[1:]:
        if owner.pp > 1 and owner.pp * owner.tp % tp == 0:
            wanted[tp, owner.pp * owner.tp // tp, owner.ep] = ("tp",)
    for tp in tps:
        for pp in pps:
            for ep in eps:
                differ = (("tp", tp != owner.tp), ("pp", pp != owner.pp), ("ep", ep != owner.ep))
                if keys := tuple(name for name, changed in differ if changed):
                    wanted.setdefault((tp, pp, ep), keys)
    order = {"tp": 0, "pp": 1, "ep": 2}
    for (tp, pp, ep), keys in sorted(wanted.items(), key=lambda item: (len(item[1]), [order[k] for k in item[1]])):
        found = at_degrees(plan, owner, tp=tp, pp=pp, ep=ep)
        if found is not None:
            yield replace(found, keys=keys)


def at_degrees(plan: Plan, owner: Stage, *, tp: int, pp: int, ep: int, uneven: bool = False) -> Neighbour | None:
    """The stages of ``owner``'s processes at these degrees, on the GPUs that they have; None where the front end would
    refuse the plan. ``uneven``: where ``pp`` does not divide the layers, with a ``pp_split`` that is written."""
    found = _changed(plan, owner, tp=tp, pp=pp, ep=ep, uneven=uneven)
    return None if found is None else Neighbour(text=found[0], keys=(), change=_setter(found[1]))


def enough_replicas(stage: Stage) -> bool:
    return stage.replicas is None or stage.num_emus >= stage.replicas.min + stage.replicas.dormant


def _setter(changed: dict[str, dict[str, object]]) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        stages = (replace(s, **changed[s.name]) if s.name in changed else s for s in plan.stages)  # type: ignore[arg-type]
        return replace(plan, stages=tuple(stages))

    return change


def _changed(
    plan: Plan, owner: Stage, *, tp: int, pp: int, ep: int, uneven: bool
) -> tuple[str, dict[str, dict[str, object]]] | None:
    """What to write, and the fields of every stage in these processes; None where the plan would be refused."""
    num_devices = len(owner.devices)
    if num_devices % (tp * pp * owner.cp):
        return None
    dp = num_devices // (tp * pp * owner.cp)
    written = {key for key, _ in owner.key_spans}
    keys = {"tp": (tp, owner.tp), "pp": (pp, owner.pp), "ep": (ep, owner.ep)}
    texts = [f"{key} = {value}" for key, (value, before) in keys.items() if value != before]
    fsdp, alike = owner.fsdp, dp * owner.cp
    if fsdp and (fsdp == owner.dp * owner.cp or alike % fsdp):
        fsdp = alike if alike > 1 else 0
        if "fsdp" in written or owner.backend != "fsdp":
            texts.append("fsdp = full")
    split: tuple[int, ...] | None = None
    if pp != owner.pp:
        layers = {plan.model(stage.model).arch.num_layers for stage in members(plan, owner)}
        if uneven and len(layers) == 1 and max(layers) % pp:
            split = even_as_can_be(max(layers), pp)
        texts += [f"{key} = default" for key in ("vp", "pp_split") if key in written and (key == "vp" or not split)]
        texts += [f"pp_split = ({', '.join(map(str, split))})"] if split else []
    if "dp" in written and dp != owner.dp:
        texts.append(f"dp = {dp}")
    fields: dict[str, dict[str, object]] = {}
    for stage in members(plan, owner):
        found = _fields(plan, owner, stage, tp=tp, pp=pp, ep=ep, dp=dp, split=split)
        if found is None:
            return None
        fields[stage.name] = {**found, "tp": tp, "pp": pp, "dp": dp, "fsdp": fsdp}
        if stage.replicas is not None and not enough_replicas(replace(stage, **fields[stage.name])):  # type: ignore[arg-type]
            return None
    return "  ".join(texts), fields


def even_as_can_be(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, those with one more in the middle: the first keeps the most activations, the last
    has the head."""
    first = (pp - layers % pp) // 2
    return tuple(layers // pp + (first <= stage < first + layers % pp) for stage in range(pp))


def _fields(
    plan: Plan, owner: Stage, stage: Stage, *, tp: int, pp: int, ep: int, dp: int, split: tuple[int, ...] | None
) -> dict[str, object] | None:
    model = plan.model(stage.model)
    arch = model.arch
    if tp_refusals(arch, tp, head=model.head, backend=stage.framework):
        return None
    if stage.is_train:
        per = 1 if stage.max_tokens is not None else stage.micro_batch
        if accumulation(plan.workload.mini_batch, dp, per) is None:
            return None
    if arch.moe is None:
        ep = etp = 1
    else:
        etp = _etp(plan, owner, tp=tp, ep=ep)
        group = tp * owner.cp * dp
        if ep not in legal_ep(arch) or etp_refusals(arch, etp) or group % (ep * etp):
            return None
    if any(slot.name == "weight" and slot.dtype == "fp8" for slot in stage.slots) and not stage.is_train:
        form = "stripes" if stage.backend == "megatron" else "segments"
        follows = ep == 1 and (etp == tp or (stage.kind == "generate" and etp == 1))
        if fp8_refusals(arch, tp=tp, etp=None if follows else etp, form=form):
            return None
    sp = tp > 1 and (owner.sp or all(key != "sp" for key, _ in owner.key_spans))
    found: dict[str, object] = {"ep": ep, "etp": etp, "sp": sp}
    if pp != owner.pp:
        if arch.num_layers % pp and split is None:
            return None
        found.update(vp=1, pp_split=split or (arch.num_layers // pp,) * pp, chunks=())
    return found


def _etp(plan: Plan, owner: Stage, *, tp: int, ep: int) -> int:
    """As the front end fills it in: experts are cut like the rest until they are spread; Megatron cuts them still."""
    if any(key == "etp" for key, _ in owner.key_spans):
        return owner.etp
    if plan.model(owner.model).arch.moe is None:  # a guest with experts follows its host
        return tp
    return tp if ep == 1 or owner.backend == "megatron" else 1
