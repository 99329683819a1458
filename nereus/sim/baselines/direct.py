"""What baselines that move regions directly have in common: walking what is lacked, and one step that does it all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nereus.ir.layout import IntArray
from nereus.passes.atoms import AtomTable
from nereus.sim.baselines.answer import Answer, Step, Transfer, everything, positive
from nereus.sim.baselines.problem import Problem


@dataclass(frozen=True, slots=True)
class Lack:
    """Intervals of a class that place ``wanter`` lacks, and the living places that hold them, ascending."""

    table: int
    cls: int
    wanter: int
    intervals: IntArray
    num_bytes: int
    holders: tuple[int, ...]


def lacks(problem: Problem) -> Iterator[Lack]:
    """Everything wanted that is not at its place, by table, class and wanter."""
    difference = problem.diff
    for demand in sorted(difference.demands, key=lambda d: (d.table, d.cls, d.node)):
        holders = difference.holders[demand.table][demand.cls]
        for wanter in demand.wanters:
            yield Lack(demand.table, demand.cls, wanter, demand.intervals, demand.num_bytes, holders)


def portions(problem: Problem, table: int, intervals: IntArray, most: int) -> list[tuple[IntArray, int]]:
    """``intervals`` tensor by tensor as (intervals, bytes); neighbours are joined beyond ``most``."""
    atoms = problem.diff.tables[table]
    cells = problem.diff.geometries[problem.diff.geometry_of[table]].cells
    tensor = cells.tensor[atoms.cell[intervals]]
    borders = np.flatnonzero(np.diff(tensor)) + 1
    if len(borders) >= most:
        borders = borders[np.linspace(0, len(borders) - 1, most - 1).astype(np.int64)]
    sizes = atoms.num_bytes
    return [(part, int(sizes[part].sum())) for part in np.split(intervals, borders) if len(part)]


def lost(problem: Problem) -> str | None:
    """Why nothing that copies between living devices helps, or None."""
    for entry in problem.diff.lost:
        return f"the only copy of {', '.join(entry.slots)} of {entry.state_set} was on a lost node"
    return None


def one_step(
    baseline: str,
    problem: Problem,
    transfers: Sequence[Transfer],
    *,
    in_place: bool,
    packed: bool,
) -> Answer:
    """All at once: everything new is allocated, all transfers run, everything old is freed.

    ``in_place``: storages that are the same before and after stay; otherwise they are allocated anew too.
    ``packed``: what a device sends and receives lies in buffers beside the tensors meanwhile.
    """
    acquired = np.zeros(problem.num_spaces, dtype=np.int64)
    released = np.zeros_like(acquired)
    base = problem.base_bytes()
    changed = set(problem.changed())
    for stage in problem.storages.stages:
        size = problem.set_bytes(stage)
        base += size.kept + size.old
        acquired += size.new
        released += size.old
        if stage in changed and not in_place:
            acquired += size.kept
            released += size.kept
    buffers = np.zeros_like(acquired)
    if packed:
        for t in transfers:
            if t.src != t.dst:
                for place in (t.src, t.dst):
                    buffers[problem.topology.space_of_place(place)] += t.num_bytes
    return Answer(
        baseline=baseline,
        problem=problem,
        placed=problem.new,
        tables=problem.diff.tables,
        final=everything(problem.diff.tables),
        steps=(
            Step(
                name="reshard",
                devices=problem.alive_devices,
                transfers=tuple(transfers),
                acquired=positive(acquired + buffers),
                released=positive(released + buffers),
            ),
        ),
        base_bytes=base,
        outside_s=problem.drain_s() + problem.setup_s() + problem.commit_s(),
    )


def transfers_by(problem: Problem, choose: Callable[[Lack], int]) -> list[Transfer]:
    """One transfer per lack, from the place that ``choose`` names."""
    return [Transfer(choose(x), x.wanter, x.table, x.intervals, x.num_bytes) for x in lacks(problem)]


def replicas(problem: Problem, table: AtomTable, number: int, cls: int) -> dict[int, tuple[int, int]]:
    """Holder place -> (replica, pipeline stage) in the first old state set that holds the class."""
    geometry = problem.diff.geometries[problem.diff.geometry_of[number]]
    first = table.old_groups[table.class_holders[cls][0]].state_set
    ranks = problem.rank_places(geometry.old_sets[first].stage)
    held = {
        p
        for g in table.class_holders[cls]
        if table.old_groups[g].state_set == first
        for p in table.old_groups[g].places
    }
    return {p: ranks[p % problem.num_devices] for p in sorted(held) if p % problem.num_devices in ranks}
