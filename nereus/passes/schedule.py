"""schedule: moves into waves, and the predicted time of the transfer.

List scheduling: in routed order (large first) a move takes the first wave after the moves it relays where both of its
devices have room in their windows. The time comes from the same order on the ports: a move starts when its ports and
both ranks' earlier waves are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus.ir.schedule import Schedule
from nereus.ir.transition import INTER, LOCAL, Move
from nereus.ir.units import MIB
from nereus.passes.links import MESSAGE_S, Links
from nereus.passes.route import Routed


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSchedule:
    """``window_bytes``: most that a device sends, and receives, in one wave."""

    window_bytes: int = 256 * MIB

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
    wave = [0] * len(moves)
    sent: dict[tuple[int, int], int] = {}
    received: dict[tuple[int, int], int] = {}
    # Below these waves a device's window is (nearly) full, so the search may start there.
    open_out, open_in = [0] * num_devices, [0] * num_devices
    full = window_bytes - window_bytes // 16
    for number, move in enumerate(moves):
        after = max((wave[m] + 1 for m in move.after), default=0)
        if move.link == LOCAL:  # inside one memory: nothing is staged
            wave[number] = after
            continue
        src, dst, size = move.src % num_devices, move.dst % num_devices, min(move.num_bytes, window_bytes)
        at = max(open_out[src], open_in[dst], after)
        while sent.get((src, at), 0) + size > window_bytes or received.get((dst, at), 0) + size > window_bytes:
            at += 1
        wave[number] = at
        sent[src, at] = sent.get((src, at), 0) + size
        received[dst, at] = received.get((dst, at), 0) + size
        while sent.get((src, open_out[src]), 0) >= full:
            open_out[src] += 1
        while received.get((dst, open_in[dst]), 0) >= full:
            open_in[dst] += 1
    return wave


def transfer_seconds(moves: Sequence[Move], wave: Sequence[int], links: Links) -> float:
    """Predicted seconds from the first byte to the last.

    Moves of one wave are posted together and share ports as fluids: a port is done with a wave when it has carried
    the wave's bytes, starting when the first of the ranks involved is ready. A rank starts a wave when its part of
    the one before is done.
    """
    num_devices = links.num_devices
    costs = [_port_costs(move, links) for move in moves]
    ready = [0.0] * num_devices
    done: dict[int, float] = {}  # port -> when it has carried everything so far
    by_wave: list[list[int]] = [[] for _ in range(max(wave, default=-1) + 1)]
    for number, at in enumerate(wave):
        by_wave[at].append(number)
    for numbers in by_wave:
        start: dict[int, float] = {}
        busy: dict[int, float] = {}
        for number in numbers:
            move = moves[number]
            begin = max(ready[move.src % num_devices], ready[move.dst % num_devices])
            for port, seconds in costs[number]:
                start[port] = min(start.get(port, begin), begin)
                busy[port] = busy.get(port, 0.0) + seconds
        for port, begin in start.items():
            done[port] = max(done.get(port, 0.0), begin) + busy[port]
        for number in numbers:
            move = moves[number]
            end = max([done[port] for port, _ in costs[number]]) + MESSAGE_S
            for rank in (move.src % num_devices, move.dst % num_devices):
                if end > ready[rank]:
                    ready[rank] = end
    return max(ready, default=0.0)


def _port_costs(move: Move, links: Links) -> tuple[tuple[int, float], ...]:
    """(port, seconds) of a move; ports are numbered: devices out, devices in, NICs out, NICs in."""
    num_devices, num_nodes = links.num_devices, len(links.nic)
    out_s, in_s, nic_s = links.port_seconds(move.src, move.dst, move.num_bytes)
    sides = ((move.src % num_devices, out_s), (num_devices + move.dst % num_devices, in_s))
    if move.link != INTER:
        return sides
    first = 2 * num_devices
    return (*sides, (first + links.node(move.src), nic_s), (first + num_nodes + links.node(move.dst), nic_s))
