"""coarse, one model: bytes that each GPU and each node lacks, slot by slot, and the seconds of their ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nereus.ir.layout import SHARD_DIM0, SHARD_FLAT, SHARD_PARAM, IntArray
from nereus.ir.plan import Slot
from nereus.ir.units import DTYPE_BYTES
from nereus.models.priors import HOST_COPY_BYTES_PER_S
from nereus.passes.coarse_grid import (
    ALL,
    BY_ROWS,
    EXPERTS,
    REST,
    FloatArray,
    Grid,
    grid_of,
)
from nereus.passes.coarse_regions import Shares, lack, lack_by_node, overlap
from nereus.passes.coarse_side import Part, Side
from nereus.passes.coarse_space import Space
from nereus.passes.coarse_tables import TableKey, coordinate_shares, weights_of
from nereus.passes.foregone import MIN_DERIVED_SHARE

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
        per_device, per_node = np.zeros((5, space.num_devices)), np.zeros((3, len(space.names)))
        return cls(
            moved_bytes=0.0,
            gpu_in_s=per_device[0],
            gpu_out_s=per_device[1],
            node_in_bytes=per_node[0],
            node_out_bytes=per_node[1],
            host_copy_bytes=per_node[2],
            kept_bytes=per_device[2],
            old_bytes=per_device[3],
            new_bytes=per_device[4],
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Holder:
    part: Part
    slot: Slot
    devices: IntArray
    nodes: IntArray
    old: bool
    host: bool
    #: Part of every rank's share that this holds, along the long axis: the first of it is what goes to host memory.
    cut: tuple[float, float] = (0.0, 1.0)


def _holders(part: Part, slot: Slot, devices: IntArray, nodes: IntArray, old: bool) -> list[_Holder]:
    """Two where the slot lies partly in host memory."""
    if not slot.is_split:
        return [_Holder(part, slot, devices, nodes, old, slot.host)]
    share = slot.host_share
    cuts = ((True, (0.0, share)), (False, (share, 1.0)))
    return [_Holder(part, slot, devices, nodes, old, host, cut) for host, cut in cuts]


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
                    holders += _holders(part, slot, devices, nodes, number == 0)
                    key.append((number, id(part), slot.host, slot.host_share, _optimizer(part, name)))
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
    key = (model.arch, model.head, model.lora, name, _optimizer(first.part, name))
    expert = component == EXPERTS
    cut = [h.part.shards(name, expert=expert) for h in holders]
    # The long axis is the order of the model where flat buffers cut it, and every pipeline stage is one run of layers.
    ranged = SHARD_FLAT in [rule for rule, _ in cut] and not any(h.part.layout.chunks for h in holders)
    grid = grid_of(
        tuple(h.part.layout for h in holders),
        tuple(count if rule in (SHARD_DIM0, SHARD_PARAM) else 1 for rule, count in cut),
        model.arch.num_kv_heads,
        model.arch.num_layers + 3,
        component,
        merged=merged,
        rows=not ranged,
    )
    weighed = weights_of(grid, key, ranged)
    if weighed.total == 0.0:
        return
    weigh, once = weighed.weigh, weighed.once
    ends = weighed.ends if ranged else None
    shares = [_shares(h, name, grid, key, ranged, space) for h in holders]
    old = [a for s, h in zip(shares, holders, strict=True) if h.old and len((a := s.alive()).place)]
    new = [s for s, h in zip(shares, holders, strict=True) if not h.old]
    if not old or not new:
        _one_sided(loads, shares, holders, weigh, width, space)
        return
    derives = derive and name == "weight"
    makers = [_masters(h, grid, key, ranged, space) if derives else [] for h in holders if not h.old]
    masters = [m for made in makers for m in made]
    # Independent of each other: rows that a share has of every tensor, and ranges of layers. What lies there by
    # chance is the product.
    thin_old, thin_new = _thin(holders, name, ends, component)
    in_host = any(h.host for h in holders)
    num_places = space.num_devices * (2 if in_host else 1)
    alone = _disjoint(old, num_places) and _disjoint(new, num_places)
    found = _direct(new, old, masters, weigh, num_places) if alone else _united(new, old, masters, weigh, num_places)
    lacked = _thinned(found.lacked, found.wanted, thin_old, thin_new) * width
    on_gpu = lacked[: space.num_devices]
    loads.moved_bytes += float(on_gpu.sum())
    loads.gpu_in_s += on_gpu * space.gpu_s
    wanted, had = (
        found.wanted[: space.num_devices] * width * thin_new,
        found.held[: space.num_devices] * width * thin_old,
    )
    stays = found.same[: space.num_devices] * width
    if not (ranged and len({h.part.layout.tp for h in holders}) == 1):
        # One storage is what a rank has of a tensor: it stays where it is the same (ranges have most tensors whole).
        unequal = np.maximum(abs(wanted - had), abs(wanted - stays)) > 1e-6 * wanted
        stays = np.where(unequal, 0.0, stays)
    stays = np.minimum(stays, had)
    loads.kept_bytes += stays
    loads.old_bytes += had - stays
    loads.new_bytes += wanted - stays
    if lacked.max(initial=0.0) < 1.0:
        return
    num_nodes = len(space.names)
    shared = _is_sharded(holders)
    spared = _spared(new, makers, num_nodes, shared)
    nodes = lack_by_node(new, [*old, *spared], num_nodes, weigh)
    if in_host:
        hosts = [n for n, h in enumerate(h for h in holders if not h.old) if h.host]
        want = [new[n] for n in hosts]
        found_there = nodes
        if not all(h.host for h in holders):
            there = [s for s in old if int(s.place.min()) >= space.num_devices]
            make = _spared(want, [makers[n] for n in hosts], num_nodes, shared)
            found_there = lack_by_node(want, [*there, *make], num_nodes, weigh)
        if want:
            _host_places(loads, found_there.lacked * width, lacked[space.num_devices :], space)
    per_node = float(space.gpus.max())
    node_in = _thinned(nodes.lacked, nodes.wanted, min(1.0, thin_old * per_node), min(1.0, thin_new * per_node))
    node_in = node_in * width
    loads.node_in_bytes += node_in
    # What only one node has leaves it at least once, and a GPU that alone has it sends it.
    leaving = _leaving(nodes.held, node_in, nodes.wanted, once, width)
    if leaving is None:
        return
    loads.node_out_bytes += leaving
    if found.held.sum() <= FEW_HOLDERS * once:
        share = found.held.reshape(-1, space.num_devices).sum(axis=0)
        on_node = np.maximum(np.bincount(space.node_of, weights=share, minlength=len(leaving)), 1.0)
        loads.gpu_out_s += share * (leaving / on_node)[space.node_of] * space.pcie_s


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Elements per place; ``same``: wanted and held, ``lacked``: neither held nor derived."""

    wanted: FloatArray
    held: FloatArray
    same: FloatArray
    lacked: FloatArray


def _disjoint(shares: Sequence[Shares], num_places: int) -> bool:
    if len(shares) == 1:
        return True
    return int(np.bincount(np.concatenate([s.place for s in shares]), minlength=num_places).max()) <= 1


def _direct(
    new: Sequence[Shares], old: Sequence[Shares], masters: Sequence[Shares], weigh: FloatArray, num_places: int
) -> _Found:
    """No place has two copies: intersections of pairs, and inclusion-exclusion with what a rank derives of its own."""
    wanted, held, same, derived = (np.zeros(num_places) for _ in range(4))
    for shares in new:
        wanted[shares.place] += shares.size
    for shares in masters:
        derived[shares.place] += shares.size
    for source in old:
        held[source.place] += source.size
        rank_at = np.full(num_places, -1)
        rank_at[source.place] = np.arange(len(source.place))
        for shares in new:
            same[shares.place] += overlap(shares, source, rank_at[shares.place], weigh)
        for shares in masters:
            derived[shares.place] -= overlap(shares, source, rank_at[shares.place], weigh)
    return _Found(wanted, held, same, np.maximum(wanted - same - derived, 0.0))


def _united(
    new: Sequence[Shares], old: Sequence[Shares], masters: Sequence[Shares], weigh: FloatArray, num_places: int
) -> _Found:
    found = lack(new, old, num_places, weigh)
    lacked = lack(new, [*old, *masters], num_places, weigh).lacked if masters else found.lacked
    return _Found(found.wanted, found.held, found.wanted - found.lacked, lacked)


def _shares(holder: _Holder, slot: str, grid: Grid, key: TableKey, ranged: bool, space: Space) -> Shares:
    part = holder.part
    rule, count = part.shards(slot, expert=grid.component == EXPERTS)
    tied = part.model.arch.tied_embeddings and part.model.head == "lm" and (holder.old or part.layout.pp > 1)
    found = coordinate_shares(grid, part.layout, rule, count, tied, key, ranged)
    place = holder.devices
    if holder.host:
        place = np.where(place >= 0, place + space.num_devices, -1)
    memo = part.where.memo if holder.nodes is part.where.node else None
    if holder.cut == (0.0, 1.0):
        return Shares(found.lo, found.hi, found.cells, found.size, place, holder.nodes, memo, found)
    first, last = holder.cut
    lo, hi = (found.lo + (found.hi - found.lo) * end for end in holder.cut)
    return Shares(lo, hi, found.cells, found.size * (last - first), place, holder.nodes, memo, (found, holder.cut))


def _masters(holder: _Holder, grid: Grid, key: TableKey, ranged: bool, space: Space) -> list[Shares]:
    """Half-precision weights that a new copy rounds from the fp32 masters of the same memory."""
    part = holder.part
    master = part.slot("master", "fp32")
    if holder.old or master is None or part.model.lora is not None:
        return []
    kept = _holders(part, master, holder.devices, holder.nodes, False)
    maker = next((h for h in kept if h.host == holder.host), None)
    if maker is None:
        return []
    if holder.slot.dtype not in ("bf16", "fp16"):
        return []
    share = part.shards("master", expert=False)[1] / part.shards("weight", expert=False)[1]
    if (maker.cut[1] - maker.cut[0]) / share < MIN_DERIVED_SHARE:
        return []
    return [_shares(maker, "master", grid, key, ranged, space)]


def _is_sharded(holders: Sequence[_Holder]) -> bool:
    return any(h.part.shards("master", expert=False)[1] > 1 for h in holders if not h.old)


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


def _host_places(loads: Loads, moved: FloatArray, lacked: FloatArray, space: Space) -> None:
    """Bytes enter a node's host memory once (``moved``); what further processes of the node lack is copied there."""
    loads.moved_bytes += float(moved.sum())
    per_node = np.bincount(space.node_of, weights=lacked, minlength=len(moved))
    loads.host_copy_bytes += np.maximum(per_node - moved, 0.0)
    share = lacked / np.maximum(per_node, 1.0)[space.node_of]
    loads.gpu_in_s += share * moved[space.node_of] * space.pcie_s


def _spared(
    new: Sequence[Shares], makers: Sequence[Sequence[Shares]], num_nodes: int, sharded: bool
) -> Sequence[Shares]:
    """What need not enter a node, since all of its places that want it make it themselves."""
    if sharded and not all(s.alone() for s in new):
        return []
    masters = [m for made in makers for m in made]
    lacking = [s.node for s, made in zip(new, makers, strict=True) if not made]
    if not masters or not lacking:
        return masters
    makes_all = np.ones(num_nodes, dtype=bool)
    makes_all[np.concatenate(lacking)] = False
    return [m.take(keep) for m in masters if (keep := makes_all[m.node]).any()]


def _leaving(held: FloatArray, taken: FloatArray, wanted: FloatArray, once: float, width: float) -> FloatArray | None:
    """Bytes that leave each node at least once, spread over the nodes as they hold them; none where copies lie on
    several."""
    if not taken.any() or held.sum() > FEW_HOLDERS * once:
        return None
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
        if holder.host:
            continue
        alive = share.alive()
        num_bytes = alive.size * width
        target = loads.old_bytes if holder.old else loads.new_bytes
        target += np.bincount(alive.place, weights=num_bytes, minlength=space.num_devices)
        if not holder.old:
            loads.fresh.append(f"{holder.part.stage} {holder.slot.name}")


def host_copy_s(loads: Loads) -> FloatArray:
    return loads.host_copy_bytes / HOST_COPY_BYTES_PER_S
