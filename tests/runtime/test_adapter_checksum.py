"""One number for a tensor, whatever the layout that holds it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.arches import archs

from nereus.ir.arch import Arch, Lora
from nereus.ir.fragment import Segment, fragments_of
from nereus.ir.tensor import LogicalTensor, matrix_shape
from nereus.models.lora import is_adapter
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapter_checksum import ArrivalError, Held, arrived, held
from nereus.runtime.adapters.base import Binding, BindingBuilder
from nereus.runtime.adapters.whole import scatter

Values = dict[str, torch.Tensor]


def _bind(tensors: Iterable[LogicalTensor], values: Values, tp: int, rank: int, parts: int, part: int) -> Binding:
    """What tensor-parallel ``rank`` holds, and of that the ``part``-th of ``parts`` flat shares."""
    builder = BindingBuilder(rank=rank)
    for tensor in tensors:
        rows, cols = matrix_shape(tensor.shape)
        box = [(0, rows), (0, cols)]
        if tensor.cut is not None and tensor.cut.allows(tp):
            box[tensor.cut.dim] = tensor.cut.interval(tensor.shape[tensor.cut.dim], tp, rank)
        (lo, hi), (left, right) = box
        width = right - left
        size = -(-(hi - lo) * width // parts)
        data = torch.zeros(size, dtype=torch.bfloat16)
        number = builder.storage(tensor.name, data)
        segment = Segment(tensor=tensor.name, row_lo=lo, row_hi=hi, col_lo=left, col_hi=right, at_row=0)
        builder.fragments += fragments_of(
            (segment,),
            num_cols=width,
            slot="weight",
            storage=number,
            origin=-size * part,
            start=size * part,
            stop=min(size * (part + 1), (hi - lo) * width),
        )
    binding = builder.finish()
    scatter({(name, "weight"): value for name, value in values.items()}, binding)
    return binding


def _adapters(arch: Arch, seed: int = 0) -> tuple[list[LogicalTensor], Values, dict[str, tuple[int, int]]]:
    tensors = [t for t in logical_tensors(arch, "lm", Lora(rank=3, alpha=3.0)) if is_adapter(t)]
    generator = torch.Generator().manual_seed(seed)
    values = {t.name: torch.randn(matrix_shape(t.shape), generator=generator).to(torch.bfloat16) for t in tensors}
    return tensors, values, {t.name: matrix_shape(t.shape) for t in tensors}


def _numbers(arch: Arch, tp: int, parts: int, seed: int = 0) -> list[tuple[Held, ...]]:
    tensors, values, shapes = _adapters(arch, seed)
    return [
        held(_bind(tensors, values, tp, rank, parts, part), "actor", shapes)
        for rank in range(tp)
        for part in range(parts)
    ]


DENSE = Arch(family="llama", num_layers=1, hidden=24, num_heads=4, num_kv_heads=2, head_dim=6, ffn=16, vocab=32)


@settings(max_examples=25, deadline=None)
@given(arch=archs(families=("llama", "qwen3", "mla")), tp=st.sampled_from([1, 2, 4]), parts=st.integers(1, 3))
def test_any_layout_gives_the_same_numbers(arch: Arch, tp: int, parts: int) -> None:
    _, _, shapes = _adapters(arch)
    whole = arrived(_numbers(arch, 1, 1), shapes)
    assert set(whole) == {(name, "weight") for name in shapes}
    assert arrived(_numbers(arch, tp, parts), shapes) == whole


def test_other_values_and_swapped_rows_are_seen() -> None:
    tensors, values, shapes = _adapters(DENSE)
    right = arrived(_numbers(DENSE, 2, 1), shapes)
    name = next(n for n in values if n.endswith("q_proj.lora_B.weight"))
    values[name] = values[name].flip(0)  # the same elements in another order
    wrong = arrived([held(_bind(tensors, values, 2, r, 1, 0), "actor", shapes) for r in range(2)], shapes)
    assert {key for key in right if right[key] != wrong[key]} == {(name, "weight")}


def test_a_rank_that_sent_nothing() -> None:
    _, _, shapes = _adapters(DENSE)
    ranks = _numbers(DENSE, 2, 1)
    with pytest.raises(ArrivalError, match=r"q_proj.lora_B.weight weight: 36 of 72 elements did not arrive"):
        arrived(ranks[:1], shapes)
    with pytest.raises(ArrivalError, match="no rank holds any of it"):
        arrived([], shapes)


def test_copies_that_differ() -> None:
    _, _, shapes = _adapters(DENSE)
    with pytest.raises(ArrivalError, match=r"copies of rows 0 \.\. 3, columns 0 \.\. 24 differ"):
        arrived([*_numbers(DENSE, 1, 1), *_numbers(DENSE, 1, 1, seed=1)], shapes)
