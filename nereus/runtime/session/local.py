"""Processes of this machine for a job: started, watched and ended by the script that launches it.

    with LocalProcesses("examples.ppo.worker:main", args={"steps": 40}) as processes:
        for device in devices:
            processes.spawn(device)
        codes = processes.wait()

Three kinds of processes beside the launcher, so that none of the job's can take what it needs with it: one keeps the
store; the nursery loads torch once and forks the job's processes, which are there in milliseconds; and those. All end
when the launcher does, however that happens (Linux; elsewhere their deadlines end them).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed

from nereus.ir.cluster import Cluster, Device
from nereus.runtime.codec import encode
from nereus.runtime.faults import CANNOT_START, STORE_LOST, Fault
from nereus.runtime.providers.base import Machine
from nereus.runtime.session.members import device_of, report_loss
from nereus.runtime.session.record import Record
from nereus.runtime.session.replicated import connected

#: Untyped in part.
dist: Any = torch.distributed

_POLL_S = 0.02


class LocalProcesses:
    """``target``: ``module:function``; each process calls ``function(store=..., device=..., spawn=..., **args)``.
    ``args``: plain values. ``name``: of the job. ``cluster``: the nodes that this machine plays, None: any.
    ``env``: added to the environment. ``stores``: processes that keep the job's store, an odd number; the job outlives
    the loss of less than half of them (``keepers``: theirs, by number).

    A process that ends, whatever its code, is told to the others at once; a device that a plan needs gets one.
    """

    def __init__(
        self,
        target: str,
        *,
        args: Mapping[str, Any] | None = None,
        name: str = "nereus",
        cluster: Cluster | None = None,
        env: Mapping[str, str] | None = None,
        start_s: float = 60.0,
        stores: int = 1,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nereus-job-")
        # torch warns of every wait on the store that ended by its deadline; faults say what matters of that.
        environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **(env or {})}
        environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        self.keepers = [_python("store", [], environ) for _ in range(stores)]
        ports = [int(keeper.stdout.readline() or 0) for keeper in self.keepers if keeper.stdout is not None]
        if not all(ports):
            raise Fault(CANNOT_START, "the process that keeps the job's store did not start")
        self.store = connect(ports, start_s)
        self.record = Record(self.store, name, 0)
        self._pulse = self.record.watched(start_s)
        job = Path(self._folder.name, "job")
        job.write_bytes(encode({"target": target, "ports": ports}))
        out = os.dup(1)
        self._nursery = _python("nursery", [str(job), str(out)], environ, pass_fds=(out,))
        os.close(out)
        self.codes: dict[int, int] = {}  # of processes that have ended; -9: killed
        self.name, self._args = name, dict(args or {})
        self._cluster = cluster
        self._jobs = {name: (self.record, self._args)}
        self._job_of: dict[int, str] = {}  # by pid
        self._pids: dict[int, int] = {}  # order number -> pid
        self._latest: dict[tuple[str, Device, str], int] = {}  # pid of each job, device and part
        self._orders = 0
        self._asked: dict[str, int] = {}
        self._lock = threading.Condition()
        self._gone = False
        self._closing = False
        for work in (self._listen, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def spawn(
        self,
        device: str | Device,
        part: str = "",
        *,
        name: str | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> int:
        """Raises Fault where no process comes. ``name``, ``args``: of a job beside this one's own, which shares nothing
        with it but the store and the nursery."""
        if self._cluster is not None and device_of(device) not in self._cluster.devices:
            raise Fault(CANNOT_START, f"no process was started for {device}: no node here has it")
        name = name or self.name
        given = {**self._args, **(args or {})}
        words = {"name": name, "args": {**given, **({"part": part} if part else {})}}
        with self._lock:
            if name not in self._jobs:
                self._jobs[name] = Record(self.store, name, 0), given
            self._orders += 1
            number = self._orders
            Path(self._folder.name, f"process-{number}").write_bytes(encode(words))
            self._send({"spawn": number, "device": str(device_of(device))})
            if not self._lock.wait_for(lambda: number in self._pids or self._gone, timeout=120.0) or self._gone:
                raise Fault(CANNOT_START, f"no process was started for {device}")
            pid = self._pids[number]
            self._job_of[pid] = name
            self._latest[name, device_of(device), part] = pid
            return pid

    def retire(self, device: Device) -> None:
        with self._lock:
            keys = [key for key in self._latest if key[:2] == (self.name, device)]
            pids = [self._latest.pop(key) for key in keys]
        for pid in pids:
            self.kill(pid)

    def inventory(self) -> tuple[Machine, ...]:
        """The nodes of ``cluster``, all of which this machine plays."""
        nodes = self._cluster.nodes if self._cluster is not None else ()
        return tuple(Machine(name=node.name, address="127.0.0.1", devices=node.devices) for node in nodes)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        with self._lock:
            if pid in self.codes:
                return
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    @property
    def alive(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(pid for pid in self._pids.values() if pid not in self.codes)

    def wait(self, timeout_s: float | None = None) -> dict[int, int]:
        """Until all processes have ended; their exit codes by pid. TimeoutError."""
        with self._lock:
            if not self._lock.wait_for(lambda: self._gone or set(self._pids.values()) <= set(self.codes), timeout_s):
                raise TimeoutError(f"processes {sorted(set(self._pids.values()) - set(self.codes))} still run")
            return dict(self.codes)

    def close(self) -> None:
        self._closing = True
        self._pulse.close()
        for process in (self._nursery, *self.keepers):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
        for pid in self.alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._folder.cleanup()

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._nursery.stdin is not None
        try:
            self._nursery.stdin.write(json.dumps(order) + "\n")
            self._nursery.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise Fault(CANNOT_START, "the process that starts the others has ended") from None

    def _listen(self) -> None:
        assert self._nursery.stdout is not None
        with suppress(ValueError):  # closed
            for line in self._nursery.stdout:
                said = json.loads(line)
                with self._lock:
                    if "spawned" in said:
                        self._pids[said["spawned"]] = said["pid"]
                    else:
                        self.codes[said["ended"]] = said["code"]
                    self._lock.notify_all()
                if "ended" in said and not self._closing:
                    with suppress(Fault):
                        record, _ = self._jobs[self._job_of.get(said["ended"], self.name)]
                        report_loss(record, (socket.gethostname(), said["ended"]))
        with self._lock:
            self._gone = True
            self._lock.notify_all()

    def _watch(self) -> None:
        """Processes that the jobs ask for."""
        while not self._closing:
            with self._lock:
                jobs = dict(self._jobs)
            for name, (record, args) in jobs.items():
                number = self._asked.get(name, 0) + 1
                try:
                    if (asked := record.get(f"spawn/{number}")) is not None:
                        self._asked[name] = number
                        self.spawn(*asked, name=name, args=args)
                except Fault as fault:
                    if self._closing or fault.code == STORE_LOST:
                        return
                    # The job that asked goes on without it at its deadline; here is why.
                    print(f"job {name}: {fault}", file=sys.stderr, flush=True)
            time.sleep(_POLL_S)


def connect(ports: Sequence[int], start_s: float) -> Any:
    """To the store that processes of this machine keep."""
    if len(ports) > 1:
        return connected([f"127.0.0.1:{port}" for port in ports], start_s=start_s)
    return dist.TCPStore("127.0.0.1", ports[0], None, False, timedelta(seconds=start_s), wait_for_workers=False)


def asking(record: Record) -> Callable[[Device, str], None]:
    """For ``attach(spawn=...)`` in a process whose launcher is a ``LocalProcesses``."""
    return lambda device, part: record.put(f"spawn/{record.count('spawns')}", (str(device), part))


def _python(
    module: str, words: list[str], environ: Mapping[str, str], pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"nereus.runtime.session.{module}", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(environ),
        text=True,
        start_new_session=True,
        pass_fds=pass_fds,
    )
