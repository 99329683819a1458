"""Plans described from what processes hold: every stage's tensors are cut by the oracle, its processes shuffled."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from runtime.tiny import Indices, cluster, plan, stage

from nereus.ir.arch import Arch, Moe
from nereus.ir.cluster import Device
from nereus.ir.fragment import Fragment, FrameworkStorage, RankState
from nereus.ir.plan import ORDER_MEGATRON, ORDER_REPLICA, Model, Plan, Stage
from nereus.ir.tensor import matrix_shape
from nereus.lang.api import resolve_text
from nereus.models.tensors import logical_tensors
from nereus.runtime.coordinates import Coordinates
from nereus.runtime.describe import DescribeError, Facts, LiveStage, plan_of
from nereus.runtime.reference import _coordinates, _expert_coordinates, expected

EIGHT = cluster(4, 4)
ARCH = Arch(family="llama", num_layers=4, hidden=12, num_heads=8, num_kv_heads=2, head_dim=2, ffn=24, vocab=304)
MOE = replace(ARCH, family="qwen3_moe", moe=Moe(num_experts=4, experts_per_token=2, expert_ffn=8))
SHUFFLED = tuple(EIGHT.devices[i] for i in (3, 6, 0, 5, 1, 7, 4, 2))


def facts_of(job: Plan, one: Stage) -> list[Facts]:
    """What each process of ``one`` would say. The values of ``Indices`` are the elements' own numbers."""
    arch = job.model(one.model).arch
    shapes = {t.name: matrix_shape(t.shape) for t in logical_tensors(arch)}
    held: dict[Device, list[Any]] = {d: [] for d in one.ranks}
    for shard in expected(job, one.ranks, Indices()):  # type: ignore[arg-type]
        held[shard.device].append(shard)
    coords = _coordinates(one)
    experts = _expert_coordinates(one, coords)
    found = []
    for rank, device in enumerate(one.ranks):
        storages, fragments = [], []
        for number, shard in enumerate(held[device]):
            storages.append(
                FrameworkStorage(name=str(shard.key), dtype=shard.dtype, numel=len(shard.bits), host=shard.host)
            )
            cols = shapes[shard.key.tensor][1]
            index = shard.bits.view(-1)
            first, last = int(index[0]), int(index[-1])
            steps = torch.nonzero(index[1:] != index[:-1] + 1).reshape(-1)
            if not len(steps):  # whole rows, or a run of them
                row, stop = first // cols, last // cols + 1
                box, start, width = (row, stop, 0, cols), first - row * cols, cols
            else:  # a column cut
                width = int(steps[0]) + 1
                box, start = (first // cols, last // cols + 1, first % cols, first % cols + width), 0
            fragments.append(
                Fragment(
                    tensor=shard.key.tensor,
                    slot=shard.key.slot,
                    storage=number,
                    row_lo=box[0],
                    row_hi=box[1],
                    col_lo=box[2],
                    col_hi=box[3],
                    start=start,
                    stop=start + len(index),
                    origin=-start,
                    stride=width,
                )
            )
        c, e = coords[rank], experts[rank]
        where = {axis: (c[axis], getattr(one, axis)) for axis in ("tp", "pp", "cp", "dp")}
        if arch.moe is not None:
            where |= {"ep": (e["ep"], one.ep), "etp": (e["etp"], one.etp)}
        state = RankState(rank=rank, storages=tuple(storages), fragments=tuple(fragments))
        found.append(Facts(host=device.node, index=device.index, coordinates=Coordinates(**where), state=state))
    return found


def job_of(arch: Arch, **settings: Any) -> tuple[Plan, LiveStage]:
    model = Model(name="actor", arch=arch, source="tiny.json")
    job = plan(stage(model, "train", tuple(sorted(SHUFFLED)), place=SHUFFLED, **settings), on=EIGHT, models=(model,))
    known = {key: settings[key] for key in ("zero", "fsdp", "backend") if key in settings}
    return job, LiveStage(model="actor", kind="train", arch=arch, source="tiny.json", **known)


CASES: dict[str, tuple[Arch, dict[str, Any]]] = {
    "tp2 pp2, Megatron's order": (ARCH, {"tp": 2, "pp": 2, "backend": "megatron", "order": ORDER_MEGATRON}),
    "tp4": (ARCH, {"tp": 4}),
    "tp8 over 2 kv heads, raw rows": (ARCH, {"tp": 8, "backend": "megatron", "order": ORDER_MEGATRON}),
    "pp2, 3 and 1 layers": (ARCH, {"pp": 2, "pp_split": (3, 1)}),
    "pp2 interleaved": (ARCH, {"pp": 2, "vp": 2, "chunks": (1, 1, 1, 1), "pp_split": (2, 2)}),
    "zero 1": (ARCH, {"zero": 1, "tp": 2}),
    "zero 3": (ARCH, {"zero": 3}),
    "fsdp 4 in 2 groups": (ARCH, {"fsdp": 4}),
    "cp2": (ARCH, {"cp": 2, "tp": 2}),
    "ep4": (MOE, {"ep": 4, "etp": 1, "zero": 1, "backend": "megatron", "order": ORDER_MEGATRON}),
    "tp2 ep2 etp2 pp2": (MOE, {"tp": 2, "ep": 2, "etp": 2, "pp": 2, "backend": "megatron", "order": ORDER_MEGATRON}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_job_is_described_as_the_plan_that_it_runs(name: str) -> None:
    arch, settings = CASES[name]
    job, live = job_of(arch, **{"order": ORDER_REPLICA, **settings})
    found = plan_of([(live, facts_of(job, job.stages[0])[::-1])], {"n0": 4, "n1": 4}, gpu="h100-sxm-80gb")
    wanted, got = job.stages[0], found.plan.stages[0]
    for key in ("tp", "pp", "cp", "dp", "vp", "pp_split", "chunks", "zero", "fsdp", "order", "place", "slots"):
        assert getattr(got, key) == getattr(wanted, key), key
    if arch.moe is not None:
        assert (got.ep, got.etp) == (wanted.ep, wanted.etp)
    assert found.notes == ()


@pytest.mark.parametrize("settings", [{"tp": 2, "pp": 2}, {"zero": 1, "tp": 2}, {"zero": 3}])
def test_state_partly_in_host_memory(settings: dict[str, Any]) -> None:
    job, live = job_of(ARCH, order=ORDER_REPLICA, **settings)
    slots = tuple(replace(s, host=s.name == "exp_avg", host_share=0.3) for s in job.stages[0].slots)
    job = replace(job, stages=(replace(job.stages[0], slots=slots),))
    facts, hosts = facts_of(job, job.stages[0]), {"n0": 4, "n1": 4}
    found = plan_of([(live, facts)], hosts, gpu="h100-sxm-80gb")
    shares = {s.name: s.host_share if s.host else 0.0 for s in found.plan.stages[0].slots}
    assert found.notes == () and 0.3 <= shares.pop("exp_avg") < 1 and set(shares.values()) == {0.0}
    again = resolve_text(found.text)
    assert again.plan is not None and again.plan.stages[0].slots == found.plan.stages[0].slots
    # A framework that walks from the other end has other tensors there, and a note says so.
    turned = [
        replace(
            fact,
            state=replace(
                fact.state,
                storages=tuple(
                    replace(s, host=fact.state.fragments[n].slot == "exp_avg" and not s.host)
                    for n, s in enumerate(fact.state.storages)
                ),
            ),
        )
        for fact in facts
    ]
    (note,) = plan_of([(live, turned)], hosts, gpu="h100-sxm-80gb").notes
    assert "exp_avg" in note and "another memory" in note


def test_the_text_parses_back() -> None:
    job, live = job_of(ARCH, tp=2, pp=2, backend="megatron", order=ORDER_MEGATRON)
    found = plan_of([(live, facts_of(job, job.stages[0]))], {"n0": 4, "n1": 4}, gpu="h100-sxm-80gb")
    again = resolve_text(found.text)
    assert again.plan is not None, again.diagnostics
    for got, wanted in zip(again.plan.stages, found.plan.stages, strict=True):
        for field in fields(Stage):
            if field.compare:
                assert getattr(got, field.name) == getattr(wanted, field.name), field.name


def test_contradictions_are_named() -> None:
    job, live = job_of(ARCH, tp=4)
    facts = facts_of(job, job.stages[0])
    hosts = {"n0": 4, "n1": 4}
    with pytest.raises(DescribeError, match=r"processes disagree about tp: 4 on .* 2 on"):
        wrong = replace(facts[1], coordinates=replace(facts[1].coordinates, tp=(1, 2)))
        plan_of([(live, [facts[0], wrong, *facts[2:]])], hosts, gpu="h100-sxm-80gb")
    with pytest.raises(DescribeError, match="8 processes, and 7 take part"):
        plan_of([(live, facts[1:])], hosts, gpu="h100-sxm-80gb")
    with pytest.raises(DescribeError, match="both are tp 0"):
        wrong = replace(facts[1], coordinates=facts[0].coordinates)
        plan_of([(live, [facts[0], wrong, *facts[2:]])], hosts, gpu="h100-sxm-80gb")
    swapped = [replace(facts[0], state=facts[1].state), replace(facts[1], state=facts[0].state), *facts[2:]]
    with pytest.raises(DescribeError, match=r"weight of .* tensors lies otherwise than the plan's rule says"):
        plan_of([(live, swapped)], hosts, gpu="h100-sxm-80gb")


def test_degrees_that_the_tensors_deny_are_refused() -> None:
    job, live = job_of(ARCH, zero=1, tp=2)
    facts, hosts = facts_of(job, job.stages[0]), {"n0": 4, "n1": 4}
    with pytest.raises(DescribeError, match=r"hold master of .* 1 times, and zero 0 over dp 4 means 4 times"):
        plan_of([(replace(live, zero=0), facts)], hosts, gpu="h100-sxm-80gb")
    job, live = job_of(ARCH, tp=2)
    with pytest.raises(DescribeError, match=r"hold master of .* 4 times, and zero 1 over dp 4 means 1 times"):
        plan_of([(replace(live, zero=1), facts_of(job, job.stages[0]))], hosts, gpu="h100-sxm-80gb")


def test_shards_that_follow_other_buckets_are_noted() -> None:
    job, live = job_of(ARCH, zero=1, tp=4)
    facts = facts_of(job, job.stages[0])
    # Both data-parallel ranks of a tp rank hold the other's shards of the moments.
    held = {(f.coordinates.tp, f.coordinates.dp[0]): f.state for f in facts}

    def turned(fact: Facts) -> Facts:
        mine, theirs = fact.state, held[fact.coordinates.tp, 1 - fact.coordinates.dp[0]]
        shift = len(mine.storages)
        moments = [replace(f, storage=f.storage + shift) for f in theirs.fragments if f.slot == "exp_avg"]
        kept = [f for f in mine.fragments if f.slot != "exp_avg"]
        return replace(fact, state=replace(mine, storages=mine.storages + theirs.storages, fragments=(*kept, *moments)))

    found = plan_of([(live, [turned(f) for f in facts])], {"n0": 4, "n1": 4}, gpu="h100-sxm-80gb")
    (note,) = found.notes
    assert note.startswith("actor.train: exp_avg of ") and note.endswith("moves follow the framework's own shards")


def test_settings_go_before_what_is_usual() -> None:
    job, live = job_of(ARCH, tp=2, backend="megatron", order=ORDER_MEGATRON)
    facts = facts_of(job, job.stages[0])
    for settings, wanted in (((), True), ((("sp", False), ("micro_batch", 2)), False)):
        found = plan_of([(replace(live, settings=settings), facts)], {"n0": 4, "n1": 4}, gpu="h100-sxm-80gb")
        (one,) = found.plan.stages
        assert (one.sp, one.micro_batch) == (wanted, 1 if wanted else 2)


def test_the_vocabulary_may_be_padded_otherwise() -> None:
    """304 words over tp 8: in Megatron padded to 1024, here to 320 of its own accord."""
    job, live = job_of(ARCH, tp=8, backend="megatron", order=ORDER_MEGATRON)
    facts = []
    for fact in facts_of(job, job.stages[0]):
        rank, state = fact.coordinates.tp[0], fact.state
        kept = [f for f in state.fragments if f.tensor not in ("model.embed_tokens.weight", "lm_head.weight")]
        storages, cols = list(state.storages), ARCH.hidden
        for tensor in ("model.embed_tokens.weight", "lm_head.weight"):
            low, high = min(40 * rank, 304), min(40 * rank + 40, 304)
            for slot in state.slots():
                if low < high:
                    dtype = "bf16" if slot == "weight" else "fp32"
                    kept.append(
                        Fragment(
                            tensor=tensor, slot=slot, storage=len(storages), row_lo=low, row_hi=high, col_lo=0,
                            col_hi=cols, start=0, stop=(high - low) * cols, origin=0, stride=cols,
                        )
                    )  # fmt: skip
                    storages.append(FrameworkStorage(name=tensor + slot, dtype=dtype, numel=40 * cols))
        facts.append(replace(fact, state=replace(state, storages=tuple(storages), fragments=tuple(kept))))
    found = plan_of([(live, facts)], {"n0": 4, "n1": 4}, gpu="h100-sxm-80gb")
    (note,) = found.notes
    assert "the vocabulary is padded to a multiple of 320, not of 1024" in note
