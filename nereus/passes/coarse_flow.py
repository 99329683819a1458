"""coarse, one model: bytes that each GPU and each node lacks, slot by slot, and the seconds of their ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nereus.ir.layout import SHARD_DIM0, SHARD_FLAT, SHARD_NONE, SHARD_PARAM, IntArray
from nereus.ir.plan import Slot
from nereus.ir.units import DTYPE_BYTES
from nereus.passes.coarse_grid import (
    ALL,
    BY_ROWS,
    EXPERTS,
    REST,
    FloatArray,
    Grid,
    bit_sets,
    grid_of,
    layer_runs,
    numel_table,
)
from nereus.passes.coarse_regions import Shares, lack
from nereus.passes.coarse_side import Part, Side, rank_coordinates
from nereus.passes.coarse_space import Space
from nereus.passes.foregone import MIN_DERIVED_SHARE
from nereus.passes.links import HOST_COPY_BYTES_PER_S

#: A copy that lies on fewer nodes (GPUs) than this, on average, has to leave the one that has it.
FEW_HOLDERS = 1.5


@dataclass(slots=True, eq=False)
class Loads:
    """Sums over all models and slots, per device or node."""

    moved_bytes: float
    gpu_in_s: FloatArray
    gpu_out_s: FloatArray
    node_in_bytes: FloatArray
    node_out_bytes: FloatArray
    host_copy_bytes: FloatArray
    #: State in GPU memory: what stays where it is, what goes, what comes.
    kept_bytes: FloatArray
    old_bytes: FloatArray
    new_bytes: FloatArray
    fresh: list[str] = field(default_factory=list)

    @classmethod
    def none(cls, space: Space) -> Loads:
        devices, nodes = space.num_devices, len(space.names)
        return cls(0.0, *(np.zeros(n) for n in (devices, devices, nodes, nodes, nodes, devices, devices, devices)))


@dataclass(frozen=True, slots=True, eq=False)
class _Holder:
    part: Part
    slot: Slot
    devices: IntArray
    nodes: IntArray
    old: bool


def add_model(loads: Loads, old: Side, new: Side, model: str, space: Space) -> None:
    sides = [[p for p in side.parts if p.model.name == model] for side in (old, new)]
    placed = [
        [(p, space.devices(side, p.where), space.nodes(side, p.where)) for p in parts]
        for side, parts in zip((old, new), sides, strict=True)
    ]
    derive = any(slot.name == "master" for part in sides[0] for slot in part.slots)
    groups: dict[tuple[object, ...], tuple[list[_Holder], list[float]]] = {}
    for name, dtype in dict.fromkeys((s.name, s.dtype) for parts in sides for p in parts for s in p.slots):
        holders = []
        key: list[object] = [dtype, name == "weight"]
        for number, parts in enumerate(placed):
            for part, devices, nodes in parts:
                slot = part.slot(name, dtype)
                if slot is not None:
                    holders.append(_Holder(part, slot, devices, nodes, number == 0))
                    key.append((number, id(part), slot.host, _optimizer(part, name)))
        known = groups.setdefault(tuple(key), (holders, []))
        known[1].append(DTYPE_BYTES[dtype])
    layouts = tuple(dict.fromkeys(p.layout for parts in sides for p in parts))
    split = any(layout.splits_experts for layout in layouts)
    for holders, widths in groups.values():
        rules = {h.part.layout.shard_rule(h.slot.name) for h in holders}
        components = (BY_ROWS, REST) if rules & {SHARD_DIM0, SHARD_PARAM} else (ALL,)
        for component in (*components, EXPERTS) if split else components:
            _add_slots(loads, holders, sum(widths), space, component=component, merged=not split, derive=derive)


def _optimizer(part: Part, slot: str) -> str | None:
    """Only where it decides which tensors have the slot."""
    return part.optimizer if slot != "weight" and (part.optimizer or "").lower() == "muon" else None


def _add_slots(
    loads: Loads,
    holders: Sequence[_Holder],
    width: float,
    space: Space,
    *,
    component: str,
    merged: bool,
    derive: bool,
) -> None:
    first = holders[0]
    model, name = first.part.model, first.slot.name
    table = numel_table(model.arch, model.head, model.lora, name, _optimizer(first.part, name))
    expert = component == EXPERTS
    cut = [h.part.shards(name, expert=expert) for h in holders]
    # The long axis is the order of the model where flat buffers cut it, and every pipeline stage is one run of layers.
    ranged = SHARD_FLAT in [rule for rule, _ in cut] and not any(h.part.layout.chunks for h in holders)
    grid = grid_of(
        tuple(h.part.layout for h in holders),
        tuple(count if rule in (SHARD_DIM0, SHARD_PARAM) else 1 for rule, count in cut),
        model.arch.num_kv_heads,
        table.shape[1],
        component,
        merged=merged,
        rows=not ranged,
    )
    elements = grid.elements(table)
    total = float(elements.sum())
    if total == 0.0:
        return
    segments = grid.per_segment(table)
    once = total - float(segments[-1])  # tied embeddings lie in two places
    if ranged:
        elements = elements / total
    weigh = grid.weigh(elements)
    ends = np.concatenate(([0.0], np.cumsum(segments, dtype=np.float64))) if ranged else None
    shares = [_shares(h, name, grid, ends, space) for h in holders]
    old = [s.alive() for s, h in zip(shares, holders, strict=True) if h.old]
    new = [s for s, h in zip(shares, holders, strict=True) if not h.old]
    if not old or not new:
        _one_sided(loads, shares, holders, weigh, width, space)
        return
    in_host = any(h.slot.host for h in holders)
    num_places = space.num_devices * (2 if in_host else 1)
    masters = [m for h in holders if derive and name == "weight" for m in _masters(h, grid, ends, space)]
    # Independent of each other: rows that a share has of every tensor, and ranges of layers. What lies there by
    # chance is the product.
    mixed_old, mixed_new = _thin(holders, name, ends, component)
    places = lack(new, [*old, *masters], num_places, weigh, by_node=False)
    held = lack(new, old, num_places, weigh, by_node=False) if masters else places
    lacked = _thinned(places.lacked, places.wanted, mixed_old, mixed_new) * width
    on_gpu = lacked[: space.num_devices]
    # A node is spared what its places make themselves, unless another of them wants the same.
    alone = masters if all(_alone(s) for s in new) or not _is_sharded(holders) else []
    nodes = lack(new, [*old, *alone], len(space.names), weigh, by_node=True)
    per_node = np.bincount(space.node_of, minlength=len(space.names)).max()
    node_in = _thinned(nodes.lacked, nodes.wanted, min(1.0, mixed_old * per_node), min(1.0, mixed_new * per_node))
    node_in = node_in * width
    loads.moved_bytes += float(on_gpu.sum())
    loads.gpu_in_s += on_gpu * space.gpu_s
    loads.node_in_bytes += node_in
    wanted, had = places.wanted[: space.num_devices] * width, held.held[: space.num_devices] * width
    overlap = wanted - held.lacked[: space.num_devices] * width
    if not (ranged and len({h.part.layout.tp for h in holders}) == 1):
        # One storage is what a rank has of a tensor: it stays where it is the same (ranges have most tensors whole).
        overlap = np.where(np.isclose(wanted, had) & np.isclose(wanted, overlap), overlap, 0.0)
    stays = np.minimum(overlap, had)
    loads.kept_bytes += stays
    loads.old_bytes += had - stays
    loads.new_bytes += wanted - stays
    if in_host:
        _host_places(loads, new, old, lacked[space.num_devices :], weigh, width, space)
    # What only one node has leaves it at least once, and a GPU that alone has it sends it.
    leaving = _leaving(nodes.held, node_in, nodes.wanted, once, width)
    loads.node_out_bytes += leaving
    if leaving.any() and held.held.sum() <= FEW_HOLDERS * once:
        share = held.held.reshape(-1, space.num_devices).sum(axis=0)
        per_node = np.maximum(np.bincount(space.node_of, weights=share, minlength=len(leaving)), 1.0)
        loads.gpu_out_s += share * (leaving / per_node)[space.node_of] * space.pcie_s


def _shares(holder: _Holder, slot: str, grid: Grid, ends: FloatArray | None, space: Space) -> Shares:
    part, layout = holder.part, holder.part.layout
    expert = grid.component == EXPERTS
    rule, count = part.shards(slot, expert=expert)
    coords = rank_coordinates(layout)
    tied = part.model.arch.tied_embeddings and part.model.head == "lm" and (holder.old or layout.pp > 1)
    share = coords.expert_shard if expert else coords.shard
    by_rows = rule in (SHARD_DIM0, SHARD_PARAM)
    column = coords.expert if expert else coords.tp
    lo, hi = np.zeros(layout.num_ranks), np.ones(layout.num_ranks)
    if ends is not None:
        borders = np.zeros((layout.pp, 2))
        for stage, first, stop in layer_runs(layout):
            last = stop + (tied and stage == layout.pp - 1 and layout.pp > 1)
            borders[stage] = ends[first], ends[last]
        lo, hi = borders[coords.pp, 0], borders[coords.pp, 1]
        if rule == SHARD_FLAT:
            lo, hi = lo + (hi - lo) * share / count, lo + (hi - lo) * (share + 1) / count
    elif grid.component == BY_ROWS:  # all rows of the model on one axis, whatever cuts them
        parts = layout.tp * count
        lo, hi = (column * count + share) / parts, (column * count + share + 1) / parts
    elif rule != SHARD_NONE:
        lo, hi = share / count, (share + 1) / count
    row_shards = count if grid.component == BY_ROWS and by_rows and ends is not None else 1
    sets = bit_sets(grid, layout, tied, row_shards)
    cells = sets[coords.pp, column * row_shards + share if row_shards > 1 else column]
    place = holder.devices
    if holder.slot.host:
        place = np.where(place >= 0, place + space.num_devices, -1)
    return Shares(lo, hi, cells, place, holder.nodes)


def _masters(holder: _Holder, grid: Grid, ends: FloatArray | None, space: Space) -> list[Shares]:
    """Half-precision weights that a new copy rounds from the fp32 masters of the same memory."""
    part = holder.part
    master = part.slot("master", "fp32")
    if holder.old or master is None or master.host != holder.slot.host or part.model.lora is not None:
        return []
    if holder.slot.dtype not in ("bf16", "fp16"):
        return []
    share = part.shards("master", expert=False)[1] / part.shards("weight", expert=False)[1]
    if 1.0 / share < MIN_DERIVED_SHARE:
        return []
    return [_shares(holder, "master", grid, ends, space)]


def _is_sharded(holders: Sequence[_Holder]) -> bool:
    return any(h.part.shards("master", expert=False)[1] > 1 for h in holders if not h.old)


def _alone(shares: Shares) -> bool:
    """Whether no two ranks of a node want the same."""
    rows = np.concatenate((shares.cells, shares.node[:, None].view(np.uint8)), axis=1)
    key = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1]))).reshape(-1)
    return len(np.unique(key)) == len(key)


def _thin(holders: Sequence[_Holder], slot: str, ends: FloatArray | None, component: str) -> tuple[float, float]:
    """Share of every tensor that one old and one new rank have, where others are cut by ranges of layers."""
    thin = [1.0, 1.0]
    for holder in holders if ends is not None and component != BY_ROWS else ():
        rule, count = holder.part.shards(slot, expert=component == EXPERTS)
        if rule in (SHARD_DIM0, SHARD_PARAM):
            thin[not holder.old] = 1.0 / count
    return thin[0], thin[1]


def _thinned(lacked: FloatArray, wanted: FloatArray, old: float, new: float) -> FloatArray:
    return (wanted - (wanted - lacked) * old) * new


def _host_places(
    loads: Loads,
    new: Sequence[Shares],
    old: Sequence[Shares],
    lacked: FloatArray,
    weigh: FloatArray,
    width: float,
    space: Space,
) -> None:
    """Bytes enter a node's host memory once; what further processes of the node lack is copied there."""

    def of_host(shares: Sequence[Shares]) -> list[Shares]:
        return [s for s in shares if bool((s.place >= space.num_devices).any())]

    if not of_host(new):
        return
    found = lack(of_host(new), of_host(old), len(space.names), weigh, by_node=True)
    moved = found.lacked * width
    loads.moved_bytes += float(moved.sum())
    per_node = np.bincount(space.node_of, weights=lacked, minlength=len(moved))
    loads.host_copy_bytes += np.maximum(per_node - moved, 0.0)
    share = lacked / np.maximum(per_node, 1.0)[space.node_of]
    loads.gpu_in_s += share * moved[space.node_of] * space.pcie_s


def _leaving(held: FloatArray, taken: FloatArray, wanted: FloatArray, once: float, width: float) -> FloatArray:
    """Bytes that leave each node at least once, spread over the nodes as they hold them; none where copies lie on
    several."""
    if not taken.any() or held.sum() > FEW_HOLDERS * once:
        return np.zeros_like(taken)
    copies = max(1.0, float(wanted.sum()) / once)
    found: FloatArray = held / max(float(held.sum()), 1.0) * min(float(taken.sum()) / copies, once * width)
    return found


def _one_sided(
    loads: Loads,
    shares: Sequence[Shares],
    holders: Sequence[_Holder],
    weigh: FloatArray,
    width: float,
    space: Space,
) -> None:
    """Slots that only one plan has: they come or go, and nothing of them moves."""
    for share, holder in zip(shares, holders, strict=True):
        if holder.slot.host:
            continue
        alive = share.alive()
        sizes = weigh[np.arange(len(weigh)), alive.cells].sum(axis=1) * (alive.hi - alive.lo) * width
        target = loads.old_bytes if holder.old else loads.new_bytes
        target += np.bincount(alive.place, weights=sizes, minlength=space.num_devices)
        if not holder.old:
            loads.fresh.append(f"{holder.part.stage} {holder.slot.name}")


def host_copy_s(loads: Loads) -> FloatArray:
    return loads.host_copy_bytes / HOST_COPY_BYTES_PER_S
