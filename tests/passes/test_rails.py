"""NICs that are bound to GPUs, from the plan's words to the proof of the saved file."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from passes.execute import compile_or_confirm, pipeline
from passes.plans import ARCHS, node, pairs, stage
from passes.profiles import examples
from verify.documents import WORKLOAD, compiled, document_of

from nereus.ir.cluster import Cluster, Device
from nereus.ir.plan import Model, Plan
from nereus.ir.transition import INTER
from nereus.ir.units import GIB
from nereus.lang.api import placed_plan_text, resolve_text
from nereus.models.priors import MESSAGE_S
from nereus.passes.compiled import Transition
from nereus.passes.flow_bound import diff_flow_bound
from nereus.passes.links import Links
from nereus.passes.route import Route, Routed, _Router
from nereus.sim.engine import simulate
from nereus.sim.from_transition import job_of
from nereus.verify.api import verify


def on(rails: int, nic: float = 40e9) -> Cluster:
    return Cluster(nodes=tuple(node(f"n{i}", 4, nic=nic, rails=rails, host_mem=1024 * GIB) for i in range(2)))


def trainer(cluster: Cluster, devices: tuple[Device, ...], **settings: object) -> Plan:
    actor = Model(name="actor", arch=ARCHS[0], source="tiny")
    return Plan(
        cluster=cluster, models=(actor,), workload=WORKLOAD, stages=(stage(actor, "train", devices, **settings),)
    )


def change(rails: int, old: slice, new: slice, **settings: object) -> Transition:
    cluster = on(rails)
    return compiled(
        trainer(cluster, cluster.devices[old], **settings),
        trainer(cluster, cluster.devices[new], **settings),
        pipeline(64, 16, 10**9),
    )


def test_one_gpu_has_its_own_nic_only() -> None:
    """A copy from one GPU to one of another node: a quarter of the node's rate, four times the time."""
    pooled, bound = (change(rails, slice(0, 1), slice(4, 5)) for rails in (1, 4))
    for found, rate in ((pooled, 40e9), (bound, 10e9)):
        assert found.certificate.bound_transfer_s == pytest.approx(found.certificate.moved_bytes / rate + MESSAGE_S)
        assert verify(document_of(found)).holds


def test_a_whole_node_uses_all_rails() -> None:
    """Tensor parallel over the node: each GPU takes its part through its own NIC, at the node's whole rate."""
    pooled, bound = (change(rails, slice(0, 4), slice(4, 8), tp=4) for rails in (1, 4))
    assert bound.certificate.moved_bytes == pooled.certificate.moved_bytes
    load = [0] * 4
    for move in bound.schedule.moves:
        if move.link == INTER:
            load[move.dst % 4] += move.num_bytes
    least = bound.certificate.bound_transfer_s - MESSAGE_S
    assert pooled.certificate.bound_transfer_s - MESSAGE_S <= least * (1 + 1e-9)
    assert sum(load) / 40e9 <= least * (1 + 1e-9) <= max(load) / 10e9 * (1 + 2e-9)
    assert max(load) <= 1.1 * sum(load) / 4
    assert verify(document_of(bound)).holds


def test_two_gpus_to_a_nic() -> None:
    found = change(2, slice(0, 1), slice(4, 5))
    assert found.certificate.bound_transfer_s == pytest.approx(found.certificate.moved_bytes / 20e9 + MESSAGE_S)


@examples(30)
@given(pairs())
def test_the_simulator_and_the_flow_programme_agree(pair: tuple[Plan, Plan]) -> None:
    """No simulated transfer is shorter than the flow programme's bound, whatever the rails."""
    found = compile_or_confirm(*pair, pipeline())
    assume(found is not None and found.schedule.moves)
    assert found is not None
    assume(any(n.rails > 1 for n in found.topology.nodes))
    job = job_of(found)
    bound = diff_flow_bound(found.diff, Links(found.topology)).transfer_s
    assert job.transfer_s(simulate(job.job)) >= bound * (1 - 1e-6)
    assert found.certificate.transfer_s >= bound * (1 - 1e-6)


@examples(30)
@given(pairs())
def test_a_repaired_routing_delivers_the_same_and_is_never_slower(pair: tuple[Plan, Plan]) -> None:
    """Repaired whether it needs it or not; the compiled result is what the verifier proves elsewhere."""
    found = compile_or_confirm(*pair, pipeline())
    assume(found is not None and found.schedule.moves)
    assert found is not None
    router = _Router(Route(min_stripe_bytes=64), found.diff)
    routed = router.run()
    repaired = router.repaired(routed.bound.transfer_s)
    assert repaired.ports.busiest_s <= routed.ports.busiest_s * (1 + 1e-9)
    assert arriving(repaired) == arriving(routed)


@examples(30)
@given(pairs())
def test_what_is_routed_together_arrives_as_one_by_one(pair: tuple[Plan, Plan]) -> None:
    found = compile_or_confirm(*pair, pipeline())
    assume(found is not None and found.schedule.moves)
    assert found is not None
    together, alone = (Route(min_stripe_bytes=64, flow_bound=0, bulk=n).apply(found.diff) for n in (1, 10**6))
    assert arriving(together) == arriving(alone)
    assert bool((together.moves.after < together.moves.relays[0]).all())


def arriving(routed: Routed) -> dict[tuple[int, int], int]:
    """Bytes per place and table."""
    found: dict[tuple[int, int], int] = {}
    for move in routed.moves:
        found[move.dst, move.table] = found.get((move.dst, move.table), 0) + move.num_bytes
    return found


TEXT = """
cluster { node n0 { gpus = 8 x "h100-sxm-80gb"  nic = 400 GB/s  rails = RAILS } }
model actor = "qwen2.5-7b"
workload { algorithm = sft  prompts = 256 }
stage actor.train { on = n0  tp = 4 }
"""


def test_the_plan_says_them() -> None:
    plan = resolve_text(TEXT.replace("RAILS", "4")).plan
    assert plan is not None and plan.cluster.nodes[0].rails == 4
    again = resolve_text(placed_plan_text(plan)).plan
    assert again is not None and again.cluster == plan.cluster
    assert [plan.cluster.nodes[0].rail(gpu) for gpu in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("rails", ["3", "0", "16", "1.5", "x"])
def test_rails_that_do_not_divide_are_refused(rails: str) -> None:
    found = resolve_text(TEXT.replace("RAILS", rails))
    assert any(d.code.startswith("NRS2") for d in found.diagnostics)
