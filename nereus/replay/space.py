"""What the cost model says of a job's plans on every pool and at every length: the world as the policies believe it.

Everything is remembered. Seconds of stages are computed at lengths on a grid and interpolated between; plans are looked
for once for each pool and part of the grid, at the longest length of the part, so that they fit in all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nereus.ir.plan import Plan, Stage
from nereus.models.memory import check_memory
from nereus.models.memory.neighbours import members
from nereus.models.memory.state import owner_of
from nereus.passes.coarse import coarse
from nereus.planner.calibration import Calibration
from nereus.planner.limits import NO_LIMITS, Limits
from nereus.planner.pools import nodes_of, on_most_nodes, survives, worth_trying
from nereus.planner.rl_step import Order, order_of, stage_time
from nereus.planner.search import Found, search

#: Of neighbouring lengths on the grid.
RATIO = 1.15
#: Plans that a search adds to those that a policy chooses from.
NUM_CHOICES = 4

#: By which lengths may grow before a plan that is chosen now does not fit; one that has less than half of it left is
#: given up before it runs out of memory.
HEADROOM = 0.3

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Of some processes: what runs in them, how, and on how many GPUs. ``text``: the same in every run."""

    number: int
    text: str


class Space:
    """``plan``: the job as it starts; its cluster lists all nodes that may come."""

    def __init__(self, plan: Plan, calibration: Calibration, limits: Limits = NO_LIMITS) -> None:
        self.start = plan
        self.limits = limits
        self.calibration = calibration
        self.nodes = tuple(node.name for node in plan.cluster.nodes)
        self.plans: list[Plan] = []
        self._number: dict[Key, int] = {}
        self._known_layouts: dict[Key, Layout] = {}
        self._order: list[Order] = []
        self._layouts: list[dict[str, Layout]] = []
        self._states: list[int] = []  # where which state lies: all that a change between plans depends on
        self._nodes: list[frozenset[str]] = []
        self._stage_s: dict[tuple[object, ...], float] = {}
        self._stop_s: dict[tuple[int, int], float] = {}
        self._survives: dict[tuple[int, int, frozenset[str]], float | None] = {}
        self._longest: dict[int, tuple[float, float]] = {}
        self._choices: dict[tuple[int, int], tuple[int, ...]] = {}

    # Plans ---------------------------------------------------------------------------------------------------------

    def number(self, plan: Plan) -> int:
        """Of a plan, by its layouts and places; lengths do not count."""
        key = tuple(_key(stage) for stage in plan.stages)
        if key not in self._number:
            self._number[key] = len(self.plans)
            plan = replace(plan, cluster=self.start.cluster, workload=self.start.workload)
            self.plans.append(plan)
            self._order.append(order_of(plan))
            self._nodes.append(nodes_of(plan))
            state = tuple(replace(stage, micro_batch=1, recompute="none", max_tokens=None) for stage in plan.stages)
            self._states.append(self._layout(state).number)
            layouts = {owner.name: self._layout(members(plan, owner)) for owner in plan.owners()}
            self._layouts.append({s.name: layouts[owner_of(plan, s).name] for s in plan.stages if s.service is None})
        return self._number[key]

    def pool(self, num_nodes: int) -> frozenset[str]:
        return frozenset(self.nodes[:num_nodes])

    def runs_on(self, number: int, num_nodes: int) -> bool:
        return self._nodes[number] <= self.pool(num_nodes)

    def placed(self, plan: Plan, num_nodes: int) -> Plan | None:
        """With the degrees of ``plan`` as far as they are legal on the first nodes; without those that are slower than
        any that it has."""
        pools = worth_trying(plan, self.pool(num_nodes) | nodes_of(plan))
        alike = next(names for names in pools if nodes_of(plan) <= names) & self.pool(num_nodes)
        return on_most_nodes(plan, alike or self.pool(num_nodes))

    def choices(self, num_nodes: int, length: float) -> tuple[int, ...]:
        """The best plans on the first nodes at lengths like this, best first; empty where none fits."""
        part = _part(length * (1 + HEADROOM))
        if (num_nodes, part) not in self._choices:
            found: list[Found] = []
            for names in worth_trying(self.start, self.pool(num_nodes)):
                placed = on_most_nodes(self.start, names)
                if placed is not None:
                    now = at_length(placed, RATIO**part)
                    found += search(now, self.calibration, count=NUM_CHOICES, limits=self.limits).best
            best = sorted(found, key=lambda each: each.cost)[:NUM_CHOICES]
            self._choices[num_nodes, part] = tuple(dict.fromkeys(self.number(each.plan) for each in best))
        return self._choices[num_nodes, part]

    # What they take ------------------------------------------------------------------------------------------------

    def stage_seconds(self, number: int, length: float, longest: float | None = None) -> dict[str, float]:
        """``longest``: response of the batch; None: what the plan promises."""
        place = math.log(length) / math.log(RATIO)
        low = math.floor(place)
        found = {}
        for name in self._layouts[number]:
            below, above = (self._at(number, name, point, length, longest) for point in (low, low + 1))
            found[name] = below * (above / below) ** (place - low) if below > 0 else above
        return found

    def seconds(
        self, number: int, length: float, longest: float | None = None, factors: Mapping[str, float] | None = None
    ) -> float:
        """Of a step. ``factors``: by which stages take longer."""
        times = self.stage_seconds(number, length, longest)
        if factors is not None:
            times = {name: seconds * factors[name] for name, seconds in times.items()}
        return max(self._order[number].ends(times).values(), default=0.0)

    def layouts(self, number: int) -> Mapping[str, Layout]:
        """By stage: what decides how long it takes."""
        return self._layouts[number]

    def fits(self, number: int, length: float) -> bool:
        """Memory only grows with the length, so two lengths tell of all between."""
        good, bad = self._longest.get(number, (0.0, math.inf))
        if length <= good:
            return True
        if length >= bad:
            return False
        plan = at_length(self.plans[number], length)
        fits = not any(found.severity.value == "error" for found in check_memory(plan))
        self._longest[number] = (length, bad) if fits else (good, length)
        return fits

    def stop_s(self, before: int, after: int) -> float:
        if before == after:
            return 0.0
        key = self._states[before], self._states[after]
        if key not in self._stop_s:
            self._stop_s[key] = coarse(self.plans[before], self.plans[after]).stop_s
        return self._stop_s[key]

    def stop_after_loss_s(self, before: int, after: int, lost: frozenset[str]) -> float | None:
        """With nothing of what ``lost`` nodes held; None where some state was nowhere else."""
        key = self._states[before], self._states[after], lost
        if key not in self._survives:
            cluster = self.start.cluster
            left = tuple(node for node in cluster.nodes if node.name not in lost)
            after_plan = replace(self.plans[after], cluster=replace(cluster, nodes=left, lost=tuple(sorted(lost))))
            alive = survives(self.plans[before], after_plan)
            self._survives[key] = coarse(self.plans[before], after_plan).stop_s if alive else None
        return self._survives[key]

    def _layout(self, stages: Sequence[Stage]) -> Layout:
        key = tuple(_key(stage) for stage in stages)
        if key not in self._known_layouts:
            text = "; ".join(f"{len(stage.devices)} {_settings(stage)}" for stage in stages)
            self._known_layouts[key] = Layout(len(self._known_layouts), text)
        return self._known_layouts[key]

    def _at(self, number: int, name: str, point: int, length: float, longest: float | None) -> float:
        # The tail is kept in proportion to the mean, on a grid as coarse.
        tail = None if longest is None else _part(longest / length)
        key = (self._layouts[number][name].number, name, point, tail)
        if key not in self._stage_s:
            plan = at_length(self.plans[number], RATIO**point)
            if tail is not None:
                most = math.ceil(plan.workload.response_len * RATIO**tail)
                plan = replace(plan, workload=replace(plan.workload, max_response=most))
            self._stage_s[key] = stage_time(plan, plan.stage(name), self.calibration).seconds
        return self._stage_s[key]


def at_length(plan: Plan, length: float) -> Plan:
    return replace(plan, workload=replace(plan.workload, response_len=max(1, math.ceil(length))))


def _part(length: float) -> int:
    """Of the grid: the least point that is no shorter."""
    return math.ceil(math.log(length) / math.log(RATIO) - 1e-9)


def _key(stage: Stage) -> Key:
    return (stage.devices, stage.place, *_settings(stage))


def _settings(stage: Stage) -> Key:
    return (
        stage.name, stage.tp, stage.pp, stage.dp, stage.cp, stage.ep, stage.etp, stage.sp, stage.vp, stage.fsdp,
        stage.zero, stage.micro_batch, stage.max_tokens, stage.recompute, stage.pp_split,
    )  # fmt: skip


def best_of(space: Space, numbers: Iterable[int], length: float, longest: float | None = None) -> int | None:
    """The fastest of ``numbers`` that fits with headroom, None where none does."""
    fitting = [number for number in numbers if space.fits(number, length * (1 + HEADROOM))]
    return min(fitting, key=lambda number: space.seconds(number, length, longest), default=None)
