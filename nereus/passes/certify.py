"""certify: the numbers of a transition beside their bounds, and the findings that make it safe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nereus.ir.layout import IntArray
from nereus.ir.plan import Plan
from nereus.ir.schedule import Schedule
from nereus.ir.transition import HOST, INTER, INTRA, LINK_NUMBER, LINKS, LOCAL, Certificate
from nereus.models.priors import MESSAGE_S, commit_s, rest_of_rollouts_s
from nereus.passes.best import Best
from nereus.passes.bound import Bounds
from nereus.passes.check import Finding
from nereus.passes.dag import Dag
from nereus.passes.diff import Diff
from nereus.passes.lifecycle import Lifecycle
from nereus.passes.memory import PHASES, MemoryPlan
from nereus.passes.place import Placed
from nereus.passes.route import Routed
from nereus.passes.timeline import Timeline, coarse_ops, schedule_timeline


def drain_s(plan: Plan, life: Lifecycle) -> float:
    """Seconds until generation is quiet. At a synchronous boundary nothing is in flight; otherwise half a response is
    left on average where an engine changes, unless in-flight rollouts are dropped or resumed."""
    if plan.workload.mode == "sync" or plan.workload.partial:  # partial rollouts stop anywhere and go on later
        return 0.0
    changed = {op.stage for op in life.ops if op.kind in ("engine-start", "retire")}
    if not any(s.name in changed and s.inflight == "drain" for s in plan.stages if s.kind == "generate"):
        return 0.0
    return rest_of_rollouts_s(plan.workload.response_len)


def _commit_s(plan: Plan) -> float:
    return commit_s(len({d for s in plan.owners() for d in s.ranks}))


def changes_nothing(schedule: Schedule, life: Lifecycle, memory: MemoryPlan) -> bool:
    return not (len(schedule.moves) or life.ops or memory.state.new.any() or memory.state.old.any())


def stop_timeline(new: Plan, schedule: Schedule, life: Lifecycle, memory: MemoryPlan) -> Timeline:
    """When the coarse operations run, from the boundary to resume."""
    num_devices = len(life.before_bytes)
    base, capacity = memory.reversible[PHASES[0]][:num_devices], memory.capacity[:num_devices]
    if changes_nothing(schedule, life, memory):
        return schedule_timeline((), base, capacity)
    ops = coarse_ops(
        life,
        memory,
        mode=schedule.mode,
        drain_s=drain_s(new, life),
        transfer_s=schedule.transfer_s,
        commit_s=_commit_s(new),
        kind_of_stage={stage.name: stage.kind for stage in new.stages},
    )
    return schedule_timeline(ops, base, capacity)


def certify(
    *,
    new: Plan,
    difference: Diff,
    placed: Placed,
    routed: Routed,
    bound: Bounds,
    life: Lifecycle,
    memory: MemoryPlan,
    worst: IntArray,
    schedule: Schedule,
    dag: Dag,
    findings: Sequence[Finding],
    timeline: Timeline,
    digest: str,
    compile_s: float,
    staged_bytes: int,
) -> Certificate:
    topology = difference.topology
    moves = schedule.moves
    of_link = np.bincount(moves.link, weights=moves.num_bytes, minlength=len(LINKS)).astype(np.int64).tolist()
    by_link = {link: of_link[LINK_NUMBER[link]] for link in (INTRA, INTER, HOST, LOCAL)}
    entering = moves.link == LINK_NUMBER[INTER]
    into = topology.node_of[moves.dst[entering] % topology.num_devices]
    node_in = np.bincount(into, weights=moves.num_bytes[entering], minlength=1).astype(np.int64)
    moved = sum(num_bytes for link, num_bytes in by_link.items() if link != LOCAL)
    nothing = changes_nothing(schedule, life, memory)
    drain, commit = (0.0, 0.0) if nothing else (drain_s(new, life), _commit_s(new))
    tight = schedule.mode == "tight"
    peak = memory.reversible_peak if not tight else worst
    if tight:  # engines start before the transfer in either mode
        peak = peak.copy()
        for phase in (PHASES[0], PHASES[1], PHASES[3]):
            peak = peak.clip(min=memory.reversible[phase])
    space = memory.worst(peak)
    bound_peak = int((memory.tight_bound if tight else memory.reversible_peak)[space])
    least_peak = max(int(memory.reversible[phase][space]) for phase in (PHASES[0], PHASES[1]))
    background = max((life.seconds(kind, background=True) for kind in ("engine-start", "spawn")), default=0.0)
    setup = max(life.seconds("engine-start"), life.seconds("spawn")) + life.seconds("build-groups")
    best = placed.best
    bound_transfer_s = _and_message(bound.transfer_s)
    bound_node_in = max(bound.node_in_bytes, default=0)
    phase = memory.peak_phase(space)
    if tight:  # in its waves, or in a phase that is the same in both modes
        apart = max((PHASES[0], PHASES[1], PHASES[3]), key=lambda name: int(memory.reversible[name][space]))
        phase = PHASES[2] if int(worst[space]) == int(peak[space]) else apart
    first_release = min(schedule.release.values(), default=None)
    return Certificate(
        mode="none" if nothing else schedule.mode,
        moved_bytes=moved,
        bound_moved_bytes=bound.moved_bytes,
        best_bound_moved_bytes=min(bound.moved_bytes, best.moved_bytes),
        node_in_bytes_max=int(node_in.max()),
        bound_node_in_bytes_max=bound_node_in,
        best_bound_node_in_bytes_max=min(bound_node_in, max(best.node_in_bytes, default=0)),
        peak_bytes_max=int(peak[space]),
        bound_peak_bytes_max=bound_peak,
        best_bound_peak_bytes_max=min(bound_peak, least_peak),
        peak_device=_name(difference, space),
        peak_phase=phase,
        capacity_bytes=int(memory.capacity[space]),
        transfer_s=schedule.transfer_s,
        bound_transfer_s=bound_transfer_s,
        best_bound_transfer_s=min(bound_transfer_s, _and_message(_best_transfer_s(best, routed))),
        placement_s=placed.together.seconds,
        best_bound_placement_s=placed.together.bound_s,
        drain_s=drain,
        setup_s=setup,
        commit_s=commit,
        downtime_s=timeline.stop_s,
        bound_downtime_s=timeline.bound_s,
        background_s=background,
        kept_bytes=difference.kept_bytes,
        derived_bytes=difference.derived_bytes,
        local_bytes=by_link[LOCAL],
        bytes_by_link=tuple((link, num_bytes) for link, num_bytes in by_link.items() if link != LOCAL),
        num_ops=dag.num_ops,
        num_edges=dag.num_edges,
        num_waves=schedule.num_waves,
        point_of_no_return=None if first_release is None else f"the first release, at the end of wave {first_release}",
        safe=all(f.holds for f in findings),
        checks=tuple((f.name, f.holds, f.evidence) for f in findings),
        digest=digest,
        compile_s=compile_s,
        staged_bytes=staged_bytes,
    )


def _and_message(busy_s: float) -> float:
    """What goes through a port is there a message after the port is done."""
    return busy_s + MESSAGE_S if busy_s else 0.0


def _best_transfer_s(best: Best, routed: Routed) -> float:
    links = routed.links
    seconds = [num_bytes * links.nic[node] for node, num_bytes in enumerate(best.node_in_bytes)]
    for device, num_bytes in best.device_in_bytes:
        node = links.node_of[device]
        seconds.append(num_bytes * min(links.intra[node], links.pcie[node]))
    return max(seconds, default=0.0)


def _name(difference: Diff, space: int) -> str:
    topology = difference.topology
    if space < topology.num_devices:
        return str(topology.devices[space])
    return f"{topology.nodes[space - topology.num_devices].name}.host"
