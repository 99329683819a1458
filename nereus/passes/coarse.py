"""coarse: moved bytes, transfer and stop of a transition, estimated from layouts and ranges of devices alone.

No atoms, no intervals of tensors, no loop over devices: every figure is a closed form over degrees, evaluated for all
GPUs or nodes at once (``coarse_grid``, ``coarse_regions``). For searches over plans; what is executed is compiled.

Exact for the placement that the plans list: bytes of slots that are not sharded over data parallelism, where degrees
divide what they cut; what enters a node where one copy makes weights that another one there wants is at most that much
less. Estimated: shares of flat buffers under another tensor parallelism (average over a layer), what leaves a holder,
memory (no staging), and the engine's room beside training. ``place`` may find a better placement than
the listed one; the estimate does not look for it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from nereus.ir.plan import Plan
from nereus.models.priors import MESSAGE_S, commit_s, rest_of_rollouts_s
from nereus.passes.coarse_flow import Loads, add_model, host_copy_s
from nereus.passes.coarse_life import CoarseLife, coarse_life
from nereus.passes.coarse_side import Side, side_of
from nereus.passes.coarse_space import Space, space_of

#: Predicted over bound, as the router and the scheduler reach it.
OVER_BOUND = 1.03
#: Plans whose sides are remembered, newest first.
KNOWN_PLANS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseEstimate:
    """``mode``: none, reversible or tight. ``peak_bytes_max``: on the fullest GPU, without staging buffers."""

    mode: str
    moved_bytes: int
    node_in_bytes_max: int
    bound_transfer_s: float
    limited_by: str
    transfer_s: float
    drain_s: float
    setup_s: float
    groups_s: float
    commit_s: float
    stop_s: float
    background_s: float
    peak_bytes_max: int
    capacity_bytes: int
    #: "stage slot" of state that nothing held before.
    fresh: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.peak_bytes_max <= self.capacity_bytes


_known: OrderedDict[int, tuple[Plan, Side]] = OrderedDict()


def side(plan: Plan) -> Side:
    """What depends on one plan only. Remembered by identity (plans are immutable), so that a search pays for a plan
    once however many others it is compared with."""
    found = _known.get(id(plan))
    if found is None or found[0] is not plan:
        found = _known[id(plan)] = (plan, side_of(plan))
        while len(_known) > KNOWN_PLANS:
            _known.popitem(last=False)
    return found[1]


def forget(plan: Plan | None = None) -> None:
    """What is remembered of ``plan``, or of all."""
    if plan is None:
        _known.clear()
    else:
        _known.pop(id(plan), None)


def coarse(old: Plan, new: Plan) -> CoarseEstimate:
    """For legal plans with the same tensors per model; refusals are the compiler's to find."""
    return estimate(side(old), side(new))


def estimate(old: Side, new: Side) -> CoarseEstimate:
    space = space_of(old, new)
    loads = Loads.none(space)
    for model in dict.fromkeys(part.model.name for part in new.parts):
        add_model(loads, old, new, model, space)
    gone = {part.model.name for part in old.parts} - {part.model.name for part in new.parts}
    for model in sorted(gone):
        add_model(loads, old, new, model, space)
    life = coarse_life(old, new, space)
    bound, limited = _bound(loads, space)
    message = MESSAGE_S if bound else 0.0
    transfer = bound * OVER_BOUND + message
    moved = round(loads.moved_bytes)
    mode, peak, capacity = _memory(loads, life, space)
    nothing = not moved and not life.num_ops and _same_state(old, new, space)
    drain = 0.0 if nothing else _drain_s(new.plan, life)
    commit = 0.0 if nothing else commit_s(_num_participants(new, space))
    # As in the timeline: what is set up comes first; communicators beside the transfer unless memory is tight.
    before, groups = life.start_s + life.spawn_s, float(life.groups_s.max(initial=0.0))
    setup = float(before.max(initial=0.0))
    with_groups = float((before + life.groups_s).max(initial=0.0))
    if mode == "tight":
        stop = with_groups + transfer
    else:
        stop = max(setup + transfer, with_groups)
    return CoarseEstimate(
        mode="none" if nothing else mode,
        moved_bytes=moved,
        node_in_bytes_max=round(float(loads.node_in_bytes.max(initial=0.0))),
        bound_transfer_s=bound + message,
        limited_by=limited,
        transfer_s=transfer,
        drain_s=drain,
        setup_s=setup,
        groups_s=groups,
        commit_s=commit,
        stop_s=0.0 if nothing else drain + stop + commit,
        background_s=life.background_s,
        peak_bytes_max=peak,
        capacity_bytes=capacity,
        fresh=tuple(dict.fromkeys(loads.fresh)),
    )


def _same_state(old: Side, new: Side, space: Space) -> bool:
    """Whether every copy stays as it is."""
    before, after = ({part.stage: part for part in side.parts} for side in (old, new))
    return before.keys() == after.keys() and all(
        (part.layout, part.slots) == (before[name].layout, before[name].slots)
        and np.array_equal(space.devices(new, part.where), space.devices(old, before[name].where))
        for name, part in after.items()
    )


def _bound(loads: Loads, space: Space) -> tuple[float, str]:
    candidates = (
        ("GPU intake", loads.gpu_in_s),
        ("GPU output", loads.gpu_out_s),
        ("NIC intake", loads.node_in_bytes * space.nic_s),
        ("NIC output", loads.node_out_bytes * space.nic_s),
        ("copying inside host memory", host_copy_s(loads)),
    )
    best, limited = 0.0, "nothing moves"
    for what, seconds in candidates:
        most = float(seconds.max(initial=0.0))
        if most > best:
            best, limited = most, what
    return best, limited


def _memory(loads: Loads, life: CoarseLife, space: Space) -> tuple[str, int, int]:
    """(mode, peak and capacity of the fullest GPU). Reversible where the new state fits beside the old."""
    there = loads.kept_bytes + loads.old_bytes + life.before_bytes
    starting = there + life.starting_bytes
    both = there + life.lasting_bytes + loads.new_bytes
    outer = loads.kept_bytes + np.maximum(loads.old_bytes, loads.new_bytes) + life.before_bytes + life.lasting_bytes
    reversible = np.maximum(starting, both)
    fits = bool((reversible <= space.capacity).all())
    peak = reversible if fits else np.maximum(starting, outer)
    at = int(np.argmax(peak - space.capacity)) if len(peak) else 0
    return ("reversible" if fits else "tight"), round(float(peak[at])), int(space.capacity[at])


def _drain_s(plan: Plan, life: CoarseLife) -> float:
    """As ``certify.drain_s``."""
    if plan.workload.mode == "sync" or plan.workload.partial:
        return 0.0
    drained = any(s.name in life.changed and s.inflight == "drain" for s in plan.stages if s.kind == "generate")
    return rest_of_rollouts_s(plan.workload.response_len) if drained else 0.0


def _num_participants(new: Side, space: Space) -> int:
    used = np.zeros(space.num_devices, dtype=bool)
    for _, where in new.owners:
        used[space.devices(new, where)] = True
    return int(used.sum())
