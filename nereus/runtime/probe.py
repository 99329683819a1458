"""What this machine can do, tried out rather than assumed: two processes that talk over gloo.

Importing this module costs nothing: frameworks load inside the probes. ``python -m nereus.runtime.probe RANK STORE`` is
one of the two processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """``detail``: what was seen, or why it does not work, in one line."""

    works: bool
    detail: str


def gloo_pair(*, timeout_s: float = 60.0) -> ProbeResult:
    """Two processes form a group over gloo and add a tensor. Never raises; at most ``timeout_s``."""
    with tempfile.TemporaryDirectory(prefix="nereus-probe-") as folder:
        store = os.path.join(folder, "store")
        command = [sys.executable, "-m", "nereus.runtime.probe"]
        # One thread each: the probe must not fight with a job that runs on this machine.
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        workers: list[subprocess.Popen[str]] = []
        try:
            for rank in range(2):
                arguments = [*command, str(rank), store]
                workers.append(
                    subprocess.Popen(arguments, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                )
            deadline = time.monotonic() + timeout_s
            results = [worker.communicate(timeout=max(0.1, deadline - time.monotonic())) for worker in workers]
        except subprocess.TimeoutExpired:
            return ProbeResult(works=False, detail=f"no answer within {timeout_s:.0f} s")
        except OSError as error:
            return ProbeResult(works=False, detail=f"cannot start a process: {error.strerror}")
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.communicate()
    for worker, (_, errors) in zip(workers, results, strict=True):
        if worker.returncode != 0:
            lines = errors.strip().splitlines()
            return ProbeResult(works=False, detail=lines[-1] if lines else f"a process ended with {worker.returncode}")
    sums = ", ".join(sorted({text.strip() for text, _ in results}))
    if sums != "3":
        return ProbeResult(works=False, detail=f"1 + 2 came out as {sums}")
    return ProbeResult(works=True, detail="2 processes formed a group and added a tensor")


def _gloo_worker(rank: int, store: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    value = torch.tensor([rank + 1])
    dist.all_reduce(value)
    dist.destroy_process_group()
    print(int(value.item()))


if __name__ == "__main__":
    _gloo_worker(int(sys.argv[1]), sys.argv[2])
