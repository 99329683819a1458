"""Job state against the frameworks' own objects: Megatron's random streams and schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from frameworks import cpu_shim
from frameworks.harness import run
from runtime.job_states import example

from nereus.runtime.adapters.deepspeed import DeepSpeedAdapter
from nereus.runtime.job_exchange import exchange
from nereus.runtime.lr_schedule import bind, capture
from nereus.runtime.rng_streams import RngPlace, live_streams, rederive, restore, snapshot, verify

NAMES = ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")


def _draws() -> dict[str, float]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    found = {"torch": torch.rand(1).item()}
    for name in NAMES:
        with get_cuda_rng_tracker().fork(name):
            found[name] = torch.rand(1).item()
    return found


def _layouts(rank: int, world_size: int, degrees: list[int]) -> list[dict[str, Any]]:
    cpu_shim.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    found: list[dict[str, Any]] = []
    rule = example().rng
    for step, tp in enumerate(degrees):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        assert set(NAMES) < set(live_streams())
        group = torch.distributed.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
        place = RngPlace(role="actor", rank=rank, alike=min(group))
        before = snapshot()
        given_up = _draws()
        restore(before)
        rule, _ = rederive(rule, step=step, place=place)
        verify(rule, place)
        fresh = _draws()
        # A change that is given up: the streams before it go on, Megatron's included.
        restore(before)
        assert _draws() == given_up and not set(given_up.values()) & set(fresh.values())
        rederive(rule, step=step, place=place)
        assert _draws() == fresh
        found.append(fresh)
        parallel_state.destroy_model_parallel()
    return found


def test_megatron_streams_over_changes_of_layout() -> None:
    """TP 2 -> 4 -> 1 on 4 ranks; then each rank's numbers are compared by what must be shared."""
    degrees = [2, 4, 1]
    by_rank = run(4, _layouts, degrees)
    seen: set[float] = set()
    for number, tp in enumerate(degrees):
        draws = [by_rank[rank][number] for rank in range(4)]
        for name, distinct in (
            ("torch", 4 // tp),
            ("data-parallel-rng", 1),
            ("model-parallel-rng", 4),
            ("expert-parallel-rng", 4),
        ):
            values = [draw[name] for draw in draws]
            assert len(set(values)) == distinct, (tp, name)
            assert not seen & set(values)
            seen.update(values)
        assert all(draws[rank]["torch"] == draws[rank // tp * tp]["torch"] for rank in range(4))


def _scheduler(num_groups: int) -> tuple[Any, Any]:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2))], "max_lr": 1e-3, "min_lr": 1e-5} for _ in range(num_groups)
    ]
    optimizer = torch.optim.AdamW(groups)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-5,
        lr_warmup_steps=64,
        lr_decay_steps=640,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=640,
        wd_incr_style="linear",
    )
    return scheduler, optimizer


def _rates(scheduler: Any, optimizer: Any, num_steps: int) -> list[list[tuple[float, float]]]:
    found = []
    for _ in range(num_steps):
        found.append([(group["lr"], group["weight_decay"]) for group in optimizer.param_groups])
        optimizer.step()
        # Megatron counts samples.
        scheduler.step(**({"increment": 16} if hasattr(scheduler, "num_steps") else {}))
    return found


def _megatron_schedule(rank: int, world_size: int) -> tuple[list[Any], list[Any]]:
    """Ranks 0 and 1 train; then all, with another number of param groups, go on from the state that they share."""
    expected = _rates(*_scheduler(3), 20)[8:]
    held = None
    if rank < 2:
        scheduler, optimizer = _scheduler(2)
        _rates(scheduler, optimizer, 8)
        state = example()
        held = replace(state, models=(replace(state.models[0], schedule=capture(scheduler)), *state.models[1:]))
    schedule = exchange(held).model("actor").schedule
    assert schedule is not None and schedule.state["num_steps"] == 128
    scheduler, optimizer = _scheduler(3)
    bind(schedule, scheduler, optimizer)
    return _rates(scheduler, optimizer, 12), expected


def test_megatron_schedule_goes_on_where_ranks_join() -> None:
    for used, expected in run(3, _megatron_schedule):
        assert used == expected


def _deepspeed_schedules(rank: int, world_size: int) -> None:
    from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR

    for kind, options in (
        (WarmupLR, {"warmup_max_lr": 0.01, "warmup_num_steps": 7}),
        (WarmupDecayLR, {"total_num_steps": 30, "warmup_max_lr": 0.01, "warmup_num_steps": 7}),
        (WarmupCosineLR, {"total_num_steps": 30, "warmup_num_steps": 7}),
    ):

        def made(kind: Any = kind, options: Any = options) -> tuple[Any, Any]:
            optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.02)
            return kind(optimizer, **options), optimizer

        unmoved = made()
        expected = _rates(*unmoved, 20)
        first, second = made(), made()
        used = _rates(*first, 5)
        bind(capture(first[0]), *second)
        assert second[0].get_last_lr() == first[0].get_last_lr()
        assert used + _rates(*second, 15) == expected, kind.__name__


def test_deepspeed_schedules_go_on() -> None:
    run(1, _deepspeed_schedules)


def _engine_state(rank: int, world_size: int) -> tuple[bool, list[int]]:
    """The job state of a trained engine, stored, and given to a rank that claims to have none."""
    from frameworks.deepspeed_engines import NAMING, Group, build, train

    engine = build(2, Group(world_size), groups=True)
    train(engine, 0, 2)
    trainer = DeepSpeedAdapter(engine, NAMING).job_state()
    state = example()
    mine = replace(state, models=(replace(state.models[0], num_updates=2, trainer=trainer), *state.models[1:]))
    got = exchange(mine if rank == 1 else None).model("actor").trainer
    groups: Any = got["groups"]
    return got == trainer, [group["step"] for group in groups]


def test_what_the_deepspeed_adapter_adds_is_state_of_the_job() -> None:
    assert run(2, _engine_state) == [(True, [2, 2, 2])] * 2
