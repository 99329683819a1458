"""``nereus.describe`` on jobs that the frameworks built: the placed plan has the degrees, splits and places that the
job was built with, its text reads back as the same stage, and what contradicts the tensors is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from frameworks import deepspeed_engines as ds
from frameworks import fsdp2_jobs as fsdp
from frameworks import megatron_models as megatron
from frameworks.fsdp2_jobs import Layout
from frameworks.harness import run
from frameworks.megatron_models import DENSE, SPARSE, TIED, At

from nereus.ir.arch import Arch
from nereus.ir.fragment import RankState
from nereus.ir.plan import ORDER_MEGATRON, ORDER_REPLICA, Stage
from nereus.lang.api import resolve_text
from nereus.runtime.coordinates import Coordinates, from_group, from_megatron, from_mesh, from_vllm
from nereus.runtime.describe import DescribedJob, DescribeError, Facts, LiveStage, describe, plan_of

GPU = "h100-sxm-80gb"


@dataclass(frozen=True, slots=True)
class Found:
    """What ``describe`` made of a job, as one process saw it."""

    stages: tuple[Stage, ...]
    text: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, job: DescribedJob) -> Found:
        return cls(job.plan.stages, job.text, job.notes)

    @property
    def stage(self) -> Stage:
        return self.stages[0]


def _live(arch: Arch, backend: str, **more: Any) -> LiveStage:
    return LiveStage(model="actor", kind="train", arch=arch, source="tiny.json", backend=backend, **more)


def _described(live: LiveStage, coordinates: Coordinates | None, state: RankState | None) -> Found | str:
    """Or what it was refused for."""
    try:
        return Found.of(describe([(live, coordinates, state)], gpu=GPU))
    except DescribeError as error:
        return str(error)


def _swapped(state: RankState, one: int, other: int) -> RankState:
    """What rank ``other`` holds on rank ``one`` and the other way round."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, state)
    rank = dist.get_rank()
    return everyone[{one: other, other: one}.get(rank, rank)]  # type: ignore[no-any-return]


def _same_everywhere(results: list[dict[str, Any]]) -> dict[str, Any]:
    assert all(result == results[0] for result in results), "the processes were told different things"
    return results[0]


def _assert_is(found: Found | str, wanted: Mapping[str, Any], *, differing: set[str], gpus: tuple[int, ...]) -> None:
    """``wanted``: fields of the stage; the others are those of a stage without any parallelism. ``differing``: slots
    with a note, and the padding. ``gpus``: of every rank, in the plan's order."""
    assert isinstance(found, Found), found
    usual = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1, "etp": 1, "vp": 1, "chunks": (), "zero": 0, "fsdp": 0}
    for key, value in {**usual, "order": ORDER_REPLICA, "engine": None, **wanted}.items():
        assert getattr(found.stage, key) == value, key
    assert [(d.node, d.index) for d in found.stage.ranks] == [("n0", gpu) for gpu in gpus]
    assert {"padding" if "padded" in note else note.split()[1] for note in found.notes} == differing, found.notes
    _assert_reads_back(found)


def _assert_reads_back(found: Found) -> None:
    again = resolve_text(found.text)
    assert again.plan is not None, again.diagnostics
    for mine, theirs in zip(again.plan.stages, found.stages, strict=True):
        for field in fields(Stage):
            if field.compare:
                assert getattr(mine, field.name) == getattr(theirs, field.name), (theirs.name, field.name)


# -- megatron-core ----------------------------------------------------------------------------------------------------

#: The plan's rule lays optimizer shards end to end; Megatron's buckets run from the last layer to the first.
BUCKETS = {"exp_avg", "exp_avg_sq"}
SHORT = replace(DENSE, num_layers=2)
#: (model, layout, what the plan must say, slots with a note). Megatron pads to a multiple of 128 unless told.
MEGATRON: dict[str, tuple[Arch, At, dict[str, Any], set[str]]] = {
    "tp 2, pp 1 and 3 layers": (
        DENSE,
        At(tp=2, pp=2, first=1, optimizer="plain", vocab_multiple=128),
        {"tp": 2, "pp": 2, "pp_split": (1, 3)},
        set(),
    ),
    "interleaved": (
        DENSE,
        At(pp=2, vp=2, vocab_multiple=128),
        {"pp": 2, "vp": 2, "dp": 2, "pp_split": (2, 2), "chunks": (1, 1, 1, 1), "zero": 1},
        BUCKETS,
    ),
    "more ranks than kv heads": (SHORT, At(tp=4, vocab_multiple=128), {"tp": 4, "zero": 1}, set()),
    "bf16": (SHORT, At(bf16=True, vocab_multiple=128), {"dp": 4, "zero": 1}, {"master", *BUCKETS}),
    "tied": (TIED, At(pp=2, vocab_multiple=128), {"pp": 2, "dp": 2, "pp_split": (2, 2), "zero": 1}, BUCKETS),
    "context parallel": (
        SHORT,
        At(tp=2, cp=2, vocab_multiple=128),
        {"tp": 2, "cp": 2, "zero": 1},
        BUCKETS,
    ),
    "padded by another multiple": (SHORT, At(tp=2, optimizer="plain"), {"tp": 2, "dp": 2}, {"padding"}),
    "experts and stages": (
        SPARSE,
        At(ep=2, pp=2, vocab_multiple=128),
        {"ep": 2, "pp": 2, "dp": 2, "pp_split": (1, 1), "zero": 1},
        BUCKETS,
    ),
    "experts over tp": (
        SPARSE,
        At(tp=2, ep=2, vocab_multiple=128),
        {"tp": 2, "ep": 2, "dp": 2, "zero": 1, "sp": True},
        BUCKETS,
    ),
    "experts cut otherwise than the rest": (
        SPARSE,
        At(ep=2, etp=2, vocab_multiple=128),
        {"ep": 2, "etp": 2, "dp": 4, "zero": 1},
        BUCKETS,
    ),
}


def _megatron(rank: int, world: int) -> dict[str, Found | str]:
    torch.set_num_threads(1)
    found: dict[str, Found | str] = {}
    for name, (arch, at, wanted, _) in MEGATRON.items():
        trainer = megatron.build(arch, at)
        settings = (("sp", trainer.config.sequence_parallel),)
        live = _live(arch, "megatron", zero=wanted.get("zero", 0), settings=settings)
        where, state = from_megatron(), trainer.adapter().bind().state
        found[name] = _described(live, where, state)
        if name == "tp 2, pp 1 and 3 layers":
            found["wrong: tp ranks swapped"] = _described(live, where, _swapped(state, 0, 1))
            found["wrong: stages swapped"] = _described(live, where, _swapped(state, 0, 2))
            found["wrong: axes swapped"] = _described(live, replace(where, tp=where.pp, pp=where.tp), state)
            one = replace(where, tp=(0, 1)) if rank == 3 else where
            found["wrong: one disagrees"] = _described(live, one, state)
            found["wrong: backend"] = _described(replace(live, backend="deepspeed"), where, state)
        if name == "bf16":
            found["wrong: no zero"] = _described(replace(live, zero=0), where, state)
            found["wrong: zero 3"] = _described(replace(live, zero=3), where, state)
        if name == "padded by another multiple":
            found["wrong: zero"] = _described(replace(live, zero=1), where, state)
        if name == "experts and stages":
            found["wrong: experts swapped"] = _described(live, where, _swapped(state, 2, 3))
            assert where.ep is not None
            turned = replace(where, ep=(1 - where.ep[0], 2))
            found["wrong: experts' ranks"] = _described(live, turned, state)
    return found


@pytest.fixture(scope="module")
def of_megatron() -> dict[str, Found | str]:
    return _same_everywhere(run(4, _megatron, timeout=300))


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron(of_megatron: dict[str, Found | str], name: str) -> None:
    arch, _, wanted, differing = MEGATRON[name]
    wanted = {"pp_split": (arch.num_layers,), "order": ORDER_MEGATRON, "backend": "megatron", "sp": False, **wanted}
    found = of_megatron[name]
    _assert_is(found, wanted, differing=differing, gpus=(0, 1, 2, 3))
    assert isinstance(found, Found)
    slots = {slot.name: slot.dtype for slot in found.stage.slots}
    masters = {"master": "fp32"} if name == "bf16" else {}
    assert slots == {"weight": "bf16" if name == "bf16" else "fp32", **masters, **dict.fromkeys(BUCKETS, "fp32")}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tp ranks swapped", "actor.train: weight of "),
        ("stages swapped", "actor.train: layer "),
        ("axes swapped", "actor.train: layer 0 lies on pipeline stages [0, 1]; every layer has exactly one"),
        ("one disagrees", "processes disagree about tp: 2 on "),
        ("backend", "actor.train: weight of "),
        ("no zero", "hold master of model.embed_tokens.weight 1 times, and zero 0 over dp 4 means 4 times"),
        ("zero 3", "actor.train: weight of "),
        ("zero", "hold exp_avg of model.embed_tokens.weight 2 times, and zero 1 over dp 2 means 1 times"),
        ("experts swapped", "actor.train: weight of "),
        ("experts' ranks", "the experts' groups follow none of the orders"),
    ],
)
def test_megatron_wrong_statements(of_megatron: dict[str, Found | str], name: str, text: str) -> None:
    found = of_megatron[f"wrong: {name}"]
    assert isinstance(found, str) and text in found, found


# -- torch ------------------------------------------------------------------------------------------------------------

#: (layout, axes of the mesh, what the plan must say). The order of one is not the processes'.
TORCH: dict[str, tuple[Layout, dict[str, str], dict[str, Any]]] = {
    "fsdp 2 x tp 2": (
        Layout(kind="fsdp", ranks=(0, 2, 1, 3), tp=2, ends=True),
        {"dp": "dp", "tp": "tp"},
        {"tp": 2, "dp": 2, "fsdp": 2},
    ),
    "fsdp 3 of 4": (Layout(kind="fsdp", ranks=(0, 1, 3)), {"dp": "dp"}, {"dp": 3, "fsdp": 3}),
    "hsdp": (Layout(kind="hsdp", ranks=(0, 1, 2, 3)), {"copy": "dp", "dp": "dp"}, {"dp": 4, "fsdp": 2}),
    "ddp": (Layout(kind="ddp", ranks=(1, 3)), {}, {"dp": 2}),
}


def _torch(rank: int, world: int) -> dict[str, Found | str]:
    torch.set_num_threads(1)
    arch = fsdp.naming("dense").arch
    found: dict[str, Found | str] = {}
    for name, (layout, axes, wanted) in TORCH.items():
        backend = "torch" if layout.kind == "ddp" else "fsdp"
        live = _live(arch, backend, fsdp=wanted.get("fsdp", 0), settings=(("sp", False),))
        job = fsdp.build("dense", layout, fsdp.initial("dense"))
        where, wrong, state = None, None, None
        if job is not None:
            fsdp.train(job, 0)  # the optimizer makes its state in the first step
            state = job.adapter.bind().state
            if layout.kind == "ddp":
                where = from_group(job.module.process_group)
            else:
                mesh = job.model.model.layers[0].self_attn.q_proj.weight.device_mesh  # type: ignore[union-attr]
                where = from_mesh(mesh, axes)
                wrong = from_mesh(mesh, {**axes, "dp": "tp", "tp": "dp"})
        found[name] = _described(live, where, state)
        if name == "fsdp 2 x tp 2":
            found["wrong: axes swapped"] = _described(live, wrong, state)
            found["wrong: no tp"] = _described(live, from_group() if where else None, state)
        if name == "hsdp":
            found["wrong: one group"] = _described(replace(live, fsdp=4), where, state)
            found["wrong: zero 3"] = _described(replace(live, fsdp=0, zero=3), where, state)
    # Tensor parallelism of the layers alone: no plan says that, so none is written.
    job = fsdp.build("dense", Layout(kind="fsdp", ranks=(0, 1, 2, 3), tp=2), fsdp.initial("dense"))
    assert job is not None
    fsdp.train(job, 0)
    mesh = job.model.model.layers[0].self_attn.q_proj.weight.device_mesh  # type: ignore[union-attr]
    where = from_mesh(mesh, {"dp": "dp", "tp": "tp"})
    live = _live(arch, "fsdp", fsdp=2)
    found["wrong: embedding whole"] = _described(live, where, job.adapter.bind().state)
    found["two stages"] = _two_stages()
    return found


def _two_stages() -> Found:
    """An actor that trains on ranks 0 and 1, and its frozen copy that infers on 2 and 3."""
    arch = fsdp.naming("dense").arch
    actor = fsdp.build("dense", Layout(kind="fsdp", ranks=(0, 1)), fsdp.initial("dense"))
    if actor is not None:
        fsdp.train(actor, 0)
    ref = fsdp.build("dense", Layout(kind="fsdp", ranks=(2, 3)), fsdp.initial("dense"))
    stages = []
    for name, kind, job, frozen in (("actor", "train", actor, False), ("ref", "infer", ref, True)):
        live = replace(_live(arch, "fsdp", fsdp=2, frozen=frozen), model=name, kind=kind)
        if job is None:
            stages.append((live, None, None))
            continue
        mesh = next(job.model.parameters()).device_mesh  # type: ignore[attr-defined]
        stages.append((live, from_mesh(mesh, {"dp": "dp"}), job.adapter.bind().state))
    return Found.of(describe(stages, gpu=GPU))


@pytest.fixture(scope="module")
def of_torch() -> dict[str, Found | str]:
    return _same_everywhere(run(4, _torch, timeout=300))


@pytest.mark.parametrize("name", TORCH)
def test_torch(of_torch: dict[str, Found | str], name: str) -> None:
    layout, _, wanted = TORCH[name]
    backend = "torch" if layout.kind == "ddp" else "fsdp"
    wanted = {"backend": backend, "sp": False, "pp_split": (2,), "optimizer": "adam", **wanted}
    _assert_is(of_torch[name], wanted, differing=set(), gpus=layout.ranks)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("axes swapped", "actor.train: weight of "),
        ("no tp", "actor.train: weight of "),
        ("one group", "actor.train: weight of "),
        ("zero 3", "actor.train: weight of "),
        ("embedding whole", "lies otherwise than the plan's rule says, first model.embed_tokens.weight"),
    ],
)
def test_torch_wrong_statements(of_torch: dict[str, Found | str], name: str, text: str) -> None:
    found = of_torch[f"wrong: {name}"]
    assert isinstance(found, str) and text in found, found


def test_two_stages_are_one_plan(of_torch: dict[str, Found | str]) -> None:
    found = of_torch["two stages"]
    assert isinstance(found, Found) and found.notes == ()
    actor, ref = found.stages
    assert (actor.name, [d.index for d in actor.ranks], actor.fsdp, actor.optimizer) == (
        "actor.train",
        [0, 1],
        2,
        "adam",
    )
    assert (ref.name, [d.index for d in ref.ranks], ref.fsdp, ref.optimizer) == ("ref.infer", [2, 3], 2, None)
    assert [slot.name for slot in ref.slots] == ["weight"]
    _assert_reads_back(found)


# -- DeepSpeed --------------------------------------------------------------------------------------------------------


def _deepspeed(rank: int, world: int) -> dict[str, Found | str]:
    from nereus.runtime.adapters.deepspeed import DeepSpeedAdapter

    found: dict[str, Found | str] = {}
    group = ds.Group(world)
    for stage, wrong in ((0, 1), (1, 0), (2, 3), (3, 1)):
        engine = ds.build(stage, group)
        where, state = from_group(group.group), DeepSpeedAdapter(engine, ds.NAMING).bind().state
        live = _live(ds.ARCH, "deepspeed", zero=stage)
        found[f"zero {stage}"] = _described(live, where, state)
        found[f"wrong: zero {wrong} for {stage}"] = _described(replace(live, zero=wrong), where, state)
        if stage == 1:
            found["wrong: swapped"] = _described(live, where, replace(_swapped(state, 1, 2), rank=rank))
    grouped = DeepSpeedAdapter(ds.build(1, group, groups=True), ds.NAMING).bind().state
    found["zero 1, several groups"] = _described(_live(ds.ARCH, "deepspeed", zero=1), from_group(group.group), grouped)
    return found


@pytest.fixture(scope="module")
def of_deepspeed() -> dict[str, Found | str]:
    return _same_everywhere(run(4, _deepspeed, timeout=300))


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed(of_deepspeed: dict[str, Found | str], stage: int) -> None:
    wanted = {"dp": 4, "zero": stage, "backend": "deepspeed", "sp": False, "pp_split": (2,), "optimizer": "adam"}
    found = of_deepspeed[f"zero {stage}"]
    _assert_is(found, wanted, differing=set(), gpus=(0, 1, 2, 3))
    if stage == 1:
        # Every group is a buffer of its own; the plan's rule knows one.
        groups = of_deepspeed["zero 1, several groups"]
        _assert_is(groups, wanted, differing={"master", "exp_avg", "exp_avg_sq"}, gpus=(0, 1, 2, 3))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("zero 1 for 0", "hold master of model.embed_tokens.weight 4 times, and zero 1 over dp 4 means 1 times"),
        ("zero 0 for 1", "hold master of model.embed_tokens.weight 1 times, and zero 0 over dp 4 means 4 times"),
        ("zero 3 for 2", "actor.train: weight of "),
        ("zero 1 for 3", "actor.train: weight of "),
    ],
)
def test_deepspeed_wrong_statements(of_deepspeed: dict[str, Found | str], name: str, text: str) -> None:
    found = of_deepspeed[f"wrong: {name}"]
    assert isinstance(found, str) and text in found, found


# -- vLLM -------------------------------------------------------------------------------------------------------------

#: (family, tp, dp, expert parallel): ep and etp of the plan.
VLLM: dict[tuple[str, int, int, bool], tuple[int, int]] = {
    ("llama", 2, 1, False): (1, 1),
    ("llama", 4, 1, False): (1, 1),  # more ranks than kv heads: copies
    ("qwen3_moe", 2, 1, False): (1, 2),
    ("qwen3_moe", 2, 2, True): (4, 1),
    ("qwen3_moe", 1, 2, False): (1, 2),  # every expert cut over both replicas
    ("qwen3_moe", 1, 2, True): (2, 1),
}


def _vllm(rank: int, world: int) -> dict[Any, Found | str]:
    """Models of every process one after the other, in groups whose ranks are set by hand."""
    from frameworks.vllm_models import Builder, full_weights
    from frameworks.vllm_models import Coordinates as Place

    from nereus.models.naming.vllm import VllmNaming
    from nereus.runtime.adapters.vllm import VllmAdapter

    found: dict[Any, Found | str] = {}
    for family in dict.fromkeys(case[0] for case in VLLM):
        builder = Builder(family)
        live = LiveStage(model="actor", kind="generate", arch=builder.arch, source="tiny.json", engine="vllm")
        naming, weights = VllmNaming(arch=builder.arch), full_weights(builder.arch)

        def said(facts: list[Facts], live: LiveStage = live) -> Found | str:
            try:
                return Found.of(plan_of([(live, facts)], {"host": len(facts)}, gpu=GPU))
            except DescribeError as error:
                return str(error)

        for case in (case for case in VLLM if case[0] == family):
            _, tp, dp, ep = case
            facts, without = [], []
            for number, (dp_rank, tp_rank) in enumerate(Place(tp=tp, dp=dp, ep=ep).ranks()):
                model = builder.build(Place(tp=tp, dp=dp, ep=ep), dp_rank, tp_rank, weights)
                state = VllmAdapter(model, naming, builder.vllm_config.model_config).bind().state
                facts.append(Facts(host="host", index=number, coordinates=from_vllm(model), state=state))
                without.append(replace(facts[-1], coordinates=from_vllm()))
            found[case] = said(facts)
            first, second, *rest = facts
            turned = [replace(first, state=second.state), replace(second, state=first.state), *rest]
            found["swapped", case] = said(turned)
            found["without model", case] = said(without)
    return found


@pytest.fixture(scope="module")
def of_vllm() -> dict[Any, Found | str]:
    (found,) = run(1, _vllm, init=False, timeout=300)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", VLLM)
def test_vllm(of_vllm: dict[Any, Found | str], case: tuple[str, int, int, bool]) -> None:
    family, tp, dp, _ = case
    ep, etp = VLLM[case]
    wanted = {"tp": tp, "dp": dp, "ep": ep, "etp": etp, "engine": "vllm", "backend": None, "pp_split": (2,)}
    found = of_vllm[case]
    _assert_is(found, wanted, differing=set(), gpus=tuple(range(tp * dp)))
    assert isinstance(found, Found) and [(s.name, s.dtype) for s in found.stage.slots] == [("weight", "bf16")]
    swapped = of_vllm["swapped", case]
    assert isinstance(swapped, str) and "actor.generate: weight of " in swapped
    if family == "qwen3_moe" and dp > 1:
        # Groups alone do not say where experts lie.
        without = of_vllm["without model", case]
        assert isinstance(without, str) and ".mlp.experts." in without, without
