"""Copies of state that should be equal, compared before a move: the first difference stops it, by name.

Inside a process bits are compared, where one fragment lies twice. Between processes sums over bits and places are
(``nereus.kernels.checksum``): each process reads what it shares with others and somebody wants, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from nereus.ir.described import primary_fragments
from nereus.ir.fragment import Fragment
from nereus.ir.program import STORAGE, Program
from nereus.ir.units import DTYPE_BYTES
from nereus.kernels.checksum import tensor_key
from nereus.kernels.move import pieces, stored
from nereus.kernels.pack import as_integers
from nereus.passes.replicas import Region
from nereus.runtime.adapters.base import BindError, Binding
from nereus.runtime.footprint import row_starts
from nereus.runtime.relocate import Home, relocated

_MASK = (1 << 64) - 1

#: (number of a region, tensor, slot) -> sum of one process's copy.
Sums = dict[tuple[int, str, str], int]


def check_repeats(binding: Binding) -> None:
    """BindError where the process holds something twice, with different values."""
    for copy, first in primary_fragments(binding.state)[1]:
        if binding.memory[copy.storage].dtype != binding.memory[first.storage].dtype:
            continue  # another dtype is another slot
        for begin, count in row_starts(copy):
            a, b = (_run(binding, f, begin, count) for f in (first, copy))
            if not torch.equal(a, b):
                names = " and ".join(binding.state.storages[f.storage].name for f in (first, copy))
                raise BindError(
                    f"rank {binding.state.rank}: {copy.tensor} {copy.slot} lies in {names}, with different values: "
                    "which of them is the state cannot be known"
                )


def _run(binding: Binding, fragment: Fragment, begin: int, count: int) -> torch.Tensor:
    return as_integers(binding.memory[fragment.storage].narrow(0, fragment.offset(begin), count))


def sums(
    program: Program, regions: Iterable[Region], home_of: Mapping[int, Home], data: Mapping[int, torch.Tensor]
) -> Sums:
    """``program``: as it was compiled, for the names of its storages; ``data``: their memory, by number."""
    specs = program.storages
    widths = np.array([DTYPE_BYTES[s.dtype] for s in specs], dtype=np.int64)
    keys = np.array([tensor_key(s.model, s.tensor, s.slot) for s in specs], dtype=np.uint64)
    found: Sums = {}
    for number, blocks in regions:
        table = relocated(blocks, dict(home_of), specs).table
        for storage in np.unique(table[:, STORAGE]).tolist():
            total = 0
            for piece in pieces(table[table[:, STORAGE] == storage], widths):
                scratch = torch.empty(0 if piece.in_place else piece.num_bytes, dtype=torch.uint8)
                total += stored(data, piece, keys, scratch)
            found[number, specs[storage].tensor, specs[storage].slot] = total & _MASK
    return found


def difference(processes: Sequence[Sums]) -> str:
    """What differs between the processes' copies, "" where nothing does."""
    first: dict[tuple[int, str, str], int] = {}
    differing: dict[str, tuple[int, int]] = {}
    for process, own in enumerate(processes):
        for key, total in own.items():
            holder = first.setdefault(key, process)
            if total != processes[holder][key]:
                differing.setdefault(f"{key[1]} {key[2].partition(':')[0]}", (holder, process))
    if not differing:
        return ""
    name, (a, b) = next(iter(differing.items()))
    more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
    return (
        f"{name} differs between its copies in processes {a} and {b}{more}: which of them is the state cannot be "
        "known. Make them equal, or pass check_replicas=False to take any of them"
    )
