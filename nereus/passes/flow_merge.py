"""Which places, nodes and demands play the same part, so that the flow programme can treat them as one.

Labels are equal for places that hold and lack the same classes beside equal neighbours, counting only classes with a
choice of how they flow: what has one way is a constant load on some port. A programme over labels gives its port groups
prices, and ``priced_bound`` spreads each over the group and proves what they are worth: exactly the optimum where equal
labels mean symmetry, less where constant loads inside a group differ by more than what is free to choose can level out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.ir.layout import IntArray
from nereus.passes.commodities import Commodities
from nereus.passes.links import Links

#: Share of all bytes below which a class does not tell places apart.
SMALL = 1e-4

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Labels:
    place: Hashes
    rail: Hashes
    demand: Hashes


def mix(values: IntArray | Hashes, salt: int = 0) -> Hashes:
    """Splitmix64 of each value."""
    x = values.astype(np.uint64) + np.uint64((salt + 1) * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def labels_of(c: Commodities, links: Links) -> Labels:
    devices, num_nodes = links.num_devices, len(links.nic)
    node_of = np.tile(np.array(links.node_of, dtype=np.int64), 2)
    choice = np.bincount(c.holder_class, minlength=c.num_classes) > 1
    choice |= np.bincount(c.demand_class, minlength=c.num_classes) > 1
    class_bytes = np.bincount(c.demand_class, weights=c.demand_bytes, minlength=c.num_classes)
    choice &= class_bytes > class_bytes.sum() * SMALL
    wanter_class = c.demand_class[c.wanter_demand]
    parts = np.zeros(2 * devices, dtype=np.uint64)
    held, wanted = choice[c.holder_class], choice[wanter_class]
    np.add.at(parts, c.holder_place[held], mix(c.holder_class[held], 1))
    np.add.at(parts, c.wanter_place[wanted], mix(wanter_class[wanted], 2))
    node = np.zeros(num_nodes, dtype=np.uint64)
    np.add.at(node, node_of, mix(parts, 3))
    for rates in (links.nic, [links.rail[first] for first in links.first_rail], links.pcie, links.intra):
        node = mix(node + mix(np.array(rates).view(np.uint64)), 4)
    of_rail = np.array(links.rail_of, dtype=np.int64)
    rail = np.zeros(len(links.rail), dtype=np.uint64)
    np.add.at(rail, np.tile(of_rail, 2), mix(parts, 3))
    home = np.zeros(len(rail), dtype=np.int64)
    home[of_rail] = node_of[:devices]
    rail = mix(rail + mix(node)[home], 10)
    device = mix(parts[:devices], 5) + mix(parts[devices:], 6)
    kind = np.repeat(np.array([7, 8], dtype=np.uint64), devices)
    place = mix(np.tile(device, 2) + kind + np.tile(mix(rail)[of_rail], 2))
    return Labels(place, rail, mix(c.demand_class, 9) + mix(node)[c.demand_node])
