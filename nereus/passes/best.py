"""best: bounds over all allowed placements of a whole plan, from those of its stages.

Two copies of one model are not independent: bytes that both want arrive once in a place, and once in a node; and a copy
on a device whose other copy keeps the master gets its weights from that. Added up, the stages' own bounds would exceed
what is possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.ir.holdings import Holdings
from nereus.passes.place_bounds import StageBound


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    moved_bytes: int
    node_in_bytes: tuple[int, ...]  # per node
    device_in_bytes: tuple[tuple[int, int], ...]  # (device number, bytes)


def best_of_all(bounds: Mapping[str, StageBound], new: Holdings, num_nodes: int) -> Best:
    """``bounds``: by name of the state set."""
    moved = 0
    node_in = [0] * num_nodes
    device_in: dict[int, int] = {}
    by_model: dict[str, list[str]] = {}
    for name in bounds:
        state_set = new.find(name)
        assert state_set is not None, "only stages with a copy of their own are placed by bytes"
        by_model.setdefault(state_set.model, []).append(name)
    for members in by_model.values():
        groups = [_that_count(group, new) for group in _sharing_devices(members, new)]
        moved += sum(max(bounds[name].moved_bytes for name in group) for group in groups)
        counted = [bounds[name] for group in groups for name in group]
        for node in range(num_nodes):
            node_in[node] += max(bound.node_in_bytes[node] for bound in counted)
        on_device: dict[int, int] = {}
        for bound in counted:
            for device, num_bytes in bound.device_in_bytes:
                on_device[device] = max(on_device.get(device, 0), num_bytes)
        for device, num_bytes in on_device.items():
            device_in[device] = device_in.get(device, 0) + num_bytes
    return Best(moved_bytes=moved, node_in_bytes=tuple(node_in), device_in_bytes=tuple(sorted(device_in.items())))


def _sharing_devices(names: list[str], new: Holdings) -> list[list[str]]:
    """Groups of state sets that share devices, directly or through others."""
    groups: list[tuple[set[object], list[str]]] = []
    for name in names:
        state_set = new.find(name)
        devices: set[object] = set(state_set.bound.ranks) if state_set is not None else set()
        members = [name]
        for group in [g for g in groups if g[0] & devices]:
            groups.remove(group)
            devices |= group[0]
            members = [*group[1], *members]
        groups.append((devices, members))
    return [members for _, members in groups]


def _that_count(group: list[str], new: Holdings) -> list[str]:
    """Where one of the group keeps masters, the others may derive their weights from them: only it counts."""
    with_master = [name for name in group if (s := new.find(name)) is not None and s.slot("master") is not None]
    return with_master or group
