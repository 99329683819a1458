"""Objects that are easily mixed up or lost: odd scalars and shapes, other optimizers, facts of something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nereus.ir.fragment import Segment
from nereus.ir.tensor import LogicalTensor
from nereus.models.naming.explicit import ExplicitNaming
from nereus.runtime.adapters.base import BindError
from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.live import MoveError, move_here

INPUT = torch.linspace(-1, 1, 24).reshape(3, 8)
Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def linear() -> nn.Module:
    return nn.Linear(8, 4)


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in module.state_dict().items() if t.numel()}


def adapter(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> PlainTorch:
    return PlainTorch(module, optimizer, naming=ExplicitNaming.identity(shapes(module)))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(INPUT).square().sum().backward()
        optimizer.step()


def moved(build: Callable[[], nn.Module], make: Make, then: Make | None = None) -> list[str]:
    """Trained, moved, both trained on: what differs, and what the checklist says."""
    old, new = build(), build()
    before, after = make(old), (then or make)(new)
    train(old, before)
    source, target = adapter(old, before), adapter(new, after)
    facts = source.job_state()
    target.prepare(facts)
    move_here(
        [source.bind()], [target.bind()], [LogicalTensor(name=n, shape=s or (1,)) for n, s in shapes(old).items()]
    )
    target.finish(facts)
    said = [f"{c.name}: {text}" for c in target.checklist() if (text := c.check()) is not None]
    train(old, before)
    train(new, after)
    values = new.state_dict()
    return said + [name for name, value in old.state_dict().items() if not torch.equal(value, values[name])]


class Scales(nn.Module):
    """0-dim parameters in two dtypes: their moments look like scalars of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.wide = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * self.wide.float() * self.narrow
        return found


class Rows(torch.optim.Optimizer):
    """A step of shape [1, 1], which it adds to in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            count = self.state[p].setdefault("count", torch.zeros(1, 1))
            count.add_(torch.ones(1, 1))
            p.sub_(p.grad * self.param_groups[0]["lr"] / count.view(()))


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.nothing, self.no_rows = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) + self.nothing.sum() + self.no_rows.sum()
        return found


def _half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("build", "make"),
    [
        (Scales, adamw),
        (linear, lambda m: Rows(m.parameters())),
        (Empty, adamw),
        (_half_frozen, lambda m: torch.optim.SGD(m.parameters(), lr=0.01)),
    ],
    ids=["scalars in two dtypes", "a step with dims", "empty", "frozen in a group"],
)
def test_training_goes_on(build: Callable[[], nn.Module], make: Make) -> None:
    assert moved(build, make) == []


@pytest.mark.parametrize(
    ("before", "after"), [("AdamW", "RAdam"), ("RAdam", "AdamW"), ("AdamW", "NAdam"), ("SGD", "Muon")]
)
def test_another_class_of_optimizer_is_refused(before: str, after: str) -> None:
    def make(name: str) -> Make:
        more = {"momentum": 0.9} if name in ("SGD", "Muon") else {}
        return lambda m: getattr(torch.optim, name)(m.parameters(), lr=0.01, **more)

    with pytest.raises(BindError, match=rf"state is of torch\.optim\S*\.{before}, and the new .*\.{after}: build"):
        moved(lambda: nn.Linear(8, 4, bias=False), make(before), make(after))


def test_adam_with_decoupled_decay_is_adamw() -> None:
    assert moved(linear, adamw, lambda m: torch.optim.Adam(m.parameters())) == []


def test_what_was_frozen_and_is_trained_now_fails_the_checklist() -> None:
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(_half_frozen().requires_grad_(True) if built else _half_frozen())
        return built[-1]

    said = moved(build, lambda m: torch.optim.SGD(m.parameters(), lr=0.01))
    assert said[0].startswith("optimizer parameters: 0.weight was frozen and is trained now")


def _facts() -> dict[str, Any]:
    module = linear()
    optimizer = adamw(module)
    train(module, optimizer)
    return adapter(module, optimizer).job_state()


def _fp7(facts: dict[str, Any]) -> None:
    facts["optimizer"]["tensors"]["weight"]["slots"] = {"exp_avg": "fp7"}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: f.update(optimizer={"groups": []}), "optimizer has no tensors, scalar_kinds, keys: it is not of a"),
        (lambda f: f.update(optimizer=["groups"]), "optimizer has no tensors"),
        (lambda f: f.clear(), "no optimizer, and this module is trained|version is None"),
        (_fp7, "weight has slots of dtype fp7"),
    ],
)
def test_facts_of_something_else_are_refused(spoil: Callable[[dict[str, Any]], object], words: str) -> None:
    facts, module = _facts(), linear()
    spoil(facts)
    with pytest.raises(BindError, match=words):
        adapter(module, adamw(module)).prepare(facts)


@pytest.mark.parametrize("version", [None, "x", 1.5])
def test_facts_without_a_version_are_refused_before_anything_is_set(version: object) -> None:
    module = linear()
    optimizer = adamw(module)
    with pytest.raises(BindError, match="version is"):
        adapter(module, optimizer).finish({**_facts(), "version": version})
    assert not optimizer.state
    with pytest.raises(BindError, match="not a NoneType"):
        adapter(module, None).finish(None)  # type: ignore[arg-type]


def test_a_lazy_module_is_refused_by_name() -> None:
    with pytest.raises(BindError, match="weight, bias: a lazy module"):
        PlainTorch(nn.LazyLinear(4), naming=ExplicitNaming.identity({"weight": (4, 8)})).bind()


@pytest.mark.parametrize("shift", [0, 2])
def test_two_parameters_in_the_same_memory_are_refused(shift: int) -> None:
    module, buffer = nn.Module(), torch.zeros(8, 4)
    module.a, module.b = nn.Parameter(buffer[:3]), nn.Parameter(buffer[shift : 3 + shift])
    with pytest.raises(BindError, match=r"b: shares memory with a and is another parameter"):
        adapter(module, None).bind()
    module.b = nn.Parameter(buffer[3:])
    assert len(adapter(module, None).bind().memory) == 2  # views side by side are fine


def test_parts_of_a_naming_that_overlap_are_named_as_such() -> None:
    parts = [
        Segment(tensor="weight", row_lo=lo, row_hi=hi, col_lo=0, col_hi=8, at_row=lo) for lo, hi in ((0, 3), (2, 4))
    ]
    with pytest.raises(BindError, match="two parts of the naming overlap in weight"):
        PlainTorch(nn.Linear(8, 4, bias=False), naming={"weight": parts}).bind()


def test_a_list_of_tensors_under_other_names_is_told_the_right_ones() -> None:
    module: Any = torch.compile(linear(), backend="eager")
    old, new = adapter(module, None).bind(), adapter(linear(), None).bind()
    tensors = [LogicalTensor(name=name, shape=shape) for name, shape in shapes(module).items()]
    with pytest.raises(MoveError, match=r"no tensor weight; it has '_orig_mod\.weight': names are those that the nam"):
        move_here([old], [new], tensors)
