"""Small collectives of the checkpoint writers: every rank learns what went wrong on any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from nereus.runtime.adapters.base import BindError

T = TypeVar("T")


class Ranks:
    """The ranks of a group, or this process alone where torch.distributed is not in use."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.joined else 0
        self.size = dist.get_world_size(group) if self.joined else 1

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        if not self.joined:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, step: Callable[[], T], what: str) -> list[T]:
        """``step`` on every rank; its results by rank. Where it fails on any, BindError on all with each one's text."""
        value: T | None = None
        failure: str | None = None
        try:
            value = step()
        except Exception as error:  # whatever it is, the other ranks wait for this one
            failure = str(error) if isinstance(error, BindError) else f"{type(error).__name__}: {error}"
        found = self.gather((value, failure))
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text is not None]
        if failures:
            raise BindError(f"{what} failed: {'; '.join(dict.fromkeys(failures))}")
        return [result for result, _ in found]  # type: ignore[misc]

    def first(self, step: Callable[[], T], what: str) -> T:
        """``step`` on rank 0; its result on every rank."""
        return self.agree(lambda: step() if self.rank == 0 else None, what)[0]  # type: ignore[return-value]
