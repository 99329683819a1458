"""One process group of torch's for itself: without the default group, ``init_process_group`` or torch's names.

``backend``: "gloo" for memory of the host, "nccl" for CUDA's and, on a build for AMD, RCCL for HIP's. Every one that is
open in this process stands in a registry until it is dropped, those of few processes like those of all: ``abort_all``
ends them from any thread, and a test can see that none was left. NCCL could split a group of few from a larger one;
that takes a call in all processes of the larger one, of which some may be gone, so each is made on the store.

gloo has no abort of its own (``ProcessGroupGloo.abort`` does nothing): the group's connections are shut, which ends
every wait on it, here and in the peers, within milliseconds. They are known by their two ends: the processes tell each
other in the store where their listeners are. NCCL's own ends the kernels of this process; peers on
the same machine do not see it, so whoever waits must also look for a word in the store.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from nereus.runtime.faults import CANNOT_START, Fault

#: Untyped in part.
dist: Any = torch.distributed

GLOO, NCCL = BACKENDS = ("gloo", "nccl")

#: Read when a group of NCCL's is made. ASYNC_ERROR_HANDLING 2: the watchdog ends the communicators of an operation that
#: failed or ran out of time, and no more. torch's default ends the process, and with it the state that the survivors of
#: a failed change go on from. MONITORING 0: nor does its monitor, when ending a communicator takes long.
NCCL_SETTING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}

#: One at a time in this process: a listener that appears meanwhile is the device's; so is the environment.
_making = threading.Lock()
_registry = threading.Lock()
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


_INTERNET = (socket.AF_INET, socket.AF_INET6)

#: (host, port) of an end of a connection.
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class GlooDevice:
    """A listener, and a thread. ``addresses``: where it listens; more where another socket began to at that moment."""

    raw: Any
    addresses: frozenset[Address]


class Communicator:
    """``store``: with a name of this group's own. All ``size`` processes make it at once; torch's constructor waits for
    them, so callers wait in the store first. ``timeout_s``: of operations. ``device``: gloo's, where several share one,
    and so end together.

    Raises RuntimeError where they do not come, Fault where the backend cannot be on this machine.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        backend: str = GLOO,
        address: str = "127.0.0.1",
        device: GlooDevice | None = None,
    ) -> None:
        self.backend, self.size = backend, size
        #: Where tensors have to be.
        self.memory = torch.device("cpu")
        self._here: frozenset[Address] = frozenset()
        self._there: frozenset[Address] = frozenset()
        if backend == NCCL:
            if not (dist.is_nccl_available() and torch.cuda.is_available()):
                text = f"the nccl backend needs a GPU and a torch with NCCL or RCCL; this is torch {torch.__version__}"
                raise Fault(CANNOT_START, text)
            self.memory = torch.device("cuda", torch.cuda.current_device())
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_s)
            with _making, _environment(NCCL_SETTING):
                self._raw: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=timeout_s)
            options._threads = 1
            device = device or gloo_device(address)
            options._devices = [device.raw]
            self._here = device.addresses
            store.set(f"listens/{rank}", " ".join(f"{host} {port}" for host, port in self._here))
            self._raw = dist.ProcessGroupGloo(store, rank, size, options)
            self._there = frozenset().union(*(_told(store, other) for other in range(size) if other != rank))
        with _registry:
            _open.add(self)

    @property
    def raw(self) -> Any:
        """torch's group. None once dropped."""
        return self._raw

    def swap(self, peer: int, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> list[Any]:
        """Start one round between two processes: works to wait for, of all of it. ``peer`` does the reverse. NCCL runs
        what one round has as one operation, in which neither side can wait for the other to begin."""
        raw = self._raw
        if together := raw.supports_coalescing:
            raw._start_coalescing()
        works = [raw.recv([data], peer, tag) for tag, data in enumerate(into)]
        works += [raw.send([data], peer, tag) for tag, data in enumerate(out)]
        return [raw._end_coalescing()] if together else works

    def abort(self) -> None:
        """End every wait on it. Any thread."""
        if (raw := self._raw) is None:
            return
        if self.backend == NCCL:
            raw.abort()
        else:
            for number, mine, others in _connections():
                if mine in self._here or others in self._there:
                    _shut(number)

    def drop(self) -> None:
        """Free it; no other process waits for this one any more, or none is to. (Not NCCL's own shutdown: that waits
        for all of them.)"""
        if self.backend == NCCL:
            self.abort()
        self._raw = None
        with _registry:
            _open.discard(self)


def open_communicators() -> tuple[Communicator, ...]:
    """Of this process."""
    with _registry:
        return tuple(_open)


def abort_all() -> None:
    """End every wait of this process on any of them, from whatever thread."""
    for communicator in open_communicators():
        communicator.abort()


def gloo_device(address: str) -> GlooDevice:
    """At ``address``, any port. Groups that exist together may share one."""
    with _making:
        before = _listeners()
        raw = dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
        return GlooDevice(raw, frozenset(_listeners() - before))


def _told(store: Any, rank: int) -> frozenset[Address]:
    """Where a process listens; it said so before it connected."""
    words = bytes(store.get(f"listens/{rank}")).decode().split()
    return frozenset((host, int(port)) for host, port in zip(words[::2], words[1::2], strict=True))


@contextmanager
def _environment(setting: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in setting}
    os.environ.update(setting)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def shut_connections_to(addresses: Collection[Address]) -> None:
    """End this process's connections to any of them, whoever waits there."""
    for number, _, (host, port) in _connections():
        if (host.removeprefix("::ffff:"), port) in addresses:
            _shut(number)


def shut_sockets(sockets: Mapping[int, str]) -> None:
    """End connections, as ``open_sockets`` tells of them. The numbers may be in use anew: only these are shut."""
    for number, link in sockets.items():
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == link:
                _shut(number)


def open_sockets() -> dict[int, str]:
    """Open sockets of this process: descriptor -> what it points to. Empty where the system does not say."""
    found = {}
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for number in numbers:
        with suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{number}")
            if link.startswith("socket:"):
                found[int(number)] = link
    return found


def _shut(number: int) -> None:
    """Not one that listens: gloo's thread ends the process where such a one fails."""
    with suppress(OSError), _copy(number) as copy:
        if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            copy.shutdown(socket.SHUT_RDWR)


def _listeners() -> set[Address]:
    found = set()
    for number in open_sockets():
        with suppress(OSError), _copy(number) as copy:
            if copy.family in _INTERNET and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(_address(copy.getsockname()))
    return found


def _connections() -> Iterator[tuple[int, Address, Address]]:
    """(descriptor, this end, the other end)."""
    for number in open_sockets():
        with suppress(OSError), _copy(number) as copy:
            if copy.family in _INTERNET:
                yield number, _address(copy.getsockname()), _address(copy.getpeername())


def _copy(number: int) -> socket.socket:
    return socket.socket(fileno=os.dup(number))


def _address(name: Any) -> Address:
    return str(name[0]), int(name[1])
