"""Lists of different lengths laid end to end in columns."""

from __future__ import annotations

import numpy as np

from nereus.ir.layout import IntArray


def runs(counts: IntArray) -> tuple[IntArray, IntArray]:
    """(list, position inside it) of every member of lists of these lengths."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return owner, np.arange(len(owner), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
