"""Layouts and cells against labels on every element of tiny tensors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.ir.cells import build_cells, cell_offset, held_cells, local_boxes, shares_of
from nereus.ir.layout import SHARD_DIM0, SHARD_FLAT, SHARD_NONE, SHARD_PARAM, Layout
from nereus.ir.plan import ORDER_MEGATRON, ORDER_REPLICA
from nereus.ir.tensor import Cut, CutError, LogicalTensor, matrix_shape

DEGREES = (1, 2, 4)


def tensors(rows: int, cols: int) -> tuple[LogicalTensor, ...]:
    """Three layers of one matrix cut by rows, one by columns, two kv heads, a vector; tied ends."""
    found = [
        LogicalTensor(name="embed", shape=(rows * 4, cols), cut=Cut(dim=0, groups=rows * 4), first=True, last=True)
    ]
    for layer in range(3):
        found += [
            LogicalTensor(name=f"{layer}.up", shape=(rows * 4, cols), cut=Cut(dim=0, groups=4), layer=layer),
            LogicalTensor(name=f"{layer}.down", shape=(cols, rows * 4), cut=Cut(dim=1, groups=4), layer=layer),
            LogicalTensor(
                name=f"{layer}.kv", shape=(2 * rows, cols), cut=Cut(dim=0, groups=2, replicate=True), layer=layer
            ),
            LogicalTensor(name=f"{layer}.norm", shape=(cols,), layer=layer),
        ]
    return (*found, LogicalTensor(name="head", shape=(1, cols), last=True))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pp, dp, cp = draw(st.tuples(st.sampled_from(DEGREES), st.integers(1, 3), st.integers(1, 4), st.integers(1, 2)))
    cuts = sorted(draw(st.sets(st.integers(1, 2), min_size=pp - 1, max_size=pp - 1)))
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        order=draw(st.sampled_from([ORDER_REPLICA, ORDER_MEGATRON, "dp-tp-cp-pp", "pp-dp-cp-tp"])),
        pp_split=tuple(b - a for a, b in zip([0, *cuts], [*cuts, 3], strict=True)),
        num_shards=draw(st.sampled_from([d for d in (1, 2, 3, 4, 8) if dp * cp % d == 0])),
        weight_shards=SHARD_NONE,
        optimizer_shards=SHARD_FLAT,
    )


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_coordinates_are_nested_loops(layout: Layout) -> None:
    coords = layout.coordinates()
    axes = [axis for axis in layout.order.split("-") if axis != "ep"]
    loops = itertools.product(*(range(getattr(layout, axis)) for axis in reversed(axes)))  # last axis is slowest
    for rank, values in enumerate(loops):
        for axis, value in zip(reversed(axes), values, strict=True):
            assert coords[axis][rank] == value
    assert len(coords["tp"]) == layout.num_ranks
    assert (layout.coord_of_rank() == coords["pp"] * layout.tp + coords["tp"]).all()
    seen: dict[int, int] = {}
    for rank, coord in enumerate(layout.coord_of_rank().tolist()):  # ranks that hold alike, counted as they come
        assert layout.shard_of_rank()[rank] == seen.get(coord, 0) % layout.num_shards
        seen[coord] = seen.get(coord, 0) + 1


def local_part(tensor: LogicalTensor, layout: Layout, tp: int, pp: int) -> np.ndarray:
    """Labels (flat indices) of what a coordinate holds of ``tensor``, as its local matrix; empty where it has none."""
    index = np.arange(tensor.numel).reshape(matrix_shape(tensor.shape))
    stages = set()
    if tensor.layer is not None:
        bounds = np.cumsum(layout.pp_split)
        stages = {int(np.searchsorted(bounds, tensor.layer, side="right"))}
    stages |= ({0} if tensor.first else set()) | ({layout.pp - 1} if tensor.last else set())
    if pp not in stages:
        return index[:0, :0]
    if tensor.cut is None:
        return index
    groups = np.array_split(index, tensor.cut.groups, axis=tensor.cut.dim)
    if layout.tp <= tensor.cut.groups:
        per_rank = tensor.cut.groups // layout.tp
        mine = groups[tp * per_rank : (tp + 1) * per_rank]
    else:
        mine = [groups[tp // (layout.tp // tensor.cut.groups)]]
    return np.concatenate(mine, axis=tensor.cut.dim)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 2), st.integers(1, 3))
def test_cells_and_boxes_label_every_element(layout: Layout, rows: int, cols: int) -> None:
    model = tensors(rows, cols)
    cells = build_cells(model, [local_boxes(model, replace(layout, tp=tp)) for tp in DEGREES])
    # Cells partition every tensor.
    for number, tensor in enumerate(model):
        seen = np.zeros(matrix_shape(tensor.shape), dtype=int)
        for cell in np.flatnonzero(cells.tensor == number):
            box = slice(cells.row_lo[cell], cells.row_hi[cell]), slice(cells.col_lo[cell], cells.col_hi[cell])
            seen[box] += 1
        assert (seen == 1).all()
    boxes = local_boxes(model, layout)
    for pp, tp in itertools.product(range(layout.pp), range(layout.tp)):
        coord = pp * layout.tp + tp
        owned = held_cells(cells, boxes, coord)
        for number, tensor in enumerate(model):
            local = local_part(tensor, layout, tp, pp)
            index = np.arange(tensor.numel).reshape(matrix_shape(tensor.shape))
            box = (
                slice(boxes.row_lo[coord, number], boxes.row_hi[coord, number]),
                slice(boxes.col_lo[coord, number], boxes.col_hi[coord, number]),
            )
            assert (index[box].reshape(-1) == local.reshape(-1)).all()
            assert boxes.numel[coord, number] == local.size
            inside = owned[cells.tensor[owned] == number]
            assert int(cells.numel[inside].sum()) == local.size
            for cell in inside:
                part = index[cells.row_lo[cell] : cells.row_hi[cell], cells.col_lo[cell] : cells.col_hi[cell]]
                labels = {int(v): at for at, v in enumerate(part.reshape(-1))}
                before = 0
                for position, label in enumerate([*local.reshape(-1).tolist(), -1]):
                    at = cell_offset(cells, boxes, coord, np.array([cell]), np.array([position]))
                    assert int(at[0]) == before
                    if label in labels:
                        assert labels[label] == before  # the cell's own order is the local order
                        before += 1


@settings(max_examples=80, deadline=None)
@given(layouts(), st.integers(1, 6), st.sampled_from([SHARD_FLAT, SHARD_PARAM, SHARD_DIM0]))
def test_shard_ranges_against_lists(layout: Layout, num_shards: int, rule: str) -> None:
    model = tensors(1, 3)
    boxes = local_boxes(model, layout)
    for coord in range(layout.num_coords):
        local = [local_part(t, layout, coord % layout.tp, coord // layout.tp) for t in model]
        expected: list[list[list[int]]] = [[[] for _ in range(num_shards)] for _ in model]
        everything = [(number, i) for number, part in enumerate(local) for i in range(part.size)]
        size = -(-len(everything) // num_shards)
        for position, (number, element) in enumerate(everything):
            if rule == SHARD_FLAT:
                shard = position // size
            elif rule == SHARD_PARAM:
                shard = element // -(-local[number].size // num_shards)
            else:
                height, width = local[number].shape
                shard = (element // width) // -(-height // num_shards)
            expected[number][shard].append(element)
        sharded = replace(layout, dp=num_shards, cp=1, num_shards=num_shards, optimizer_shards=rule)
        shares = shares_of(model, boxes, sharded, "exp_avg", coord)
        assert shares.share.tolist() == list(range(num_shards))
        for number, shard in itertools.product(range(len(model)), range(num_shards)):
            start, stop = shares.start[shard, number], shares.stop[shard, number]
            assert list(range(start, stop)) == expected[number][shard]


def one(*shape: int) -> tuple[LogicalTensor, ...]:
    return (LogicalTensor(name="t", shape=shape, first=True),)


def sizes(shape: tuple[int, ...], shards: int, rule: str) -> list[int]:
    layout = Layout(
        tp=1,
        pp=1,
        dp=shards,
        cp=1,
        order=ORDER_REPLICA,
        pp_split=(1,),
        num_shards=shards,
        weight_shards=rule,
        optimizer_shards=rule,
    )
    found = shares_of(one(*shape), local_boxes(one(*shape), layout), layout, "weight", 0)
    assert (found.start[1:] == found.stop[:-1]).all()
    return (found.stop - found.start)[:, 0].tolist()


def test_padding_only_and_empty_shards() -> None:
    assert sizes((10,), 8, SHARD_FLAT) == [2, 2, 2, 2, 2, 0, 0, 0]
    assert sizes((6, 5), 4, SHARD_DIM0) == [10, 10, 10, 0]
    assert sizes((3, 5), 8, SHARD_PARAM) == [2] * 7 + [1]
    old, new = sizes((1_000_000,), 16, SHARD_FLAT), sizes((1_000_000,), 24, SHARD_FLAT)
    assert old == [62_500] * 16
    assert new[:-1] == [41_667] * 23 and new[-1] == 1_000_000 - 958_341  # eight elements of padding are never state


def test_cuts_that_lose_rows_are_refused() -> None:
    with pytest.raises(CutError, match="cannot be cut"):
        Cut(dim=0, groups=6).interval(12, 4, 0)
    with pytest.raises(CutError, match="cannot be cut"):
        Cut(dim=0, groups=3, replicate=True).interval(12, 4, 0)
    with pytest.raises(ValueError, match="no pipeline stage"):
        layout = Layout(
            tp=1,
            pp=1,
            dp=1,
            cp=1,
            order=ORDER_REPLICA,
            pp_split=(2,),
            num_shards=1,
            weight_shards=SHARD_NONE,
            optimizer_shards=SHARD_NONE,
        )
        layout.pipeline_stage_of_layer(2)


@pytest.mark.parametrize("rule", [SHARD_FLAT, SHARD_PARAM])
@pytest.mark.parametrize(
    ("tp", "cp", "dp", "ep", "etp"),
    [(2, 1, 3, 1, 1), (2, 1, 1, 1, 1), (2, 2, 2, 2, 1), (1, 4, 2, 4, 1), (2, 1, 4, 4, 1)],
)
def test_zero_shards_experts_over_all_ranks_that_hold_them(
    tp: int, cp: int, dp: int, ep: int, etp: int, rule: str
) -> None:
    """Also where those are more than dp: each element once in all ranks of the pipeline stage."""
    experts = tuple(LogicalTensor(name=f"{i}", shape=(12, 4), layer=0, expert=i) for i in range(4))
    layout = Layout(
        tp=tp,
        pp=1,
        dp=dp,
        cp=cp,
        order="dp-tp-cp-pp",
        pp_split=(1,),
        num_shards=dp * cp,
        weight_shards=SHARD_NONE,
        optimizer_shards=rule,
        ep=ep,
        etp=0 if etp == tp else etp,
    )
    boxes = local_boxes(experts, layout)
    seen = np.zeros((4, 48), dtype=int)
    for coord, shard in zip(layout.coord_of_rank(), layout.shard_of_rank(), strict=True):
        shares = shares_of(experts, boxes, layout, "exp_avg", int(coord))
        row = shares.share.tolist().index(int(shard))
        for tensor in range(4):
            seen[tensor, shares.start[row, tensor] : shares.stop[row, tensor]] += 1
    assert (seen == 1).all()
