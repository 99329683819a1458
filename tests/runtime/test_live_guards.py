"""Moves that would lose or mix state without a word: copies that differ, and slots that nobody wants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nereus.ir.fragment import Fragment
from nereus.ir.tensor import LogicalTensor
from nereus.runtime.adapters.base import BindError, Binding, BindingBuilder
from nereus.runtime.live import ALL, MoveError, move_here

TENSORS = tuple(LogicalTensor(name=name, shape=(4, 6)) for name in ("a", "b"))


def rows(tensor: str, lo: int, hi: int, storage: int, slot: str = "weight") -> Fragment:
    box: dict[str, Any] = {"row_lo": lo, "row_hi": hi, "col_lo": 0, "col_hi": 6, "start": 0, "stop": (hi - lo) * 6}
    return Fragment(tensor=tensor, slot=slot, storage=storage, origin=0, stride=6, **box)


def whole(value: int) -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(4, 6) + value


def binding(*parts: tuple[str, int, int, str], filled: bool = True) -> Binding:
    """Parts of ``a`` and ``b``: (tensor, first row, end, slot)."""
    builder = BindingBuilder(rank=0)
    for number, (tensor, lo, hi, slot) in enumerate(parts):
        data = whole(100 * ("ab".index(tensor) + 1))[lo:hi].clone() if filled else torch.full((hi - lo, 6), -7.0)
        builder.storage(f"storage {number}", data)
        builder.fragments.append(rows(tensor, lo, hi, number, slot))
    return builder.finish()


ALL_OF_BOTH = (("a", 0, 4, "weight"), ("b", 0, 4, "weight"))
WITH_MOMENTS = (*ALL_OF_BOTH, ("a", 0, 4, "exp_avg"), ("b", 0, 4, "exp_avg"))


def untouched(new: Binding) -> bool:
    return all(bool((data == -7).all()) for data in new.memory)


@pytest.mark.parametrize("parts", [ALL_OF_BOTH, (("a", 1, 3, "weight"), ("b", 0, 1, "weight"))])
def test_copies_that_differ_are_refused_by_name_also_where_they_are_cut_otherwise(
    parts: tuple[tuple[str, int, int, str], ...],
) -> None:
    """The second holder has all of both tensors, or a few rows of them."""
    good, other = binding(*ALL_OF_BOTH), binding(*parts)
    new = binding(*ALL_OF_BOTH, filled=False)
    move_here([good, other, None], [None, None, new], TENSORS)  # equal copies are fine
    new = binding(*ALL_OF_BOTH, filled=False)
    other.memory[0][3] += 1
    with pytest.raises(MoveError, match=r"^a weight differs between its copies in processes 0 and 1: which"):
        move_here([good, other, None], [None, None, new], TENSORS)
    assert untouched(new)
    other.memory[1][0] = torch.nextafter(other.memory[1][0], torch.tensor(1e9))  # the last bit
    with pytest.raises(MoveError, match=r"a weight differs .*, and 1 more"):
        move_here([good, other, None], [None, None, new], TENSORS)
    move_here([good, other, None], [None, None, new], TENSORS, check_replicas=False)
    assert not untouched(new)


def test_equal_values_in_other_places_are_a_difference() -> None:
    good, other = binding(*ALL_OF_BOTH), binding(*ALL_OF_BOTH)
    other.memory[0][:12] = good.memory[0][:12].roll(6)  # two rows have changed places
    with pytest.raises(MoveError, match="a weight differs"):
        move_here([good, other], [binding(*ALL_OF_BOTH, filled=False), None], TENSORS)


def test_copies_that_nobody_wants_are_not_read() -> None:
    good, other = binding(*WITH_MOMENTS), binding(*WITH_MOMENTS)
    other.memory[2][0] += 1
    move_here([good, other], [binding(*ALL_OF_BOTH, filled=False), None], TENSORS, drop=("exp_avg",))


def test_one_tensor_twice_in_a_process() -> None:
    def tied(second: float) -> Binding:
        builder = BindingBuilder(rank=3)
        for number, name in enumerate(("embedding", "head", "b")):
            data = whole(100 if number < 2 else 200)
            builder.storage(name, data)
            builder.fragments.append(rows("a" if number < 2 else "b", 0, 4, number))
        builder.memory[1][23] = second
        return builder.finish()

    new = binding(*ALL_OF_BOTH, filled=False)
    with pytest.raises(BindError, match=r"rank 3: a weight lies in embedding and head, with different values"):
        move_here([tied(0.5)], [new], TENSORS)
    assert untouched(new)
    move_here([tied(123.0)], [new], TENSORS)
    assert torch.equal(new.memory[0].view(4, 6), whole(100))


def test_slots_that_nobody_wants_are_refused_unless_they_are_said_to_be_dropped() -> None:
    def new() -> Binding:
        return binding(*ALL_OF_BOTH, filled=False)

    target = new()
    with pytest.raises(MoveError, match=r"wanted by none of the new: exp_avg of a and 1 more\..*drop=\('exp_avg',\)"):
        move_here([binding(*WITH_MOMENTS)], [target], TENSORS)
    assert untouched(target)
    assert move_here([binding(*WITH_MOMENTS)], [new()], TENSORS, drop=("exp_avg",)).dropped == (("exp_avg", 2),)
    assert move_here([binding(*WITH_MOMENTS)], [new()], TENSORS, drop=(ALL,)).dropped == (("exp_avg", 2),)
    assert move_here([binding(*ALL_OF_BOTH)], [new()], TENSORS, drop=("exp_avg",)).dropped == ()


def test_a_single_tensor_left_behind_is_named() -> None:
    """One parameter has lost its moment; the slot itself is wanted."""
    wanted = binding(*WITH_MOMENTS[:3], filled=False)
    with pytest.raises(MoveError, match=r"none of the new: exp_avg of b\."):
        move_here([binding(*WITH_MOMENTS)], [wanted], TENSORS)
