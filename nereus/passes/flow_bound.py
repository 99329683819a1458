"""The least time that any routing to the chosen placement needs: the value of the flow programme, proved by its prices.

Small programmes are solved as they are; large ones with places, nodes and demands of equal parts merged, so that their
size hardly grows with the number of GPUs. Either way the figure that is returned is what ``priced_bound`` proves from
the prices that were found: a wrong or weak solution makes it low, never wrong. It is exact for fractional routings
through holders and wanters, between GPUs whose links inside a node are faster than the host link; see
``flow_programme`` and ``flow_prices`` for what is a relaxation elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.ir.holdings import Topology
from nereus.models.priors import HOST_COPY_BYTES_PER_S
from nereus.passes.bound import HOST_COPY
from nereus.passes.commodities import Commodities, commodities_of_diff
from nereus.passes.diff import Diff
from nereus.passes.flow_prices import Prices, as_weights, priced_bound
from nereus.passes.flow_programme import FlowProgramme, FlowSolution
from nereus.passes.links import Links, rail_names

#: Wanters and senders up to which the programme is solved unmerged: about 20 ms.
MAX_UNMERGED = 4000
#: A merged programme whose prices prove less than this share of its value is solved again unmerged, up to this size.
GOOD, MAX_AGAIN = 0.995, 40_000
EXACT = 1 - 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowBound:
    transfer_s: float  # proved
    limited_by: str
    solution: FlowSolution | None  # None where nothing has to flow
    merged: bool
    #: What proves it, as ``Bounds.prices``.
    prices: tuple[tuple[str, int, int], ...] = ()


def diff_flow_bound(diff: Diff, links: Links) -> FlowBound:
    return flow_bound(commodities_of_diff(diff, links), links, diff.topology)


def flow_bound(commodities: Commodities, links: Links, topology: Topology) -> FlowBound:
    copies = commodities.host_copy_bytes / HOST_COPY_BYTES_PER_S
    copies_s = float(copies.max(initial=0.0))
    copying = f"copying inside host memory of {topology.nodes[int(copies.argmax())].name}"
    if not commodities.num_demands:
        return FlowBound(
            transfer_s=copies_s, limited_by=copying if copies_s else "nothing moves", solution=None, merged=False
        )
    proved, solution, merged = solve_flows(commodities, links)
    if copies_s > proved:
        node = int(copies.argmax())
        return FlowBound(
            transfer_s=copies_s,
            limited_by=copying,
            solution=solution,
            merged=merged,
            prices=((HOST_COPY, node, 1),),
        )
    limited_by = _dearest(solution.prices, topology) if solution else "all ports together"
    found = solution.prices if solution else _even_prices(links)
    # What is proved is a relaxation of the programme in places: there its dearest port alone may prove more.
    proofs = [as_weights(prices) for prices in (found, _dearest_alone(found))]
    seconds, prices = max((priced_bound(commodities, links, rounded), rows) for rounded, rows in proofs)
    return FlowBound(transfer_s=seconds, limited_by=limited_by, solution=solution, merged=merged, prices=prices)


def solve_flows(commodities: Commodities, links: Links) -> tuple[float, FlowSolution | None, bool]:
    """(seconds proved, solution, whether it is merged); no solution where nothing flows or the solver gives up."""
    if not commodities.num_demands:
        return 0.0, None, False
    unit_s = priced_bound(commodities, links, _even_prices(links))
    size = len(commodities.wanter_place) + len(commodities.holder_place)
    merged = size > MAX_UNMERGED
    best = _attempt(commodities, links, unit_s, merge=merged, wide=False)
    # Prices that prove less than their value: what was merged is not alike, or a way that was left out is cheaper.
    if merged and size <= MAX_AGAIN and (best is None or best[0] < GOOD * best[1].value_s):
        again = _attempt(commodities, links, unit_s, merge=False, wide=False)
        if again is not None and (best is None or again[0] >= best[0]):
            best, merged = again, False
    if not merged and (best is None or best[0] < EXACT * best[1].value_s):
        again = _attempt(commodities, links, unit_s, merge=False, wide=True)
        if again is not None and (best is None or again[0] >= best[0]):
            best = again
    return (*best, merged) if best is not None else (unit_s, None, False)


def _attempt(
    commodities: Commodities, links: Links, unit_s: float, *, merge: bool, wide: bool
) -> tuple[float, FlowSolution] | None:
    """(seconds proved, solution); None where the solver gives up: the bound is then lower, not wrong."""
    try:
        solution = FlowProgramme(commodities, links, unit_s, wide=wide).solve(merge=merge)
    except RuntimeError:
        return None
    return priced_bound(commodities, links, solution.prices), solution


def _even_prices(links: Links) -> Prices:
    gpus, nics = np.ones(links.num_devices), np.ones(len(links.rail))
    return Prices(gpu_out=gpus, gpu_in=gpus, nic_out=nics, nic_in=nics)


def _dearest_alone(prices: Prices) -> Prices:
    columns = {name: getattr(prices, name) for name in ("gpu_out", "gpu_in", "nic_out", "nic_in")}
    most = max(float(column.max(initial=0.0)) for column in columns.values())
    name = next(name for name, column in columns.items() if column.max(initial=0.0) == most)
    alone = {other: np.zeros(len(column)) for other, column in columns.items()}
    alone[name][int(columns[name].argmax())] = 1.0
    return Prices(**alone)


def _dearest(prices: Prices, topology: Topology) -> str:
    """The kind of port that weighs most, with its dearest one and how many share the weight."""
    kinds = (
        ("NIC intake", prices.nic_in, rail_names(topology)),
        ("NIC output", prices.nic_out, rail_names(topology)),
        ("GPU intake", prices.gpu_in, [str(device) for device in topology.devices]),
        ("GPU output", prices.gpu_out, [str(device) for device in topology.devices]),
    )
    what, weights, names = max(kinds, key=lambda kind: float(kind[1].sum()))
    others = int((weights > 1e-6).sum()) - 1
    return f"{what} of {names[int(weights.argmax())]}" + (f" and {others} more" if others > 0 else "")
