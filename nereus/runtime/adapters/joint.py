"""A process group over processes of several jobs: trainer ranks and engine workers, each with a world of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed

from nereus.runtime.adapters.base import FrameworkMissing

dist: Any = torch.distributed


def join_group(address: str, rank: int, size: int, *, name: str, timeout_s: float = 60.0) -> Any:
    """Rank ``rank`` of a gloo group of ``size`` processes that meet at ``address`` (``host:port``; rank 0 listens
    there). Beside a process's default group, or without one. Called by all members; collectives take it as ``group``,
    and the ranks in it count from 0."""
    host, _, port = address.rpartition(":")
    c10d = dist.distributed_c10d
    for needed in ("_new_process_group_helper", "_world"):
        if not hasattr(c10d, needed):
            raise FrameworkMissing(f"torch {torch.__version__} has no {needed}; tested with 2.13")
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, int(port), size, rank == 0, timeout)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], "gloo", dist.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


def leave_group(group: Any) -> None:
    """Free the group's connections. Its name must not be used again in this process."""
    dist.destroy_process_group(group)
