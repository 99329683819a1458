"""diff: holdings now against holdings wanted. What each place keeps, derives, lacks; what no living place holds.

Wants are grouped by node, since routing is: each byte enters a node once and spreads inside. A *demand* is a set of
intervals with one set of living holders, one node, and the places of that node that lack them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from nereus.ir.holdings import Holdings, StateSet, Topology, model_names
from nereus.ir.layout import IntArray
from nereus.passes.atoms import AtomTable, ModelGeometry, SlotGroup, build_atoms, model_geometry
from nereus.passes.foregone import Foregone, without_small_shares
from nereus.passes.model_atoms import ModelAtoms, placed_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    table: int  # index into Diff.tables
    cls: int  # class of the table; the holders are Diff.holders[table][cls]
    node: int
    wanters: tuple[int, ...]  # places of the node that lack the intervals, ascending
    intervals: IntArray  # ascending interval numbers of the table
    num_bytes: int


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
    demands: tuple[Demand, ...]
    lost: tuple[LostState, ...]
    #: State sets or slots that nothing held before: the framework initialises them. (stage, slot) pairs.
    fresh: tuple[tuple[str, str], ...]
    kept_bytes: int  # wanted and already at its place
    derived_bytes: int
    foregone: Foregone


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
    demands: list[Demand] = []
    lost: list[LostState] = []
    all_holders: list[tuple[tuple[int, ...], ...]] = []
    all_wanters: list[tuple[tuple[int, ...], ...]] = []
    kept = derived = 0
    node_of = [*topology.node_of.tolist()] * 2  # of GPUs, then of host memories
    foregone = Foregone.nothing(len(topology.nodes))
    for number, table in enumerate(tables):
        geometry = geometries[geometry_of[number]]
        holders = _class_places(table, table.class_holders, old_side=True, topology=topology)
        wanters = _class_places(table, table.class_wanters, old_side=False, topology=topology)
        table, given_up = without_small_shares(table, holders, wanters, topology)
        tables[number] = table
        foregone += given_up
        all_holders.append(holders)
        all_wanters.append(wanters)
        sizes = table.num_bytes
        class_bytes = np.bincount(table.cls, weights=sizes, minlength=table.num_classes).astype(np.int64).tolist()
        for cls, intervals in enumerate(table.intervals_of_classes()):
            if not wanters[cls]:
                continue
            held_by = set(holders[cls])
            lacking = [place for place in wanters[cls] if place not in held_by]
            kept += class_bytes[cls] * (len(wanters[cls]) - len(lacking))
            if not lacking:
                continue
            found_demands = _class_demands(number, table, cls, intervals, lacking, node_of, sizes, class_bytes[cls])
            if holders[cls]:
                demands += found_demands
            elif found_demands and table.class_holders[cls]:
                lost.append(_lost_state(table, geometry, cls, max(found_demands, key=lambda d: d.num_bytes)))
            derived += _derived_bytes(table, intervals, lacking, sizes)
    return Diff(
        topology=topology,
        old=old,
        new=new,
        geometries=tuple(geometries),
        geometry_of=tuple(geometry_of),
        tables=tuple(tables),
        holders=tuple(all_holders),
        wanters=tuple(all_wanters),
        demands=tuple(demands),
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


def _class_demands(
    number: int,
    table: AtomTable,
    cls: int,
    intervals: IntArray,
    lacking: list[int],
    node_of: list[int],
    sizes: IntArray,
    class_bytes: int,
) -> list[Demand]:
    """``lacking``: places that want the class and do not hold it. ``node_of``: of every place; ``sizes``: bytes of
    every interval."""
    by_node: dict[int, list[int]] = {}
    for place in lacking:
        by_node.setdefault(node_of[place], []).append(place)
    found = []
    for node, there in by_node.items():
        for places, region in _split_by_derived(table, intervals, there):
            num_bytes = class_bytes if region is intervals else int(sizes[region].sum())
            if num_bytes:
                found.append(
                    Demand(table=number, cls=cls, node=node, wanters=places, intervals=region, num_bytes=num_bytes)
                )
    return found


def _split_by_derived(
    table: AtomTable, intervals: IntArray, places: list[int]
) -> Iterator[tuple[tuple[int, ...], IntArray]]:
    """Cut ``intervals`` by which of ``places`` derive them; yields (places that still lack, intervals)."""
    deriving: dict[int, list[int]] = {}
    for position, place in enumerate(places) if table.derived else ():
        own = table.derived.get(place)
        if own is None:
            continue
        for interval in np.intersect1d(intervals, own, assume_unique=True).tolist():
            deriving.setdefault(interval, []).append(position)
    if not deriving:
        yield tuple(places), intervals
        return
    rest = np.setdiff1d(intervals, np.fromiter(deriving, dtype=np.int64), assume_unique=True)
    if len(rest):
        yield tuple(places), rest
    by_set: dict[tuple[int, ...], list[int]] = {}
    for interval, positions in deriving.items():
        by_set.setdefault(tuple(positions), []).append(interval)
    for held, region in by_set.items():
        lacking = tuple(place for i, place in enumerate(places) if i not in held)
        if lacking:
            yield lacking, np.array(sorted(region), dtype=np.int64)


def _derived_bytes(table: AtomTable, intervals: IntArray, places: list[int], sizes: IntArray) -> int:
    total = 0
    for place in places if table.derived else ():
        own = table.derived.get(place)
        if own is not None:
            total += int(sizes[np.intersect1d(intervals, own, assume_unique=True)].sum())
    return total


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
