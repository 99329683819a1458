"""The atoms of a model, and the same atoms after its ranks were put elsewhere.

Which elements make an atom follows from layouts alone; only the places of groups follow from devices. So what placement
worked out for the listed order is what diff needs for the chosen one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.holdings import StateSet, Topology
from nereus.ir.layout import IntArray
from nereus.passes.atoms import AtomTable, Group, ModelGeometry
from nereus.passes.lists import Lists


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAtoms:
    """All tables of a model whose state exists already, for all its new state sets together."""

    model: str
    geometry: ModelGeometry
    tables: tuple[AtomTable, ...]


def placed_on(atoms: ModelAtoms, new_sets: tuple[StateSet, ...], topology: Topology) -> ModelAtoms | None:
    """``atoms`` with the new state sets where ``new_sets`` has them; None where two of them derive weights, since a
    place alone then does not say for which."""
    if new_sets == atoms.geometry.new_sets:
        return atoms
    if sum(state_set.slot("master") is not None for state_set in new_sets) > 1 and any(t.derived for t in atoms.tables):
        return None
    moved = []
    derives: IntArray | None = None
    for before, after in zip(atoms.geometry.new_sets, new_sets, strict=True):
        to = np.full(topology.num_devices, -1, dtype=np.int64)
        to[topology.numbers_of(before.bound.ranks)] = topology.numbers_of(after.bound.ranks)
        both = np.concatenate((to, to + topology.num_devices))  # GPUs, then host memory of their processes
        moved.append(both)
        derives = both if after.slot("master") is not None else derives
    return replace(
        atoms,
        geometry=replace(atoms.geometry, new_sets=new_sets),
        tables=tuple(_moved(table, moved, derives) for table in atoms.tables),
    )


def _moved(table: AtomTable, to: list[IntArray], derives: IntArray | None) -> AtomTable:
    places = Lists.of_tuples([group.places for group in table.new_groups])
    sets = np.array([group.state_set for group in table.new_groups], dtype=np.int64)
    owner = places.owner
    item = np.stack(to)[sets[owner], places.item] if len(owner) else places.item
    item = item[np.lexsort((item, owner))].tolist()
    first = places.first.tolist()
    groups = tuple(
        Group(state_set=group.state_set, coord=group.coord, shard=group.shard, places=tuple(item[begin:end]))
        for group, begin, end in zip(table.new_groups, first[:-1], first[1:], strict=True)
    )
    derived = table.derived
    if derived:
        assert derives is not None
        moved = derives[np.fromiter(derived, dtype=np.int64)]
        derived = dict(zip(moved.tolist(), derived.values(), strict=True))
    return replace(table, new_groups=groups, derived=derived)
