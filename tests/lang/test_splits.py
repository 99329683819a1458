"""pp_split by stages, with ``rest`` and by chunks: every layer lies in exactly one place, or the plan is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lang_support import CLUSTER, codes, good, only

from nereus.ir.layout import layout_of
from nereus.ir.plan import Stage
from nereus.ir.tensor import LogicalTensor
from nereus.lang.api import pinned, placed_plan_text, resolve_text
from nereus.lang.split import Split, SplitError, even_split, spread

#: Of any number of layers.
ARCH = (
    "arch {{ family = llama  num_layers = {}  hidden = 64  num_heads = 4  num_kv_heads = 4  head_dim = 16  ffn = 128"
    "  vocab = 256 }}"
)


def plan_text(layers: int, keys: str, gpus: int) -> str:
    return (
        f'cluster {{ node n[0-15] {{ gpus = {gpus} x "h100-sxm-80gb" }} }}\n'
        f'model actor = hf("any/config.json") {{ {ARCH.format(layers)} }}\n'
        f"workload {{ algorithm = sft  prompts = 16 }}\nstage actor.train {{ on = n[0-15]  {keys} }}"
    )


def layers_of_stages(stage: Stage, layers: int) -> list[list[int]]:
    layout = layout_of(stage)
    found: list[list[int]] = [[] for _ in range(stage.pp)]
    for layer in range(layers):
        tensor = LogicalTensor(name=f"layers.{layer}", shape=(1,), layer=layer)
        (owner,) = layout.pipeline_stages(tensor)
        found[owner].append(layer)
    return found


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, int, str, tuple[int, ...]]:
    """layers, pp, vp, what is written, chunks in model order."""
    pp, vp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (16, 1), (2, 2), (2, 3), (4, 2), (4, 5), (8, 2)]))
    form = draw(st.sampled_from(["even", "stages", "chunks", "rest"]))
    counts: tuple[int, ...]
    if form == "chunks":
        counts = tuple(draw(st.lists(st.integers(1, 4), min_size=pp * vp, max_size=pp * vp)))
        return sum(counts), pp, vp, f"pp_split = ({', '.join(map(str, counts))})", counts
    if form == "even":
        stages = [vp * draw(st.integers(1, 3))] * pp
        text = ""
    elif form == "stages":
        stages = [vp * n for n in draw(st.lists(st.integers(1, 3), min_size=pp, max_size=pp))]
        text = f"pp_split = ({', '.join(map(str, stages))})"
    else:
        ends = draw(st.integers(0, min(pp - 1, 2)))
        first, last, each = (vp * draw(st.integers(1, 3)) for _ in range(3))
        if ends == 0:
            return each * pp, pp, vp, "", tuple([each // vp] * (pp * vp))
        named = [first, "rest"] if ends == 1 else [first, "rest", last]
        stages = [first, *[each] * (pp - ends), *([last] if ends == 2 else [])]
        text = f"pp_split = ({', '.join(map(str, named))})"
    return sum(stages), pp, vp, text, tuple(n // vp for _ in range(vp) for n in stages)


@settings(max_examples=150, deadline=None)
@given(splits())
def test_every_layer_is_owned_exactly_once(case: tuple[int, int, int, str, tuple[int, ...]]) -> None:
    layers, pp, vp, text, chunks = case
    plan = good(plan_text(layers, f"pp = {pp}  vp = {vp}  {text}", 1))
    stage = plan.stage("actor.train")
    assert stage.chunks == (chunks if vp > 1 else ())
    assert stage.pp_split == tuple(sum(chunks[i::pp]) for i in range(pp))
    found = layers_of_stages(stage, layers)
    assert sorted(layer for part in found for layer in part) == list(range(layers))
    assert [len(part) for part in found] == list(stage.pp_split)
    bounds = np.cumsum((0, *chunks))
    for index, part in enumerate(found):
        expected = [n for i in range(index, pp * vp, pp) for n in range(bounds[i], bounds[i + 1])]
        assert part == expected
    placed = placed_plan_text(plan)
    assert resolve_text(placed).plan == pinned(plan)


def test_30_layers_on_4_stages_are_never_28() -> None:
    d = only(plan_text(30, "pp = 4", 1), "NRS3008")
    assert "30 layers do not divide by 4" in d.headline and d.fix is not None
    fixed = good(plan_text(30, d.fix.text, 1)).stage("actor.train")
    assert sum(fixed.pp_split) == 30 and fixed.pp == 4
    assert good(plan_text(30, "pp = 4  pp_split = (7, rest, 7)", 1)).stage("actor.train").pp_split == (7, 8, 8, 7)
    assert good(plan_text(30, "pp = 4  pp_split = (9, rest)", 1)).stage("actor.train").pp_split == (9, 7, 7, 7)


def test_15_layers_move_one_stage_up() -> None:
    """T5: 61 layers, 15 x 4 + 1 -> 3, 14 x 4, 2."""
    text = CLUSTER.replace("n[0-3]", "n[0-1]") + 'model actor = "deepseek-v3"\nworkload { algorithm = sft }\n'
    stages = [
        good(text + f"stage actor.train {{ on = n[0-1]  pp = 16  pp_split = {split} }}").stage("actor.train")
        for split in ("(rest, 1)", "(3, rest, 2)")
    ]
    assert stages[0].pp_split == (*[4] * 15, 1) and stages[1].pp_split == (3, *[4] * 14, 2)
    before, after = (
        {layer: i for i, part in enumerate(layers_of_stages(stage, 61)) for layer in part} for stage in stages
    )
    moved = {layer: after[layer] - before[layer] for layer in range(61) if after[layer] != before[layer]}
    assert sorted(moved) == list(range(3, 60, 4)) and set(moved.values()) == {1} and len(moved) == 15


@pytest.mark.parametrize(
    ("keys", "code", "said"),
    [
        ("pp = 4  pp_split = (8, 8, 8)", "NRS3009", "3 parts for pp = 4"),
        ("pp = 4  pp_split = (8, 8, 8, 7)", "NRS3009", "31 layers of 32"),
        ("pp = 4  pp_split = (8, rest, rest)", "NRS3009", "rest more than once"),
        ("pp = 2  pp_split = (16, rest, 16)", "NRS3009", "no stage left for rest"),
        ("pp = 4  pp_split = (7, rest)", "NRS3009", "25 layers left for the 3 stages of rest"),
        ("pp = 4  pp_split = (40, rest)", "NRS3009", "-8 layers left for the 3 stages"),
        ("pp = 4  pp_split = rest", "NRS2008", "pp_split"),
        ("pp = 4  pp_split = (8, most, 8)", "NRS2008", "pp_split"),
        ("pp = 4  vp = 2  pp_split = (4, 4, 4)", "NRS3009", "4 stages or 8 chunks"),
        ("pp = 4  vp = 2  pp_split = (4, 4, 4, 4, 4, 4, 4, 5)", "NRS3009", "33 layers of 32"),
        ("pp = 4  vp = 2  pp_split = (9, 7, 8, 8)", "NRS3017", "does not divide a pipeline stage of 9 layers"),
        ("pp = 4  vp = 3", "NRS3017", "does not divide a pipeline stage of 8 layers"),
        ("vp = 2", "NRS3017", "needs a pipeline"),
    ],
)
def test_what_does_not_come_out_is_refused(keys: str, code: str, said: str) -> None:
    assert said in only(plan_text(32, keys, 1), code).headline


def test_an_uneven_interleaving_is_offered_by_chunks() -> None:
    """94 layers, embedding and loss are 96 units over 48 chunks."""
    d = only(plan_text(94, "pp = 8  vp = 6", 1), "NRS3008")
    assert d.fix is not None
    stage = good(plan_text(94, f"{d.fix.text}  vp = 6", 1)).stage("actor.train")
    assert stage.chunks == (1, *[2] * 46, 1) and stage.pp_split == (11, *[12] * 6, 11)
    d = only(plan_text(96, "pp = 8  vp = 5", 1), "NRS3017")
    assert d.help is not None and "chunk" in d.help
    assert codes(plan_text(96, f"pp = 8  vp = 5  {d.help.split('chunk: ')[1]}", 1)) == []


def test_guests_have_the_chunks_of_their_host_or_their_own() -> None:
    text = plan_text(32, "pp = 2  vp = 2  pp_split = (9, 7, 8, 8)", 1).replace(
        "workload", 'model small = "llama-3.2-1b" { frozen = true }\nworkload'
    )
    text += "\nstage actor.logprob { with = actor.train }\nstage small.infer { with = actor.train }"
    plan = good(text)
    assert plan.stage("actor.logprob").chunks == (9, 7, 8, 8)
    assert plan.stage("small.infer").chunks == (4, 4, 4, 4)
    assert resolve_text(placed_plan_text(plan)).plan == pinned(plan)


@given(st.integers(1, 80), st.integers(1, 20))
def test_even_splits(layers: int, parts: int) -> None:
    found = even_split(layers, parts)
    assert sum(found) == layers and len(found) == parts and max(found) - min(found) <= 1


def test_splits_by_themselves() -> None:
    assert Split.of_chunks((1, 2, 3, 4), 2, 2) == Split(pp_split=(4, 6), chunks=(1, 2, 3, 4))
    assert Split.of_chunks((3, 4), 2, 1) == Split(pp_split=(3, 4), chunks=())
    assert spread((2, None), 8, 4, 1) == (2, 2, 2, 2)
    with pytest.raises(SplitError, match="0 layers left"):
        spread((4, None, 4), 8, 4, 1)
