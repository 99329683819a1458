"""Elastic model units: the smallest sets of devices that hold a stage's state completely."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1024)
def unit_of_dp(
    *, tp: int, cp: int, dp: int, ep: int, etp: int, num_shards: int, num_expert_shards: int, order: str
) -> tuple[int, ...]:
    """Number of the unit of every data-parallel rank; units are closed under tp, pp, cp, ep and the shard groups of
    every slot, and numbered by their first rank.

    Expert ranks are the ranks of a pipeline stage counted anew in ``order``, as in ``Layout.expert_coordinates``: they
    may cross dp, and then data-parallel ranks belong together that without experts would be replicas.
    """
    sizes = {"tp": tp, "cp": cp, "dp": dp}
    axes = [axis for axis in order.split("-") if axis in sizes]
    num_ranks = tp * cp * dp
    expert_sizes = {"tp": etp, "ep": ep, "dp": max(1, num_ranks // (ep * etp))}
    expert_axes = [axis for axis in order.split("-") if axis in expert_sizes]
    if "ep" not in expert_axes:
        expert_axes.insert(expert_axes.index("dp"), "ep")
    alike_axes = [axis for axis in axes if axis != "tp"]
    # Two groupings of the ranks, and dp itself; units are the connected sets.
    num_dense = dp * cp // num_shards
    root = list(range(dp + num_dense + -(-expert_sizes["dp"] // num_expert_shards)))

    def find(group: int) -> int:
        while root[group] != group:
            root[group] = root[root[group]]
            group = root[group]
        return group

    for rank in range(num_ranks):
        own = {axis: _coordinate(rank, axes, sizes, axis) for axis in alike_axes}
        dense = _place(own, alike_axes, sizes) // num_shards
        expert = _coordinate(rank, expert_axes, expert_sizes, "dp") // num_expert_shards
        root[find(dp + dense)] = find(own["dp"])
        root[find(dp + num_dense + expert)] = find(own["dp"])
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(find(rank), len(numbers)) for rank in range(dp))


def _place(own: dict[str, int], axes: list[str], sizes: dict[str, int]) -> int:
    """Number of a rank among those that it is counted with along ``axes``, fastest first."""
    place, stride = 0, 1
    for axis in axes:
        place += own[axis] * stride
        stride *= sizes[axis]
    return place


def _coordinate(rank: int, axes: list[str], sizes: dict[str, int], wanted: str) -> int:
    for axis in axes:
        if axis == wanted:
            return rank % sizes[axis]
        rank //= sizes[axis]
    raise AssertionError(f"no axis {wanted} in {axes}")
