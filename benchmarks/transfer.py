"""What a transition costs on this machine beside plain copies of the same bytes: `python benchmarks/transfer.py`.

Four processes re-lay a model (tp 2 x pp 2 -> tp 4: fp32 master and both moments move, bf16 weights are derived). In
the same run, between the repetitions, the same four processes' worth of bytes goes round as plain gloo messages (one
large isend/irecv each, nothing packed, nothing verified) and through memcpy. Ratios are medians over the repetitions;
seconds on a shared machine mean little.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nereus.runtime.report import StepReport

NUM_PROCESSES = 4
REPEATS = 3
WIDTH, LAYERS = 1024, 6

OLD = """cluster { node n0 { gpus = 4 x "h100-sxm-80gb" } }
model actor = "llama-3.1-8b"
workload { algorithm = sft  prompts = 64  mini_batch = 64  prompt_len = 128  response_len = 128 }
stage actor.train { backend = megatron  on = n0  tp = 2  pp = 2  recompute = full  zero = 1  optimizer = adam }
"""
NEW = 'extends "old.plan"\nstage actor.train { tp = 4  pp = 1 }\n'


def plain_gloo(rank: int, num_bytes: int, store: str, results: str) -> None:
    """One process of the peer: a ring of single large messages, and a memcpy of as much."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NUM_PROCESSES,
        timeout=datetime.timedelta(seconds=60),
    )
    source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
    seconds = {}
    for name in ("warm", "gloo", "memcpy"):
        dist.barrier()
        start = time.perf_counter()
        if name == "memcpy":
            target.copy_(source)
        else:
            work = [
                dist.P2POp(dist.isend, source, (rank + 1) % NUM_PROCESSES),
                dist.P2POp(dist.irecv, target, (rank - 1) % NUM_PROCESSES),
            ]
            for request in dist.batch_isend_irecv(work):
                request.wait()
        dist.barrier()
        seconds[name] = time.perf_counter() - start
    if rank == 0:
        Path(results).write_text(f"{seconds['gloo']} {seconds['memcpy']}")
    dist.destroy_process_group()


def peer_seconds(num_bytes: int) -> tuple[float, float]:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        results = f"{folder}/results"
        mp.spawn(plain_gloo, args=(num_bytes // NUM_PROCESSES, f"{folder}/store", results), nprocs=NUM_PROCESSES)
        gloo_s, memcpy_s = map(float, Path(results).read_text().split())
    return gloo_s, memcpy_s


def phases(step: StepReport, *names: str) -> float:
    """Each the slowest process's; a process that waits for a slower one's packing counts that as its transfer."""
    return sum(dict(step.phases_s).get(name, 0.0) for name in names)


def main() -> int:
    from nereus.lang.api import load_plan
    from nereus.runtime.run import run_pair
    from nereus.runtime.scale import Scale

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "old.plan").write_text(OLD)
        (folder / "new.plan").write_text(NEW)
        old, new = (load_plan(str(folder / file)).plan for file in ("old.plan", "new.plan"))
    assert old is not None and new is not None
    rows = []
    for _ in range(REPEATS):
        report = run_pair(old, new, procs=NUM_PROCESSES, scale=Scale(width=WIDTH, layers=LAYERS))
        assert report.ok, report.diagnostics
        step = report.steps[0]
        gloo_s, memcpy_s = peer_seconds(step.moved_bytes)
        rows.append((step, gloo_s, memcpy_s))
    step = rows[-1][0]
    print(f"{step.moved_bytes / 1e6:,.0f} MB between {NUM_PROCESSES} processes; {step.num_elements:,} elements checked")
    print(f"{'':34} {'s':>7} {'against plain gloo':>19} {'against memcpy':>15}")
    for label, seconds in (
        ("plain gloo, one message each", [g for _, g, _ in rows]),
        ("transfer alone", [phases(s, "transfer") for s, _, _ in rows]),
        ("pack + transfer + unpack", [phases(s, "pack", "transfer", "unpack") for s, _, _ in rows]),
        ("the same + verify", [phases(s, "pack", "transfer", "unpack", "verify") for s, _, _ in rows]),
        ("whole: allocate, copy, verify, commit", [s.seconds for s, _, _ in rows]),
    ):
        to_gloo = statistics.median(t / g for t, (_, g, _) in zip(seconds, rows, strict=True))
        to_memcpy = statistics.median(t / m for t, (_, _, m) in zip(seconds, rows, strict=True))
        print(f"{label:38} {statistics.median(seconds):>7.3f} {to_gloo:>15.2f}x {to_memcpy:>14.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
