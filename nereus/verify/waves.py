"""The predicted seconds of the transfer, from the schedule's waves.

A rank posts its part of a wave when its part of the one before is done (tight mode: when all have said so, which takes
a message more). Slices of a wave share ports as fluids: a port begins with a wave when the first rank that uses it in
that wave is ready and its earlier waves are through, and has then carried all bytes of the wave at its rate. A slice is
done with the last of its ports, and a message later at its ranks.
"""

from __future__ import annotations

import numpy as np

from nereus.models.priors import MESSAGE_S
from nereus.verify.case import Case
from nereus.verify.links import port_use
from nereus.verify.segments import IntArray, ints, within
from nereus.verify.storages import Storages


def predicted_seconds(case: Case, storages: Storages) -> float:
    moves, num_devices = case.document.moves, case.world.num_devices
    src, dst, wave, slices = moves.src, moves.dst, moves.wave, moves.slices
    size = case.numel * case.element_bytes
    staged = [
        (device, first, storages.going_keys[device, stage, slot, tensor][1])
        for (device, stage, slot, tensor), (first, _) in case.document.staged.items()
        if (device, stage, slot, tensor) in storages.going_keys
    ]
    if staged and len(moves):  # to the host memory of the own process
        device, first, num_bytes = ints(staged).T
        src, dst = np.concatenate((src, device)), np.concatenate((dst, device + num_devices))
        wave, size = np.concatenate((wave, first)), np.concatenate((size, num_bytes))
        slices = np.concatenate((slices, np.ones(len(staged), dtype=np.int64)))
    if not len(src):
        return 0.0
    ports, seconds = port_use(case, src, dst, size)
    seconds = seconds / slices[:, None]
    ends = np.stack((src % num_devices, dst % num_devices), axis=1)
    ready, free = np.zeros(num_devices), np.zeros(case.world.num_ports + 1)
    for posted in _by_wave(wave, slices):
        used, ranks = ports[posted], ends[posted]
        begin = np.full(len(free), np.inf)
        np.minimum.at(begin, used, ready[ranks].max(axis=1)[:, None])
        named = np.unique(used)
        load = np.zeros(len(free))
        np.add.at(load, used, seconds[posted])
        free[named] = np.maximum(free[named], begin[named]) + load[named]
        free[-1] = 0.0  # no port at all
        done = free[used].max(axis=1) + MESSAGE_S
        np.maximum.at(ready, ranks, done[:, None])
        if case.document.mode == "tight":
            ready[:] = ready.max() + MESSAGE_S
    return float(ready.max())


def _by_wave(wave: IntArray, slices: IntArray) -> list[IntArray]:
    """Which moves have a slice in each wave that has any."""
    move = np.repeat(np.arange(len(wave), dtype=np.int64), slices)
    at = wave[move] + within(slices)
    order = np.argsort(at, kind="stable")
    return np.split(move[order], np.flatnonzero(np.diff(at[order])) + 1)
