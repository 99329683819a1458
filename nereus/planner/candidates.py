"""Layouts that the processes of a stage could have on the GPUs that they have: what each takes and holds.

Degrees are all that the front end would accept; a training stage also tries micro-batches, recomputation and ZeRO
levels. A candidate that another beats in every respect (the time of each of its stages, the bytes on each GPU while
each runs and while none does, those in host memory, the keys to write) can be part of no best plan and is passed over.
Bytes are counted when they are asked for: most candidates are too slow to be looked at.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nereus.ir.plan import Plan, Stage
from nereus.models.batch import legal_micro_batches
from nereus.models.legality import legal_ep
from nereus.models.memory.neighbours import at_degrees, enough_replicas, members
from nereus.models.memory.state import copies, pipeline_index_of_ranks
from nereus.models.memory.steady import host_bytes, idle_bytes, mem_bytes_of, running_bytes
from nereus.planner.calibration import Calibration
from nereus.planner.limits import NO_LIMITS, Limits
from nereus.planner.rl_step import stage_seconds
from nereus.planner.runs import Floats
from nereus.planner.stage_runs import Settings

Bytes: TypeAlias = NDArray[np.int64]
#: Larger micro-batches are not tried.
_LARGEST_MICRO_BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of every rank, contexts apart: on its GPU while each stage runs and while none does, and in host memory."""

    running: Mapping[str, Bytes]
    idle: Bytes
    host: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``changes``: what to write, by stage; empty where the plan stays as it is. ``base``: the owner's stages alone, at
    the choice's degrees; ``settings``: what they have on top."""

    changes: Mapping[str, str]
    base: Plan
    settings: Settings

    @property
    def alone(self) -> Plan:
        """A plan of the owner's stages."""
        return replace(self.base, stages=tuple(_with(s, self.settings.get(s.name, {})) for s in self.base.stages))

    @property
    def num_changes(self) -> int:
        """Keys to write."""
        return sum(text.count("=") for text in self.changes.values())

    def change(self, plan: Plan) -> Plan:
        """``plan`` with these stages, on the GPUs that they have there."""
        by_name = {stage.name: stage for stage in self.alone.stages}
        stages = (
            replace(by_name[stage.name], devices=stage.devices, place=stage.place) if stage.name in by_name else stage
            for stage in plan.stages
        )
        return replace(plan, stages=tuple(stages))


class Candidates:
    """Choices of one owner, by the sum of their ``seconds`` (by stage); at least one."""

    def __init__(self, owner: str, found: Sequence[Choice], seconds: Mapping[str, Floats]) -> None:
        num_changes = np.array([choice.num_changes for choice in found])
        order = np.lexsort((num_changes, np.sum([*seconds.values()], axis=0)))
        self.owner = owner
        self.all = tuple(found[number] for number in order.tolist())
        self.seconds = {stage: values[order] for stage, values in seconds.items()}
        #: The least that each stage takes in any of them.
        self.fastest = {stage: float(values.min()) for stage, values in self.seconds.items()}
        self.num_changes = num_changes[order]
        self._held: dict[int, Held] = {}
        self._costs: dict[int, Floats] = {}
        self._dominated: dict[int, bool] = {}

    def seconds_of(self, number: int) -> dict[str, float]:
        return {stage: float(values[number]) for stage, values in self.seconds.items()}

    def present(self) -> int | None:
        """The number of the one that changes nothing, where it is among them."""
        return next(iter(np.flatnonzero(self.num_changes == 0).tolist()), None)

    def held(self, number: int) -> Held:
        if number not in self._held:
            self._held[number] = _held(self.all[number].alone, self.owner)
        return self._held[number]

    def dominated(self, number: int) -> bool:
        """By one that was looked at before. All that could are in front of it."""
        if number not in self._dominated:
            seconds, held = self.seconds_of(number), self.held(number)
            times = [*seconds.values(), self.num_changes[number]]
            parts = [times, held.idle, held.host, *(held.running[stage] for stage in seconds)]
            cost = np.concatenate([np.asarray(part, float) for part in parts])
            self._dominated[number] = any((other <= cost).all() for n, other in self._costs.items() if n < number)
            if not self._dominated[number]:
                self._costs[number] = cost
        return self._dominated[number]


def candidates(
    plan: Plan,
    owner: Stage,
    calibration: Calibration,
    *,
    pinned: bool = False,
    moved: bool = False,
    limits: Limits = NO_LIMITS,
) -> Candidates | None:
    """``pinned``: the present layout alone, whatever the limits. ``moved``: to other GPUs than the layout was for.
    None where there is no layout."""
    if pinned:
        chosen = list(itertools.islice(choices_of(plan, owner), 1))
    else:
        chosen = [choice for choice in choices_of(plan, owner, moved=moved) if _allowed(choice, limits)]
    if not chosen:
        return None
    layouts = [(choice.base, choice.settings) for choice in chosen]
    names = [stage.name for stage in chosen[0].base.stages]
    return Candidates(owner.name, chosen, {name: stage_seconds(layouts, name, calibration) for name in names})


def _allowed(choice: Choice, limits: Limits) -> bool:
    for (name, key), allowed in limits.values.items():
        for stage in choice.base.stages:
            if stage.name == name and str(choice.settings.get(name, {}).get(key, getattr(stage, key))) not in allowed:
                return False
    # The present layout is served.
    return limits.serves is None or not any(choice.changes.values()) or all(map(limits.serves, choice.alone.stages))


def choices_of(plan: Plan, owner: Stage, *, moved: bool = False) -> Iterator[Choice]:
    """The present choice first, unless ``moved``: then the degrees of ``plan`` are those that it had elsewhere."""
    plan = replace(plan, stages=members(plan, owner))
    owner = plan.stage(owner.name)
    if not moved:
        yield Choice(changes={}, base=plan, settings={})
    bounded = any(stage.replicas is not None for stage in plan.stages)
    known: dict[object, list[tuple[dict[str, str], Settings]]] = {}
    for text, changed in _at_all_degrees(plan, owner):
        key = tuple((stage.num_alike, stage.dp, stage.fsdp > 0, stage.micro_batch) for stage in changed.stages)
        if key not in known:
            known[key] = list(_tuned(changed, owner.name, plan))
        for more, tuned in known[key]:
            if not (moved or text or more):
                continue  # the present one
            choice = Choice(changes=_merged({owner.name: text} if text else {}, more), base=changed, settings=tuned)
            if not bounded or all(enough_replicas(stage) for stage in choice.alone.stages):
                yield choice


def _at_all_degrees(plan: Plan, owner: Stage) -> Iterator[tuple[str, Plan]]:
    arch = plan.model(owner.model).arch
    inside = min(Counter(device.node for device in owner.devices).values())
    eps = legal_ep(arch) if arch.moe is not None else (owner.ep,)
    # Micro-batches may be too large for as many replicas; others are tried with all degrees.
    smallest = tuple(replace(s, micro_batch=1) if s.is_train and s.max_tokens is None else s for s in plan.stages)
    bases = (plan, replace(plan, stages=smallest))
    for tp in (t for t in range(1, inside + 1) if inside % t == 0):
        for pp in range(1, min(len(owner.devices), arch.num_layers) + 1):
            if len(owner.devices) % (tp * pp * owner.cp):
                continue
            for ep in eps:
                for base in bases:
                    found = at_degrees(base, base.stage(owner.name), tp=tp, pp=pp, ep=ep, uneven=True)
                    if found is not None:
                        yield found.text, found.change(base)
                        break


def _tuned(plan: Plan, owner: str, present: Plan) -> Iterator[tuple[dict[str, str], Settings]]:
    """(keys to write, fields) by stage: other settings of the training stages among them. ``present``: what is
    written now."""
    trains = [stage for stage in plan.stages if stage.is_train]
    if not trains:
        yield {}, {}
        return
    for picked in itertools.product(*(_settings(plan, stage, present.stage(stage.name)) for stage in trains)):
        written: dict[str, str] = {}
        differ: dict[str, dict[str, int | str]] = {}
        for stage, fields in zip(trains, picked, strict=True):
            now = present.stage(stage.name)
            texts = [f"{key} = {value}" for key, value in fields.items() if value != getattr(now, key)]
            if texts:
                written[stage.name] = "  ".join(texts)
            differ[stage.name] = {key: value for key, value in fields.items() if value != getattr(stage, key)}
        # Sharding belongs to the processes, the other settings to the stage.
        for zero in _zeros(trains[0]):
            sharding = {owner: f"zero = {zero}"} if zero != present.stage(trains[0].name).zero else {}
            common: dict[str, int | str] = {"zero": zero} if zero != trains[0].zero else {}
            yield _merged(written, sharding), {s.name: {**differ.get(s.name, {}), **common} for s in plan.stages}


def _with(stage: Stage, fields: Mapping[str, int | str]) -> Stage:
    return replace(stage, **fields) if fields else stage  # type: ignore[arg-type]


def _settings(plan: Plan, stage: Stage, present: Stage) -> Iterator[dict[str, int | str]]:
    """Values of ``micro_batch`` and ``recompute``, the present ones first where they are legal."""
    sizes = [stage.micro_batch]
    if stage.max_tokens is None:
        legal = legal_micro_batches(plan.workload.mini_batch, stage.dp, limit=_LARGEST_MICRO_BATCH)
        sizes = [size for size in legal if size & (size - 1) == 0 or size == present.micro_batch]
    for size in sizes:
        for recompute in dict.fromkeys((stage.recompute, "none", "full")):
            yield {"micro_batch": size, "recompute": recompute}


def _zeros(stage: Stage) -> list[int]:
    return [stage.zero] if stage.fsdp or stage.num_alike == 1 else sorted({stage.zero, max(stage.zero, 1)})


def _merged(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    if not first or not second:
        return {name: text for name, text in (first or second).items() if text}
    found = {name: "  ".join(filter(None, (first.get(name), second.get(name)))) for name in (*first, *second)}
    return {name: text for name, text in found.items() if text}


def _held(plan: Plan, name: str) -> Held:
    owner = plan.stage(name)
    nodes = {node.name: mem_bytes_of(node) for node in plan.cluster.nodes}
    of_rank = np.array([nodes[device.node] for device in owner.ranks])
    index = np.array(pipeline_index_of_ranks(owner))
    running = {stage.name: np.zeros(len(index), np.int64) for stage in plan.stages}
    idle = np.zeros(len(index), np.int64)
    all_copies = copies(plan)
    for mem_bytes in dict.fromkeys(of_rank.tolist()):
        here = of_rank == mem_bytes
        for stage in plan.stages:
            running[stage.name][here] = np.array(running_bytes(plan, all_copies, stage, mem_bytes))[index[here]]
        idle[here] = np.array(idle_bytes(plan, all_copies, owner, mem_bytes))[index[here]]
    return Held(running=running, idle=idle, host=np.array(host_bytes(all_copies, owner), np.int64)[index])
