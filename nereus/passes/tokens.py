"""tokens: memory that holds in every order that a DAG allows, as an assignment that is checked in linear time.

Free bytes of a space are tokens: those free at the start, and those of every release. Each acquire is given its bytes;
a release's tokens go to an acquire along an edge release -> acquire, so they are there whenever the acquire starts. If
a DAG is safe as it is, an assignment along orders that it already has exists (every set of acquires needs at most what
is free and what precedes one of them: Hall's condition), and a maximum flow finds it; a greedy walk would add edges
that nothing needs. Otherwise a flow of least cost adds few edges, all upward in the total order, so that no cycle
arises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from ortools.graph.python import max_flow, min_cost_flow

from nereus.ir.layout import IntArray
from nereus.passes.dag import Dag

#: Producer of the bytes that are free at the start.
INITIAL = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """``uses``: int64 ``[n, 4]``: space, producer (a release, or INITIAL), acquire, bytes. ``added``: edges that the
    DAG did not imply, ``[m, 2]``."""

    uses: IntArray
    added: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """No assignment exists: even one after the other, in the total order, ``space`` lacks ``num_bytes``."""

    space: int
    num_bytes: int


def most_by_tokens(dag: Dag, num_spaces: int) -> IntArray | None:
    """Bytes beyond its start that no space ever exceeds, proved by an assignment; None where there is none so small.

    Where the acquires of a space follow each other, as in a rank's waves, it is what the worst state holds: an acquire
    and all before it, without what precedes it.
    """
    acquires, releases = _by_space(dag, dag.acquired), _by_space(dag, dag.released)
    reach = _Reach(dag, releases, acquires)
    most = np.zeros(num_spaces, dtype=np.int64)
    for space, takers in acquires.items():
        givers = releases.get(space, np.zeros(0, dtype=np.int64))
        gone = dag.released[givers] @ reach.table(givers, takers)
        most[space] = max(int((np.cumsum(dag.acquired[takers]) - gone).max()), 0)
    found = assign_tokens(dag, most, reach)
    if isinstance(found, Short) or len(found.added):
        return None
    return most if check_tokens(with_tokens(dag, found), found, most) is None else None


def assign_tokens(dag: Dag, free: IntArray, reach: _Reach | None = None) -> Tokens | Short:
    """``free``: bytes of each space that are free at the start."""
    acquires, releases = _by_space(dag, dag.acquired), _by_space(dag, dag.released)
    reach = reach or _Reach(dag, releases, acquires)
    uses: list[IntArray] = []
    added: list[tuple[int, int]] = []
    for space, takers in acquires.items():
        givers = releases.get(space, np.zeros(0, dtype=np.int64))
        before = reach.table(givers, takers)
        flow = _flow(dag, int(free[space]), givers, takers, before)
        if flow is None:
            before_or_can = before | (givers[:, None] < takers[None, :])
            flow = _flow(dag, int(free[space]), givers, takers, before_or_can, needless=~before)
        if flow is None:
            total = np.cumsum(np.where(dag.space == space, dag.acquired, 0))
            back = np.cumsum(np.where(dag.space == space, dag.released, 0))
            short = int((total - back + np.where(dag.space == space, dag.released, 0)).max()) - int(free[space])
            return Short(space=space, num_bytes=short)
        rows = np.argwhere(flow > 0)
        producer = np.concatenate(([INITIAL], givers))[rows[:, 0]]
        taker, num_bytes = takers[rows[:, 1]], flow[rows[:, 0], rows[:, 1]]
        uses.append(np.stack((np.full(len(rows), space), producer, taker, num_bytes), axis=1))
        fresh = rows[(rows[:, 0] > 0) & ~np.vstack((np.ones((1, len(takers)), dtype=bool), before))[tuple(rows.T)]]
        added += zip(givers[fresh[:, 0] - 1].tolist(), takers[fresh[:, 1]].tolist(), strict=True)
    return Tokens(
        uses=np.concatenate(uses) if uses else np.zeros((0, 4), dtype=np.int64),
        added=np.array(added, dtype=np.int64).reshape(-1, 2),
    )


def with_tokens(dag: Dag, tokens: Tokens) -> Dag:
    """``dag`` with an edge for every use of a release's tokens."""
    used = tokens.uses[tokens.uses[:, 1] != INITIAL][:, 1:3]
    return replace(dag, edges=np.unique(np.concatenate((dag.edges, used)), axis=0))


def check_tokens(dag: Dag, tokens: Tokens, free: IntArray) -> str | None:
    """What is wrong with the certificate, or None: every acquire is given exactly its bytes, nobody gives more than it
    has, and whoever gives precedes by an edge. Linear in operations, edges and uses."""
    space, producer, taker, num_bytes = (tokens.uses[:, column] for column in range(4))
    if bool((num_bytes <= 0).any()):
        return "a use without bytes"
    if len(taker) and (int(taker.min()) < 0 or int(max(taker.max(), producer.max())) >= dag.num_ops):
        return "a use of an operation that is not there"
    if bool((dag.space[taker] != space).any()):
        return "an acquire is given bytes of another space"
    given = np.bincount(taker, weights=num_bytes, minlength=dag.num_ops).astype(np.int64)
    wrong = np.flatnonzero(given != np.where(dag.space >= 0, dag.acquired, 0))
    if len(wrong):
        at = int(wrong[0])
        return f"operation {at} acquires {int(dag.acquired[at]):,} bytes and is given {int(given[at]):,}"
    initial = producer == INITIAL
    first = np.bincount(space[initial], weights=num_bytes[initial], minlength=len(free)).astype(np.int64)
    over = np.flatnonzero(first > free)
    if len(over):
        at = int(over[0])
        return f"space {at} has {int(free[at]):,} bytes free at the start and gives {int(first[at]):,}"
    giver, then, amount = producer[~initial], taker[~initial], num_bytes[~initial]
    if bool((dag.space[giver] != space[~initial]).any()):
        return "a release gives bytes of another space"
    gone = np.bincount(giver, weights=amount, minlength=dag.num_ops).astype(np.int64)
    over = np.flatnonzero(gone > dag.released)
    if len(over):
        at = int(over[0])
        return f"operation {at} releases {int(dag.released[at]):,} bytes and gives {int(gone[at]):,}"
    count = dag.num_ops
    lacking = np.flatnonzero(~np.isin(giver * count + then, dag.edges[:, 0] * count + dag.edges[:, 1]))
    if len(lacking):
        at = int(lacking[0])
        return f"operation {int(then[at])} uses what operation {int(giver[at])} releases and does not follow it"
    return None


def _by_space(dag: Dag, num_bytes: IntArray) -> dict[int, IntArray]:
    """Space -> operations with bytes, ascending."""
    ops = np.flatnonzero((dag.space >= 0) & (num_bytes > 0))
    if not len(ops):
        return {}
    order = np.argsort(dag.space[ops], kind="stable")
    spaces, first = np.unique(dag.space[ops][order], return_index=True)
    return dict(zip(spaces.tolist(), np.split(ops[order], first[1:]), strict=True))


class _Reach:
    """Which releases precede which acquires of their space: bits carried along the edges in the total order. An
    operation's bits go when its last successor has read them."""

    def __init__(self, dag: Dag, releases: dict[int, IntArray], acquires: dict[int, IntArray]) -> None:
        wanted = [op for space, ops in releases.items() if space in acquires for op in ops.tolist()]
        self.bit = {op: at for at, op in enumerate(wanted)}
        self.seen: dict[int, int] = {}
        takers = {op for space, ops in acquires.items() if space in releases for op in ops.tolist()}
        if not wanted or not takers:
            return
        order = np.argsort(dag.edges[:, 1], kind="stable")
        sources = dag.edges[order, 0].tolist()
        bounds = np.searchsorted(dag.edges[order, 1], np.arange(dag.num_ops + 1)).tolist()
        left = np.bincount(dag.edges[:, 0], minlength=dag.num_ops).tolist()
        carried: dict[int, int] = {}
        for op in range(min(wanted), max(takers) + 1):
            bits = 0
            for before in sources[bounds[op] : bounds[op + 1]]:
                bits |= carried.get(before, 0)
                left[before] -= 1
                if not left[before]:
                    carried.pop(before, None)
            if op in takers:
                self.seen[op] = bits
            if op in self.bit:
                bits |= 1 << self.bit[op]
            if bits and left[op]:
                carried[op] = bits

    def table(self, givers: IntArray, takers: IntArray) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """``[release, acquire]``: whether the first precedes the second."""
        found = np.zeros((len(givers), len(takers)), dtype=bool)
        for column, taker in enumerate(takers.tolist()):
            bits = self.seen.get(taker, 0)
            if bits:
                found[:, column] = [bits >> self.bit[giver] & 1 for giver in givers.tolist()]
        return found


def _flow(
    dag: Dag,
    free: int,
    givers: IntArray,
    takers: IntArray,
    allowed: np.ndarray[tuple[int, int], np.dtype[np.bool_]],
    needless: np.ndarray[tuple[int, int], np.dtype[np.bool_]] | None = None,
) -> IntArray | None:
    """Bytes ``[INITIAL and releases, acquire]``; None where not every acquire gets its own. ``needless``: pairs whose
    edge is better avoided."""
    count, demand = len(givers) + 1, dag.acquired[takers]
    first, then = np.nonzero(np.vstack((np.ones((1, len(takers)), dtype=bool), allowed)))
    source, sink = count + len(takers), count + len(takers) + 1
    supply = np.concatenate(([max(free, 0)], dag.released[givers]))
    tails = np.concatenate((np.full(count, source), first, count + np.arange(len(takers))))
    heads = np.concatenate((np.arange(count), count + then, np.full(len(takers), sink)))
    capacity = np.concatenate((supply, np.minimum(supply[first], demand[then]), demand))
    middle = slice(count, count + len(first))
    if needless is None:
        plain = max_flow.SimpleMaxFlow()
        arcs = plain.add_arcs_with_capacity(tails.astype(np.int32), heads.astype(np.int32), capacity)
        status = plain.solve(source, sink)
        assert status == plain.OPTIMAL, status
        flows, total = plain.flows(arcs), plain.optimal_flow()
    else:
        cheap = min_cost_flow.SimpleMinCostFlow()
        cost = np.zeros(len(tails), dtype=np.int64)
        cost[middle] = np.vstack((np.zeros((1, len(takers)), dtype=bool), needless))[first, then]
        arcs = cheap.add_arcs_with_capacity_and_unit_cost(
            tails.astype(np.int32), heads.astype(np.int32), capacity, cost
        )
        amount = int(min(supply.sum(), demand.sum()))
        cheap.set_node_supply(source, amount)
        cheap.set_node_supply(sink, -amount)
        status = cheap.solve_max_flow_with_min_cost()
        assert status == cheap.OPTIMAL, status
        flows, total = cheap.flows(arcs), cheap.maximum_flow()
    if int(total) < int(demand.sum()):
        return None
    found = np.zeros((count, len(takers)), dtype=np.int64)
    found[first, then] = np.asarray(flows)[middle]
    return found
