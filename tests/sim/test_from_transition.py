"""Jobs of compiled transitions: their times, memory and order beside the certificate; other changes of this kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from passes.plans import cluster, trainer

from nereus.lang.api import load_plan
from nereus.models.priors import commit_s
from nereus.passes.compiled import Transition
from nereus.passes.pipeline import compile_transition
from nereus.sim.engine import coarse_quantum_s, simulate
from nereus.sim.from_transition import Costs, expand, job_of
from nereus.sim.independent import components, independent_job
from nereus.sim.network import Network

PAIRS = (
    ("overlap-before", "overlap-after"),
    ("ppo-8b-2k", "ppo-8b-4k"),
    ("grpo-30b-moe-ep4", "grpo-30b-moe-ep8"),
    ("ppo-8b-zero1", "ppo-8b-zero1-lost"),
)


def compiled(old: str, new: str, root: Path) -> Transition:
    plans = [load_plan(str(root / "tests" / "plans" / f"{name}.plan")).plan for name in (old, new)]
    assert plans[0] is not None and plans[1] is not None
    return compile_transition(plans[0], plans[1])


@pytest.mark.parametrize(("old", "new"), PAIRS[:2])
def test_the_exact_run_takes_what_the_certificate_predicts(old: str, new: str, repo_root: Path) -> None:
    transition = compiled(old, new, repo_root)
    certificate = transition.certificate
    job = job_of(transition)
    outcome = simulate(job.job, quantum_s=coarse_quantum_s(job.job))
    assert outcome.safe
    # The certificate's time is of ports that carry a wave's bytes together; max-min sharing is a little slower.
    assert job.transfer_s(outcome) == pytest.approx(certificate.transfer_s, rel=0.06, abs=1e-3)
    # No run beats the bound.
    assert job.transfer_s(outcome) >= certificate.bound_transfer_s * (1 - 1e-9)
    assert job.stopped_s(outcome) == pytest.approx(certificate.downtime_s, rel=0.05)
    num_devices = transition.topology.num_devices
    gpus = (outcome.peak_bytes - transition.memory.reversible_peak)[:num_devices]
    assert (gpus <= 0).all() and gpus.max() == 0


def test_memory_ends_where_the_certificate_says(repo_root: Path) -> None:
    transition = compiled(*PAIRS[0], repo_root)
    job = job_of(transition).job
    outcome = simulate(job, quantum_s=coarse_quantum_s(job))
    for space in range(len(job.resources.space_base_bytes)):
        held = outcome.memory(job, space)[1]
        assert held[-1] == transition.memory.reversible["after the commit"][space]
        assert held.max() == outcome.peak_bytes[space]


def test_every_device_is_given_up_by_the_old_plan_and_taken_by_the_new(repo_root: Path) -> None:
    transition = compiled(*PAIRS[0], repo_root)
    job = job_of(transition).job
    index = transition.topology.index()
    for column, plan in ((job.gives, transition.old), (job.takes, transition.new)):
        devices = {index[d] for stage in plan.owners() for d in stage.ranks}
        assert sorted(column[column >= 0].tolist()) == sorted(devices)


def test_slices_add_up_and_travel_in_consecutive_waves() -> None:
    on = cluster(2, 4)
    transition = compile_transition(trainer(on, on.devices[:2], tp=2), trainer(on, on.devices[2:], tp=1, pp=2))
    rows, sizes = expand(transition)
    for number, move in enumerate(transition.schedule.moves):
        mine = rows[:, 0] == number
        assert sizes[mine].sum() == move.num_bytes
        assert (rows[mine, 2] - rows[mine, 1] == transition.schedule.wave[number]).all()
    job = job_of(transition)
    assert job.job.num_bytes.sum() == sum(m.num_bytes for m in transition.schedule.moves)


def test_costs_are_those_given() -> None:
    on = cluster(2)
    transition = compile_transition(trainer(on, on.devices[:1]), trainer(on, on.devices[1:]))
    slow = job_of(transition, Costs(message_s=0.5, agree_s=0.25))
    outcome = simulate(slow.job)
    waves = transition.schedule.num_waves
    assert job_of(transition).transfer_s(simulate(job_of(transition).job)) < 0.1
    assert slow.transfer_s(outcome) == pytest.approx(0.5 * waves, abs=1e-3)


# -- ports ------------------------------------------------------------------------------------------------------------


def test_ports_of_every_kind_of_transfer() -> None:
    on = cluster(2, 2)
    transition = compile_transition(trainer(on, on.devices[:1]), trainer(on, on.devices[1:2]))
    network = Network(transition.topology)
    rates = network.port_bytes_per_s()
    devices, nodes, gpu = 4, 2, on.nodes[0].gpu
    pairs = np.array([[0, 1], [0, 2], [0, 0], [0, devices], [devices, 1], [devices, devices + 1], [devices, 2]])
    ports, weights = network.ports(pairs[:, 0], pairs[:, 1])
    out, copies = 2 * devices, 2 * devices + 2 * nodes
    assert ports.tolist() == [
        [0, devices + 1, -1, -1],
        [0, devices + 2, out, out + nodes + 1],
        [-1, -1, -1, -1],
        [0, devices, -1, -1],
        [0, devices + 1, -1, -1],
        [-1, -1, copies, -1],
        [0, devices + 2, out, out + nodes + 1],
    ]
    alone = [
        min((rates[p] / w for p, w in zip(*row, strict=True) if p >= 0), default=np.inf)
        for row in zip(ports, weights, strict=True)
    ]
    inside = min(gpu.intra_bytes_per_s, gpu.intra_peer_bytes_per_s)
    assert alone == pytest.approx([inside, 25e9, np.inf, gpu.pcie_bytes_per_s, gpu.pcie_bytes_per_s, 100e9, 25e9])


# -- independent migration --------------------------------------------------------------------------------------------


def test_independent_stages_that_trade_places_wait_for_each_other(repo_root: Path) -> None:
    transition = compiled("swap-full", "swap-full-new", repo_root)
    parts = components(transition)
    assert {p.stage for p in parts} == {"actor.train", "critic.train"}
    moved = sum(sum(p.copies.values()) for p in parts)
    assert moved == transition.certificate.bound_moved_bytes
    launch = dict.fromkeys(("actor.train", "critic.train"), 0.0)
    stuck = simulate(independent_job(transition, parts, launch, "waits"))
    assert stuck.deadlock is not None and len(stuck.deadlock.cycle) > 2
    assert simulate(independent_job(transition, parts, launch, "pool")).deadlock is not None
    assert simulate(independent_job(transition, parts, launch, "fails")).overflows
    with pytest.raises(ValueError, match="waits, pool, fails"):
        independent_job(transition, parts, launch, "never")


def test_an_independent_stage_alone_ends_as_soon_as_its_parts_take(repo_root: Path) -> None:
    on = cluster(2, 2)
    transition = compile_transition(trainer(on, on.devices[:2], tp=2), trainer(on, on.devices[2:], tp=2))
    (part,) = components(transition)
    assert part.spare == () and sorted(part.new) == [2, 3]
    outcome = simulate(independent_job(transition, (part,), {part.stage: 3.0}, "waits"))
    assert outcome.safe and outcome.makespan_s == pytest.approx(3.0 + 1.2 + commit_s(2), abs=0.05)


def test_replicas_beyond_the_last_are_given_up_before_anything_is_copied() -> None:
    on = cluster(4)
    transition = compile_transition(trainer(on, tp=1), trainer(on, on.devices[:1], tp=1))
    (part,) = components(transition)
    assert part.spare == (1, 2, 3) and part.copies == {}
