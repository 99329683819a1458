"""Compile time and memory of one kind of transition from 32 to 1,024 GPUs: `make bench`.

The pool doubles and training drops its pipeline (Llama-3.1-8B PPO: actor and critic with ZeRO-1, reference, reward,
generation), the shape of the largest transition of a long run. Every size runs in a process of its own; CPU seconds are
the child's, so other work on the machine counts less. The last column is CPU time per GPU against the smallest size:
1.0 is linear.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = (32, 64, 128, 256, 512, 1024)
REPEATS = 3

OLD = """cluster {{ node n[0-{last}] {{ gpus = 8 x "mi250x-gcd-64gb"  nic = 100 GB/s  host_mem = 512 GiB }} }}
model actor  = "llama-3.1-8b"
model ref    = actor {{ frozen = true }}
model critic = "llama-3.1-8b" {{ head = value }}
model reward = "llama-3.1-8b" {{ head = value, frozen = true }}
workload {{
  algorithm = ppo  mode = sync  prompts = 4096  samples = 1  mini_batch = 2048
  prompt_len = 1024  response_len = 1024
}}
stage actor.generate {{ engine = vllm       on = {half}     tp = 2  kv_cache = 20 GiB  idle = offload }}
stage ref.infer      {{ backend = megatron  on = {quarter1} tp = 2  idle = offload }}
stage reward.infer   {{ backend = megatron  on = {quarter2} tp = 2  idle = offload }}
stage actor.train    {{ backend = megatron  on = {half}     tp = 4  pp = 2  zero = 1 }}
stage actor.logprob  {{ with = actor.train }}
stage critic.train   {{ backend = megatron  on = {half}     tp = 4  pp = 2  zero = 1  idle = offload }}
stage critic.infer   {{ with = critic.train }}
"""

NEW = """extends "old.plan"
workload {{ response_len = 3072 }}
stage actor.generate {{ on = {all}  tp = 4 }}
stage ref.infer      {{ on = {half} }}
stage reward.infer   {{ on = {other} }}
stage actor.train    {{ on = {all}  tp = 8  pp = 1 }}
stage critic.train   {{ on = {all}  tp = 8  pp = 1 }}
"""


def _nodes(first: int, stop: int) -> str:
    return f"n{first}" if stop - first == 1 else f"n[{first}-{stop - 1}]"


def write_pair(folder: Path, num_gpus: int) -> None:
    nodes = num_gpus // 8
    words = {
        "last": nodes - 1,
        "all": _nodes(0, nodes),
        "half": _nodes(0, nodes // 2),
        "other": _nodes(nodes // 2, nodes),
        "quarter1": _nodes(0, nodes // 4),
        "quarter2": _nodes(nodes // 4, nodes // 2),
    }
    (folder / "old.plan").write_text(OLD.format(**words))
    (folder / "new.plan").write_text(NEW.format(**words))


def measure(folder: Path) -> tuple[float, float, float, dict[str, object]]:
    """(CPU seconds, wall seconds, peak GB, certificate) of one ``nereusc diff --json``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = [sys.executable, "-m", "nereus.cli.main", "diff", "old.plan", "new.plan", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # ru_maxrss is the largest child so far; sizes grow, so it is this one's.
    return cpu_s, wall_s, after.ru_maxrss / 1e6, json.loads(done.stdout)["certificate"]


def main() -> int:
    columns = ("GPUs", "CPU s", "wall s", "peak GB", "ops", "moved TB", "transfer/bound", "CPU per GPU")
    print("{:>5} {:>7} {:>7} {:>8} {:>8} {:>9} {:>15} {:>12}".format(*columns))
    first = None
    for num_gpus in SIZES:
        with tempfile.TemporaryDirectory() as name:
            write_pair(Path(name), num_gpus)
            runs = [measure(Path(name)) for _ in range(REPEATS)]
        cpu_s = statistics.median(run[0] for run in runs)
        wall_s = statistics.median(run[1] for run in runs)
        certificate = runs[-1][3]
        first = first or cpu_s / num_gpus
        moved, ops = float(str(certificate["moved_bytes"])), certificate["num_ops"]
        ratio = float(str(certificate["transfer_s"])) / float(str(certificate["bound_transfer_s"]))
        print(
            f"{num_gpus:>5} {cpu_s:>7.2f} {wall_s:>7.2f} {runs[-1][2]:>8.2f} {ops!s:>8} {moved / 1e12:>9.2f} "
            f"{ratio:>15.2f} {cpu_s / num_gpus / first:>12.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
