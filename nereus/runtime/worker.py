"""The processes of a run: ``python -m nereus.runtime.worker FOLDER NUM_PROCESSES``.

One process loads torch and forks the others, since loading it anew in each would take longer than most runs. It watches
over them: says on stdout, one JSON object a line, what they do, ends them when the process that started it is gone (its
stdin closes), and when one of them has failed and the others do not end by themselves.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import Any

import torch

from nereus.kernels import native
from nereus.runtime.codec import decode, encode
from nereus.runtime.faults import Fault
from nereus.runtime.job import Job, run_job
from nereus.runtime.transports.base import Transport
from nereus.runtime.transports.choice import between
from nereus.runtime.transports.sockets import open_store

#: After a process has failed, the others have this long to say so too.
GRACE_S = 5.0
#: A sign of life at least this often.
ALIVE_S = 1.0


def main(folder: str, num_processes: int) -> None:
    torch.set_num_threads(1)
    native.load()  # built and loaded once, not in every process
    children: dict[int, int] = {}
    supervisor = os.getpid()
    for process in range(num_processes):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with(supervisor)
                code = _work(folder, process)
            finally:
                os._exit(code)
        children[pid] = process
    _supervise(children)


def _emit(event: dict[str, Any]) -> None:
    """One write, so that lines of several processes do not mix."""
    os.write(1, (json.dumps(event) + "\n").encode())


def _work(folder: str, process: int) -> int:
    with open(os.path.join(folder, f"job-{process}"), "rb") as file:
        job: Job = decode(file.read())
    store = open_store(os.path.join(folder, "store"), job.num_processes)

    def transport(step: int) -> Transport:
        return between(job.transport)(
            store=store,
            name=f"step{step}",
            process=process,
            num_processes=job.num_processes,
            process_of=job.process_of,
            deadline_s=job.deadline_s,
        )

    try:
        result = run_job(job, transport, _emit)
        failed = any(step.fault is not None for step in result.steps)
        answer: object = result
    except Exception as error:
        failed, answer = True, Fault.of(error, f"process {process}").encode()
    path = os.path.join(folder, f"result-{process}")
    with open(path + ".part", "wb") as out:
        out.write(encode(answer))
    os.replace(path + ".part", path)
    return 1 if failed else 0


def _supervise(children: dict[int, int]) -> None:
    first_failure: float | None = None
    spoke = time.monotonic()
    while children:
        ready, _, _ = select.select([0], [], [], 0.02)
        if ready and not os.read(0, 4096):
            _kill(children)
            return
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                _emit({"kind": "ended", "process": children.pop(pid), "code": code})
                if code and first_failure is None:
                    first_failure = time.monotonic()
        if first_failure is not None and children and time.monotonic() - first_failure > GRACE_S:
            for process in children.values():
                _emit({"kind": "killed", "process": process})
            _kill(children)
            return
        if time.monotonic() - spoke > ALIVE_S:
            spoke = time.monotonic()
            _emit({"kind": "alive"})


def _kill(children: dict[int, int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)


def die_with(supervisor: int) -> None:
    """End this process when the supervisor ends, however that happens (Linux; elsewhere the deadlines end it)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
    if os.getppid() != supervisor:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
