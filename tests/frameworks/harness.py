"""Runs a function of a test module on several new processes joined by gloo, and leaves no process behind.

    from frameworks.harness import run

    def _sum(rank: int, world_size: int, factor: int) -> float:
        total = torch.ones(1) * factor
        torch.distributed.all_reduce(total)
        return total.item()

    def test_sum() -> None:
        assert run(3, _sum, 2) == [6.0, 6.0, 6.0]

Frameworks keep global state (parallel groups, trackers, accelerators), so no process serves two calls. Each is forked
from one server that has imported torch, megatron-core and transformers and run nothing (``preloaded.py``): their import
takes longer than most of the tests, and a test has up to eight processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from frameworks.child import main

TESTS = Path(__file__).resolve().parents[1]

#: What the frameworks need on a machine without GPU and network; conftest.py sets it for pytest, and so for all.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        [str(TESTS), str(TESTS.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    ),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "DS_ACCELERATOR": "cpu",
    "DS_BUILD_OPS": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["frameworks.preloaded"])

#: After the first failure the other ranks get this long to say what they saw.
GRACE_S = 1.0
#: Lines of each process's output in a failure.
TAIL_LINES = 40


class RunFailed(AssertionError):
    """A rank failed or the time was over. The text holds the last lines of every rank, the first to fail first."""


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    init: bool = True,
) -> list[Any]:
    """``function(rank, world_size, *args)`` on ``world_size`` processes; their results by rank.

    ``function``: at module level of any file. Arguments and results are pickled. ``timeout`` in seconds, for all.
    ``env``: more variables. ``init=False``: no process group (the function makes its own). Raises RunFailed.
    """
    if "<locals>" in function.__qualname__:
        raise ValueError(f"{function.__qualname__}: only a function at module level can be named to another process")
    if function.__module__ == "__main__":
        # The other process would load the script under that name and so pass its guard: every child runs children.
        raise ValueError(f"{function.__qualname__} is in the script that was started; put it in a module and import it")
    with tempfile.TemporaryDirectory(prefix="nereus-test-") as name:
        folder = Path(name)
        module = sys.modules[function.__module__]
        job = (function.__module__, str(Path(module.__file__ or "").resolve()), function.__qualname__)
        # Two pickles: the module must be loaded before arguments of its classes can be.
        (folder / "job").write_bytes(pickle.dumps((job, world_size, init)))
        (folder / "args").write_bytes(pickle.dumps(args))
        children: list[ForkServerProcess] = []
        try:
            for rank in range(world_size):
                children.append(_start(folder, rank, world_size, env or {}))
            failed = _wait(children, time.monotonic() + timeout)
        finally:
            for child in children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid or 0, signal.SIGKILL)
                child.kill()  # it may not have had the time to lead a group
            for child in children:
                child.join()
        if failed is not None:
            raise RunFailed(_report(folder, function.__qualname__, children, failed, timeout))
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _start(folder: Path, rank: int, world_size: int, more: dict[str, str]) -> ForkServerProcess:
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        **more,
    }
    child = _FORKSERVER.Process(target=main, args=(folder, rank, environ))
    child.start()
    return child


def _wait(children: Sequence[ForkServerProcess], deadline: float) -> list[int] | None:
    """None when all ended well; else the failed ranks in the order of their failure (none: out of time)."""
    failed: list[int] = []
    while True:
        codes = [child.exitcode for child in children]
        failed += [rank for rank, code in enumerate(codes) if code and rank not in failed]
        if all(code is not None for code in codes):
            return failed or None
        if time.monotonic() > deadline:
            return failed
        if failed:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)


def _report(
    folder: Path, function: str, children: Sequence[ForkServerProcess], failed: Sequence[int], timeout: float
) -> str:
    lines = [f"{function}: rank {failed[0]} failed first" if failed else f"{function}: not done after {timeout:g} s"]
    for rank in [*failed, *(r for r in range(len(children)) if r not in failed)]:
        output = (folder / f"output-{rank}").read_text(errors="replace").splitlines()
        lines += [f"--- rank {rank}, exit {children[rank].exitcode}", *output[-TAIL_LINES:]]
    return "\n".join(lines)
