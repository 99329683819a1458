"""The best plans on the GPUs that the stages have, or could have: exact, by branch and bound.

A plan is a placement (which GPUs each owner of processes has, ``placements``) and a choice of one candidate layout for
each owner. What is minimised is the time of a step, plus a small price for each key that has to be written: a change
that nobody would notice is no improvement. The time is the schedule of all stages, which only grows with any stage's
time: so with some owners chosen and the others at their fastest it is a bound. Placements are taken in the order of
their bounds, and a placement or branch whose bound is no better than the worst of the plans kept is left. Memory is
exact as well: while a stage runs, each of its GPUs holds what that stage's candidate says, what the other owners there
keep, and a context a process; a node's host memory holds what all of them keep there.

Two designs were considered: integer programming over pairs of candidate and GPU, which has to be told every schedule,
and this, which looks at few candidates because the fastest ones come first and mostly fit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nereus.ir.plan import Plan
from nereus.models.memory.check import check_memory
from nereus.models.memory.steady import COMMUNICATOR_BYTES, CONTEXT_BYTES
from nereus.planner.calibration import Calibration
from nereus.planner.candidates import Bytes, Candidates
from nereus.planner.layouts import Layouts
from nereus.planner.limits import NO_LIMITS, Limits, broken
from nereus.planner.placements import Placements, Runs, here
from nereus.planner.rl_step import Order, order_of
from nereus.planner.runs import Floats

Places: TypeAlias = NDArray[np.intp] | slice

#: Share of the fastest conceivable step that a written key has to gain.
LEAST_GAIN = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """``changes``: what to write into the plan, by stage. ``cost``: seconds and the price of the keys."""

    seconds: float
    cost: float
    plan: Plan
    changes: Mapping[str, str]
    stage_seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """``present``: the plan as it is, None where it does not fit. ``num_candidates``: by owner, on all numbers of GPUs
    that were looked at. ``num_placements``: that were. ``num_tried``: branches whose memory was counted."""

    best: tuple[Found, ...]
    present: Found | None
    num_candidates: Mapping[str, int]
    num_placements: int
    num_tried: int


def search(
    plan: Plan,
    calibration: Calibration,
    *,
    count: int = 3,
    limits: Limits = NO_LIMITS,
) -> Searched:
    """The best plans that fit, best first, at most ``count``; none is a better one with more keys written. The first
    is exact."""
    layouts = Layouts(plan=plan, calibration=calibration, limits=limits)
    placements = Placements(plan, limits) if limits.move else None
    ranked = _ranked(layouts, placements)
    best = _Best(count=count, price_s=LEAST_GAIN * (ranked[0].bound_s if ranked else 0.0))
    present = _present(layouts, best)
    if present is not None and _keeps_to(plan, limits):
        best.add(present, fits=True)
    num_placements = num_tried = 0
    for each in ranked:
        if best.misses(each.bound_s):
            break
        placement = here(plan) if placements is None or each.runs is None else placements.placement(each.runs)
        changes = placement.changes(plan)
        choices = layouts.all_of(placement)
        # None: the only layout of an owner is the present one, elsewhere.
        if choices is None or best.misses(each.bound_s + best.price_s * _num_keys(changes)):
            continue
        one = _Search(plan=placement.put(plan), choices=choices, order=each.order, best=best, changes=changes)
        one.descend({}, [owner.name for owner in plan.owners()])
        num_placements, num_tried = num_placements + 1, num_tried + one.num_tried
    return Searched(
        best=best.sorted(),
        present=present,
        num_candidates=layouts.num_candidates(),
        num_placements=num_placements,
        num_tried=num_tried,
    )


def _keeps_to(plan: Plan, limits: Limits) -> bool:
    """Whether the plan as it is keeps to ``limits``."""
    if broken(plan, plan.stages, limits) is not None:
        return False
    used = {device for stage in plan.stages for device in stage.devices}
    return not limits.move or limits.most_gpus is None or len(used) <= limits.most_gpus


def _num_keys(changes: Mapping[str, str]) -> int:
    return sum(text.count("=") for text in changes.values())


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A placement and what no layout on it beats. ``runs``: None where all owners stay."""

    bound_s: float
    runs: Runs | None
    order: Order


def _ranked(layouts: Layouts, placements: Placements | None) -> list[_Ranked]:
    """Placements whose owners all have a layout, by their bounds."""
    plan = layouts.plan
    if placements is None:
        choices = layouts.all_of(here(plan))
        if choices is None:
            return []
        order = order_of(plan)
        fastest: dict[str, float | Floats] = {n: s for c in choices.values() for n, s in c.fastest.items()}
        return [_Ranked(float(order.last_ends(fastest)[0]), None, order)]
    found: list[_Ranked] = []
    known: dict[tuple[str, int, int], Mapping[str, float] | None] = {}
    for sets, group in groupby(placements, key=lambda runs: runs.sets):
        kept: list[Runs] = []
        times: list[dict[str, float]] = []
        fixed = [layouts.fastest(name, at) for names, at in sets if at is not None for name in names]
        for runs in group:
            parts = list(fixed)
            for name, (start, count) in runs.by_owner.items():
                if (name, start, count) not in known:
                    known[name, start, count] = layouts.fastest(name, placements.run(start, count))
                parts.append(known[name, start, count])
            if all(part is not None for part in parts):
                kept.append(runs)
                times.append({name: s for part in parts if part for name, s in part.items()})
        if kept:
            order = order_of(placements.placement(kept[0]).put(plan))
            columns: dict[str, float | Floats] = {name: np.array([t[name] for t in times]) for name in times[0]}
            bounds = np.broadcast_to(order.last_ends(columns), len(kept)).tolist()
            found += [_Ranked(bound_s, runs, order) for bound_s, runs in zip(bounds, kept, strict=True)]
    return sorted(found, key=lambda each: each.bound_s)


def _present(layouts: Layouts, best: _Best) -> Found | None:
    """The plan as it is, whatever the limits."""
    plan = layouts.plan
    choices, at = dict[str, Candidates](), dict[str, int]()
    for owner in plan.owners():
        choices[owner.name], at[owner.name] = layouts.present(owner)
    one = _Search(plan=plan, choices=choices, order=order_of(plan), best=best, changes={})
    return one.whole(at) if one.fits(at) and _memory_holds(plan) else None


def _memory_holds(plan: Plan) -> bool:
    """What ``_Search.fits`` does not count as well: a cache that holds not one sequence."""
    return not any(d.severity.value == "error" for d in check_memory(plan))


def _adds_to(found: Found, better: Found) -> bool:
    """Whether ``found`` writes all that ``better`` does, and more."""
    return all(set(_keys(text)) <= set(_keys(found.changes.get(stage, ""))) for stage, text in better.changes.items())


def _keys(text: str) -> list[str]:
    return text.split("  ") if text else []


@dataclass(slots=True, kw_only=True)
class _Best:
    """The plans to keep, at most ``count``. ``price_s``: of a written key."""

    count: int
    price_s: float
    #: (minus cost, minus number, plan): the worst first.
    kept: list[tuple[float, int, Found]] = field(default_factory=list)
    num_found: int = 0
    limit: float = math.inf

    def misses(self, cost: float) -> bool:
        """Whether nothing of such a cost can be kept."""
        return cost >= self.limit

    def add(self, found: Found, *, fits: bool = False) -> None:
        """``fits``: whether its memory was asked about."""
        if any(-worse <= found.cost and _adds_to(found, better) for worse, _, better in self.kept):
            return
        if not fits and not _memory_holds(found.plan):
            return
        self.num_found += 1
        self.kept = [kept for kept in self.kept if -kept[0] < found.cost or not _adds_to(kept[2], found)]
        heapq.heapify(self.kept)
        heapq.heappush(self.kept, (-found.cost, -self.num_found, found))
        if len(self.kept) > self.count:
            heapq.heappop(self.kept)
        # All others write more than a plan without changes.
        bare = [-cost for cost, _, kept in self.kept if not any(kept.changes.values())]
        self.limit = min([*bare, -self.kept[0][0]] if len(self.kept) == self.count else bare, default=math.inf)

    def sorted(self) -> tuple[Found, ...]:
        return tuple(found for _, _, found in sorted(self.kept, key=lambda item: (-item[0], -item[1])))


@dataclass(slots=True, kw_only=True)
class _Search:
    """On one placement; ``plan`` is on it, ``changes`` are what puts it there. ``chosen`` below: the number of the
    candidate of each owner that is decided."""

    plan: Plan
    choices: Mapping[str, Candidates]
    order: Order
    best: _Best
    changes: Mapping[str, str]
    num_tried: int = 0
    _num_keys: int = 0
    _alone: dict[tuple[str, int], bool] = field(default_factory=dict)
    _host_room: Floats = field(default_factory=lambda: np.zeros(0))
    _nodes: dict[str, NDArray[np.intp]] = field(default_factory=dict)
    _rooms: dict[str, Bytes] = field(default_factory=dict)
    _common: dict[tuple[str, str], tuple[Places, Places]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._num_keys = _num_keys(self.changes)
        self._host_room = np.array([node.host_mem_bytes for node in self.plan.cluster.nodes], float)

    def descend(self, chosen: dict[str, int], undecided: Sequence[str]) -> None:
        if not undecided:
            self.best.add(self.whole(chosen))
            return
        owner = undecided[0]
        bounds = self._bounds(chosen, owner)
        for number in np.argsort(bounds, kind="stable").tolist():
            if self.best.misses(bounds[number]):
                break  # nor can those behind it be kept
            further = {**chosen, owner: number}
            if self._may(owner, number) and (not chosen or self.fits(further)):
                self.descend(further, undecided[1:])

    def _may(self, owner: str, number: int) -> bool:
        """Whether it could be part of a best plan, whatever the others are: asked again for every choice of theirs."""
        if (owner, number) not in self._alone:
            self._alone[owner, number] = not self.choices[owner].dominated(number) and self.fits({owner: number})
        return self._alone[owner, number]

    def _bounds(self, chosen: Mapping[str, int], owner: str) -> Floats:
        """Seconds of the owners chosen, of the others at their fastest, and what the keys written cost; with each
        candidate of ``owner``."""
        times: dict[str, float | Floats] = {}
        num_keys = self._num_keys
        for other, of_other in self.choices.items():
            times.update(of_other.seconds_of(chosen[other]) if other in chosen else of_other.fastest)
            num_keys += int(of_other.num_changes[chosen[other]]) if other in chosen else 0
        of_owner = self.choices[owner]
        times.update(of_owner.seconds)
        bounds: Floats = self.order.last_ends(times) + self.best.price_s * (num_keys + of_owner.num_changes)
        return bounds

    def fits(self, chosen: Mapping[str, int]) -> bool:
        """On every GPU while every stage of the owners chosen runs, and in every node's host memory; the owners not
        chosen yet left out."""
        self.num_tried += 1
        held = {owner: self.choices[owner].held(number) for owner, number in chosen.items()}
        for owner, mine in held.items():
            room = self._room_of(owner).copy()
            for other, theirs in held.items():
                if other != owner:
                    here, there = self._shared(owner, other)
                    room[here] -= theirs.idle[there]
            if any((running > room).any() for running in mine.running.values()):
                return False
        in_host = sum(
            np.bincount(self._nodes_of(owner), each.host, len(self._host_room)) for owner, each in held.items()
        )
        return bool((in_host <= self._host_room).all())

    def _nodes_of(self, owner: str) -> NDArray[np.intp]:
        if owner not in self._nodes:
            number = {node.name: at for at, node in enumerate(self.plan.cluster.nodes)}
            self._nodes[owner] = np.array([number[device.node] for device in self.plan.stage(owner).ranks], np.intp)
        return self._nodes[owner]

    def _room_of(self, owner: str) -> Bytes:
        """Bytes of each of its GPUs that processes share, contexts taken off."""
        if owner not in self._rooms:
            of_node = {node.name: node.gpu.capacity_bytes for node in self.plan.cluster.nodes}
            room = np.array([of_node[device.node] for device in self.plan.stage(owner).ranks], np.int64)
            for other in self.choices:
                here, _ = self._shared(owner, other)
                room[here] -= CONTEXT_BYTES + COMMUNICATOR_BYTES
            self._rooms[owner] = room
        return self._rooms[owner]

    def _shared(self, owner: str, other: str) -> tuple[Places, Places]:
        """Ranks of two owners on the GPUs that they share."""
        if (owner, other) not in self._common:
            mine, theirs = self.plan.stage(owner).ranks, self.plan.stage(other).ranks
            if mine == theirs:
                self._common[owner, other] = slice(None), slice(None)
            else:
                place = {device: number for number, device in enumerate(theirs)}
                pairs = [(n, place[device]) for n, device in enumerate(mine) if device in place]
                both = np.array(pairs, np.intp).reshape(len(pairs), 2)
                self._common[owner, other] = both[:, 0], both[:, 1]
        return self._common[owner, other]

    def whole(self, chosen: Mapping[str, int]) -> Found:
        changed = self.plan
        changes, times = dict(self.changes), dict[str, float]()
        num_keys = self._num_keys
        for owner, number in chosen.items():
            of_owner = self.choices[owner]
            choice = of_owner.all[number]
            changed = choice.change(changed)
            for stage, text in choice.changes.items():
                changes[stage] = "  ".join(filter(None, (changes.get(stage), text)))
            times.update(of_owner.seconds_of(number))
            num_keys += choice.num_changes
        seconds = max(self.order.ends(times).values(), default=0.0)
        cost = seconds + self.best.price_s * num_keys
        return Found(seconds=seconds, cost=cost, plan=changed, changes=changes, stage_seconds=times)
