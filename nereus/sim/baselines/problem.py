"""What every baseline starts from: a pair of plans in listed rank order, its diff, links, life cycle and memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from nereus.ir.holdings import Holdings, StateSet, Topology, join_clusters
from nereus.ir.layout import IntArray, Layout
from nereus.ir.plan import Plan
from nereus.models.priors import commit_s
from nereus.passes.certify import drain_s
from nereus.passes.diff import Diff, diff
from nereus.passes.hold import hold
from nereus.passes.lifecycle import Lifecycle, lifecycle
from nereus.passes.links import Links
from nereus.passes.place import pin
from nereus.passes.storages import StorageMap


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBytes:
    """Bytes per memory space of one state set: storages that are the same before and after, that only the old plan
    has, that only the new plan has."""

    kept: IntArray
    old: IntArray
    new: IntArray


@dataclass(frozen=True, kw_only=True)
class Problem:
    """``old`` and ``new`` have every rank pinned. Not slotted: tests and baselines share what is computed once."""

    old: Plan
    new: Plan
    old_holdings: Holdings
    new_holdings: Holdings
    topology: Topology
    diff: Diff
    links: Links
    life: Lifecycle
    storages: StorageMap
    capacity: IntArray  # per memory space
    _ranks: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict, repr=False)

    @property
    def num_devices(self) -> int:
        return self.topology.num_devices

    @property
    def num_spaces(self) -> int:
        return self.topology.num_devices + len(self.topology.nodes)

    @property
    def alive_devices(self) -> tuple[int, ...]:
        return tuple(d for d in range(self.num_devices) if self.topology.alive[self.links.node(d)])

    def base_bytes(self) -> IntArray:
        """Contexts, communicators and pools of the processes of both plans, the old ones until the commit."""
        base = np.zeros(self.num_spaces, dtype=np.int64)
        base[: self.num_devices] = self.life.before_bytes
        for op in self.life.ops:
            base[list(op.devices)] += np.array(op.after_bytes, dtype=np.int64)
        return base

    def after_bytes(self) -> IntArray:
        """The same once only the new plan's processes are left."""
        base = np.zeros(self.num_spaces, dtype=np.int64)
        base[: self.num_devices] = self.life.after_bytes
        return base

    def setup_s(self) -> float:
        """Engines, processes and communicators, as our own transitions are charged for them."""
        life = self.life
        return max(life.seconds("engine-start"), life.seconds("spawn")) + life.seconds("build-groups")

    def drain_s(self) -> float:
        return drain_s(self.new, self.life)

    def commit_s(self) -> float:
        return commit_s(len({d for s in self.new.owners() for d in s.ranks}))

    def set_bytes(self, stage: str) -> SetBytes:
        """Of state set ``stage`` (empty where a side lacks it)."""
        kept, old, new = (np.zeros(self.num_spaces, dtype=np.int64) for _ in range(3))
        for name, old_slot, new_slot in self.storages.slots(stage):
            for total in self.storages.totals(stage, name):
                if new_slot is not None:
                    np.add.at(kept, total.space, total.kept * new_slot.element_bytes)
                    np.add.at(new, total.space, total.new * new_slot.element_bytes)
                if old_slot is not None:
                    np.add.at(old, total.space, total.old * old_slot.element_bytes)
        return SetBytes(kept=kept, old=old, new=new)

    def rank_places(self, stage: str) -> dict[int, tuple[int, int]]:
        """Device -> (replica: its dp and cp coordinate as one number, pipeline stage) of an old state set."""
        if stage not in self._ranks:
            state_set = self.old_holdings.find(stage)
            assert state_set is not None
            layout = plan_layout(state_set)
            coords = layout.coordinates()
            replica = coords["dp"] * layout.cp + coords["cp"]
            index = self.topology.index()
            self._ranks[stage] = {
                index[device]: (int(replica[rank]), int(coords["pp"][rank]))
                for rank, device in enumerate(state_set.bound.ranks)
            }
        return self._ranks[stage]

    def changed(self) -> tuple[str, ...]:
        """State sets of which some storage comes or goes."""
        found = []
        for stage in self.storages.stages:
            size = self.set_bytes(stage)
            if size.old.any() or size.new.any():
                found.append(stage)
        return tuple(found)


def plan_layout(state_set: StateSet) -> Layout:
    """A plan's state sets follow from layouts; only what is read from live objects does not."""
    layout = state_set.bound.layout
    assert isinstance(layout, Layout)
    return layout


def build_problem(old: Plan, new: Plan, *, derive: bool = False) -> Problem:
    """``derive``: half-precision weights may be made from the fp32 masters that arrive with them."""
    old, new = pin(old), pin(new)
    topology = join_clusters(old.cluster, new.cluster)
    old_holdings, new_holdings = hold(old), hold(new)
    return Problem(
        old=old,
        new=new,
        old_holdings=old_holdings,
        new_holdings=new_holdings,
        topology=topology,
        diff=diff(old_holdings, new_holdings, topology, derive=derive),
        links=Links(topology),
        life=lifecycle(old, new, topology),
        storages=StorageMap(old_holdings, new_holdings, topology),
        capacity=np.array(
            [n.gpu.capacity_bytes for n in topology.nodes for _ in range(n.num_gpus)]
            + [n.host_mem_bytes for n in topology.nodes],
            dtype=np.int64,
        ),
    )


def with_places(plan: Plan, sets: dict[str, StateSet]) -> Plan:
    """``plan`` with the ranks of each stage of ``sets`` where its state set lies."""
    places = {s.owner: s.bound.ranks for s in sets.values()}
    stages = tuple(replace(s, place=places[s.name]) if s.name in places else s for s in plan.stages)
    return pin(replace(plan, stages=stages))
