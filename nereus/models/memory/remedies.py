"""What would make a stage fit: changes of one or a few keys, each tested by evaluating the model again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nereus.ir.plan import Plan, Stage
from nereus.ir.units import GIB
from nereus.models.batch import accumulation
from nereus.models.legality import tp_refusals
from nereus.models.memory.cache import cache_tokens
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
    changes = tuple(_single_changes(plan, plan.stage(row.stage), row))
    found = [remedy for text, change in changes if (remedy := _tested(change(plan), row.stage, text, before))]
    if found:
        return tuple(found)
    best: tuple[int, Remedy] | None = None
    for base in (None, *_other_degrees(plan, owner_of(plan, plan.stage(row.stage)))):
        combined, texts = (plan, []) if base is None else (base[1](plan), [base[0]])
        for text, change in _combination(combined, combined.stage(row.stage), row):
            combined = change(combined)
            texts.append(text)
            tries = [(texts, combined)]
            tries += [([*texts, more], smaller(combined)) for more, smaller in _smaller_caches(combined, row.stage)]
            fitting = [(len(t), r) for t, p in tries if (r := _tested(p, row.stage, ", ".join(t), before)) is not None]
            if fitting:
                best = min((fitting[0], *((best,) if best else ())), key=lambda found: found[0])
                break
    return () if best is None else (best[1],)


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


def _single_changes(plan: Plan, stage: Stage, row: MemoryRow) -> Iterator[_Change]:
    owner = owner_of(plan, stage)
    yield from _smaller_caches(plan, stage.name)
    if stage.kind != "generate":
        yield from _smaller_micro_batch(plan, stage, row)
    if stage.is_train and stage.recompute != "full":
        yield _set(stage.name, "recompute", "full")
    if owner.is_train and not owner.zero and not owner.fsdp and owner.dp > 1:
        yield _set(owner.name, "zero", 1)
    yield from _larger_shard_groups(plan, owner)
    yield from _other_degrees(plan, owner)
    for other in _resident_neighbours(row):
        yield f"{other} {{ idle = offload }}", _setter(other, idle="offload")


def _combination(plan: Plan, stage: Stage, row: MemoryRow) -> Iterator[_Change]:
    """Cheapest in time first; each is added to those before it."""
    owner = owner_of(plan, stage)
    if owner.is_train and not owner.zero and not owner.fsdp and owner.dp > 1:
        yield _set(owner.name, "zero", 1)
    for other in _resident_neighbours(row):
        yield f"{other} {{ idle = offload }}", _setter(other, idle="offload")
    if stage.micro_batch > 1 and stage.max_tokens is None:
        yield _set(stage.name, "micro_batch", 1)
    if stage.is_train and stage.recompute != "full":
        yield _set(stage.name, "recompute", "full")


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


def _other_degrees(plan: Plan, owner: Stage) -> Iterator[_Change]:
    """More tensor parallelism, out of data parallelism or out of the pipeline, inside a node."""
    if owner.ep > 1:
        return
    inside = min(sum(d.node == node for d in owner.devices) for node in {d.node for d in owner.devices})
    names = {s.name for s in plan.stages if s.service is None and owner_of(plan, s).name == owner.name}
    num_layers = plan.model(owner.model).arch.num_layers
    for tp in range(owner.tp + 1, inside + 1):
        if inside % tp or any(_cannot_cut(plan, plan.stage(name), tp) for name in names):
            continue
        pipelines = {owner.pp, owner.pp * owner.tp // tp} if owner.pp * owner.tp % tp == 0 else {owner.pp}
        for pp in sorted(pipelines, reverse=True):
            if pp < 1 or num_layers % pp or len(owner.devices) % (tp * pp * owner.cp):
                continue
            dp = len(owner.devices) // (tp * pp * owner.cp)
            micro_batch = max(plan.stage(name).micro_batch for name in names)
            if owner.is_train and accumulation(plan.workload.mini_batch, dp, micro_batch) is None:
                continue
            text = f"tp = {tp}" if pp == owner.pp else f"tp = {tp}  pp = {pp}"
            fsdp = owner.fsdp
            if fsdp and (fsdp == owner.dp or dp % fsdp):
                text += "" if fsdp == owner.dp else "  fsdp = full"
                fsdp = dp
            if fsdp == 1 and dp > 1:
                continue  # replicas that would not synchronise
            yield text, _degrees_setter(names, tp=tp, pp=pp, dp=dp, fsdp=fsdp, num_layers=num_layers)


def _cannot_cut(plan: Plan, stage: Stage, tp: int) -> bool:
    model = plan.model(stage.model)
    return bool(tp_refusals(model.arch, tp, head=model.head, backend=stage.framework))


def _larger_shard_groups(plan: Plan, owner: Stage) -> Iterator[_Change]:
    """The smallest larger FSDP group with which it might fit comes first: it gathers over the fewest ranks."""
    if not owner.fsdp:
        return
    names = {s.name for s in plan.stages if s.service is None and owner_of(plan, s).name == owner.name}
    for size in range(owner.fsdp + 1, owner.dp + 1):
        if owner.dp % size == 0:

            def change(plan: Plan, size: int = size) -> Plan:
                stages = tuple(replace(s, fsdp=size) if s.name in names else s for s in plan.stages)
                return replace(plan, stages=stages)

            yield f"fsdp = {size}" if size < owner.dp else "fsdp = full", change


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


def _degrees_setter(
    names: set[str], *, tp: int, pp: int, dp: int, fsdp: int, num_layers: int
) -> Callable[[Plan], Plan]:
    split = (num_layers // pp,) * pp

    def changed(plan: Plan, stage: Stage) -> Stage:
        # Experts that were cut like everything else still are.
        etp = tp if plan.model(stage.model).arch.moe is not None and stage.etp == stage.tp else stage.etp
        stage = replace(stage, tp=tp, pp=pp, dp=dp, etp=etp, fsdp=fsdp, sp=True)
        return replace(stage, vp=1, pp_split=split, chunks=())

    def change(plan: Plan) -> Plan:
        return replace(plan, stages=tuple(changed(plan, s) if s.name in names else s for s in plan.stages))

    return change
