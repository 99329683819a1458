from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from nereus.runtime.staging import Staging


@given(st.lists(st.lists(st.integers(0, 5000), max_size=6), max_size=12))
def test_it_never_holds_more_than_was_in_use_at_one_time(waves: list[list[int]]) -> None:
    staging, most = Staging(), 0
    for wave in waves:
        taken = [staging.take(size) for size in wave]
        assert all(len(data) >= size for data, size in zip(taken, wave, strict=True))
        spans = sorted((data.data_ptr(), data.data_ptr() + len(data)) for data in taken if len(data))
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        most = max(most, sum(map(len, taken)))
        assert sum(map(len, taken)) + staging.free_bytes <= most
        for data in taken:
            staging.give(data)
        assert staging.free_bytes <= most
    staging.clear()
    assert staging.free_bytes == 0


def test_the_same_wave_again_takes_the_same_memory() -> None:
    staging, seen = Staging(), []
    for _ in range(3):
        taken = [staging.take(size) for size in (4000, 100, 4000)]
        seen.append({data.data_ptr() for data in taken})
        for data in taken:
            staging.give(data)
    assert seen[0] == seen[1] == seen[2]
