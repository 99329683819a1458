"""A run on this machine: what every process is given, and what it does, step after step."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.ir.program import Program, StorageSpec
from nereus.runtime.account import ExecutionReport, Progress, peak_rss_bytes, reset_peak_rss
from nereus.runtime.executor import ExecutionFailed, ExecutorOptions, execute
from nereus.runtime.faults import ALLOCATION_FAILED, WRONG_ELEMENTS, Drill, Fault
from nereus.runtime.reference import CheckResult, check, fill, fresh_slots, initialise
from nereus.runtime.reference_values import Values
from nereus.runtime.state import DeviceState, allocate
from nereus.runtime.transports.base import Outgoing, Parcel, Transport

#: Called with small dictionaries: {"kind": "phase" | "progress", "process", "step", ...}.
Emit = Callable[[dict[str, Any]], None]
MakeTransport = Callable[[int], Transport]

#: Least seconds between two progress events of one process.
_PROGRESS_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One transition. ``old`` and ``new`` are placed; ``programs`` are those of this process's devices."""

    old: Plan
    new: Plan
    programs: Mapping[Device, Program]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process's part of a run. ``process_of``: where each device of any step lives. ``transport``: between
    processes."""

    process: int
    num_processes: int
    steps: tuple[Step, ...]
    process_of: Mapping[Device, int]
    deadline_s: float
    drill: Drill | None = None
    transport: str = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """``check``: of the new state, or after a failure of the old one. ``fault``: encoded, None if all went well."""

    execution: ExecutionReport | None
    check: CheckResult
    fault: str | None = None
    old_whole: bool = True
    check_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    process: int
    steps: tuple[StepResult, ...]
    fill_s: float
    peak_rss_bytes: int | None


def run_job(job: Job, make_transport: MakeTransport, emit: Emit) -> JobResult:
    """Fill, then execute and check step by step; the first failure ends it. Raises Fault where filling fails."""
    begin = time.monotonic()
    values = Values([job.steps[0].old, *(step.new for step in job.steps)])
    _tell(emit, job, 0, "fill")
    try:
        states = fill(job.steps[0].programs.values(), job.steps[0].old, values)
    except (MemoryError, RuntimeError) as error:
        raise Fault.of(error, f"process {job.process}") from None
    fill_s = time.monotonic() - begin
    reset_peak_rss()
    results: list[StepResult] = []
    for number, step in enumerate(job.steps):
        # Devices that the step knows nothing of are lost, with all that was on them; new ones hold nothing yet.
        states = {d: states.get(d, DeviceState(d)) for d in step.programs}
        _tell(emit, job, number, "execute")
        result = _run_step(job, number, step, states, make_transport, values, emit)
        results.append(result)
        if result.fault is not None or not result.check.ok:
            break
    return JobResult(process=job.process, steps=tuple(results), fill_s=fill_s, peak_rss_bytes=peak_rss_bytes())


def _run_step(
    job: Job,
    number: int,
    step: Step,
    states: Mapping[Device, DeviceState],
    make_transport: MakeTransport,
    values: Values,
    emit: Emit,
) -> StepResult:
    last = 0.0

    def progress(at: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PROGRESS_S or at.wave == at.num_waves:
            last = now
            emit(
                {
                    "kind": "progress",
                    "process": job.process,
                    "step": number,
                    "wave": at.wave,
                    "num_waves": at.num_waves,
                    "bytes": at.received_bytes,
                }
            )

    options = ExecutorOptions(deadline_s=job.deadline_s, progress=progress)
    fault: Fault | None = None
    execution: ExecutionReport | None = None
    old_whole = True
    try:
        transport = make_transport(number)
        drill = job.drill
        if drill is not None and (drill.step, drill.process) == (number, job.process):
            options, transport = _with_drill(drill, options, transport)
        execution = execute(step.programs, states, transport, options)
    except ExecutionFailed as failed:
        fault, old_whole = failed.fault, failed.old_whole
    except Fault as error:
        fault = error
    begin = time.monotonic()
    _tell(emit, job, number, "check")
    if fault is None:
        initialise(states, step.new, values, fresh_slots(step.old, step.new))
        checked = check(states, step.new, values)
    else:
        checked = check(states, step.old, values) if old_whole else CheckResult()
        old_whole = old_whole and checked.ok
    if fault is None and not checked.ok:
        text = f"{checked.num_failures} shards are wrong after the transition; {checked.failures[0]}"
        fault = Fault(WRONG_ELEMENTS, text)
    return StepResult(
        execution=execution,
        check=checked,
        fault=None if fault is None else fault.encode(),
        old_whole=old_whole,
        check_s=time.monotonic() - begin,
    )


def _tell(emit: Emit, job: Job, step: int, phase: str) -> None:
    emit({"kind": "phase", "process": job.process, "step": step, "phase": phase})


def _with_drill(drill: Drill, options: ExecutorOptions, transport: Transport) -> tuple[ExecutorOptions, Transport]:
    def on_wave(wave: int) -> None:
        if wave != drill.wave:
            return
        if drill.kind == "raise":
            raise RuntimeError("a drill: this process was told to fail")
        if drill.kind == "exit":
            os._exit(9)
        if drill.kind == "hang":
            time.sleep(1e6)

    def refuse(spec: StorageSpec) -> torch.Tensor:
        raise Fault(ALLOCATION_FAILED, f"a drill: no memory for {spec.numel} x {spec.dtype} of {spec.tensor}")

    if drill.kind == "corrupt":
        _corrupt(drill, transport)
    return (
        ExecutorOptions(
            deadline_s=options.deadline_s,
            progress=options.progress,
            on_wave=on_wave,
            allocate=refuse if drill.kind == "allocation" else allocate,
        ),
        transport,
    )


def _corrupt(drill: Drill, transport: Transport) -> None:
    """Flip one bit of the first piece from the drill's wave on, in a copy: the sender's state stays right."""
    exchange = transport.exchange
    done, waves = False, itertools.count()

    def damaged(pieces: Iterator[Parcel]) -> Iterator[Parcel]:
        nonlocal done
        for parcel in pieces:
            if done:
                yield parcel
                continue
            done, data, checksum = True, parcel.data.clone(), parcel.checksum
            if parcel.flow is not None:
                data = torch.frombuffer(bytearray(parcel.flow.content()), dtype=torch.uint8)
                checksum = parcel.flow.summed()
            data[len(data) // 2] ^= 16
            kept.append(data)
            yield replace(parcel, data=data, checksum=checksum, flow=None)

    kept: list[torch.Tensor] = []  # a receiver may read it later

    def corrupting(sends: Sequence[Outgoing], receives: Any, arrived: Any, deadline_s: float) -> None:
        if next(waves) >= drill.wave:
            sends = [replace(each, pieces=damaged(each.pieces)) for each in sends]
        exchange(sends, receives, arrived, deadline_s)

    transport.exchange = corrupting  # type: ignore[method-assign]
