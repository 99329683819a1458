"""Memory diagnostics of a plan.

NRS4001  a stage does not fit on its GPUs                          error
NRS4002  offloaded and swapped state does not fit in host memory   error
NRS4003  it fits now but would not at ``max_response``             warning
NRS4004  an engine's cache does not hold one whole sequence        error
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nereus.ir.diagnostic import Diagnostic, Label, Severity, Span
from nereus.ir.plan import Plan, Stage
from nereus.ir.units import format_bytes, format_gb
from nereus.models.memory.activations import batch_of, in_flight
from nereus.models.memory.cache import cache_tokens
from nereus.models.memory.remedies import remedies
from nereus.models.memory.report import HostRow, MemoryReport, MemoryRow, Part
from nereus.models.memory.steady import steady_state

#: Which key of a stage decides a part's size, tried in this order.
_DECIDING_KEYS = {
    "activations": ("micro_batch", "max_tokens", "pp"),
    "logits": ("micro_batch", "max_tokens", "tp"),
    "working set": ("micro_batch", "max_tokens"),
    "kv cache": ("kv_cache", "mem"),
    "weights": ("tp", "pp", "on"),
    "master": ("zero", "tp", "pp", "on"),
    "moments": ("zero", "tp", "pp", "on"),
    "gradients": ("tp", "pp", "on"),
}


def check_memory(plan: Plan, report: MemoryReport | None = None) -> tuple[Diagnostic, ...]:
    """Errors in plan order, then warnings. ``report`` saves computing ``steady_state(plan)`` again."""
    if report is None:
        report = steady_state(plan)
    found = [_does_not_fit(plan, row, report) for row in report.worst_rows() if not row.fits]
    found.extend(_host_does_not_fit(plan, host) for host in report.hosts if not host.fits)
    found.extend(_cache_too_small(plan, report))
    found.extend(_promise_does_not_fit(plan, report))
    return tuple(found)


def _does_not_fit(plan: Plan, row: MemoryRow, report: MemoryReport) -> Diagnostic:
    stage = plan.stage(row.stage)
    need, have = format_gb(row.need_bytes), format_gb(row.capacity_bytes)
    helping = remedies(plan, row, report)
    notes = [
        f"{' + '.join(_part_text(row.stage, part) for part in _largest_first(row.parts))} GB",
        _shape(plan, stage, row),
    ]
    if len(row.devices) > 1:
        notes.append(f"the same on {len(row.devices) - 1} more GPUs, up to {row.devices[-1]}")
    if helping:
        options = "; ".join(f"{remedy.text} ({format_gb(remedy.need_bytes)} GB)" for remedy in helping)
        help_text = f"fits with: {options}"
    else:
        tried = "kv_cache, tp, pp" if stage.kind == "generate" else "micro_batch, recompute, zero, tp, pp, kv_cache"
        if plan.model(stage.model).arch.moe is not None:
            tried = tried.replace("pp", "pp, ep")
        help_text = (
            f"no legal change of {tried}, alone or with idle = offload of its neighbours, makes it fit: "
            "give it more or larger GPUs"
        )
    return Diagnostic(
        code="NRS4001",
        severity=Severity.ERROR,
        headline=f"{row.stage} does not fit: {need} of {have} GB on {row.device}",
        primary=_label(_deciding_span(plan, row), f"{format_gb(row.need_bytes - row.capacity_bytes)} GB too much"),
        secondary=tuple(_neighbour_labels(plan, row)),
        notes=tuple(notes),
        help=help_text,
        data=(
            ("stage", row.stage),
            ("device", str(row.device)),
            ("num_devices", len(row.devices)),
            ("pp_index", row.pp_index),
            ("need_bytes", row.need_bytes),
            ("have_bytes", row.capacity_bytes),
            *((f"part:{part.stage}:{part.label}", part.num_bytes) for part in _largest_first(row.parts)),
            *((f"fits_with:{remedy.text}", remedy.need_bytes) for remedy in helping),
        ),
    )


def _host_does_not_fit(plan: Plan, host: HostRow) -> Diagnostic:
    parts = _largest_first(host.parts)
    largest = plan.stage(parts[0].stage)
    key = "swap" if largest.swap else "idle"
    node = host.nodes[0]
    notes = [f"{' + '.join(f'{part.stage} {format_gb(part.num_bytes)}' for part in parts)} GB"]
    if len(host.nodes) > 1:
        notes.append(f"the same on {len(host.nodes) - 1} more nodes, up to {host.nodes[-1]}")
    return Diagnostic(
        code="NRS4002",
        severity=Severity.ERROR,
        headline=(
            f"offloaded state does not fit in host memory: {format_gb(host.need_bytes)} of "
            f"{format_gb(host.capacity_bytes)} GB on {node}"
        ),
        primary=_label(largest.key_span(key), f"{format_gb(parts[0].num_bytes)} GB on {node}"),
        notes=tuple(notes),
        help="shard the state (zero = 1), drop a generation copy with idle = discard, or keep a stage resident",
        data=(
            ("node", node),
            ("num_nodes", len(host.nodes)),
            ("need_bytes", host.need_bytes),
            ("have_bytes", host.capacity_bytes),
            *((f"part:{part.stage}", part.num_bytes) for part in parts),
        ),
    )


def _cache_too_small(plan: Plan, report: MemoryReport) -> Iterator[Diagnostic]:
    for stage, held, per_token in cache_tokens(plan, report):
        if held >= plan.workload.seq_len:
            continue
        yield Diagnostic(
            code="NRS4004",
            severity=Severity.ERROR,
            headline=f"the cache of {stage.name} holds {held:,} tokens, a sequence has {plan.workload.seq_len:,}",
            primary=_label(stage.key_span("kv_cache" if stage.kv_cache_bytes is not None else "mem")),
            notes=(f"a token takes {format_bytes(per_token)} on each GPU",),
            help=f"kv_cache needs at least {format_bytes(plan.workload.seq_len * per_token)}",
            data=(("stage", stage.name), ("held_tokens", held), ("need_tokens", plan.workload.seq_len)),
        )


def _promise_does_not_fit(plan: Plan, report: MemoryReport) -> Iterator[Diagnostic]:
    """One warning for all stages: sequences may grow to ``max_response`` while the job runs."""
    promised = plan.workload.max_response
    if promised is None or promised <= plan.workload.response_len:
        return
    grown = replace(plan, workload=replace(plan.workload, response_len=promised))
    later = steady_state(grown)
    tight = [row for row in later.worst_rows() if not row.fits and report.worst(row.stage).fits]
    small = [
        stage for stage, held, _ in cache_tokens(grown, later) if plan.workload.seq_len <= held < grown.workload.seq_len
    ]
    if not tight and not small:
        return
    sentences = [
        f"{row.stage} would need {format_gb(row.need_bytes)} of {format_gb(row.capacity_bytes)} GB" for row in tight
    ]
    sentences += [f"the cache of {stage.name} would not hold one sequence" for stage in small]
    yield Diagnostic(
        code="NRS4003",
        severity=Severity.WARNING,
        headline=f"does not fit any more once responses reach max_response = {promised}",
        primary=_label(plan.workload.span),
        notes=(f"at {grown.workload.seq_len:,} tokens a sequence: {', '.join(sentences)}",),
        help="nothing to do now: change the plan when responses have grown",
        data=(
            ("max_response", promised),
            *((f"need_bytes:{row.stage}", row.need_bytes) for row in tight),
            *((f"have_bytes:{row.stage}", row.capacity_bytes) for row in tight),
        ),
    )


def _largest_first(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: -part.num_bytes))


def _part_text(running: str, part: Part) -> str:
    owner = f"{part.stage} " if part.stage not in ("", running) and not part.label.startswith(part.stage) else ""
    return f"{owner}{part.label} {format_gb(part.num_bytes)}"


def _shape(plan: Plan, stage: Stage, row: MemoryRow) -> str:
    """What the numbers rest on."""
    batch = f"max_tokens = {stage.max_tokens}" if stage.max_tokens is not None else f"micro_batch = {stage.micro_batch}"
    text = f"{plan.workload.seq_len:,} tokens a sequence (prompt_len + response_len), {batch}"
    if stage.pp > 1:
        text += f", pipeline stage {row.pp_index} of {stage.pp}"
        if stage.is_train:
            flying = in_flight(stage, row.pp_index, batch_of(stage, plan.workload).num_microbatches)
            text += f", with {flying:.3g} micro-batches in flight"
    return text


def _deciding_span(plan: Plan, row: MemoryRow) -> Span | None:
    stage = plan.stage(row.stage)
    for part in _largest_first(row.parts):
        if part.stage != row.stage:
            continue
        written = dict(stage.key_spans)
        for key in _DECIDING_KEYS.get(part.label, ()):
            if key in written:
                return written[key]
    return stage.span


def _neighbour_labels(plan: Plan, row: MemoryRow) -> Iterator[Label]:
    beside: dict[str, int] = {}
    for part in row.parts:
        if part.stage not in ("", row.stage):
            beside[part.stage] = beside.get(part.stage, 0) + part.num_bytes
    for name, num_bytes in beside.items():
        label = _label(plan.stage(name).key_span("idle"), f"stays resident beside it: {format_gb(num_bytes)} GB")
        if label is not None:
            yield label


def _label(span: Span | None, message: str = "") -> Label | None:
    return None if span is None else Label(span=span, message=message)
