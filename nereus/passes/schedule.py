"""schedule: moves into waves, and the predicted time of the transfer.

Every move travels in about as many slices as every other, one a wave, so each port carries the same share of its total
in each wave and none waits for another: with W slices and relays D deep, the transfer takes the busiest port's time x
(1 + D / W), plus W times the cost of posting. Relays follow what they relay by one wave. (Whole moves put into waves
one after another left ports idle half of the time, whatever the size of the pieces.)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from nereus.ir.columns import runs
from nereus.ir.layout import IntArray
from nereus.ir.moves import Moves
from nereus.ir.schedule import Schedule, posted_bytes
from nereus.ir.units import KIB, MIB
from nereus.models.priors import HOST_COPY_BYTES_PER_S, MESSAGE_S
from nereus.passes.links import Links
from nereus.passes.route import Routed

FloatArray = npt.NDArray[np.float64]

#: A window that is so small against what moves that it needs more waves is not kept to (a device with very many tiny
#: messages; the staging that memory is planned with is what is posted, so nothing overflows).
MOST_WAVES = 100_000
#: Growth of the number of waves while some device posts more than a window in one.
_MORE_WAVES = 1.3
#: Fewer waves are tried where their messages take more than this share of the transfer.
MUCH = 0.01
#: Smaller slices are tried where it is predicted to take more than so many times its busiest port, or its bound.
FAR = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveSchedule:
    """``window_bytes``: most that a device sends, and receives, in one wave. ``max_waves``: how many waves a transfer
    is cut into at most, unless windows need more. Slices are not smaller than ``min_slice_bytes`` unless windows need
    it, or a fourth of that where it helps."""

    window_bytes: int = 512 * MIB
    max_waves: int = 64
    min_slice_bytes: int = 256 * KIB

    name = "schedule"

    def apply(self, routed: Routed) -> Schedule:
        count = self._first_count(routed)
        found = self._cut(routed, count, self.min_slice_bytes)
        # The first count is for relays that are all as deep as the deepest; most are not.
        while count > 1 and found.num_waves * MESSAGE_S > found.transfer_s * MUCH:
            fewer = count * 3 // 4
            other = self._cut(routed, fewer, self.min_slice_bytes)
            if other.transfer_s >= found.transfer_s:
                break
            count, found = fewer, other
        # Small moves that are relayed from place to place in few slices come in bursts.
        if found.transfer_s > max(routed.ports.busiest_s, routed.bound.transfer_s) * FAR:
            finer = self._cut(routed, count, self.min_slice_bytes // 4)
            found = min(found, finer, key=lambda each: each.transfer_s)
        return found

    def _cut(self, routed: Routed, count: int, least: int) -> Schedule:
        """Into ``count`` waves; more where some device would post more than a window in one. ``least``: bytes of a
        slice, unless windows need smaller ones."""
        moves, num_devices = routed.moves, routed.links.num_devices
        widest = int(moves.width.max(initial=0))
        while True:
            wave, slices = slice_moves(moves, count, least, num_devices)
            num_waves = int((wave + slices).max(initial=0))
            sent, received = posted_bytes(moves, wave, slices, num_devices, num_waves)
            most = max(int(sent.max(initial=0)), int(received.max(initial=0)))
            # Beyond single elements more waves still help: they spread the small moves.
            if most <= max(self.window_bytes, widest) or count > MOST_WAVES:
                break
            count, least = max(count + 1, int(count * _MORE_WAVES)), min(least // 4, self.window_bytes // 64)
        return Schedule(
            mode="reversible",
            moves=moves,
            wave=wave,
            slices=slices,
            num_waves=num_waves,
            window_bytes=self.window_bytes,
            acquire={},
            release={},
            transfer_s=transfer_seconds(moves, wave, slices, routed.links),
        )

    def _first_count(self, routed: Routed) -> int:
        """Waves that cost least: filling the pipeline costs depth / W of the transfer, posting W messages."""
        moves, num_devices = routed.moves, routed.links.num_devices
        depth = int(moves.depth.max(initial=0))
        best = sqrt(routed.ports.busiest_s * max(depth - 1, 1) / (2 * MESSAGE_S))
        heaviest = 0
        for ends in (moves.src, moves.dst):
            load = np.bincount(ends % num_devices, weights=np.where(moves.crosses, moves.num_bytes, 0))
            heaviest = max(heaviest, int(load.max(initial=0)))
        return max(1, min(int(best), self.max_waves), -(-heaviest // self.window_bytes))


def slice_moves(moves: Moves, count: int, least: int, num_devices: int) -> tuple[IntArray, IntArray]:
    """(first wave, slices) of every move, for about ``count`` waves with slices of at least ``least`` bytes.

    Moves that are too small for ``count`` slices are spread over the waves, source by source.
    """
    size = moves.num_bytes
    slices = np.clip(size // max(least, 1), 1, np.minimum(count, moves.numel))
    wave = _spread(moves.src % num_devices, size, slices, count)
    # Relays by depth: those before are settled when their turn comes.
    relays = np.flatnonzero(moves.after_counts)
    relays = relays[np.argsort(moves.depth[relays], kind="stable")]
    levels = np.flatnonzero(np.diff(moves.depth[relays], prepend=0, append=0))
    for begin, end in itertools.pairwise(levels.tolist()):
        mine = relays[begin:end]
        counts = moves.after_counts[mine]
        at, within = runs(counts)
        before = moves.after[moves.after_first[mine][at] + within]
        first = before[np.cumsum(counts) - counts]
        alike = (counts == 1) & (moves.region[first] == moves.region[mine])
        complete = np.maximum.reduceat(wave[before] + slices[before], np.cumsum(counts) - counts)
        wave[mine] = np.where(alike, wave[first] + 1, complete)
        slices[mine] = np.where(alike, slices[first], slices[mine])
    return wave, slices


def _spread(source: IntArray, size: IntArray, slices: IntArray, count: int) -> IntArray:
    """First wave of each move: those with fewer than ``count`` slices begin later, in proportion to what their source
    has sent of such moves."""
    wave = np.zeros(len(size), dtype=np.int64)
    small = np.flatnonzero(slices < count)
    if not len(small):
        return wave
    order = small[np.argsort(source[small], kind="stable")]
    running = np.cumsum(size[order])
    starts = np.flatnonzero(np.diff(source[order], prepend=-1))
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(order))))
    before = (running - size[order])[starts]
    total = np.add.reduceat(size[order], starts)
    middle = running - size[order] / 2 - before[group]
    wave[order] = (middle / total[group] * (count - slices[order] + 1)).astype(np.int64)
    return np.clip(wave, 0, np.maximum(count - slices, 0))


def transfer_seconds(moves: Moves, wave: IntArray, slices: IntArray, links: Links, *, agreed: bool = False) -> float:
    """Predicted seconds from the first byte to the last.

    Slices of one wave are posted together and share ports as fluids: a port is done with a wave when it has carried
    the wave's bytes, starting when the first of the ranks involved is ready. A rank starts a wave when its part of
    the one before is done, or (``agreed``, tight mode) when all have said that theirs is.
    """
    if not len(moves):
        return 0.0
    num_devices = links.num_devices
    src, dst = moves.src, moves.dst
    ports, seconds = _port_costs(src, dst, moves.num_bytes, links)
    seconds /= slices
    src, dst = src % num_devices, dst % num_devices
    until = wave + slices
    starting = np.argsort(wave, kind="stable")
    bounds = np.searchsorted(wave[starting], np.arange(int(until.max()) + 1))
    ready = np.zeros(num_devices)
    num_ports = 2 * num_devices + 2 * len(links.rail) + len(links.nic) + 1
    done = np.zeros(num_ports)  # port -> when it has carried everything so far
    chosen = starting[:0]  # moves that are on their way
    for number, (first, last) in enumerate(itertools.pairwise(bounds.tolist())):
        chosen = chosen[until[chosen] > number]
        if last > first:
            chosen = np.sort(np.concatenate((chosen, starting[first:last])), kind="stable")
        if not len(chosen):
            continue
        begin = np.maximum(ready[src[chosen]], ready[dst[chosen]])
        used = ports[:, chosen].reshape(-1)
        start = np.full(num_ports, np.inf)
        np.minimum.at(start, used, np.tile(begin, len(ports)))
        busy = np.bincount(used, weights=seconds[:, chosen].reshape(-1), minlength=num_ports)
        touched = np.isfinite(start)
        done[touched] = np.maximum(done, start)[touched] + busy[touched]
        done[-1] = 0.0  # "no port" couples nothing
        end = done[used].reshape(len(ports), -1).max(axis=0) + MESSAGE_S
        np.maximum.at(ready, src[chosen], end)
        np.maximum.at(ready, dst[chosen], end)
        if agreed:
            ready[:] = ready.max() + MESSAGE_S
    return float(ready.max())


def _port_costs(src: IntArray, dst: IntArray, num_bytes: IntArray, links: Links) -> tuple[IntArray, FloatArray]:
    """Port numbers and seconds on them, both ``[4, moves]``: device out, device in, NIC out (or a copy inside a
    node's host memory), NIC in; the last number stands for no port."""
    num_devices, num_rails, num_nodes = links.num_devices, len(links.rail), len(links.nic)
    node_of = np.array(links.node_of, dtype=np.int64)
    src_device, dst_device = src % num_devices, dst % num_devices
    src_node, dst_node = node_of[src_device], node_of[dst_device]
    src_host, dst_host = src >= num_devices, dst >= num_devices
    inter = src_node != dst_node
    local = (src == dst) | (~inter & src_host & dst_host)
    pcie, intra, rail = (np.array(rates) for rates in (links.pcie, links.intra, links.rail))
    rail_of = np.array(links.rail_of, dtype=np.int64)
    src_rail, dst_rail = rail_of[src_device], rail_of[dst_device]
    inside = np.where(src_host | dst_host, pcie[src_node], intra[src_node])
    size = np.where(local, 0, num_bytes)
    out_s, in_s = size * np.where(inter, pcie[src_node], inside), size * np.where(inter, pcie[dst_node], inside)
    none = np.full_like(src, 2 * num_devices + 2 * num_rails + num_nodes)
    first = 2 * num_devices
    copied = local & src_host & dst_host & (src != dst)
    ports = np.stack(
        (
            np.where(local, none, src_device),  # inside one memory nothing passes a device's port
            np.where(local, none, num_devices + dst_device),
            np.where(inter, first + src_rail, np.where(copied, first + 2 * num_rails + src_node, none)),
            np.where(inter, first + num_rails + dst_rail, none),
        ),
    )
    far_s = np.where(inter, size * rail[src_rail], np.where(copied, num_bytes / HOST_COPY_BYTES_PER_S, 0.0))
    seconds: FloatArray = np.stack((out_s, in_s, far_s, np.where(inter, size * rail[dst_rail], 0.0)))
    return ports, seconds
