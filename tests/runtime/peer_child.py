"""Changes between two processes, of which one is lost in every second one; a script that prints one line:

    python peer_child.py FOLDER MINE SIGNAL KIND ROUNDS DEADLINE

This process stays, device ``MINE`` of the two (0 sends, 1 receives); the other one is a new one each time, and gets
``SIGNAL`` by itself at its second piece. A stopped one is woken once this one is through with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from attach_child import COLS, RECEIVER, ROWS, SENDER, STRIDE, program

from nereus.kernels.flow import Flow
from nereus.runtime import executor
from nereus.runtime.account import resident_bytes
from nereus.runtime.executor import ExecutionFailed, ExecutorOptions, execute
from nereus.runtime.state import DeviceState
from nereus.runtime.transports.choice import between
from nereus.runtime.transports.sockets import open_store

DEVICES = (SENDER, RECEIVER)


def change(folder: str, number: int, process: int, kind: str, deadline_s: float) -> dict[str, object]:
    device, content = DEVICES[process], torch.arange(ROWS * STRIDE, dtype=torch.float32)
    state, made = DeviceState(device), program(DEVICES[process])
    if device == SENDER:
        state.put(made.storages[0], content.clone())
    transport = between(kind)(
        store=open_store(f"{folder}/{number}", 2),
        name="t",
        process=process,
        num_processes=2,
        process_of={SENDER: 0, RECEIVER: 1},
        deadline_s=30.0,
    )
    begin, code = time.monotonic(), ""
    try:
        execute({device: made}, {device: state}, transport, ExecutorOptions(deadline_s=deadline_s))
    except ExecutionFailed as failed:
        code = failed.fault.code if failed.old_whole else "not whole"
    seconds, held = time.monotonic() - begin, list(state)
    rows = [h.data.view(ROWS, STRIDE)[:, :COLS] for h in held]
    right = [torch.equal(found, content.view(ROWS, STRIDE)[:, :COLS]) for found in rows]
    return {"code": code, "seconds": seconds, "right": right}


def at_second(number: int) -> None:
    """This process gets a signal in the middle of its work."""
    calls = 0

    def wrapped(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def work(*words: object) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                os.kill(os.getpid(), number)
            return genuine(*words)

        return work

    for name in ("gather", "land", "stored"):
        setattr(executor, name, wrapped(getattr(executor, name)))
    for name in ("send", "receive", "read", "summed"):
        setattr(Flow, name, wrapped(getattr(Flow, name)))


def nursery(asked: int, told: int, work: Callable[[int], bool]) -> None:
    """Forks a process for each number, before this one has threads; says who it is, and how it ended."""
    while raw := os.read(asked, 4):
        if (pid := os.fork()) == 0:
            os._exit(0 if work(int.from_bytes(raw, "little")) else 1)
        os.write(told, pid.to_bytes(4, "little"))
        _, status = os.waitpid(pid, 0)
        os.write(told, (os.waitstatus_to_exitcode(status) & 0xFFFF).to_bytes(4, "little"))


def left() -> tuple[int, int, int]:
    """Descriptors, threads, and bytes that are in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident_bytes() or 0


def main(folder: str, mine: int, name: str, kind: str, rounds: int, deadline_s: float) -> None:
    torch.set_num_threads(1)
    lost = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[name]

    def other(number: int) -> bool:
        if number % 2 == 0:
            at_second(lost)
        said = change(folder, number, 1 - mine, kind, deadline_s)
        return bool(said["code"]) == (number % 2 == 0) and said["right"] == [True] * (not said["code"] or mine == 1)

    (asked, ask), (hear, told) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(ask)
        nursery(asked, told, other)
        os._exit(0)
    os.close(asked)
    found, marks = [], []
    for number in range(rounds):
        os.write(ask, number.to_bytes(4, "little"))
        pid = int.from_bytes(os.read(hear, 4), "little")
        said = change(folder, number, mine, kind, deadline_s)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        said["other"] = int.from_bytes(os.read(hear, 4), "little")
        found.append(said)
        marks.append(left())
    os.close(ask)
    os.wait()
    print(json.dumps({"rounds": found, "left": marks}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), float(sys.argv[6]))
