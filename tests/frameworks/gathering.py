"""The bindings of all ranks, on every rank: what whole tensors are put together from, and compared."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nereus.ir.fragment import RankState
from nereus.runtime.adapters.base import Binding


def bindings_of_all(binding: Binding | None) -> list[Binding]:
    """Copies of the bindings of the ranks that have one, in the order of the ranks. A collective of all ranks.

    As bytes: tensors among pickled objects are written and read back one by one, which takes longer than most moves.
    """
    mine = None
    if binding is not None:
        mine = (binding.state, [(memory.dtype, _bytes(memory)) for memory in binding.memory])
    found: list[tuple[RankState, list[tuple[torch.dtype, bytes]]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return [Binding(state, tuple(_tensor(*m) for m in memory)) for state, memory in filter(None, found)]


def _bytes(memory: torch.Tensor) -> bytes:
    flat: Any = memory.detach().contiguous().view(torch.uint8).numpy()
    return flat.tobytes()


def _tensor(dtype: torch.dtype, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
