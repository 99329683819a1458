"""Counterexamples that naive versions of the algorithms fall for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from passes.cycles import cycle
from passes.execute import check_transition, pipeline
from passes.interpreter import Interpreter, Wrong
from passes.plans import ARCHS, cluster, stage, trainer
from passes.test_tight import with_capacity

from nereus.ir.cluster import Device
from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.moves import Moves
from nereus.ir.plan import Model, Plan
from nereus.ir.program import Blocks, Message, Program, StorageSpec, Wave
from nereus.ir.transition import Move
from nereus.models.presets import preset
from nereus.passes import check
from nereus.passes.pipeline import compile_transition
from nereus.passes.place import Place


def test_fewest_bytes_are_not_least_time() -> None:
    """(tp4, pp2, dp1) -> dp2 on a second node: the new replica there moves 1.0 M, all of it over the NIC; one pipeline
    stage per node moves 1.5 M of which 0.5 M cross."""
    on = cluster(8, 8)
    arch = preset("llama-3.1-8b")
    old, new = trainer(on, on.devices[:8], arch, tp=4, pp=2), trainer(on, arch=arch, tp=4, pp=2)
    options = replace(pipeline(2**28, 2**20, 2**28), place=Place(horizon_steps=1))
    (choice,) = compile_transition(old, new, options).choices
    assert choice.chosen != "listed"
    assert choice.moved_bytes > 1.4 * choice.listed_moved_bytes
    assert choice.transfer_s < 0.6 * choice.listed_transfer_s
    assert choice.best_moved_bytes <= choice.listed_moved_bytes


def test_wanters_that_feed_each_other_have_no_source() -> None:
    on = cluster(2, 4)
    transition = compile_transition(
        trainer(on, on.devices[:1]), trainer(on, on.devices[2:], tp=1), pipeline(10**6, 10**6, 10**6)
    )
    schedule = transition.schedule
    number = next(i for i, m in enumerate(schedule.moves) if m.after)
    first = schedule.moves[number].after[0]
    brought, passed = schedule.moves[first], schedule.moves[number]
    moves = list(schedule.moves)
    # The first is no longer brought from a holder: the second hands it back.
    moves[first] = Move(
        passed.dst, passed.src, brought.table, brought.intervals, brought.num_bytes, passed.link, (number,)
    )
    for waves in ((0, 1), (1, 0), (0, 0)):
        wave = schedule.wave.copy()
        wave[first], wave[number] = waves
        looped = replace(schedule, moves=Moves.of(moves), wave=wave)
        assert check.check_coverage(transition.diff, looped).holds  # each wanter does receive all of it once
        assert not check.check_sources(transition.diff, looped).holds


def test_an_order_that_agrees_pairwise_can_hang() -> None:
    """Ranks A: [AB, CA], B: [BC, AB], C: [CA, BC], one message a wave."""
    a, b, c = (Device("n0", i) for i in range(3))
    tags = {(a, b): 0, (b, c): 1, (c, a): 2}

    def program(device: Device, order: list[tuple[Device, Device]]) -> Program:
        common = {"stage": "s", "model": "m", "tensor": "t", "slot": "weight", "dtype": "bf16", "host": False}
        box = {"tensor_shape": (1,), "row_lo": 0, "row_hi": 1, "col_lo": 0, "col_hi": 1, "start": 0, "stop": 1}
        old = StorageSpec(id=0, role="old", **common, **box)  # type: ignore[arg-type]
        new = StorageSpec(id=1, role="new", **{**common, "stage": "s2"}, **box)  # type: ignore[arg-type]
        waves = []
        for number, (src, dst) in enumerate(order):
            storage = 0 if src == device else 1
            peer = dst if src == device else src
            blocks = Blocks(np.array([[storage, 0, 1, 1, 1, 0, 1]], dtype=np.int64))
            message = (Message(tag=tags[src, dst], peer=peer, blocks=blocks),)
            sides = {"sends": message} if src == device else {"receives": message}
            waves.append(Wave(acquire=(1,) if number == 0 else (), **sides))  # type: ignore[arg-type]
        return Program(device=device, mode="reversible", digest="", storages=(old, new), waves=tuple(waves))

    before = {(d, "s", "weight", "t"): np.array([i]) for i, d in enumerate((a, b, c))}
    weight_of = np.full(3, -1)
    pairwise = {a: [(a, b), (c, a)], b: [(b, c), (a, b)], c: [(c, a), (b, c)]}
    with pytest.raises(Wrong, match="deadlock"):
        Interpreter({d: program(d, order) for d, order in pairwise.items()}, before, weight_of, 0).run()
    total = {a: [(a, b), (c, a)], b: [(a, b), (b, c)], c: [(b, c), (c, a)]}
    outcome = Interpreter({d: program(d, order) for d, order in total.items()}, before, weight_of, 0).run()
    assert [int(outcome.buffers[d, "s2", "weight", "t"][0]) for d in (a, b, c)] == [2, 0, 1]


def rotated() -> tuple[Plan, Plan]:
    """Four pipeline stages, each on the next GPU of a ring."""
    on = cluster(4)
    arch = replace(ARCHS[0], num_layers=4, vocab=4)
    d = on.devices
    old = trainer(on, d, arch, pp=4, place=d)
    return old, trainer(on, d, arch, pp=4, place=(*d[1:], d[0]))


def test_full_gpus_rotate_through_a_spare_of_one_storage() -> None:
    options = pipeline(10**6, 10**6, 200)
    old, new = rotated()
    memory = compile_transition(old, new, options).memory
    needed = int(memory.tight_bound[:4].max())
    assert needed < int(memory.reversible_peak[:4].min())
    transition = compile_transition(*(with_capacity(p, needed, 2**30) for p in (old, new)), options)
    assert transition.schedule.mode == "tight"
    check_transition(transition, 0)


def test_less_than_a_storage_of_spare_goes_through_host_memory_or_is_refused_with_a_witness() -> None:
    options = replace(pipeline(10**6, 10**6, 200), mode="tight")
    old, new = cycle(3)
    full = int(compile_transition(old, new, options).memory.tight_base[:3].max())
    transition = compile_transition(*(with_capacity(p, full, 2**30) for p in (old, new)), options)
    assert transition.schedule.staged and transition.certificate.safe
    assert transition.certificate.staged_bytes > 0
    check_transition(transition, 0)
    with pytest.raises(DiagnosticError) as refused:
        compile_transition(*(with_capacity(p, full, 1) for p in (old, new)), options)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "NRS5002" and diagnostic.help
    data = dict(diagnostic.data)
    assert int(data["need_bytes"]) > int(data["have_bytes"]) and int(data["host_short_bytes"]) > 0


def test_a_master_that_nothing_held_is_no_source_of_weights() -> None:
    """A model that starts to train: its weights move, its optimizer state is made from them."""
    on = cluster(4)
    actor = Model(name="actor", arch=ARCHS[0], source="tiny")
    base = trainer(on)
    old = replace(base, stages=(stage(actor, "infer", on.devices[:1]),))
    new = replace(base, stages=(stage(actor, "train", on.devices[2:], tp=2, zero=1),))
    transition = compile_transition(old, new, pipeline())
    assert transition.certificate.derived_bytes == 0 and transition.certificate.moved_bytes > 0
    check_transition(transition, 0)
