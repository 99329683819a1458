"""Merged sections -> typed ``Plan``, and what concerns several stages at once."""

from __future__ import annotations

from collections.abc import Sequence

from nereus.ir.cluster import Device
from nereus.ir.diagnostic import Label
from nereus.ir.plan import Plan, Stage, Workload
from nereus.lang import schema
from nereus.lang.load import Chain
from nereus.lang.merge import Merged, merge
from nereus.lang.resolve_cluster import ClusterResolver
from nereus.lang.resolve_model import ModelResolver
from nereus.lang.resolve_stage import StageResolver
from nereus.lang.resolve_workload import resolve_checkpoint, resolve_workload
from nereus.lang.shared_base import share_bases
from nereus.lang.sink import Sink, listing


def resolve(chain: Chain, path: str, sink: Sink, base_dir: str | None = None) -> Plan | None:
    """The plan that a chain of files describes; None when ``sink`` has errors afterwards.

    ``base_dir``: where relative paths of the last file start; by default its own folder.
    """
    merged = merge(chain.files, sink, complete=chain.complete)
    cluster = ClusterResolver(merged, sink)
    folders = {} if base_dir is None else {path: base_dir}
    models = ModelResolver(merged, sink, folders)
    read = resolve_workload(merged, sink)
    stages = StageResolver(merged, cluster, models, None if read is None else read.with_batch, sink)
    checkpoint = resolve_checkpoint(merged, sink)
    if not merged.stages and not merged.broken:
        help_text = "write stage actor.train { on = n0 }"
        sink.error("NRS2019", "the plan has no stage", None, help=help_text)
    if read is not None and read.is_async:
        _check_generation_apart(stages.stages, cluster, sink)
    if sink.has_errors or read is None:
        return None
    _note_usual_stages(merged, read.workload, sink)
    plan = Plan(
        cluster=cluster.cluster,
        models=models.models,
        workload=read.workload,
        stages=stages.stages,
        checkpoint=checkpoint,
        path=path,
    )
    return share_bases(plan, sink)


def _check_generation_apart(stages: Sequence[Stage], cluster: ClusterResolver, sink: Sink) -> None:
    """In async mode generation runs while everything else does."""
    owners: dict[Device, list[Stage]] = {}
    for stage in stages:
        if stage.with_ is None or stage.kind == "generate":
            for device in stage.devices:
                owners.setdefault(device, []).append(stage)
    shared: dict[tuple[str, str], list[Device]] = {}
    by_name = {stage.name: stage for stage in stages}
    for device, users in owners.items():
        for stage in users:
            if stage.kind != "generate":
                continue
            for other in users:
                if other.name != stage.name:
                    low, high = (
                        sorted((stage.name, other.name)) if other.kind == "generate" else (stage.name, other.name)
                    )
                    pair = shared.setdefault((low, high), [])
                    if not pair or pair[-1] != device:
                        pair.append(device)
    for (name, other_name), devices in shared.items():
        stage, other = by_name[name], by_name[other_name]
        span, other_span = stage.key_span("on" if stage.with_ is None else "with"), other.key_span("on")
        secondary = () if other_span is None else (Label(span=other_span, message=f"{other_name} runs there too"),)
        what = cluster.name_devices(devices)
        note = "in async mode generation runs at the same time as every other stage and needs GPUs of its own"
        sink.error(
            "NRS3002",
            f"{name} and {other_name} run at the same time on {what}",
            span,
            f"{len(devices)} GPU(s) shared",
            secondary=secondary,
            notes=(note,),
            help="give them different GPUs, or write mode = sync",
            data=(("num_shared", len(devices)),),
        )


def _note_usual_stages(merged: Merged, workload: Workload, sink: Sink) -> None:
    usual = schema.USUAL_STAGES.get(workload.algorithm, ())
    missing = [name for name in usual if name not in merged.stages]
    if not missing or merged.broken or not merged.stages or merged.workload is None:
        return
    entry = merged.workload.entries.get("algorithm")
    span = merged.workload.head if entry is None else entry.span
    headline = f"{workload.algorithm} usually also has {listing(missing)}"
    note = "a plan may name only the stages that it cares about; memory and time count what it names"
    sink.note("NRS3021", headline, span, notes=(note,))
