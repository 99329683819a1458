"""LoRA on live modules: factors beside frozen weights, trained, moved between FSDP2, DDP and one process, trained on.

One half of the layouts names its parameters as Nereus does, the other as a module that peft has wrapped (peft itself
is not in this environment: its names are those of its documentation).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from frameworks import fsdp2_jobs as fsdp
from frameworks.fsdp2_jobs import MODELS, Job, Layout
from frameworks.gathering import bindings_of_all
from frameworks.harness import run
from frameworks.hf_models import config
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from nereus.ir.arch import Lora
from nereus.ir.tensor import matrix_shape
from nereus.models.hf import arch_from_config
from nereus.models.naming.hf import HfNaming
from nereus.models.naming.peft import PeftNaming
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.fsdp2 import Fsdp2
from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.adapters.whole import Whole, gather
from nereus.runtime.live import ALL, move

#: Three rows of A: none on one of four ranks. Column-parallel and row-parallel matrices.
LORA = Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
STRETCH = 2


class Adapted(nn.Module):
    """A frozen linear and its factors, under the logical names."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight = base.weight
        self.lora_A = nn.Linear(base.in_features, LORA.rank, bias=False)
        self.lora_B = nn.Linear(LORA.rank, base.out_features, bias=False)
        self.scale = LORA.alpha / LORA.rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) + self.scale * self.lora_B(self.lora_A(x))


class PeftAdapted(nn.Module):
    """The same under peft's names."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, LORA.rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(LORA.rank, base.out_features, bias=False)})
        self.scale = LORA.alpha / LORA.rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.scale * self.lora_B["default"](self.lora_A["default"](x))


class PeftModel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.base_model.model(**inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    layout: Layout
    peft: bool


FAMILY, SIZES = MODELS["dense"]
ARCH = arch_from_config(config(FAMILY, **SIZES).to_dict())
TENSORS = logical_tensors(ARCH, "lm", LORA)


def _plain(seed: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    built: nn.Module = AutoModelForCausalLM.from_config(config(FAMILY, **SIZES))
    built.config.use_cache = False  # type: ignore[union-attr]
    return built


def _sharded(model: nn.Module, module: nn.Module, ranks: tuple[int, ...]) -> None:
    mesh = DeviceMesh("cpu", torch.tensor(ranks))
    if dist.get_rank() in ranks:
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)


def _build(at: At, seed: int) -> Job | None:
    """Called by every process; None outside of the layout."""
    model, layout = _plain(seed), at.layout
    kind = PeftAdapted if at.peft else Adapted
    for layer in model.model.layers:  # type: ignore[union-attr]
        for owner, names in ((layer.self_attn, ("q_proj", "v_proj")), (layer.mlp, ("down_proj",))):
            for name in names:
                setattr(owner, name, kind(getattr(owner, name)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    module = PeftModel(model) if at.peft else model
    group = dist.new_group(list(layout.ranks))
    if layout.kind == "fsdp":
        _sharded(model, module, layout.ranks)
    if dist.get_rank() not in layout.ranks:
        return None
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, foreach=False)
    scheduler = fsdp.halving(optimizer)
    wrapped = nn.parallel.DistributedDataParallel(module, process_group=group) if layout.kind == "ddp" else module
    naming: Any = PeftNaming(arch=ARCH, lora=LORA) if at.peft else HfNaming(arch=ARCH, lora=LORA)
    adapter = Fsdp2 if layout.kind == "fsdp" else PlainTorch
    return Job(
        module, wrapped, optimizer, scheduler, adapter(wrapped, optimizer, naming=naming, scheduler=scheduler), layout
    )


def _whole(adapter: PlainTorch | None) -> Whole:
    """Every element that the processes hold together, copies compared."""
    bindings = bindings_of_all(adapter.bind() if adapter is not None else None)
    return gather(bindings, {t.name: matrix_shape(t.shape) for t in TENSORS})


def _moved(job: Job | None, old: At, at: At) -> Job | None:
    facts = fsdp.shared(job.adapter.job_state() if job is not None else None, old.layout.ranks[0])
    before = _whole(job.adapter if job is not None else None)
    new = _build(at, seed=99)
    if new is not None:
        new.adapter.prepare(facts)
    move(job.adapter.bind() if job is not None else None, new.adapter.bind() if new is not None else None, TENSORS)
    if new is not None:
        new.adapter.finish(facts)
        assert [(c.name, c.check()) for c in new.adapter.checklist() if c.check() is not None] == []
        assert new.adapter.job_state() == facts
    after = _whole(new.adapter if new is not None else None)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before), at
    return new


def _stretch(job: Job | None, at: At, number: int) -> tuple[list[dict[str, Any]], Whole]:
    steps = range(number * STRETCH, (number + 1) * STRETCH)
    results = [fsdp.train(job, step) if job is not None else {} for step in steps]
    return fsdp.shared(results, at.layout.ranks[0]), _whole(job.adapter if job is not None else None)


def _reference(job: Job | None, base: Whole) -> tuple[int, ...]:
    """The reference model is the actor without its adapter: a plain module, filled with the base alone."""
    ranks = (0, 1)
    ref = _plain(seed=7)
    for parameter in ref.parameters():
        parameter.requires_grad_(False)
    _sharded(ref, ref, ranks)
    adapter = Fsdp2(ref, naming=HfNaming(arch=ARCH)) if dist.get_rank() in ranks else None
    report = move(
        job.adapter.bind() if job is not None else None,
        adapter.bind() if adapter is not None else None,
        TENSORS,
        drop=(ALL,),
    )
    found = _whole(adapter)
    assert found.keys() == base.keys() and all(torch.equal(found[key], base[key]) for key in base)
    if adapter is not None:
        expected = _plain(seed=0)(input_ids=fsdp.tokens(0)).logits
        assert torch.equal(ref(input_ids=fsdp.tokens(0)).logits, expected)
    return dict(report.dropped)["weight"], dict(report.dropped)["exp_avg"]


def _chain(rank: int, world: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    four = At(layout=Layout(kind="fsdp", ranks=(0, 1, 2, 3)), peft=False)
    places = [
        four,
        At(layout=Layout(kind="fsdp", ranks=(1, 3)), peft=True),
        At(layout=Layout(kind="ddp", ranks=(0, 2)), peft=True),
        At(layout=Layout(kind="alone", ranks=(1,)), peft=False),
        At(layout=Layout(kind="fsdp", ranks=(0, 1, 2)), peft=False),
        replace(four, peft=True),
    ]
    unmoved, job, at = _build(four, seed=0), _build(four, seed=0), four
    start = _whole(job.adapter if job is not None else None)
    gaps = []
    for number, place in enumerate(places):
        if number:
            job, at = _moved(job, at, place), place
        theirs, here = _stretch(unmoved, four, number), _stretch(job, at, number)
        gaps.append((theirs[0], here[0], _gap(here[1], theirs[1])))
    end = here[1]
    base = {key: value for key, value in start.items() if ".lora_" not in key[0]}
    assert all(torch.equal(end[key], value) for key, value in base.items()), "frozen weights changed"
    assert all(not torch.equal(end[key], value) for key, value in start.items() if key not in base)
    slots = {slot: {name for name, s in end if s == slot} for _, slot in end}
    return {"gaps": gaps, "slots": slots, "dropped": _reference(job, base)}


def _gap(mine: Whole, theirs: Whole) -> float:
    """The largest difference to a tensor's largest element."""
    assert mine.keys() == theirs.keys()
    return max(((mine[k] - v).abs().max() / v.abs().max().clamp(min=1e-30)).item() for k, v in theirs.items())


def test_adapters_move_train_on_and_leave_a_reference() -> None:
    found = run(4, _chain, timeout=300)
    factors = {tensor.name for tensor in TENSORS if tensor.trainable}
    assert len(factors) == ARCH.num_layers * 3 * 2
    for result in found:
        assert result["slots"] == {"weight": {t.name for t in TENSORS}, "exp_avg": factors, "exp_avg_sq": factors}
        assert result["dropped"] == (len(factors), len(factors))
        for theirs, here, gap in result["gaps"]:
            for a, b in zip(here, theirs, strict=True):
                assert a["lr"] == b["lr"]
                assert abs(a["loss"] - b["loss"]) <= 1e-5 * b["loss"]
                assert abs(a["grad norm"] - b["grad norm"]) <= 1e-4 * b["grad norm"]
            assert gap <= 1e-3
        assert result["gaps"][0][2] == 0
    losses = [update["loss"] for _, here, _ in found[0]["gaps"] for update in here]
    assert len(set(losses)) == len(losses)
