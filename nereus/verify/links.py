"""Link classes of moves, their bytes, and what they keep each port busy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.ir.units import DTYPE_BYTES
from nereus.models.priors import HOST_COPY_BYTES_PER_S
from nereus.verify.case import Case
from nereus.verify.finding import Violation
from nereus.verify.segments import IntArray

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

    worst: float
    copies_s: float  # the busiest host memory's own copies, at an assumed rate


def busy_ports(case: Case) -> Busy:
    moves, world = case.document.moves, case.world
    ports, seconds = port_use(case, moves.src, moves.dst, case.numel * case.element_bytes)
    copies = world.num_ports - len(world.nodes)
    total = np.bincount(ports.reshape(-1), weights=seconds.reshape(-1), minlength=world.num_ports + 1)
    return Busy(
        worst=float(total[:copies].max(initial=0.0)),
        copies_s=float(total[copies : world.num_ports].max(initial=0.0)),
    )


def port_use(case: Case, src: IntArray, dst: IntArray, num_bytes: IntArray) -> tuple[IntArray, FloatArray]:
    """(ports, seconds on them), both ``[transfers, 4]``. Ports: out of device d: d; into it: D + d; out of rail r: 2D +
    r; into it: 2D + R + r; copies in node n's host memory: 2D + 2R + n; ``num_ports`` where a transfer passes fewer."""
    world = case.world
    num_devices, num_rails = world.num_devices, world.num_rails
    gpus = [node.gpu for node in world.nodes]
    intra = np.array([1 / min(gpu.intra_bytes_per_s, gpu.intra_peer_bytes_per_s) for gpu in gpus])
    pcie = np.array([1 / gpu.pcie_bytes_per_s for gpu in gpus])
    rail = np.array([node.rails / node.nic_bytes_per_s for node in world.nodes for _ in range(node.rails)])
    ends = (src % num_devices, dst % num_devices)
    nodes, rails = [world.node_of[end] for end in ends], [world.rail_of[end] for end in ends]
    between = nodes[0] != nodes[1]
    in_host = (src >= num_devices, dst >= num_devices)
    copied = ~between & in_host[0] & in_host[1] & (src != dst)
    stays = copied | (src == dst)
    ports = np.full((len(src), 4), world.num_ports, dtype=np.int64)
    cost = np.zeros((len(src), 4))
    for side in (0, 1):
        node = nodes[side]
        inside = np.where(in_host[0] | in_host[1], pcie[node], intra[node])
        ports[~stays, side] = (side * num_devices + ends[side])[~stays]
        cost[~stays, side] = np.where(between, pcie[node], inside)[~stays]
        ports[between, 2 + side] = (2 * num_devices + side * num_rails + rails[side])[between]
        cost[between, 2 + side] = rail[rails[side]][between]
    ports[copied, 2] = (2 * num_devices + 2 * num_rails + nodes[0])[copied]
    cost[copied, 2] = 1 / HOST_COPY_BYTES_PER_S
    seconds: FloatArray = cost * num_bytes[:, None]
    return ports, seconds
