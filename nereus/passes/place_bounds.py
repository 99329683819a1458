"""What no allowed placement of one stage beats: bytes that move, bytes into each node and each device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.layout import IntArray
from nereus.passes.place_stage import PlacedStage

#: Up to so many ranks the best placement is proved by CP-SAT where the flow leaves a gap; above, its bound is given.
MAX_EXACT_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBound:
    """Least bytes over all allowed placements of one stage; ``exact``: some placement moves no more."""

    moved_bytes: int
    exact: bool
    node_in_bytes: tuple[int, ...]  # per node
    device_in_bytes: tuple[tuple[int, int], ...]  # (device number, bytes)


def wanted_bytes(placed: PlacedStage) -> IntArray:
    """Bytes that each rank wants on its GPU and does not make itself wherever it is."""
    wanted = np.zeros(placed.layout.num_ranks, dtype=np.int64)
    for table in placed.tables:
        groups = table.gpu_groups[placed.number]
        if groups is not None:
            made = table.derived[placed.number]
            wanted += table.wanted[groups] - (0 if made is None else made.total)
    return wanted


def least_moved(placed: PlacedStage) -> tuple[int, bool, IntArray | None]:
    """Least moved bytes over all allowed placements, whether that is exact, and the rows of a good placement."""
    wanted = wanted_bytes(placed)
    total = int(wanted.sum())
    in_host = any(table.host_groups[placed.number] is not None for table in placed.tables)
    plain = int((wanted - placed.most_saved()).sum())
    if in_host:
        return plain + sum(least_node_in(placed, host_only=True)), False, None
    if not placed.groups_fit or placed.partial:  # only a bound that ignores groups
        return max(plain, 0), False, None
    alone = placed.ranks_to_rows()
    if alone is not None:
        return total - int(placed.saved(alone, np.arange(len(alone))).sum()), True, alone
    values = placed.device_values
    nodes = placed.flow(values)
    upper = int(values.at(np.arange(len(nodes)), nodes).sum())
    rows = placed.inside(nodes)
    ranks = np.arange(len(rows))
    reached = int(placed.saved(rows, ranks).sum())
    if reached == upper:
        return total - reached, True, rows
    if placed.layout.num_ranks > MAX_EXACT_RANKS:
        return total - upper, False, rows
    # CP-SAT takes longer to import than most plans to compile, and few need it.
    from nereus.passes.place_exact import most_saved

    rows_of_node = [np.flatnonzero(placed.node_of_row == node) for node in range(len(placed.nodes))]
    exact = most_saved(placed.saved(ranks[:, None], ranks[None, :]), placed.ranks_of_group, rows_of_node, rows)
    if exact is not None:
        return total - exact[0], True, exact[1]
    return total - upper, False, rows


def least_node_in(placed: PlacedStage, *, host_only: bool = False) -> tuple[int, ...]:
    """Per node of the topology. Every device of ``on`` is used, so a node takes in at least what its cheapest group
    lacks there."""
    least = np.zeros(len(placed.topology.nodes), dtype=np.int64)
    if not placed.groups_fit:
        return tuple(least.tolist())
    values, wanted = placed.host_values if host_only else placed.node_values
    if placed.partial:
        return tuple(least.tolist())
    for table in placed.tables:
        made = table.derived[placed.number]
        if made is not None:  # of classes that are fetched otherwise, each rank can make its own part
            part = np.where(table.demanded_bytes[made.cls] > 0, made.num_bytes, 0)
            wanted = wanted - np.bincount(placed.group_of_rank[made.rank], weights=part, minlength=len(wanted)).astype(
                np.int64
            )
    missing = wanted[:, None] - values.base
    found = missing.min(axis=0)[values.kind]
    # A node with more of a group's state lacks less of it.
    np.minimum.at(found, values.node, missing[values.unit, values.kind[values.node]] - values.excess)
    least[placed.nodes] = np.maximum(np.where(placed.slots > 0, found, 0), 0)
    return tuple(least.tolist())


def least_device_in(placed: PlacedStage) -> tuple[tuple[int, int], ...]:
    """(device number, least bytes that must enter it)."""
    if placed.partial:
        return tuple((device, 0) for device in placed.devices.tolist())
    wanted = wanted_bytes(placed)
    least = (wanted[None, :] - placed.types).min(axis=1)[placed.type_of_row]
    row, rank, value = placed.entries.pairs()
    np.minimum.at(least, row, wanted[rank] - placed.types[placed.type_of_row[row], rank] - value)
    return tuple(zip(placed.devices.tolist(), np.maximum(least, 0).tolist(), strict=True))
