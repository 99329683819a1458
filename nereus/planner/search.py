"""The best plans on the GPUs that the stages have: exact, by branch and bound over the stages' processes.

A plan is a choice of one candidate for each owner of processes. What is minimised is the time of a step, plus a small
price for each key that has to be written: a change that nobody would notice is no improvement. The time is the schedule
of all stages, which only grows with any stage's time: so with some owners chosen and the others at their fastest it is
a bound, and a branch whose bound is no better than the worst of the plans kept is left. Memory is exact as well: while
a stage runs, each of its GPUs holds what that stage's candidate says, what the other owners there keep, and a context a
process. Host memory is checked on whole plans.

Two designs were considered: integer programming over pairs of candidate and GPU, which has to be told every schedule,
and this, which looks at few candidates because the fastest ones come first and mostly fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan, Stage
from nereus.models.memory.check import check_memory
from nereus.models.memory.steady import COMMUNICATOR_BYTES, CONTEXT_BYTES
from nereus.planner.calibration import Calibration
from nereus.planner.candidates import Bytes, Candidates, Held, Serves, candidates
from nereus.planner.rl_step import Order, order_of
from nereus.planner.runs import Floats

Places: TypeAlias = NDArray[np.intp]

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
    """``present``: the plan as it is, None where it does not fit. ``num_candidates``: by owner.
    ``num_tried``: branches whose memory was counted."""

    best: tuple[Found, ...]
    present: Found | None
    num_candidates: Mapping[str, int]
    num_tried: int


def search(
    plan: Plan,
    calibration: Calibration,
    *,
    count: int = 3,
    pinned: Collection[str] = (),
    serves: Serves | None = None,
) -> Searched:
    """The best plans that fit, best first, at most ``count``; none is a better one with more keys written. The first
    is exact. ``pinned``: stages whose processes stay as they are. ``serves``: whether the job's program can serve a
    stage in a layout (that of ``plan`` it can)."""
    owners = plan.owners()
    choices = {
        owner.name: candidates(plan, owner, calibration, pinned=_is_pinned(plan, owner, pinned), serves=serves)
        for owner in owners
    }
    state = _Search(plan=plan, choices=choices, room=_room(plan), count=count, order=order_of(plan))
    state.price_s = LEAST_GAIN * state.bound({})
    state.descend({}, [owner.name for owner in owners])
    best = [found for _, _, found in sorted(state.kept, key=lambda item: (-item[0], -item[1]))][:count]
    at_present = {
        name: next(n for n, candidate in enumerate(of_owner.all) if not candidate.num_changes)
        for name, of_owner in choices.items()
    }
    return Searched(
        best=tuple(best),
        present=state.whole(at_present) if state.fits(at_present) and _memory_holds(plan) else None,
        num_candidates={name: len(of_owner.all) for name, of_owner in choices.items()},
        num_tried=state.num_tried,
    )


def _memory_holds(plan: Plan) -> bool:
    """What ``_Search.fits`` does not count as well: host memory, a cache that holds not one sequence."""
    return not any(d.severity.value == "error" for d in check_memory(plan))


def _adds_to(found: Found, better: Found) -> bool:
    """Whether ``found`` writes all that ``better`` does, and more."""
    return all(set(_keys(text)) <= set(_keys(found.changes.get(stage, ""))) for stage, text in better.changes.items())


def _keys(text: str) -> list[str]:
    return text.split("  ") if text else []


def _is_pinned(plan: Plan, owner: Stage, pinned: Collection[str]) -> bool:
    return any(stage.name in pinned for stage in plan.stages if stage.name == owner.name or stage.with_ == owner.name)


def _room(plan: Plan) -> dict[Device, int]:
    """Bytes of each GPU that processes share, contexts taken off."""
    processes: dict[Device, int] = {}
    for owner in plan.owners():
        for device in owner.devices:
            processes[device] = processes.get(device, 0) + 1
    of_node = {node.name: node.gpu.capacity_bytes for node in plan.cluster.nodes}
    return {
        device: of_node[device.node] - num * (CONTEXT_BYTES + COMMUNICATOR_BYTES) for device, num in processes.items()
    }


@dataclass(slots=True, kw_only=True)
class _Search:
    """``chosen`` below: the number of the candidate of each owner that is decided."""

    plan: Plan
    choices: Mapping[str, Candidates]
    room: Mapping[Device, int]
    count: int
    order: Order
    price_s: float = 0.0
    #: (minus cost, minus number, plan): the worst first.
    kept: list[tuple[float, int, Found]] = field(default_factory=list)
    num_tried: int = 0
    num_found: int = 0
    _rooms: dict[str, Bytes] = field(default_factory=dict)
    _common: dict[tuple[str, str], tuple[Places, Places]] = field(default_factory=dict)

    def descend(self, chosen: dict[str, int], undecided: Sequence[str]) -> None:
        if not undecided:
            self._keep(chosen)
            return
        owner = undecided[0]
        bounds = self._bounds(chosen, owner)
        for number in np.argsort(bounds, kind="stable").tolist():
            if len(self.kept) == self.count and bounds[number] >= -self.kept[0][0]:
                break  # nor can those behind it be kept
            further = {**chosen, owner: number}
            if not self.choices[owner].dominated(number) and self.fits(further):
                self.descend(further, undecided[1:])

    def _bounds(self, chosen: Mapping[str, int], owner: str) -> Floats:
        """``bound`` with each candidate of ``owner``."""
        times: dict[str, float | Floats] = {}
        num_keys = 0
        for other, of_other in self.choices.items():
            times.update(of_other.all[chosen[other]].seconds if other in chosen else of_other.fastest)
            num_keys += of_other.all[chosen[other]].num_changes if other in chosen else 0
        of_owner = self.choices[owner]
        times.update(of_owner.seconds)
        bounds: Floats = self.order.last_ends(times) + self.price_s * (num_keys + of_owner.num_changes)
        return bounds

    def bound(self, chosen: Mapping[str, int]) -> float:
        """Seconds of the owners chosen, of the others at their fastest, and what the keys written cost."""
        times: dict[str, float] = {}
        num_keys = 0
        for owner, of_owner in self.choices.items():
            if owner in chosen:
                candidate = of_owner.all[chosen[owner]]
                times.update(candidate.seconds)
                num_keys += candidate.num_changes
            else:
                times.update(of_owner.fastest)
        return max(self.order.ends(times).values(), default=0.0) + self.price_s * num_keys

    def fits(self, chosen: Mapping[str, int]) -> bool:
        """On every GPU while every stage of the owners chosen runs, the owners not chosen yet left out."""
        self.num_tried += 1
        held = {owner: self.choices[owner].held(number) for owner, number in chosen.items()}
        for owner, mine in held.items():
            room = self._room_of(owner, mine).copy()
            for other, theirs in held.items():
                if other != owner:
                    here, there = self._shared(owner, mine, other, theirs)
                    room[here] -= theirs.idle[there]
            if any((running > room).any() for running in mine.running.values()):
                return False
        return True

    def _room_of(self, owner: str, held: Held) -> Bytes:
        """All candidates of an owner list its GPUs alike."""
        if owner not in self._rooms:
            self._rooms[owner] = np.array([self.room[device] for device in held.devices])
        return self._rooms[owner]

    def _shared(self, owner: str, mine: Held, other: str, theirs: Held) -> tuple[Places, Places]:
        """Places of the GPUs that two owners share; all candidates of an owner list them alike."""
        if (owner, other) not in self._common:
            place = {device: number for number, device in enumerate(theirs.devices)}
            pairs = [(n, place[device]) for n, device in enumerate(mine.devices) if device in place]
            both = np.array(pairs, np.intp).reshape(len(pairs), 2)
            self._common[owner, other] = both[:, 0], both[:, 1]
        return self._common[owner, other]

    def _keep(self, chosen: Mapping[str, int]) -> None:
        found = self.whole(chosen)
        if any(-worse <= found.cost and _adds_to(found, better) for worse, _, better in self.kept):
            return
        if not _memory_holds(found.plan):
            return
        self.num_found += 1
        self.kept = [kept for kept in self.kept if -kept[0] < found.cost or not _adds_to(kept[2], found)]
        heapq.heapify(self.kept)
        heapq.heappush(self.kept, (-found.cost, -self.num_found, found))
        if len(self.kept) > self.count:
            heapq.heappop(self.kept)

    def whole(self, chosen: Mapping[str, int]) -> Found:
        changed = self.plan
        changes: dict[str, str] = {}
        times: dict[str, float] = {}
        for owner, number in chosen.items():
            candidate = self.choices[owner].all[number]
            changed = candidate.change(changed)
            changes.update(candidate.choice.changes)
            times.update(candidate.seconds)
        seconds = max(self.order.ends(times).values(), default=0.0)
        return Found(seconds=seconds, cost=self.bound(chosen), plan=changed, changes=changes, stage_seconds=times)
