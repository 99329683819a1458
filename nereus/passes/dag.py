"""dag: every operation of a transition and the order that holds on any timing, columnar.

An edge says that the later operation starts after the earlier one finished. A rank's ``post`` operations carry the
waves: they follow each other, acquire the wave's storages, and every move of the wave follows its two ranks' posts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray
from nereus.ir.schedule import Schedule, StorageKey
from nereus.passes.lifecycle import Lifecycle

KINDS = (
    "quiesce",
    "engine-start",
    "spawn",
    "build-groups",
    "post",
    "move",
    "verify",
    "release",
    "commit",
    "retire",
    "resume",
)
QUIESCE, ENGINE_START, SPAWN, BUILD_GROUPS, POST, MOVE, VERIFY, RELEASE, COMMIT, RETIRE, RESUME = range(len(KINDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """``kind``, ``device`` (-1: all), ``wave`` (-1: none), ``acquired`` and ``released`` bytes per op, ``item`` (move
    or life-cycle number); ``edges[:, 0]`` before ``edges[:, 1]``. Ops are numbered in one total order, so every edge
    goes up."""

    kind: IntArray
    device: IntArray
    wave: IntArray
    item: IntArray
    space: IntArray  # memory space that acquired / released refer to, -1: none
    acquired: IntArray
    released: IntArray
    edges: IntArray

    @property
    def num_ops(self) -> int:
        return len(self.kind)

    @property
    def num_edges(self) -> int:
        return len(self.edges)


class _Builder:
    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int, int, int]] = []
        self.edges: list[tuple[int, int]] = []

    def op(
        self,
        kind: int,
        *,
        device: int = -1,
        wave: int = -1,
        item: int = -1,
        space: int = -1,
        acquired: int = 0,
        released: int = 0,
        after: tuple[int, ...] = (),
    ) -> int:
        number = len(self.rows)
        self.rows.append((kind, device, wave, item, space, acquired, released))
        self.edges += [(before, number) for before in after]
        return number


def build_dag(
    schedule: Schedule,
    life: Lifecycle,
    topology: Topology,
    new_bytes: IntArray,
    old_bytes: IntArray,
    acquire_bytes: dict[StorageKey, tuple[int, int]],
    release_bytes: dict[StorageKey, tuple[int, int]],
) -> Dag:
    """``new_bytes`` / ``old_bytes``: per space, all storages that come / go (reversible mode). ``acquire_bytes`` /
    ``release_bytes``: (space, bytes) of single storages (tight mode)."""
    build = _Builder()
    num_devices = topology.num_devices
    quiesce = build.op(QUIESCE)
    kinds = {"engine-start": ENGINE_START, "spawn": SPAWN, "build-groups": BUILD_GROUPS}
    setup = [
        build.op(kinds[op.kind], device=op.devices[0], item=number, after=() if op.background else (quiesce,))
        for number, op in enumerate(life.ops)
        if op.kind in kinds
    ]
    ready = build.op(POST, after=(quiesce, *setup))  # all participants agree on the digest before byte one
    last: dict[int, int] = {}  # device -> its last post or release
    open_moves: dict[int, list[int]] = {}  # device -> verifies of its current wave
    verified: list[int] = [-1] * len(schedule.moves)
    by_wave: list[list[int]] = [[] for _ in range(schedule.num_waves)]
    for number, wave in enumerate(schedule.wave):
        by_wave[wave].append(number)
    acquires, releases = _per_wave(schedule, new_bytes, acquire_bytes, release_bytes)
    waves = max(schedule.num_waves, 1 if acquires else 0)
    everything: list[int] = []
    host_releases: dict[int, list[tuple[int, int]]] = {}  # space -> (wave, release)
    for wave in range(waves):
        moves = by_wave[wave] if wave < len(by_wave) else []
        devices = {m % num_devices for n in moves for m in (schedule.moves[n].src, schedule.moves[n].dst)}
        posts: dict[int, int] = {}
        spaces = acquires.get(wave, {})
        for space in sorted(spaces):  # acquire ops of spaces: device posts, or one op for host memory
            owner = space if space < num_devices else -1 - space
            gone = [op for at, op in host_releases.get(space, ()) if at + 2 <= wave]
            before = (*open_moves.pop(owner, []), last.get(owner, ready), *gone)
            posts[owner] = build.op(
                POST, device=max(owner, -1), wave=wave, space=space, acquired=spaces[space], after=before
            )
        for device in sorted(devices - set(posts)):
            before = (*open_moves.pop(device, []), last.get(device, ready))
            posts[device] = build.op(POST, device=device, wave=wave, after=before)
        last.update(posts)
        for number in moves:
            move = schedule.moves[number]
            src, dst = move.src % num_devices, move.dst % num_devices
            # A relay's own receives are behind its post: it follows every verify of the rank's earlier waves.
            after = [posts[src]]
            if dst != src:
                after.append(posts[dst])
            host = -1 - num_devices - topology.node_of_place(dst)
            if move.dst >= num_devices and host in posts:
                after.append(posts[host])
            sent = build.op(MOVE, device=src, wave=wave, item=number, after=tuple(after))
            verified[number] = build.op(VERIFY, device=dst, wave=wave, item=number, after=(sent,))
            everything.append(verified[number])
            for device in {src, dst}:
                open_moves.setdefault(device, []).append(verified[number])
        freed = releases.get(wave, {})
        if freed:
            # Tight mode: all agree that the wave was verified, then release; the next wave follows the releases.
            agreed = build.op(POST, wave=wave, after=tuple(dict.fromkeys((*everything, *last.values()))) or (ready,))
            everything = []
            for space in sorted(freed):
                done = build.op(
                    RELEASE,
                    device=space if space < num_devices else -1,
                    wave=wave,
                    space=space,
                    released=freed[space],
                    after=(agreed,),
                )
                if space < num_devices:
                    last[space] = done
                else:  # the other processes of the node know at the next wave's agreement
                    host_releases.setdefault(space, []).append((wave, done))
            for owner in set(last) | {s if s < num_devices else -1 - s for w in acquires.values() for s in w}:
                if owner not in freed:
                    last[owner] = agreed
            open_moves.clear()
    released = [op for found in host_releases.values() for _, op in found]
    commit = build.op(COMMIT, after=tuple(dict.fromkeys((ready, *everything, *last.values(), *released))))
    ends = [commit]
    if schedule.mode == "reversible":
        for space in np.flatnonzero(old_bytes).tolist():
            device = space if space < num_devices else -1
            ends.append(build.op(RELEASE, device=device, space=space, released=int(old_bytes[space]), after=(commit,)))
    for number, op in enumerate(life.ops):
        if op.kind == "retire":
            ends.append(build.op(RETIRE, device=op.devices[0], item=number, after=(commit,)))
    build.op(RESUME, after=tuple(ends))
    table = np.array(build.rows, dtype=np.int64)
    return Dag(
        kind=table[:, 0],
        device=table[:, 1],
        wave=table[:, 2],
        item=table[:, 3],
        space=table[:, 4],
        acquired=table[:, 5],
        released=table[:, 6],
        edges=np.array(build.edges, dtype=np.int64).reshape(-1, 2),
    )


def _per_wave(
    schedule: Schedule,
    new_bytes: IntArray,
    acquire_bytes: dict[StorageKey, tuple[int, int]],
    release_bytes: dict[StorageKey, tuple[int, int]],
) -> tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]]:
    """wave -> space -> bytes, acquired and released."""
    if schedule.mode == "reversible":
        all_new = {space: int(new_bytes[space]) for space in np.flatnonzero(new_bytes).tolist()}
        return ({0: all_new} if all_new else {}), {}
    acquires: dict[int, dict[int, int]] = {}
    releases: dict[int, dict[int, int]] = {}
    for waves, sizes, result in (
        (schedule.acquire, acquire_bytes, acquires),
        (schedule.release, release_bytes, releases),
    ):
        for key, wave in waves.items():
            space, num_bytes = sizes[key]
            at = result.setdefault(wave, {})
            at[space] = at.get(space, 0) + num_bytes
    return acquires, releases
