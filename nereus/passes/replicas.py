"""replicas: what several holders have of what is wanted, as each has it in its storages.

An exchange takes a wanted element from whichever holder is nearest, so copies that differ would be mixed without a
word. Who runs the exchange compares sums of these regions first. They are classes of the diff's tables, so copies that
are cut in other places meet too.
"""

from __future__ import annotations

from nereus.ir.intervals import Intervals
from nereus.ir.program import Blocks
from nereus.passes.compiled import Exchange
from nereus.passes.device_storages import DeviceStorages

#: (number of a region, the same for all its holders; blocks of it in storages numbered as in the holder's program)
Region = tuple[int, Blocks]


def replicated_regions(exchange: Exchange, device: int) -> tuple[Region, ...]:
    """Regions that ``device`` and at least one other device hold and somebody wants."""
    storages = DeviceStorages(exchange, device)
    num_devices = exchange.topology.num_devices
    found: list[Region] = []
    number = 0
    for at, table in enumerate(exchange.diff.tables):
        cells = exchange.geometry_of(table).cells
        for cls, rows in enumerate(table.intervals_of_classes()):
            number += 1
            holders = exchange.diff.holders[at][cls]
            shared = len({place % num_devices for place in holders}) > 1 and bool(exchange.diff.wanters[at][cls])
            own = [place for place in holders if place % num_devices == device] if shared else []
            if own:
                region = Intervals(table.cell[rows], table.start[rows], table.stop[rows])
                local, _ = storages.holding(at, own[0], old=True)[0]
                found += [(number, local.blocks(slot, cells, region)) for slot in table.slots]
    return tuple(found)
