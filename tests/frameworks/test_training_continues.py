"""A job trained, moved, trained on, moved again ... against one that trains at its first layout throughout.

Both see the same mini batch at every update, of samples with unlike lengths whose weights ``nereus.models.batch``
solves for each dp. Every update's loss, gradient norm and rate, and after each stretch all weights and moments, are
those of the unmoved job: up to the order in which sums are taken, and bit for bit where that is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from frameworks import deepspeed_engines as ds
from frameworks import fsdp2_jobs as fsdp
from frameworks import megatron_models as megatron
from frameworks import mini_batch
from frameworks.fsdp2_jobs import Layout
from frameworks.harness import run
from frameworks.megatron_models import DENSE, LATENT, SPARSE, At, Trainer

from nereus.ir.arch import Arch
from nereus.models.batch import DEEPSPEED, MEAN, MicroBatch
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.base import Binding
from nereus.runtime.adapters.whole import Whole
from nereus.runtime.live import move

#: Updates between two moves.
STRETCH = 2
#: Tokens that count in each sample of a mini batch. Twelve samples: for dp 1, 2, 3, 4.
LENGTHS = (7, 3, 6, 4, 7, 2, 5, 5, 3, 6, 7, 4)


@dataclass(frozen=True, slots=True)
class Update:
    loss: float
    norm: float
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Updates at one layout, and what there is after them."""

    layout: str
    updates: tuple[Update, ...]
    whole: Whole


class Framework(Protocol):
    """Every method is called by all processes, also by those outside of a layout."""

    def start(self, at: Any) -> Any: ...

    def moved(self, job: Any, old: Any, at: Any, weights_only: bool) -> Any: ...

    def update(self, job: Any, at: Any, number: int) -> Update: ...

    def whole(self, job: Any, at: Any) -> Whole: ...


def _train(framework: Framework, layouts: Sequence[Any], *, moves: bool, weights_only: bool = False) -> list[Stretch]:
    """A stretch at each of the layouts, or all of them at the first one."""
    at = layouts[0]
    job, found = framework.start(at), []
    for part, target in enumerate(layouts):
        if moves and part:
            job, at = framework.moved(job, at, target, weights_only), target
        updates = tuple(framework.update(job, at, part * STRETCH + i) for i in range(STRETCH))
        found.append(Stretch(str(at), updates, framework.whole(job, at)))
    return found


@dataclass(frozen=True, slots=True)
class Runs:
    moved: list[Stretch]
    unmoved: list[Stretch]
    without_moments: list[Stretch]


def _chains(rank: int, world: int, framework: Framework, chains: Sequence[Sequence[Any]]) -> list[Runs]:
    """Each chain moved and unmoved; the first one's first move also without moments. Of rank 0, which saw it all."""
    torch.set_num_threads(1)
    found = []
    for number, layouts in enumerate(chains):
        unmoved = _train(framework, layouts, moves=False)
        moved = _train(framework, layouts, moves=True)
        crippled = _train(framework, layouts[:2], moves=True, weights_only=True) if number == 0 else []
        found.append(Runs(moved, unmoved, crippled))
    return found if rank == 0 else []


def _only_weights(binding: Binding | None) -> Binding | None:
    if binding is None:
        return None
    weights = tuple(f for f in binding.state.fragments if f.slot in ("weight", "master"))
    return Binding(replace(binding.state, fragments=weights), binding.memory)


# -- what must be equal -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Relative; of a tensor: its largest difference to its largest element."""

    loss: float
    norm: float
    weight: float
    moment: float


EXACT = Tolerance(loss=0, norm=0, weight=0, moment=0)
#: fp32 throughout.
ROUNDING = Tolerance(loss=1e-5, norm=1e-4, weight=1e-3, moment=1e-3)


def _differences(moved: Sequence[Stretch], unmoved: Sequence[Stretch]) -> list[tuple[str, Tolerance]]:
    """The largest ones of every stretch. Rates must be equal, and the tensors the same ones."""
    found, before = [], ""
    for mine, theirs in zip(moved, unmoved, strict=True):
        assert [u.rates for u in mine.updates] == [u.rates for u in theirs.updates], mine.layout
        assert mine.whole.keys() == theirs.whole.keys()
        pairs = list(zip(mine.updates, theirs.updates, strict=True))
        of: dict[bool, float] = {True: 0.0, False: 0.0}
        for (name, slot), values in theirs.whole.items():
            here = mine.whole[name, slot]
            assert here.shape == values.shape and bool(values.isfinite().all())
            gap = _relative((here - values).abs().max().item(), values.abs().max().item())
            is_weight = slot in ("weight", "master")
            of[is_weight] = max(of[is_weight], gap)
        gaps = Tolerance(
            loss=max(_relative(a.loss - b.loss, b.loss) for a, b in pairs),
            norm=max(_relative(a.norm - b.norm, b.norm) for a, b in pairs),
            weight=of[True],
            moment=of[False],
        )
        found.append((f"{before} -> {mine.layout}" if before else mine.layout, gaps))
        before = mine.layout
    return found


def _relative(gap: float, size: float) -> float:
    return abs(gap) / abs(size) if gap else 0.0


def _assert_continues(moved: Sequence[Stretch], unmoved: Sequence[Stretch], tolerance: Tolerance) -> None:
    for name, gaps in _differences(moved, unmoved):
        for what in ("loss", "norm", "weight", "moment"):
            gap, limit = getattr(gaps, what), getattr(tolerance, what)
            assert gap <= limit, f"{name}: {what} differs by {gap:.1e}, more than {limit:.0e}"


def _check(runs: Runs, tolerance: Tolerance, *, num_moves: int) -> None:
    for name, gaps in _differences(runs.moved, runs.unmoved):
        print(f"{name}: loss {gaps.loss:.1e} norm {gaps.norm:.1e} weight {gaps.weight:.1e} moment {gaps.moment:.1e}")
    assert len(runs.moved) == num_moves + 1
    _assert_continues(runs.moved, runs.unmoved, tolerance)
    updates = [update for part in runs.moved for update in part.updates]
    rates = [update.rates[0] for update in updates]
    top = rates.index(max(rates))
    # Moves both while the rate goes up and while it comes down.
    assert STRETCH < top < len(rates) - 1 and rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(set(rates[top:]), reverse=True)
    assert len({update.loss for update in updates}) == len(updates)


def _assert_moments_matter(runs: Runs, tolerance: Tolerance) -> None:
    """What this test would see of a move that leaves the moments behind: far more than rounding."""
    unmoved = runs.unmoved[: len(runs.without_moments)]
    (_, before), (name, after) = _differences(runs.without_moments, unmoved)
    assert before == EXACT
    print(f"{name} without moments: weight {after.weight:.1e} moment {after.moment:.1e} loss {after.loss:.1e}")
    assert after.weight > 10 * tolerance.weight and after.moment > 10 * tolerance.moment
    with pytest.raises(AssertionError, match="differs by"):
        _assert_continues(runs.without_moments, unmoved, tolerance)


# -- megatron-core ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Megatron:
    arch: Arch

    def start(self, at: At) -> Trainer:
        trainer = megatron.build(self.arch, at)
        megatron.randomise(trainer, seed=5)
        return trainer

    def moved(self, job: Trainer, old: At, at: At, weights_only: bool) -> Trainer:
        adapter = job.adapter()
        binding, state = adapter.bind(), adapter.job_state()
        new = megatron.build(self.arch, at, seed=99)
        filled = new.adapter()
        part = _only_weights if weights_only else _everything
        move(part(binding), part(filled.bind()), logical_tensors(self.arch))
        filled.finish(state)
        assert [(c.name, c.check()) for c in filled.checklist() if c.check() is not None] == []
        return new

    def update(self, job: Trainer, at: At, number: int) -> Update:
        ids = mini_batch.samples(number, self.arch.vocab, len(LENGTHS), megatron.SEQUENCE)
        return Update(*job.update(ids, LENGTHS, advance=2))

    def whole(self, job: Trainer, at: At) -> Whole:
        return megatron.whole_of(job.adapter().bind(), self.arch)


def _everything(binding: Binding | None) -> Binding | None:
    return binding


def _plain(at: At) -> At:
    """Without clipping by the norm of all stages, and the optimizer on whole parameters: nothing but the pipeline's
    shape differs, so nothing is added up in another order."""
    return replace(at, optimizer="plain", clip=0.0)


def test_megatron() -> None:
    layouts = [
        At(),
        At(tp=2),
        At(tp=2, pp=2),
        At(tp=4),
        At(optimizer="plain"),
        At(pp=2, first=1),
        At(pp=2, vp=2),
        At(),
    ]
    stages = [_plain(at) for at in (At(pp=2), At(pp=2, first=1), At(pp=2, vp=2), At(pp=2, vp=2))]
    chain, exact = run(4, _chains, Megatron(DENSE), (layouts, stages), timeout=500)[0]
    _check(chain, ROUNDING, num_moves=7)
    _assert_moments_matter(chain, ROUNDING)
    # The norm adds up stage by stage, and the stages differ.
    _check(exact, replace(EXACT, norm=1e-6), num_moves=3)


def test_megatron_latent_attention() -> None:
    """Router biases too, which Megatron moves by how many tokens an expert got."""
    layouts = [At(tp=2), At(pp=2, ep=2), At(ep=4), At(tp=2, ep=2, etp=2)]
    (chain,) = run(4, _chains, Megatron(LATENT), (layouts,), timeout=500)[0]
    _check(chain, ROUNDING, num_moves=3)


def test_megatron_experts() -> None:
    layouts = [At(ep=4), At(ep=2), At(ep=2, pp=2), At(), At(ep=2, etp=2)]
    (chain,) = run(4, _chains, Megatron(SPARSE), (layouts,), timeout=500)[0]
    _check(chain, ROUNDING, num_moves=4)


# -- torch ------------------------------------------------------------------------------------------------------------


def _warmup_and_decay(optimizer: torch.optim.Optimizer) -> Any:
    rates = torch.optim.lr_scheduler
    parts: list[Any] = [
        rates.LinearLR(optimizer, start_factor=0.1, total_iters=4),
        rates.CosineAnnealingLR(optimizer, T_max=20),
    ]
    return rates.SequentialLR(optimizer, parts, milestones=[4])


@dataclass(frozen=True, slots=True)
class Torch:
    model: str

    def start(self, at: Layout) -> fsdp.Job | None:
        return fsdp.build(self.model, at, fsdp.initial(self.model), schedule=_warmup_and_decay)

    def moved(self, job: fsdp.Job | None, old: Layout, at: Layout, weights_only: bool) -> fsdp.Job | None:
        state = fsdp.shared(job.adapter.job_state() if job is not None else None, old.ranks[0])
        new = fsdp.build(self.model, at, None, seed=99, schedule=_warmup_and_decay)
        if new is not None:
            new.adapter.prepare(state)
        part = _only_weights if weights_only else _everything
        move(
            part(job.adapter.bind() if job is not None else None),
            part(new.adapter.bind() if new is not None else None),
            logical_tensors(fsdp.naming(self.model).arch),
        )
        if new is not None:
            new.adapter.finish(state)
            assert [(c.name, c.check()) for c in new.adapter.checklist() if c.check() is not None] == []
        return new

    def update(self, job: fsdp.Job | None, at: Layout, number: int) -> Update:
        part, found = None, None
        if job is not None:
            dp_rank = at.ranks.index(dist.get_rank()) // at.tp
            total, norm = self._accumulate(
                job, mini_batch.share(LENGTHS, len(at.ranks) // at.tp, dp_rank, MEAN), number
            )
            rates = tuple(float(group["lr"]) for group in job.optimizer.param_groups)
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.scheduler.step()
            part, found = (dp_rank, total), (norm, rates)
        loss = mini_batch.total(part)
        norm, rates = fsdp.shared(found, at.ranks[0])
        return Update(loss, norm, rates)

    def _accumulate(self, job: fsdp.Job, share: Sequence[MicroBatch], number: int) -> tuple[float, float]:
        """(weighted loss of this rank's samples, norm of the whole gradient)."""
        ids, total = mini_batch.samples(number, 90, len(LENGTHS), max(LENGTHS) + 1), 0.0
        for count, batch in enumerate(share, start=1):
            if job.layout.kind == "fsdp":
                job.model.set_requires_gradient_sync(count == len(share))  # type: ignore[operator]
            elif job.layout.kind == "ddp":
                job.module.require_backward_grad_sync = count == len(share)  # type: ignore[assignment]
            (sample,) = batch.samples
            tokens = ids[sample : sample + 1, : LENGTHS[sample] + 1]
            logits = job.module(input_ids=tokens).logits.float()
            mean = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
            (float(batch.scale) * mean).backward()
            total += float(batch.weight) * mean.item()
        norms = [fsdp.full(p.grad).double().norm() for p in job.model.parameters() if p.grad is not None]
        return total, torch.stack(norms).norm().item()

    def whole(self, job: fsdp.Job | None, at: Layout) -> Whole:
        found: Whole = {}
        if job is not None:
            weights, moments = fsdp.whole_by_torch(job)
            found = {(name, "weight"): value for name, value in weights.items()}
            found |= {key: value for key, value in moments.items() if value.dim()}
        return fsdp.shared(found, at.ranks[0])


def test_torch() -> None:
    four = Layout(kind="fsdp", ranks=(0, 1, 2, 3))
    layouts = [
        four,
        replace(four, tp=2),
        Layout(kind="fsdp", ranks=(1, 3)),
        Layout(kind="alone", ranks=(2,)),
        Layout(kind="fsdp", ranks=(0, 1, 2)),
        Layout(kind="ddp", ranks=(0, 3)),
        four,
    ]
    # A sum of two has one order, whoever adds.
    two = [Layout(kind="fsdp", ranks=ranks) for ranks in ((0, 1), (2, 3), (0, 3), (0, 3))]
    chain, exact = run(4, _chains, Torch("tied"), (layouts, two), timeout=500)[0]
    _check(chain, ROUNDING, num_moves=6)
    _assert_moments_matter(chain, ROUNDING)
    _check(exact, EXACT, num_moves=3)


# -- DeepSpeed --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Zero:
    stage: int
    ranks: int  # the first ones


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """A job is an engine and its group; ranks outside have an engine of their own, for DeepSpeed's global barriers."""

    def start(self, at: Zero, seed: int = 0) -> tuple[Any, ds.Group]:
        group = ds.Group(at.ranks)
        rates = {"warmup_max_lr": 1e-2, "warmup_num_steps": 3, "warmup_type": "linear", "total_num_steps": 24}
        changes = {"bf16": None, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 2e-3, **rates}}}
        return ds.build(at.stage, group, seed=seed, **changes), group

    def moved(self, job: tuple[Any, ds.Group], old: Zero, at: Zero, weights_only: bool) -> tuple[Any, ds.Group]:
        from nereus.runtime.adapters.deepspeed import DeepSpeedAdapter

        adapter = DeepSpeedAdapter(job[0], ds.NAMING)
        binding, state = adapter.bind(), fsdp.shared(adapter.job_state(), 0)
        engine, group = self.start(at, seed=99)
        filled = DeepSpeedAdapter(engine, ds.NAMING)
        new = filled.bind()
        part = _only_weights if weights_only else _everything
        move(part(binding if job[1].inside else None), part(new if group.inside else None), ds.TENSORS)
        filled.finish(state if group.inside else filled.job_state())
        if group.inside:
            assert [(c.name, c.check()) for c in filled.checklist() if c.check() is not None] == []
        return engine, group

    def update(self, job: tuple[Any, ds.Group], at: Zero, number: int) -> Update:
        from deepspeed.utils import groups

        engine, group = job
        groups.mpu = engine.mpu  # a global: DeepSpeed expects one engine in a process
        ids = mini_batch.samples(number, ds.ARCH.vocab, len(LENGTHS), max(LENGTHS) + 1)
        dp_rank, total, rates = group.get_data_parallel_rank(), 0.0, tuple(map(float, engine.get_lr()))
        for batch in mini_batch.share(LENGTHS, len(group.ranks), dp_rank, DEEPSPEED):
            (sample,) = batch.samples
            mean = engine(ids[sample : sample + 1, : LENGTHS[sample] + 1])
            engine.backward(float(batch.scale) * mean)
            engine.step()
            total += float(batch.weight) * mean.item()
        norm, rates = fsdp.shared((float(engine.get_global_grad_norm()), rates), 0)
        return Update(mini_batch.total((dp_rank, total) if group.inside else None), norm, rates)

    def whole(self, job: tuple[Any, ds.Group], at: Zero) -> Whole:
        return fsdp.shared(ds.whole_by_deepspeed(job[0]), 0)


def test_deepspeed() -> None:
    assert len(LENGTHS) == ds.BATCH
    layouts = [Zero(1, 4), Zero(3, 4), Zero(2, 2), Zero(1, 3), Zero(3, 2), Zero(2, 4)]
    same = [Zero(2, 2)] * 4
    chain, exact = run(4, _chains, DeepSpeed(), (layouts, same), timeout=500)[0]
    _check(chain, ROUNDING, num_moves=5)
    _assert_moments_matter(chain, ROUNDING)
    _check(exact, EXACT, num_moves=3)
