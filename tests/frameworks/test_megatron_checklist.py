"""What binding refuses by name, and that each line of the rebuild checklist fails when its matter is broken.

The objects are real; faults are put in and taken out again. What needs one process, and what needs two, runs in one
start each: starting them costs more than the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from frameworks.harness import run
from frameworks.megatron_models import (
    DENSE,
    LATENT,
    SPARSE,
    At,
    Trainer,
    build,
    compare_with_metadata,
    optimizer_of,
    randomise,
    shapes,
    whole_of,
)

from nereus.models.naming.megatron import MegatronNaming
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.base import BindError
from nereus.runtime.adapters.megatron import MegatronAdapter
from nereus.runtime.adapters.whole import gather
from nereus.runtime.live import MoveError, move
from nereus.runtime.rng_streams import RngPlace, rederive, verify

SMALL = replace(DENSE, num_layers=2)


def _refusal(adapter: MegatronAdapter) -> str:
    try:
        adapter.bind()
    except BindError as error:
        return str(error)
    return ""


class _Average:
    """A user's own moving average of the weights."""

    def __init__(self, model: Any) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}


class _Scales(torch.nn.Module):
    """A layer with extra state, as Transformer Engine's have."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(4)


def _refused(rank: int, world: int) -> dict[str, str]:
    trainer = build(SMALL, At())
    trainer.step(0)
    model, optimizer = trainer.chunks[0].module, trainer.optimizer.chained_optimizers[0]
    found = {"sound": _refusal(trainer.adapter())}

    def broken(name: str, owner: Any, attribute: str, value: Any, adapter: MegatronAdapter | None = None) -> None:
        had = hasattr(owner, attribute)
        old = getattr(owner, attribute, None)
        setattr(owner, attribute, value)
        found[name] = _refusal(adapter or trainer.adapter())
        setattr(owner, attribute, old) if had else delattr(owner, attribute)

    broken("average", model, "average", _Average(model))
    broken("copy", model, "teacher", build(SMALL, At(optimizer=None), wrap=False).chunks[0])
    broken("list", optimizer, "ema", [torch.zeros(3)])
    broken("extra", model.decoder, "scales", _Scales())
    layer = model.decoder.layers[0]
    layer.register_buffer("seen", torch.zeros(2))
    found["buffer"] = _refusal(trainer.adapter())
    del layer.seen
    broken("layers", layer, "layer_number", 2)
    state = optimizer.optimizer.state
    shard = next(iter(state))
    state[shard]["trust"] = torch.zeros(3)
    found["state"] = _refusal(trainer.adapter())
    del state[shard]["trust"]
    for name, value in (("rotary_interleaved", True), ("layernorm_zero_centered_gamma", True)):
        broken(name, trainer.config, name, value)
    naming = MegatronNaming(arch=replace(SMALL, tied_embeddings=True))
    found["tied"] = _refusal(MegatronAdapter(trainer.chunks, naming))
    heads = replace(SMALL, num_heads=4, num_kv_heads=1, head_dim=8, qk_norm=False)
    found["heads"] = _refusal(MegatronAdapter(trainer.chunks, MegatronNaming(arch=heads)))
    found["kind"] = _kind(trainer)
    adam = torch.optim.Adam(model.parameters())
    found["foreign"] = _refusal(MegatronAdapter(trainer.chunks, trainer.adapter().naming, optimizer=adam))
    found["again"] = _refusal(trainer.adapter())
    return found


def _kind(trainer: Trainer) -> str:
    return _refusal(MegatronAdapter([torch.nn.Linear(2, 2)], trainer.adapter().naming))


def test_what_is_not_understood_is_refused_by_name(alone: dict[str, Any]) -> None:
    found = dict(alone["refused"])
    assert found.pop("sound") == found.pop("again") == ""
    for name, text in {
        "average": "chunk0.average.shadow['embedding.word_embeddings.weight'] is not known",
        "copy": "Megatron parameter 'teacher.embedding.word_embeddings.weight'",
        "list": "DistributedOptimizer.ema holds tensors and is not known",
        "extra": "chunk0.decoder.scales._extra_state holds Transformer Engine's FP8 scales",
        "buffer": "buffer chunk0.decoder.layers.0.seen is not known",
        "layers": "holds layers (1, 1): one of them twice",
        "state": "state 'trust' of chunk0.",
        "rotary_interleaved": "rotary_interleaved orders the rows of q and k in another way",
        "layernorm_zero_centered_gamma": "stores the norms' weights less one",
        "tied": "share_embeddings_and_output_weights is False, but True by the architecture",
        "heads": "num_query_groups is 2, but 1 by the architecture",
        "kind": "model chunk 0 is a torch.nn.modules.linear.Linear; known are GPTModel",
        "foreign": "optimizer torch.optim.adam.Adam is not known (known are FP32Optimizer",
    }.items():
        assert text in found[name], (name, found[name])


# -- the checklist ----------------------------------------------------------------------------------------------------


def _failures(adapter: MegatronAdapter) -> dict[str, str]:
    found = {condition.name: condition.check() for condition in adapter.checklist()}
    return {name: text for name, text in found.items() if text is not None}


def _broken(rank: int, world: int) -> dict[str, dict[str, str]]:
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    calculator.init_num_microbatches_calculator(1, None, 4, 2, 1, False)
    trainer = build(SMALL, At(bf16=True))
    for number in range(2):
        trainer.step(number)
    adapter = trainer.adapter()
    leaf = trainer.optimizer.chained_optimizers[0]
    leaf.grad_scaler = DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 100, 2)
    leaf.grad_scaler._growth_tracker = 7
    job = adapter.job_state()

    # Another trainer of the same layout takes over; what it has of its own is set.
    fresh = build(SMALL, At(bf16=True), seed=3)
    other = fresh.optimizer.chained_optimizers[0]
    other.grad_scaler = DynamicGradScaler(2.0, 1.0, 2.0, 0.5, 100, 2)
    calculator.reconfigure_num_microbatches_calculator(1, None, 8, 2, 1, False)
    new = fresh.adapter()
    binding = new.bind()
    move(adapter.bind(), binding, logical_tensors(SMALL))
    for chunk in fresh.chunks:
        chunk.buffers[0].grad_data.fill_(1.0)
    new.finish(job)
    found = {"sound": _failures(new)}
    assert new.job_state() == job
    assert float(fresh.chunks[0].buffers[0].grad_data.abs().sum()) == 0  # gradients are not carried
    assert calculator.get_num_microbatches() == 2
    assert float(other.grad_scaler.scale) == 1024.0 and other.grad_scaler._growth_tracker == 7

    def fault(name: str, put: Callable[[], Any], take: Callable[[], Any]) -> None:
        put()
        found[name] = _failures(new)
        take()

    inner = other.optimizer
    group = next(g for g in inner.param_groups if g["params"])
    params, step, lr = list(group["params"]), group["step"], group["lr"]
    fault("parameter groups", group["params"].pop, lambda: group.update(params=params))
    fault("steps and rates", lambda: group.update(step=1), lambda: group.update(step=step))
    fault("rates", lambda: group.update(lr=0.5), lambda: group.update(lr=lr))
    scheduler = fresh.scheduler
    right = scheduler.optimizer
    fault(
        "scheduler",
        lambda: setattr(scheduler, "optimizer", trainer.optimizer),
        lambda: setattr(scheduler, "optimizer", right),
    )
    steps = scheduler.num_steps
    fault("steps", lambda: setattr(scheduler, "num_steps", 0), lambda: setattr(scheduler, "num_steps", steps))
    fault(
        "micro-batches",
        lambda: calculator.reconfigure_num_microbatches_calculator(1, None, 4, 2, 2, False),
        lambda: calculator.reconfigure_num_microbatches_calculator(1, None, 4, 2, 1, False),
    )
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    less = {k: v for k, v in states.items() if k != "expert-parallel-rng"}
    fault("random streams", lambda: tracker.set_states(less), lambda: tracker.set_states(states))
    scaler = other.grad_scaler
    fault(
        "gradient scaler",
        lambda: setattr(scaler, "_growth_tracker", 0),
        lambda: setattr(scaler, "_growth_tracker", 7),
    )
    ddp = fresh.chunks[0]
    hooks = list(ddp.grad_accs)
    fault("DDP hooks", ddp.grad_accs.pop, lambda: setattr(ddp, "grad_accs", hooks))
    param = next(p for p in ddp.parameters() if p.dim() == 2)
    data = param.data
    fault("moved away", lambda: setattr(param, "data", data.clone()), lambda: setattr(param, "data", data))
    bucket = ddp.param_to_bucket_group.pop(param)
    found["bucket"] = _failures(new)
    ddp.param_to_bucket_group[param] = bucket
    saved = param.data.clone()
    fault("weights and masters", lambda: param.data.mul_(2), lambda: param.data.copy_(saved))
    layer = fresh.chunks[0].module.module.decoder.layers[1]
    fault("layer coverage", lambda: setattr(layer, "layer_number", 4), lambda: setattr(layer, "layer_number", 2))
    found["again"] = _failures(new)
    return found


def test_each_post_condition_fails_when_broken(alone: dict[str, Any]) -> None:
    found = dict(alone["broken"])
    assert found.pop("sound") == found.pop("again") == {}
    for name, (condition, text) in {
        "parameter groups": ("parameter groups", "is in 0 parameter groups of DistributedOptimizer"),
        "steps and rates": ("steps and rates", "is at step 1, not 2"),
        "rates": ("steps and rates", "lr is 0.5, not"),
        "scheduler": ("scheduler", "steps another optimizer than this trainer's"),
        "steps": ("scheduler", "num_steps is 0, not 8"),
        "micro-batches": (
            "micro-batches",
            "1 micro-batches of 2 on each of 1 data-parallel ranks are not a batch of 4",
        ),
        "random streams": ("random streams", "no stream expert-parallel-rng"),
        "gradient scaler": ("gradient scaler", "'growth_tracker': 0"),
        "DDP hooks": ("DDP hooks", "gradient hooks for"),
        "moved away": ("DDP hooks", "lies outside its bucket's parameters"),
        "bucket": ("DDP hooks", "is in no bucket"),
        "weights and masters": ("weights and masters", "the weight is not its rounded master"),
        "layer coverage": ("layer coverage", "layer 1 0 times, layer 3 1 times instead of once"),
    }.items():
        assert text in found[name].get(condition, ""), (name, found[name])


# -- several processes ------------------------------------------------------------------------------------------------


def _several(rank: int, world: int) -> None:
    from megatron.core import num_microbatches_calculator as calculator

    # 3 samples cannot be dealt to 2 ranks.
    calculator.init_num_microbatches_calculator(1, None, 3, 1, 1, False)
    trainer = build(SMALL, At(tp=2))
    adapter = trainer.adapter()
    trainer.step(0)
    job, binding = adapter.job_state(), adapter.bind()
    calculator.reconfigure_num_microbatches_calculator(1, None, 4, 1, 2, False)
    fresh = build(SMALL, At())
    new = fresh.adapter()
    new.bind()
    with pytest.raises(
        BindError, match=r"global batch of 3 cannot be cut into micro-batches of 1 over dp 2.*dp may be 1, 3"
    ):
        new.finish(job)
    calculator.unset_num_microbatches_calculator()
    # Rates of the ranks differ.
    group = trainer.optimizer.param_groups[0]
    group["lr"] += 0.25 * rank
    with pytest.raises(BindError, match=r"lr is .* on rank 1"):
        adapter.job_state()
    # Streams: every rank derives its own, as a rule says.
    from nereus.runtime.job_state import RngRule

    place = RngPlace(role="actor", rank=rank, alike=rank)
    rule, _ = rederive(RngRule(seed=1), step=1, place=place)
    verify(rule, place)
    assert binding.state.rank == rank


def _variants(rank: int, world: int) -> list[str]:
    """Weights only, plain fp32 with torch's own Adam, and masters that the weights are rounded from."""
    notes = []
    # 1: derived weights: only masters move, the new weights are their rounding.
    source = build(SMALL, At(tp=2, bf16=True))
    randomise(source, 4)
    source.step(0)
    old = source.adapter(derive_weights=True)
    binding, job = old.bind(), old.job_state()
    before = whole_of(source.adapter().bind(), SMALL)
    target = build(SMALL, At(pp=2, bf16=True), seed=7)
    new = target.adapter(derive_weights=True)
    filled = new.bind()
    assert not any(f.slot == "weight" and "proj" in f.tensor for f in filled.state.fragments)
    move(binding, filled, logical_tensors(SMALL))
    new.finish(job)
    assert _failures(new) == {}
    for key, values in whole_of(target.adapter().bind(), SMALL).items():
        assert torch.equal(values, before[key]), key
    notes.append("derived")
    # 2: a model without optimizer or wrapper, as an engine holds it.
    bare = build(SMALL, At(optimizer=None, bf16=True), wrap=False, seed=8)
    weights = bare.adapter()
    held = weights.bind()
    assert set(held.state.slots()) == {"weight"}
    everything = source.adapter().bind()
    with pytest.raises(MoveError, match=r"wanted by none of the new: exp_avg of .* drop="):
        move(everything, held, logical_tensors(SMALL))
    report = move(everything, held, logical_tensors(SMALL), drop=("master", "exp_avg", "exp_avg_sq"))
    assert [slot for slot, _ in report.dropped] == ["exp_avg", "exp_avg_sq", "master"]
    for key, values in whole_of(held, SMALL).items():
        assert torch.equal(values, before[key]), key
    notes.append("bare")
    # 3: torch's Adam keeps a step with each parameter.
    first = build(SMALL, At(tp=2, optimizer="plain"), torch_adam=True)
    for number in range(2):
        first.step(number)
    second = build(SMALL, At(optimizer="plain"), seed=9, torch_adam=True)
    assert type(second.optimizer.chained_optimizers[0].optimizer) is torch.optim.AdamW
    start, end = first.adapter(), second.adapter()
    job, binding, filled = start.job_state(), start.bind(), end.bind()
    move(binding, filled, logical_tensors(SMALL))
    end.finish(job)
    assert _failures(end) == {}
    assert end.job_state() == job
    steps = {float(s["step"]) for s in second.optimizer.chained_optimizers[0].optimizer.state.values()}
    assert steps == {2.0}
    end.set_version(3)
    assert (end.version(), start.version()) == (3, 0)
    second.step(2)
    notes.append("per parameter")
    return notes


def _subset(rank: int, world: int) -> None:
    """From two ranks to one and back: the model of one rank lies in groups of its own."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    mine = [dist.new_group([r]) for r in range(world)][rank]
    groups = ProcessGroupCollection()
    for each in fields(groups):
        setattr(groups, each.name, mine)
    source = build(SMALL, At(tp=2, optimizer=None), wrap=False)
    randomise(source, 6)
    both = source.adapter().bind()
    before = whole_of(both, SMALL)
    one = build(SMALL, At(optimizer=None), wrap=False, seed=2, groups=groups).adapter().bind() if rank == 0 else None
    move(both, one, logical_tensors(SMALL))
    if one is not None:
        alone = gather([one], shapes(SMALL))
        assert alone.keys() == before.keys() and all(torch.equal(alone[key], before[key]) for key in before)
    again = build(SMALL, At(tp=2, optimizer=None), wrap=False, seed=3).adapter().bind()
    move(one, again, logical_tensors(SMALL))
    for key, values in whole_of(again, SMALL).items():
        assert torch.equal(values, before[key]), key


def _latent(rank: int, world: int) -> None:
    """Latent attention, a dense first layer, shared experts, router biases: against Megatron's metadata."""
    source = build(LATENT, At(tp=2, optimizer=None), wrap=False)
    randomise(source, 7)
    held = source.adapter().bind()
    before = whole_of(held, LATENT)
    assert before.keys() == {(name, "weight") for name in shapes(LATENT)}
    assert compare_with_metadata(source, before) > 20
    target = build(LATENT, At(pp=2, optimizer=None), wrap=False, seed=2)
    filled = target.adapter().bind()
    move(held, filled, logical_tensors(LATENT))
    arrived = whole_of(filled, LATENT)
    assert all(torch.equal(arrived[key], values) for key, values in before.items())
    assert compare_with_metadata(target, arrived) > 10


def _biased(rank: int, world: int) -> None:
    """Router biases are buffers, are state, and move; the optimizer over experts is another link of the chain."""
    moe = SPARSE.moe
    assert moe is not None
    arch = replace(SPARSE, moe=replace(moe, router_bias=True))
    source, target = build(arch, At(ep=2)), build(arch, At(pp=2), seed=3)
    for number, layer in enumerate(source.chunks[0].module.decoder.layers):
        layer.mlp.router.expert_bias.copy_(torch.arange(8.0) + 10 * number)
    old, new = source.adapter(), target.adapter()
    binding, filled = old.bind(), new.bind()
    assert any("local_tokens_per_expert" in name for name in binding.state.caches)
    move(binding, filled, logical_tensors(arch))
    (layer,) = target.chunks[0].module.decoder.layers
    assert torch.equal(layer.mlp.router.expert_bias, torch.arange(8.0) + 10 * rank)


def _rebuilt(rank: int, world: int) -> None:
    """An optimizer made anew over the same modules gets steps and rates back, and moments only by a move."""
    trainer = build(SMALL, At())
    trainer.step(0)
    adapter = trainer.adapter()
    job = adapter.job_state()
    saved = whole_of(adapter.bind(), SMALL)
    trainer.optimizer, trainer.scheduler = optimizer_of(trainer.chunks, trainer.at)
    again = trainer.adapter()
    again.bind()
    again.finish(job)
    assert _failures(again) == {}
    here = whole_of(again.bind(), SMALL)
    assert torch.equal(here["model.norm.weight", "weight"], saved["model.norm.weight", "weight"])
    assert float(here["model.norm.weight", "exp_avg"].abs().sum()) == 0


def _interleaved(rank: int, world: int) -> None:
    """Two interleaved stages whose sends are batched train wrongly without a word, so the checklist says it."""
    norms = {}
    for name, at, batched in (
        ("plain", At(pp=2), True),
        ("interleaved", At(pp=2, vp=2), False),
        ("mixed up", At(pp=2, vp=2), True),
    ):
        trainer = build(DENSE, at)
        randomise(trainer, 5)
        trainer.config.batch_p2p_comm, trainer.config.overlap_p2p_comm = batched, not batched
        adapter = trainer.adapter()
        adapter.bind()
        failed = {"pipeline sends"} if name == "mixed up" else set()
        assert set(_failures(adapter)) == failed, name
        norms[name] = trainer.step(0)[1]  # of four micro-batches
    assert norms["interleaved"] == pytest.approx(norms["plain"], rel=1e-6)
    assert abs(norms["mixed up"] / norms["plain"] - 1) > 0.1


def _alone(rank: int, world: int) -> dict[str, Any]:
    _rebuilt(rank, world)
    return {"refused": _refused(rank, world), "broken": _broken(rank, world)}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run(1, _alone, timeout=300)[0]


def _both(rank: int, world: int) -> list[str]:
    _several(rank, world)
    _biased(rank, world)
    _subset(rank, world)
    _latent(rank, world)
    _interleaved(rank, world)
    return _variants(rank, world)


def test_two_ranks() -> None:
    """Ranks that disagree, router biases, other numbers of ranks, latent attention, interleaved stages, derived
    weights, bare models, torch's own Adam."""
    assert run(2, _both, timeout=300) == [["derived", "bare", "per parameter"]] * 2
