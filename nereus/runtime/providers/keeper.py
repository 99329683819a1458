"""What torchrun starts, where the loss of a worker is not to end the others: a keeper for each device.

    from nereus.runtime.providers.keeper import keep

    def worker(*, store, device, spawn):                    # as with every other provider
        job = nereus.attach(plan, store=store, device=device, spawn=spawn)
        ...

    def lead(provider):                                     # if the job has a controller: beside rank 0's worker
        job = nereus.attach(plan, provider=provider)
        ...

    if __name__ == "__main__":
        keep(worker, cluster=plan.cluster)                  # or keep(worker, cluster=plan.cluster, lead=lead)

torchrun's agent ends all its processes as soon as one of them fails, and starts all anew. A keeper does not fail with
its worker: it tells the job's record of the end, and forks another one when it is asked. So torchrun hears of what it
is there for, a machine that is gone or a job that cannot go on, and the job deals with the rest. A keeper loads torch,
which its children share, and touches no accelerator.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed

from nereus.ir.cluster import Cluster, Device
from nereus.kernels import native
from nereus.runtime.faults import CANNOT_START, Fault
from nereus.runtime.providers.torchrun import Kept, Place, TorchrunProcesses, agreed, asking
from nereus.runtime.session.members import ENDED, report_loss, telling
from nereus.runtime.session.nursery import live, warm
from nereus.runtime.session.record import Record

#: Untyped in part.
dist: Any = torch.distributed

#: Among a keeper's processes: the one that leads, which is no part of a device.
_LEAD = "(lead)"


def keep(
    worker: Callable[..., object],
    *,
    args: Mapping[str, Any] | None = None,
    lead: Callable[[TorchrunProcesses], object] | None = None,
    cluster: Cluster | None = None,
    name: str = "nereus",
    start_s: float = 300.0,
) -> None:
    """In every process that torchrun starts; returns when the job has ended well. ``worker(store=, device=, spawn=,
    **args)`` is the job's process of this device, started at once; with ``lead``, which runs in a process of its own at
    rank 0 and has the provider, when its controller asks for it. ``cluster``: of the plans; ``name``: of the job, which
    ``attach`` is given too; ``start_s``: for all processes of torchrun to be there.

    Raises SystemExit where the job cannot go on: torchrun may then start all of it anew.
    """
    place = Place.of_environment()
    store = place.connect(start_s)
    start = agreed(place, store, start_s)
    keeper = _Keeper(place, Record(dist.PrefixStore(start, store), name, place.rank), place.device(cluster), start_s)
    connect = partial(_connected, place, start, start_s)
    keeper.work = partial(_worker, worker, connect, name, str(keeper.device), dict(args or {}))
    devices = tuple(keeper.record.gather("devices", keeper.device, range(place.size), start_s, stop=_never).values())
    if lead is not None and place.rank == 0:
        keeper.start(_LEAD, lambda: lead(TorchrunProcesses(connect(), devices, name=name)))
    if lead is None:
        keeper.start("", keeper.work)
    if code := keeper.run(num_first=1 if lead is not None else place.size):
        raise SystemExit(code)


def _never() -> None:
    return None


def _connected(place: Place, start: str, start_s: float) -> Any:
    return dist.PrefixStore(start, place.connect(start_s, serve=False))


def _worker(
    worker: Callable[..., object],
    connect: Callable[[], Any],
    name: str,
    device: str,
    args: dict[str, Any],
    part: str = "",
) -> None:
    store = connect()
    record = Record(store, name, 0)
    with telling(record):
        worker(store=store, device=device, spawn=asking(record), **args, **({"part": part} if part else {}))


class _Keeper:
    """``work``: of the device's processes, with ``part``."""

    def __init__(self, place: Place, record: Record, device: Device, start_s: float) -> None:
        self.place, self.device = place, device
        self.record = record
        self.work: Callable[..., object] = _never
        self._start_s = start_s
        self._children: dict[str, int] = {}  # by part
        self._code = 0  # of the last that ended
        self._orders: deque[tuple[str, tuple[str, ...]]] = deque()
        self._ended: Any = None
        self._wake_read, self._wake = os.pipe()
        torch.set_num_threads(1)
        native.load()
        warm()
        self.record.put(f"keeper/{device}", Kept.here(device, record.store))

    def start(self, part: str, work: Callable[[], object]) -> int:
        """A child of the main thread: it ends with it. The last one of that part does not outlive this."""
        self._end(part)
        sys.stdout.flush()
        sys.stderr.flush()
        self.record.count("processes/started")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            live(parent, work)
        self._children[part] = pid
        return pid

    def run(self, *, num_first: int) -> int:
        """Until the job has ended; this process's exit code. ``num_first``: processes that all keepers start by
        themselves."""
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for listen in (self._hear_orders, self._hear_end):
            threading.Thread(target=listen, args=(self.record.apart(),), daemon=True).start()
        while True:
            self._reap(num_first)
            while self._orders:
                self._obey(*self._orders.popleft())
            if self._ended is not None and self._leave():
                return self._code if self._code > 0 else int(self._code != 0)
            os.read(self._wake_read, 4096)

    def _reap(self, num_first: int) -> None:
        for part, child in list(self._children.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                self._children.pop(part, None)
                self._gone(part, pid, os.waitstatus_to_exitcode(status), num_first)

    def _gone(self, part: str, pid: int, code: int, num_first: int) -> None:
        """Of all processes of the job the last one decides how it ended, if none has said that it ended well."""
        report_loss(self.record, (socket.gethostname(), pid))
        ended = self.record.count("processes/ended")
        last = ended >= max(self.record.counted("processes/started"), num_first)
        if last or (part == _LEAD and code):
            self.record.first(ENDED, code)
        if self._ended is not None or part == _LEAD:
            self._code = self._code or code

    def _obey(self, key: str, words: tuple[str, ...]) -> None:
        done: int | str = 0
        try:
            if words[0] == "retire":
                for part in [part for part in self._children if part != _LEAD]:
                    self._end(part)
            else:
                done = self.start(words[1], partial(self.work, part=words[1]))
        except OSError as error:
            done = Fault(CANNOT_START, f"no process was started for {self.device}: {error}").encode()
        self.record.put(f"{key}/done", done)

    def _end(self, part: str) -> None:
        """A process of this device that is not wanted any more."""
        if (pid := self._children.pop(part, None)) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            report_loss(self.record, (socket.gethostname(), pid))
            self.record.count("processes/ended")

    def _leave(self) -> bool:
        """Whether nothing is left to wait for, once the job has ended: processes of its last plan end by themselves."""
        if isinstance(self._ended, int):
            self._code = self._code or self._ended
        serving = self._ended if isinstance(self._ended, tuple) else ()
        for part, pid in list(self._children.items()):
            if part != _LEAD and (socket.gethostname(), pid) not in serving:
                self._end(part)
        return not self._children

    # -- in threads of their own ---------------------------------------------------------------------------------------

    def _hear_orders(self, record: Record) -> None:
        number = 1
        with suppress(Fault):  # the store is gone, as the other thread says
            while self._ended is None:
                key = f"order/{self.device}/{number}"
                record.await_silently(key, lambda: self._ended is not None)
                if (words := record.get(key)) is not None:
                    self._orders.append((key, words))
                    number += 1
                    self._stir()

    def _hear_end(self, record: Record) -> None:
        try:
            record.await_silently(ENDED, lambda: self._ended is not None)
            self._ended = record.decided(ENDED)
        except Fault as fault:  # whoever keeps the store is gone, and with it the job
            print(fault, file=sys.stderr, flush=True)
            self._ended = 1
        self._stir()

    def _stir(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake, b"\0")
