"""place: which device takes which coordinate of the new layout, for all stages together.

Allowed: every assignment of a stage's coordinates to the devices in its ``on`` that keeps a tensor-parallel group
inside one node wherever it can be. Options of each stage: the listed order; groups to nodes by min-cost flow, for the
fewest bytes per device or per node, one by one or in blocks that keep pipelines and rings inside nodes as they are;
devices inside a node by exact assignment. Stages share ports, so their options are compared together: the least
(predicted transfer of everything + horizon x added step time), then the fewest bytes, wins. The listed order of all is
among what is compared, so it is never beaten by something slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nereus.ir.cluster import Device
from nereus.ir.holdings import Holdings, Topology, model_names
from nereus.ir.layout import IntArray, layout_of
from nereus.ir.plan import Plan, Stage
from nereus.passes import place_bounds
from nereus.passes.best import Best, best_of_all
from nereus.passes.hold import hold
from nereus.passes.model_atoms import ModelAtoms
from nereus.passes.overlap import ModelOverlap, overlap
from nereus.passes.place_assign import NodeValues
from nereus.passes.place_joint import SAME_S, Joint, Option, descend
from nereus.passes.place_search import search
from nereus.passes.place_stage import NODE_WEIGHT, PlacedStage
from nereus.passes.same import Same

UNCHANGED = "unchanged"
#: How much more a byte into the busiest node costs than one into an idle node, when loads are spread.
SPREAD_LEVELS = 15
#: How far from the bound a placement must be for that to be tried.
WORTH_SPREADING = 0.005
#: Devices inside nodes are evened out for stages of up to so many ranks.
MOST_EVEN_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Why a stage lies where it does. Seconds and bytes are this stage's alone."""

    stage: str
    chosen: str  # pinned | unchanged | listed | bytes | nodes | devices | blocks | pipelines | rings | spread | exact
    moved_bytes: int
    listed_moved_bytes: int
    best_moved_bytes: int  # least over all allowed placements (a lower bound where ``exact`` is false)
    exact: bool
    best_node_in_bytes: tuple[int, ...]  # per node: least that must enter it under any allowed placement
    best_device_in_bytes: tuple[tuple[int, int], ...]  # (device number, least bytes that must enter it)
    transfer_s: float
    step_s: float
    listed_transfer_s: float
    listed_step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What all stages cost together: seconds of the busiest port, seconds per step, bytes. No allowed placement has
    less than ``bound_s`` for transfer + horizon x step; the chosen one is proved best where it reaches that."""

    transfer_s: float
    step_s: float
    moved_bytes: int
    listed_transfer_s: float
    listed_step_s: float
    listed_moved_bytes: int
    horizon_steps: int
    bound_s: float

    @property
    def seconds(self) -> float:
        return self.transfer_s + self.horizon_steps * self.step_s

    @property
    def listed_seconds(self) -> float:
        return self.listed_transfer_s + self.horizon_steps * self.listed_step_s

    @property
    def exact(self) -> bool:
        return self.seconds <= self.bound_s + SAME_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    plan: Plan
    choices: tuple[Choice, ...]
    together: Together
    best: Best
    #: Cells and atoms of models that were placed; they do not depend on where ranks lie.
    models: tuple[ModelAtoms, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """``horizon_steps``: RL steps over which a placement's added step time is charged."""

    horizon_steps: int = 100

    name = "place"

    def apply(
        self, old: Plan, old_holdings: Holdings, new: Plan, topology: Topology, same: Same | None = None
    ) -> Placed:
        """``old_holdings``: as ``same`` names them."""
        fixed = {}
        stages = []
        for stage in new.stages:
            if stage.with_ is None and stage.service is None:
                previous = _unchanged(old, stage)
                if stage.place is None and previous is not None:
                    stage = replace(stage, place=previous)
                if stage.place is not None:
                    fixed[stage.name] = UNCHANGED if stage.place == previous else "pinned"
            stages.append(stage)
        new = replace(new, stages=_follow(stages))
        return _Placing(self, old_holdings, new, (same or Same()).united(hold(new)), topology, fixed).solve()


def pin(plan: Plan) -> Plan:
    """``plan`` with its placement written out: what ``on`` and ``order`` say where ``place`` does not."""
    return replace(
        plan, stages=_follow([s if s.place or s.service else replace(s, place=s.ranks) for s in plan.stages])
    )


def _unchanged(old: Plan, stage: Stage) -> tuple[Device, ...] | None:
    """Old ranks of a stage whose layout and devices stay: there is nothing to gain by moving it."""
    before = old.find_stage(stage.name)
    if before is None or before.with_ is not None or before.service is not None:
        return None
    same = layout_of(before) == layout_of(stage) and set(before.devices) == set(stage.devices)
    return before.ranks if same else None


def _follow(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Stages ``with`` another lie where it does."""
    by_name = {stage.name: stage for stage in stages}

    def host(stage: Stage) -> Stage:
        while stage.with_ is not None:
            stage = by_name[stage.with_]
        return stage

    return tuple(s if s.with_ is None else replace(s, place=host(s).place) for s in stages)


class _Placing:
    def __init__(
        self,
        options: Place,
        old: Holdings,
        new: Plan,
        wanted: Holdings,
        topology: Topology,
        fixed: Mapping[str, str],
    ) -> None:
        self.new, self.topology, self.fixed = new, topology, fixed
        holdings = self.holdings = wanted
        self.models: list[ModelOverlap] = []
        owners: list[list[str]] = []
        self.stages: dict[str, PlacedStage] = {}
        for model in model_names(holdings):
            sets = holdings.of_model(model)
            found = overlap(old, model, sets, topology)
            if found is None:
                continue
            self.models.append(found)
            owners.append([s.owner for s in sets])
            for number, state_set in enumerate(sets):
                stage = new.stage(state_set.owner)
                if stage.model == new.stage(state_set.stage).model and stage.name not in self.stages:
                    self.stages[stage.name] = PlacedStage(new, stage, state_set, number, found, topology)
        self.joint = Joint(self.models, owners, topology, options.horizon_steps)

    def solve(self) -> Placed:
        joint = self.joint
        listed = {name: joint.option(s, "listed", s.listed) for name, s in self.stages.items()}
        least = {name: place_bounds.least_moved(s) for name, s in self.stages.items()}
        free = {name: s for name, s in self.stages.items() if not s.fixed}
        options = {name: self._options(s, listed[name], least[name][2]) for name, s in free.items()}
        alone = {name: min(choices, key=lambda o: joint.cost({name: o}).key) for name, choices in options.items()}
        chosen = self._descend(options, listed, {**listed, **alone})
        bounds = {
            name: place_bounds.StageBound(
                moved_bytes=least[name][0],
                exact=least[name][1],
                node_in_bytes=place_bounds.least_node_in(stage),
                device_in_bytes=place_bounds.least_device_in(stage),
            )
            for name, stage in self.stages.items()
        }
        kept = {name: option for name, option in listed.items() if self.fixed.get(name) == UNCHANGED}
        by_set = {self.stages[name].state_set.stage: bound for name, bound in bounds.items()}
        best = best_of_all(by_set, self.holdings, len(self.topology.nodes))
        device_s, bound_s = self._bound_s(best, kept)
        if options and joint.cost(chosen).seconds > bound_s * (1 + WORTH_SPREADING) + SAME_S:
            for name, stage in free.items():
                options[name] += self._spread(stage, chosen, options[name])
            chosen = self._descend(options, chosen)
        if joint.cost(chosen).seconds > bound_s + SAME_S:
            found = search(joint, {n: s for n, s in self.stages.items() if n not in kept}, kept, device_s)
            if found is not None:
                bound_s = max(bound_s, found[1])
                if joint.cost(found[0]).key < joint.cost(chosen).key and len(kept) + len(free) == len(self.stages):
                    chosen = found[0]
        return self._placed(listed, chosen, bounds, best, bound_s)

    def _descend(self, options: Mapping[str, Sequence[Option]], *starts: Mapping[str, Option]) -> dict[str, Option]:
        ends = (descend(self.joint, options, start) for start in starts)
        return min(ends, key=lambda end: self.joint.cost(end).key)

    def _bound_s(self, best: Best, kept: Mapping[str, Option]) -> tuple[float, float]:
        """Least seconds of the fullest device; least transfer + horizon x step."""
        device_s = max((n * float(self.joint.intra_s[d]) for d, n in best.device_in_bytes), default=0.0)
        node_s = max((n * float(self.joint.nic_s[i]) for i, n in enumerate(best.node_in_bytes)), default=0.0)
        step_s = sum(kept[n].step_s if n in kept else s.least_step_s() for n, s in self.stages.items())
        return device_s, float(max(device_s, node_s) + self.joint.horizon_steps * step_s)

    # -- options ------------------------------------------------------------------------------------------------------

    def _options(self, stage: PlacedStage, listed: Option, best_rows: IntArray | None) -> list[Option]:
        found = [listed]
        seen = {listed.rows.tobytes()}
        for name, rows in self._rows(stage, best_rows):
            if rows.tobytes() not in seen:
                seen.add(rows.tobytes())
                found.append(self.joint.option(stage, name, rows))
        return found

    def _rows(self, stage: PlacedStage, best_rows: IntArray | None) -> Iterator[tuple[str, IntArray]]:
        values = _weighed(stage)
        yield "nodes", stage.inside(stage.flow(values))
        yield "bytes", best_rows if best_rows is not None else stage.inside(stage.flow(stage.device_values))
        nodes = stage.groups_of(stage.listed)
        if nodes is not None:
            yield "devices", stage.inside(nodes)
            yield "blocks", stage.inside(stage.blocks(values, nodes))
        for name, axes in (("pipelines", ("dp", "cp", "pp")), ("rings", ("pp", "cp", "dp"))):
            packed = stage.packed(*axes)
            if packed is not None and stage.layout.pp > 1:
                yield name, stage.inside(stage.blocks(values, packed))

    def _spread(self, stage: PlacedStage, chosen: Mapping[str, Option], known: Sequence[Option]) -> Iterator[Option]:
        """Options that relieve the busiest ports: bytes into a node cost more where more comes in already; inside
        nodes, the fullest device takes as little as can be."""
        name = stage.stage.name
        cost = self.joint.cost(chosen)
        nodes = cost.loads.node_in * self.joint.nic_s
        level = 1 + (SPREAD_LEVELS * nodes[stage.nodes] / max(float(nodes.max()), 1e-30)).astype(np.int64)
        found = []
        if level.max() > level.min():
            values = _weighed(stage, level)
            found.append(stage.inside(stage.flow(values)))
            for option in known:
                groups = stage.groups_of(option.rows)
                if groups is not None:
                    found.append(stage.inside(stage.blocks(values, groups)))
        groups = stage.groups_of(chosen[name].rows)
        by_devices = cost.transfer_s > self.joint.node_s(cost.loads)
        if by_devices and groups is not None and stage.layout.num_ranks <= MOST_EVEN_RANKS:
            others = {n: o for n, o in chosen.items() if n != name}
            load = self.joint.cost(others).loads.device_in[stage.devices]
            found.append(stage.even(groups, place_bounds.wanted_bytes(stage), load))
        seen = {option.rows.tobytes() for option in known}
        for rows in found:
            if rows.tobytes() not in seen:
                seen.add(rows.tobytes())
                yield self.joint.option(stage, "spread", rows)

    # -- results ------------------------------------------------------------------------------------------------------

    def _placed(
        self,
        listed: Mapping[str, Option],
        chosen: Mapping[str, Option],
        bounds: Mapping[str, place_bounds.StageBound],
        best: Best,
        bound_s: float,
    ) -> Placed:
        devices = self.topology.devices
        stages = []
        choices = []
        for stage in self.new.stages:
            if stage.name in self.stages:
                option = chosen[stage.name]
                choices.append(self._choice(stage.name, listed[stage.name], option, bounds[stage.name]))
                stage = replace(stage, place=tuple(devices[d] for d in option.devices.tolist()))
            elif stage.with_ is None and stage.service is None and stage.place is None:
                stage = replace(stage, place=stage.ranks)
            stages.append(stage)
        now, before = self.joint.cost(chosen), self.joint.cost(listed)
        together = Together(
            transfer_s=now.transfer_s,
            step_s=now.step_s,
            moved_bytes=now.moved_bytes,
            listed_transfer_s=before.transfer_s,
            listed_step_s=before.step_s,
            listed_moved_bytes=before.moved_bytes,
            horizon_steps=self.joint.horizon_steps,
            bound_s=min(bound_s, now.seconds),
        )
        plan = replace(self.new, stages=_follow(stages))
        return Placed(
            plan=plan, choices=tuple(choices), together=together, best=best, models=tuple(m.atoms for m in self.models)
        )

    def _choice(self, name: str, listed: Option, option: Option, bound: place_bounds.StageBound) -> Choice:
        stage = self.stages[name]
        now, before = self.joint.cost({name: option}), self.joint.cost({name: listed})
        return Choice(
            stage=stage.state_set.stage,
            chosen=self.fixed.get(name, option.name),
            moved_bytes=now.moved_bytes,
            listed_moved_bytes=before.moved_bytes,
            best_moved_bytes=bound.moved_bytes,
            exact=bound.exact,
            best_node_in_bytes=bound.node_in_bytes,
            best_device_in_bytes=bound.device_in_bytes,
            transfer_s=now.transfer_s,
            step_s=now.step_s,
            listed_transfer_s=before.transfer_s,
            listed_step_s=before.step_s,
        )


def _weighed(stage: PlacedStage, level: IntArray | None = None) -> NodeValues:
    """Bytes that a node has, then bytes that its devices have. ``level``: what a byte that enters costs, per node."""
    held, wanted = stage.node_values
    if level is not None:
        held = held.lacking(wanted, level)
    return held.scaled(NODE_WEIGHT).plus(stage.device_values)
