"""Why there is no transition: the diagnostics of the passes (NRS5xxx), with numbers, witness and the way out."""

from __future__ import annotations

import numpy as np

from nereus.ir.diagnostic import Diagnostic, Label, Severity
from nereus.ir.holdings import Holdings, StateSet, Topology
from nereus.ir.plan import Model, Plan, Stage
from nereus.ir.units import format_bytes
from nereus.models.expert_layout import unknown_expert_layouts
from nereus.passes.diff import Diff
from nereus.passes.lifecycle import Lifecycle
from nereus.passes.memory import MemoryPlan
from nereus.passes.tight import Stuck


def _label(stage: Stage | None, key: str = "on", message: str = "") -> Label | None:
    span = stage.key_span(key) if stage is not None else None
    return Label(span=span, message=message) if span is not None else None


def check_experts(old: Plan, new: Plan) -> list[Diagnostic]:
    """Frameworks differ in how FSDP shards experts that are spread: refused, not guessed."""
    return [*unknown_expert_layouts(old), *unknown_expert_layouts(new)]


def check_machines(old: Plan, new: Plan) -> list[Diagnostic]:
    """A node that has other GPUs under its old name is another machine: nothing on it could be a source."""
    before = {node.name: node.gpu for node in old.cluster.nodes}
    return [
        Diagnostic(
            code="NRS5008",
            severity=Severity.ERROR,
            headline=f"{node.name} has {node.gpu.id} in the new plan and {before[node.name].id} in the old one",
            notes=("a node is known by its name; another kind of GPU under it is another machine",),
            help=f"Give the new machine a name of its own, and remove = {node.name} if the old one is gone.",
        )
        for node in new.cluster.nodes
        if node.name in before and before[node.name] != node.gpu
    ]


def renamed_models(old: Plan, new: Plan) -> list[Diagnostic]:
    """Warnings: another source of the same shape. The job's weights stay, since a transition keeps state."""
    found = []
    for model in new.models:
        before = next((m for m in old.models if m.name == model.name), None)
        if before is None or before.arch != model.arch or before.head != model.head or before.source == model.source:
            continue
        found.append(
            Diagnostic(
                code="NRS5009",
                severity=Severity.WARNING,
                headline=f"model {model.name}: {before.source} -> {model.source}, same shape: its weights stay",
                primary=Label(span=model.span) if model.span else None,
                notes=("a transition moves the state that the job has; it does not load another model",),
                help="If the other model is meant, give it a name of its own.",
            )
        )
    return found


def _kind(model: Model) -> str:
    lora = model.lora
    adapter = "no lora" if lora is None else f"lora rank {lora.rank}, targets {', '.join(lora.targets) or 'all'}"
    return f"{model.source}, head {model.head}, {adapter}"


def check_models(old: Plan, new: Plan) -> list[Diagnostic]:
    """A model keeps its shape, head and adapter: Nereus moves state, it does not convert models."""
    found = []
    for model in new.models:
        before = next((m for m in old.models if m.name == model.name), None)
        same = before is not None and (before.arch, before.head, before.lora) == (model.arch, model.head, model.lora)
        if before is None or same:
            continue
        found.append(
            Diagnostic(
                code="NRS5004",
                severity=Severity.ERROR,
                headline=f"model {model.name} is another model in the new plan",
                primary=Label(span=model.span, message=_kind(model)) if model.span else None,
                secondary=(Label(span=before.span, message=_kind(before)),) if before.span else (),
                help="Keep the model, or give the new one a name of its own.",
            )
        )
    return found


def dropped_slots(before: StateSet, new: Holdings) -> tuple[str, ...]:
    """Slots of an old state set that no state set of the new plan holds any more."""
    kept = {slot.name for s in new.of_model(before.model) for slot in s.slots}
    return tuple(slot.name for slot in before.slots if slot.name not in kept)


def _held_by_base(before: StateSet, new: Holdings, plan: Plan) -> bool:
    """A model that is another one without its adapter: the other's frozen weights are its own."""
    model = next((m for m in plan.models if m.name == before.model), None)
    if model is None or model.base is None or model.lora is not None:
        return False
    base = plan.model(model.base)
    same = (base.arch, base.head, base.precision) == (model.arch, model.head, model.precision)
    return base.lora is not None and same and bool(new.of_model(base.name))


def check_state(old: Holdings, new: Holdings, plan: Plan, *, allow_destroy: bool) -> list[Diagnostic]:
    found: list[Diagnostic] = []
    for before in old.sets:
        gone = dropped_slots(before, new)
        if gone and not allow_destroy and not _held_by_base(before, new, plan):
            what = "all of its state" if len(gone) == len(before.slots) else "its " + ", ".join(gone)
            found.append(
                Diagnostic(
                    code="NRS5007",
                    severity=Severity.ERROR,
                    headline=f"the new plan drops {before.stage}: {what} would be destroyed",
                    notes=(f"no stage of the new plan holds {before.model}'s {', '.join(gone)}",),
                    help="Keep a stage that holds the state, or allow the loss with --allow-destroy.",
                )
            )
        after = new.find(before.stage)
        for slot in before.slots if after is not None else ():
            other = after.slot(slot.name) if after is not None else None
            if other is not None and other.dtype != slot.dtype:
                found.append(
                    Diagnostic(
                        code="NRS5005",
                        severity=Severity.ERROR,
                        headline=f"{before.stage}: slot {slot.name} changes from {slot.dtype} to {other.dtype}",
                        primary=_label(plan.find_stage(before.stage), "state"),
                        notes=("a transition moves state bit for bit; a conversion would round it",),
                        help=f"Keep {slot.name} = {slot.dtype} in state {{ }} and change it with the framework.",
                    )
                )
    return found


def lost_state(difference: Diff, plan: Plan) -> list[Diagnostic]:
    """One diagnostic per state set and slots: which sole copies were on lost nodes."""
    topology = difference.topology
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, set[str], str]] = {}
    for entry in difference.lost:
        key = (entry.state_set, entry.slots)
        num_bytes, holders, tensor = totals.get(key, (0, set(), entry.example_tensor))
        holders |= {topology.place_name(p) for p in entry.last_holders}
        totals[key] = (num_bytes + entry.num_bytes, holders, tensor)
    found = []
    for (stage, slots), (num_bytes, holders, tensor) in totals.items():
        nodes = sorted({name.split(".")[0] for name in holders})
        shown = sorted(holders)
        listed = ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
        found.append(
            Diagnostic(
                code="NRS5001",
                severity=Severity.ERROR,
                headline=f"{stage}: {format_bytes(num_bytes)} of {', '.join(slots)} "
                f"had their only copy on {', '.join(nodes)}",
                primary=_label(plan.find_stage(stage), "on"),
                notes=(
                    f"sole copies were on {listed}, for example of {tensor}",
                    "no living GPU or host memory holds them, so no transition can bring them back",
                ),
                help=_way_back(plan, stage, nodes),
                data=(("lost_bytes", num_bytes), ("stage", stage), ("nodes", " ".join(nodes))),
            )
        )
    return found


def _way_back(plan: Plan, stage: str, nodes: list[str]) -> str:
    model = next(m for m in plan.models if stage.startswith(f"{m.name}."))
    leave = f"If {nodes[0]} still lives, keep it in the cluster and name no stage on it: then it is a source."
    if model.frozen:
        return f"{model.name} is frozen: let the framework load it again from {model.source}. {leave}"
    if plan.checkpoint is None:
        return f"Roll the whole job back to a checkpoint, named in checkpoint {{ path = ... }}. {leave}"
    kept = f"the checkpoint in {plan.checkpoint.path} (every {plan.checkpoint.every} steps)"
    return f"Roll the whole job back to one version: {kept}. {leave}"


def _space(topology: Topology, space: int) -> str:
    if space < topology.num_devices:
        return str(topology.devices[space])
    return f"{topology.nodes[space - topology.num_devices].name}.host"


def _memory_notes(memory: MemoryPlan, space: int) -> tuple[str, ...]:
    state = memory.state
    return (
        f"state that stays {format_bytes(int(state.kept[space]))}, goes {format_bytes(int(state.old[space]))}, "
        f"comes {format_bytes(int(state.new[space]))}; at engine start "
        f"{format_bytes(int(memory.reversible['at engine start'][space]))}",
    )


def reversible_does_not_fit(memory: MemoryPlan, topology: Topology, plan: Plan) -> Diagnostic:
    space = memory.worst(memory.reversible_peak)
    need, have = int(memory.reversible_peak[space]), int(memory.capacity[space])
    return Diagnostic(
        code="NRS5003",
        severity=Severity.ERROR,
        headline=f"reversible mode needs {format_bytes(need)} of {format_bytes(have)} on {_space(topology, space)}",
        notes=_memory_notes(memory, space),
        help="Leave the mode to the compiler (it takes tight mode where the old plan cannot stay whole).",
        data=(("need_bytes", need), ("have_bytes", have), ("device", _space(topology, space))),
    )


def setup_does_not_fit(memory: MemoryPlan, life: Lifecycle, topology: Topology, plan: Plan) -> Diagnostic:
    """Engines or processes that start before anything old can go, each with its context and staging."""
    at_start = memory.reversible["at engine start"]
    starting = np.maximum(at_start, memory.tight_base)
    space = memory.worst(starting)
    need, have = int(starting[space]), int(memory.capacity[space])
    numbers = (("need_bytes", need), ("have_bytes", have), ("device", _space(topology, space)))
    amounts = f"{format_bytes(need)} of {format_bytes(have)} on {_space(topology, space)}"
    engines = [op for op in life.ops if op.kind == "engine-start" and space in op.devices]
    if not engines or int(at_start[space]) <= have:
        return Diagnostic(
            code="NRS5002",
            severity=Severity.ERROR,
            headline=f"starting the new processes needs {amounts}",
            notes=_memory_notes(memory, space),
            help="Let state leave the GPU first (idle = offload), or put fewer processes on it.",
            data=numbers,
        )
    engine = engines[-1]
    size = engine.running_bytes[engine.devices.index(space)]
    return Diagnostic(
        code="NRS5002",
        severity=Severity.ERROR,
        headline=f"starting {engine.stage} needs {amounts}",
        primary=_label(plan.find_stage(engine.stage), "on", f"its new engine takes {format_bytes(size)}"),
        notes=(
            f"beside it lie {format_bytes(need - size)}, which stay until the commit",
            *_memory_notes(memory, space),
        ),
        help=f"Lower {engine.stage}'s kv_cache or mem, or let what is resident there leave first (idle = offload).",
        data=numbers,
    )


def stuck(witness: Stuck, memory: MemoryPlan, topology: Topology, plan: Plan) -> Diagnostic:
    _device, stage, slot, tensor = witness.storage
    short = witness.need_bytes - witness.free_bytes
    host = witness.host_short_bytes
    notes: tuple[str, ...] = ()
    if host is not None:
        node = topology.nodes[topology.node_of_place(witness.space)].name
        notes = (
            f"the smallest storage there that would make room could wait in {node}'s host memory, which lacks "
            f"{format_bytes(host)} for it",
        )
    return Diagnostic(
        code="NRS5002",
        severity=Severity.ERROR,
        headline=f"no order of the transfer fits: {_space(topology, witness.space)} lacks {format_bytes(short)}",
        primary=_label(plan.find_stage(stage)),
        notes=(
            f"next to arrive is {stage}'s {slot} of tensor {tensor} ({format_bytes(witness.need_bytes)}), "
            f"{format_bytes(witness.free_bytes)} are free, and nothing there can leave before something else arrives",
            *notes,
            *_memory_notes(memory, witness.space),
        ),
        help=_smallest_change(witness, memory, topology, short),
        data=(
            ("need_bytes", witness.need_bytes),
            ("have_bytes", witness.free_bytes),
            ("device", _space(topology, witness.space)),
            *((("host_short_bytes", host),) if host is not None else ()),
        ),
    )


def _smallest_change(witness: Stuck, memory: MemoryPlan, topology: Topology, short: int) -> str:
    """What frees the bytes that are short with the least change: windows, host memory, or state that leaves first."""
    where = _space(topology, witness.space)
    staging = int(memory.staging[witness.space]) if witness.space < len(memory.staging) else 0
    if short < staging:
        window = (staging - short) // 2
        return f"Stage less: a window of {window:,} bytes frees {format_bytes(short)} on {where} (--pass-pipeline)."
    if witness.host_short_bytes is not None:
        node = topology.nodes[topology.node_of_place(witness.space)].name
        more = format_bytes(max(witness.host_short_bytes, 1))
        return f"Leave {more} more of {node}'s host memory free (host_mem), or {format_bytes(short)} on {where}."
    return f"Free {format_bytes(short)} on {where} during the change: idle = offload for a stage there."
