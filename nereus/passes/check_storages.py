"""check, continued: storages live long enough, and the DAG has the edges that safety rests on.

Independent of ``tight`` and ``dag``: what must be there is worked out again from the atom tables and the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nereus.ir.layout import BoolArray, IntArray
from nereus.ir.schedule import Schedule, StorageKey
from nereus.passes.check import Finding
from nereus.passes.dag import COMMIT, MOVE, POST, RELEASE, STAGE, VERIFY, Dag
from nereus.passes.diff import Diff
from nereus.passes.storages import StorageMap


def check_lifetimes(diff: Diff, schedule: Schedule, storages: StorageMap) -> Finding:
    """Tight mode: every new storage is acquired before anything arrives in it, every old one is released after
    everything was read from it. In reversible mode all are acquired first and released after the commit."""
    name = "lifetimes"
    if schedule.mode != "tight":
        return Finding(name=name, holds=True, evidence="nothing is released before the commit")
    for key, is_new in _all_keys(storages):
        if is_new and key not in schedule.acquire:
            return Finding(name=name, holds=False, evidence=f"{_text(diff, key)} is never acquired")
    num = 0
    for key, wave, reads in _uses(diff, schedule, storages):
        num += 1
        gone = schedule.staged[key][1] if key in schedule.staged else schedule.release.get(key, wave)
        if reads and gone < wave:
            what = f"{_text(diff, key)} is released in wave {gone} and read in wave {wave}"
            return Finding(name=name, holds=False, evidence=what)
        if not reads and schedule.acquire.get(key, wave) > wave:
            what = f"{_text(diff, key)} is acquired in wave {schedule.acquire[key]} and filled in wave {wave}"
            return Finding(name=name, holds=False, evidence=what)
    return Finding(name=name, holds=True, evidence=f"{num:,} uses of storages, each while the storage is there")


def _all_keys(storages: StorageMap) -> Iterator[tuple[StorageKey, bool]]:
    """Storages that come (True) and go (False)."""
    for stage in storages.stages:
        for device in storages.devices_of(stage):
            for slot, _, _ in storages.slots(stage):
                fit = storages.fit(stage, slot, device)
                for tensor in np.flatnonzero(fit.new).tolist():
                    yield (device, stage, slot, tensor), True
                for tensor in np.flatnonzero(fit.old).tolist():
                    yield (device, stage, slot, tensor), False


def _uses(diff: Diff, schedule: Schedule, storages: StorageMap) -> Iterator[tuple[StorageKey, int, bool]]:
    """(storage, wave, whether it is an old one that is read)."""
    num_devices = diff.topology.num_devices
    stages_at: dict[tuple[int, bool, int], tuple[str, ...]] = {}
    for number, table in enumerate(diff.tables):
        geometry = diff.geometries[diff.geometry_of[number]]
        for new, groups, sets in (
            (False, table.old_groups, geometry.old_sets),
            (True, table.new_groups, geometry.new_sets),
        ):
            for group in groups:
                for place in group.places:
                    found = stages_at.get((number, new, place), ())
                    stages_at[number, new, place] = (*found, sets[group.state_set].stage)
    for move, wave in zip(schedule.moves, schedule.wave.tolist(), strict=True):
        table = diff.tables[move.table]
        cells = diff.geometries[diff.geometry_of[move.table]].cells
        slots = table.slots if move.slots is None else tuple(table.slots[i] for i in move.slots)
        for tensor in np.unique(cells.tensor[move.intervals.cell]).tolist():
            for slot in slots:
                if not move.after:
                    stages = stages_at.get((move.table, False, move.src), ())
                    if not stages:  # from host memory, where it went on the way
                        stages = stages_at.get((move.table, False, move.src % num_devices), ())
                    for stage in stages:
                        yield (move.src % num_devices, stage, slot, tensor), wave, True
                for stage in stages_at.get((move.table, True, move.dst), ()):
                    yield (move.dst % num_devices, stage, slot, tensor), wave, False
    # Local copies: a new storage is filled from old ones of its device when it is acquired.
    for (device, stage, slot, tensor), wave in schedule.acquire.items():
        model = storages.new[stage].state_set.model
        for other, shares in storages.old.items():
            if shares.state_set.model == model and device in shares.rank_of_device:
                yield (device, other, slot, tensor), wave, True


def _text(diff: Diff, key: StorageKey) -> str:
    device, stage, slot, tensor = key
    return f"{diff.topology.devices[device]}: {stage} {slot} of tensor {tensor}"


def check_edges(dag: Dag, schedule: Schedule, num_devices: int) -> Finding:
    """Every move follows its two ranks' posts of its wave, every verify its move, the commit every verify, and every
    release all verifies up to its wave (tight) or the commit (reversible)."""
    name = "edges"
    keys = np.sort(dag.edges[:, 0] * dag.num_ops + dag.edges[:, 1])

    def lacking(first: IntArray, then: IntArray, among: IntArray = keys) -> IntArray:
        """Positions where there is no edge ``first -> then``; -1 stands for an operation that is not there."""
        if not len(among):
            return np.arange(len(first))
        wanted = first * dag.num_ops + then
        at = np.minimum(np.searchsorted(among, wanted), len(among) - 1)
        return np.flatnonzero((first < 0) | (among[at] != wanted))

    moves, verifies = np.flatnonzero(dag.kind == MOVE), np.flatnonzero(dag.kind == VERIFY)
    moves, verifies = moves[np.argsort(dag.item[moves])], verifies[np.argsort(dag.item[verifies])]
    numbers = np.arange(len(schedule.moves))
    if not (np.array_equal(dag.item[moves], numbers) and np.array_equal(dag.item[verifies], numbers)):
        return Finding(name=name, holds=False, evidence="the moves of the DAG are not the schedule's")
    bad = lacking(moves, verifies)
    if len(bad):
        return Finding(name=name, holds=False, evidence=f"the verify of move {int(bad[0])} does not follow it")
    posts = np.flatnonzero(dag.kind == POST)
    num_waves = int(max(dag.wave.max(initial=0), schedule.wave.max(initial=0))) + 2
    keyed = (dag.device[posts] + 1) * num_waves + dag.wave[posts] + 1
    posts, keyed = posts[np.argsort(keyed, kind="stable")], np.sort(keyed)

    def post_of(device: IntArray, wave: IntArray) -> IntArray:
        """The last post of a device in a wave (of all, not in a wave: -1, -1); -1 where there is none."""
        wanted = (device + 1) * num_waves + wave + 1
        at = np.maximum(np.searchsorted(keyed, wanted, side="right") - 1, 0)
        found: IntArray = np.where(keyed[at] == wanted, posts[at], -1) if len(posts) else np.full_like(wanted, -1)
        return found

    # Reversible: one post acquires all that a device gets; who gets nothing follows the agreement on the digest.
    sliced = schedule.mode == "reversible"
    nobody = np.full(len(moves), -1, dtype=np.int64)
    otherwise = post_of(nobody, nobody) if sliced else nobody
    for ends in (schedule.moves.src, schedule.moves.dst):
        of_rank = post_of(ends % num_devices, np.zeros_like(ends) if sliced else schedule.wave)
        bad = lacking(np.where(of_rank < 0, otherwise, of_rank), moves)
        if len(bad):
            return Finding(name=name, holds=False, evidence=f"move {int(bad[0])} does not follow a post of its ranks")
    if sliced:  # in tight mode a relay follows its rank's posts, and they all that came before
        then, first = schedule.moves.relays
        by_slice = dag.slice_edges[:, 0] * dag.num_ops + dag.slice_edges[:, 1]
        bad = lacking(verifies[first], moves[then], np.sort(np.concatenate((keys, by_slice))))
        if len(bad):
            what = f"move {int(then[bad[0]])} does not follow the verify of what it relays"
            return Finding(name=name, holds=False, evidence=what)
    predecessors = _Predecessors(dag)
    stages = np.flatnonzero(dag.kind == STAGE)
    planned = sorted((key[0], wave) for key, (wave, _) in schedule.staged.items())
    if sorted(zip(dag.device[stages].tolist(), dag.wave[stages].tolist(), strict=True)) != planned:
        return Finding(name=name, holds=False, evidence="the copies into host memory are not the schedule's")
    (commit,) = np.flatnonzero(dag.kind == COMMIT).tolist()
    checked = [(commit, int(dag.wave.max(initial=0)))]
    releases = np.flatnonzero(dag.kind == RELEASE)
    at_the_end = releases[dag.wave[releases] < 0]
    if len(lacking(np.full_like(at_the_end, commit), at_the_end)):
        return Finding(name=name, holds=False, evidence="a release does not follow the commit")
    checked += [(o, int(dag.wave[o])) for o in releases[dag.wave[releases] >= 0].tolist()]
    seen: dict[tuple[int, ...], bool] = {}
    for op, wave in checked:
        direct = (wave, *predecessors.direct(op))
        if direct not in seen:
            reached = predecessors.closure(op)
            seen[direct] = bool(reached[verifies[dag.wave[verifies] <= wave]].all())
            seen[direct] &= bool(reached[stages[dag.wave[stages] <= wave]].all())
        if not seen[direct]:
            what = "the commit" if op == commit else f"a release of wave {wave}"
            return Finding(name=name, holds=False, evidence=f"{what} does not follow every verify before it")
    return Finding(name=name, holds=True, evidence=f"{len(moves):,} moves and {len(checked) - 1:,} releases in order")


class _Predecessors:
    def __init__(self, dag: Dag) -> None:
        order = np.argsort(dag.edges[:, 1], kind="stable")
        self.sources = dag.edges[order, 0]
        self.bounds = np.searchsorted(dag.edges[order, 1], np.arange(dag.num_ops + 1))
        self.num_ops = dag.num_ops

    def direct(self, op: int) -> list[int]:
        found: list[int] = sorted(self.sources[self.bounds[op] : self.bounds[op + 1]].tolist())
        return found

    def closure(self, op: int) -> BoolArray:
        """Mask of everything that must have finished when ``op`` starts."""
        reached = np.zeros(self.num_ops, dtype=bool)
        newest = np.array([op], dtype=np.int64)
        while len(newest):
            counts = self.bounds[newest + 1] - self.bounds[newest]
            at = np.repeat(self.bounds[newest] - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
            sources = np.unique(self.sources[at])
            newest = sources[~reached[sources]]
            reached[newest] = True
        return reached
