"""Moves between described objects, against storages that are cut from whole tensors by hand.

Every element's value is its own number, so anything in the wrong place shows. Storages are built with cat, chunk and
slicing, as frameworks do; their fragments are read off the values.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.described import DescriptionError, describe_layout
from nereus.ir.fragment import Fragment
from nereus.ir.tensor import LogicalTensor
from nereus.runtime.adapters.base import BindError, Binding, BindingBuilder
from nereus.runtime.adapters.whole import gather
from nereus.runtime.live import MoveError, move_here


@dataclass(frozen=True)
class Shape:
    kv: int
    per_group: int
    head: int
    hidden: int

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        queries, keys = self.kv * self.per_group * self.head, self.kv * self.head
        shapes = {"q": (queries, self.hidden), "k": (keys, self.hidden), "v": (keys, self.hidden)}
        shapes |= {"o": (self.hidden, queries), "norm": (self.hidden,)}
        return tuple(LogicalTensor(name=name, shape=shape, layer=0) for name, shape in shapes.items())

    def whole(self) -> dict[str, torch.Tensor]:
        found, first = {}, 1
        for tensor in self.tensors:
            rows, cols = tensor.shape[0], tensor.numel // tensor.shape[0]
            found[tensor.name] = torch.arange(first, first + tensor.numel).reshape(rows, cols)
            first += tensor.numel
        return found


#: Storages of every rank, as label matrices or flat label vectors; 0 is padding.
Ranks = list[dict[str, torch.Tensor]]


def grouped(shape: Shape, tp: int) -> Ranks:
    """q..q k v per kv head, cut by raw rows; o by columns; the norm everywhere."""
    w = shape.whole()
    q = w["q"].chunk(shape.kv)
    k, v = w["k"].chunk(shape.kv), w["v"].chunk(shape.kv)
    fused = torch.cat([t for group in zip(q, k, v, strict=True) for t in group])
    return [{"qkv": fused.chunk(tp)[r], "proj": w["o"].chunk(tp, dim=1)[r], "norm": w["norm"]} for r in range(tp)]


def stacked(shape: Shape, tp: int) -> Ranks:
    """[Q | K | V] per rank, whole kv heads repeated where tp is larger; three rows of padding."""
    w = shape.whole()
    ranks = []
    for r in range(tp):
        kv = [t.chunk(min(tp, shape.kv))[r * min(tp, shape.kv) // tp] for t in (w["k"], w["v"])]
        padding = torch.zeros(3, shape.hidden, dtype=torch.int64)
        ranks.append(
            {
                "qkv_proj": torch.cat([w["q"].chunk(tp)[r], *kv, padding]),
                "o_proj": w["o"].chunk(tp, dim=1)[r],
                "norm": w["norm"],
            }
        )
    return ranks


def flat(base: Ranks, shards: int) -> Ranks:
    """Each rank's storages end to end, padded and cut over ``shards``."""
    ranks: Ranks = []
    for storages in base:
        line = torch.cat([t.reshape(-1) for t in storages.values()])
        size = -(-len(line) // shards)
        line = torch.nn.functional.pad(line, (0, size * shards - len(line)))
        ranks += [{"flat": line[size * s : size * (s + 1)]} for s in range(shards)]
    return ranks


def rows(shape: Shape, shards: int) -> Ranks:
    """Rows of whole tensors, the last shards shorter or empty."""
    ranks: Ranks = [{} for _ in range(shards)]
    for name, tensor in shape.whole().items():
        for shard, part in enumerate(tensor.chunk(shards)):
            ranks[shard][name] = part
    return ranks


def bind(shape: Shape, ranks: Ranks, *, filled: bool, hosts: random.Random | None = None) -> list[Binding]:
    """``hosts``: draws which storages lie in host memory."""
    bindings = []
    for rank, storages in enumerate(ranks):
        builder = BindingBuilder(rank=rank)
        for name, labels in storages.items():
            data = labels.clone().contiguous() if filled else torch.full(labels.shape, -7)
            number = builder.storage(name, data.to(torch.int64), host=hosts is not None and hosts.random() < 0.5)
            builder.fragments += read_off(shape, labels, number)
        bindings.append(builder.finish())
    return bindings


def read_off(shape: Shape, labels: torch.Tensor, storage: int) -> list[Fragment]:
    """A fragment for every run of labels that lies in one row of one tensor; joined where they follow each other."""
    starts, first = [], 1
    for tensor in shape.tensors:
        starts.append((first, tensor))
        first += tensor.numel
    found: list[Fragment] = []
    line = labels.reshape(-1).tolist()
    position = 0
    while position < len(line):
        if line[position] == 0:
            position += 1
            continue
        base, tensor = max((s for s in starts if s[0] <= line[position]), key=lambda s: s[0])
        cols = tensor.numel // tensor.shape[0]
        row, col = divmod(line[position] - base, cols)
        end = position
        while end + 1 < len(line) and line[end + 1] == line[end] + 1 and (line[end + 1] - base) // cols == row:
            end += 1
        width = end - position + 1
        columns = (0, cols) if tensor.name != "o" or len(labels.shape) == 1 else (col, col + width)
        if columns == (0, cols):
            start = col
        else:
            start = 0
        found.append(
            Fragment(
                tensor=tensor.name,
                slot="weight",
                storage=storage,
                row_lo=row,
                row_hi=row + 1,
                col_lo=columns[0],
                col_hi=columns[1],
                start=start,
                stop=start + width,
                origin=position - start,
                stride=columns[1] - columns[0],
            )
        )
        position = end + 1
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, list[Ranks]]:
    shape = Shape(
        kv=draw(st.sampled_from([1, 2, 4])),
        per_group=draw(st.sampled_from([2, 4])),
        head=draw(st.sampled_from([1, 2, 3])),
        hidden=draw(st.sampled_from([3, 4])),
    )
    queries = shape.kv * shape.per_group
    degrees = [
        tp for tp in (1, 2, 4, 8) if queries % tp == 0 and (shape.kv * (shape.per_group + 2) * shape.head) % tp == 0
    ]

    def one() -> Ranks:
        tp = draw(st.sampled_from(degrees))
        kinds: list[Callable[[], Ranks]] = [
            lambda: grouped(shape, tp),
            lambda: stacked(shape, tp),
            lambda: rows(shape, draw(st.integers(1, 5))),
            lambda: flat(rows(shape, 1), draw(st.integers(1, 7))),
            lambda: flat(grouped(shape, 1), draw(st.integers(1, 5))),
        ]
        return draw(st.sampled_from(kinds))()

    return shape, [one(), one(), one()]


def participants(*sides: list[Binding]) -> list[list[Binding | None]]:
    most = max(len(side) for side in sides)
    return [[*side, *[None] * (most - len(side))] for side in sides]


def assert_equal(bindings: list[Binding], ranks: Ranks) -> None:
    for binding, storages in zip(bindings, ranks, strict=True):
        for data, (name, labels) in zip(binding.memory, storages.items(), strict=True):
            assert torch.equal(data, labels.reshape(-1)), (binding.state.rank, name)


@settings(max_examples=60, deadline=None)
@given(cases(), st.randoms())
def test_moves_are_right_by_position_and_back_is_the_identity(
    case: tuple[Shape, list[Ranks]], hosts: random.Random
) -> None:
    shape, layouts = case
    bindings = bind(shape, layouts[0], filled=True, hosts=hosts)
    at = layouts[0]
    for ranks in (layouts[1], layouts[2], layouts[0]):
        new = bind(shape, ranks, filled=False, hosts=hosts)
        a, b = participants(bindings, new)
        move_here(a, b, shape.tensors)
        assert_equal(new, ranks)
        assert_equal(bindings, at)  # what was read is untouched
        bindings, at = new, ranks


def test_what_no_rank_holds_is_named() -> None:
    shape = Shape(kv=2, per_group=2, head=2, hidden=4)
    ranks = grouped(shape, 2)
    missing = [dict(ranks[0]), {**ranks[1], "qkv": ranks[1]["qkv"][:3]}]
    a, b = participants(bind(shape, missing, filled=True), bind(shape, stacked(shape, 4), filled=False))
    with pytest.raises(MoveError, match=r"elements of k weight:int64 are wanted and held by none"):
        move_here(a, b, shape.tensors)


def test_a_part_of_a_tensor_lies_whole_in_one_memory() -> None:
    tensors = (LogicalTensor(name="w", shape=(4, 2)),)
    builder = BindingBuilder(rank=0)
    for row, host in ((0, True), (2, False)):
        number = builder.storage(f"rows {row}", torch.zeros(2, 2), host=host)
        builder.fragments.append(
            Fragment(
                tensor="w", slot="weight", storage=number, row_lo=row, row_hi=row + 2, col_lo=0, col_hi=2, start=0,
                stop=4, origin=0, stride=2,
            )
        )  # fmt: skip
    with pytest.raises(DescriptionError, match=r"rank 0: w weight: .* in host memory and .* on the GPU"):
        describe_layout(tensors, [builder.finish().state])


def test_shared_memory_is_refused() -> None:
    shape = Shape(kv=2, per_group=2, head=2, hidden=4)
    a = bind(shape, grouped(shape, 1), filled=True)
    with pytest.raises(BindError, match="must not be written"):
        move_here(list(a), list(a), shape.tensors)


def test_gather_is_the_inverse_of_cutting() -> None:
    shape = Shape(kv=2, per_group=4, head=2, hidden=4)
    found = gather(
        bind(shape, grouped(shape, 8), filled=True),
        {t.name: (t.shape[0], t.numel // t.shape[0]) for t in shape.tensors},
    )
    for name, tensor in shape.whole().items():
        assert torch.equal(found[name, "weight"], tensor)
