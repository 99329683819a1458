"""Who keeps whose parts, and which parts only one process has."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from nereus.ir.cluster import Device
from nereus.ir.fragment import FrameworkStorage, RankState, fragments_of
from nereus.models.naming.base import Where
from nereus.models.naming.explicit import ExplicitNaming
from nereus.runtime.session.members import Member, Seat
from nereus.runtime.session.peers import sole, wards


def members(hosts: str) -> list[Member]:
    return [
        Member(number=3 * at + 1, seat=Seat(Device(f"n{host}", at)), host=host, pid=at) for at, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("hosts", "apart"), [("a", 0), ("aa", 0), ("ab", 2), ("aabb", 4), ("aaab", 2), ("aaabbb", 6), ("aabbcc", 6)]
)
def test_wards_are_on_other_machines_where_there_are_some(hosts: str, apart: int) -> None:
    found, host = wards(members(hosts)), {m.number: m.host for m in members(hosts)}
    assert sorted(found) == sorted(found.values()) == (sorted(host) if len(hosts) > 1 else [])
    assert all(keeper != ward for keeper, ward in found.items())
    assert sum(host[keeper] != host[ward] for keeper, ward in found.items()) == apart


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=5))
def test_what_one_process_holds_alone(held: list[list[int]]) -> None:
    """Process p has the rows ``held[p]`` of a matrix of six, and all of a vector."""
    states = {}
    for process, rows in enumerate(held):
        shapes = {**{f"row{row}": (1, 4) for row in rows}, "norm": (4,)}
        naming = ExplicitNaming.identity(shapes)
        fragments = []
        for storage, (name, shape) in enumerate(shapes.items()):
            cols = shape[-1] if len(shape) > 1 else 1
            segments = naming.segments(name, shape, Where())
            fragments += fragments_of(segments, num_cols=cols, slot="weight", storage=storage)
        storages = tuple(FrameworkStorage(name=name, dtype="fp32", numel=4) for name in shapes)
        states[process] = RankState(rank=process, storages=storages, fragments=tuple(fragments))
    states[len(held)] = None
    found = sole(states)
    counts = {row: sum(row in rows for rows in held) for row in range(6)}
    for process, rows in enumerate(held):
        names = {f"row{row}" for row in rows if counts[row] == 1} | ({"norm"} if len(held) == 1 else set())
        assert {f.tensor for f in found[process]} == names
    assert found[len(held)] == ()
