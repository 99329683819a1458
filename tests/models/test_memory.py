"""The steady-state memory model: numbers worked out by hand, an oracle that goes device by device, and properties."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.sample_plans import (
    cluster,
    devices,
    joined,
    large,
    model,
    ppo_8b_2k,
    ppo_8b_4k,
    ppo_8b_4k_refused,
    stage,
    swap_full,
)

from nereus.ir.arch import Arch
from nereus.ir.cells import local_boxes, shares_of
from nereus.ir.cluster import Device
from nereus.ir.layout import layout_of
from nereus.ir.plan import Model, Plan, Slot, Stage, Workload
from nereus.ir.units import GB, GIB
from nereus.models.legality import legal_tp
from nereus.models.memory import (
    MemoryReport,
    engine_running_bytes,
    process_count,
    resident_state_bytes,
    steady_state,
)
from nereus.models.tensors import logical_tensors, num_params

FIRST = Device("n0", 0)


def _gb(num_bytes: int) -> float:
    return round(num_bytes / GB, 1)


# Worked out by hand: 8.03e9 parameters at 18 B over tp x pp = 4, and 34 s b h / tp bytes of activations a layer.


def test_the_4k_plan_that_is_refused() -> None:
    row = steady_state(ppo_8b_4k_refused()).worst("actor.train")
    assert (row.device, row.pp_index, row.fits) == (FIRST, 0, False)
    assert (_gb(row.need_bytes), _gb(row.capacity_bytes)) == (76.6, 72.0)
    state = sum(row.part_bytes(label) for label in ("weights", "master", "moments", "gradients"))
    assert (_gb(state), _gb(row.part_bytes("activations"))) == (36.1, 36.5)
    assert _gb(state + row.part_bytes("activations")) == 72.6
    assert row.part_bytes("4 processes") == 4 * GB
    assert row.part_bytes("logits") == 0, "the last pipeline stage has them"
    assert row.need_bytes == sum(part.num_bytes for part in row.parts)


def test_only_the_trainer_is_refused() -> None:
    report = steady_state(ppo_8b_4k_refused())
    assert {row.stage for row in report.rows if not row.fits} == {"actor.train"}


def test_the_4k_plan_that_fits() -> None:
    report = steady_state(ppo_8b_4k())
    train, learn = report.worst("actor.train"), report.worst("critic.train")
    assert (_gb(train.need_bytes), _gb(train.part_bytes("logits"))) == (62.6, 4.2)
    assert (_gb(learn.need_bytes), _gb(learn.part_bytes("actor.train resident"))) == (70.5, 28.1)
    # 256 rows of padding in both models: 128256 rows are padded to a multiple of 128 x tp.
    assert learn.part_bytes("logits") == 0, "a value head has no vocabulary"
    assert report.fits


@pytest.mark.parametrize(
    "plan",
    [ppo_8b_2k(), ppo_8b_4k(zero=1), swap_full(), large(64, tp=4, pp=2, response_len=1024)],
    ids=["2k", "zero1", "swap-full", "512"],
)
def test_other_samples_fit(plan: Plan) -> None:
    assert steady_state(plan).fits


def test_a_thousand_gpus_take_no_time() -> None:
    plan = large(128, tp=8, pp=1, response_len=3072)
    start = time.process_time()
    report = steady_state(plan)
    assert time.process_time() - start < 0.2
    assert report.fits
    train = [row for row in report.rows if row.stage == "actor.train"]
    assert sum(len(row.devices) for row in train) == 1024
    assert len(train) == 2, "ref on one half, reward on the other; all else is alike"


def test_tied_embedding_is_on_both_ends() -> None:
    tied = model("actor", "qwen3-4b")
    plan = _one_stage(tied, stage(tied, "train", devices(0, 0), pp=2, zero=0))
    by_index = {row.pp_index: row.part_bytes("weights") for row in steady_state(plan).rows}
    embedding = 2 * 151936 * 2560
    assert sum(by_index.values()) == 2 * num_params(tied.arch) + embedding
    assert by_index[1] - by_index[0] == 2 * 2560, "the last stage has the final norm besides"


def test_1f1b_holds_most_on_the_first_stage_and_never_more_than_there_are() -> None:
    llama = model("actor", "llama-3.1-8b")
    deep = stage(llama, "train", devices(0, 0), pp=4)
    held = {row.pp_index: row.part_bytes("activations") for row in steady_state(_one_stage(llama, deep)).rows}
    assert [held[i] / held[3] for i in range(4)] == [4, 3, 2, 1]
    few = _one_stage(llama, deep, mini_batch=4)  # dp 2: two micro-batches of one sequence each
    held = {row.pp_index: row.part_bytes("activations") for row in steady_state(few).rows}
    assert [held[i] / held[3] for i in range(4)] == [2, 2, 2, 1]


def test_interleaving_holds_more() -> None:
    llama = model("actor", "llama-3.1-8b")
    plain = stage(llama, "train", devices(0, 0), pp=4)
    kept = _worst_part(_one_stage(llama, plain), "activations")
    interleaved = _worst_part(_one_stage(llama, replace(plain, vp=2)), "activations")
    assert interleaved / kept == pytest.approx(1 + 3 / (4 * 2))


def test_full_recompute_keeps_inputs_and_one_layer() -> None:
    llama = model("actor", "llama-3.1-8b")
    none = stage(llama, "train", devices(0, 0), tp=2)
    full = replace(none, recompute="full")
    tokens, hidden = 4096, 4096
    assert _worst_part(_one_stage(llama, none), "activations") == 32 * 17 * tokens * hidden
    assert _worst_part(_one_stage(llama, full), "activations") == 32 * tokens * hidden  # 2 B over tp 2
    assert _worst_part(_one_stage(llama, full), "working set") == 17 * tokens * hidden
    unsharded = replace(none, sp=False)
    assert _worst_part(_one_stage(llama, unsharded), "activations") == 32 * (8 + 13) * tokens * hidden


def test_sharded_state() -> None:
    llama = model("actor", "llama-3.1-8b")
    params, dp = num_params(llama.arch), 8
    expected = {
        "zero=0": (2, 4, 4, 8),
        "zero=1": (2, 4, 4 / dp, 8 / dp),
        "zero=2": (2, 4 / dp, 4 / dp, 8 / dp),
        "zero=3": (2 / dp, 4 / dp, 4 / dp, 8 / dp),
        "fsdp=8": (2 / dp, 4 / dp, 4 / dp, 8 / dp),
    }
    for setting, factors in expected.items():
        key, value = setting.split("=")
        plan = _one_stage(llama, stage(llama, "train", devices(0, 0), **{key: int(value)}))
        row = steady_state(plan).worst("actor.train")
        labels = ("weights", "gradients", "master", "moments")
        got = [row.part_bytes(label) / params for label in labels]
        assert got == pytest.approx(factors, rel=1e-5), setting
        gathered = row.part_bytes("gathered layers")
        assert gathered == (2 * (2 * 128256 * 4096 + 4096 + 2 * 218_112_000) if setting in ("zero=3", "fsdp=8") else 0)


def test_uneven_fsdp_charges_the_largest_shard() -> None:
    arch = Arch(family="llama", num_layers=1, hidden=10, num_heads=2, num_kv_heads=1, head_dim=5, ffn=6, vocab=7)
    tiny = Model(name="actor", arch=arch, source="tiny")
    plan = _one_stage(tiny, stage(tiny, "train", devices(0, 0, gpus=range(4)), fsdp=4))
    row = steady_state(plan).worst("actor.train")
    rows = {10: 3, 5: 2, 6: 2, 7: 2}  # ceil(rows / 4)
    elements = (
        2 * rows[7] * 10  # embedding, lm_head
        + 3 * rows[10]  # norms
        + 2 * rows[10] * 10  # q, o
        + 2 * rows[5] * 10  # k, v
        + 2 * rows[6] * 10  # gate, up
        + rows[10] * 6  # down
    )
    assert row.part_bytes("weights") == 2 * elements


def test_engine_and_its_idle_policies() -> None:
    llama = model("actor", "llama-3.1-8b")
    engine = stage(llama, "generate", devices(0, 0), tp=2, kv_cache_bytes=20 * GIB, idle="offload")
    train = stage(llama, "train", devices(0, 0), tp=4)
    plan = replace(_one_stage(llama, train), stages=(engine, train))
    weights = 2 * (num_params(llama.arch) + 65 * 4096) // 2  # norms are on both ranks
    running = steady_state(plan).worst("actor.generate")
    assert running.part_bytes("weights") == weights
    assert running.part_bytes("kv cache") == 20 * GIB
    assert engine_running_bytes(plan, engine) == (weights + 20 * GIB,) * 8

    def beside_training(idle: str) -> tuple[int, int, int]:
        changed = replace(plan, stages=(replace(engine, idle=idle), train))
        report = steady_state(changed)
        row = report.worst("actor.train")
        host = report.hosts[0].need_bytes
        return row.part_bytes("actor.generate resident"), row.part_bytes("actor.generate kv cache"), host

    assert beside_training("resident") == (weights, 20 * GIB, 0)
    assert beside_training("offload") == (0, 0, 8 * weights)
    assert beside_training("discard") == (0, 0, 0)


def test_memory_fraction_gives_the_cache_what_is_left() -> None:
    llama = model("actor", "llama-3.1-8b")
    plan = _one_stage(llama, stage(llama, "generate", devices(0, 0), tp=2, mem_fraction=0.6))
    row = steady_state(plan).worst("actor.generate")
    assert row.need_bytes == round(0.6 * 80 * GB)
    tiny = _one_stage(llama, stage(llama, "generate", devices(0, 0), tp=2, mem_fraction=0.1))
    assert steady_state(tiny).worst("actor.generate").part_bytes("kv cache") == 0


def test_swapped_model_is_on_the_gpu_only_while_it_runs() -> None:
    policy, ref = model("actor", "qwen3-30b-a3b"), model("ref", "qwen3-30b-a3b", frozen=True, base="actor")
    train = stage(policy, "train", devices(0, 0), ep=8, zero=1, recompute="full")
    infer = joined(ref, "infer", train, swap="host")
    plan = Plan(
        cluster=cluster("h200-sxm-141gb", 1),
        models=(policy, ref),
        workload=Workload(mini_batch=256, prompt_len=1024, response_len=7168),
        stages=(train, infer),
    )
    report = steady_state(plan)
    training, inferring = report.worst("actor.train"), report.worst("ref.infer")
    assert training.part_bytes("ref.infer resident") == 0
    assert inferring.part_bytes("actor.train resident") == resident_state_bytes(plan, train)[0]
    assert inferring.part_bytes("1 process") == GB, "stages joined by with are one process"
    experts = 48 * 128 * 3 * 2048 * 768
    local = num_params(policy.arch) - experts + experts // 8
    assert inferring.part_bytes("weights") == training.part_bytes("weights") == 2 * local
    assert report.hosts[0].parts[0].num_bytes == 8 * 2 * local
    # Each expert lives on one rank only, so its optimizer state is not sharded any further.
    dense = num_params(policy.arch) - experts
    assert training.part_bytes("master") == 4 * (dense // 8 + experts // 8)


def test_an_offloaded_trainer_brings_only_its_weights_for_inference() -> None:
    report = steady_state(ppo_8b_4k())
    infer, learn = report.worst("critic.infer"), report.worst("critic.train")
    assert infer.part_bytes("weights") == learn.part_bytes("weights")
    assert infer.part_bytes("master") == infer.part_bytes("moments") == infer.part_bytes("gradients") == 0
    assert report.worst("actor.logprob").part_bytes("master") > 0, "a resident trainer's optimizer stays where it is"


def test_slots_in_host_memory_are_charged_to_the_node() -> None:
    llama = model("actor", "llama-3.1-8b")
    slots = (Slot(name="weight", dtype="bf16"), Slot(name="master", dtype="fp32", host=True))
    plan = _one_stage(llama, stage(llama, "train", devices(0, 0), tp=4, slots=slots))
    report = steady_state(plan)
    assert report.worst("actor.train").part_bytes("master") == 0
    weights = report.worst("actor.train").part_bytes("weights")
    assert report.hosts[0].need_bytes == 8 * 2 * weights


def test_services_have_no_gpu() -> None:
    llama = model("actor", "llama-3.1-8b")
    train = stage(llama, "train", devices(0, 0), tp=4)
    judge = Stage(model="actor", kind="infer", devices=(), service="http://judge")
    plan = replace(_one_stage(llama, train), stages=(train, judge))
    assert steady_state(plan).stages == ("actor.train",)


def test_processes_of_a_device() -> None:
    plan = ppo_8b_2k()
    assert [process_count(plan, device) for device in (Device("n0", 0), Device("n0", 4), Device("n1", 0))] == [4, 4, 3]


# An oracle that shares no code: it goes rank by rank and takes boxes and shards from the layouts that transitions use.


def _oracle_state(plan: Plan, owner: Stage, device: Device) -> int:
    """Bytes of all slots on ``device``, no gradients."""
    arch, head = plan.model(owner.model).arch, plan.model(owner.model).head
    layout = layout_of(owner)
    rank = owner.ranks.index(device)
    boxes = local_boxes(logical_tensors(arch, head), layout)
    coord, shard = int(layout.coord_of_rank()[rank]), int(layout.shard_of_rank()[rank])
    total = 0
    for slot in owner.slots:
        shares = shares_of(logical_tensors(arch, head), boxes, layout, slot.name, coord)
        row = 0 if shares.share[0] < 0 else shares.share.tolist().index(shard)
        total += int((shares.stop[row] - shares.start[row]).sum()) * slot.element_bytes
    return total


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    arch = Arch(
        family="qwen2",
        num_layers=draw(st.integers(2, 6)),
        hidden=draw(st.sampled_from([24, 40])),
        num_heads=draw(st.sampled_from([4, 8])),
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=8,
        ffn=draw(st.sampled_from([16, 48])),
        vocab=draw(st.sampled_from([64, 104])),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    owner = Model(name="actor", arch=arch, source="random", head=draw(st.sampled_from(["lm", "value"])))
    tp = draw(st.sampled_from(legal_tp(arch, limit=4)))
    pp = draw(st.integers(1, min(2, arch.num_layers)))
    alike = 16 // (tp * pp) if 16 % (tp * pp) == 0 else 1
    cp = draw(st.sampled_from([c for c in (1, 1, 2, 4) if alike % c == 0]))
    dp = alike // cp
    on = devices(0, 1)[: tp * pp * alike]
    first = draw(st.integers(1, arch.num_layers - 1)) if pp == 2 else arch.num_layers
    split = (first,) if pp == 1 else (first, arch.num_layers - first)
    shard: dict[str, Any] = draw(st.sampled_from([{}, {"zero": 1}, {"zero": 3}, {"fsdp": alike}, {"zero": 2}]))
    order = draw(st.sampled_from(["tp-cp-pp-dp", "tp-cp-ep-dp-pp"]))
    place = tuple(draw(st.permutations(on)))
    train = stage(owner, "train", on, tp=tp, pp=pp, cp=cp, pp_split=split, order=order, place=place, **shard)
    return Plan(
        cluster=cluster("h100-sxm-80gb", 2),
        models=(owner,),
        workload=Workload(mini_batch=dp * draw(st.integers(1, 4)), prompt_len=8, response_len=draw(st.integers(1, 64))),
        stages=(train,),
    )


@settings(max_examples=80, deadline=None)
@given(plan=_plans())
def test_state_agrees_with_the_layouts_device_by_device(plan: Plan) -> None:
    train = plan.stage("actor.train")
    exact = [_oracle_state(plan, train, device) for device in train.ranks]
    claimed = resident_state_bytes(plan, train)
    shards = train.num_shards
    num_tensors = len(logical_tensors(plan.models[0].arch, plan.models[0].head))
    layout = layout_of(train)
    seen: dict[int, int] = {}
    group = []
    for coord in layout.coord_of_rank().tolist():
        group.append((coord, seen.get(coord, 0) // shards))
        seen[coord] = seen.get(coord, 0) + 1
    for rank, device in enumerate(train.ranks):
        assert exact[rank] <= claimed[rank], device
        fullest = max(exact[r] for r in range(len(exact)) if group[r] == group[rank])
        if shards == 1 or train.fsdp:
            assert claimed[rank] == fullest
        else:  # padding: at most one element per shard and range
            assert claimed[rank] - fullest <= 16 * num_tensors
    report = steady_state(plan)
    for row in report.rows:
        resident = sum(row.part_bytes(label) for label in ("weights", "master", "moments"))
        assert {claimed[train.ranks.index(device)] for device in row.devices} == {resident}
    assert sorted(d for row in report.rows for d in row.devices) == sorted(train.ranks)


@settings(max_examples=60, deadline=None)
@given(plan=_plans(), data=st.data())
def test_unsharded_weights_of_one_replica_make_up_the_model(plan: Plan, data: st.DataObject) -> None:
    train = replace(plan.stage("actor.train"), zero=0, fsdp=0)
    plan = replace(plan, stages=(train,))
    arch, head = plan.models[0].arch, plan.models[0].head
    weights = [row.part_bytes("weights") // 2 for row in sorted(steady_state(plan).rows, key=lambda r: r.pp_index)]
    once = sum(tensor.numel for tensor in logical_tensors(arch, head))
    copies = 0  # elements that more than one rank of the replica holds
    for tensor in logical_tensors(arch, head):
        holders = train.tp if tensor.cut is None else 1
        if tensor.cut is not None and tensor.cut.replicate:
            holders = max(1, train.tp // tensor.cut.groups)
        stages = 2 if tensor.first and tensor.last and train.pp > 1 else 1
        copies += (holders * stages - 1) * tensor.numel
    assert train.tp * sum(weights) == once + copies


@settings(max_examples=40, deadline=None)
@given(plan=_plans(), more=st.integers(2, 4))
def test_larger_micro_batches_and_longer_sequences_need_more(plan: Plan, more: int) -> None:
    train = plan.stage("actor.train")
    plan = replace(plan, workload=replace(plan.workload, mini_batch=train.dp * 12))
    need = _needs(steady_state(plan))
    bigger = replace(plan, stages=(replace(train, micro_batch=more),))
    longer = replace(plan, workload=replace(plan.workload, response_len=plan.workload.response_len + more))
    for changed in (bigger, longer):
        after = _needs(steady_state(changed))
        assert all(after[device] > need[device] for device in need)


def _needs(report: MemoryReport) -> dict[Device, int]:
    return {device: row.need_bytes for row in report.rows for device in row.devices}


def _one_stage(owner: Model, only: Stage, *, mini_batch: int = 128) -> Plan:
    return Plan(
        cluster=cluster("h100-sxm-80gb", 2),
        models=(owner,),
        workload=Workload(mini_batch=mini_batch, prompt_len=1024, response_len=3072),
        stages=(only,),
    )


def _worst_part(plan: Plan, label: str) -> int:
    return max(row.part_bytes(label) for row in steady_state(plan).rows)
