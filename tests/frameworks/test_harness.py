"""The harness itself: results, failures and time limits, and nothing left running."""

from __future__ import annotations

import os
import time
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from frameworks.harness import RunFailed, run
from frameworks.sleeper import sleep


@dataclass(frozen=True)
class _Named:
    """A class of this module, in arguments and results."""

    value: int


def _sum(rank: int, world_size: int, one: _Named) -> tuple[_Named, torch.Tensor, str]:
    total = torch.tensor([float(one.value * (rank + 1))])
    dist.all_reduce(total)
    pair = dist.new_group([0, world_size - 1])
    if rank in (0, world_size - 1):
        dist.barrier(group=pair)
    return _Named(rank), total, os.environ["OMP_NUM_THREADS"]


def _one_fails(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the reason of rank one")
    dist.barrier()


def _talkative(rank: int, world_size: int) -> int:
    for _ in range(20_000):
        print("x" * 100)
    return rank


def _shimmed(rank: int, world_size: int) -> tuple[str, float]:
    from frameworks import cpu_shim

    cpu_shim.install()
    made = torch.ones(2, device="cuda").to("cuda:0").cuda()
    torch.cuda.synchronize()
    return str(made.device), made.sum().item()


def test_results_by_rank() -> None:
    results = run(3, _sum, _Named(2))
    assert [r[0] for r in results] == [_Named(0), _Named(1), _Named(2)]
    assert all(torch.equal(r[1], torch.tensor([12.0])) and r[2] == "1" for r in results)


def test_failure_names_the_cause_and_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        run(3, _one_fails)
    text = str(caught.value)
    assert text.index("rank 1 failed first") < text.index("ValueError: the reason of rank one")
    assert time.monotonic() - start < 40


def test_time_is_over_and_grandchildren_are_gone(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="not done after 6 s") as caught:
        run(2, sleep, str(tmp_path), timeout=6, init=False)
    assert "asleep 0" in str(caught.value) and "asleep 1" in str(caught.value)
    for rank in range(2):
        stat = Path("/proc", (tmp_path / f"pid-{rank}").read_text(), "stat")
        deadline = time.monotonic() + 5
        # Killed, it is gone, or a zombie until its new parent reaps it.
        while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_much_output_does_not_block() -> None:
    assert run(1, _talkative) == [0]


def test_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="module level"):
        run(1, lambda rank, world_size: None)


def test_function_of_the_started_script_is_refused() -> None:
    scripted = types.FunctionType(_talkative.__code__, globals(), "scripted")
    scripted.__module__ = "__main__"
    with pytest.raises(ValueError, match="the script that was started"):
        run(1, scripted)


def test_code_that_asks_for_cuda_runs_on_the_cpu() -> None:
    assert run(1, _shimmed) == [("cpu", 2.0)]
