"""torch.distributed.checkpoint folders as a side of compiled moves: a stage's whole state, in torch's own files.

``sources``: each process opens an even share of the folder's chunks, whoever wrote them, and the move brings them where
they are wanted. A tensor may lie in any number of chunks, in rows or in a grid; a side of a move has a tensor's part in
one place, so a process that has several chunks of one tensor takes part as several.

``Sink``: each process has one file with whole parameters, laid out at full size and mapped; the move writes the file's
own pages. Around a parameter's bytes stands what torch.save writes around them, with their CRC once they are there.
``write_metadata`` makes a folder of the files, under the keys of torch's get_state_dict, which ``dcp.load`` reads.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from nereus.ir.fragment import Fragment, Segment, fragments_of
from nereus.ir.units import DTYPE_BYTES
from nereus.models.naming.base import Naming, Where
from nereus.runtime.adapters import dcp
from nereus.runtime.adapters.base import BindError, Binding, BindingBuilder
from nereus.runtime.adapters.dcp_write import MODEL_PATH, OPTIMIZER_PATH
from nereus.runtime.adapters.safetensors_files import TORCH_DTYPES

_ALIGNMENT = 64  # of a parameter's bytes in their file, as torch has them in a stream

_ENTRIES = "__entries.distcp"


def sources(
    path: Path, naming: Naming, rank: int, size: int, *, verify: bool = False
) -> tuple[dcp.Holding, tuple[Binding, ...]]:
    """This process's share of the folder, for ``move(old=...)``; the holding has the folder's other entries. Raises
    BindError."""
    holding = dcp.bind(path, naming, share=(rank, size), verify=verify)
    return holding, apart(holding.binding)


def is_folder(path: Path) -> bool:
    return (path / ".metadata").is_file()


def apart(binding: Binding) -> tuple[Binding, ...]:
    """``binding`` as several, each of which has of every tensor one part, in one storage."""
    memory = [_aligned(data) for data in binding.memory]
    layers: list[list[Fragment]] = []
    columns: list[dict[str, tuple[int, int]]] = []  # of each tensor in each layer
    slots: list[set[tuple[str, str]]] = []
    for part in _joined(binding.state.fragments):
        first = part[0]
        key, cols = (first.tensor, first.slot), (first.col_lo, first.col_hi)
        for number in range(len(layers) + 1):
            if number == len(layers):
                layers.append([])
                columns.append({})
                slots.append(set())
            if key not in slots[number] and columns[number].get(first.tensor, cols) == cols:
                break
        layers[number].extend(part)
        columns[number][first.tensor] = cols
        slots[number].add(key)
    return tuple(_only(binding, memory, fragments) for fragments in layers)


def _joined(fragments: Sequence[Fragment]) -> list[list[Fragment]]:
    """Those of one storage that follow one another row by row."""
    found: list[list[Fragment]] = []
    for f in sorted(fragments, key=lambda f: (f.tensor, f.slot, f.storage, f.col_lo, f.row_lo)):
        last = found[-1][-1] if found else None
        if (
            last is not None
            and (last.tensor, last.slot, last.storage) == (f.tensor, f.slot, f.storage)
            and (last.col_lo, last.col_hi, last.row_hi) == (f.col_lo, f.col_hi, f.row_lo)
            and (last.stop, f.start) == (last.area, 0)
        ):
            found[-1].append(f)
        else:
            found.append([f])
    return found


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """torch puts streams of any length one after another, so most chunks begin at odd bytes."""
    return data.clone() if data.data_ptr() % data.element_size() else data


def _only(binding: Binding, memory: Sequence[torch.Tensor], fragments: Sequence[Fragment]) -> Binding:
    used = list(dict.fromkeys(f.storage for f in fragments))
    number = {storage: at for at, storage in enumerate(used)}
    state = replace(
        binding.state,
        storages=tuple(binding.state.storages[storage] for storage in used),
        fragments=tuple(replace(f, storage=number[f.storage]) for f in fragments),
    )
    return Binding(state, tuple(memory[storage] for storage in used))


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One slot of a parameter, to be stored whole. ``path``: of its key in the nested state dict."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    slot: str
    segments: tuple[Segment, ...]

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where a parameter's stream is."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    length: int


def parameters(naming: Naming, kinds: Mapping[tuple[str, str], str]) -> tuple[Parameter, ...]:
    """``kinds``: dtype by (tensor, slot), of all that is to be stored. BindError where the naming has no parameter for
    something, or one of tensors that are not kept alike."""
    names = dict(naming.parameters(Where()))
    tied = naming.arch.tied_embeddings and naming.head == "lm"
    if tied:  # torch stores it under both names, its optimizer knows one
        names["lm_head.weight"] = (naming.arch.vocab, naming.arch.hidden)
    found: list[Parameter] = []
    for name, shape in names.items():
        segments = naming.segments(name, shape, Where())
        for slot in dict.fromkeys(slot for _, slot in kinds):
            dtypes = {kinds.get((segment.tensor, slot)) for segment in segments}
            if dtypes == {None} or (tied and name == "lm_head.weight" and slot != "weight"):
                continue
            (dtype, *more) = dtypes
            if more or dtype is None:
                raise BindError(f"{name} ({slot}): its tensors are kept as {' and '.join(sorted(map(str, dtypes)))}")
            steps: tuple[str, ...] = MODEL_PATH if slot == "weight" else OPTIMIZER_PATH
            path = tuple(step.format(name=name, slot=slot) for step in steps)
            found.append(Parameter(path=path, shape=tuple(shape), dtype=dtype, slot=slot, segments=tuple(segments)))
    stored = {(segment.tensor, p.slot) for p in found for segment in p.segments}
    if left := sorted(set(kinds) - stored):
        raise BindError(f"{left[0][0]} ({left[0][1]}) is part of no parameter that torch's checkpoints have a name for")
    return tuple(found)


def shares(every: Sequence[Parameter], size: int) -> list[list[Parameter]]:
    """Which process writes what: large ones first, each to whoever has least."""
    found: list[list[Parameter]] = [[] for _ in range(size)]
    loads = [0] * size
    for parameter in sorted(every, key=lambda p: (-p.num_bytes, p.path)):
        least = loads.index(min(loads))
        found[least].append(parameter)
        loads[least] += parameter.num_bytes
    return found


@dataclass(frozen=True, slots=True)
class Sink:
    """``binding``: the file's parameters, to be filled; ``streams``: (first byte, its head, its tail) of each."""

    path: Path
    stored: tuple[Stored, ...]
    binding: Binding
    memory: mmap.mmap | bytearray
    streams: tuple[tuple[int, bytes, bytes], ...]

    @classmethod
    def lay_out(cls, folder: Path, number: int, own: Sequence[Parameter]) -> Sink:
        """Allocated now: a full disk is found before anything is moved. OSError."""
        path = folder / f"__{number}_0.distcp"
        stored, streams, at = [], [], 0
        for parameter in own:
            head, tail = _around(parameter, folder)
            at += -(at + len(head)) % _ALIGNMENT
            length = len(head) + parameter.num_bytes + len(tail)
            where = {"path": parameter.path, "shape": parameter.shape, "dtype": parameter.dtype}
            stored.append(Stored(file=path.name, offset=at, length=length, **where))  # type: ignore[arg-type]
            streams.append((at, head, tail))
            at += length
        with open(path, "w+b") as file:
            if at:
                os.posix_fallocate(file.fileno(), 0, at)
            memory = mmap.mmap(file.fileno(), at) if at else bytearray()
        builder = BindingBuilder(rank=0)
        for parameter, (begin, head, tail) in zip(own, streams, strict=True):
            first = begin + len(head)
            memory[begin:first] = head
            memory[first + parameter.num_bytes : first + parameter.num_bytes + len(tail)] = tail
            count = prod(parameter.shape)
            data = torch.frombuffer(memory, dtype=TORCH_DTYPES[parameter.dtype], offset=first, count=count)
            storage = builder.storage(parameter.key, data, host=True)
            cols = parameter.shape[-1] if len(parameter.shape) > 1 else 1
            builder.fragments.extend(
                fragments_of(parameter.segments, num_cols=cols, slot=parameter.slot, storage=storage)
            )
        return cls(path, tuple(stored), builder.finish(), memory, tuple(streams))

    def finish(self) -> tuple[Stored, ...]:
        """All of it is on the disk, and its streams say what their bytes sum up to."""
        for (begin, head, tail), data in zip(self.streams, self.binding.memory, strict=True):
            first = begin + len(head)
            end = first + data.numel() * data.element_size()
            crc = struct.pack("<I", zlib.crc32(memoryview(self.memory)[first:end]))
            for at in (_AFTER_DATA, _directory_entry(tail)):
                self.memory[end + at : end + at + 4] = crc
        if isinstance(self.memory, mmap.mmap):
            self.memory.flush()
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        return self.stored


#: Where the CRC stands in what follows a zip member's bytes, and in its entry of the directory.
_AFTER_DATA, _IN_DIRECTORY, _NAME_LENGTH, _ENTRY_BYTES = 4, 16, 28, 46


def _around(parameter: Parameter, folder: Path) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the bytes of such a tensor, which are a hole in a file meanwhile."""
    path = folder / f"{uuid.uuid4().hex}.part"
    try:
        with torch.serialization.skip_data():
            torch.save(torch.empty(parameter.shape, dtype=TORCH_DTYPES[parameter.dtype]), path)
        with open(path, "rb") as file:
            header: Any = torch.load(file, map_location="meta", weights_only=True)
            first = header.untyped_storage()._checkpoint_offset
            file.seek(0)
            head = file.read(first)
            file.seek(first + parameter.num_bytes)
            return head, file.read()
    finally:
        path.unlink(missing_ok=True)


def _directory_entry(tail: bytes) -> int:
    """Where the directory has the CRC of the data."""
    at = tail.find(b"PK\x01\x02")
    while at >= 0:
        name = tail[at + _ENTRY_BYTES : at + _ENTRY_BYTES + int.from_bytes(tail[at + _NAME_LENGTH :][:2], "little")]
        if name.endswith(b"/data/0"):
            return at + _IN_DIRECTORY
        at = tail.find(b"PK\x01\x02", at + 1)
    raise BindError(f"torch {torch.__version__} writes tensors in another form than this knows")


def write_metadata(folder: Path, stored: Sequence[Stored], entries: Mapping[str, Any]) -> None:
    """``entries``: a nested dict of what else the folder holds (``dcp_job.entries_of``)."""
    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for one in stored:
        key, shape = ".".join(one.path), torch.Size(one.shape)
        start = torch.Size([0] * len(shape))
        tensors[key] = _described(shape, TORCH_DTYPES[one.dtype])
        places[MetadataIndex(key, start)] = _StorageInfo(one.file, one.offset, one.length)
        paths[key] = one.path
    flat, more = flatten_state_dict(dict(entries))
    with open(folder / _ENTRIES, "wb") as file:
        for key, value in flat.items():
            begin = file.tell()
            torch.save(value, file)
            is_tensor = isinstance(value, torch.Tensor)
            tensors[key] = _described(value.shape, value.dtype) if is_tensor else BytesStorageMetadata()
            index = MetadataIndex(key, torch.Size([0] * value.dim())) if is_tensor else MetadataIndex(key)
            places[index] = _StorageInfo(_ENTRIES, begin, file.tell() - begin)
        file.flush()
        os.fsync(file.fileno())
    metadata = Metadata(tensors, planner_data={**paths, **more}, storage_data=places, storage_meta=StorageMeta())
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())


def _described(shape: torch.Size, dtype: torch.dtype) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [chunk])
