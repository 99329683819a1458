"""Two processes of one move, scripts: ``python attach_child.py FOLDER PROCESS [die]``. The receiver prints one line."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import numpy as np
import torch

from nereus.ir.cluster import Device
from nereus.ir.program import Blocks, Message, Program, StorageSpec, Wave
from nereus.runtime.executor import ExecutionFailed, ExecutorOptions, execute
from nereus.runtime.state import DeviceState
from nereus.runtime.transports import sockets

#: Two pieces of 8 MB, in rows that lie apart on both sides.
ROWS, COLS, STRIDE = 512, 8192, 9000
SENDER, RECEIVER = Device("n0", 0), Device("n0", 1)


def storage(role: str) -> StorageSpec:
    named = {"stage": role, "model": "m", "tensor": "a", "slot": "weight", "dtype": "fp32"}
    box = {"row_lo": 0, "row_hi": ROWS, "col_lo": 0, "col_hi": COLS, "start": 0, "stop": ROWS * COLS}
    return StorageSpec(id=0, role=role, host=False, tensor_shape=(ROWS, COLS), extent=ROWS * STRIDE, **named, **box)


def program(device: Device) -> Program:
    table = np.array([[0, 0, ROWS, COLS, STRIDE, 0, COLS]], dtype=np.int64)
    message = Message(tag=3, peer=RECEIVER if device == SENDER else SENDER, blocks=Blocks(table))
    sends, receives = ((message,), ()) if device == SENDER else ((), (message,))
    wave = Wave(
        acquire=() if device == SENDER else (0,), copies=(), sends=sends, receives=receives, derives=(), release=()
    )
    spec = storage("old" if device == SENDER else "new")
    return Program(device=device, digest="d", mode="reversible", storages=(spec,), waves=(wave,), commit_release=())


def main(folder: str, process: int, *, die: bool) -> None:
    torch.set_num_threads(1)
    device = (SENDER, RECEIVER)[process]
    state = DeviceState(device)
    content = torch.arange(ROWS * STRIDE, dtype=torch.float32)
    made = program(device)
    if device == SENDER:
        state.put(made.storages[0], content)
    store = sockets.open_store(os.path.join(folder, "store"), 2)
    transport = sockets.Sockets(
        store=store, name="t", process=process, num_processes=2, process_of={SENDER: 0, RECEIVER: 1}, deadline_s=20.0
    )
    genuine, reads = sockets.read, 0

    def read(pid: int, *rows: object) -> None:
        nonlocal reads
        reads += 1
        if die and reads == 2:
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        genuine(pid, *rows)

    sockets.read = read
    begin = time.monotonic()
    said: dict[str, object] = {}
    try:
        report = execute({device: made}, {device: state}, transport, ExecutorOptions(deadline_s=20.0))
        (peak,) = report.peaks
        said = {"direct": report.direct_bytes, "received": report.received_bytes, "staging": peak[3]}
        said["notes"] = list(report.notes)
    except ExecutionFailed as failed:
        said = {"fault": failed.fault.code, "text": failed.fault.text, "old_whole": failed.old_whole}
    said["seconds"] = time.monotonic() - begin
    if device == RECEIVER:
        held = list(state)
        said["held"] = len(held)
        said["right"] = bool(held) and torch.equal(
            held[0].data.view(ROWS, STRIDE)[:, :COLS], content.view(ROWS, STRIDE)[:, :COLS]
        )
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), die="die" in sys.argv[3:])
