"""Degrees, replicas, layer splits and legal tp of plans against megatron-core's and vLLM's own code."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nereus.ir.layout import layout_of
from nereus.ir.plan import ORDER_MEGATRON, Stage
from nereus.lang.degrees import DegreeChecker
from nereus.lang.sink import Sink
from nereus.lang.split import SplitError, spread
from nereus.models.legality import tp_refusals
from nereus.models.presets import preset
from nereus.models.tensors import logical_tensors

ARCH = preset("qwen3-30b-a3b")
MOE = [(8, 1, 1, 1, 8, 1), (8, 2, 1, 1, 4, 2), (8, 2, 1, 1, 4, 1), (16, 2, 2, 2, 4, 1), (32, 8, 2, 1, 8, 1)]
MOE += [(32, 2, 1, 2, 8, 1), (32, 4, 1, 1, 8, 1), (16, 4, 1, 1, 2, 1), (16, 1, 4, 1, 4, 1), (24, 2, 1, 1, 6, 2)]
MOE += [(64, 4, 8, 1, 8, 1), (64, 1, 8, 1, 8, 1), (8, 4, 1, 1, 1, 2), (16, 2, 1, 1, 2, 4), (64, 8, 1, 4, 32, 1)]


def megatron_groups(world: int, tp: int, pp: int, cp: int, ep: int, etp: int) -> tuple[Any, Any]:
    """Megatron's two grids, as ``initialize_model_parallel`` makes them."""
    from megatron.core.parallel_state import RankGenerator

    dp, edp = world // (tp * pp * cp), world // (etp * ep * pp)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    return dense, expert


def connected(world: int, groups: list[list[int]]) -> set[frozenset[int]]:
    owner = {rank: {rank} for rank in range(world)}
    for group in groups:
        merged = set().union(*(owner[rank] for rank in group))
        for rank in merged:
            owner[rank] = merged
    return {frozenset(part) for part in owner.values()}


@pytest.mark.parametrize(("world", "tp", "pp", "cp", "ep", "etp"), MOE)
@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_and_replicas_are_megatrons(world: int, tp: int, pp: int, cp: int, ep: int, etp: int, zero: int) -> None:
    dense, expert = megatron_groups(world, tp, pp, cp, ep, etp)
    dp = world // (tp * pp * cp)
    stage = Stage(
        model="actor",
        kind="train",
        devices=(),
        **{"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, "etp": etp, "zero": zero},
        order=ORDER_MEGATRON,
        backend="megatron",
        pp_split=(1,) * pp,
    )
    assert stage.expert_dp == len(expert.get_ranks("dp")[0])
    assert stage.dp == len(dense.get_ranks("dp")[0])
    layout = layout_of(stage, experts=True)
    coords, experts = layout.coordinates(), layout.expert_coordinates()
    for grid, own, axes in (
        (dense, coords, {"tp": "tp", "pp": "pp", "dp": "dp", "cp": "cp"}),
        (expert, {**experts, "pp": coords["pp"]}, {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}),
    ):
        for theirs, ours in axes.items():
            for group in grid.get_ranks(theirs):
                assert [int(own[ours][rank]) for rank in group] == list(range(len(group))), (theirs, group)
    # A replica: closed under model parallelism, expert parallelism, and the ranks that share optimizer state.
    groups = [*dense.get_ranks("tp-cp-pp"), *expert.get_ranks("tp-ep-pp")]
    if zero:
        groups += [*dense.get_ranks("dp-cp"), *expert.get_ranks("dp")]
        # The distributed optimizer shards over dp x cp, experts over expert dp, in the order of these groups.
        shares = layout.shard_of_rank()
        for group in dense.get_ranks("dp-cp"):
            assert [int(shares[rank]) % layout.num_shards for rank in group] == list(range(len(group)))
        for group in expert.get_ranks("dp") if layout.splits_experts else ():
            assert [int(shares[rank]) // layout.num_shards for rank in group] == list(range(len(group)))
    units: dict[int, set[int]] = {}
    for rank in range(world):
        units.setdefault(stage.unit_of_dp[int(coords["dp"][rank])], set()).add(rank)
    assert {frozenset(unit) for unit in units.values()} == connected(world, groups)
    assert stage.num_emus == len(units)


def megatron_layers(
    layers: int, pp: int, vp: int, first: int | None, last: int | None, counted: bool
) -> list[list[int]]:
    """Layers of each chunk in model order, from the offsets and counts that Megatron builds by."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        pipeline_dtype=torch.bfloat16,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=counted,
        account_for_loss_in_pipeline_split=counted,
    )
    found = []
    for chunk in range(pp * vp):
        where = {"vp_stage": chunk // pp if vp > 1 else None, "pp_rank": chunk % pp}
        offset = get_transformer_layer_offset(config, **where)
        found.append(list(range(offset, offset + get_num_layers_to_build(config, **where))))
    return found


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([(2, 1), (4, 1), (2, 2), (4, 2), (4, 3), (8, 2), (3, 2)]),
    st.integers(1, 4),
    st.none() | st.integers(1, 3),
    st.none() | st.integers(1, 3),
    st.booleans(),
)
def test_layers_lie_where_megatron_puts_them(
    degrees: tuple[int, int], each: int, first: int | None, last: int | None, counted: bool
) -> None:
    pp, vp = degrees
    ends = [n * vp for n in (first, last) if n is not None]
    assume(pp > len(ends))
    checker = DegreeChecker("actor.train", {}, None, Sink())  # type: ignore[arg-type]
    if counted:
        layers, ends = each * pp * vp - 2, []
        assume(each > 1)
        chunks = [each] * (pp * vp)
        chunks[0] -= 1
        chunks[-1] -= 1
        written: tuple[int | None, ...] | None = tuple(chunks)
        if vp == 1:
            assert spread(written, layers, pp, vp) == written
        first = last = None
    else:
        layers = sum(ends) + each * vp * (pp - len(ends))
        written = None
        if ends:
            named: list[int | None] = [None] if first is None else [first * vp, None]
            written = tuple(named if last is None else [*named, last * vp])
    theirs = megatron_layers(
        layers, pp, vp, None if first is None else first * vp, None if last is None else last * vp, counted
    )
    split = checker.split(replace(ARCH, num_layers=layers), pp, vp, written)
    assert split is not None
    layout = layout_of(
        Stage(model="a", kind="train", devices=(), pp=pp, vp=vp, pp_split=split.pp_split, chunks=split.chunks)
    )
    assert sorted(layer for chunk in theirs for layer in chunk) == list(range(layers))
    for number, chunk in enumerate(theirs):
        assert [layout.pipeline_stage_of_layer(layer) for layer in chunk] == [number % pp] * len(chunk)
    assert tuple(len(chunk) for chunk in theirs) == (split.chunks or split.pp_split)


def test_what_megatron_refuses_is_refused() -> None:
    with pytest.raises((AssertionError, ValueError)):
        megatron_layers(30, 4, 1, None, None, counted=False)
    with pytest.raises((AssertionError, ValueError)):
        megatron_layers(30, 4, 1, 8, None, counted=False)
    with pytest.raises(SplitError):
        spread((8, None), 30, 4, 1)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400_000), st.integers(1, 64))
def test_padded_vocabularies(vocab: int, tp: int) -> None:
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
    from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size

    arch = replace(ARCH, vocab=vocab, num_heads=tp * 4, num_kv_heads=tp, head_dim=16)
    refused = {backend: bool(tp_refusals(arch, tp, backend=backend)) for backend in ("megatron", "vllm", "sglang")}
    theirs = pad_vocab_size(vocab) % tp != 0
    assert refused == {"megatron": False, "vllm": theirs, "sglang": theirs}
    args = Namespace(make_vocab_size_divisible_by=128, tensor_model_parallel_size=tp, rank=1)
    padded = vocab_size_with_padding(vocab, args)
    stage = Stage(model="a", kind="train", devices=(), tp=tp, pp_split=(1,), backend="megatron")
    cut = logical_tensors(replace(arch, num_layers=1, moe=None))[0].cut
    assert cut is not None
    rows = [layout_of(stage).interval(cut, vocab, tp, rank) for rank in range(tp)]
    assert rows == [(min(r * padded // tp, vocab), min((r + 1) * padded // tp, vocab)) for r in range(tp)]
