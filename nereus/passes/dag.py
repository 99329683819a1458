"""dag: every operation of a transition and the order that holds on any timing, columnar.

An edge says that the later operation starts after the earlier one finished. A rank's ``post`` operations carry the
waves: they follow each other, acquire the wave's storages, and every move of the wave follows its two ranks' posts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray
from nereus.ir.schedule import Schedule, StorageKey, follows_slice_by_slice
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
    "stage",
)
QUIESCE, ENGINE_START, SPAWN, BUILD_GROUPS, POST, MOVE, VERIFY, RELEASE, COMMIT, RETIRE, RESUME, STAGE = range(
    len(KINDS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """``kind``, ``device`` (-1: all), ``wave`` (-1: none), ``acquired`` and ``released`` bytes per op, ``item`` (move
    or life-cycle number); ``edges[:, 0]`` before ``edges[:, 1]``. Ops are numbered in one total order, so every edge
    goes up.

    A move of several slices is one operation that lasts several waves. ``slice_edges``: slice k of the second follows
    slice k of the first; a rank posts wave k + 1 when its part of wave k is complete holds for all and is not written
    out."""

    kind: IntArray
    device: IntArray
    wave: IntArray
    item: IntArray
    space: IntArray  # memory space that acquired / released refer to, -1: none
    acquired: IntArray
    released: IntArray
    edges: IntArray
    slice_edges: IntArray

    @property
    def num_ops(self) -> int:
        return len(self.kind)

    @property
    def num_edges(self) -> int:
        return len(self.edges) + len(self.slice_edges)


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
    if schedule.mode == "reversible":
        return _reversible_dag(schedule, life, topology, new_bytes, old_bytes)
    build = _Builder()
    num_devices = topology.num_devices
    ready, _ = _set_up(build, life, groups_first=True)
    last: dict[int, int] = {}  # device -> its last post or release
    open_moves: dict[int, list[int]] = {}  # device -> verifies of its current wave
    verified: list[int] = [-1] * len(schedule.moves)
    by_wave: list[list[int]] = [[] for _ in range(schedule.num_waves)]
    for number, wave in enumerate(schedule.wave.tolist()):
        by_wave[wave].append(number)
    acquires, releases = _per_wave(schedule, acquire_bytes, release_bytes)
    staged: dict[int, list[tuple[int, int]]] = {}  # wave -> (device, space of its host memory)
    for key, (first_wave, last_wave) in schedule.staged.items():
        host = num_devices + int(topology.node_of[key[0]])
        staged.setdefault(first_wave, []).append((key[0], host))
        for totals, at in ((acquires, first_wave), (releases, last_wave)):
            spaces = totals.setdefault(at, {})
            spaces[host] = spaces.get(host, 0) + release_bytes[key][1]
    waves = max(schedule.num_waves, 1 if acquires else 0)
    everything: list[int] = []
    host_releases: dict[int, list[tuple[int, int]]] = {}  # space -> (wave, release)
    for wave in range(waves):
        moves = by_wave[wave] if wave < len(by_wave) else []
        devices = {m % num_devices for n in moves for m in (schedule.moves[n].src, schedule.moves[n].dst)}
        stages = staged.get(wave, [])
        devices |= {device for device, _ in stages}
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
        for device, host in stages:  # an old storage is copied into host memory
            everything.append(build.op(STAGE, device=device, wave=wave, after=(posts[device], posts[-1 - host])))
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
    _finish(build, life, commit, ())
    return _dag(np.array(build.rows, dtype=np.int64), np.array(build.edges, dtype=np.int64), _NO_EDGES)


def _set_up(build: _Builder, life: Lifecycle, *, groups_first: bool) -> tuple[int, tuple[int, ...]]:
    """The operation at which all participants agree on the digest, before byte one, and communicators that are set up
    beside the transfer. In tight mode they come first: should they fail, nothing was released yet."""
    quiesce = build.op(QUIESCE)
    kinds = {"engine-start": ENGINE_START, "spawn": SPAWN, "build-groups": BUILD_GROUPS}
    setup = [
        build.op(kinds[op.kind], device=op.devices[0], item=number, after=() if op.background else (quiesce,))
        for number, op in enumerate(life.ops)
        if op.kind in kinds
    ]
    groups = () if groups_first else tuple(op for op in setup if build.rows[op][0] == BUILD_GROUPS)
    ready = build.op(POST, after=(quiesce, *(op for op in setup if op not in groups)))
    return ready, groups


def _finish(build: _Builder, life: Lifecycle, commit: int, releases: tuple[int, ...]) -> None:
    ends = [commit, *releases]
    for number, op in enumerate(life.ops):
        if op.kind == "retire":
            ends.append(build.op(RETIRE, device=op.devices[0], item=number, after=(commit,)))
    build.op(RESUME, after=tuple(ends))


def _reversible_dag(
    schedule: Schedule, life: Lifecycle, topology: Topology, new_bytes: IntArray, old_bytes: IntArray
) -> Dag:
    """Everything is acquired, everything moves, all commit, everything old goes."""
    build = _Builder()
    num_devices = topology.num_devices
    ready, groups = _set_up(build, life, groups_first=False)
    post_of_space = np.full(len(new_bytes), ready, dtype=np.int64)
    for space in np.flatnonzero(new_bytes).tolist():
        device = space if space < num_devices else -1
        post_of_space[space] = build.op(
            POST, device=device, wave=0, space=space, acquired=int(new_bytes[space]), after=(ready,)
        )
    first, count = len(build.rows), len(schedule.moves)
    moves = np.zeros((2 * count, len(build.rows[0])), dtype=np.int64)
    places = np.stack((schedule.moves.src, schedule.moves.dst), axis=1)
    ends = places % num_devices
    to_host = np.flatnonzero(places[:, 1] >= num_devices)
    host_space = num_devices + topology.node_of[ends[to_host, 1]]
    wave = schedule.wave
    moves[0::2, 0], moves[1::2, 0] = MOVE, VERIFY
    moves[0::2, 1], moves[1::2, 1] = ends[:, 0], ends[:, 1]
    moves[0::2, 2], moves[1::2, 2] = wave, wave + schedule.slices - 1
    moves[:, 3] = np.repeat(np.arange(count), 2)
    moves[:, 4] = -1
    # Numbered by first wave, so that every edge goes up.
    order = np.lexsort((np.arange(count), wave))
    position = np.empty(count, dtype=np.int64)
    position[order] = np.arange(count)
    moves = moves[np.stack((2 * order, 2 * order + 1), axis=1).reshape(-1)]
    number_of_move, number_of_verify = first + 2 * position, first + 2 * position + 1
    relay, before = schedule.moves.relays
    sliced = follows_slice_by_slice(schedule, before, relay)
    chain = np.stack((number_of_verify[before], number_of_move[relay]), axis=1)
    last = _Builder()
    last.rows = [build.rows[0]] * (first + 2 * count)  # only their number matters
    commit = last.op(COMMIT, after=(*np.unique(post_of_space).tolist(), *groups))
    releases = []
    for space in np.flatnonzero(old_bytes).tolist():
        device = space if space < num_devices else -1
        releases.append(last.op(RELEASE, device=device, space=space, released=int(old_bytes[space]), after=(commit,)))
    _finish(last, life, commit, tuple(releases))
    edges = np.concatenate(
        (
            np.array(build.edges, dtype=np.int64).reshape(-1, 2),
            np.stack((post_of_space[ends[:, 0]], number_of_move), axis=1),
            np.stack((post_of_space[ends[:, 1]], number_of_move), axis=1),
            np.stack((post_of_space[host_space], number_of_move[to_host]), axis=1),
            np.stack((number_of_move, number_of_verify), axis=1),
            chain[~sliced],
            np.stack((number_of_verify, np.full(count, commit)), axis=1),
            np.array(last.edges, dtype=np.int64).reshape(-1, 2),
        )
    )
    rows = np.concatenate((np.array(build.rows, dtype=np.int64), moves, np.array(last.rows[first + 2 * count :])))
    return _dag(rows, edges, chain[sliced])


_NO_EDGES = np.zeros((0, 2), dtype=np.int64)


def _dag(rows: IntArray, edges: IntArray, slice_edges: IntArray) -> Dag:
    return Dag(
        kind=rows[:, 0],
        device=rows[:, 1],
        wave=rows[:, 2],
        item=rows[:, 3],
        space=rows[:, 4],
        acquired=rows[:, 5],
        released=rows[:, 6],
        edges=edges.reshape(-1, 2),
        slice_edges=slice_edges,
    )


def _per_wave(
    schedule: Schedule,
    acquire_bytes: dict[StorageKey, tuple[int, int]],
    release_bytes: dict[StorageKey, tuple[int, int]],
) -> tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]]:
    """wave -> space -> bytes, acquired and released."""
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
