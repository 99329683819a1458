"""Each baseline follows its own rules: sources, what it allocates, what it cannot do, how it fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from passes.plans import ARCHS, WORKLOAD, cluster, offloaded, stage, trainer

from nereus.ir.plan import Model, Plan
from nereus.lang.api import resolve_text
from nereus.sim.baselines import BASELINES, Answer, build_problem, job_of
from nereus.sim.baselines.answer import STORAGE
from nereus.sim.baselines.via_storage import RESTART_S, STORAGE_BYTES_PER_S
from nereus.sim.engine import simulate

BY_NAME = {baseline.name: baseline for baseline in BASELINES}
ACTOR = Model(name="actor", arch=ARCHS[0], source="tiny")
CRITIC = Model(name="critic", arch=ARCHS[0], source="tiny", head="value")


def solve(name: str, old: Plan, new: Plan) -> Answer:
    return BY_NAME[name].solve(build_problem(old, new))


def data_parallel(old_gpus: int, new_gpus: int, **settings: object) -> tuple[Plan, Plan]:
    on = cluster(4, 4)
    old, new = (trainer(on, on.devices[:count], **settings) for count in (old_gpus, new_gpus))
    return old, new


def test_first_replica_reads_from_rank_0_only() -> None:
    answer = solve("first replica", *data_parallel(4, 8))
    _, query, _ = answer.steps
    assert query.transfers
    assert {t.src % 8 for t in query.transfers} == {0}
    # GPUs never hold the old and the new state together.
    both = max(answer.problem.set_bytes("actor.train").new[:8])
    assert answer.gpu_peak_bytes - int(answer.base_bytes[0]) <= both


def test_round_robin_takes_replicas_in_turn_whatever_node_they_are_on() -> None:
    answer = solve("round robin", *data_parallel(4, 8))
    assert {(t.src, t.dst) for t in answer.steps[0].transfers} == {(device % 4, device) for device in range(4, 8)}


def test_round_robin_prefers_the_replica_it_is_in() -> None:
    """TP 2 -> 1: half of the weights is there, the other half comes from the own tensor-parallel group."""
    answer = solve("round robin", *[trainer(cluster(4, 4), tp=tp) for tp in (2, 1)])
    assert {(t.src // 2, t.dst // 2) for t in answer.steps[0].transfers} == {(i, i) for i in range(4)}


def test_least_loaded_stays_in_the_node_and_shares_the_load() -> None:
    on = cluster(4, 4)
    old, new = trainer(on, (*on.devices[:2], *on.devices[4:6])), trainer(on, on.devices)
    answer = solve("least loaded", old, new)
    sent = np.zeros(8, dtype=np.int64)
    for t in answer.steps[0].transfers:
        assert t.src // 4 == t.dst // 4
        sent[t.src] += t.num_bytes
    senders = sent[sent > 0]
    assert len(senders) == 4
    assert senders.max() < 1.5 * senders.min()
    # Buffers for all peers lie beside old and new parameters.
    assert answer.gpu_peak_bytes > solve("round robin", old, new).gpu_peak_bytes


def test_templates_broadcast_whole_layers_to_the_group() -> None:
    old, new = data_parallel(4, 8, pp=2)
    answer = solve("templates", old, new)
    assert answer.cannot is None
    state = answer.problem.set_bytes("actor.train")
    # Four replicas, two of them new: the broadcast also reaches the second old one.
    whole = int(state.kept[:2].sum() + state.new[:2].sum())
    assert answer.moved_bytes == pytest.approx(3 * whole, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tp": 2}, "tp changes"),
        ({"zero": 1}, "sharded"),
        ({"cp": 2, "pp": 2}, "context"),
    ],
)
def test_templates_cannot(settings: dict[str, object], why: str) -> None:
    on = cluster(4, 4)
    answer = solve("templates", trainer(on), trainer(on, **settings))
    assert answer.cannot is not None
    assert why in answer.cannot
    with pytest.raises(ValueError, match="cannot"):
        job_of(answer)


def test_templates_end_the_job_where_no_group_keeps_a_layer() -> None:
    on = cluster(4, 4)
    answer = solve("templates", trainer(on, on.devices[:4]), trainer(on, on.devices[4:]))
    assert answer.cannot is not None
    assert "no group keeps" in answer.cannot


def _swap(mode: str) -> tuple[Plan, Plan]:
    on = cluster(2, 2)
    halves = (on.devices[:2], on.devices[2:])
    plans = []
    for first, second in (halves, halves[::-1]):
        stages = (stage(ACTOR, "train", first), stage(CRITIC, "train", second))
        workload = replace(WORKLOAD, mode=mode)
        plans.append(Plan(cluster=on, models=(ACTOR, CRITIC), workload=workload, stages=stages))
    return plans[0], plans[1]


def test_independent_migrations_that_swap_gpus_never_end() -> None:
    answer = solve("independent", *_swap("async"))
    assert answer.fails is not None
    assert "for ever" in answer.fails
    outcome = simulate(job_of(answer))
    assert outcome.deadlock is not None
    # Where stages take turns nobody owns a GPU, and memory is ample.
    again = solve("independent", *_swap("sync"))
    assert again.fails is None
    assert simulate(job_of(again)).finished


def test_the_paper_finds_no_order_for_a_swap() -> None:
    answer = solve("primitives", *_swap("async"))
    assert answer.fails is not None
    assert "no Destroy frees" in answer.fails
    assert solve("primitives", *_swap("sync")).fails is None


@pytest.mark.parametrize(
    ("settings", "why"), [({"cp": 2}, "context"), ({"fsdp": 2}, "sharded"), ({"tp": 1, "pp": 3}, "nest")]
)
def test_primitives_cannot(settings: dict[str, object], why: str) -> None:
    on = cluster(6)
    answer = solve("primitives", trainer(on, tp=2), trainer(on, **settings))
    if why == "nest":  # (tp 2, pp 1) and (tp 1, pp 3) have a common layout: one GPU
        assert answer.cannot is None
        return
    assert answer.cannot is not None
    assert why in answer.cannot


def test_primitives_know_no_sharded_optimizer_state() -> None:
    """With ZeRO the paper's units still hold all of it, so more moves than there is."""
    plain, sharded = (solve("primitives", *data_parallel(4, 8, zero=zero)) for zero in (0, 1))
    assert plain.moved_bytes == sharded.moved_bytes
    assert plain.altered is None
    assert sharded.altered is not None
    # 8B on one GPU each: 14 bytes per parameter and gradients fit nowhere.
    plan = _eight_b(1, tp=1, zero=1)
    answer = solve("primitives", plan, replace(plan, stages=tuple(replace(s, tp=2, dp=4) for s in plan.stages)))
    assert answer.cannot is not None
    assert "does not fit" in answer.cannot


def test_host_memory_of_a_node_adds_up_over_steps_on_its_other_gpus() -> None:
    """Two replicas split at once on one node: neither waits for the other to free its part of the host's memory."""
    on = cluster(4)
    state = tuple(replace(s, host=s.name != "weight") for s in stage(ACTOR, "train", on.devices).slots)
    old, new = (trainer(on, tp=tp, slots=state) for tp in (2, 1))
    answer = solve("primitives", old, new)
    assert answer.fails is None
    outcome = simulate(job_of(answer))
    assert (outcome.peak_bytes <= answer.peak_bytes).all()
    size = answer.problem.set_bytes("actor.train")
    assert answer.peak_bytes[4] == (size.old + size.new + 2 * size.kept)[4]


def test_sleep_and_wake_switch_whole_hybrid_replicas_only() -> None:
    on = cluster(4)
    train = stage(ACTOR, "train", on.devices)

    def plan(devices: int, **settings: object) -> Plan:
        rollout = stage(ACTOR, "generate", on.devices[:devices], engine="vllm", **settings)
        return Plan(cluster=on, models=(ACTOR,), workload=WORKLOAD, stages=(rollout, train))

    assert solve("sleep/wake", plan(4), plan(2)).cannot is None
    assert solve("sleep/wake", plan(2), plan(4)).moved_bytes == 0
    assert "engines change" in str(solve("sleep/wake", plan(4), plan(4, tp=2)).cannot)
    moved = solve(
        "sleep/wake",
        plan(4),
        Plan(cluster=on, models=(ACTOR,), workload=WORKLOAD, stages=(replace(train, dp=2, tp=2),)),
    )
    assert moved.cannot is not None


def test_storage_is_read_and_written_once_over_its_one_port() -> None:
    answer = solve("via storage", *data_parallel(4, 8))
    save, load = answer.steps
    assert {t.dst for t in save.transfers} == {STORAGE}
    assert {t.src for t in load.transfers} == {STORAGE}
    outcome = simulate(job_of(answer))
    assert outcome.makespan_s == pytest.approx(RESTART_S + answer.moved_bytes / STORAGE_BYTES_PER_S, rel=0.01)


def _eight_b(models: int, *, tp: int = 4, zero: int = 0) -> Plan:
    named = ['model actor = "llama-3.1-8b"', 'model critic = "llama-3.1-8b" { head = value }'][:models]
    stages = [
        f"stage {name}.train {{ backend = megatron  on = n0  tp = {tp}  zero = {zero}  recompute = full }}"
        for name in ("actor", "critic")[:models]
    ]
    text = "\n".join(
        [
            'cluster { node n0 { gpus = 8 x "h200-sxm-141gb"  nic = 25 GB/s  host_mem = 2 TiB } }',
            *named,
            "workload { algorithm = ppo  prompts = 64  mini_batch = 64 }",
            *stages,
        ]
    )
    plan = resolve_text(text).plan
    assert plan is not None
    return plan


def test_storage_is_in_the_range_of_published_figures() -> None:
    """MCP, 8B, one model: 330-487 s. UCP, actor and critic: 696-981 s, with a conversion that is not in here."""
    one, two = (_eight_b(count) for count in (1, 2))
    seconds = []
    for plan in (one, two):
        new = replace(plan, stages=tuple(replace(s, tp=8, dp=1) for s in plan.stages))
        answer = solve("via storage", plan, new)
        seconds.append(answer.outside_s + simulate(job_of(answer)).makespan_s)
    assert 290 <= seconds[0] <= 487
    assert 400 <= seconds[1] <= 981


@pytest.mark.parametrize("name", ["primitives", "templates"])
def test_units_know_no_state_that_lies_partly_in_host_memory(name: str) -> None:
    old, new = (offloaded(plan, 0.5) for plan in data_parallel(4, 8))
    answer = solve(name, old, new)
    assert answer.cannot is not None and "state partly in host memory" in answer.cannot
