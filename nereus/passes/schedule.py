"""schedule: moves into waves, and the predicted time of the transfer.

List scheduling: in routed order (large first) a move takes the first wave after the moves it relays where both of its
devices have room in their windows. The time comes from the same order on the ports: a move starts when its ports and
both ranks' earlier waves are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.ir.layout import IntArray
from nereus.ir.schedule import Schedule
from nereus.ir.transition import LOCAL, Move
from nereus.ir.units import MIB
from nereus.passes.links import HOST_COPY_BYTES_PER_S, MESSAGE_S, Links
from nereus.passes.route import Routed

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSchedule:
    """``window_bytes``: most that a device sends, and receives, in one wave."""

    window_bytes: int = 512 * MIB

    name = "schedule"

    def apply(self, routed: Routed) -> Schedule:
        """The better of two orders: as routed, and longest relay chain first."""
        best: tuple[float, list[Move], list[int]] | None = None
        for moves in (list(routed.moves), longest_chain_first(routed.moves)):
            wave = assign_waves(moves, self.window_bytes, routed.links.num_devices)
            seconds = transfer_seconds(moves, wave, routed.links)
            if best is None or seconds < best[0]:
                best = (seconds, moves, wave)
            if not any(move.after for move in moves):
                break  # without relays both orders are one
        assert best is not None
        seconds, moves, wave = best
        return Schedule(
            mode="reversible",
            moves=tuple(moves),
            wave=tuple(wave),
            num_waves=max(wave, default=-1) + 1,
            window_bytes=self.window_bytes,
            acquire={},
            release={},
            transfer_s=seconds,
        )


def longest_chain_first(moves: Sequence[Move]) -> list[Move]:
    """Moves that others relay come before those that none waits for; ``after`` is renumbered."""
    height = [0] * len(moves)
    for number in range(len(moves) - 1, -1, -1):
        for before in moves[number].after:
            height[before] = max(height[before], height[number] + 1)
    order = sorted(range(len(moves)), key=lambda i: (-height[i], i))
    position = {number: at for at, number in enumerate(order)}
    return [
        Move(m.src, m.dst, m.table, m.intervals, m.num_bytes, m.link, tuple(position[a] for a in m.after), m.slots)
        for m in map(moves.__getitem__, order)
    ]


def assign_waves(moves: Sequence[Move], window_bytes: int, num_devices: int) -> list[int]:
    """Wave of every move. Copies inside a node's host memory come last at both ranks: they cross no link, and in an
    earlier wave the network would wait for them."""
    wave = [0] * len(moves)
    sent: dict[tuple[int, int], int] = {}
    received: dict[tuple[int, int], int] = {}
    # Below these waves a device's window is (nearly) full, so the search may start there.
    open_out, open_in = [0] * num_devices, [0] * num_devices
    last = [0] * num_devices
    full = window_bytes - window_bytes // 16
    copies: list[int] = []
    for number, move in enumerate(moves):
        if move.link == LOCAL:
            copies.append(number)
            continue
        after = max((wave[m] + 1 for m in move.after), default=0)
        src, dst, size = move.src % num_devices, move.dst % num_devices, min(move.num_bytes, window_bytes)
        at = max(open_out[src], open_in[dst], after)
        while sent.get((src, at), 0) + size > window_bytes or received.get((dst, at), 0) + size > window_bytes:
            at += 1
        wave[number] = at
        last[src], last[dst] = max(last[src], at), max(last[dst], at)
        sent[src, at] = sent.get((src, at), 0) + size
        received[dst, at] = received.get((dst, at), 0) + size
        while sent.get((src, open_out[src]), 0) >= full:
            open_out[src] += 1
        while received.get((dst, open_in[dst]), 0) >= full:
            open_in[dst] += 1
    for number in copies:
        move = moves[number]
        after = max((wave[m] + 1 for m in move.after), default=0)
        wave[number] = max(after, last[move.src % num_devices], last[move.dst % num_devices])
    return wave


def transfer_seconds(moves: Sequence[Move], wave: Sequence[int], links: Links) -> float:
    """Predicted seconds from the first byte to the last.

    Moves of one wave are posted together and share ports as fluids: a port is done with a wave when it has carried
    the wave's bytes, starting when the first of the ranks involved is ready. A rank starts a wave when its part of
    the one before is done.
    """
    if not moves:
        return 0.0
    num_devices = links.num_devices
    src = np.array([m.src for m in moves], dtype=np.int64)
    dst = np.array([m.dst for m in moves], dtype=np.int64)
    ports, seconds = _port_costs(src, dst, np.array([m.num_bytes for m in moves], dtype=np.int64), links)
    ranks = np.stack((src % num_devices, dst % num_devices), axis=1)
    order = np.argsort(np.array(wave), kind="stable")
    bounds = np.searchsorted(np.array(wave)[order], np.arange(max(wave) + 2))
    ready = np.zeros(num_devices)
    done = np.zeros(2 * num_devices + 3 * len(links.nic) + 1)  # port -> when it has carried everything so far
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        chosen = order[first:last]
        begin = ready[ranks[chosen]].max(axis=1)
        start = np.full_like(done, np.inf)
        np.minimum.at(start, ports[chosen], begin[:, None])
        busy = np.zeros_like(done)
        np.add.at(busy, ports[chosen], seconds[chosen])
        used = np.isfinite(start)
        done[used] = np.maximum(done, start)[used] + busy[used]
        done[-1] = 0.0  # "no port" couples nothing
        end = done[ports[chosen]].max(axis=1) + MESSAGE_S
        np.maximum.at(ready, ranks[chosen], end[:, None])
    return float(ready.max())


def _port_costs(src: IntArray, dst: IntArray, num_bytes: IntArray, links: Links) -> tuple[IntArray, FloatArray]:
    """Port numbers and seconds on them, both ``[moves, 4]``: device out, device in, NIC out (or a copy inside a
    node's host memory), NIC in; the last number stands for no port."""
    num_devices, num_nodes = links.num_devices, len(links.nic)
    node_of = np.array(links.node_of, dtype=np.int64)
    src_device, dst_device = src % num_devices, dst % num_devices
    src_node, dst_node = node_of[src_device], node_of[dst_device]
    src_host, dst_host = src >= num_devices, dst >= num_devices
    inter = src_node != dst_node
    local = (src == dst) | (~inter & src_host & dst_host)
    pcie, intra, nic = (np.array(rates) for rates in (links.pcie, links.intra, links.nic))
    inside = np.where(src_host | dst_host, pcie[src_node], intra[src_node])
    size = np.where(local, 0, num_bytes)
    nic_s = size * np.maximum(nic[src_node], nic[dst_node])
    out_s, in_s = size * np.where(inter, pcie[src_node], inside), size * np.where(inter, pcie[dst_node], inside)
    none = np.full_like(src, 2 * num_devices + 3 * num_nodes)
    first = 2 * num_devices
    copied = local & src_host & dst_host & (src != dst)
    ports = np.stack(
        (
            src_device,
            num_devices + dst_device,
            np.where(inter, first + src_node, np.where(copied, first + 2 * num_nodes + src_node, none)),
            np.where(inter, first + num_nodes + dst_node, none),
        ),
        axis=1,
    )
    zero = np.zeros_like(nic_s)
    copy_s = num_bytes / HOST_COPY_BYTES_PER_S
    seconds: FloatArray = np.stack(
        (out_s, in_s, np.where(inter, nic_s, np.where(copied, copy_s, zero)), np.where(inter, nic_s, zero)), axis=1
    )
    return ports, seconds
