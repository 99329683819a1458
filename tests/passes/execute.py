"""Compile a pair of plans, run its programs, and compare with the oracle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from passes.interpreter import Interpreter, Outcome
from passes.oracle import Ids, Key, State, Truth, Universe, dropped, living, truth

from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.plan import Plan
from nereus.passes.compiled import Transition
from nereus.passes.emit import emit_program
from nereus.passes.manager import Pipeline
from nereus.passes.pipeline import compile_transition
from nereus.passes.place import pin
from nereus.passes.route import Route
from nereus.passes.schedule import WaveSchedule


def pipeline(slice_bytes: int = 16, stripe: int = 16, window: int = 256, mode: str = "auto", bulk: int = 1) -> Pipeline:
    """Options small enough that tiny models are cut into slices and stripes and sent in many waves, and that what can
    be routed together is."""
    return Pipeline(
        route=Route(min_stripe_bytes=stripe, bulk=bulk),
        schedule=WaveSchedule(window_bytes=window, min_slice_bytes=slice_bytes),
        mode=mode,
    )


def compile_or_confirm(old: Plan, new: Plan, options: Pipeline) -> Transition | None:
    """The transition; None where the compiler refuses for state that the oracle finds lost."""
    universe = Universe(old, new)
    before, after = State(pin(old), universe), State(pin(new), universe)
    gone = dropped(before, after)
    try:
        transition = compile_transition(old, new, options)
        assert not gone, f"{gone} are dropped and the compiler does not say so"
    except DiagnosticError as error:
        codes = {d.code for d in error.diagnostics}
        if codes != {"NRS5007"}:
            return _confirm(error, before, after)
        assert gone, error
        try:
            transition = compile_transition(old, new, options, allow_destroy=True)
        except DiagnosticError as second:
            return _confirm(second, before, after)
    return transition


def _confirm(error: DiagnosticError, before: State, after: State) -> None:
    """Lost sole copies are the one reason: whether state survives does not depend on the new placement, except for
    what a device already holds, and lost nodes hold nothing."""
    codes = {d.code for d in error.diagnostics}
    assert codes == {"NRS5001"}, error
    assert truth(before, after).lost.any(), error


def run(transition: Transition, before: Mapping[Key, Ids], weight_of: Ids, seed: int) -> Outcome:
    topology = transition.topology
    programs = {}
    for number, device in enumerate(topology.devices):
        if topology.alive[int(topology.node_of[number])]:
            programs[device] = emit_program(transition, number)
    held = {key: ids for key, ids in before.items() if key[0] in programs}
    return Interpreter(programs, held, weight_of, seed).run()


def check_transition(
    transition: Transition,
    seed: int,
    *,
    universe: Universe | None = None,
    before: Mapping[Key, Ids] | None = None,
) -> dict[Key, Ids]:
    """Every number of the certificate and every element against the oracle. Returns the final buffers, with fresh
    slots filled as a framework would. ``before``: buffers to start from, numbered by ``universe``."""
    certificate = transition.certificate
    old, new = transition.old, transition.new
    universe = universe or Universe(old, new)
    start, end = State(old, universe), State(new, universe)
    expected = truth(start, end)
    assert certificate.safe, [c for c in certificate.checks if not c[1]]
    assert not expected.lost.any(), "state is lost and the compiler does not say so"
    assert certificate.bound_moved_bytes == expected.moved_bytes
    assert certificate.bound_node_in_bytes_max == max(expected.node_in_bytes.values(), default=0)
    # Slivers that a place could make and fetches: only where masters lie partly in host memory is one so small here.
    foregone = transition.diff.foregone
    assert certificate.moved_bytes == certificate.bound_moved_bytes + foregone.moved_bytes
    if foregone.moved_bytes:
        assert any(slot.is_split for state_set in transition.new_holdings.sets for slot in state_set.slots)
        assert certificate.derived_bytes < expected.derived_bytes
    else:
        assert certificate.node_in_bytes_max == certificate.bound_node_in_bytes_max
        assert certificate.derived_bytes == expected.derived_bytes
    assert certificate.best_bound_moved_bytes <= certificate.bound_moved_bytes
    assert certificate.best_bound_node_in_bytes_max <= certificate.bound_node_in_bytes_max
    assert certificate.best_bound_transfer_s <= certificate.bound_transfer_s <= certificate.transfer_s * (1 + 1e-9)
    assert certificate.best_bound_peak_bytes_max <= certificate.bound_peak_bytes_max
    outcome = run(transition, start.storages if before is None else before, universe.weight_of, seed)
    assert outcome.moved_bytes == certificate.moved_bytes
    _check_elements(outcome, end, expected)
    _check_peaks(transition, outcome)
    return {
        key: end.storages[key] if expected.fresh[end.storages[key]].all() else values
        for key, values in outcome.buffers.items()
    }


def _check_elements(outcome: Outcome, end: State, expected: Truth) -> None:
    assert set(outcome.buffers) == set(end.storages)
    for key, ids in end.storages.items():
        values = outcome.buffers[key]
        if expected.fresh[ids].all():
            continue
        wrong = np.flatnonzero(values != ids)
        assert not len(wrong), f"{key}: {len(wrong)} of {len(ids)} wrong, at {wrong[:5]}: {values[wrong[:5]]}"


def _check_peaks(transition: Transition, outcome: Outcome) -> None:
    """Never more in a memory space than the certificate allows, processes and engines included."""
    topology, memory, life = transition.topology, transition.memory, transition.life
    number = {d: i for i, d in enumerate(topology.devices)}
    for node, entry in enumerate(topology.nodes):
        if topology.alive[node]:
            number[entry.name] = topology.num_devices + node  # type: ignore[index]
    lasting = np.zeros(topology.num_devices, dtype=np.int64)
    for op in life.ops:
        for device, num_bytes in zip(op.devices, op.after_bytes, strict=True):
            lasting[device] += num_bytes
    for space, peak in outcome.peak.items():
        at = number[space]  # type: ignore[index]
        processes = life.before_bytes[at] + int(lasting[at]) if at < topology.num_devices else 0
        if transition.schedule.mode == "tight":
            acquired = sum(int(transition.dag.acquired[i]) for i in np.flatnonzero(transition.dag.space == at).tolist())
            allowed = int(memory.tight_base[at]) + acquired
            allowed = min(allowed, int(memory.capacity[at]))
        else:
            allowed = int(memory.reversible["during the transfer"][at])
        assert peak + processes <= allowed, f"{space}: {peak} + {processes} bytes of {allowed}"
        if _name(space) == transition.certificate.peak_device:
            assert peak + processes <= transition.certificate.peak_bytes_max


def _name(space: object) -> str:
    return f"{space}.host" if isinstance(space, str) else str(space)


__all__ = ["check_transition", "compile_or_confirm", "living", "pipeline", "run"]
