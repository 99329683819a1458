"""diff: holdings now against holdings wanted. What each place keeps, derives, lacks; what no living place holds.

Wants are grouped by node, since routing is: each byte enters a node once and spreads inside. A *demand* is a set of
intervals with one set of living holders, one node, and the places of that node that lack them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.holdings import Holdings, StateSet, Topology, model_names
from nereus.passes.atoms import AtomTable, ModelGeometry, SlotGroup, build_atoms, model_geometry
from nereus.passes.demands import Demand, Demands, derived_bytes, lacking, table_demands
from nereus.passes.foregone import Foregone, without_small_shares
from nereus.passes.lists import Lists
from nereus.passes.model_atoms import ModelAtoms, placed_on


@dataclass(frozen=True, slots=True, kw_only=True)
class LostState:
    """State that the new plan wants and of which only lost nodes had a copy."""

    state_set: str
    slots: tuple[str, ...]
    num_bytes: int  # one copy
    example_tensor: str
    last_holders: tuple[int, ...]  # places


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    topology: Topology
    old: Holdings
    new: Holdings
    geometries: tuple[ModelGeometry, ...]
    geometry_of: tuple[int, ...]  # table -> geometry
    tables: tuple[AtomTable, ...]
    holders: tuple[tuple[tuple[int, ...], ...], ...]  # table -> class -> living holder places, ascending
    wanters: tuple[tuple[tuple[int, ...], ...], ...]  # table -> class -> wanter places, ascending
    demands: Demands
    lost: tuple[LostState, ...]
    #: State sets or slots that nothing held before: the framework initialises them. (stage, slot) pairs.
    fresh: tuple[tuple[str, str], ...]
    kept_bytes: int  # wanted and already at its place
    derived_bytes: int
    foregone: Foregone


def holders_by_class(diff: Diff) -> Lists:
    """Holders of every class with demands, as ``Demands.classes`` numbers them."""
    demands = diff.demands
    first = demands.classes.first[:-1]
    keys = zip(demands.table[first].tolist(), demands.cls[first].tolist(), strict=True)
    return Lists.of_tuples([diff.holders[table][cls] for table, cls in keys])


def diff(
    old: Holdings, new: Holdings, topology: Topology, *, derive: bool = True, known: Iterable[ModelAtoms] = ()
) -> Diff:
    """``derive``: half-precision weights may be made from the fp32 masters that arrive with them. ``known``: atoms of
    models for the same layouts on any devices."""
    atoms_of = {found.model: found for found in known}
    geometries: list[ModelGeometry] = []
    geometry_of: list[int] = []
    tables: list[AtomTable] = []
    fresh: list[tuple[str, str]] = []
    for model in model_names(new):
        old_sets, new_sets = old.of_model(model), new.of_model(model)
        held = {(slot.name, slot.dtype) for s in old_sets for slot in s.slots}
        fresh += [(s.stage, slot.name) for s in new_sets for slot in s.slots if (slot.name, slot.dtype) not in held]
        if not old_sets:
            continue
        found = placed_on(atoms_of[model], new_sets, topology) if model in atoms_of else None
        found = found or model_atoms(model, old_sets, new_sets, topology, derive=derive)
        geometries.append(found.geometry)
        tables += found.tables
        geometry_of += [len(geometries) - 1] * len(found.tables)
    demands: list[Demands] = []
    lost: list[LostState] = []
    all_holders: list[tuple[tuple[int, ...], ...]] = []
    all_wanters: list[tuple[tuple[int, ...], ...]] = []
    kept = derived = 0
    node_of = np.concatenate((topology.node_of, topology.node_of))  # of GPUs, then of host memories
    foregone = Foregone.nothing(len(topology.nodes))
    for number, table in enumerate(tables):
        geometry = geometries[geometry_of[number]]
        holders = _class_places(table, table.class_holders, old_side=True, topology=topology)
        wanters = _class_places(table, table.class_wanters, old_side=False, topology=topology)
        lack = lacking(holders, wanters)
        table, given_up = without_small_shares(table, holders, lack, topology)
        tables[number] = table
        foregone += given_up
        all_holders.append(holders)
        all_wanters.append(wanters)
        class_bytes = np.bincount(table.cls, weights=table.num_bytes, minlength=table.num_classes).astype(np.int64)
        kept += int(class_bytes @ lack.wanted) - int(class_bytes[lack.cls].sum())
        derived += derived_bytes(table, lack)
        found_demands = table_demands(number, table, lack, node_of)
        copies = np.fromiter(map(len, holders), dtype=np.int64, count=len(holders))[found_demands.cls]
        demands.append(found_demands.taken(np.flatnonzero(copies)))
        for _, cls, missing in found_demands.taken(np.flatnonzero(copies == 0)).by_class():
            if table.class_holders[cls]:
                lost.append(_lost_state(table, geometry, cls, max(missing, key=lambda d: d.num_bytes)))
    return Diff(
        topology=topology,
        old=old,
        new=new,
        geometries=tuple(geometries),
        geometry_of=tuple(geometry_of),
        tables=tuple(tables),
        holders=tuple(all_holders),
        wanters=tuple(all_wanters),
        demands=Demands.joined(demands),
        lost=_merge_lost(lost),
        fresh=tuple(fresh),
        kept_bytes=kept,
        derived_bytes=derived,
        foregone=foregone,
    )


def model_atoms(
    model: str,
    old_sets: tuple[StateSet, ...],
    new_sets: tuple[StateSet, ...],
    topology: Topology,
    *,
    derive: bool = True,
) -> ModelAtoms:
    geometry = model_geometry(old_sets, new_sets)
    return ModelAtoms(
        model=model,
        geometry=geometry,
        tables=tuple(
            build_atoms(geometry, topology, model, group, derive=derive and derivable(group, old_sets))
            for group in slot_groups(old_sets, new_sets)
        ),
    )


def derivable(group: SlotGroup, old_sets: tuple[StateSet, ...]) -> bool:
    """Whether ``group`` is the weights and masters arrive to derive them from: a master that nothing held before is
    itself made from the weights."""
    return group.names == ("weight",) and any(s.slot("master") is not None for s in old_sets)


def slot_groups(old_sets: tuple[StateSet, ...], new_sets: tuple[StateSet, ...]) -> list[SlotGroup]:
    """Slots wanted and held somewhere, grouped by equal geometry: same state sets, shard rule and memory.

    A slot of another dtype is another slot: bits move, values are never converted.
    """
    held = {(slot.name, slot.dtype) for s in old_sets for slot in s.slots}
    groups: dict[tuple[object, ...], list[str]] = {}
    wanted = dict.fromkeys((slot.name, slot.dtype) for s in new_sets for slot in s.slots)
    for name, dtype in wanted:
        if (name, dtype) not in held:
            continue
        key: list[object] = [dtype, name == "weight"]
        for side in (old_sets, new_sets):
            for number, state_set in enumerate(side):
                slot = state_set.slot(name)
                if slot is not None and slot.dtype == dtype:
                    absent = dict(state_set.absent).get(name, ())
                    rule = state_set.bound.layout.shard_rule(name)
                    key.append((side is old_sets, number, rule, absent, slot.host, slot.host_share))
        groups.setdefault(tuple(key), []).append(name)
    return [SlotGroup(tuple(names), str(key[0])) for key, names in groups.items()]


def _class_places(
    table: AtomTable, classes: tuple[tuple[int, ...], ...], *, old_side: bool, topology: Topology
) -> tuple[tuple[int, ...], ...]:
    groups = table.old_groups if old_side else table.new_groups
    cached: dict[tuple[int, ...], tuple[int, ...]] = {}
    alive = [*np.array(topology.alive, dtype=bool)[topology.node_of].tolist()] * 2  # GPUs, then host memories
    keep = (lambda p: alive[p]) if old_side and not all(topology.alive) else None
    for members in classes:
        if members not in cached:
            places: Iterable[int] = groups[members[0]].places if len(members) == 1 else ()
            if len(members) > 1:
                places = sorted({p for g in members for p in groups[g].places})
            cached[members] = tuple(filter(keep, places) if keep is not None else places)
    return tuple(cached[members] for members in classes)


def _lost_state(table: AtomTable, geometry: ModelGeometry, cls: int, demand: Demand) -> LostState:
    cells = geometry.cells
    group = table.new_groups[table.class_wanters[cls][0]]
    return LostState(
        state_set=geometry.new_sets[group.state_set].stage,
        slots=table.slots,
        num_bytes=demand.num_bytes,
        example_tensor=cells.tensors[int(cells.tensor[table.cell[demand.intervals[0]]])].name,
        last_holders=tuple(sorted({p for g in table.class_holders[cls] for p in table.old_groups[g].places})),
    )


def _merge_lost(lost: list[LostState]) -> tuple[LostState, ...]:
    """One entry per (state set, slots, last holders), largest first."""
    merged: dict[tuple[str, tuple[str, ...], tuple[int, ...]], LostState] = {}
    for entry in lost:
        key = (entry.state_set, entry.slots, entry.last_holders)
        known = merged.get(key)
        merged[key] = entry if known is None else replace(known, num_bytes=known.num_bytes + entry.num_bytes)
    return tuple(sorted(merged.values(), key=lambda e: -e.num_bytes))
