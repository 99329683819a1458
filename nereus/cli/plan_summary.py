"""What ``check`` says about a plan that makes sense: degrees, memory on the fullest GPU of each stage, assumptions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nereus.cli.output import GLUE, Output, table, wrap
from nereus.ir.plan import Model, Plan, Stage
from nereus.ir.units import GB, TIB, format_gb
from nereus.lang.ranges import compress_devices, compress_names
from nereus.models.memory.activations import batch_of
from nereus.models.tensors import num_params

if TYPE_CHECKING:
    from nereus.models.memory import HostRow, MemoryReport, MemoryRow


def summary_text(plan: Plan, report: MemoryReport | None, out: Output) -> str:
    lines = [out.style(plan.path or "plan", "bold"), *_facts(plan), ""]
    lines += _stage_table(plan, report)
    if layers := _layer_lines(plan, out):
        lines += ["", "  layers of each pipeline stage", *layers]
    if report is not None:
        lines += ["", "  fullest GPU of each stage, GB", *_memory_lines(report, out)]
    lines += ["", "  assumed, since the plan does not say", *_assumption_lines(plan, out)]
    return "\n".join(lines)


def summary_json(plan: Plan, report: MemoryReport | None) -> dict[str, Any]:
    return {
        "num_nodes": len(plan.cluster.nodes),
        "num_gpus": len(plan.cluster.devices),
        "lost_nodes": list(plan.cluster.lost),
        "models": [_model_json(m) for m in plan.models],
        "workload": {
            "algorithm": plan.workload.algorithm,
            "mode": plan.workload.mode,
            "num_samples": plan.workload.num_samples,
            "mini_batch": plan.workload.mini_batch,
            "seq_len": plan.workload.seq_len,
        },
        "stages": [_stage_json(plan, stage, report) for stage in plan.stages],
        "hosts": [_host_json(host) for host in report.hosts if host.parts] if report else [],
    }


def accumulation(plan: Plan, stage: Stage) -> int | None:
    """Micro-batches per optimizer update and data-parallel rank; None where the stage does not train."""
    return batch_of(stage, plan.workload).num_microbatches if stage.is_train else None


def assumptions(stage: Stage) -> dict[str, str]:
    """Keys that the plan leaves to us, with the values they got. What does not apply to the stage is left out."""
    if stage.service is not None:
        return {}
    written = {key for key, _ in stage.key_spans}
    values: dict[str, str] = {}
    if stage.with_ is None:
        values["order"] = stage.order
        values["idle"] = stage.idle
        if stage.tp > 1 and stage.kind != "generate":
            values["sp"] = "true" if stage.sp else "false"
    if stage.max_tokens is None and stage.kind != "generate":
        values["micro_batch"] = str(stage.micro_batch)
    if stage.is_train:
        values["zero"] = str(stage.zero)
        values["recompute"] = stage.recompute
        values["optimizer"] = stage.optimizer or "adam"
        if stage.fsdp:
            del values["zero"]
    if stage.kind == "generate":
        values["inflight"] = stage.inflight
    assumed = {key: value for key, value in values.items() if key not in written}
    if "state" not in written and (stage.is_train or stage.with_ is None):
        assumed["state"] = " ".join(f"{slot.name}={slot.text.replace(' ', '')}" for slot in stage.slots)
    return assumed


def _model_json(model: Model) -> dict[str, Any]:
    found: dict[str, Any] = {"name": model.name, "source": model.source, "head": model.head, "frozen": model.frozen}
    if model.lora is None:
        return found
    trained = num_params(model.arch, model.head, model.lora, trainable=True)
    lora = {"rank": model.lora.rank, "alpha": model.lora.alpha, "targets": list(model.lora.targets)}
    return {**found, "lora": {**lora, "num_trained": trained}}


def _adapter(model: Model) -> str:
    if model.lora is None:
        return ""
    trained = num_params(model.arch, model.head, model.lora, trainable=True)
    return f" (LoRA of rank {model.lora.rank}: {trained:,} parameters)"


def _facts(plan: Plan) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for node in plan.cluster.nodes:
        kinds.setdefault(f"{node.num_gpus} x {node.gpu.id}", []).append(node.name)
    nodes = "; ".join(f"{', '.join(compress_names(names))}: {kind}" for kind, names in kinds.items())
    lost = f"; lost: {', '.join(plan.cluster.lost)}" if plan.cluster.lost else ""
    models = ", ".join(f"{model.name} {model.source}{_adapter(model)}" for model in plan.models)
    work = plan.workload
    step = f"{work.num_samples:,} samples a step, {work.mini_batch:,} an update"
    return [
        f"  cluster   {len(plan.cluster.devices):,} GPUs; {nodes}{lost}",
        f"  models    {models}",
        f"  workload  {work.algorithm}, {work.mode}; {step}; {work.prompt_len:,} + {work.response_len:,} tokens",
    ]


def _stage_table(plan: Plan, report: MemoryReport | None) -> list[str]:
    rows = []
    num_gpus = {node.name: node.num_gpus for node in plan.cluster.nodes}
    for stage in plan.stages:
        if stage.service is not None:
            rows.append((stage.name, f"service {stage.service}", *[""] * 11))
            continue
        where = f"with {stage.with_}" if stage.with_ else " ".join(compress_devices(stage.devices, num_gpus))
        degrees = [str(n) for n in (stage.dp, stage.tp, stage.pp, stage.cp, stage.ep)]
        degrees.append("" if plan.model(stage.model).arch.moe is None else str(stage.expert_dp))
        steps = accumulation(plan, stage)
        batch = str(stage.micro_batch) if stage.kind != "generate" else ""
        if stage.max_tokens is not None and batch:
            batch = f"{stage.max_tokens:,} tokens"
        need = have = ""
        if report is not None and stage.name in report.stages:
            worst = report.worst(stage.name)
            need, have = format_gb(worst.need_bytes), format_gb(worst.capacity_bytes)
        accumulated = "" if steps is None else str(steps)
        rows.append((stage.name, where, *degrees, str(stage.num_emus), batch, accumulated, need, have))
    header = ("stage", "on", "dp", "tp", "pp", "cp", "ep", "expert dp", "EMUs", "micro", "accum", "GB", "of")
    # Columns that say nothing in this plan are left out: no context or expert parallelism, no memory report.
    idle = {"cp": "1", "ep": "1", "expert dp": "", "GB": "", "of": ""}
    keep = [
        i for i, name in enumerate(header) if name not in idle or any(row[i] not in ("", idle[name]) for row in rows)
    ]
    shown = [tuple(row[i] for i in keep) for row in rows]
    return table([header[i] for i in keep], shown, right=range(2, len(keep)))


def _layer_lines(plan: Plan, out: Output) -> list[str]:
    """For stages whose plan splits layers itself, ``rest`` spelt out, or interleaves chunks: which layers lie where."""
    lines = []
    width = max((len(stage.name) for stage in plan.stages), default=0)
    for stage in plan.owners():
        written = {key for key, _ in stage.key_spans}
        if stage.pp == 1 or not stage.pp_split or (stage.vp == 1 and "pp_split" not in written):
            continue
        start = f"    {stage.name.ljust(width)}  "
        counts = ", ".join(map(str, stage.pp_split))
        text = f"{counts}{f', each in {stage.vp} chunks' if stage.vp > 1 else ''}: "
        text += "; ".join(f"stage {i}: {ranges}".replace(" ", GLUE) for i, ranges in enumerate(_layers_held(stage)))
        lines.append(wrap(text, width=out.width, indent=" " * len(start), first=start))
    return lines


def _layers_held(stage: Stage) -> list[str]:
    """``0-3, 16-19`` of every pipeline stage: global layer numbers, chunk by chunk."""
    held: list[list[str]] = [[] for _ in range(stage.pp)]
    first = 0
    for number, count in enumerate(stage.chunks or stage.pp_split):
        if count:
            held[number % stage.pp].append(f"{first}-{first + count - 1}" if count > 1 else str(first))
        first += count
    return [", ".join(ranges) or "none" for ranges in held]


def _memory_lines(report: MemoryReport, out: Output) -> list[str]:
    name_width = max((len(stage) for stage in report.stages), default=0)
    device_width = max((len(str(row.device)) for row in report.worst_rows()), default=0)
    lines = []
    for row in report.worst_rows():
        start = f"    {row.stage.ljust(name_width)}  {str(row.device).ljust(device_width)}  "
        excess = format_gb(row.need_bytes - row.capacity_bytes)
        verdict = "" if row.fits else f"; does not fit, {excess} GB too much"
        text = f"{format_gb(row.need_bytes)} = {_parts_text(row)}{verdict}"
        lines.append(wrap(text, width=out.width, indent=" " * len(start), first=start))
    for host in report.hosts:
        if host.parts:
            names = ", ".join(compress_names(host.nodes))
            start = "    host memory of "
            text = f"{names}: {format_gb(host.need_bytes)} of {format_gb(host.capacity_bytes)} = {_parts_text(host)}"
            lines.append(wrap(text, width=out.width, indent=" " * len(start), first=start))
    return lines


def _parts_text(row: MemoryRow | HostRow) -> str:
    parts = sorted(row.parts, key=lambda part: -part.num_bytes)
    shown = [part for part in parts if part.num_bytes >= GB // 20]
    small = sum(part.num_bytes for part in parts) - sum(part.num_bytes for part in shown)
    texts = [f"{part.label} {format_gb(part.num_bytes)}" for part in shown]
    if small >= GB // 20 or not texts:
        texts.append(f"other {format_gb(small)}")
    # Lines break behind a plus, never inside a part.
    return f"{GLUE}+ ".join(text.replace(" ", GLUE) for text in texts)


def _assumption_lines(plan: Plan, out: Output) -> list[str]:
    """One line per assumption, with the stages that it holds for."""
    stages_of: dict[str, list[str]] = {}
    for stage in plan.stages:
        for key, value in assumptions(stage).items():
            stages_of.setdefault(f"{key} = {value}", []).append(stage.name)
    texts = [f"{what}: {', '.join(names)}" for what, names in sorted(stages_of.items())]
    if any(stage.is_train for stage in plan.stages):
        texts.append("gradients in fp32, freed while their stage does not run")
    texts.append("capacity: 0.9 of a GPU's memory, until calibrated")
    texts.append("0.5 GB of context and 0.5 GB of communicators for each process on a GPU")
    default_host = [node.name for node in plan.cluster.nodes if node.host_mem_bytes == TIB]
    if default_host:
        texts.append(f"host_mem = 1 TiB: {', '.join(compress_names(default_host))}")
    return [wrap(text, width=out.width, indent=" " * 6, first=" " * 4) for text in texts]


def _stage_json(plan: Plan, stage: Stage, report: MemoryReport | None) -> dict[str, Any]:
    worst = report.worst(stage.name) if report is not None and stage.name in report.stages else None
    return {
        "name": stage.name,
        "devices": [str(device) for device in stage.devices],
        "with": stage.with_,
        "service": stage.service,
        **{axis: getattr(stage, axis) for axis in ("dp", "tp", "pp", "cp", "ep", "etp", "vp")},
        "expert_dp": None if plan.model(stage.model).arch.moe is None else stage.expert_dp,
        "order": stage.order,
        "num_emus": stage.num_emus,
        "micro_batch": stage.micro_batch,
        "accumulation": accumulation(plan, stage),
        "assumed": assumptions(stage),
        "memory": None if worst is None else _memory_json(worst),
    }


def _memory_json(row: MemoryRow) -> dict[str, Any]:
    return {
        "device": str(row.device),
        "need_bytes": row.need_bytes,
        "capacity_bytes": row.capacity_bytes,
        "fits": row.fits,
        "parts": _parts_json(row.parts),
    }


def _host_json(row: HostRow) -> dict[str, Any]:
    return {
        "nodes": list(row.nodes),
        "need_bytes": row.need_bytes,
        "capacity_bytes": row.capacity_bytes,
        "fits": row.fits,
        "parts": _parts_json(row.parts),
    }


def _parts_json(parts: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"label": part.label, "stage": part.stage, "num_bytes": part.num_bytes} for part in parts]
