"""Devices, nodes, places and memory spaces of both plans, numbered as the document numbers its devices.

Place p is GPU ``p`` of D, or, from D on, the part of the node's host memory that GPU ``p - D``'s process owns. Space
``D + n`` is the host memory of node n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.cluster import Cluster, Device, Node
from nereus.ir.plan import Plan
from nereus.verify.finding import Violation
from nereus.verify.segments import BoolArray, IntArray, ints


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    devices: tuple[Device, ...]
    number: dict[Device, int]
    nodes: tuple[Node, ...]  # as the new cluster has them; lost ones as the old one did
    node_of: IntArray  # device -> node
    rail_of: IntArray  # device -> its node's NICs, or those of its run of GPUs
    alive: BoolArray  # per device: what the new cluster lacks is lost, and nothing on it is a source

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def num_spaces(self) -> int:
        return len(self.devices) + len(self.nodes)

    @property
    def num_ports(self) -> int:
        """Of devices and rails, both ways, and the copying inside each node's host memory."""
        return 2 * len(self.devices) + 2 * self.num_rails + len(self.nodes)

    @property
    def num_rails(self) -> int:
        return sum(node.rails for node in self.nodes)

    def node_of_places(self, place: IntArray) -> IntArray:
        return self.node_of[place % self.num_devices]

    def space_of_places(self, place: IntArray) -> IntArray:
        node = self.num_devices + self.node_of_places(place)
        return np.where(place < self.num_devices, place, node)

    def place_name(self, place: int) -> str:
        device = self.devices[place % self.num_devices]
        return str(device) if place < self.num_devices else f"{device}'s host memory"

    def space_name(self, space: int) -> str:
        if space < self.num_devices:
            return str(self.devices[space])
        return f"{self.nodes[space - self.num_devices].name}.host"


def build_world(old: Plan, new: Plan, names: tuple[str, ...]) -> World:
    """Raises Violation where ``names`` are not the devices of both plans, each once."""
    known = {str(device): device for device in (*old.cluster.devices, *new.cluster.devices)}
    if len(set(names)) != len(names):
        raise Violation("the document lists a device twice")
    if set(names) != set(known):
        wrong = sorted(set(names) ^ set(known))[0]
        raise Violation(f"{wrong} is not a device of both the document and its plans")
    devices = tuple(known[name] for name in names)
    node_names = tuple(dict.fromkeys(device.node for device in devices))
    at = {name: i for i, name in enumerate(node_names)}
    living = set(new.cluster.devices)
    nodes = [_find(new.cluster, name) or _find(old.cluster, name) for name in node_names]
    known_nodes = tuple(node for node in nodes if node is not None)
    first = np.cumsum([0, *(node.rails for node in known_nodes)])
    rails = []
    for device in devices:
        node = known_nodes[at[device.node]]
        # GPUs that the node no longer has are lost, and send nothing.
        own = min(device.index * node.rails // node.num_gpus, node.rails - 1)
        rails.append(int(first[at[device.node]]) + own)
    return World(
        devices=devices,
        number={device: i for i, device in enumerate(devices)},
        nodes=known_nodes,
        node_of=ints([at[device.node] for device in devices]),
        rail_of=ints(rails),
        alive=np.array([device in living for device in devices], dtype=bool),
    )


def _find(cluster: Cluster, name: str) -> Node | None:
    return next((node for node in cluster.nodes if node.name == name), None)
