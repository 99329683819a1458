"""What the verifier says ranks hold, against two other derivations: the oracle's element by element, and the IR's."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from passes.oracle import coordinate_of_rank, rank_share
from passes.plans import ARCHS, ORDERS, cluster, layouts, stage
from passes.profiles import examples
from verify.documents import MOE

from nereus.ir.arch import Arch, Moe
from nereus.ir.cells import local_boxes, shares_of
from nereus.ir.layout import layout_of
from nereus.ir.plan import Model, Stage
from nereus.ir.tensor import matrix_shape
from nereus.models.legality import legal_tp
from nereus.models.tensors import logical_tensors
from nereus.verify.parts import Parts

SLOTS = ("weight", "master")


@st.composite
def dense_stages(draw: st.DrawFn) -> tuple[Arch, Stage]:
    arch = draw(st.sampled_from(ARCHS))
    on = cluster(draw(st.sampled_from([2, 4, 6, 8])), draw(st.sampled_from([2, 4, 8])))
    found = draw(layouts(arch, len(on.devices), train=True))
    model = Model(name="actor", arch=arch, source="tiny")
    return arch, stage(model, "train", on.devices, **found)


@examples(50)
@given(dense_stages())
def test_elements_of_every_rank_are_the_oracles(case: tuple[Arch, Stage]) -> None:
    arch, one = case
    tensors = logical_tensors(arch)
    parts = Parts(one, tensors, has_experts=False)
    everyone = coordinate_of_rank(one)
    seen = np.concatenate([c.ranks for c in parts.classes])
    assert np.array_equal(np.sort(seen), np.arange(len(everyone)))
    present = np.ones(len(tensors), dtype=bool)
    for rank_class in parts.classes:
        for slot in SLOTS:
            start, stop = parts.share(rank_class, slot, present)
            for rank in rank_class.ranks.tolist():
                truth = rank_share(one, arch, "lm", slot, everyone[rank])
                for number, tensor in enumerate(tensors):
                    rows, cols = matrix_shape(tensor.shape)
                    boxes = rank_class.boxes
                    index = np.arange(rows * cols).reshape(rows, cols)
                    box = index[
                        boxes.row_lo[number] : boxes.row_hi[number], boxes.col_lo[number] : boxes.col_hi[number]
                    ]
                    mine = box.reshape(-1)[start[number] : stop[number]]
                    theirs = truth.get(tensor.name, np.zeros(0, dtype=np.int64))
                    assert np.array_equal(mine, theirs), (rank, slot, tensor.name)


@st.composite
def any_stages(draw: st.DrawFn) -> tuple[Arch, Stage]:
    """With experts, padded vocabularies, fused matrices, interleaved pipelines: what only the IR has too."""
    moe = draw(st.sampled_from([None, MOE, MOE, Arch(**_deep())]))
    arch = draw(st.sampled_from(ARCHS)) if moe is None else moe
    tp = draw(st.sampled_from([t for t in (1, 2, 4) if t in legal_tp(arch, limit=8)]))
    pp, cp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    dp = draw(st.sampled_from([1, 2, 4]))
    ep, etp = 1, 1
    if arch.moe is not None:
        ep = draw(st.sampled_from([e for e in (1, 2, 4) if tp * cp * dp % e == 0]))
        etp = draw(st.sampled_from([e for e in sorted({1, 2, tp}) if tp * cp * dp % (ep * e) == 0]))
    settings: dict[str, object] = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
    settings["order"] = draw(st.sampled_from((*ORDERS, "tp-ep-cp-dp-pp")))
    if pp == 2 and arch.num_layers >= 4 and draw(st.booleans()):
        settings |= {"vp": 2, "chunks": (1, 1, 1, arch.num_layers - 3), "pp_split": (2, arch.num_layers - 2)}
    shard = draw(st.sampled_from(["none", "zero1", "zero3", "fsdp"]))
    if shard.startswith("zero"):
        settings["zero"] = int(shard[-1])
    elif shard == "fsdp" and dp * cp > 1:
        settings["fsdp"] = draw(st.sampled_from([d for d in (2, dp * cp) if dp * cp % d == 0]))
    kind = draw(st.sampled_from(["train", "train", "generate"]))
    if kind == "generate":
        settings |= {"engine": draw(st.sampled_from(["vllm", "sglang"])), "zero": 0, "fsdp": 0}
    else:
        settings["backend"] = draw(st.sampled_from(["megatron", "megatron", "fsdp", None]))
    on = cluster(tp * pp * cp * dp)
    return arch, stage(Model(name="actor", arch=arch, source="tiny"), kind, on.devices, **settings)


def _deep() -> dict[str, object]:
    return {
        "family": "qwen3_moe",
        "num_layers": 5,
        "hidden": 4,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 2,
        "ffn": 8,
        "vocab": 300,
        "moe": Moe(num_experts=8, experts_per_token=2, expert_ffn=8, first_dense_layers=1),
    }


@examples(120)
@given(any_stages())
def test_boxes_and_ranges_are_the_layouts(case: tuple[Arch, Stage]) -> None:
    arch, one = case
    tensors = logical_tensors(arch)
    layout = layout_of(one, experts=arch.moe is not None)
    boxes = local_boxes(tensors, layout)
    parts = Parts(one, tensors, has_experts=arch.moe is not None)
    coord_of_rank, shard_of_rank = layout.coord_of_rank(), layout.shard_of_rank()
    present = np.ones(len(tensors), dtype=bool)
    for rank_class in parts.classes:
        for rank in rank_class.ranks.tolist():
            coord = int(coord_of_rank[rank])
            held = boxes.numel[coord] > 0
            assert np.array_equal(held, rank_class.boxes.numel > 0)
            for name in ("row_lo", "row_hi", "col_lo", "col_hi"):
                assert np.array_equal(getattr(boxes, name)[coord][held], getattr(rank_class.boxes, name)[held]), name
            for slot in SLOTS:
                found = shares_of(tensors, boxes, layout, slot, coord)
                row = 0 if found.share[0] < 0 else int(np.flatnonzero(found.share == shard_of_rank[rank])[0])
                start, stop = parts.share(rank_class, slot, present)
                some = found.stop[row] > found.start[row]
                assert np.array_equal(some, stop > start)
                assert np.array_equal(found.start[row][some], start[some])
                assert np.array_equal(found.stop[row][some], stop[some])
