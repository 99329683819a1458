"""``python -m nereus.runtime.session.nursery JOB OUT``: forks a job's processes, with torch loaded once.

Orders come in on stdin, one JSON object a line ({"spawn": number, "device": name}); what happens goes out on stdout
({"spawned": number, "pid": pid}, {"ended": pid, "code": code}). The processes print to descriptor OUT.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from nereus.kernels import native
from nereus.runtime.codec import decode
from nereus.runtime.session.local import asking, connect
from nereus.runtime.session.members import telling
from nereus.runtime.session.record import Record
from nereus.runtime.worker import die_with


def main(job_path: str, out: int) -> None:
    torch.set_num_threads(1)
    native.load()
    warm()
    job = decode(Path(job_path).read_bytes())
    module, _, function = job["target"].partition(":")
    target = getattr(importlib.import_module(module), function)
    nursery, children, text = os.getpid(), set[int](), b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.01)
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    words = decode(Path(job_path).with_name(f"process-{order['spawn']}").read_bytes())
                    _child(nursery, out, target, {**job, **words}, order["device"])
                children.add(pid)
                _say({"spawned": order["spawn"], "pid": pid})
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.discard(pid)
                _say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def warm() -> None:
    """What torch imports only at the first optimizer (its compiler) takes seconds: once here, not in every process."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()


def _say(event: dict[str, Any]) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def _child(nursery: int, out: int, target: Any, job: dict[str, Any], device: str) -> None:
    def work() -> None:
        os.dup2(out, 1)
        os.close(0)
        store = connect(job["ports"], 60.0)
        record = Record(store, job["name"], 0)
        with telling(record):
            target(store=store, device=device, spawn=asking(record), **job["args"])

    live(nursery, work)


def live(parent: int, work: Callable[[], object]) -> NoReturn:
    """The life of a process that was just forked from ``parent``: ``work``, and its end with the code of that."""
    code = 1
    try:
        die_with(parent)
        work()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
