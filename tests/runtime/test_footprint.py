"""Descriptions that lie, and padding wherever it lies: nothing is overwritten, nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nereus.ir.fragment import Fragment
from nereus.ir.tensor import LogicalTensor
from nereus.runtime.adapters.base import BindError, Binding, BindingBuilder
from nereus.runtime.live import move_here

TENSORS = tuple(LogicalTensor(name=name, shape=(2, 4)) for name in ("a", "b"))


def part(tensor: str, storage: int = 0, **changes: Any) -> Fragment:
    """All of a 2 x 4 tensor at the start of a storage, but for the changes."""
    whole = {"row_lo": 0, "row_hi": 2, "col_lo": 0, "col_hi": 4, "start": 0, "stop": 8, "origin": 0, "stride": 4}
    return Fragment(tensor=tensor, slot="weight", storage=storage, **{**whole, **changes})


def binding(memory: Sequence[torch.Tensor], fragments: Sequence[Fragment]) -> Binding:
    builder = BindingBuilder(rank=0)
    for number, data in enumerate(memory):
        builder.storage(f"storage {number}", data)
    builder.fragments += fragments
    return builder.finish()


def held(dtype: torch.dtype = torch.int64) -> Binding:
    a, b = torch.arange(1, 9), torch.arange(9, 17)
    return binding([a.to(dtype), b.to(dtype)], [part("a"), part("b", 1)])


def fresh(numel: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full((numel,), 77).to(dtype)


LINE = fresh(12)
TOP = {"row_hi": 1, "stop": 4}
LOW = {"row_lo": 1, "stop": 4}


@pytest.mark.parametrize(
    ("memory", "fragments", "text"),
    [
        ([fresh(8)], [part("a"), part("b")], r"a weight .* and b weight .* wanted in the same memory"),
        ([fresh(12)], [part("a"), part("b", origin=4)], "one would overwrite the other"),
        ([LINE[:8], LINE[4:]], [part("a"), part("b", 1)], "one would overwrite the other"),
        ([fresh(8)], [part("a", stride=2)], "rows of 4 elements, 2 apart, overlap"),
        ([fresh(8)], [part("a", stride=-4, origin=4)], "overlap in storage 0"),
        ([fresh(8)], [part("a", 1)], "lies in storage 1 of 1"),
        ([fresh(8)], [part("a", -1)], "lies in storage -1 of 1"),
        ([fresh(8)], [part("a", origin=1)], "leaves its storage storage 0"),
        ([fresh(8)], [part("a", stop=9)], r"elements 0\.\.9 of rows 0\.\.2"),
        ([fresh(4), fresh(4)], [part("a", **TOP), part("a", 1, **LOW)], "in parts in storage 0 and storage 1"),
    ],
)
def test_what_cannot_be_filled_is_refused_before_anything_is_written(
    memory: list[torch.Tensor], fragments: list[Fragment], text: str
) -> None:
    with pytest.raises(BindError, match=text):
        move_here([held()], [binding(memory, fragments)], TENSORS)
    assert all((data == 77).all() for data in memory)


def test_memory_that_is_not_what_it_is_said_to_be() -> None:
    said = binding([fresh(8)], [part("a")])
    for memory in (fresh(7), fresh(16)[::2], fresh(8, torch.float32)):
        with pytest.raises(BindError, match="storage 0"):
            move_here([held()], [Binding(said.state, (memory,))], TENSORS)


def test_memory_shared_between_participants() -> None:
    old, line = held(), torch.arange(12)
    source = binding([line[:8]], [part("a")])
    with pytest.raises(BindError, match="must not be written"):
        move_here([source, None], [None, binding([line[4:]], [part("a")])], TENSORS)
    assert line.tolist() == list(range(12))
    assert old.memory[0].tolist() == list(range(1, 9))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_padding_of_every_dtype_and_place_becomes_zero(dtype: torch.dtype) -> None:
    """Before, between rows, behind; a storage that is nothing else; and where one fragment is listed twice."""
    rows, twice, nothing = fresh(14, dtype), fresh(10, dtype), fresh(5, dtype)
    fragments = [part("a", origin=1, stride=6), part("b", 1), part("b", 1)]
    move_here([held(dtype)], [binding([rows, twice, nothing], fragments)], TENSORS)
    assert rows.to(torch.int64).tolist() == [0, 1, 2, 3, 4, 0, 0, 5, 6, 7, 8, 0, 0, 0]
    assert twice.to(torch.int64).tolist() == [*range(9, 17), 0, 0]
    assert nothing.to(torch.int64).tolist() == [0] * 5


def test_views_of_one_allocation_keep_what_the_other_holds() -> None:
    """Two storages over the same memory: the padding of one is the state of the other."""
    line = fresh(18)
    move_here([held()], [binding([line, line], [part("a"), part("b", 1, origin=9)])], TENSORS)
    assert line.tolist() == [*range(1, 9), 0, *range(9, 17), 0]
    tied = fresh(8)
    move_here([held()], [binding([tied, tied], [part("a"), part("a", 1)])], TENSORS, drop=("weight",))
    assert tied.tolist() == list(range(1, 9))


def test_a_scalar() -> None:
    one = (LogicalTensor(name="s", shape=()),)
    cell = {"row_hi": 1, "col_hi": 1, "stop": 1, "stride": 1}
    old, new = binding([torch.tensor(5)], [part("s", **cell)]), binding([torch.tensor(0)], [part("s", **cell)])
    move_here([old], [new], one)
    assert new.memory[0].tolist() == [5]
