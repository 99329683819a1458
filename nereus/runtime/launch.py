"""Start a run's processes, listen to them, and leave none behind."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.ir.program import Program
from nereus.runtime.codec import decode, encode
from nereus.runtime.faults import CANNOT_START, DEADLINE, PROCESS_ENDED, WRONG_ELEMENTS, Drill, Fault

if TYPE_CHECKING:
    from nereus.runtime.job import Job, JobResult

#: (placed old plan, placed new plan, every living device's program) of each step.
Steps = Sequence[tuple[Plan, Plan, Mapping[Device, Program]]]
Emit = Callable[[dict[str, Any]], None]

#: The supervisor speaks every second; silent for this long, it is gone.
SILENCE_S = 60.0


class JobFailed(Exception):
    """``results``: by process, None where one left none. ``faults``: what went wrong, the cause first."""

    def __init__(self, results: Sequence[JobResult | None], faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(f.text for f in faults))
        self.results = results
        self.faults = tuple(faults)


def make_jobs(
    steps: Steps,
    process_of: Mapping[Device, int],
    num_processes: int,
    deadline_s: float,
    drill: Drill | None,
    transport: str = "tcp",
) -> list[Job]:
    from nereus.runtime.job import Job, Step

    return [
        Job(
            process=process,
            num_processes=num_processes,
            steps=tuple(
                Step(old=old, new=new, programs={d: p for d, p in programs.items() if process_of[d] == process})
                for old, new, programs in steps
            ),
            process_of=process_of,
            deadline_s=deadline_s,
            drill=drill,
            transport=transport,
        )
        for process in range(num_processes)
    ]


def run_here(
    steps: Steps, process_of: Mapping[Device, int], *, deadline_s: float, drill: Drill | None, emit: Emit
) -> list[JobResult]:
    """All devices in this process. Raises JobFailed."""
    emit({"kind": "phase", "process": -1, "step": 0, "phase": "load"})
    import torch

    from nereus.runtime.job import run_job
    from nereus.runtime.transports.inprocess import InProcess

    (job,) = make_jobs(steps, process_of, 1, deadline_s, drill)
    # Thousands of small copies: more threads would spend their time waiting for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = run_job(job, lambda step: InProcess(), emit)
    except Fault as fault:
        raise JobFailed([None], [fault]) from None
    finally:
        torch.set_num_threads(threads)
    return _judged([result], {})


def run_processes(
    steps: Steps,
    process_of: Mapping[Device, int],
    *,
    num_processes: int,
    deadline_s: float,
    drill: Drill | None,
    emit: Emit,
    transport: str = "tcp",
) -> list[JobResult]:
    """The devices dealt to ``num_processes`` worker processes. Raises JobFailed; all of them are gone afterwards."""
    if not hasattr(os, "fork"):
        raise JobFailed([], [Fault(CANNOT_START, "this system cannot fork processes")])
    emit({"kind": "phase", "process": -1, "step": 0, "phase": "start"})
    with tempfile.TemporaryDirectory(prefix="nereus-run-") as folder:
        for job in make_jobs(steps, process_of, num_processes, deadline_s, drill, transport):
            with open(os.path.join(folder, f"job-{job.process}"), "wb") as file:
                file.write(encode(job))
        ended = _supervised(folder, num_processes, emit)
        answers = [_answer(folder, process) for process in range(num_processes)]
    return _judged(answers, ended)


def _supervised(folder: str, num_processes: int, emit: Emit) -> dict[int, str]:
    """Run the workers to their end. Returns how those ended that ended badly, in the order of their ends."""
    command = [sys.executable, "-m", "nereus.runtime.worker", folder, str(num_processes)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # The parent's path too: a run must use the very code that compiled it.
    environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    ended: dict[int, str] = {}
    with open(os.path.join(folder, "stderr"), "w+b") as errors:
        supervisor = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environ,
            start_new_session=True,  # so that Ctrl-C reaches us only, and we end the whole group
            text=True,
        )
        try:
            for event in _events(supervisor):
                if event["kind"] == "ended" and event["code"]:
                    code = event["code"]
                    ended[event["process"]] = f"ended with {code}" if code > 0 else _signal_text(-code)
                elif event["kind"] == "killed":
                    ended[event["process"]] = "did not end after another had failed, and was ended"
                emit(event)
            code = supervisor.wait(timeout=10)
            if code:
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
                raise JobFailed(
                    [None] * num_processes, [Fault(CANNOT_START, f"the processes did not start: {lines[-1]}")]
                )
        finally:
            with suppress(ProcessLookupError):
                os.killpg(supervisor.pid, signal.SIGKILL)
            supervisor.wait()
            for stream in (supervisor.stdin, supervisor.stdout):
                if stream is not None:
                    stream.close()
    return ended


def _events(supervisor: subprocess.Popen[str]) -> Any:
    """Lines of the supervisor until it ends. Raises JobFailed where it falls silent."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert supervisor.stdout is not None
        for line in supervisor.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENCE_S)
        except queue.Empty:
            text = f"the worker processes have been silent for {SILENCE_S:g} s"
            raise JobFailed([], [Fault(DEADLINE, text)]) from None
        if line is None:
            return
        try:
            event = json.loads(line)
        except ValueError:
            continue  # something that a library printed
        if isinstance(event, dict) and "kind" in event:
            yield event


def _signal_text(number: int) -> str:
    try:
        return f"was ended by {signal.Signals(number).name}"
    except ValueError:
        return f"was ended by signal {number}"


def _answer(folder: str, process: int) -> Any:
    try:
        with open(os.path.join(folder, f"result-{process}"), "rb") as file:
            return decode(file.read())
    except FileNotFoundError:
        return None


def _judged(answers: Sequence[Any], ended: Mapping[int, str]) -> list[JobResult]:
    """The results, or JobFailed: a process that vanished comes first, then what the others said, each thing once."""
    results: list[JobResult | None] = [a if a is not None and not isinstance(a, str) else None for a in answers]
    said: list[Fault] = []
    vanished: list[Fault] = []
    for process, answer in enumerate(answers):
        if isinstance(answer, str):
            said.append(Fault.decode(answer))
        elif answer is None:
            how = ended.get(process, "left no result")
            vanished.append(Fault(PROCESS_ENDED, f"it {how}", where=f"process {process}"))
        else:
            said += [Fault.decode(step.fault) for step in answer.steps if step.fault is not None]
    unique = {(f.code, f.where, f.text): f for f in said}
    # Wrong elements are what matters most; then one cause, as all processes tell it.
    causes = [f for f in unique.values() if f.code == WRONG_ELEMENTS] or list(unique.values())
    stuck = [f for f in vanished if "did not end" in f.text]
    gone = [f for f in vanished if f not in stuck]
    faults = [*gone[:1], *(causes[:1] if not gone else ()), *(stuck[:1] if not gone else ())]
    if faults:
        raise JobFailed(results, faults)
    return [r for r in results if r is not None]
