"""Splits of flows: every element arrives once where it is wanted, from where it is; ports are as busy as the programme
says they must be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from passes.flow_oracle import port_loads
from passes.plans import pairs
from passes.profiles import examples
from passes.test_flow_bound import instances, topology

from nereus.ir.holdings import Topology, join_clusters
from nereus.ir.plan import Plan
from nereus.lang.api import load_plan
from nereus.passes.commodities import Flow, commodities_of_flows
from nereus.passes.diff import Diff, diff
from nereus.passes.diff_flows import flows_of_diff
from nereus.passes.flow_bound import diff_flow_bound, flow_bound
from nereus.passes.hold import hold
from nereus.passes.hops import Hop
from nereus.passes.links import Links
from nereus.passes.place import Place, pin
from nereus.passes.rebalance import rebalance
from nereus.passes.split_flows import split_diff, split_flows

PLANS = Path(__file__).resolve().parents[1] / "plans"


def check_hops(hops: Sequence[Hop], flows: Sequence[Flow]) -> None:
    """Parents bring what is relayed, earlier; every wanter gets every element exactly once, and nobody else any."""
    by_atom = {flow.atom: flow for flow in flows}
    arrived: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for number, hop in enumerate(hops):
        flow = by_atom[hop.atom]
        assert 0 <= hop.lo < hop.hi <= flow.num_bytes // flow.element_bytes
        if hop.parent < 0:
            assert hop.src in flow.holders
        else:
            assert hop.parent < number
            above = hops[hop.parent]
            assert (above.atom, above.dst) == (hop.atom, hop.src)
            assert above.lo <= hop.lo and hop.hi <= above.hi
        arrived[hop.atom, hop.dst].append((hop.lo, hop.hi))
    assert set(arrived) == {(flow.atom, place) for flow in flows for place in flow.wanters}
    for (atom, _), parts in arrived.items():
        parts.sort()
        borders = [0, *(hi for _, hi in parts)]
        assert [lo for lo, _ in parts] == borders[:-1]
        assert borders[-1] == by_atom[atom].num_bytes // by_atom[atom].element_bytes


def busiest_s(hops: Sequence[Hop], flows: Sequence[Flow], links: Links, *, nics_only: bool = False) -> float:
    """Longest time that a port is busy, counted from the hops alone."""
    width = {flow.atom: flow.element_bytes for flow in flows}
    loads: dict[tuple[str, int], float] = defaultdict(float)
    for hop in hops:
        num_bytes = (hop.hi - hop.lo) * width[hop.atom]
        for port, seconds in port_loads(links, hop.src, hop.dst).items():
            loads[port] += num_bytes * seconds
    return max((s for (port, _), s in loads.items() if not nics_only or port.startswith("nic")), default=0.0)


@examples(150)
@given(instances(hosts=True), st.sampled_from([1, 10**8]))
def test_every_element_arrives_once(case: tuple[list[Flow], Topology], least: int) -> None:
    flows, top = case
    check_hops(split_flows(flows, Links(top), least_bytes=least), flows)


@examples(100)
@given(instances(hosts=False, fast=True, nic=25e9, most=5))
def test_nics_are_busy_within_one_percent_of_the_bound(case: tuple[list[Flow], Topology]) -> None:
    flows, top = case
    links = Links(top)
    hops = split_flows(flows, links, least_bytes=10**6)
    check_hops(hops, flows)
    bound = flow_bound(commodities_of_flows(flows, links), links, top).transfer_s
    assert busiest_s(hops, flows, links, nics_only=True) <= bound * 1.01


def compiled_diff(old: Plan, new: Plan) -> Diff:
    old = pin(old)
    top = join_clusters(old.cluster, new.cluster)
    holdings = hold(old)
    return diff(holdings, hold(Place().apply(old, holdings, new, top).plan), top)


@examples(40)
@given(pairs())
def test_flows_of_a_diff_are_its_demands(pair: tuple[Plan, Plan]) -> None:
    difference = compiled_diff(*pair)
    links = Links(difference.topology)
    found = flows_of_diff(difference, links)
    wanted: dict[tuple[int, int], list[int]] = defaultdict(list)
    for demand in difference.demands:
        for place in demand.wanters:
            wanted[demand.table, place] += demand.intervals.tolist()
    got: dict[tuple[int, int], list[int]] = defaultdict(list)
    for flow, table, intervals in zip(found.flows, found.tables, found.intervals, strict=True):
        assert flow.num_bytes == int(difference.tables[table].num_bytes[intervals].sum())
        for place in flow.wanters:
            got[table, place] += intervals.tolist()
    assert {k: sorted(v) for k, v in wanted.items()} == {k: sorted(v) for k, v in got.items()}
    split, hops = split_diff(difference, links, least_bytes=8)
    check_hops(hops, split.flows)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ppo-8b-2k", "ppo-8b-4k"),
        ("ppo-8b-2k", "ppo-8b-zero1"),
        ("grpo-30b-moe-ep4", "grpo-30b-moe-ep8"),
        ("overlap-before", "overlap-after"),
        ("swap-full", "swap-full-new"),
    ],
)
def test_plans_are_split_within_one_percent_of_the_bound(before: str, after: str) -> None:
    old, new = (load_plan(str(PLANS / f"{name}.plan")).plan for name in (before, after))
    assert old is not None and new is not None
    difference = compiled_diff(old, new)
    links = Links(difference.topology)
    split, hops = split_diff(difference, links)
    check_hops(hops, split.flows)
    assert busiest_s(hops, split.flows, links) <= diff_flow_bound(difference, links).transfer_s * 1.01


@examples(60)
@given(st.integers(3, 6), st.integers(1, 4), st.data())
def test_repair_of_a_bad_routing(nodes: int, num_flows: int, data: st.DataObject) -> None:
    """Everything from the first holder, directly: never worse after repair."""
    top = topology(*(1,) * nodes)
    links = Links(top)
    flows = []
    for atom in range(num_flows):
        holders = tuple(sorted(data.draw(st.sets(st.integers(0, nodes - 1), min_size=1, max_size=nodes - 1))))
        wanters = tuple(p for p in range(nodes) if p not in holders)
        flows.append(Flow(atom=atom, num_bytes=10**10, holders=holders, wanters=wanters, element_bytes=4))
    numel = 10**10 // 4
    bad = [Hop(f.atom, 0, numel, f.holders[0], place, -1) for f in flows for place in f.wanters]
    bound = flow_bound(commodities_of_flows(flows, links), links, top).transfer_s
    good = rebalance(bad, flows, links, bound, least_bytes=10**6)
    check_hops(good, flows)
    assert busiest_s(good, flows, links) <= busiest_s(bad, flows, links)


def test_repair_lets_receivers_relay() -> None:
    """One holder, five wanters: 5 s from the holder alone, 1 s when all that receive also send."""
    links = Links(topology(*(1,) * 6, nic=(1e9,) * 6))
    flow = Flow(atom=7, num_bytes=10**9, holders=(0,), wanters=(1, 2, 3, 4, 5))
    bad = [Hop(0, 0, 10**9, 0, place, -1) for place in flow.wanters]
    good = rebalance(bad, [flow], links, 1.25, least_bytes=10**6)
    check_hops(good, [flow])
    assert busiest_s(good, [flow], links) == pytest.approx(1.25, rel=0.01)
