"""All stages that are placed, together: what a choice for each of them costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nereus.ir.holdings import Topology
from nereus.ir.layout import IntArray
from nereus.passes.links import Links
from nereus.passes.overlap import ModelOverlap
from nereus.passes.place_loads import Loads, table_loads
from nereus.passes.place_stage import PlacedStage

#: Seconds below which two placements are equally fast.
SAME_S = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A placement of one stage that is worth comparing. Compared by identity."""

    name: str
    rows: IntArray
    devices: IntArray  # device number of every rank
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    transfer_s: float
    step_s: float
    moved_bytes: int
    horizon_steps: int
    loads: Loads

    @property
    def added_s(self) -> float:
        return self.horizon_steps * self.step_s

    @property
    def seconds(self) -> float:
        return self.transfer_s + self.added_s

    @property
    def key(self) -> tuple[float, int]:
        """Time first, then bytes."""
        return round(self.seconds / SAME_S) * SAME_S, self.moved_bytes


class Joint:
    """Loads of all stages add up on the ports of devices and nodes; what two copies of a model want in one place, or in
    one node, arrives there once. Steps add up, since stages run one after the other."""

    def __init__(
        self,
        models: Sequence[ModelOverlap],
        owners: Sequence[Sequence[str]],
        topology: Topology,
        horizon_steps: int,
    ) -> None:
        """``owners[i][k]``: the stage whose placement state set k of model i follows."""
        self.topology, self.horizon_steps = topology, horizon_steps
        links = Links(topology)
        node_of = topology.node_of
        self.intra_s = np.minimum(np.array(links.intra), np.array(links.pcie))[node_of]
        self.pcie_s = np.array(links.pcie)[node_of]
        self.nic_s = np.array(links.nic)
        self.tables = [
            (table, {n: owner for n, owner in enumerate(names) if table.groups(n)})
            for model, names in zip(models, owners, strict=True)
            for table in model.tables
        ]
        self._known: dict[tuple[int, tuple[Option, ...]], Loads] = {}

    def option(self, stage: PlacedStage, name: str, rows: IntArray) -> Option:
        return Option(name, rows, stage.devices[rows], stage.step_s(rows))

    def cost(self, chosen: Mapping[str, Option]) -> Cost:
        """Of the stages in ``chosen``, the others left out."""
        loads = Loads.nothing(self.topology)
        for number, (table, owners) in enumerate(self.tables):
            sets = [n for n, owner in owners.items() if owner in chosen]
            if sets:
                key = (number, tuple(chosen[owners[n]] for n in sets))
                if key not in self._known:
                    devices = {n: chosen[owners[n]].devices for n in sets}
                    self._known[key] = table_loads(table, devices, self.topology)
                loads += self._known[key]
        return Cost(
            transfer_s=self.transfer_s(loads),
            step_s=sum(option.step_s for option in chosen.values()),
            moved_bytes=loads.moved_bytes,
            horizon_steps=self.horizon_steps,
            loads=loads,
        )

    def transfer_s(self, loads: Loads) -> float:
        """What the busiest port needs."""
        return max(self.node_s(loads), float((loads.device_in * self.intra_s).max(initial=0.0)))

    def node_s(self, loads: Loads) -> float:
        """What the busiest port needs that depends only on which groups lie in which node."""
        ports = (loads.device_out * self.pcie_s, loads.node_in * self.nic_s, loads.node_out * self.nic_s)
        return max(float(port.max(initial=0.0)) for port in ports)


def descend(
    joint: Joint, options: Mapping[str, Sequence[Option]], start: Mapping[str, Option], most_rounds: int = 4
) -> dict[str, Option]:
    """From ``start``, one stage after the other to its best option while the rest stays, until nothing is gained."""
    chosen = dict(start)
    best = joint.cost(chosen).key
    for _ in range(most_rounds):
        before = best
        for stage, choices in options.items():
            for option in choices:
                if option is not chosen[stage]:
                    tried = joint.cost({**chosen, stage: option}).key
                    if tried < best:
                        best, chosen = tried, {**chosen, stage: option}
        if best == before:
            break
    return chosen
