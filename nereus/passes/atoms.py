"""Atoms: elements with one set of holders and one set of wanters, as (cell, start, stop) intervals grouped into
classes.

Nothing here looks at single devices. A *group* is one (state set, coordinate, shard): all its ranks hold the same
bytes. A class is a pair (old groups that hold, new groups that want); an 8B model with replicated state has a few
dozen classes at any data-parallel degree, and state sharded over dp adds one class per overlapping pair of shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus.ir.cells import Cells, LocalBoxes, build_cells, cell_offset, held_cells, local_boxes, shares_of
from nereus.ir.holdings import StateSet, Topology
from nereus.ir.layout import IntArray
from nereus.ir.units import DTYPE_BYTES
from nereus.passes.lists import Lists, combinations


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks of ``state_set`` with one coordinate and shard; ``shard`` is -1 where the slot is not sharded."""

    state_set: int
    coord: int
    shard: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What groups hold: rows (cell, start, stop, group)."""

    cell: IntArray
    start: IntArray
    stop: IntArray
    group: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomTable:
    """Atoms of the slots that share one geometry. ``cls`` numbers the class of each interval."""

    model: str
    slots: tuple[str, ...]
    slot_bytes: tuple[int, ...]  # bytes per element of each of ``slots``
    old_groups: tuple[Group, ...]
    new_groups: tuple[Group, ...]
    cell: IntArray
    start: IntArray
    stop: IntArray
    cls: IntArray
    class_holders: tuple[tuple[int, ...], ...]  # old group numbers, lost ones too
    class_wanters: tuple[tuple[int, ...], ...]  # new group numbers
    #: Intervals whose elements a place derives locally (bf16 weight from its own fp32 master): place -> interval
    #: numbers.
    derived: dict[int, IntArray]

    @property
    def element_bytes(self) -> int:
        """Bytes per element, all slots together."""
        return sum(self.slot_bytes)

    @property
    def num_bytes(self) -> IntArray:
        """Bytes of each interval, all slots together."""
        return (self.stop - self.start) * self.element_bytes

    @property
    def num_classes(self) -> int:
        return len(self.class_holders)

    def intervals_of_classes(self) -> list[IntArray]:
        order = np.argsort(self.cls, kind="stable")
        bounds = np.searchsorted(self.cls[order], np.arange(self.num_classes + 1))
        return [order[bounds[i] : bounds[i + 1]] for i in range(self.num_classes)]


@dataclass(frozen=True, slots=True, order=True)
class SlotGroup:
    """Slots of one dtype that lie alike in every state set that has them."""

    names: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """Cells of a model under every layout involved, and each state set's local boxes."""

    cells: Cells
    old_sets: tuple[StateSet, ...]
    new_sets: tuple[StateSet, ...]
    old_boxes: tuple[LocalBoxes, ...]
    new_boxes: tuple[LocalBoxes, ...]


def model_geometry(old_sets: Sequence[StateSet], new_sets: Sequence[StateSet]) -> ModelGeometry:
    sets = (*old_sets, *new_sets)
    tensors = sets[0].tensors
    if any(s.tensors != tensors for s in sets):
        raise ValueError(f"model {sets[0].model}: the old and the new plan give it different tensors")
    boxes = tuple(local_boxes(tensors, s.bound.layout) for s in sets)
    cells = build_cells(tensors, boxes)
    return ModelGeometry(
        cells=cells,
        old_sets=tuple(old_sets),
        new_sets=tuple(new_sets),
        old_boxes=boxes[: len(old_sets)],
        new_boxes=boxes[len(old_sets) :],
    )


def pieces_of(
    cells: Cells,
    state_set: StateSet,
    boxes: LocalBoxes,
    number_of_set: int,
    slot: str,
    device_index: IntArray,
    num_devices: int,
) -> tuple[list[Group], Pieces]:
    """Groups and pieces of one slot of one state set. ``device_index``: device number of each rank; ``num_devices`` is
    added to get its place in host memory."""
    layout = state_set.bound.layout
    coord_of_rank, shard_of_rank = layout.coord_of_rank(), layout.shard_of_rank()
    absent, one = state_set.absent_mask(slot), state_set.memory_of(slot)
    groups: list[Group] = []
    columns: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    for coord in range(layout.num_coords):
        owned = held_cells(cells, boxes, coord)
        on_coord = coord_of_rank == coord
        shares = shares_of(state_set.tensors, boxes, layout, slot, coord, absent)
        # Pairs of a share and a cell of a tensor of which it has a part: of many small shares each has few.
        some = shares.stop > shares.start
        number, row = np.nonzero(some[:, cells.tensor[owned]])
        cell = owned[row]
        tensor = cells.tensor[cell]
        if bool((shares.start == 0).all()) and bool((shares.stop == boxes.numel[coord]).all()):
            start, stop = np.zeros_like(cell), cells.numel[cell]
        else:
            start = cell_offset(cells, boxes, coord, cell, shares.start[number, tensor])
            stop = cell_offset(cells, boxes, coord, cell, shares.stop[number, tensor])
        held = stop > start
        in_host = state_set.host_mask(slot, coord, shares.stop - shares.start)
        members = _members(shares.share, device_index[on_coord], shard_of_rank[on_coord], num_devices)
        memories = [one] if one is not None else np.unique(in_host[some]).tolist() or [False]
        for host in memories:
            here = held if len(memories) == 1 else held & (in_host[number, tensor] == host)
            columns.append((cell[here], start[here], stop[here], number[here] + len(groups)))
            for share, places in zip(shares.share.tolist(), members, strict=True):
                groups.append(Group(state_set=number_of_set, coord=coord, shard=share, places=places[host]))
    cell, start, stop, group = (np.concatenate([c[i] for c in columns]) for i in range(4))
    return groups, Pieces(cell=cell, start=start, stop=stop, group=group)


def _members(
    shares: IntArray, device: IntArray, shard: IntArray, num_devices: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Per share the places of its ranks, ascending: on GPUs, and in host memory. ``shares``: ascending, or -1 for one
    that all have."""
    order = np.lexsort((device, shard if int(shares[0]) >= 0 else np.zeros_like(shard)))
    device, shard = device[order], shard[order]
    whole = int(shares[0]) < 0
    first = [0] if whole else np.searchsorted(shard, shares).tolist()
    last = [len(device)] if whole else np.searchsorted(shard, shares, side="right").tolist()
    gpus, hosts = device.tolist(), (device + num_devices).tolist()
    return [(tuple(gpus[a:b]), tuple(hosts[a:b])) for a, b in zip(first, last, strict=True)]


def join_pieces(parts: Sequence[tuple[list[Group], Pieces]]) -> tuple[tuple[Group, ...], Pieces]:
    """Lay groups of several state sets end to end."""
    groups: list[Group] = []
    columns: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    for part_groups, pieces in parts:
        columns.append((pieces.cell, pieces.start, pieces.stop, pieces.group + len(groups)))
        groups += part_groups
    if not columns:
        empty = np.zeros(0, dtype=np.int64)
        return (), Pieces(cell=empty, start=empty, stop=empty, group=empty)
    cell, start, stop, group = (np.concatenate([c[i] for c in columns]) for i in range(4))
    return tuple(groups), Pieces(cell=cell, start=start, stop=stop, group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """Elementary intervals of several piece lists; no piece of any of them is cut by an interval's inside."""

    cell: IntArray
    start: IntArray
    stop: IntArray
    _keys: IntArray
    _scale: int

    def covered_by(self, pieces: Pieces) -> tuple[IntArray, IntArray]:
        """(interval, group) of every interval inside every piece."""
        first = np.searchsorted(self._keys, pieces.cell * self._scale + pieces.start)
        last = np.searchsorted(self._keys, pieces.cell * self._scale + pieces.stop)
        counts = last - first
        group = np.repeat(pieces.group, counts)
        begin = np.repeat(first - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
        return begin + np.arange(len(group), dtype=np.int64), group


def refine(cells: Cells, *piece_lists: Pieces) -> Refinement:
    scale = int(cells.numel.max()) + 1
    points = np.unique(
        np.concatenate([np.concatenate((p.cell * scale + p.start, p.cell * scale + p.stop)) for p in piece_lists])
    )
    # A point at the end of a cell starts no interval: the next point belongs to another cell.
    starts = points[:-1]
    same_cell = starts // scale == points[1:] // scale
    # Indices into `starts` keep the empty gaps, so that searchsorted positions stay intervals; gaps are dropped by
    # callers because no piece covers them.
    cell = starts // scale
    return Refinement(
        cell=cell,
        start=starts - cell * scale,
        stop=np.where(same_cell, points[1:] - cell * scale, starts - cell * scale),
        _keys=starts,
        _scale=scale,
    )


def build_atoms(geometry: ModelGeometry, topology: Topology, model: str, group: SlotGroup, derive: bool) -> AtomTable:
    """Atoms of the slots of ``group``.

    ``derive``: a new state set that also holds ``master`` makes the elements that its own master covers itself.
    """
    cells = geometry.cells

    def of_side(
        sets: Sequence[StateSet], boxes: Sequence[LocalBoxes], slot_name: str, dtype: str
    ) -> list[tuple[list[Group], Pieces]]:
        parts = []
        for number, (state_set, box) in enumerate(zip(sets, boxes, strict=True)):
            slot = state_set.slot(slot_name)
            if slot is None or slot.dtype != dtype:
                continue
            devices = topology.numbers_of(state_set.bound.ranks)
            parts.append(pieces_of(cells, state_set, box, number, slot_name, devices, topology.num_devices))
        return parts

    old_groups, old_pieces = join_pieces(of_side(geometry.old_sets, geometry.old_boxes, group.names[0], group.dtype))
    new_groups, new_pieces = join_pieces(of_side(geometry.new_sets, geometry.new_boxes, group.names[0], group.dtype))
    deriving = [
        (state_set, box)
        for state_set, box in zip(geometry.new_sets, geometry.new_boxes, strict=True)
        if derive and _derives(state_set, group.dtype)
    ]
    master_groups, master_pieces = join_pieces(
        of_side([s for s, _ in deriving], [b for _, b in deriving], "master", "fp32")
    )
    refined = refine(cells, old_pieces, new_pieces, master_pieces)
    old_interval, old_group = refined.covered_by(old_pieces)
    new_interval, new_group = refined.covered_by(new_pieces)
    num_intervals = len(refined.cell)
    held_by, holders = combinations(Lists.of_pairs(old_interval, old_group, num_intervals))
    wanted_by, wanters = combinations(Lists.of_pairs(new_interval, new_group, num_intervals))
    kept = np.flatnonzero((holders.counts[held_by] > 0) | (wanters.counts[wanted_by] > 0))
    # Classes are numbered as they come.
    pairs, example, number = np.unique(
        held_by[kept] * len(wanters) + wanted_by[kept], return_index=True, return_inverse=True
    )
    order = np.argsort(example)
    cls = np.argsort(order)[number]
    renumber = np.full(len(refined.cell), -1, dtype=np.int64)
    renumber[kept] = np.arange(len(kept))
    derived = _by_place(refined, renumber, master_groups, master_pieces)
    if any(slot.is_split for s, _ in deriving for slot in s.slots):  # a master makes the weights of its own memory
        wanted = _by_place(refined, renumber, new_groups, new_pieces)
        derived = {p: np.intersect1d(own, wanted[p]) for p, own in derived.items() if p in wanted}
    return AtomTable(
        model=model,
        slots=group.names,
        slot_bytes=(DTYPE_BYTES[group.dtype],) * len(group.names),
        old_groups=old_groups,
        new_groups=new_groups,
        cell=refined.cell[kept],
        start=refined.start[kept],
        stop=refined.stop[kept],
        cls=cls,
        class_holders=holders.tuples(pairs[order] // len(wanters)),
        class_wanters=wanters.tuples(pairs[order] % len(wanters)),
        derived=derived,
    )


def _derives(state_set: StateSet, dtype: str) -> bool:
    """A half-precision weight is its fp32 master rounded once, by the optimizer step; other pairs are not derivable."""
    weight, master = state_set.slot("weight"), state_set.slot("master")
    if weight is None or master is None or (weight.host != master.host and not (weight.is_split or master.is_split)):
        return False
    return weight.dtype == dtype and dtype in ("bf16", "fp16") and master.dtype == "fp32"


def _by_place(refined: Refinement, renumber: IntArray, groups: Sequence[Group], pieces: Pieces) -> dict[int, IntArray]:
    """Place -> numbers of the intervals that its groups have."""
    interval, group = refined.covered_by(pieces)
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(len(groups) + 1))
    result: dict[int, IntArray] = {}
    for number, entry in enumerate(groups):
        own = np.sort(renumber[interval[order[bounds[number] : bounds[number + 1]]]])
        for place in entry.places:
            # One place has one rank of a state set; two deriving sets of one model on a place hold it twice.
            result[place] = np.union1d(result[place], own) if place in result else own
    return result
