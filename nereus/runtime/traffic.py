"""What the programs of a transition say will move, by kind of link, so that a run can compare it with what did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from nereus.ir.cluster import Device
from nereus.ir.program import Message, Program
from nereus.ir.transition import HOST, INTER, INTRA, LOCAL
from nereus.ir.units import DTYPE_BYTES

#: Link -> bytes, of one message.
Shares = dict[str, int]


def bytes_by_tag(programs: Iterable[Program]) -> dict[int, Shares]:
    """Planned bytes of every message, split by link. ValueError where the two ends of one do not agree."""
    sides: dict[int, dict[bool, tuple[Device, Device, Program, Message]]] = {}
    for program in programs:
        for wave in program.waves:
            for is_send, messages in ((True, wave.sends), (False, wave.receives)):
                for message in messages:
                    ends = (program.device, message.peer) if is_send else (message.peer, program.device)
                    sides.setdefault(message.tag, {})[is_send] = (*ends, program, message)
    result: dict[int, Shares] = {}
    for tag, both in sides.items():
        if len(both) != 2 or both[True][:2] != both[False][:2]:
            raise ValueError(f"message {tag} has only one end")
        src, dst, _, _ = both[True]
        sizes, from_host = _columns(*both[True][2:])
        expected, to_host = _columns(*both[False][2:])
        if not np.array_equal(sizes, expected):
            raise ValueError(f"message {tag}: its ends differ in size")
        shares: Shares = {}
        for size, out_host, in_host in zip(sizes.tolist(), from_host.tolist(), to_host.tolist(), strict=True):
            link = _link(src, dst, out_host, in_host)
            shares[link] = shares.get(link, 0) + size
        result[tag] = shares
    return result


def total_by_link(tags: Mapping[int, Shares], done: Iterable[int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for tag in done:
        for link, size in tags[tag].items():
            totals[link] = totals.get(link, 0) + size
    return dict(sorted(totals.items()))


def _columns(program: Program, message: Message) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, in host memory) of every block."""
    table = message.blocks.table
    widths = np.array([DTYPE_BYTES[s.dtype] for s in program.storages], dtype=np.int64)
    host = np.array([s.host for s in program.storages], dtype=bool)
    return table[:, 2] * table[:, 3] * widths[table[:, 0]], host[table[:, 0]]


def _link(src: Device, dst: Device, from_host: bool, to_host: bool) -> str:
    if src.node == dst.node and from_host and to_host:
        return LOCAL
    if src == dst:
        return HOST if from_host != to_host else LOCAL
    return INTRA if src.node == dst.node else INTER
