"""Three processes with two of torch's default groups beside each other: of the first two, and of the last two."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nereus.runtime.default_group import DefaultGroup


def main(*, store: Any, device: str, spawn: Any, folder: str) -> None:
    me = int(device[-1])
    said: dict[str, Any] = {}
    worlds: dict[str, tuple[DefaultGroup, Any]] = {}
    for name, members in (("left", (0, 1)), ("right", (1, 2))):
        if me in members:
            # Unlike numbers of groups before: the last process has made none yet.
            world = DefaultGroup(store, name, rank=members.index(me), size=2, timeout_s=60.0)
            inside = [dist.new_group([0, 1]), dist.new_group([0]), dist.new_group([1, 0])]
            world.made()
            worlds[name] = world, inside[2]
    for name in ("left", "right", "left"):
        if name in worlds:
            world, group = worlds[name]
            world.activate()
            total = torch.tensor([10.0**me])
            dist.all_reduce(total)
            dist.all_reduce(total, group=group)
            said[name] = [dist.get_rank(), dist.get_world_size(), total.item()]
    if me == 1:  # the others wait for it in vain, until it shuts the worlds
        time.sleep(0.5)
        for world, _ in worlds.values():
            world.shut()
        said["before"] = len(dist.distributed_c10d._world.pg_map)
        worlds["right"][0].activate()
        worlds["left"][0].close()
        said["after"] = len(dist.distributed_c10d._world.pg_map)
    else:
        (world, group), begin = next(iter(worlds.values())), time.monotonic()
        timer = threading.Timer(30.0, world.shut)  # its own end, far behind the other's
        timer.start()
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError:
            said["ended"] = time.monotonic() - begin < 25.0
        timer.cancel()
    path = Path(folder, f"result-{me}.part")
    path.write_text(json.dumps(said))
    path.rename(path.with_suffix(".json"))
