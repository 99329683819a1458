"""From holdings to holdings: the passes that move bytes, without a plan around them.

For what is described rather than planned: a framework's live objects before and after, a checkpoint, the survivors of
a failure. Both sides have their memory already, so nothing is placed, acquired or released; what remains is who sends
what to whom, in which order, and the proof that every element arrives once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from nereus.ir.holdings import Holdings, Topology
from nereus.passes import check
from nereus.passes.compiled import Exchange, schedule_digest
from nereus.passes.diff import Diff, diff
from nereus.passes.manager import Pipeline
from nereus.passes.route import Route
from nereus.passes.storages import StorageMap


class ExchangeError(ValueError):
    """Something that is wanted is nowhere, or differs in kind: each sentence names tensors or slots."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


def compile_exchange(
    old: Holdings, new: Holdings, topology: Topology, options: Pipeline | None = None, *, origin: bytes = b""
) -> Exchange:
    """Raises ExchangeError. ``origin``: what both holdings were made from, for the digest."""
    pipeline = options or Pipeline(route=Route(flow_bound=0))
    _check_slots(old, new)
    difference = diff(old, new, topology, derive=False)
    _check_found(difference)
    routed = pipeline.route.apply(difference)
    schedule = pipeline.schedule.apply(routed)
    findings = (
        check.check_coverage(difference, schedule),
        check.check_sources(difference, schedule),
        check.check_bytes(difference, schedule, routed.bound.moved_bytes),
    )
    broken = [f"{f.name}: {f.evidence}" for f in findings if not f.holds]
    assert not broken, broken
    return Exchange(
        topology=topology,
        diff=difference,
        storages=StorageMap(old, new, topology),
        schedule=schedule,
        digest=schedule_digest(hashlib.sha256(origin), schedule),
    )


def _check_slots(old: Holdings, new: Holdings) -> None:
    """A slot is filled from the same slot in the same dtype: bits move, values are never converted."""
    reasons = []
    for state_set in new.sets:
        held = [s for source in old.of_model(state_set.model) for s in source.slots]
        for slot in state_set.slots:
            alike = [s for s in held if s.name.rpartition(":")[0] == slot.name.rpartition(":")[0]]
            if not alike:
                reasons.append(f"{state_set.stage} wants {slot.name}, which nothing holds")
            elif all(s.dtype != slot.dtype for s in alike):
                found = ", ".join(sorted({s.dtype for s in alike}))
                reasons.append(f"{state_set.stage} wants {slot.name} as {slot.dtype}, and it is held as {found}")
    if reasons:
        raise ExchangeError(reasons)


def _check_found(difference: Diff) -> None:
    """Every wanted element has a living holder."""
    reasons: list[str] = []
    for number, table in enumerate(difference.tables):
        geometry = difference.geometries[difference.geometry_of[number]]
        missing: dict[str, int] = {}
        for cls, rows in enumerate(table.intervals_of_classes()):
            if difference.wanters[number][cls] and not difference.holders[number][cls]:
                for row in rows.tolist():
                    name = geometry.cells.tensors[int(geometry.cells.tensor[table.cell[row]])].name
                    missing[name] = missing.get(name, 0) + int(table.stop[row] - table.start[row])
        for name, count in list(missing.items())[:8]:
            reasons.append(f"{count:,} elements of {name} {', '.join(table.slots)} are wanted and held by none")
        if len(missing) > 8:
            reasons.append(f"and parts of {len(missing) - 8} more tensors")
    if reasons:
        raise ExchangeError(reasons)
