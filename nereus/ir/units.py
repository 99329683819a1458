"""Bytes, rates and times: how they are printed.

Sizes are exact ``int`` bytes inside; text shows decimal GB (10^9), the unit that GPU data sheets and capacities use.
"""

from __future__ import annotations

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

#: Bytes per element of every dtype that a slot may have.
DTYPE_BYTES: dict[str, int] = {"fp64": 8, "int64": 8, "fp32": 4, "int32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}


def format_bytes(num_bytes: float) -> str:
    """``1_500_000_000 -> '1.5 GB'``: three significant digits, decimal units."""
    for unit, size in (("TB", TB), ("GB", GB), ("MB", MB), ("kB", KB)):
        if abs(num_bytes) >= size:
            return f"{_significant(num_bytes / size)} {unit}"
    return f"{int(num_bytes)} B"


def format_gb(num_bytes: float) -> str:
    """One decimal and no unit, for columns headed GB: ``62_880_000_000 -> '62.9'``."""
    return f"{num_bytes / GB:.1f}"


def format_seconds(seconds: float) -> str:
    """``0.134 -> '0.134 s'``, ``38.2 -> '38.2 s'``, ``0.00012 -> '0.12 ms'``, ``5.47e-8 -> '0.0547 us'``."""
    if seconds and abs(seconds) < 1e-6:
        return f"{_significant(seconds * 1e6)} us"
    if seconds and abs(seconds) < 1e-3:
        return f"{_significant(seconds * 1e3)} ms"
    return f"{_significant(seconds)} s"


def _significant(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
