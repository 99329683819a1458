"""The safetensors format: 8 bytes of header length, a JSON header, one run of tensor bytes.

Read here and not through the ``safetensors`` package because that gives tensors, not the places of their bytes, and
because a checkpoint's faults are to be named with numbers before anything is read or written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from nereus.ir.units import DTYPE_BYTES
from nereus.runtime.adapters.base import BindError

#: The format's names of dtypes <-> ours. What is not here is no state that a transition knows.
FROM_FORMAT: dict[str, str] = {
    "F64": "fp64",
    "I64": "int64",
    "F32": "fp32",
    "I32": "int32",
    "BF16": "bf16",
    "F16": "fp16",
    "F8_E4M3": "fp8",
    "I8": "int8",
}
TO_FORMAT: dict[str, str] = {ours: theirs for theirs, ours in FROM_FORMAT.items()}

#: The format's own limit on a header.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """``begin``: byte of the tensor's first element from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """``data_start``: byte of the file at which the data begins."""

    path: Path
    data_start: int
    num_data_bytes: int
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]


def read_header(path: Path) -> FileHeader:
    """BindError, with the numbers, where the file is not whole or its header does not describe its bytes."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise BindError(f"{path}: {size} bytes cannot hold a header of {length if len(prefix) == 8 else 8}")
            if length > MAX_HEADER_BYTES:
                raise BindError(f"{path}: a header of {length} bytes; the format allows {MAX_HEADER_BYTES}")
            text = file.read(length)
    except OSError as error:
        raise BindError(f"{path}: {error.strerror or error}") from error
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BindError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise BindError(f"{path}: the header is a JSON {type(header).__name__}, not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BindError(f"{path}: __metadata__ is not an object of strings")
    entries = [_entry(path, name, value) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.num_bytes))
    _check_places(path, entries, size - 8 - length)
    return FileHeader(
        path=path,
        data_start=8 + length,
        num_data_bytes=size - 8 - length,
        entries=tuple(entries),
        metadata=dict(metadata),
    )


def header_bytes(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The file's start, up to its data, padded so that the data is aligned to 8 bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    for entry in entries:
        header[entry.name] = {
            "dtype": TO_FORMAT[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.begin + entry.num_bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(n for n in names if names.count(n) > 1)}' appears twice")
    return found


def _entry(path: Path, name: str, value: object) -> TensorEntry:
    if not isinstance(value, dict):
        raise BindError(f"{path}: the entry of {name} is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if dtype not in FROM_FORMAT:
        raise BindError(f"{path}: {name} has dtype {dtype!r}; known are {', '.join(FROM_FORMAT)}")
    sizes, places = _naturals(shape), _naturals(offsets)
    if sizes is None or places is None or len(places) != 2:
        raise BindError(f"{path}: {name} has shape {shape!r} and data_offsets {offsets!r}")
    entry = TensorEntry(name=name, dtype=FROM_FORMAT[dtype], shape=tuple(sizes), begin=places[0])
    if places[1] - places[0] != entry.num_bytes:
        raise BindError(
            f"{path}: {name} {sizes} {dtype} takes {entry.num_bytes} bytes, "
            f"its data_offsets {places} hold {places[1] - places[0]}"
        )
    return entry


def _naturals(value: object) -> list[int] | None:
    if not isinstance(value, list):
        return None
    found = [item for item in value if type(item) is int and item >= 0]
    return found if len(found) == len(value) else None


def _check_places(path: Path, entries: Sequence[TensorEntry], num_data_bytes: int) -> None:
    at, before = 0, "the header"
    for entry in entries:
        if entry.begin < at:
            raise BindError(f"{path}: {entry.name} at byte {entry.begin} overlaps {before}, which ends at {at}")
        if entry.begin > at:
            raise BindError(f"{path}: {entry.begin - at} bytes between {before} and {entry.name} belong to no tensor")
        at, before = entry.begin + entry.num_bytes, entry.name
    if at > num_data_bytes:
        raise BindError(f"{path}: truncated: the header promises {at} data bytes, the file has {num_data_bytes}")
    if at < num_data_bytes:
        raise BindError(f"{path}: {num_data_bytes - at} bytes after the last tensor belong to none")
