"""The flow bound against the programme written out, all whole routings, and the simple port bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from passes.flow_oracle import best_whole_routing, flow_lp
from passes.plans import gpu, node, pairs
from passes.profiles import examples

from nereus.ir.cluster import Cluster
from nereus.ir.holdings import Topology, join_clusters
from nereus.ir.plan import Plan
from nereus.passes.bound import bounds
from nereus.passes.commodities import Flow, commodities_of_flows
from nereus.passes.diff import diff
from nereus.passes.flow_bound import diff_flow_bound, flow_bound
from nereus.passes.flow_prices import Prices, priced_bound
from nereus.passes.flow_programme import FlowProgramme
from nereus.passes.hold import hold
from nereus.passes.links import Links
from nereus.passes.place import Place, pin


def topology(
    *sizes: int, nic: tuple[float, ...] = (), fast: bool = True, pcie: float = 63e9, rails: bool = False
) -> Topology:
    """``fast``: NVLink inside nodes, else the host link's rate. ``rails``: every GPU has a NIC of its own."""
    kind = replace(gpu(), pcie_bytes_per_s=pcie)
    if not fast:
        kind = replace(kind, intra_bytes_per_s=pcie, intra_peer_bytes_per_s=pcie)
    rates = nic or (25e9,) * len(sizes)
    nodes = tuple(
        replace(node(f"n{i}", size, nic=rate, rails=size if rails else 1), gpu=kind)
        for i, (size, rate) in enumerate(zip(sizes, rates, strict=True))
    )
    cluster = Cluster(nodes=nodes)
    return join_clusters(cluster, cluster)


def bound_s(flows: list[Flow], top: Topology) -> float:
    links = Links(top)
    return flow_bound(commodities_of_flows(flows, links), links, top).transfer_s


@st.composite
def instances(
    draw: st.DrawFn, *, hosts: bool, fast: bool | None = None, nic: float = 0.0, most: int = 3
) -> tuple[list[Flow], Topology]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda s: sum(s) > 1))
    nic = nic or draw(st.sampled_from([25e9, 50e9, 200e9]))
    top = topology(
        *sizes,
        nic=(nic,) * len(sizes),
        fast=draw(st.booleans()) if fast is None else fast,
        rails=draw(st.booleans()),
    )
    places = list(range(top.num_devices * (2 if hosts else 1)))
    flows = []
    for atom in range(draw(st.integers(1, most))):
        holders = draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique=True))
        rest = [p for p in places if p not in holders]
        if rest:
            wanters = draw(st.lists(st.sampled_from(rest), min_size=1, max_size=4, unique=True))
            num_bytes = draw(st.integers(1, 9)) * 10**9
            flows.append(
                Flow(atom=atom, num_bytes=num_bytes, holders=tuple(sorted(holders)), wanters=tuple(sorted(wanters)))
            )
    return flows or [Flow(atom=0, num_bytes=10**9, holders=(0,), wanters=(places[-1],))], top


@examples(150)
@given(instances(hosts=False, fast=True))
def test_equals_the_programme_written_out(case: tuple[list[Flow], Topology]) -> None:
    flows, top = case
    assert bound_s(flows, top) == pytest.approx(flow_lp(flows, Links(top)), rel=1e-5)


@examples(100)
@given(instances(hosts=True))
def test_never_above_the_programme_written_out(case: tuple[list[Flow], Topology]) -> None:
    flows, top = case
    links = Links(top)
    commodities = commodities_of_flows(flows, links)
    if commodities.num_demands:
        least = flow_lp(flows, links)
        assert FlowProgramme(commodities, links, 1.0, wide=True).solve(merge=False).value_s <= least * (1 + 1e-6)
        merged = FlowProgramme(commodities, links, 1.0).solve(merge=True)
        assert priced_bound(commodities, links, merged.prices) <= least * (1 + 1e-6)
        if not any(_mixed(flow, top) for flow in flows):
            assert bound_s(flows, top) >= 0.9 * least


def _mixed(flow: Flow, top: Topology) -> bool:
    """Whether GPUs and host memory of one node want the flow."""
    gpus = {top.node_of_place(p) for p in flow.wanters if not top.is_host(p)}
    return any(top.is_host(p) and top.node_of_place(p) in gpus for p in flow.wanters)


@examples(60)
@given(instances(hosts=True, most=2), st.integers(0, 2**16))
def test_no_prices_prove_more_than_the_best_whole_routing(case: tuple[list[Flow], Topology], seed: int) -> None:
    flows, top = case
    links = Links(top)
    flows = [replace(f, wanters=f.wanters[:3]) for f in flows]
    best = best_whole_routing(flows, links)
    commodities = commodities_of_flows(flows, links)
    random = np.random.default_rng(seed)
    for _ in range(5):
        sizes = (top.num_devices, top.num_devices, len(links.rail), len(links.rail))
        gpu_out, gpu_in, nic_out, nic_in = (random.random(n) ** 4 for n in sizes)
        prices = Prices(gpu_out=gpu_out, gpu_in=gpu_in, nic_out=nic_out, nic_in=nic_in)
        assert priced_bound(commodities, links, prices) <= best * (1 + 1e-9)


def test_wanters_that_feed_each_other_have_no_source() -> None:
    """A holder with a slow NIC and two wanters with fast ones: 8 s; without a flow per wanter it looks like 1 s."""
    top = topology(1, 1, 1, nic=(25e9, 200e9, 200e9), pcie=1e12)
    flows = [Flow(atom=0, num_bytes=200 * 10**9, holders=(0,), wanters=(1, 2))]
    links = Links(top)
    assert flow_lp(flows, links, per_wanter=False) == pytest.approx(1.0)
    assert flow_lp(flows, links) == pytest.approx(8.0)
    assert bound_s(flows, top) == pytest.approx(8.0)


@examples(60)
@given(pairs())
def test_at_least_the_simple_bounds(pair: tuple[Plan, Plan]) -> None:
    old, new = pin(pair[0]), pair[1]
    top = join_clusters(old.cluster, new.cluster)
    holdings = hold(old)
    difference = diff(holdings, hold(Place().apply(old, holdings, new, top).plan), top)
    links = Links(top)
    assert diff_flow_bound(difference, links).transfer_s >= bounds(difference, links).transfer_s * (1 - 1e-6)
