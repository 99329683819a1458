"""Programs: what every participant does. Derived from one schedule that all participants agree on by digest.

Every storage is a 1-D buffer. A *block* is a rectangle inside one: ``num_rows`` runs of ``num_cols`` elements,
``row_stride`` elements apart, first element at ``offset``. A shard of a matrix, a range of ZeRO's flat buffer and a
strided part of either all are blocks, and a move is a list of blocks on each side with equal shapes, pair by pair, in
one element order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.cluster import Device
from nereus.ir.layout import IntArray

#: Columns of ``Blocks.table``.
STORAGE, OFFSET, NUM_ROWS, NUM_COLS, ROW_STRIDE, GLOBAL_START, GLOBAL_STRIDE = range(7)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """``table``: int64 ``[n, 7]``: storage id (of this participant), offset, rows, columns, row stride, and where the
    block lies in its logical tensor: flat index of the first element and elements between rows (for checksums and
    error texts)."""

    table: IntArray

    @property
    def numel(self) -> int:
        return int((self.table[:, NUM_ROWS] * self.table[:, NUM_COLS]).sum())

    def __len__(self) -> int:
        return len(self.table)


NO_BLOCKS = Blocks(np.zeros((0, 7), dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpec:
    """One allocation of one participant.

    It holds elements ``start..stop`` (row-major) of the box rows ``row_lo..row_hi`` x columns ``col_lo..col_hi`` of
    the logical tensor seen as a matrix (dim 0 x the rest; a vector is n x 1). ``start, stop`` cover the whole box
    unless the slot is sharded.
    """

    id: int
    #: old: released at the end; kept: in both plans, untouched; new: acquired here; staged: an old one's copy in host
    #: memory, acquired and released on the way
    role: str
    stage: str
    model: str
    tensor: str
    slot: str
    dtype: str
    host: bool  # host memory instead of the GPU's
    tensor_shape: tuple[int, ...]
    row_lo: int
    row_hi: int
    col_lo: int
    col_hi: int
    start: int
    stop: int
    #: Elements of the framework's allocation that the blocks of this storage point into, where that is not the range
    #: alone (``nereus.runtime.relocate``); 0: it is.
    extent: int = 0

    @property
    def numel(self) -> int:
        """Elements of the 1-D buffer."""
        return self.extent or self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCopy:
    """``dst[i] = src[i]`` block by block on one device; ``cast``: src and dst dtypes differ (bf16 weight from its
    fp32 master, round to nearest even), else bit for bit."""

    src: Blocks
    dst: Blocks
    cast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """All that one device sends another in one wave. ``tag`` is equal on both sides and unique in the transition."""

    tag: int
    peer: Device
    blocks: Blocks  # in transfer order; each is packed as num_rows x num_cols elements of its storage's dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """In this order: acquire; copies; post all receives and sends and wait for them; unpack and verify every message;
    derives; and, in tight mode, agree with all devices that the wave was verified, then release. What one process
    releases of a node's host memory, the others may count on after the next wave's agreement."""

    acquire: tuple[int, ...] = ()
    copies: tuple[LocalCopy, ...] = ()
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    derives: tuple[LocalCopy, ...] = ()
    release: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Program:
    """One device's part. All programs of a transition have equally many waves and the same ``digest`` and ``mode``.

    ``reversible``: nothing old is released before all devices have voted to commit; ``tight``: waves release as they
    go. ``commit_release``: old storages released after the commit.
    """

    device: Device
    mode: str
    digest: str
    storages: tuple[StorageSpec, ...]  # index = id
    waves: tuple[Wave, ...]
    commit_release: tuple[int, ...] = ()

    @property
    def num_messages(self) -> int:
        return sum(len(w.sends) + len(w.receives) for w in self.waves)
