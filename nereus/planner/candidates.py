"""Layouts that the processes of a stage could have on the GPUs that they have: what each takes and holds.

Degrees are all that the front end would accept; a training stage also tries micro-batches, recomputation and ZeRO
levels. A candidate that another beats in every respect (the time of each of its stages, the bytes on each GPU while
each runs and while none does, those in host memory, the keys to write) can be part of no best plan and is passed over.
Bytes are counted when they are asked for: most candidates are too slow to be looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nereus.ir.plan import Plan, Stage
from nereus.models.batch import legal_micro_batches
from nereus.models.legality import legal_ep
from nereus.models.memory.neighbours import at_degrees, enough_replicas, members
from nereus.models.memory.state import pipeline_index_of_ranks
from nereus.models.memory.steady import host_bytes, idle_bytes, mem_bytes_of, running_bytes
from nereus.planner.calibration import Calibration
from nereus.planner.limits import NO_LIMITS, Limits
from nereus.planner.rl_step import stage_seconds
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """``seconds``: by stage."""

    owner: str
    choice: Choice
    num_changes: int
    seconds: Mapping[str, float]

    def change(self, plan: Plan) -> Plan:
        """``plan`` with these stages, on the GPUs that they have there."""
        by_name = {stage.name: stage for stage in self.choice.alone.stages}
        stages = (
            replace(by_name[stage.name], devices=stage.devices, place=stage.place) if stage.name in by_name else stage
            for stage in plan.stages
        )
        return replace(plan, stages=tuple(stages))


class Candidates:
    """Those of one owner, by the sum of their seconds; at least one."""

    def __init__(self, found: Iterable[Candidate]) -> None:
        self.all = tuple(sorted(found, key=lambda c: (sum(c.seconds.values()), c.num_changes)))
        first = self.all[0]
        self.seconds = {stage: np.array([c.seconds[stage] for c in self.all]) for stage in first.seconds}
        #: The least that each stage takes in any of them.
        self.fastest = {stage: float(values.min()) for stage, values in self.seconds.items()}
        self.num_changes = np.array([c.num_changes for c in self.all])
        self._held: dict[int, Held] = {}
        self._costs: dict[int, NDArray[np.float64]] = {}
        self._dominated: dict[int, bool] = {}

    def held(self, number: int) -> Held:
        if number not in self._held:
            self._held[number] = _held(self.all[number].choice.alone, self.all[number].owner)
        return self._held[number]

    def dominated(self, number: int) -> bool:
        """By one that was looked at before. All that could are in front of it."""
        if number not in self._dominated:
            candidate, held = self.all[number], self.held(number)
            times = [*candidate.seconds.values(), candidate.num_changes]
            parts = [times, held.idle, held.host, *(held.running[stage] for stage in candidate.seconds)]
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
        chosen = list(islice(choices_of(plan, owner), 1))
    else:
        chosen = [choice for choice in choices_of(plan, owner, moved=moved) if _allowed(choice, limits)]
    if not chosen:
        return None
    layouts = [(choice.base, choice.settings) for choice in chosen]
    seconds = {name: stage_seconds(layouts, name, calibration) for name in (s.name for s in chosen[0].base.stages)}
    return Candidates(
        Candidate(
            owner=owner.name,
            choice=choice,
            num_changes=sum(text.count("=") for text in choice.changes.values()),
            seconds={name: float(values[number]) for name, values in seconds.items()},
        )
        for number, choice in enumerate(chosen)
    )


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
    seen = set()
    if not moved:
        seen.add(_settings_of(plan, {}))
        yield Choice(changes={}, base=plan, settings={})
    bounded = any(stage.replicas is not None for stage in plan.stages)
    for text, changed in _at_all_degrees(plan, owner):
        for more, tuned in _tuned(changed, owner.name, plan):
            settings = _settings_of(changed, tuned)
            if settings in seen:
                continue
            seen.add(settings)
            choice = Choice(changes=_merged({owner.name: text} if text else {}, more), base=changed, settings=tuned)
            if not bounded or all(enough_replicas(stage) for stage in choice.alone.stages):
                yield choice


_DIFFER = ("tp", "pp", "dp", "ep", "etp", "sp", "vp", "fsdp", "zero", "micro_batch", "recompute", "pp_split")


def _settings_of(plan: Plan, settings: Settings) -> tuple[object, ...]:
    """All that differs between choices: stages with a thousand GPUs are slow to compare whole."""
    found: list[object] = []
    for stage in plan.stages:
        own = settings.get(stage.name, {})
        found += [own.get(key, getattr(stage, key)) for key in _DIFFER] if own else _degrees_of(stage)
    return tuple(found)


_degrees_of = attrgetter(*_DIFFER)


def _at_all_degrees(plan: Plan, owner: Stage) -> Iterator[tuple[str, Plan]]:
    arch = plan.model(owner.model).arch
    inside = min(Counter(device.node for device in owner.devices).values())
    eps = legal_ep(arch) if arch.moe is not None else (owner.ep,)
    # Micro-batches may be too large for as many replicas; others are tried with all degrees.
    smallest = tuple(replace(s, micro_batch=1) if s.is_train and s.max_tokens is None else s for s in plan.stages)
    for tp in (t for t in range(1, inside + 1) if inside % t == 0):
        for pp in range(1, min(len(owner.devices), arch.num_layers) + 1):
            for ep in eps:
                for base in (plan, replace(plan, stages=smallest)):
                    found = at_degrees(base, base.stage(owner.name), tp=tp, pp=pp, ep=ep, uneven=True)
                    if found is not None:
                        yield found.text, found.change(base)
                        break


def _tuned(plan: Plan, owner: str, present: Plan) -> Iterator[tuple[dict[str, str], Settings]]:
    """(keys to write, fields) by stage: other settings of the training stages among them. ``present``: what is
    written now."""
    choices: list[tuple[dict[str, str], dict[str, dict[str, int | str]]]] = [({}, {})]
    for stage in plan.stages:
        if not stage.is_train:
            continue
        now, wider = present.stage(stage.name), []
        for fields in _settings(plan, stage, now):
            # Sharding belongs to the processes, the other settings to the stage.
            common = {"zero": fields["zero"]} if fields["zero"] != stage.zero else {}
            differ = {key: value for key, value in fields.items() if value != getattr(stage, key)}
            texts = {key: f"{key} = {value}" for key, value in fields.items() if value != getattr(now, key)}
            sharding = texts.pop("zero", "")
            written = _merged({stage.name: "  ".join(texts.values())}, {owner: sharding})
            for changes, before in choices:
                after = {s.name: {**before.get(s.name, {}), **(differ if s is stage else common)} for s in plan.stages}
                wider.append((_merged(changes, written), after))
        choices = wider
    yield from choices


def _with(stage: Stage, fields: Mapping[str, int | str]) -> Stage:
    return replace(stage, **fields) if fields else stage  # type: ignore[arg-type]


def _settings(plan: Plan, stage: Stage, present: Stage) -> Iterator[dict[str, int | str]]:
    """Values of ``micro_batch``, ``recompute`` and ``zero``, the present ones first where they are legal."""
    sizes = [stage.micro_batch]
    if stage.max_tokens is None:
        legal = legal_micro_batches(plan.workload.mini_batch, stage.dp, limit=_LARGEST_MICRO_BATCH)
        sizes = [size for size in legal if size & (size - 1) == 0 or size == present.micro_batch]
    zeros = [stage.zero] if stage.fsdp or stage.num_alike == 1 else sorted({stage.zero, max(stage.zero, 1)})
    for size in sizes:
        for recompute in dict.fromkeys((stage.recompute, "none", "full")):
            for zero in zeros:
                yield {"micro_batch": size, "recompute": recompute, "zero": zero}


def _merged(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    names = dict.fromkeys((*first, *second))
    return {name: "  ".join(filter(None, (first.get(name), second.get(name)))) for name in names}


def _held(plan: Plan, name: str) -> Held:
    owner = plan.stage(name)
    nodes = {node.name: mem_bytes_of(node) for node in plan.cluster.nodes}
    of_rank = np.array([nodes[device.node] for device in owner.ranks])
    index = np.array(pipeline_index_of_ranks(owner))
    running = {stage.name: np.zeros(len(index), np.int64) for stage in plan.stages}
    idle = np.zeros(len(index), np.int64)
    for mem_bytes in dict.fromkeys(of_rank.tolist()):
        here = of_rank == mem_bytes
        for stage in plan.stages:
            running[stage.name][here] = np.array(running_bytes(plan, stage, mem_bytes))[index[here]]
        idle[here] = np.array(idle_bytes(plan, owner, mem_bytes))[index[here]]
    return Held(running=running, idle=idle, host=np.array(host_bytes(plan, owner), np.int64)[index])
