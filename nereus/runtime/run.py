"""Run plans on this machine: compile, build real tensors, execute on real processes, check every element.

This module loads no torch: with processes only they need it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nereus.ir.cluster import Device
from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity
from nereus.ir.plan import Plan
from nereus.ir.program import Program
from nereus.ir.transition import LOCAL
from nereus.ir.units import format_bytes
from nereus.models.tensors import num_params
from nereus.passes.compiled import Transition, transition_digest
from nereus.passes.emit import emit_program
from nereus.passes.manager import Pipeline
from nereus.passes.pipeline import compile_transition
from nereus.passes.stripes import cut_moves
from nereus.passes.tight import Stuck, tight_schedule
from nereus.runtime.faults import CANNOT_START, TOO_LARGE, Drill, Fault
from nereus.runtime.launch import JobFailed, run_here, run_processes
from nereus.runtime.report import RunReport, StepReport
from nereus.runtime.scale import Scale, scale_plans, state_bytes
from nereus.runtime.traffic import Shares, bytes_by_tag, total_by_link

if TYPE_CHECKING:
    from nereus.runtime.job import JobResult

#: State that a run of one machine may be asked to hold, old and new together.
MAX_BYTES = 16 * 10**9

Events = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """A transition between the scaled plans, with every living device's program."""

    transition: Transition
    programs: dict[Device, Program]
    traffic: dict[int, Shares]


def run_pair(
    old: Plan,
    new: Plan,
    *,
    procs: int = 0,
    scale: Scale | str = "auto",
    chain: Sequence[Plan] = (),
    pipeline: Pipeline | None = None,
    deadline_s: float = 60.0,
    on_event: Events | None = None,
    drill: Drill | None = None,
    transport: str = "tcp",
) -> RunReport:
    """Execute ``old -> new -> *chain``, each change on the state that the one before left, and check all of it.

    ``procs``: worker processes; 0 or 1 = all devices in this process. ``transport``: between processes. ``on_event``
    gets small dictionaries (kind: phase, progress, ended, ...). A change that goes wrong is in the report; raises
    DiagnosticError where a plan does not compile or cannot run here.
    """
    if drill is not None and drill.kind in ("exit", "hang") and procs < 2:
        raise ValueError(f"a drill '{drill.kind}' takes a process of its own")
    begin = time.monotonic()
    tell = on_event or (lambda event: None)
    plans = _scaled((old, new, *chain), scale)
    largest = max(state_bytes(plan) for plan in plans)
    if 2 * largest > MAX_BYTES:
        text = f"about {format_bytes(2 * largest)} of state would be built here; the limit is {format_bytes(MAX_BYTES)}"
        raise DiagnosticError([Fault(TOO_LARGE, text).diagnostic()])
    tell({"kind": "phase", "process": -1, "step": 0, "phase": "compile"})
    pipelines = _modes((old, new, *chain), scale, pipeline or Pipeline())
    steps = compile_chain(plans, pipelines, squeeze=scale != "none")
    compile_s = time.monotonic() - begin
    devices = tuple(dict.fromkeys(d for step in steps for d in step.programs))
    num_processes = max(1, min(procs, len(devices)))
    process_of = {d: i * num_processes // len(devices) for i, d in enumerate(devices)}
    pairs = [(s.transition.old, s.transition.new, s.programs) for s in steps]
    results: Sequence[JobResult | None]
    faults: tuple[Fault, ...] = ()
    try:
        if num_processes == 1:
            results = run_here(pairs, process_of, deadline_s=deadline_s, drill=drill, emit=tell)
        else:
            results = run_processes(
                pairs,
                process_of,
                num_processes=num_processes,
                deadline_s=deadline_s,
                drill=drill,
                emit=tell,
                transport=transport,
            )
    except JobFailed as failed:
        results, faults = failed.results, failed.faults
    except ModuleNotFoundError as error:
        fault = Fault(CANNOT_START, f"{error.name} is not installed; running plans needs it", notes=())
        raise DiagnosticError([fault.diagnostic("pip install torch")]) from None
    reports = tuple(_step_report(step, number, results) for number, step in enumerate(steps) if _done(number, results))
    old_whole = None
    if faults:
        last = [r.steps[-1] for r in results if r is not None and r.steps and r.steps[-1].fault is not None]
        old_whole = len(last) == num_processes and all(s.old_whole for s in last)
    rss = [r.peak_rss_bytes for r in results if r is not None and r.peak_rss_bytes is not None]
    return RunReport(
        ok=not faults,
        transport=transport if num_processes > 1 else "inprocess",
        num_processes=num_processes,
        scale=str(scale),
        models=tuple(_describe(m, p) for m, p in zip(old.models, plans[0].models, strict=True)),
        steps=reports,
        diagnostics=_diagnostics(faults, old_whole),
        compile_s=compile_s,
        fill_s=max((r.fill_s for r in results if r is not None), default=0.0),
        total_s=time.monotonic() - begin,
        peak_rss_bytes=max(rss, default=None),
        old_whole=old_whole,
    )


def compile_chain(
    plans: Sequence[Plan], pipelines: Sequence[Pipeline], *, squeeze: bool = False
) -> tuple[CompiledStep, ...]:
    """Each change compiled from the placed plan that the one before ends in. ``squeeze``: see ``squeezed``."""
    steps = []
    current = plans[0]
    for new, pipeline in zip(plans[1:], pipelines, strict=True):
        transition = compile_transition(current, new, pipeline)
        if squeeze:
            transition = squeezed(transition, pipeline)
        topology = transition.topology
        programs = {
            device: emit_program(transition, number)
            for number, device in enumerate(topology.devices)
            if topology.alive[int(topology.node_of[number])]
        }
        used = {d for plan in (transition.old, transition.new) for s in plan.owners() for d in s.ranks}
        programs = {d: p for d, p in programs.items() if d in used or p.num_messages or p.storages}
        steps.append(CompiledStep(transition=transition, programs=programs, traffic=bytes_by_tag(programs.values())))
        current = transition.new
    return tuple(steps)


def squeezed(transition: Transition, pipeline: Pipeline) -> Transition:
    """A tight transition scheduled for GPUs that are full, as those of the plans as written are.

    Smaller models leave room everywhere; with as much memory as tight mode promises to need and no more, the schedule
    has to release before it can acquire again.
    """
    if transition.schedule.mode != "tight":
        return transition
    memory = replace(transition.memory, capacity=transition.memory.tight_bound)
    window_bytes = transition.schedule.window_bytes
    routed = pipeline.route.apply(transition.diff)
    schedule = tight_schedule(
        transition.diff,
        transition.storages,
        replace(routed, moves=cut_moves(routed.moves, window_bytes)),
        memory,
        transition.topology,
        window_bytes,
    )
    if isinstance(schedule, Stuck):  # then as much memory as there is
        return transition
    digest = transition_digest(transition.old, transition.new, schedule, transition.same)
    return replace(transition, schedule=schedule, memory=memory, digest=digest)


def _scaled(plans: tuple[Plan, ...], scale: Scale | str) -> tuple[Plan, ...]:
    try:
        return scale_plans(plans, scale)
    except ValueError as error:
        raise DiagnosticError([Fault(TOO_LARGE, f"the plans cannot be scaled so: {error}").diagnostic()]) from None


def _modes(plans: tuple[Plan, ...], scale: Scale | str, pipeline: Pipeline) -> tuple[Pipeline, ...]:
    """Scaled plans always have room, so the mode is that of the plans as written."""
    if pipeline.mode != "auto" or scale == "none":
        return tuple(pipeline for _ in plans[1:])
    modes = []
    current = plans[0]
    for new in plans[1:]:
        transition = compile_transition(current, new, pipeline)
        mode = transition.schedule.mode
        modes.append(replace(pipeline, mode=mode) if mode in ("reversible", "tight") else pipeline)
        current = transition.new
    return tuple(modes)


def _done(number: int, results: Sequence[Any]) -> bool:
    """No results at all: the processes did not even start."""
    return bool(results) and all(
        r is not None and len(r.steps) > number and r.steps[number].execution is not None for r in results
    )


def _step_report(step: CompiledStep, number: int, results: Sequence[Any]) -> StepReport:
    parts = [r.steps[number] for r in results]
    runs = [p.execution for p in parts]
    links = total_by_link(step.traffic, (tag for run in runs for tag, _ in run.received))
    planned = total_by_link(step.traffic, step.traffic)
    device, peak = max(((d, peak) for run in runs for d, peak, _, _ in run.peaks), key=lambda dp: (dp[1], dp[0]))
    phases: dict[str, float] = {}
    for run in runs:
        for name, seconds in run.phases_s:
            phases[name] = max(phases.get(name, 0.0), seconds)
    transition = step.transition
    return StepReport(
        old=transition.old.path,
        new=transition.new.path,
        mode=transition.schedule.mode,
        num_devices=len(step.programs),
        num_waves=transition.schedule.num_waves,
        num_messages=sum(run.num_messages for run in runs),
        moved_bytes=sum(size for link, size in links.items() if link != LOCAL),
        predicted_moved_bytes=sum(size for link, size in planned.items() if link != LOCAL),
        bytes_by_link=tuple(links.items()),
        copied_bytes=sum(run.copied_bytes for run in runs),
        seconds=max(run.seconds for run in runs),
        phases_s=tuple(phases.items()),
        peak_bytes=peak,
        predicted_peak_bytes=predicted_peak(transition, device),
        peak_device=str(device),
        num_shards=sum(p.check.num_shards for p in parts),
        num_elements=sum(p.check.num_elements for p in parts),
        num_bytes=sum(p.check.num_bytes for p in parts),
        num_fresh=len(transition.diff.fresh),
        check_s=max(p.check_s for p in parts),
    )


def predicted_peak(transition: Transition, device: Device) -> int:
    """Storages and staging that the memory pass promises not to exceed on ``device``."""
    number = transition.topology.index()[device]
    state, schedule = transition.memory.state, transition.schedule
    staging = int(transition.memory.staging[number])
    kept, old, new = (int(column[number]) for column in (state.kept, state.old, state.new))
    if schedule.mode == "tight":
        return kept + max(old, new) + int(state.largest[number]) + staging
    return kept + old + new + staging


def _describe(before: Any, after: Any) -> str:
    a, b = before.arch, after.arch
    count = f"{num_params(b, after.head):,} parameters"
    if a == b:
        return f"{after.name}: {before.source}, {count}"
    return (
        f"{after.name}: {before.source} with hidden {a.hidden} -> {b.hidden}, layers {a.num_layers} -> {b.num_layers}, "
        f"{b.num_heads} heads of {b.head_dim}, ffn {b.ffn}, vocabulary {b.vocab}: {count}"
    )


def _diagnostics(faults: Sequence[Fault], old_whole: bool | None) -> tuple[Diagnostic, ...]:
    if not faults:
        return ()
    notes: tuple[str, ...] = ()
    if old_whole:
        notes = ("nothing of the old plan was touched: every element of it was checked after the failure",)
    found = [fault.diagnostic(*notes) for fault in faults]
    assert all(d.severity is Severity.ERROR for d in found)
    return tuple(found)
