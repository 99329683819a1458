"""The placed plan: one self-contained text with every default written and every rank's device pinned."""

from __future__ import annotations

import dataclasses
from typing import Any

from nereus.ir.cluster import Device
from nereus.ir.plan import Model, Plan, Stage
from nereus.lang import schema
from nereus.lang.formatter import format_file
from nereus.lang.parser import parse
from nereus.lang.printer import quote
from nereus.lang.ranges import compress_devices, compress_names
from nereus.lang.shared_base import runs_on_another
from nereus.models.presets import preset, preset_names
from nereus.models.slots import default_slots

_HEADER = "# Placed plan: no extends, every default written, every rank's device pinned."


def pinned(plan: Plan) -> Plan:
    """The plan with its listed orders as placements where none are pinned yet."""
    stages = tuple(
        dataclasses.replace(stage, place=stage.devices) if stage.place is None and stage.devices else stage
        for stage in plan.stages
    )
    return dataclasses.replace(plan, stages=stages)


def placed_plan_text(plan: Plan) -> str:
    """Parses back to ``pinned(plan)``, which is ``plan`` itself once it is placed."""
    from nereus.ir.diagnostic import Source

    plan = pinned(plan)
    parts = [_HEADER, _cluster(plan), *(_model(m, plan) for m in plan.models), _workload(plan)]
    parts += [_stage(stage, plan) for stage in plan.stages]
    if plan.checkpoint is not None:
        c = plan.checkpoint
        parts.append(
            _block("checkpoint", [("path", quote(c.path)), ("format", c.format), ("every", f"{c.every} steps")])
        )
    result = parse(Source(path=plan.path, text="\n\n".join(parts)))
    assert not result.diagnostics, result.diagnostics
    return format_file(result.file)


def _block(head: str, entries: list[tuple[str, str]], inner: tuple[str, ...] = ()) -> str:
    lines = [f"{key} = {value}" for key, value in entries]
    return "\n".join([f"{head} {{", *lines, *inner, "}"])


def _cluster(plan: Plan) -> str:
    # Neighbours that differ only in their number share a block.
    groups: list[list[Any]] = []
    for node in plan.cluster.nodes:
        facts = dataclasses.replace(node, name="")
        if groups and groups[-1][0] == facts:
            groups[-1][1].append(node.name)
        else:
            groups.append([facts, [node.name]])
    inner = []
    for facts, names in groups:
        for name in compress_names(names):
            entries = [
                ("gpus", f"{facts.num_gpus} x {quote(facts.gpu.id)}"),
                ("host_mem", f"{facts.host_mem_bytes} B"),
                ("nic", f"{_number(facts.nic_bytes_per_s)} B/s"),
            ]
            if facts.rails > 1:
                entries.append(("rails", str(facts.rails)))
            inner.append(_block(f"node {name}", entries))
    pool = plan.cluster.pool
    if pool is not None:
        limits = (("min", pool.min_gpus), ("max", pool.max_gpus), ("standby", pool.standby_gpus))
        written = [(key, f"{value} gpus") for key, value in limits if value is not None]
        if pool.notice_s is not None:
            written.append(("notice", f"{_number(pool.notice_s)} s"))
        inner.append(_block("pool", written))
    lost = [("lost", _devices_list(compress_names(plan.cluster.lost)))] if plan.cluster.lost else []
    return _block("cluster", lost, tuple(inner))


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)


def _devices_list(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"({', '.join(words)})"


def _model(model: Model, plan: Plan) -> str:
    entries = [("head", model.head), ("frozen", _bool(model.frozen)), ("precision", model.precision)]
    inner: tuple[str, ...] = ()
    adapter: tuple[str, ...] = ()
    if model.lora is not None:
        targets = "all" if not model.lora.targets else f"({', '.join(model.lora.targets)})"
        keys = [("rank", str(model.lora.rank)), ("alpha", _number(model.lora.alpha)), ("targets", targets)]
        adapter = (_block("lora", keys),)
    elif model.base is not None and plan.model(model.base).lora is not None:
        entries.append(("lora", "none"))
    if model.base is not None:
        value = model.base
    elif model.source in preset_names() and preset(model.source) == model.arch:
        value = quote(model.source)
    else:
        value = f"hf({quote(model.source)})"
        inner = (_shape("arch", model.arch),)
    return _block(f"model {model.name} = {value}", entries, (*adapter, *inner))


def _shape(head: str, shape: Any) -> str:
    entries, inner = [], []
    for field in dataclasses.fields(shape):
        value = getattr(shape, field.name)
        if dataclasses.is_dataclass(value):
            inner.append(_shape(field.name, value))
        elif value is None:
            if field.name not in ("moe", "mla"):
                entries.append((field.name, "none"))
        else:
            entries.append((field.name, _bool(value) if isinstance(value, bool) else str(value)))
    return _block(head, entries, tuple(inner))


def _workload(plan: Plan) -> str:
    w = plan.workload
    mode = w.mode
    if mode == "async":
        mode += f" {{ staleness = {w.staleness}  sync_every = {w.sync_every} updates  partial = {_bool(w.partial)} }}"
    entries = [("algorithm", w.algorithm), ("mode", mode)]
    for key in schema.WORKLOAD_KEYS[2:]:
        value = getattr(w, key)
        if value is not None:
            entries.append((key, str(value)))
    return _block("workload", entries)


def _stage(stage: Stage, plan: Plan) -> str:
    model = plan.model(stage.model)
    entries: list[tuple[str, str]] = []
    host = None if stage.with_ is None else plan.stage(stage.with_)
    if stage.service is not None:
        entries.append(("service", quote(stage.service)))
    elif host is not None:
        entries.append(("with", host.name))
        if model.arch != plan.model(host.model).arch:
            entries.append(("pp_split", _tuple(stage.chunks or stage.pp_split)))
    else:
        entries += _layout(stage, plan)
    known = schema.STAGE_KEYS[stage.kind]
    for key, value in (
        ("backend", stage.backend if host is None else None),
        ("engine", stage.engine),
        ("micro_batch", str(stage.micro_batch)),
        ("max_tokens", None if stage.max_tokens is None else str(stage.max_tokens)),
        ("recompute", stage.recompute),
        ("optimizer", stage.optimizer),
        ("kv_cache", None if stage.kv_cache_bytes is None else f"{stage.kv_cache_bytes} B"),
        ("mem", None if stage.mem_fraction is None else repr(stage.mem_fraction)),
        ("inflight", stage.inflight),
    ):
        if value is not None and key in known:
            entries.append((key, value))
    inner: list[str] = []
    if stage.service is None:
        shared = runs_on_another(plan, stage)
        if (host is None or host.model != stage.model) and not shared:
            entries.append(("idle", stage.idle))
        if stage.swap is not None and not shared:
            entries.append(("swap", stage.swap))
        inner.append(_state(stage, model))
    if stage.replicas is not None:
        replicas = [("min", str(stage.replicas.min)), ("dormant", str(stage.replicas.dormant))]
        inner.append(_block("replicas", replicas))
    return _block(f"stage {stage.name}", entries, tuple(inner))


def _layout(stage: Stage, plan: Plan) -> list[tuple[str, str]]:
    num_gpus = {node.name: node.num_gpus for node in plan.cluster.nodes}

    def devices(found: tuple[Device, ...]) -> str:
        return _devices_list(compress_devices(found, num_gpus))

    fsdp = "off" if not stage.fsdp else "full" if stage.fsdp == stage.num_alike else str(stage.fsdp)
    entries = [("on", devices(stage.devices))]
    entries += [(key, str(getattr(stage, key))) for key in ("tp", "pp", "cp")]
    if plan.model(stage.model).arch.moe is not None:
        entries += [(key, str(getattr(stage, key))) for key in ("ep", "etp")]
    entries += [("vp", str(stage.vp)), ("dp", str(stage.dp)), ("sp", _bool(stage.sp))]
    entries += [
        ("pp_split", _tuple(stage.chunks or stage.pp_split)),
        ("zero", str(stage.zero)),
        ("fsdp", fsdp),
        ("order", stage.order),
    ]
    assert stage.place is not None
    return [*entries, ("place", devices(stage.place))]


def _state(stage: Stage, model: Model) -> str:
    entries = [(slot.name, slot.text) for slot in stage.slots]
    usual = default_slots(trains=stage.is_train, precision=model.precision, optimizer=stage.optimizer)
    names = {slot.name for slot in stage.slots}
    entries += [(slot.name, "none") for slot in usual if slot.name not in names]
    return _block("state", entries)


def _tuple(numbers: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, numbers))})"


def _bool(value: bool) -> str:
    return "true" if value else "false"
