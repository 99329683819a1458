"""Small transformers models under FSDP2, tensor parallelism, DDP or alone, built from whole tensors, trained, moved by
Nereus, and compared with a twin that torch itself built at the new layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from frameworks.gathering import bindings_of_all
from frameworks.hf_models import config
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nereus.ir.tensor import matrix_shape
from nereus.models.hf import arch_from_config
from nereus.models.naming.base import Where
from nereus.models.naming.hf import HfNaming, unwrapped
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.fsdp2 import Fsdp2
from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.adapters.whole import Whole, gather
from nereus.runtime.live import move

#: name -> (family, sizes). One kv head of 6 rows: 2, 2, 2, 0 on four ranks.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven": (
        "llama",
        {"vocab_size": 90, "hidden_size": 24, "intermediate_size": 42, "num_key_value_heads": 1, "head_dim": 6},
    ),
    "tied": (
        "qwen2",
        {
            "vocab_size": 90,
            "hidden_size": 24,
            "intermediate_size": 42,
            "num_key_value_heads": 2,
            "head_dim": None,
            "tie_word_embeddings": True,
        },
    ),
    "dense": (
        "llama",
        {"vocab_size": 90, "hidden_size": 24, "intermediate_size": 42, "num_key_value_heads": 2, "head_dim": 6},
    ),
    "experts": ("qwen3_moe", {"vocab_size": 90, "hidden_size": 24, "head_dim": 6, "moe_intermediate_size": 12}),
}

#: parameter -> whole tensor; (parameter, key of the optimizer's state) -> whole tensor.
Weights = dict[str, torch.Tensor]
Moments = dict[tuple[str, str], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``kind``: fsdp (``ranks`` / tp ranks each), hsdp (2 copies), ddp or alone. ``ends``: tp cuts embedding and head
    too."""

    kind: str
    ranks: tuple[int, ...]
    tp: int = 1
    bf16: bool = False
    ends: bool = False


@dataclass(slots=True)
class Job:
    model: nn.Module  # as transformers names it
    module: nn.Module  # what trains: the model, or a wrapper
    optimizer: torch.optim.Optimizer
    scheduler: Any
    adapter: PlainTorch
    layout: Layout


def naming(model: str) -> HfNaming:
    family, sizes = MODELS[model]
    return HfNaming(arch=arch_from_config(config(family, **sizes).to_dict()))


def initial(model: str) -> Weights:
    """Whole weights, the same in every process."""
    from transformers import AutoModelForCausalLM

    family, sizes = MODELS[model]
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(config(family, **sizes))
    return {name: p.detach().clone() for name, p in built.named_parameters()}


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def build(
    model: str,
    layout: Layout,
    weights: Weights | None,
    *,
    seed: int = 1,
    schedule: Callable[[torch.optim.Optimizer], Any] = halving,
) -> Job | None:
    """Called by every process (groups are made); None outside of the layout. ``weights`` None: other random ones."""
    from transformers import AutoModelForCausalLM

    ranks = torch.tensor(layout.ranks)
    if layout.kind == "hsdp":
        mesh = DeviceMesh("cpu", ranks.reshape(2, -1), mesh_dim_names=("copy", "dp"))
    else:
        mesh = DeviceMesh("cpu", ranks.reshape(-1, layout.tp), mesh_dim_names=("dp", "tp"))
    group = dist.new_group(list(layout.ranks))
    if dist.get_rank() not in layout.ranks:
        return None
    family, sizes = MODELS[model]
    torch.manual_seed(seed)
    built: nn.Module = AutoModelForCausalLM.from_config(config(family, **sizes))
    built.config.use_cache = False  # type: ignore[union-attr]
    if weights is not None:
        built.load_state_dict(weights, strict=False)
    module = built
    if layout.tp > 1:
        for layer in built.model.layers:  # type: ignore[union-attr]
            parallelize_module(layer, mesh["tp"], _tensor_parallel())
    if layout.ends:
        ends = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(built, mesh["tp"], ends)
    if layout.kind in ("fsdp", "hsdp"):
        over = mesh if layout.kind == "hsdp" else mesh["dp"]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if layout.bf16 else MixedPrecisionPolicy()
        for layer in built.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=over, mp_policy=policy)
        fully_shard(built, mesh=over, mp_policy=policy)
    elif layout.kind == "ddp":
        module = nn.parallel.DistributedDataParallel(built, process_group=group)
    matrices = [p for p in built.parameters() if p.dim() > 1]
    vectors = [p for p in built.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "lr": 0.01}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}], foreach=False
    )
    scheduler = schedule(optimizer)
    kind = PlainTorch if layout.kind in ("ddp", "alone") else Fsdp2
    adapter = kind(module, optimizer, naming=naming(model), scheduler=scheduler)
    return Job(built, module, optimizer, scheduler, adapter, layout)


def _tensor_parallel() -> dict[str, Any]:
    names = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
    plan: dict[str, Any] = {f"{part}.{name}": ColwiseParallel() for part, group in names.items() for name in group}
    return plan | {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 90, (2, 7), generator=torch.Generator().manual_seed(step))


def loss_of(job: Job, step: int) -> torch.Tensor:
    batch = tokens(step)
    logits = job.module(input_ids=batch).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def train(job: Job, step: int) -> dict[str, Any]:
    """One step of the same batch on every rank: loss, gradient norm and learning rates."""
    loss = loss_of(job, step)
    loss.backward()
    grads = [full(p.grad) for p in job.model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.double()) for g in grads]))
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    rates = [group["lr"] for group in job.optimizer.param_groups]
    return {"loss": loss.item(), "grad norm": norm.item(), "lr": rates}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def settle(job: Job) -> None:
    for part in job.model.modules():
        if hasattr(part, "reshard"):
            part.reshard()


def whole_by_torch(job: Job) -> tuple[Weights, Moments]:
    """torch's own view: DTensor.full_tensor of every weight and moment."""
    settle(job)
    weights = {name: full(p).clone() for name, p in job.model.named_parameters()}
    moments: Moments = {}
    for name, p in job.model.named_parameters():
        for key, value in job.optimizer.state[p].items():
            moments[name, key] = (full(value) if value.dim() else value).clone()
    return weights, moments


def give(job: Job, moments: Moments, old: Any) -> None:
    """Optimizer state and schedule by torch's own means, for the twin."""
    settle(job)
    for name, p in job.model.named_parameters():
        for (owner, key), value in moments.items():
            if owner != name:
                continue
            if isinstance(p, DTensor) and value.dim():
                value = distribute_like(value, p)
            job.optimizer.state[p][key] = value.clone()
    for group, facts in zip(job.optimizer.param_groups, old["groups"], strict=True):
        group.update(facts)
    job.scheduler.load_state_dict(old["scheduler"])


def distribute_like(value: torch.Tensor, parameter: DTensor) -> DTensor:
    """The twin's weight went through fully_shard; its moments are cut by the same parameter's own cutting."""
    stand_in = nn.Module()
    stand_in.register_parameter("p", nn.Parameter(value.clone()))
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, placements = parameter.device_mesh, parameter.placements
    if any(isinstance(p, _StridedShard) for p in placements):
        # As fully_shard does over tensor parallelism: cut by tp, then the local part by dp.
        inner = distribute_tensor(value, mesh["tp"], placements[1:], src_data_rank=None)
        outer = distribute_tensor(inner.to_local(), mesh["dp"], [_plain(placements[0])], src_data_rank=None)
        return DTensor.from_local(
            outer.to_local(), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    assert all(isinstance(p, Replicate) or p.is_shard() for p in placements)
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _plain(placement: Any) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(placement.dim)


def shared(value: Any, source: int) -> Any:
    """``value`` of rank ``source`` on all ranks."""
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def described(job: Job | None, model: str) -> Whole:
    """Whole tensors out of the adapter's own description, from all ranks."""
    shapes = {t.name: matrix_shape(t.shape) for t in logical_tensors(naming(model).arch)}
    return gather(bindings_of_all(job.adapter.bind() if job is not None else None), shapes)


def assert_described(model: str, whole: Whole, weights: Weights, moments: Moments) -> None:
    """The description against full_tensor: every element of every parameter and moment, through the naming."""
    names = naming(model)
    wanted = {(name, "weight"): value for name, value in weights.items()}
    wanted |= {key: value for key, value in moments.items() if value.dim()}
    seen = set()
    for (name, slot), value in wanted.items():
        matrix = value.reshape(-1, value.shape[-1]) if value.dim() > 1 else value.reshape(-1, 1)
        for s in names.segments(unwrapped(name), tuple(value.shape), Where()):
            theirs = matrix[s.at_row : s.at_row + s.row_hi - s.row_lo, s.at_col : s.at_col + s.col_hi - s.col_lo]
            assert torch.equal(whole[s.tensor, slot][s.row_lo : s.row_hi, s.col_lo : s.col_hi], theirs), (name, slot)
            seen.add((s.tensor, slot))
    assert seen == set(whole)


def assert_same(job: Job, twin: Job) -> None:
    """Local parts of every weight and of the optimizer's whole state, element by element."""
    settle(job)
    settle(twin)
    for (name, mine), theirs in zip(job.model.named_parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(local(mine), local(theirs)), name
        have, want = job.optimizer.state[mine], twin.optimizer.state[theirs]
        assert have.keys() == want.keys(), name
        for key in want:
            assert type(have[key]) is type(want[key]), (name, key)
            assert torch.equal(local(have[key]), local(want[key])), (name, key)
            if isinstance(have[key], DTensor):
                assert have[key].placements == want[key].placements, (name, key)
    assert [{**g, "params": 0} for g in job.optimizer.param_groups] == [
        {**g, "params": 0} for g in twin.optimizer.param_groups
    ]
    assert job.scheduler.state_dict() == twin.scheduler.state_dict()


def step_to(job: Job | None, model: str, old: Layout, layout: Layout, step: int) -> tuple[Job | None, dict[str, Any]]:
    """Move the job to ``layout`` and check it in every respect; the new job, and what its next step gave."""
    source = old.ranks[0]
    weights, moments = whole_by_torch(job) if job is not None else ({}, {})
    facts = None
    if job is not None:
        job.adapter.set_version(step)
        facts = job.adapter.job_state()
    by_hand = None
    if job is not None:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in job.optimizer.param_groups]
        by_hand = {"groups": groups, "scheduler": job.scheduler.state_dict()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    assert len({repr(f) for f in everyone if f is not None}) == 1, "the job state differs between ranks"
    weights, moments, facts, by_hand = shared((weights, moments, facts, by_hand), source)

    whole = described(job, model)
    assert_described(model, whole, weights, moments)

    twin, new = build(model, layout, weights), build(model, layout, None, seed=5 + step)
    if new is not None:
        new.adapter.prepare(facts)
    before = job.adapter.bind() if job is not None else None
    move(before, new.adapter.bind() if new is not None else None, logical_tensors(naming(model).arch))
    result: dict[str, Any] = {}
    if new is not None and twin is not None:
        new.adapter.finish(facts)
        assert [(c.name, c.check()) for c in new.adapter.checklist() if c.check() is not None] == []
        assert new.adapter.version() == step
        give(twin, moments, by_hand)
        assert_same(new, twin)
        result = train(new, step)
        assert result == train(twin, step)
        assert_same(new, twin)
        assert result["loss"] == result["loss"]
    again = described(job, model)
    assert all(torch.equal(again[key], whole[key]) for key in whole), "the move wrote into what it read"
    return new, result


def chain(rank: int, world_size: int, model: str, layouts: tuple[Layout, ...]) -> list[dict[str, Any]]:
    """Two steps at the first layout, then a move and a step at each of the others; what each step gave."""
    job = build(model, layouts[0], initial(model))
    results = [train(job, step) if job is not None else {} for step in range(2)]
    for number, layout in enumerate(layouts[1:], start=2):
        job, result = step_to(job, model, layouts[number - 2], layout, number)
        results.append(result)
    return results
