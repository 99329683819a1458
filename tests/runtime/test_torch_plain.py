"""Plain torch modules and optimizers: bound, moved into newly built ones, trained on; refusals; the checklist."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nereus.ir.fragment import Segment
from nereus.models.naming.base import Where
from nereus.models.naming.explicit import ExplicitNaming
from nereus.runtime.adapters.base import BindError, Binding
from nereus.runtime.adapters.classify import Declared
from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.adapters.whole import Whole, gather, scatter

WIDTH = 6


class Net(nn.Module):
    """Two linears, a norm, a tied output, a computed table and a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("inv_freq", torch.arange(3.0), persistent=False)
        self.register_buffer("balance", torch.zeros(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden))))) + self.balance.sum()


class Muon(torch.optim.Optimizer):
    """Matrices with momentum only, under a custom name; the rest with one more slot, a Python step and bf16 moments."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum_buffer"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    if p.dim() == 1:
                        state["variance"] = torch.zeros_like(p)
                        state["master_param"] = p.float().clone()
                state["step"] += 1
                state["momentum_buffer"].mul_(group["beta"]).add_(p.grad.bfloat16())
                update = state["momentum_buffer"].to(p.dtype) / state["step"]
                if p.dim() == 1:
                    state["variance"].add_(p.grad.square())
                    state["master_param"].sub_(group["lr"] * update / (state["variance"].sqrt() + 1))
                    p.copy_(state["master_param"])
                else:
                    p.sub_(group["lr"] * update)


def _grouped(make: Callable[..., torch.optim.Optimizer], module: nn.Module, *, swapped: bool, **options: Any) -> Any:
    """Weight decay on matrices only; the new side has the groups in another order."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "lr": 0.02}, {"params": vectors, "lr": 0.01}]
    return make(groups[::-1] if swapped else groups, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module, bool], torch.optim.Optimizer]] = {
    "adamw": lambda m, swapped: _grouped(torch.optim.AdamW, m, swapped=swapped),
    "adam-amsgrad": lambda m, swapped: _grouped(torch.optim.Adam, m, swapped=swapped, amsgrad=True),
    "adamw-fused": lambda m, swapped: _grouped(torch.optim.AdamW, m, swapped=swapped, fused=swapped),
    "adamw-tensor-lr": lambda m, swapped: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.02)),
    "sgd": lambda m, swapped: _grouped(torch.optim.SGD, m, swapped=swapped),
    "sgd-momentum": lambda m, swapped: _grouped(torch.optim.SGD, m, swapped=swapped, momentum=0.9, dampening=0.1),
    "muon-like": lambda m, swapped: _grouped(Muon, m, swapped=swapped),
}


class Job:
    def __init__(
        self, kind: str = "adamw", *, seed: int = 0, swapped: bool = False, dtype: Any = torch.float32
    ) -> None:
        torch.manual_seed(seed)
        self.module = Net().to(dtype)
        self.optimizer = OPTIMIZERS[kind](self.module, swapped)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)

    def adapter(self, **more: Any) -> PlainTorch:
        return PlainTorch(self.module, self.optimizer, naming=naming(), scheduler=self.scheduler, **more)

    def train(self, steps: int, seed: int = 7) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        losses = []
        for _ in range(steps):
            tokens = torch.randint(0, 5, (8,), generator=generator)
            loss = nn.functional.cross_entropy(self.module(tokens).float(), tokens.flip(0))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


def shapes() -> dict[str, tuple[int, int]]:
    state = {n: t for n, t in Net().state_dict().items() if n != "head.weight"}
    return {n: (t.shape[0], t.numel() // t.shape[0]) for n, t in state.items()}


def naming() -> ExplicitNaming:
    declared = {n: tuple(t.shape) for n, t in Net().state_dict().items() if n != "head.weight"}
    named = ExplicitNaming.identity(declared)
    tied = named.segments("embed.weight", (5, WIDTH), None)  # type: ignore[arg-type]
    return ExplicitNaming({**named._parameters, "head.weight": tied})


def carry(old: Binding, new: Binding) -> Whole:
    whole = gather([old], shapes())
    scatter(whole, new)
    return whole


def moved(kind: str = "adamw", steps: int = 3, **more: Any) -> tuple[Job, Job, PlainTorch]:
    old, new = Job(kind, **more), Job(kind, seed=1, swapped=True, **more)
    old.train(steps)
    with torch.no_grad():
        old.module.balance.copy_(torch.arange(4.0) / 100)
    source, target = old.adapter(), new.adapter()
    source.set_version(11)
    facts = source.job_state()
    target.prepare(facts)
    carry(source.bind(), target.bind())
    target.finish(facts)
    return old, new, target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(kind: str, dtype: torch.dtype) -> None:
    old, new, target = moved(kind, dtype=dtype)
    assert [(c.name, c.check()) for c in target.checklist() if c.check() is not None] == []
    assert target.version() == 11
    assert [g["lr"] for g in new.optimizer.param_groups] == [g["lr"] for g in old.optimizer.param_groups] or kind in (
        "adamw",
        "adam-amsgrad",
        "adamw-fused",
        "sgd",
        "sgd-momentum",
        "muon-like",
    )
    if kind == "adamw-fused":  # another order of operations in the fused step
        np.testing.assert_allclose(new.train(3), old.train(3), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
        return
    assert new.train(3) == old.train(3)
    for (name, a), b in zip(old.module.named_parameters(), new.module.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_slots_have_the_names_and_dtypes_of_the_optimizer() -> None:
    job = Job("muon-like", dtype=torch.bfloat16)
    job.train(1)
    state = job.adapter().bind().state
    found = {(f.tensor, f.slot): state.storages[f.storage].dtype for f in state.fragments}
    assert found["up.weight", "momentum_buffer"] == "bf16"
    assert ("up.weight", "variance") not in found
    assert found["up.bias", "variance"] == "bf16"
    assert found["up.bias", "master"] == "fp32"
    assert state.derived == ("inv_freq",)
    assert sum(f.tensor == "embed.weight" and f.slot == "weight" for f in state.fragments) == 1


def test_memory_is_the_frameworks_own() -> None:
    job = Job()
    job.train(1)
    binding = job.adapter().bind()
    for memory in binding.memory:
        memory.fill_(3)
    assert all(bool((p == 3).all()) for p in job.module.parameters())
    assert all(bool((s["exp_avg"] == 3).all()) for s in job.optimizer.state.values())


def test_a_meta_module_adopts_memory() -> None:
    old = Job("adamw")
    old.train(3)
    facts, source = old.adapter().job_state(), old.adapter().bind()
    with torch.device("meta"):
        module = Net()
    optimizer = OPTIMIZERS["adamw"](module, True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def rebuild() -> None:
        module.inv_freq = torch.arange(3.0)

    target = PlainTorch(module, optimizer, naming=naming(), scheduler=scheduler, rebuild=rebuild)
    with pytest.raises(BindError, match="meta device"):
        target.bind()
    binding = target.allocate(facts)
    carry(source, binding)
    parameters = list(module.parameters())
    target.adopt(binding, facts)
    target.finish(facts)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert module.head.weight is module.embed.weight and not module.embed.weight.is_meta
    memory = {m.data_ptr() for m in binding.memory}
    assert all(p.data_ptr() in memory for p in module.parameters())
    assert [(c.name, c.check()) for c in target.checklist() if c.check() is not None] == []
    new = Job.__new__(Job)
    new.module, new.optimizer, new.scheduler = module, optimizer, scheduler
    assert new.train(3) == old.train(3)


def test_a_live_module_adopts_memory_and_keeps_its_parameters() -> None:
    old, new = Job("adamw"), Job("adamw", seed=1)
    old.train(2)
    facts, source, target = old.adapter().job_state(), old.adapter().bind(), new.adapter()
    binding = target.allocate(facts)
    carry(source, binding)
    target.adopt(binding, facts)
    target.finish(facts)
    assert new.train(2) == old.train(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: given.pop(("up.weight", "exp_avg")), "up.weight exp_avg: not given"),
        (lambda given: given.update({("up.weight", "weight"): torch.empty(WIDTH, 9)}), r"up.weight weight: \[6, 9\]"),
        (lambda given: given.update({("up.weight", "weight"): torch.empty(WIDTH, 9).T}), "strides"),
        (lambda given: given.update({("up.bias", "weight"): torch.empty(9).half()}), "float16, not .* torch.float32"),
        (lambda given: given.update({("else", "weight"): torch.empty(9)}), "else weight: not of this module"),
    ],
)
def test_what_is_adopted_must_fit(change: Callable[[dict[Any, Any]], object], words: str) -> None:
    old, new = Job("adamw"), Job("adamw", seed=1)
    old.train(1)
    facts, target = old.adapter().job_state(), new.adapter()
    binding = target.allocate(facts)
    own = {n: t.shape for n, t in new.module.state_dict().items()}
    given = {}
    for storage, memory in zip(binding.state.storages, binding.memory, strict=True):
        name, _, slot = storage.name.partition(":")
        given[name, slot or "weight"] = memory.view(own[name])
    change(given)
    before = new.module.up.weight.clone()
    with pytest.raises(BindError, match=words):
        target.adopt_tensors(given, facts)
    assert torch.equal(before, new.module.up.weight)


class _Average:
    def __init__(self, module: nn.Module) -> None:
        self.copies = {name: p.detach().clone() for name, p in module.named_parameters()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.copies


class _Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.amax = 1.5

    def get_extra_state(self) -> float:
        return self.amax

    def set_extra_state(self, state: float) -> None:
        self.amax = state


def _hide(job: Job) -> None:
    """One of everything that is easily forgotten."""
    module: Any = job.module
    module.register_buffer("running", torch.zeros(2))
    module.register_buffer("table", torch.zeros(3), persistent=False)
    module.ema = _Average(module)
    module.ema_module = [copy.deepcopy(module.up)]
    module.up.calls = torch.zeros(2)
    module.extra = _Extra()
    module.noise = torch.Generator()
    module.up.weight.statistic = torch.ones(3)
    module.counts = {"per": (np.zeros(3),)}
    last = torch.zeros(4)
    module.up.register_forward_hook(lambda m, args, out: last.add_(1) and None)
    job.optimizer.state[module.up.weight]["row_sums"] = torch.zeros(9)
    job.optimizer.state["global"] = {"seen": 3}  # type: ignore[index]
    job.optimizer.param_groups[0]["betas_of_rows"] = torch.zeros(3)
    job.optimizer.inner = torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # type: ignore[attr-defined]
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "betas_of_rows": None})
    module.scratch = torch.zeros(3)


HIDDEN = (
    "running",
    "table",
    "up.calls",
    "ema",
    "ema_module.0.weight",
    "ema_module.0.bias",
    "extra._extra_state",
    "noise",
    "up.weight.statistic",
    "counts.per.0",
    "optimizer.state.up.weight.row_sums",
    "optimizer.state.global",
    "optimizer.param_groups.0.betas_of_rows",
    "optimizer.inner",
    "optimizer.param_groups.2.params.0",
    "scratch",
)


def test_everything_that_is_not_understood_is_refused_at_once_by_name() -> None:
    job = Job()
    job.train(1)
    _hide(job)
    with pytest.raises(BindError) as error:
        job.adapter().bind()
    named = [
        line.strip().rsplit(": ", 1)[0].split(": ")[0] for line in str(error.value).splitlines() if line[:2] == "  "
    ]
    closure = [name for name in named if name.endswith(".last")]
    assert len(closure) == 1 and closure[0].startswith("up._forward_hooks.")
    assert sorted(set(named) - set(closure)) == sorted(HIDDEN)
    assert f"{len(HIDDEN) + 1} objects are reachable" in str(error.value)


def test_what_is_declared_is_classed() -> None:
    job, other = Job(), Job(seed=1)
    for one in (job, other):
        module: Any = one.module
        module.ema = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
        module.extra = _Extra()
        module.register_buffer("seen", torch.zeros(2), persistent=False)
        module.workspace = torch.zeros(64)
        module.table = torch.zeros(3)
    declared = Declared(
        state={"ema.*": "ema"}, carried=("extra._extra_state", "seen"), derived=("table",), caches=("workspace",)
    )
    job.train(2)
    with torch.no_grad():
        for name, p in job.module.named_parameters():
            job.module.ema[name].copy_(p).mul_(0.5)  # type: ignore[index,operator]
    job.module.seen.fill_(5)  # type: ignore[operator]
    job.module.extra.amax = 9.0  # type: ignore[union-attr]
    source, target = job.adapter(declared=declared), other.adapter(declared=declared)
    facts = source.job_state()
    target.prepare(facts)
    old, new = source.bind(), target.bind()
    assert old.state.caches == ("workspace",) and set(old.state.derived) == {"inv_freq", "table"}
    assert "ema" in old.state.slots()
    carry(old, new)
    target.finish(facts)
    for name, p in job.module.named_parameters():
        assert torch.equal(other.module.ema[name], p * 0.5)  # type: ignore[index]
    assert other.module.seen.tolist() == [5.0, 5.0] and other.module.extra.amax == 9.0  # type: ignore[union-attr,operator]


def test_untied_copies_of_one_tensor_and_tied_tensors_of_two_are_refused() -> None:
    job = Job()
    job.module.head.weight = nn.Parameter(job.module.embed.weight.detach().clone())
    with pytest.raises(BindError, match=r"head\.weight: holds embed\.weight, as embed\.weight does"):
        PlainTorch(job.module, naming=naming()).bind()
    named = naming()
    separate = {
        **named._parameters,
        "head.weight": ExplicitNaming.identity({"head.weight": (5, 6)})._parameters["head.weight"],
    }
    with pytest.raises(BindError, match=r"head\.weight: shares its memory with embed\.weight"):
        PlainTorch(Job().module, naming=separate).bind()


def test_memory_that_is_not_contiguous_is_refused() -> None:
    job = Job()
    job.module.up.weight.data = torch.zeros(WIDTH, 9).T
    with pytest.raises(BindError, match=r"up\.weight: strides"):
        job.adapter().bind()


def test_new_groups_that_mix_old_ones_are_refused() -> None:
    old, new = Job(), Job(seed=1)
    new.optimizer = torch.optim.AdamW(new.module.parameters())
    new.scheduler = torch.optim.lr_scheduler.StepLR(new.optimizer, step_size=2, gamma=0.5)
    old.train(1)
    facts, target = old.adapter().job_state(), new.adapter()
    target.prepare(facts)
    with pytest.raises(BindError, match="in one group now and had different initial_lr, lr before"):
        target.finish(facts)


def test_a_scheduler_on_one_side_only_is_refused() -> None:
    old, new = Job(), Job(seed=1)
    old.train(1)
    target = PlainTorch(new.module, new.optimizer, naming=naming())
    with pytest.raises(BindError, match="a scheduler is on one side"):
        target.finish(old.adapter().job_state())


def _break_scheduler(job: Job) -> None:
    job.scheduler.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])


def _break_meta(job: Job) -> None:
    job.module.inv_freq = torch.empty(3, device="meta")


BREAKS: dict[str, Callable[[Job, PlainTorch], object]] = {
    "everything classed": lambda j, a: setattr(j.module, "late", torch.zeros(2)),
    "gradients dropped": lambda j, a: setattr(j.module.up.weight, "grad", torch.zeros(9, WIDTH)),
    "hooks present": lambda j, a: j.module.up._forward_hooks.clear(),
    "gradient exchange on": lambda j, a: setattr(j.module, "require_backward_grad_sync", False),
    "derived tensors made": lambda j, a: _break_meta(j),
    "version": lambda j, a: a.set_version(3),
    "optimizer parameters": lambda j, a: j.optimizer.param_groups[0]["params"].pop(),
    "optimizer slots": lambda j, a: j.optimizer.state[j.module.up.weight].pop("exp_avg"),
    "optimizer groups": lambda j, a: j.optimizer.param_groups[1].update(weight_decay=0.5),
    "step per parameter": lambda j, a: j.optimizer.state[j.module.up.weight]["step"].zero_(),
    "scheduler bound": lambda j, a: _break_scheduler(j),
    "grad scaler": lambda j, a: a.scaler.update(7.0),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_the_checklist_sees_each_fault(broken: str) -> None:
    old, new = Job(), Job(seed=1, swapped=True)
    old.train(3)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**k) for k in (7, 9)]
    for scaler in scalers:
        scaler.scale(torch.zeros(1))
    new.module.up.register_forward_hook(lambda m, args, out: None)
    source, target = old.adapter(scaler=scalers[0]), new.adapter(scaler=scalers[1])
    facts = source.job_state()
    assert {c.check() for c in target.checklist()} == {"finish was not called"}
    target.prepare(facts)
    carry(source.bind(), target.bind())
    target.finish(facts)
    assert [(c.name, c.check()) for c in target.checklist() if c.check() is not None] == []
    assert scalers[1].get_scale() == 2.0**7
    BREAKS[broken](new, target)
    assert broken in [c.name for c in target.checklist() if c.check() is not None]


def test_a_learned_table_is_no_derived_one_whatever_its_name() -> None:
    job = Job()
    job.module.turns_inv_freq = nn.Parameter(torch.zeros(3))
    with pytest.raises(BindError, match=r"'turns_inv_freq' \[.*\] is not in the naming"):
        PlainTorch(job.module, naming=naming()).bind()


def test_a_declared_part_must_lie_inside_its_parameter() -> None:
    named = {
        **naming()._parameters,
        "up.bias": (Segment(tensor="up.bias", row_lo=0, row_hi=9, col_lo=0, col_hi=1, at_row=1),),
    }
    with pytest.raises(BindError, match=r"up\.bias.*row_hi=9, .* does not fit: 9 rows from row 1 on"):
        PlainTorch(Net(), naming=named).bind()


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 4)


WHOLE = {"proj.weight": (4, 8), "proj.bias": (4,)}


@pytest.mark.parametrize("missing", ["proj.weight", "proj.bias"])
def test_the_advice_for_a_missing_name_is_what_to_write(missing: str) -> None:
    module = _Linear()
    there = {name: shape for name, shape in WHOLE.items() if name != missing}
    with pytest.raises(BindError, match="Parameters belong in the naming") as raised:
        PlainTorch(module, naming=ExplicitNaming.identity({**there, f"{missing}s": (1,)})).bind()
    text = str(raised.value)
    assert f"'{missing}' {list(WHOLE[missing])} is not in the naming, which has '{missing}s'" in text
    lines = text.split("write ")[1].split(", or '", maxsplit=1)[0]
    name, _, segments = lines.partition(": ")
    parsed = {str(eval(name)): eval(segments, {"Segment": Segment})}
    both = {**{n: ExplicitNaming.identity(WHOLE).segments(n, s, Where()) for n, s in there.items()}, **parsed}
    bound = PlainTorch(module, naming=both).bind()
    assert [f.numel for f in bound.state.fragments] == [32, 4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"col_hi": 4, "row_hi": 1}, "4 rows of 1 column: "),  # a vector written as a row
        ({"row_hi": 8}, "8 rows from row 0 on"),
        ({"row_hi": 2, "at_row": 3}, "2 rows from row 3 on"),
        ({"at_row": 4}, "begins outside, at row 4, column 0"),
        ({"at_row": -1}, "begins outside, at row -1, column 0"),
        ({"row_lo": 4}, "is empty or upside down"),
    ],
)
def test_the_advice_for_a_wrong_segment_is_one_that_fits(change: dict[str, int], words: str) -> None:
    module = _Linear()
    right = {"row_lo": 0, "row_hi": 4, "col_lo": 0, "col_hi": 1, "at_row": 0}
    naming = {
        "proj.weight": ExplicitNaming.identity(WHOLE).segments("proj.weight", (4, 8), Where()),
        "proj.bias": (Segment(tensor="proj.bias", **{**right, **change}),),
    }
    with pytest.raises(BindError) as raised:
        PlainTorch(module, naming=naming).bind()
    text = str(raised.value)
    assert words in text
    line = text.split("; write ")[1].split(" for what lies there", maxsplit=1)[0]
    naming["proj.bias"] = (eval(line, {"Segment": Segment}),)
    PlainTorch(module, naming=naming).bind()
