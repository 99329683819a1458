"""Link classes of moves, their bytes, and what they keep each port busy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.ir.units import DTYPE_BYTES
from nereus.models.priors import HOST_COPY_BYTES_PER_S
from nereus.verify.case import Case
from nereus.verify.finding import Violation
from nereus.verify.segments import BoolArray, IntArray

LOCAL, HOST, INTRA, INTER = "local", "host", "intra-node", "inter-node"
_CLASSES = (LOCAL, HOST, INTRA, INTER)

FloatArray = npt.NDArray[np.float64]


def link_classes(case: Case) -> npt.NDArray[np.int8]:
    """Number in ``(local, host, intra-node, inter-node)`` of every move, from its two places."""
    moves, world = case.document.moves, case.world
    num_devices = world.num_devices
    near = world.node_of_places(moves.src) == world.node_of_places(moves.dst)
    hosts = (moves.src >= num_devices) & (moves.dst >= num_devices)
    local = (moves.src == moves.dst) | (near & hosts)
    own = moves.src % num_devices == moves.dst % num_devices
    return np.where(local, 0, np.where(own, 1, np.where(near, 2, 3))).astype(np.int8)


def check_moves(case: Case) -> str:
    """Every move says the bytes that its region has and the class of the link that it crosses."""
    document = case.document
    moves = document.moves
    for table in document.tables:
        if any(DTYPE_BYTES.get(d) != b for d, b in zip(table.dtypes, table.slot_bytes, strict=True)):
            raise Violation(f"{table.model} {', '.join(table.slots)}: {table.slot_bytes} bytes per {table.dtypes}")
    true = case.numel * case.element_bytes
    wrong = np.flatnonzero(moves.num_bytes != true)
    if len(wrong):
        at = int(wrong[0])
        raise Violation(f"move {at} says {int(moves.num_bytes[at]):,} bytes and its region has {int(true[at]):,}")
    empty = np.flatnonzero(true == 0)
    if len(empty):
        raise Violation(f"move {int(empty[0])} carries no slot")
    if not set(document.links) <= set(_CLASSES):
        raise Violation(f"{', '.join(document.links)} are not the classes of links")
    said = np.array([_CLASSES.index(name) for name in document.links], dtype=np.int8)[moves.link]
    found = link_classes(case)
    wrong = np.flatnonzero(said != found)
    if len(wrong):
        at = int(wrong[0])
        ends = " to ".join(case.world.place_name(int(end)) for end in (moves.src[at], moves.dst[at]))
        raise Violation(f"move {at} from {ends} is {_CLASSES[found[at]]} and says {_CLASSES[said[at]]}")
    return f"{len(moves):,} moves, {int(true.sum()):,} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Seconds that each port is busy: a time that no execution of these moves beats."""

    seconds: FloatArray
    copies_s: float  # the busiest host memory's own copies, at an assumed rate

    @property
    def worst(self) -> float:
        return float(self.seconds.max(initial=0.0))


def busy_ports(case: Case) -> Busy:
    moves, world = case.document.moves, case.world
    num_devices = world.num_devices
    kind = link_classes(case)
    size = (case.numel * case.element_bytes).astype(np.float64)
    src, dst = moves.src % num_devices, moves.dst % num_devices
    from_node, to_node = world.node_of[src], world.node_of[dst]
    intra = np.array([min(n.gpu.intra_bytes_per_s, n.gpu.intra_peer_bytes_per_s) for n in world.nodes])
    pcie = np.array([n.gpu.pcie_bytes_per_s for n in world.nodes])
    nic = np.array([n.nic_bytes_per_s for n in world.nodes])
    through_host: BoolArray = (moves.src >= num_devices) | (moves.dst >= num_devices)
    inside = np.where(through_host, pcie[from_node], intra[from_node])
    crossing, between = kind > 0, kind == 3
    ports: list[FloatArray] = []
    for ends, node in ((src, from_node), (dst, to_node)):
        rate = np.where(between, pcie[node], inside)
        ports.append(_sums(ends[crossing], (size / rate)[crossing], num_devices))
    slower = np.minimum(nic[from_node], nic[to_node])
    for node in (from_node, to_node):
        ports.append(_sums(node[between], (size / slower)[between], len(world.nodes)))
    copied = (kind == 0) & (moves.src != moves.dst)
    copies = _sums(from_node[copied], size[copied] / HOST_COPY_BYTES_PER_S, len(world.nodes))
    return Busy(seconds=np.concatenate(ports), copies_s=float(copies.max(initial=0.0)))


def _sums(index: IntArray, values: FloatArray, length: int) -> FloatArray:
    return np.bincount(index, weights=values, minlength=length).astype(np.float64)
