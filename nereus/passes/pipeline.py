"""The compiler's driver: two plans in, a transition with its certificate out, or the reasons why not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity
from nereus.ir.holdings import Topology, join_clusters
from nereus.ir.layout import IntArray
from nereus.ir.plan import Plan
from nereus.ir.schedule import Schedule, StorageKey
from nereus.ir.units import MIB
from nereus.models.memory import check_memory
from nereus.passes import refusals
from nereus.passes.certify import certify, stop_timeline
from nereus.passes.compiled import Transition, transition_digest
from nereus.passes.dag import build_dag
from nereus.passes.diff import Diff, diff
from nereus.passes.findings import all_findings
from nereus.passes.hold import hold
from nereus.passes.lifecycle import Lifecycle, lifecycle
from nereus.passes.lower import lower
from nereus.passes.manager import Hook, Instrument, Pipeline
from nereus.passes.memory import MemoryPlan, plan_memory, schedule_staging, window_staging
from nereus.passes.place import pin
from nereus.passes.route import Routed
from nereus.passes.same import Pair, stated_same
from nereus.passes.storages import StorageMap
from nereus.passes.stripes import cut_moves
from nereus.passes.tight import Stuck, tight_schedule
from nereus.passes.verify import verify_each

#: Window that is tried before reversible mode is given up: slower by message costs, and hardly any staging.
SMALL_WINDOW_BYTES = 64 * MIB


def compile_transition(
    old: Plan,
    new: Plan,
    options: Pipeline | None = None,
    *,
    allow_destroy: bool = False,
    same: Iterable[Pair] = (),
    verify: bool = True,
    hooks: Sequence[Hook] = (),
) -> Transition:
    """Raises DiagnosticError (NRS4xxx, NRS5xxx) where there is no safe transition; the old plan is never in doubt.

    ``same``: pairs of models whose weights are equal now (see ``nereus.passes.same``).
    ``verify``: invariants of every pass's result are checked before the next pass reads it (BrokenInvariant: our bug).
    """
    started = time.perf_counter()
    pipeline = options or Pipeline()
    instrument = Instrument(hooks=((verify_each,) if verify else ()) + tuple(hooks))
    run = instrument.run
    found = check_memory(new)
    errors = [d for d in found if d.severity is Severity.ERROR]
    warnings = [*(d for d in found if d.severity is not Severity.ERROR), *refusals.renamed_models(old, new)]
    errors += refusals.check_models(old, new)
    errors += refusals.check_experts(old, new)
    errors += refusals.check_machines(old, new)
    if errors:
        raise DiagnosticError(errors)
    old = pin(old)
    topology = join_clusters(old.cluster, new.cluster)
    old_holdings = run("hold", lambda: hold(old))
    stated, errors = stated_same(old, new, old_holdings, hold(new), same)
    errors += refusals.check_state(old_holdings, hold(new), new, allow_destroy=allow_destroy)
    if errors:
        raise DiagnosticError(errors)
    old_holdings = stated.united(old_holdings)
    placed = run("place", lambda: pipeline.place.apply(old, old_holdings, new, topology, stated))
    new = placed.plan
    new_holdings = stated.united(hold(new))
    changes = run("lower", lambda: lower(old, new))
    difference = run("diff", lambda: diff(old_holdings, new_holdings, topology, known=placed.models))
    if difference.lost:
        raise DiagnosticError(refusals.lost_state(difference, new))
    life = run("lifecycle", lambda: lifecycle(old, new, topology))
    storages = StorageMap(old_holdings, new_holdings, topology)
    routed = run("route", lambda: pipeline.route.apply(difference))
    schedule, memory = _schedule(pipeline, instrument, difference, storages, routed, life, topology, new)
    with instrument.timed("check"):
        dag = build_dag(
            schedule,
            life,
            topology,
            memory.state.new,
            memory.state.old,
            storage_bytes(schedule.acquire, storages, topology, new=True),
            storage_bytes(schedule.release, storages, topology, new=False),
        )
        bound = routed.bound
        findings, worst = all_findings(
            difference, schedule, dag, storages, memory, topology, moved_bytes=bound.moved_bytes
        )
    digest = transition_digest(old, new, schedule, stated.pairs)
    timeline = stop_timeline(new, schedule, life, memory)
    certificate = certify(
        new=new,
        difference=difference,
        placed=placed,
        routed=routed,
        bound=bound,
        life=life,
        memory=memory,
        worst=worst,
        schedule=schedule,
        dag=dag,
        findings=findings,
        timeline=timeline,
        digest=digest,
        compile_s=time.perf_counter() - started,
        staged_bytes=sum(
            num_bytes for _, num_bytes in storage_bytes(schedule.staged, storages, topology, new=False).values()
        ),
    )
    transition = Transition(
        old=old,
        new=new,
        old_holdings=old_holdings,
        new_holdings=new_holdings,
        topology=topology,
        diff=difference,
        changes=changes,
        choices=placed.choices,
        together=placed.together,
        same=stated.pairs,
        storages=storages,
        life=life,
        memory=memory,
        schedule=schedule,
        dag=dag,
        bound=bound,
        digest=digest,
        certificate=certificate,
        timeline=timeline,
        warnings=tuple(warnings),
        timings=tuple(instrument.timings),
    )
    instrument.show("check", transition)
    return transition


def _schedule(
    pipeline: Pipeline,
    instrument: Instrument,
    difference: Diff,
    storages: StorageMap,
    routed: Routed,
    life: Lifecycle,
    topology: Topology,
    new: Plan,
) -> tuple[Schedule, MemoryPlan]:
    """Reversible where it fits (or is asked for), else tight, else a refusal with its witness."""
    if pipeline.mode != "tight":
        waves = pipeline.schedule
        for window_bytes in dict.fromkeys((waves.window_bytes, min(waves.window_bytes, SMALL_WINDOW_BYTES))):
            tried = replace(waves, window_bytes=window_bytes)
            schedule = instrument.run("schedule", partial(tried.apply, routed))
            staging = schedule_staging(schedule, topology.num_devices)
            memory = instrument.run("memory", partial(plan_memory, storages, life, staging, topology))
            over = memory.reversible_peak - memory.capacity
            if not bool((over > 0).any()):
                return schedule, memory
            if not _staging_is_what_does_not_fit(over, staging):
                break
        if pipeline.mode == "reversible":
            raise DiagnosticError([refusals.reversible_does_not_fit(memory, topology, new)])
    # Smaller windows leave more room for storages; through host memory only where they do not help.
    through_host: tuple[Schedule, MemoryPlan] | None = None
    refusal: Diagnostic | None = None
    widest = pipeline.schedule.window_bytes
    for window_bytes in dict.fromkeys((widest, min(widest, SMALL_WINDOW_BYTES))):
        cut = replace(routed, moves=cut_moves(routed.moves, window_bytes))
        staging = window_staging(cut, window_bytes)
        memory = instrument.run("memory", partial(plan_memory, storages, life, staging, topology))
        if bool((np.maximum(memory.reversible["at engine start"], memory.tight_base) > memory.capacity).any()):
            refusal = refusals.setup_does_not_fit(memory, life, topology, new)
            continue
        with instrument.timed("schedule"):
            result = tight_schedule(difference, storages, cut, memory, topology, window_bytes)
        if isinstance(result, Stuck):
            refusal = refusals.stuck(result, memory, topology, new)
            continue
        if not result.staged:
            instrument.show("schedule", result)
            return result, memory
        through_host = through_host or (result, memory)
    if through_host is None:
        assert refusal is not None
        raise DiagnosticError([refusal])
    schedule, memory = through_host
    instrument.show("schedule", schedule)
    return schedule, memory


def _staging_is_what_does_not_fit(over: IntArray, staging: IntArray) -> bool:
    """Whether the old plan could stay whole if nothing were staged. ``over``: bytes too many per space."""
    short = np.flatnonzero(over > 0)
    return bool((short < len(staging)).all()) and bool((over[short] <= staging[short]).all())


def storage_bytes(
    keys: Iterable[StorageKey], storages: StorageMap, topology: Topology, *, new: bool
) -> dict[StorageKey, tuple[int, int]]:
    """(space, bytes) of new or of old storages (tight mode). One key may name both: a storage that changes its size."""
    found: dict[StorageKey, tuple[int, int]] = {}
    for device, stage, slot, tensor in keys:
        fit = storages.fit(stage, slot, device)
        kind = (storages.new if new else storages.old)[stage].state_set.slot(slot)
        assert kind is not None
        in_host = bool((fit.new_host if new else fit.old_host)[tensor])
        space = topology.num_devices + int(topology.node_of[device]) if in_host else device
        numel = int((fit.new if new else fit.old)[tensor])
        found[device, stage, slot, tensor] = (space, numel * kind.element_bytes)
    return found
