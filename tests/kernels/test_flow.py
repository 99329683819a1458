"""Flows: through sockets and out of a process's memory, between any rows, with the sum that the definition has."""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nereus.kernels.flow import Course, Flow, calls  # noqa: E402
from nereus.kernels.move import stored  # noqa: E402
from nereus.kernels.pack import Packing, packing  # noqa: E402

pytestmark = pytest.mark.skipif(calls() is None, reason="no C compiler here")

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64]
WIDTHS = np.array([4, 2, 1, 8])
KEYS = np.array([3, (1 << 63) + 5, 7, 9], dtype=np.uint64)

BLOCKS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(1, 9),
        st.one_of(st.integers(0, 5), st.integers(0, 3000), st.just(60_000)),
        st.integers(0, 1 << 40),
        st.integers(0, 2),
        st.tuples(st.integers(0, 2), st.integers(0, 2)),
    ),
    max_size=12,
)


def sides(blocks: list[Any]) -> tuple[list[tuple[Packing, list[Any]]], list[int]]:
    """The same blocks as they lie at a sender and at a receiver, with memory for them."""
    tables: list[list[Any]] = [[], []]
    ends = np.zeros((2, 4), dtype=np.int64)
    for number, rows, cols, start, more, gaps in blocks:
        for side, (table, gap) in enumerate(zip(tables, gaps, strict=True)):
            table.append((number, int(ends[side, number]), rows, cols, cols + gap, start, cols + more))
            ends[side, number] += rows * (cols + gap)
    made = []
    rng = np.random.default_rng(len(blocks))
    for table, sizes in zip(tables, ends.tolist(), strict=True):
        what = packing(np.array(table, dtype=np.int64).reshape(-1, 7), WIDTHS)
        bits = [
            rng.integers(0, 256, (size + 1) * int(width), dtype=np.uint8)
            for size, width in zip(sizes, WIDTHS, strict=True)
        ]
        made.append((what, [torch.from_numpy(each).view(dtype) for each, dtype in zip(bits, DTYPES, strict=True)]))
    return made, ends[1].tolist()


def flow_of(what: Packing, storages: list[Any]) -> Flow:
    return Course.of(what, KEYS).at(np.array([data.data_ptr() for data in storages]))


@settings(max_examples=150, deadline=None)
@given(BLOCKS, st.sampled_from(["read", "pair", "tcp"]), st.sampled_from([0, 2048]))
def test_blocks_come_to_their_places_with_their_sum(blocks: list[Any], way: str, room: int) -> None:
    ((near, source), (far, target)), _ = sides(blocks)
    before = [data.clone() for data in target]
    out, into = flow_of(near, source), flow_of(far, target)
    wanted = stored(source, near, KEYS) if near.num_bytes else 0
    if way == "read":
        into.read(os.getpid(), out.places)
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            a, b = (
                socket.socketpair()
                if way == "pair"
                else (socket.create_connection(server.getsockname()), server.accept()[0])
            )
        with a, b:
            if room:
                a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
            gone = come = False
            while not (gone and come):
                gone = gone or out.send(a.fileno())
                come = come or into.receive(b.fileno())
                assert come or 0 < into.left_bytes <= into.num_bytes
        assert out.total() == wanted
    assert into.total() == out.summed() == wanted
    assert into.left_bytes == 0
    assert len(out.content()) == near.num_bytes and out.content() == into.content()
    # Nothing beside the blocks was written.
    back = flow_of(far, before)
    back.read(os.getpid(), into.places)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, target, strict=True))


def test_a_connection_that_ends_is_an_error() -> None:
    memory = torch.zeros(1000, dtype=torch.uint8)
    flow = Flow(np.array([[memory.data_ptr(), 1, 1000, 1000, 1, 0, 0, 0]]), 1000)
    a, b = socket.socketpair()
    with b:
        a.send(b"half")
        a.close()
        with pytest.raises(BrokenPipeError):
            flow.receive(b.fileno())
    assert flow.left_bytes == 996
    with pytest.raises(OSError):
        flow.send(-1)
