"""What would make a stage fit: changes of one or a few keys, each tested by evaluating the model again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nereus.ir.plan import Plan, Stage
from nereus.ir.units import GIB
from nereus.models.batch import accumulation
from nereus.models.memory.cache import cache_tokens
from nereus.models.memory.neighbours import members, neighbours
from nereus.models.memory.report import MemoryReport, MemoryRow
from nereus.models.memory.state import owner_of
from nereus.models.memory.steady import steady_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """``text``: what to write, e.g. ``micro_batch = 2`` or ``critic.train { idle = offload }``."""

    text: str
    need_bytes: int


_Change = tuple[str, Callable[[Plan], Plan]]


def remedies(plan: Plan, row: MemoryRow, report: MemoryReport) -> tuple[Remedy, ...]:
    """Single changes that make ``row.stage`` fit and break no other stage; if none does, the shortest combination."""
    before = _Before(
        broken=frozenset(r.stage for r in report.rows if not r.fits),
        held={stage.name: held for stage, held, _ in cache_tokens(plan, report)},
    )
    found: dict[str, Remedy] = {}
    kinds: set[str] = set()
    for kind, text, change in _single_changes(plan, plan.stage(row.stage), row):
        if kind not in kinds and (remedy := _tested(change(plan), row.stage, text, before)) is not None:
            found[text] = remedy
            # Nearest first: a second pp, ep or zero says nothing that the first does not.
            kinds |= {kind} & _FIRST_ONLY
    if found:
        return tuple(found.values())
    best: tuple[int, Remedy] | None = None
    owner = owner_of(plan, plan.stage(row.stage))
    for base in (None, *neighbours(plan, owner)):
        changes = 0 if base is None else len(base.keys)
        if best is not None and changes >= best[0]:
            break
        combined, texts = plan, dict[str, str]()
        if base is not None:
            combined, texts = base.change(plan), {"degrees": base.text}
        steps = [("", "", _unchanged), *_combination(combined, combined.stage(row.stage), row)]
        for key, text, change in steps:
            combined = change(combined)
            if key:
                texts[key] = text
            tries = [(tuple(texts.values()), combined)]
            tries += [((*tries[0][0], more), less(combined)) for more, less in _smaller_caches(combined, row.stage)]
            fitting = [(len(t), r) for t, p in tries if (r := _tested(p, row.stage, ", ".join(t), before)) is not None]
            if fitting:
                size, remedy = fitting[0]
                size += max(0, changes - 1)
                best = (size, remedy) if best is None or size < best[0] else best
                break
    return () if best is None else (best[1],)


#: Kinds of change of which only the nearest that fits is offered.
_FIRST_ONLY = frozenset({"zero", "pp", "ep", "fsdp"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """The plan without a remedy: stages that do not fit, tokens that each engine's cache holds."""

    broken: frozenset[str]
    held: dict[str, int]


def _tested(changed: Plan, stage: str, text: str, before: _Before) -> Remedy | None:
    after = steady_state(changed)
    if any(not row.fits and (row.stage == stage or row.stage not in before.broken) for row in after.rows):
        return None
    if any(not host.fits for host in after.hosts):
        return None
    for engine, held, _ in cache_tokens(changed, after):
        before_it = before.held.get(engine.name, 0)
        if held < changed.workload.seq_len and (engine.name == stage or before_it >= changed.workload.seq_len):
            return None
    return Remedy(text=text, need_bytes=after.worst(stage).need_bytes)


def _single_changes(plan: Plan, stage: Stage, row: MemoryRow) -> Iterator[tuple[str, str, Callable[[Plan], Plan]]]:
    """(kind, text, change)."""
    owner = owner_of(plan, stage)
    yield from (("kv_cache", *change) for change in _smaller_caches(plan, stage.name))
    if stage.kind != "generate":
        yield from (("micro_batch", *change) for change in _smaller_micro_batch(plan, stage, row))
    if stage.is_train and stage.recompute != "full":
        yield ("recompute", *_set(stage.name, "recompute", "full"))
    for level in _zero_levels(owner):
        yield "zero", f"zero = {level}", _zero_setter(plan, owner, level)
    yield from (("fsdp", *change) for change in _larger_shard_groups(plan, owner))
    for near in neighbours(plan, owner):
        if len(near.keys) == 1:
            yield near.keys[0], near.text, near.change
    for other in _resident_neighbours(row):
        yield "idle", f"{other} {{ idle = offload }}", _setter(other, idle="offload")


def _combination(plan: Plan, stage: Stage, row: MemoryRow) -> Iterator[tuple[str, str, Callable[[Plan], Plan]]]:
    """(key, text, change), cheapest in time first; each is added to those before it, or takes the place of its key."""
    owner = owner_of(plan, stage)
    levels = _zero_levels(owner)
    if 1 in levels:
        yield "zero", "zero = 1", _zero_setter(plan, owner, 1)
    for other in _resident_neighbours(row):
        yield other, f"{other} {{ idle = offload }}", _setter(other, idle="offload")
    if stage.micro_batch > 1 and stage.max_tokens is None:
        yield ("micro_batch", *_set(stage.name, "micro_batch", 1))
    if stage.is_train and stage.recompute != "full":
        yield ("recompute", *_set(stage.name, "recompute", "full"))
    for level in levels:
        if level > 1:
            yield "zero", f"zero = {level}", _zero_setter(plan, owner, level)


def _unchanged(plan: Plan) -> Plan:
    return plan


def _zero_levels(owner: Stage) -> tuple[int, ...]:
    """ZeRO levels above the present one. DeepSpeed's pipelines know ZeRO-1 only."""
    if not owner.is_train or owner.fsdp or owner.dp * owner.cp == 1:
        return ()
    highest = 1 if owner.backend == "deepspeed" and owner.pp > 1 else 3
    return tuple(range(owner.zero + 1, highest + 1))


def _zero_setter(plan: Plan, owner: Stage, level: int) -> Callable[[Plan], Plan]:
    names = {s.name for s in members(plan, owner)}

    def change(plan: Plan) -> Plan:
        return replace(plan, stages=tuple(replace(s, zero=level) if s.name in names else s for s in plan.stages))

    return change


def _smaller_caches(plan: Plan, name: str) -> Iterator[_Change]:
    """A ``kv_cache`` for the engine that runs, or for one that stays resident beside: the largest in whole GiB with
    which every stage of those GPUs fits, else stage ``name``; none that would not hold one sequence."""
    report = steady_state(plan)
    row = report.worst(name)
    for engine, _, per_token in cache_tokens(plan, report):
        if not _cache_in(row, engine.name):
            continue
        for rows in (report.rows, tuple(r for r in report.rows if r.stage == name)):
            held = [(r, cache) for r in rows if (cache := _cache_in(r, engine.name))]
            size = min(cache - (r.need_bytes - r.capacity_bytes) for r, cache in held) // GIB
            if size * GIB >= max(1, plan.workload.seq_len * per_token):
                text = f"kv_cache = {size} GiB"
                text = text if engine.name == name else f"{engine.name} {{ {text} }}"
                if engine.mem_fraction is not None:
                    text += f" instead of mem = {engine.mem_fraction:g}"
                yield text, _setter(engine.name, kv_cache_bytes=size * GIB, mem_fraction=None)
                break


def _cache_in(row: MemoryRow, engine: str) -> int:
    """Bytes of the engine's cache, running or resident."""
    return sum(part.num_bytes for part in row.parts if part.stage == engine and part.label.endswith("kv cache"))


def _smaller_micro_batch(plan: Plan, stage: Stage, row: MemoryRow) -> Iterator[_Change]:
    """The largest smaller one that keeps mini_batch = dp x micro_batch x accumulation and fits."""
    if stage.max_tokens is not None:
        return
    for size in range(stage.micro_batch - 1, 0, -1):
        if stage.is_train and accumulation(plan.workload.mini_batch, stage.dp, size) is None:
            continue
        text, change = _set(stage.name, "micro_batch", size)
        if steady_state(change(plan)).worst(stage.name).fits:
            yield text, change
            return


def _larger_shard_groups(plan: Plan, owner: Stage) -> Iterator[_Change]:
    """The smallest larger FSDP group with which it might fit comes first: it gathers over the fewest ranks."""
    if not owner.fsdp:
        return
    names = {s.name for s in members(plan, owner)}
    for size in range(owner.fsdp + 1, owner.num_alike + 1):
        if owner.num_alike % size == 0:

            def change(plan: Plan, size: int = size) -> Plan:
                stages = tuple(replace(s, fsdp=size) if s.name in names else s for s in plan.stages)
                return replace(plan, stages=stages)

            yield f"fsdp = {size}" if size < owner.num_alike else "fsdp = full", change


def _resident_neighbours(row: MemoryRow) -> tuple[str, ...]:
    """Stages whose idle state lies beside the running one, largest first."""
    beside: dict[str, int] = {}
    for part in row.parts:
        if part.stage not in ("", row.stage):
            beside[part.stage] = beside.get(part.stage, 0) + part.num_bytes
    return tuple(sorted(beside, key=lambda name: -beside[name]))


def _set(stage: str, key: str, value: int | str) -> _Change:
    return f"{key} = {value}", _setter(stage, **{key: value})


def _setter(stage: str, **changed: int | str | None) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        stages = tuple(replace(s, **changed) if s.name == stage else s for s in plan.stages)  # type: ignore[arg-type]
        return replace(plan, stages=stages)

    return change
