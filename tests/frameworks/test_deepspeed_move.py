"""Engines trained in one layout go on in another: against DeepSpeed's own accessors, and an engine that its own setters
filled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from frameworks.deepspeed_engines import (
    BATCH,
    NAMING,
    TENSORS,
    Group,
    build,
    loss,
    set_by_deepspeed,
    train,
    whole_by_deepspeed,
)
from frameworks.harness import run

from nereus.runtime.adapters.base import Binding
from nereus.runtime.adapters.whole import pieces
from nereus.runtime.live import ALL, move

pytest.importorskip("deepspeed")


@dataclass(frozen=True)
class At:
    """A layout: ZeRO stage, data-parallel ranks, changes of the configuration."""

    stage: int
    ranks: int
    changes: dict[str, Any] = field(default_factory=dict)
    derive: bool = False
    #: Whether DeepSpeed's accessors and setters can be trusted, and exist, here.
    accessors: bool = True


def _broadcast(value: Any) -> Any:
    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _equal(left: Binding, right: Binding) -> None:
    """Element by element, at the same places."""
    assert left.state == right.state
    for (fragment, place, a), (_, _, b) in zip(pieces(left), pieces(right), strict=True):
        assert torch.equal(a, b), (fragment.tensor, fragment.slot, place)


def _close(moved: list[Any], unmoved: list[Any]) -> None:
    """Sums over other numbers of ranks round differently, in 16 bits."""
    for (loss_a, lr_a, norm_a), (loss_b, lr_b, norm_b) in zip(moved, unmoved, strict=True):
        assert lr_a == lr_b
        assert loss_a == pytest.approx(loss_b, rel=1e-3)
        assert norm_a == pytest.approx(norm_b, rel=2e-2)


def _in_force(state: dict[str, Any]) -> dict[str, Any]:
    """Without options that are off: one class of optimizer lists them, another does not know them."""
    groups = [{key: value for key, value in group.items() if value is not False} for group in state["groups"]]
    return {**state, "groups": groups}


def _chain(rank: int, world: int, first: At, *others: At) -> list[Any]:
    from nereus.runtime.adapters.deepspeed import DeepSpeedAdapter

    done = 2
    group = Group(first.ranks)
    engine = build(first.stage, group, **first.changes)
    train(engine, 0, done)
    facts: list[Any] = []
    for number, at in enumerate(others):
        old_at = (first, *others)[number]
        adapter = DeepSpeedAdapter(engine, NAMING, derive_weights=at.derive)
        adapter.set_version(number + 3)
        old = adapter.bind()
        state, version, before = _broadcast((adapter.job_state(), adapter.version(), loss(engine)))
        oracle = _broadcast(whole_by_deepspeed(engine)) if old_at.accessors else None
        new_group = Group(at.ranks)
        moved = build(at.stage, new_group, seed=10 + number, **at.changes)
        target = DeepSpeedAdapter(moved, NAMING, derive_weights=at.derive)
        new = target.bind()
        move(old if group.inside else None, new if new_group.inside else None, TENSORS)
        if not new_group.inside:  # its engine is another job; it only takes part in DeepSpeed's global barriers
            state = target.job_state()
        target.finish(state)
        target.set_version(version)
        if new_group.inside:
            assert [(c.name, c.check()) for c in target.checklist() if c.check() is not None] == []
            assert _in_force(target.job_state()) == _in_force(state) and target.version() == number + 3
        now = loss(moved)
        assert not new_group.inside or now == before
        if oracle is not None and at.accessors:
            after = whole_by_deepspeed(moved)
            if new_group.inside:
                assert after.keys() == oracle.keys()
                for key, value in oracle.items():
                    assert torch.equal(after[key], value), key
            twin = build(at.stage, new_group, seed=20 + number, **at.changes)
            train(twin, 50, 1)
            set_by_deepspeed(twin, oracle, state)
            if new_group.inside:
                _equal(target.bind(), DeepSpeedAdapter(twin, NAMING, derive_weights=at.derive).bind())
            steps, same = train(moved, done, 2), train(twin, done, 2)
            assert not new_group.inside or steps == same
            if new_group.inside:
                _equal(target.bind(), DeepSpeedAdapter(twin, NAMING, derive_weights=at.derive).bind())
        else:
            steps = train(moved, done, 2)
        unmoved = _broadcast(train(engine, done, 2))
        if new_group.inside:
            _close(steps, unmoved)
        done += 2
        facts.append((new.state, moved.gradient_accumulation_steps()))
        engine, group = moved, new_group
    return facts


def test_zero_1_shrinks_and_grows_again() -> None:
    results = run(4, _chain, At(1, 4), At(1, 2), At(1, 3), timeout=400)
    (two, accumulation), (three, _) = results[0]
    assert accumulation == BATCH // 2
    assert set(two.slots()) == {"weight", "master", "exp_avg", "exp_avg_sq"}
    cut = [f for f in two.fragments if f.slot == "master" and f.numel < (f.row_hi - f.row_lo) * f.num_cols]
    assert cut, "a parameter begins on one rank and ends on the next"
    # Three ranks cut the odd total with padding at the end.
    assert sum(f.numel for r in results[:3] for f in r[1][0].fragments if f.slot == "master") < sum(
        s.numel
        for r in results[:3]
        for s in r[1][0].storages
        if s.name.startswith("fp32 partition") and s.name[-1] == "]"
    )
    assert {s.dtype for s in three.storages} == {"bf16", "fp32"}


def test_zero_2_grows() -> None:
    run(4, _chain, At(2, 2), At(2, 4), timeout=400)


def test_zero_3_grows_and_shrinks() -> None:
    results = run(4, _chain, At(3, 2), At(3, 4), At(3, 2), timeout=400)
    assert "model.norm.weight.data (persisted)" in results[0][0][0].derived
    held = [{f.tensor for f in r[0][0].fragments} for r in results]
    assert "model.norm.weight" in held[2] and "model.norm.weight" not in held[3], "the last rank holds padding only"


def test_zero_1_to_3_and_back_with_groups() -> None:
    groups = {"groups": True}
    cut = {"groups": True, "zero_optimization": {"sub_group_size": 300}}
    results = run(4, _chain, At(1, 3, groups), At(3, 2, cut), At(1, 4, groups), timeout=400)
    masters = [s.name for s in results[0][0][0].storages if s.name.startswith("fp32_") and s.name.endswith("]")]
    assert len(masters) > 4, "several sub-groups"
    held = [{f.tensor for f in r[1][0].fragments if f.slot == "exp_avg"} for r in results]
    assert "model.norm.weight" in held[2] and "model.norm.weight" not in held[3], "the last rank holds padding only"


def test_weights_rounded_from_masters() -> None:
    results = run(3, _chain, At(2, 3), At(3, 2, derive=True), At(1, 3, derive=True), timeout=400)
    assert all("weight" not in state.slots() for state, _ in results[0])


def test_bf16_optimizer() -> None:
    fp32_gradients = {"data_types": {"grad_accum_dtype": "fp32"}}
    run(3, _chain, At(1, 2, fp32_gradients), At(1, 3, fp32_gradients), At(2, 2), timeout=400)


def test_fp16_scaler_goes_on() -> None:
    """The scale doubles in the second update after the move. Both stages are 3: where the scale changes, stage 3 of
    DeepSpeed 0.19.8 reports the norm over the new scale, the others over the old one."""
    fp16 = {"bf16": None, "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}}
    run(3, _chain, At(3, 3, fp16), At(3, 2, fp16), timeout=400)


def test_fp32_engine_has_no_masters() -> None:
    fp32 = {"bf16": None}
    results = run(3, _chain, At(1, 3, fp32), At(3, 2, fp32), At(2, 3, fp32), timeout=400)
    assert all(set(state.slots()) == {"weight", "exp_avg", "exp_avg_sq"} for state, _ in results[0])


def test_optimizer_in_host_memory() -> None:
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
    results = run(2, _chain, At(2, 2), At(2, 1, offload), At(3, 2, offload), At(2, 2), timeout=400)
    for state, _ in results[0][:2]:
        assert {s.host for s in state.storages if "fp32" in s.name} == {True}
        assert {s.host for s in state.storages if "fp32" not in s.name} == {False}
    assert not any(s.host for s in results[0][2][0].storages)


def test_other_orders_and_paddings_of_the_flat_buffer() -> None:
    """DeepSpeed's accessors answer with other elements under round-robin gradients; the addresses are right."""
    mixed = {"zero_optimization": {"round_robin_gradients": True}}
    aligned = {"zero_optimization": {"parameter_alignment": True}}
    run(3, _chain, At(2, 2), At(2, 3, mixed, accessors=False), At(2, 2, aligned), At(1, 3), timeout=400)


def test_stage_0() -> None:
    run(2, _chain, At(0, 2, accessors=False), At(1, 2), At(0, 1, accessors=False), timeout=400)


def test_frozen_parameters_move_without_optimizer_state() -> None:
    frozen = {"frozen": "embed_tokens"}
    results = run(2, _chain, At(1, 2, frozen), At(3, 1, frozen, accessors=False), timeout=400)
    state = results[0][0][0]
    assert {f.slot for f in state.fragments if f.tensor == "model.embed_tokens.weight"} == {"weight"}


def _reference(rank: int, world: int) -> tuple[float, float, tuple[str, ...]]:
    from nereus.runtime.adapters.deepspeed import DeepSpeedAdapter

    actor = build(1, Group(1))
    train(actor, 0, 2)
    reference = build(3, Group(2), seed=9, optimizer=None, scheduler=None)
    loss(reference)  # its parameters are gathered, then filled under a fresh partition
    target = DeepSpeedAdapter(reference, NAMING)
    new = target.bind()
    move(DeepSpeedAdapter(actor, NAMING).bind() if rank == 0 else None, new, TENSORS, drop=(ALL,))
    target.finish(target.job_state())
    assert [(c.name, c.check()) for c in target.checklist() if c.check() is not None] == []
    return loss(actor), loss(reference), new.state.slots()


def test_reference_model_without_optimizer_takes_the_weights() -> None:
    (actor, one, slots), (_, two, _) = run(2, _reference, timeout=400)
    assert actor == one == two
    assert slots == ("weight",)
