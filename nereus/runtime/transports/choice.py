"""Which transport goes between processes.

``tcp`` (``sockets.py``): connections of our own, and reads of each other's memory on one host; fastest for what lies in
host memory, needs nothing but TCP, and ends at once from any thread. ``gloo`` and ``nccl`` (``groups.py``): process
groups of torch.distributed, for GPUs, for links that only NCCL or RCCL drives (NVLink, xGMI, InfiniBand), and for
clusters where torch.distributed is what is set up and allowed to connect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from nereus.runtime.communicator import BACKENDS
from nereus.runtime.transports.base import Transport
from nereus.runtime.transports.groups import ProcessGroups
from nereus.runtime.transports.sockets import Sockets

TCP = "tcp"
TRANSPORTS = (TCP, *BACKENDS)


class Kept(Transport, Protocol):
    """A transport between processes, that may serve several transitions."""

    def again(self, name: str, process_of: Any) -> bool:
        """Ready for another transition among the same processes; False where the last one broke it."""

    def drop(self) -> None:
        """End its connections."""


def between(kind: str) -> Callable[..., Kept]:
    """The constructor of one of ``TRANSPORTS``; they take the same."""
    if kind not in TRANSPORTS:
        raise ValueError(f"no transport '{kind}' between processes: {', '.join(TRANSPORTS)}")
    return Sockets if kind == TCP else partial(ProcessGroups, backend=kind)
