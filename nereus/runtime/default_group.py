"""torch's default group, one for every layout, for frameworks that cannot do without it.

torch has one default group, whose processes and ranks are fixed, and Megatron makes all its groups inside it. A change
of layout needs two beside each other, of processes that come and go:

    world = DefaultGroup(store, f"{view.epoch}/{view.stage.name}", rank=place.rank, size=place.size)
    ...                  # the framework makes its groups: inside this one, which is in force
    world.made()
    old.activate()       # the one before is in force again
    world.close()        # frees all groups that were made inside

gloo has no abort: ``shut`` ends every wait in the world's groups, from any thread, by closing their connections.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from nereus.runtime.adapters.base import FrameworkMissing
from nereus.runtime.communicator import open_sockets, shut_sockets

#: Untyped in part.
dist: Any = torch.distributed


class DefaultGroup:
    """Made by all its processes at once; in force from then on. ``name``: of no other world of this job. ``backend``:
    as ``init_process_group`` takes it. Groups made inside get the same names in all processes, whatever each made
    before."""

    def __init__(
        self, store: Any, name: str, *, rank: int, size: int, backend: str = "gloo", timeout_s: float = 60.0
    ) -> None:
        c10d = dist.distributed_c10d
        for needed in ("_new_process_group_helper", "_update_default_pg", "_world"):
            if not hasattr(c10d, needed):
                raise FrameworkMissing(f"torch {torch.__version__} has no {needed}; tested with 2.13")
        self._c10d, self._before, self._sockets = c10d, set(c10d._world.pg_map), open_sockets()
        # torch numbers its groups by how many a process has made; processes that joined later have made fewer.
        self._count = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest())
        c10d._world.group_count = self._count
        self.group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            backend,
            dist.PrefixStore(f"nereus/world/{name}", store),
            group_name=f"nereus/world/{name}",
            timeout=timedelta(seconds=timeout_s),
        )
        c10d._world.pg_group_ranks[self.group] = {number: number for number in range(size)}
        self._inside: list[Any] = []
        self.activate()

    def activate(self) -> None:
        """From now on torch's default group is this one."""
        self._c10d._update_default_pg(self.group)

    def made(self) -> None:
        """All groups that were made since are this world's."""
        self._inside = [g for g in self._c10d._world.pg_map if g not in self._before and g is not self.group]
        before, self._before = self._sockets, set()
        self._sockets = {number: link for number, link in open_sockets().items() if before.get(number) != link}

    def shut(self) -> None:
        """End every wait in this world, here and in its other processes. Any thread; after ``made``."""
        shut_sockets(self._sockets)

    def close(self) -> None:
        """Not the one in force."""
        if self.group is self._c10d._world.default_pg:
            raise ValueError("this is torch's default group now: activate another one first")
        for group in (*self._inside, self.group):
            if group in self._c10d._world.pg_map:  # a framework may have freed some
                dist.destroy_process_group(group)
        self._inside, self._sockets = [], {}
