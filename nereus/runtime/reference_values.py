"""The value of every element of a run's models, from its place in its logical tensor alone.

Each (model, tensor, slot) has a seed, and element i the bits of a hash of seed and i, made a finite number. Where some
plan of the run keeps an fp32 master, the weight is that master rounded to nearest even, as in training; otherwise it
has bits of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from nereus.ir.plan import Plan

BitArray = npt.NDArray[np.unsignedinteger]

#: Elements that are hashed at one time.
_CHUNK = 1 << 20
_WIDTH = {"fp64": 8, "int64": 8, "fp32": 4, "int32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
#: The top bit of the exponent, cleared so that no value is infinite or not a number.
_EXPONENT_TOP = {"fp64": 1 << 62, "fp32": 1 << 30, "bf16": 1 << 14, "fp16": 1 << 14, "fp8": 1 << 6}


class Values:
    """Bits of all elements of the models of ``plans``, the whole run's, so that a value never depends on the plan."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        self._mastered = {
            stage.model for plan in plans for stage in plan.stages if any(s.name == "master" for s in stage.slots)
        }

    def bits(self, model: str, tensor: str, slot: str, dtype: str, numel: int) -> torch.Tensor:
        """1-D, as integers of the dtype's width, in the logical tensor's flat order."""
        if slot == "weight" and model in self._mastered:
            bits = _rounded(_own_bits(f"{model}|{tensor}|master", "fp32", numel), dtype)
        else:
            bits = _own_bits(f"{model}|{tensor}|{slot}", dtype, numel)
        width = _WIDTH[dtype]
        return torch.from_numpy(bits.view(np.uint8 if width == 1 else np.dtype(f"<i{width}")))


def _own_bits(seed: str, dtype: str, numel: int) -> BitArray:
    width = _WIDTH[dtype]
    start = np.uint64(zlib.crc32(seed.encode()) << 32 | zlib.adler32(seed[::-1].encode()))
    out = np.empty(numel, dtype=f"<u{width}")
    for first in range(0, numel, _CHUNK):
        x = np.arange(first, min(first + _CHUNK, numel), dtype=np.uint64)
        x *= np.uint64(0xFF51AFD7ED558CCD)
        x ^= start
        x ^= x >> np.uint64(33)
        x *= np.uint64(0xC4CEB9FE1A85EC53)
        x ^= x >> np.uint64(31)
        out[first : first + len(x)] = x.astype(out.dtype)
    top = _EXPONENT_TOP.get(dtype)
    if top is not None:
        out &= np.array(~top & ((1 << 8 * width) - 1), dtype=out.dtype)
    return out


def _rounded(master: BitArray, dtype: str) -> BitArray:
    """fp32 bits as ``dtype``: for bf16 the upper half, rounded to nearest, ties to even."""
    if dtype == "fp32":
        return master
    if dtype == "bf16":
        odd = (master >> np.uint32(16)) & np.uint32(1)
        return ((master + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype("<u2")
    if dtype == "fp16":
        return master.view("<f4").astype("<f2").view("<u2")
    if dtype == "fp8":
        numbers = torch.from_numpy(master.view("<f4"))
        bits: BitArray = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return bits
    raise ValueError(f"a weight of type {dtype} is not made from an fp32 master")
