"""Which parts of a rank lie in host memory: whole ones, in order, until the share is reached."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nereus.ir.offload import in_host, least_in_host, most_in_host

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=12)
SHARES = st.floats(0.01, 0.99)


def walked(sizes: list[int], share: float) -> list[bool]:
    """As HybridDeviceOptimizer walks its parameters."""
    threshold, given_away, found = sum(sizes) * share, 0, []
    for size in sizes:
        goes = size > 0 and given_away < threshold
        given_away += size * goes
        found.append(goes)
    return found


@given(SIZES, SHARES)
def test_a_rank_gives_away_whole_parts_until_the_share_is_reached(sizes: list[int], share: float) -> None:
    assert in_host(np.array(sizes), share).tolist() == walked(sizes, share)


@given(SIZES, SHARES, st.randoms())
def test_bytes_are_bounded_whatever_the_order(sizes: list[int], share: float, rng) -> None:  # type: ignore[no-untyped-def]
    rng.shuffle(sizes)
    there = sum(size for size, goes in zip(sizes, walked(sizes, share), strict=True) if goes)
    assert least_in_host(sum(sizes), share) <= there <= most_in_host(sum(sizes), share, max(sizes))


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=12), SHARES)
def test_experts_are_walked_for_themselves(parts: list[tuple[int, bool]], share: float) -> None:
    sizes, apart = np.array([size for size, _ in parts]), np.array([expert for _, expert in parts])
    found = in_host(sizes, share, apart)
    for mask in (apart, ~apart):
        assert found[mask].tolist() == walked(sizes[mask].tolist(), share)


def test_every_share_of_a_coordinate_is_walked_alone() -> None:
    numel = np.array([[4, 4, 0], [0, 2, 6]])
    assert in_host(numel, 0.5).tolist() == [[True, False, False], [False, True, True]]
