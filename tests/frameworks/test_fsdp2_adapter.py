"""The FSDP2 adapter on small modules: shards on every kind of mesh against full_tensor, refusals by name, and a
checklist that sees each fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from frameworks.gathering import bindings_of_all
from frameworks.harness import run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from nereus.models.naming.explicit import ExplicitNaming
from nereus.runtime.adapters.base import BindError, Binding
from nereus.runtime.adapters.classify import Declared
from nereus.runtime.adapters.fsdp2 import Fsdp2
from nereus.runtime.adapters.whole import Whole, gather, scatter


def _named(shapes: dict[str, tuple[int, ...]]) -> tuple[ExplicitNaming, dict[str, tuple[int, int]]]:
    """Every parameter its own logical tensor; rows and columns of each."""
    naming = ExplicitNaming.identity(shapes)
    rows = {
        n: (torch.Size(s).numel() // (s[-1] if len(s) > 1 else 1), s[-1] if len(s) > 1 else 1)
        for n, s in shapes.items()
    }
    return naming, rows


def _gathered(binding: Binding, shapes: dict[str, tuple[int, int]]) -> Whole:
    return gather(bindings_of_all(binding), shapes)


def _geometry(rank: int, world_size: int) -> list[int]:
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cases: dict[str, tuple[tuple[int, ...], DeviceMesh, list[Any]]] = {
        "rows": ((6, 5), line, [Shard(0)]),
        "columns": ((3, 10), line, [Shard(1)]),
        "vector": ((7,), line, [Shard(0)]),
        "copies": ((3, 4), square, [Replicate(), Shard(0)]),
        "both": ((5, 7), square, [Shard(0), Shard(1)]),
        "one_dim_twice": ((11, 3), square, [Shard(0), Shard(0)]),
        "strided": ((8, 3), square, [_StridedShard(0, split_factor=2), Shard(0)]),
        "packed": ((3, 16, 5), line, [_StridedShard(1, split_factor=2)]),
        "experts_and_packed": ((4, 12, 5), square, [Shard(0), _StridedShard(1, split_factor=2)]),
        "last_of_three": ((2, 3, 6), square, [Shard(0), Shard(2)]),
    }
    module, wholes = nn.Module(), {}
    for name, (shape, mesh, placements) in cases.items():
        wholes[name] = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        parameter = nn.Parameter(distribute_tensor(wholes[name].clone(), mesh, placements))
        module.register_parameter(name, parameter)
    naming, rows = _named({name: shape for name, (shape, _, _) in cases.items()})
    binding = Fsdp2(module, naming=naming).bind()
    found = _gathered(binding, rows)
    for name, whole in wholes.items():
        assert torch.equal(found[name, "weight"], whole.reshape(rows[name])), name
        assert torch.equal(module.get_parameter(name).full_tensor(), whole), name  # type: ignore[attr-defined]
    # Writing by region, then torch's own reading.
    scatter({key: value * 2 + 1 for key, value in found.items()}, binding)
    for name, whole in wholes.items():
        assert torch.equal(module.get_parameter(name).full_tensor(), whole * 2 + 1), name  # type: ignore[attr-defined]
    return [binding.state.storages[f.storage].numel for f in binding.state.fragments if f.tensor == "rows"]


def test_shards_on_every_mesh_agree_with_full_tensor() -> None:
    assert run(4, _geometry, timeout=300) == [[10], [10], [10], []]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 7)
        self.down = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


_SHAPES = {name: tuple(p.shape) for name, p in _Net().named_parameters()}


def _job(seed: int, mesh: DeviceMesh) -> tuple[_Net, torch.optim.Optimizer, Fsdp2]:
    torch.manual_seed(seed)
    module = _Net()
    fully_shard(module.up, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    return module, optimizer, Fsdp2(module, optimizer, naming=_named(_SHAPES)[0])


def _train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _fsdp(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def _cut_off(module: Any) -> None:
    parameter = _fsdp(module.up).fsdp_params[0]
    parameter._sharded_param_data = parameter._sharded_param_data.clone()


def _replace(module: Any) -> None:
    module.up._parameters["weight"] = nn.Parameter(module.up.weight.detach().clone())


BREAKS: dict[str, tuple[str, Callable[[Any, Any, Fsdp2], object]]] = {
    "gathered": ("sharded", lambda m, o, a: m.unshard()),
    "other memory": ("all-gather reads the shards", lambda m, o, a: _cut_off(m)),
    "another parameter": ("all-gather reads the shards", lambda m, o, a: _replace(m)),
    "hook": ("FSDP hooks", lambda m, o, a: m.up._get_fsdp_state()._pre_forward_hook_handle.remove()),
    "hook, generally": ("hooks present", lambda m, o, a: m.up._get_fsdp_state()._pre_forward_hook_handle.remove()),
    "no exchange": ("FSDP gradient exchange", lambda m, o, a: m.set_requires_gradient_sync(False)),
    "gradient": ("gradients dropped", lambda m, o, a: m.up.weight.sum().backward()),
    "moment": ("optimizer slots", lambda m, o, a: o.state[m.up.weight].pop("exp_avg_sq")),
    "step": ("step per parameter", lambda m, o, a: o.state[m.down.bias]["step"].zero_()),
    "group": ("optimizer groups", lambda m, o, a: o.param_groups[0].update(lr=3.0)),
    "version": ("version", lambda m, o, a: a.set_version(0)),
}


def _faults(rank: int, world_size: int) -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", (world_size,))
    module, optimizer, source = _job(0, mesh)
    _train(module, optimizer)
    source.set_version(4)
    facts = source.job_state()
    whole = _gathered(source.bind(), _named(_SHAPES)[1])
    found = {}
    for name, (_, spoil) in {"nothing": ("", lambda m, o, a: None), **BREAKS}.items():
        other, its_optimizer, target = _job(1, mesh)
        with torch.no_grad():
            other(torch.ones(2, 4))  # without backward: the root's parameters stay gathered
        target.prepare(facts)
        scatter(whole, target.bind())
        target.finish(facts)
        assert torch.equal(other(torch.ones(1, 4)), module(torch.ones(1, 4))), "a stale gathered copy was used"
        for part in (other, module):
            part.reshard()  # type: ignore[operator]
        spoil(other, its_optimizer, target)
        found[name] = [c.name for c in target.checklist() if c.check() is not None]
    return found


def test_the_checklist_sees_each_fault() -> None:
    for found in run(2, _faults, timeout=300):
        assert found.pop("nothing") == []
        for name, broken in found.items():
            assert BREAKS[name][0] in broken, name


class _Extra(nn.Module):
    def get_extra_state(self) -> float:
        return 1.0

    def set_extra_state(self, state: float) -> None:
        pass


def _refusals(rank: int, world_size: int) -> tuple[list[str], str]:
    mesh = init_device_mesh("cpu", (world_size,))
    module, optimizer, adapter = _job(0, mesh)
    _train(module, optimizer)
    hung: Any = module
    hung.register_buffer("running", torch.zeros(2))
    hung.extra = _Extra()
    hung.ema = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer.state[module.up.weight]["row_sums"] = torch.zeros(7)
    assert isinstance(hung.ema["up.weight"], DTensor)
    try:
        adapter.bind()
        text = ""
    except BindError as error:
        text = str(error)
    declared = Declared(
        state={"ema.*": "ema"},
        derived=("running",),
        caches=("extra._extra_state", "optimizer.state.up.weight.row_sums"),
    )
    binding = Fsdp2(module, optimizer, naming=_named(_SHAPES)[0], declared=declared).bind()
    found = _gathered(binding, _named(_SHAPES)[1])
    for name in _SHAPES:
        assert torch.equal(found[name, "ema"], found[name, "weight"])
    names = sorted(line.split(":")[0].strip() for line in text.splitlines() if line.startswith("  "))
    backwards = DeviceMesh("cpu", torch.arange(world_size).flip(0))
    try:
        _job(0, backwards)[2].bind()
        order = ""
    except BindError as error:
        order = str(error)
    return names, order


def test_what_is_not_understood_is_refused_by_name() -> None:
    for names, order in run(2, _refusals, timeout=300):
        assert names == sorted(
            [f"ema.{name}" for name in _SHAPES]
            + ["extra._extra_state", "optimizer.state.up.weight.row_sums", "running"]
        )
        assert "lists its ranks out of order" in order
