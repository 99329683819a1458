"""One number for each tensor of a safetensors file, in the file's own metadata, and the check of what a file holds.

The metadata go where the file goes, and other readers pass them over. The number is the sum over the tensor's elements
that ``nereus.kernels.checksum`` defines: every rank adds up what it writes, whatever it holds, and rows that changed
places are seen as surely as a flipped bit. A file without the numbers (another writer's) is taken as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np
import torch

from nereus.ir.units import DTYPE_BYTES
from nereus.kernels.checksum import tensor_key
from nereus.kernels.move import stored
from nereus.kernels.pack import packing
from nereus.runtime.adapters.base import BindError
from nereus.runtime.adapters.regions import listed
from nereus.runtime.adapters.safetensors_header import FileHeader, TensorEntry

#: Names the definition too: another one gets another key, and is not taken for this one.
KEY = "nereus_checksums_2"
#: Bytes in memory at one time.
CHUNK_BYTES = 32 * 2**20

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_MASK = (1 << 64) - 1


def stated(sums: Mapping[str, int]) -> dict[str, str]:
    """Metadata that state ``sums`` by tensor; as long for any numbers."""
    return {KEY: json.dumps({name: f"{total & _MASK:016x}" for name, total in sums.items()}, separators=(",", ":"))}


def sum_of(entry: TensorEntry, data: torch.Tensor, *, row: int, col: int, num_cols: int) -> int:
    """Of a dense rectangle [rows, columns] of a tensor with ``num_cols`` columns, from ``row`` and ``col`` on."""
    rows, cols = data.shape
    table = np.array([[0, 0, rows, cols, cols, row * num_cols + col, num_cols]], dtype=np.int64)
    what = packing(table, np.array([data.element_size()], dtype=np.int64))
    keys = np.array([tensor_key("", entry.name, "")], dtype=np.uint64)
    return stored((data.reshape(-1),), what, keys)


def check(headers: Sequence[FileHeader], keep: Callable[[str], bool] = lambda name: True) -> int:
    """Read every tensor that ``keep`` accepts and whose file states a number; how many bytes that were.

    BindError names the tensors that are not what was written, and their files."""
    wrong: list[str] = []
    total = 0
    for header in headers:
        expected = _read(header)
        with open(header.path, "rb") as file:
            for entry in header.entries:
                if entry.name not in expected or not keep(entry.name):
                    continue
                file.seek(header.data_start + entry.begin)
                found = sum(sum_of(entry, data, row=0, col=at, num_cols=0) for at, data in _chunks(file, entry)) & _MASK
                if found != expected[entry.name]:
                    wrong.append(
                        f"{entry.name} in {header.path.name} (checksum {found:016x}, not {expected[entry.name]:016x})"
                    )
                total += entry.num_bytes
    if wrong:
        raise BindError(
            f"{headers[0].path.parent}: {len(wrong)} tensors are not what was written: {listed(wrong)}. Take another "
            f"copy of these files; whoever changed them on purpose removes {KEY} from their metadata, or reads with "
            "verify=False"
        )
    return total


def _chunks(file: BinaryIO, entry: TensorEntry) -> Iterator[tuple[int, torch.Tensor]]:
    """(first element, [1, elements]) in order."""
    size, at, left = DTYPE_BYTES[entry.dtype], 0, entry.num_bytes
    while left:
        raw = bytearray(min(left, CHUNK_BYTES))
        if file.readinto(raw) != len(raw):  # type: ignore[attr-defined]
            raise BindError(f"{file.name}: ends inside {entry.name}: it became shorter while it was read")
        data = torch.frombuffer(raw, dtype=_INTEGERS[size]).view(1, -1)
        yield at, data
        at, left = at + data.numel(), left - len(raw)


def _read(header: FileHeader) -> dict[str, int]:
    text = header.metadata.get(KEY)
    if text is None:
        return {}
    try:
        return {str(name): int(value, 16) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise BindError(f"{header.path}: {KEY} of its metadata is no table of checksums: {error}") from error
