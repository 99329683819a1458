"""Each post-condition of DeepSpeed's checklist holds after a finish and fails when broken; what is not understood is
refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from frameworks.deepspeed_engines import NAMING, Group, build, train
from frameworks.harness import run

pytest.importorskip("deepspeed")


def _failing(adapter: Any) -> dict[str, str]:
    return {c.name: text for c in adapter.checklist() if (text := c.check()) is not None}


def _broken(adapter: Any, break_it: Callable[[], Any], mend: Callable[[], Any], *texts: str) -> None:
    """Nothing fails before and after; broken, exactly one condition does, in these words."""
    assert _failing(adapter) == {}
    break_it()
    failing = _failing(adapter)
    mend()
    assert len(failing) == 1, failing
    (text,) = failing.values()
    assert all(part in text for part in texts), text
    assert _failing(adapter) == {}


def _set(target: Any, name: str, value: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    old = target[name] if isinstance(target, dict) else getattr(target, name)
    put = target.__setitem__ if isinstance(target, dict) else lambda key, v: setattr(target, key, v)
    return lambda: put(name, value), lambda: put(name, old)


def _negate(tensor: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    negate = tensor.data.neg_
    return negate, negate


def _finished(stage: int, **changes: Any) -> tuple[Any, Any]:
    from nereus.runtime.adapters.deepspeed import DeepSpeedAdapter

    engine = build(stage, Group(dist.get_world_size()), **changes)
    train(engine, 0, 2)
    adapter = DeepSpeedAdapter(engine, NAMING)
    adapter.bind()
    adapter.finish(adapter.job_state())
    return engine, adapter


def _zero_1(rank: int, world: int) -> None:
    engine, adapter = _finished(1)
    optimizer = engine.optimizer
    inner, part = optimizer.optimizer, optimizer.single_partition_of_fp32_groups[0]
    group = inner.param_groups[0]
    _broken(adapter, *_set(group, "params", [part.detach().clone()]), "is in no parameter group")
    _broken(adapter, *_set(inner.state[part], "step", torch.tensor(9.0)), "step 9, not 2")
    _broken(adapter, *_set(group, "lr", 0.5), "lr 0.5")
    state = inner.state.pop(part)
    assert "no state of fp32 partition[0]" in str(_failing(adapter))
    inner.state[part] = state
    other = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    _broken(adapter, *_set(engine.lr_scheduler, "optimizer", other), "WarmupLR steps another optimizer")
    _broken(adapter, *_set(engine.lr_scheduler, "last_batch_iteration", 7), "'last_batch_iteration': 7")
    hook = optimizer._grad_acc_hooks[3]
    hooks = hook.hooks_dict_ref()
    function = hooks[hook.id]
    _broken(adapter, lambda: hooks.pop(hook.id), lambda: hooks.__setitem__(hook.id, function), "20 of 21 hooks")
    weight = engine.module.lm_head.weight
    _broken(adapter, *_set(weight, "grad", torch.ones_like(weight)), "lm_head.weight.grad")
    _broken(adapter, *_set(optimizer.averaged_gradients, 0, [torch.ones(3)]), "averaged_gradients[0]")
    _broken(adapter, *_negate(weight), "lm_head.weight", "is not its master")
    _broken(adapter, *_set(engine, "micro_steps", engine.micro_steps + 1), "1 micro-batches into")
    _broken(adapter, lambda: engine.set_train_batch_size(24), lambda: engine.set_train_batch_size(12),
            "train batch 24 was 12", "gradient_accumulation_steps = 12")  # fmt: skip
    _broken(adapter, *_set(engine, "dp_world_size", 2), "12 is not 1 x 12 x 2")


def _zero_3(rank: int, world: int) -> None:
    engine, adapter = _finished(3)
    optimizer = engine.optimizer
    norm = engine.module.model.norm.weight
    assert norm.ds_persist
    _broken(adapter, *_negate(norm), "model.norm.weight", "differs from its part")
    _broken(adapter, norm.partition, lambda: norm.all_gather([norm]), "model.norm.weight", "NOT_AVAILABLE")
    hook = optimizer.parameter_offload.forward_hooks[0]
    hooks = hook.hooks_dict_ref()
    function = hooks[hook.id]
    _broken(adapter, lambda: hooks.pop(hook.id), lambda: hooks.__setitem__(hook.id, function), "hooks are registered")
    flat = optimizer.fp32_partitioned_groups_flat[0]
    _broken(adapter, *_set(optimizer.optimizer.state[flat], "step", torch.tensor(5.0)), "step 5, not 2")
    _broken(adapter, *_negate(flat), "is not its master")


def _bf16_and_fp16(rank: int, world: int) -> None:
    engine, adapter = _finished(1, data_types={"grad_accum_dtype": "fp32"})
    flat = engine.optimizer.fp32_groups_gradients_flat[0]
    _broken(adapter, lambda: flat.fill_(1.0), flat.zero_, "fp32_groups_gradients_flat[0]")
    engine, adapter = _finished(2, bf16=None, fp16={"enabled": True, "initial_scale_power": 8})
    scaler = engine.optimizer.loss_scaler
    _broken(adapter, *_set(scaler, "cur_scale", 4.0), "loss scaler", "cur_scale")
    _broken(adapter, *_set(scaler, "cur_iter", 40), "loss scaler", "cur_iter")


def _finish_refuses(rank: int, world: int) -> dict[str, str]:
    from nereus.runtime.adapters.base import BindError
    from nereus.runtime.adapters.deepspeed import DeepSpeedAdapter

    state = _finished(1)[1].job_state()
    found = {}
    for name, other in {
        "groups": {"groups": True},
        "scheduler": {"scheduler": None},
        "class": {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True, "adam_w_mode": False}},
                  "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}},
        "scaler": {"bf16": None, "fp16": {"enabled": True}},
    }.items():  # fmt: skip
        target = DeepSpeedAdapter(build(1, Group(1), **other), NAMING)
        target.bind()
        with pytest.raises(BindError) as caught:
            target.finish(state)
        found[name] = str(caught.value)
    return found


def _refused(rank: int, world: int) -> dict[str, str]:
    from nereus.runtime.adapters.base import BindError
    from nereus.runtime.adapters.deepspeed import DeepSpeedAdapter

    found = {}

    def refuse(name: str, engine: Any, naming: Any = NAMING) -> None:
        with pytest.raises(BindError) as caught:
            DeepSpeedAdapter(engine, naming).bind()
        found[name] = str(caught.value)

    engine = build(1, Group(1))
    zero = engine._config.zero_config
    for name, value in {
        "zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zenflow": object(), "mics_shard_size": 2,
    }.items():  # fmt: skip
        target = engine._config if name == "mics_shard_size" else zero
        old = getattr(target, name, 0)
        object.__setattr__(target, name, value)
        refuse(name, engine)
        object.__setattr__(target, name, old)
    nvme = type("Offload", (), {"device": type("Device", (), {"value": "nvme"}), "ratio": 1.0})()
    object.__setattr__(zero, "offload_optimizer", nvme)
    refuse("nvme", engine)
    object.__setattr__(zero, "offload_optimizer", None)

    module = engine.module
    module.register_buffer("steps_seen", torch.zeros(1))
    module.average = torch.zeros(3)
    module.ema = [torch.nn.Linear(2, 2)]
    refuse("objects", engine)
    del module.steps_seen, module.average, module.ema
    DeepSpeedAdapter(engine, NAMING).bind()

    train(engine, 0, 1)
    state = next(iter(engine.optimizer.optimizer.state.values()))
    state["preconditioner"] = torch.zeros(4)
    refuse("optimizer state", engine)
    del state["preconditioner"]
    state["exp_avg"] = state["exp_avg"][:5]
    refuse("optimizer state size", engine)
    state["exp_avg"] = torch.zeros_like(state["exp_avg_sq"])
    engine.micro_steps += 1
    refuse("accumulating", engine)
    engine.micro_steps -= 1
    from dataclasses import replace

    refuse("names", engine, replace(NAMING, arch=replace(NAMING.arch, num_layers=1)))
    refuse("missing", engine, replace(NAMING, arch=replace(NAMING.arch, num_layers=3)))
    weight = module.lm_head.weight
    weight.data = weight.data.clone()
    refuse("replaced", engine)
    with pytest.raises(BindError) as caught:
        DeepSpeedAdapter(module, NAMING)
    found["module"] = str(caught.value)
    found["sgd"] = _sgd()
    return found


def _sgd() -> str:
    from nereus.runtime.adapters.base import BindError
    from nereus.runtime.adapters.deepspeed import DeepSpeedAdapter

    momentum = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    engine = build(2, Group(1), optimizer=momentum, scheduler=None)
    adapter = DeepSpeedAdapter(engine, NAMING)
    with pytest.raises(BindError) as caught:
        adapter.bind()
    train(engine, 0, 1)
    assert adapter.bind().state.slots() == ("weight", "master", "momentum_buffer")
    return str(caught.value)


def test_checklist_zero_1() -> None:
    run(1, _zero_1)


def test_checklist_zero_3() -> None:
    run(2, _zero_3)


def test_checklist_gradients_of_bf16_optimizer_and_loss_scaler() -> None:
    run(1, _bf16_and_fp16)


def test_finish_refuses_engines_that_do_not_fit() -> None:
    (found,) = run(1, _finish_refuses)
    assert "old group that begins with model.embed_tokens.weight" in found["groups"]
    assert "lr scheduler is WarmupLR, the new one's None" in found["scheduler"]
    assert "WarmupDecayLR" in found["class"]
    assert "scales its loss dynamically" in found["scaler"]


def test_what_is_not_understood_is_refused_by_name() -> None:
    (found,) = run(1, _refused)
    assert "zero_quantized_weights" in found["zero_quantized_weights"]
    assert (
        "zero_hpz_partition_size" in found["zero_hpz_partition_size"]
        and "set it to 1" in found["zero_hpz_partition_size"]
    )
    assert "ZenFlow" in found["zenflow"] and "MiCS" in found["mics_shard_size"]
    assert "offload_optimizer to NVMe" in found["nvme"]
    assert all(name in found["objects"] for name in ("steps_seen", "average", "ema"))
    assert "'preconditioner' of AdamW is not known" in found["optimizer state"]
    assert "'exp_avg' of AdamW has 5 elements" in found["optimizer state size"]
    assert "1 of 12 micro-batches" in found["accumulating"]
    assert "model.layers.1" in found["names"] and "model.layers.2" in found["missing"]
    assert "lm_head.weight: not in the flat buffer" in found["replaced"]
    assert "not TinyLlama" in found["module"]
    assert "SGD has no state of fp32 partition[0]" in found["sgd"]
