"""A whole model as sharded HF safetensors, written by all ranks from their live storages.

Every element is written once, by the rank that ``regions.claims`` names. Rank 0 lays the files out at full size under a
temporary folder, then all ranks write their regions in parallel at their offsets and read them back from the file. Only
when every rank found what it wrote does rank 0 state the tensors' checksums in the files' metadata, for readers
(``safetensors_sums``), and rename the folder to its name. Until then an older checkpoint under that name is whole; a
killed save leaves it so.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nereus.ir.units import DTYPE_BYTES
from nereus.models.naming.base import Naming
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.base import BindError, Binding
from nereus.runtime.adapters.publish import begin, discard, publish
from nereus.runtime.adapters.regions import (
    Claim,
    check_complete,
    check_model_naming,
    claimed_view,
    claims,
    logical_shapes,
    rects_of,
    slot_dtypes,
)
from nereus.runtime.adapters.safetensors_files import INDEX, SINGLE, TORCH_DTYPES
from nereus.runtime.adapters.safetensors_header import TO_FORMAT, TensorEntry, header_bytes
from nereus.runtime.adapters.safetensors_sums import stated, sum_of
from nereus.runtime.adapters.together import Ranks

#: Bytes of one piece on its way to the file: bounds what a save holds in host memory.
CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class File:
    name: str
    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    #: With checksums of nothing yet, which take as many bytes.
    header: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(entry.num_bytes for entry in self.entries)


def save(
    path: str | Path,
    binding: Binding,
    naming: Naming,
    *,
    group: dist.ProcessGroup | None = None,
    slot: str = "weight",
    dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
    files: Mapping[str, bytes] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write (``slot`` of) the model that the ranks of ``group`` hold together. Returns the bytes this rank wrote.

    ``dtype``: convert to it while writing (None: as held). ``files``: others for the folder (config.json, tokenizer) by
    name; those of an older checkpoint under ``path`` that are no weights are carried over. BindError on all ranks, with
    nothing written, where elements are missing; where a write fails, with the older checkpoint in place.
    """
    check_model_naming(naming)
    target, ranks = Path(path), Ranks(group)
    states = ranks.gather(binding.state)
    shapes = logical_shapes(naming.arch, naming.head)
    claimed = claims(states, keep=lambda key: key[1] == slot and key[0] in shapes)
    check_complete(claimed, shapes, (slot,))
    held = slot_dtypes(states, slot) if dtype is None else dict.fromkeys(shapes, dtype)
    if dtype is not None and dtype not in TO_FORMAT:
        raise BindError(f"dtype {dtype} cannot be written; known are {', '.join(TO_FORMAT)}")
    plan = _plan(naming, held, max_file_bytes, {"format": "pt", **(metadata or {})})
    folder = Path(ranks.first(lambda: str(_lay_out(target, plan, files or {})), f"laying out {target}"))
    try:
        mine = {key[0]: [c for c in found if c.holder == ranks.rank] for key, found in claimed.items()}
        written = ranks.agree(lambda: _write(folder, plan, binding, slot, mine), f"writing {target}")
        sums = [sums for _, sums in written]
        ranks.first(lambda: _state(folder, plan, sums), f"writing checksums into {target}")
        ranks.first(lambda: publish(folder, target, carry=_is_no_weight), f"publishing {target}")
    except BaseException:
        if ranks.rank == 0:
            discard(folder)
        raise
    return written[ranks.rank][0]


def _plan(naming: Naming, dtypes: Mapping[str, str], max_file_bytes: int, metadata: Mapping[str, str]) -> list[File]:
    """Tensors in model order, in files of at most ``max_file_bytes`` of data (a larger tensor has one alone)."""
    groups: list[list[TensorEntry]] = [[]]
    size = 0
    for tensor in logical_tensors(naming.arch, naming.head):
        entry = TensorEntry(name=tensor.name, dtype=dtypes[tensor.name], shape=tensor.shape, begin=0)
        if groups[-1] and size + entry.num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.num_bytes
    plan = []
    for number, entries in enumerate(groups, 1):
        # Wide elements first keep every tensor aligned to its element size.
        entries.sort(key=lambda e: -DTYPE_BYTES[e.dtype])
        placed, at = [], 0
        for entry in entries:
            placed.append(TensorEntry(name=entry.name, dtype=entry.dtype, shape=entry.shape, begin=at))
            at += entry.num_bytes
        name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        nothing = stated(dict.fromkeys((entry.name for entry in placed), 0))
        plan.append(File(name, tuple(placed), metadata, header_bytes(placed, {**metadata, **nothing})))
    return plan


def _lay_out(target: Path, plan: Sequence[File], files: Mapping[str, bytes]) -> Path:
    clash = [name for name in files if Path(name).name != name or not _is_no_weight(name)]
    if clash:
        raise BindError(f"files cannot be named {', '.join(clash)}")
    if target.exists() and not target.is_dir():
        raise BindError(f"{target} is a file; a checkpoint is a folder")
    folder = begin(target)
    try:
        for file in plan:
            with open(folder / file.name, "wb") as out:
                out.write(file.header)
                # Allocated now: a full disk is found before any rank has written.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(out.fileno(), 0, file.num_bytes)
                else:
                    out.truncate(file.num_bytes)
                out.flush()
                os.fsync(out.fileno())
        if len(plan) > 1:
            index = {
                "metadata": {"total_size": sum(entry.num_bytes for file in plan for entry in file.entries)},
                "weight_map": {entry.name: file.name for file in plan for entry in file.entries},
            }
            _write_file(folder / INDEX, json.dumps(index, indent=2).encode())
        for name, data in files.items():
            _write_file(folder / name, data)
    except BaseException:
        discard(folder)
        raise
    return folder


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _is_no_weight(name: str) -> bool:
    return not name.endswith((".safetensors", ".index.json", ".bin", ".pt", ".pth"))


def _write(
    folder: Path, plan: Sequence[File], binding: Binding, slot: str, mine: Mapping[str, list[Claim]]
) -> tuple[int, dict[str, int]]:
    """Bytes written, and this rank's part of the checksum of each tensor."""
    held = rects_of(binding)
    total = 0
    parts: dict[str, int] = {}
    for file in plan:
        crcs: list[tuple[int, int, int]] = []  # (offset, bytes, CRC-32)
        descriptor = os.open(folder / file.name, os.O_RDWR)
        try:
            for entry in file.entries:
                for claim in mine.get(entry.name, ()):
                    for row, rows in _bands(entry, claimed_view(held[entry.name, slot], claim.rect)):
                        at, num_cols = (claim.rect[0] + row, claim.rect[2]), _num_cols(entry)
                        part = sum_of(entry, rows, row=at[0], col=at[1], num_cols=num_cols)
                        parts[entry.name] = parts.get(entry.name, 0) + part
                        for offset, data in _runs(entry, len(file.header), at, rows):
                            _write_at(descriptor, data, offset)
                            crcs.append((offset, len(data), zlib.crc32(data)))
                            total += len(data)
            if crcs:
                os.fsync(descriptor)
                _verify(descriptor, folder / file.name, crcs)
        finally:
            os.close(descriptor)
    return total, parts


def _num_cols(entry: TensorEntry) -> int:
    return prod(entry.shape[1:])


def _bands(entry: TensorEntry, part: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows as they are written) of a rectangle, a piece at a time."""
    step = max(1, CHUNK_BYTES // max(1, part.shape[1] * DTYPE_BYTES[entry.dtype]))
    for first in range(0, part.shape[0], step):
        yield first, part[first : first + step].to(device="cpu", dtype=TORCH_DTYPES[entry.dtype]).contiguous()


def _runs(
    entry: TensorEntry, data_start: int, at: tuple[int, int], rows: torch.Tensor
) -> Iterator[tuple[int, memoryview]]:
    """(file offset, bytes) of a rectangle at row and column ``at``: whole rows lie together, others are a run each."""
    size = DTYPE_BYTES[entry.dtype]
    row_bytes, width = _num_cols(entry) * size, rows.shape[1] * size
    raw: Any = rows.view(torch.uint8).numpy()
    data = memoryview(raw).cast("B")
    start = data_start + entry.begin + at[0] * row_bytes + at[1] * size
    if width == row_bytes:
        yield start, data
        return
    for row in range(rows.shape[0]):
        yield start + row * row_bytes, data[row * width : (row + 1) * width]


def _state(folder: Path, plan: Sequence[File], parts: Sequence[Mapping[str, int]]) -> None:
    """Into the headers, over the same bytes: what the ranks' parts add up to."""
    for file in plan:
        sums = {entry.name: sum(part.get(entry.name, 0) for part in parts) for entry in file.entries}
        header = header_bytes(file.entries, {**file.metadata, **stated(sums)})
        if len(header) != len(file.header):
            raise BindError(f"{file.name}: a header of {len(header)} bytes for one of {len(file.header)}")
        descriptor = os.open(folder / file.name, os.O_RDWR)
        try:
            _write_at(descriptor, memoryview(header), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done


def _verify(descriptor: int, path: Path, sums: Sequence[tuple[int, int, int]]) -> None:
    if hasattr(os, "posix_fadvise"):
        # What was written is on its medium now; reading it from there and not from memory is what a check is for.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    for offset, num_bytes, checksum in sums:
        found = os.pread(descriptor, num_bytes, offset)
        if len(found) != num_bytes or zlib.crc32(found) != checksum:
            raise BindError(f"{path.name}: {num_bytes} bytes at {offset} were not read back as written")
