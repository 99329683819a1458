"""best: bounds over all allowed placements of a whole plan, from those of its stages.

Stages are placed one by one, but two copies of one model are not independent: bytes that both want arrive once in a
place, and once in a node; and a copy on a device whose other copy keeps the master gets its weights from that. Added
up, the stages' own bounds would exceed what is possible.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nereus.ir.holdings import Holdings
from nereus.passes.place import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    moved_bytes: int
    node_in_bytes: tuple[int, ...]  # per node
    device_in_bytes: tuple[tuple[int, int], ...]  # (device number, bytes)


def best_of_all(choices: Iterable[Choice], new: Holdings, num_nodes: int) -> Best:
    moved = 0
    node_in = [0] * num_nodes
    device_in: dict[int, int] = {}
    by_model: dict[str, list[Choice]] = {}
    for choice in choices:
        state_set = new.find(choice.stage)
        assert state_set is not None, "only stages with a copy of their own are placed by bytes"
        by_model.setdefault(state_set.model, []).append(choice)
    for members in by_model.values():
        groups = [_that_count(group, new) for group in _sharing_devices(members, new)]
        moved += sum(max(c.best_moved_bytes for c in group) for group in groups)
        counted = [choice for group in groups for choice in group]
        for node in range(num_nodes):
            node_in[node] += max(c.best_node_in_bytes[node] for c in counted)
        on_device: dict[int, int] = {}
        for choice in counted:
            for device, num_bytes in choice.best_device_in_bytes:
                on_device[device] = max(on_device.get(device, 0), num_bytes)
        for device, num_bytes in on_device.items():
            device_in[device] = device_in.get(device, 0) + num_bytes
    return Best(moved_bytes=moved, node_in_bytes=tuple(node_in), device_in_bytes=tuple(sorted(device_in.items())))


def _sharing_devices(choices: list[Choice], new: Holdings) -> list[list[Choice]]:
    """Groups of stages that share devices, directly or through others."""
    groups: list[tuple[set[object], list[Choice]]] = []
    for choice in choices:
        state_set = new.find(choice.stage)
        devices: set[object] = set(state_set.bound.ranks) if state_set is not None else set()
        members = [choice]
        for group in [g for g in groups if g[0] & devices]:
            groups.remove(group)
            devices |= group[0]
            members = [*group[1], *members]
        groups.append((devices, members))
    return [members for _, members in groups]


def _that_count(group: list[Choice], new: Holdings) -> list[Choice]:
    """Where one of the group keeps masters, the others may derive their weights from them: only it counts."""
    with_master = [c for c in group if (s := new.find(c.stage)) is not None and s.slot("master") is not None]
    return with_master or group
