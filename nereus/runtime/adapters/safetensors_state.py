"""A stage's whole state as safetensors files that are storages: what a compiled move reads from, or writes to.

Each process has one file with whole logical tensors of some slots, about as many bytes as the others have. ``Sink``
lays it out at full size and maps it, so that the move writes the file's own pages, verified there like any other
storage; ``finish`` states every tensor's checksum in the header and brings all of it to the disk. ``sources`` maps all
files of a stage, and a process reads the pages that it needs. A weight is stored under its own name, so that any reader
of safetensors finds it, and other slots as ``slot:name``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from nereus.ir.fragment import Fragment
from nereus.ir.tensor import LogicalTensor, matrix_shape
from nereus.ir.units import DTYPE_BYTES
from nereus.runtime.adapters.base import BindError, Binding, BindingBuilder
from nereus.runtime.adapters.safetensors_files import TORCH_DTYPES, map_file
from nereus.runtime.adapters.safetensors_header import FileHeader, TensorEntry, header_bytes, read_header
from nereus.runtime.adapters.safetensors_sums import check, stated, sum_of

#: (tensor, slot)
Key = tuple[str, str]


def kinds_of(binding: Binding) -> dict[Key, str]:
    """Dtype of everything that a process holds a part of. BindError where it has two."""
    found: dict[Key, str] = {}
    for fragment in binding.state.fragments:
        key, dtype = (fragment.tensor, fragment.slot), binding.state.storages[fragment.storage].dtype
        if found.setdefault(key, dtype) != dtype:
            raise BindError(f"{key[0]} {key[1]} is held as {found[key]} and as {dtype}")
    return found


def shares(kinds: Mapping[Key, str], tensors: Sequence[LogicalTensor], size: int) -> list[list[Key]]:
    """Which process writes what: large tensors first, each to whoever has least."""
    numel = {tensor.name: prod(tensor.shape) for tensor in tensors}
    if unknown := sorted(name for name, _ in kinds if name not in numel):
        raise BindError(f"the model has no tensor {unknown[0]}")
    weight = {key: numel[key[0]] * DTYPE_BYTES[dtype] for key, dtype in kinds.items()}
    found: list[list[Key]] = [[] for _ in range(size)]
    loads = [0] * size
    for key in sorted(kinds, key=lambda key: (-weight[key], key)):
        least = loads.index(min(loads))
        found[least].append(key)
        loads[least] += weight[key]
    return found


@dataclass(frozen=True, slots=True)
class Sink:
    """``binding``: the file's tensors, to be filled."""

    path: Path
    entries: tuple[TensorEntry, ...]
    data_start: int
    binding: Binding
    memory: mmap.mmap

    @classmethod
    def lay_out(
        cls, path: Path, own: Sequence[Key], kinds: Mapping[Key, str], tensors: Sequence[LogicalTensor]
    ) -> Sink:
        """Allocated now: a full disk is found before anything is moved. OSError."""
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        entries, at = [], 0
        for key in sorted(own, key=lambda key: (-DTYPE_BYTES[kinds[key]], key)):  # wide first: all of them aligned
            entry = TensorEntry(name=_name(key), dtype=kinds[key], shape=shapes[key[0]], begin=at)
            entries.append(entry)
            at += entry.num_bytes
        head = header_bytes(entries, stated(dict.fromkeys((entry.name for entry in entries), 0)))
        with open(path, "w+b") as file:
            file.write(head)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, len(head) + at)
            memory = mmap.mmap(file.fileno(), len(head) + at)
        binding = _bound(entries, memory, len(head), rank=0)
        return cls(path, tuple(entries), len(head), binding, memory)

    def finish(self) -> None:
        """All of it is on the disk, and says what it is."""
        sums = {
            entry.name: sum_of(entry, data.view(1, -1), row=0, col=0, num_cols=0)
            for entry, data in zip(self.entries, self.binding.memory, strict=True)
        }
        self.memory[: self.data_start] = header_bytes(self.entries, stated(sums))
        self.memory.flush()
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())


def sources(paths: Sequence[Path]) -> Binding:
    """All that the files hold, where it lies in them."""
    builder = BindingBuilder(rank=0)
    for path in paths:
        header = read_header(path)
        _bind(builder, header.entries, map_file(path), header.data_start)
    return builder.finish()


def verify(paths: Sequence[Path], rank: int, size: int) -> None:
    """This process's part of reading everything once. BindError names tensors that are not what was written."""
    headers: list[FileHeader] = [read_header(path) for path in paths]
    sizes = [(entry.num_bytes, str(h.path), entry.name) for h in headers for entry in h.entries]
    names = sorted(sizes, reverse=True)
    own = {(path, name) for _, path, name in names[rank::size]}
    for header in headers:
        check([header], lambda name, path=str(header.path): (path, name) in own)  # type: ignore[misc]


def _name(key: Key) -> str:
    return key[0] if key[1] == "weight" else f"{key[1]}:{key[0]}"


def _bound(entries: Sequence[TensorEntry], memory: mmap.mmap, data_start: int, *, rank: int) -> Binding:
    builder = BindingBuilder(rank=rank)
    _bind(builder, entries, memory, data_start)
    return builder.finish()


def _bind(builder: BindingBuilder, entries: Sequence[TensorEntry], memory: mmap.mmap, data_start: int) -> None:
    for entry in entries:
        slot, _, tensor = entry.name.rpartition(":")
        count = prod(entry.shape)
        data = torch.frombuffer(memory, dtype=TORCH_DTYPES[entry.dtype], offset=data_start + entry.begin, count=count)
        storage = builder.storage(entry.name, data, host=True)
        rows, cols = matrix_shape(entry.shape)
        builder.fragments.append(
            Fragment(
                tensor=tensor,
                slot=slot or "weight",
                storage=storage,
                row_lo=0,
                row_hi=rows,
                col_lo=0,
                col_hi=cols,
                start=0,
                stop=count,
                origin=0,
                stride=cols,
            )
        )
