"""One order of all communication in which no operation waits for a later one, and what each wave posts.

A rank posts its part of wave k + 1 when its part of wave k is complete and verified; a slice is done when both its ends
have posted its wave. So an operation of wave k waits for operations of waves below k only, if relays do: the earliest
unfinished operation, in the order (wave, move), can always proceed.
"""

from __future__ import annotations

import numpy as np

from nereus.verify.case import Case
from nereus.verify.finding import Violation
from nereus.verify.segments import IntArray, within


def check_order(case: Case) -> str:
    document = case.document
    moves = document.moves
    last = moves.wave + moves.slices
    beyond = np.flatnonzero(last > document.num_waves)
    if len(beyond):
        number = int(beyond[0])
        raise Violation(f"move {number} ends in wave {int(last[number]) - 1}, and there are {document.num_waves}")
    child = np.repeat(np.arange(len(moves)), moves.after_first[1:] - moves.after_first[:-1])
    wrong = np.flatnonzero(moves.wave[moves.after] >= moves.wave[child])
    if len(wrong):
        one, other = int(child[wrong[0]]), int(moves.after[wrong[0]])
        raise Violation(f"move {one} of wave {moves.wave[one]} waits for move {other} of wave {moves.wave[other]}")
    for what, waves in (("acquired", document.acquire), ("released", document.release)):
        for key, wave in waves.items():
            if not 0 <= wave < max(document.num_waves, 1):
                raise Violation(f"{key[1]} {key[2]} is {what} in wave {wave}, and there are {document.num_waves}")
    for key, (first, final) in document.staged.items():
        if not 0 <= first < final < document.num_waves:
            raise Violation(f"{key[1]} {key[2]} is in host memory from wave {first} to {final}")
    waits = 2 * int(moves.slices.sum()) + len(moves.after)
    return f"{waits:,} waits, each for operations of earlier waves or for the two posts of its own: no cycle"


def posted(case: Case) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(direction * devices + device, wave, bytes, number of slices) of everything posted across links: direction 0 is
    out, 1 is in. A slice has a whole number of elements."""
    document, world = case.document, case.world
    moves = document.moves
    crossing = np.flatnonzero(np.array([name != "local" for name in document.links], dtype=bool)[moves.link])
    slices = moves.slices[crossing]
    move, part = np.repeat(crossing, slices), within(slices)
    numel, count = case.numel[move], moves.slices[move]
    size = (numel * (part + 1) // count - numel * part // count) * case.element_bytes[move]
    wave = moves.wave[move] + part
    num_waves = int(wave.max(initial=0)) + 1
    keys = [
        (direction * world.num_devices + ends[move] % world.num_devices) * num_waves + wave
        for direction, ends in enumerate((moves.src, moves.dst))
    ]
    found, where = np.unique(np.concatenate(keys), return_inverse=True)
    load = np.zeros(len(found), dtype=np.int64)
    np.add.at(load, where.reshape(-1), np.concatenate((size, size)))
    times = np.bincount(where.reshape(-1), minlength=len(found))
    return found // num_waves, found % num_waves, load, times


def check_windows(case: Case) -> str:
    """No device posts more in a wave and direction than a window, unless it is one move alone, nor more both ways than
    the staging that was set aside."""
    document, world = case.document, case.world
    port, wave, load, times = posted(case)
    over = np.flatnonzero((load > document.window_bytes) & (times > 1))
    if len(over):
        at = int(over[0])
        direction, device = divmod(int(port[at]), world.num_devices)
        way = "receives" if direction else "sends"
        raise Violation(
            f"{world.devices[device]} {way} {int(load[at]):,} bytes in {int(times[at])} moves of wave {int(wave[at])}: "
            f"a window has {document.window_bytes:,}"
        )
    if bool((document.memory.staging < 0).any()):
        raise Violation("staging below zero")
    num_waves = int(wave.max(initial=0)) + 1
    both, where = np.unique(port % world.num_devices * num_waves + wave, return_inverse=True)
    together = np.zeros(len(both), dtype=np.int64)
    np.add.at(together, where.reshape(-1), load)
    short = np.flatnonzero(together > document.memory.staging[both // num_waves])
    if len(short):
        device, in_wave = divmod(int(both[short[0]]), num_waves)
        raise Violation(
            f"{world.devices[device]} stages {int(together[short[0]]):,} bytes in wave {in_wave} and has "
            f"{int(document.memory.staging[device]):,} set aside"
        )
    worst = int(load.max(initial=0))
    return f"at most {worst:,} bytes per device, wave and direction (window {document.window_bytes:,}), all staged"
