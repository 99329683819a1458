"""Compile time and memory of one kind of transition from 64 to 16,384 GPUs: `make bench`.

The pool doubles and training drops its pipeline (Llama-3.1-8B PPO: actor and critic with ZeRO-1, reference, reward,
generation), the shape of the largest transition of a long run. Every size is compiled and checked once in a process of
its own, imports excluded; figures are CPU seconds of the best of three, so other work on the machine counts less. The
last column is CPU time per GPU against the smallest size: 1.0 is linear.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy.ma  # noqa: F401  # numpy imports it at first use, and imports are not counted

from nereus.lang.api import load_plan
from nereus.passes.pipeline import compile_transition

SIZES = (64, 256, 1024, 4096, 16384)
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


#: What is shown of a compile: passes (their hooks) that end each part.
PARTS = {"place": "place", "diff": "lifecycle", "route": "route", "schedule": "memory", "check": "check"}


def compile_once(folder: Path) -> dict[str, object]:
    """In a process of its own: CPU seconds of parsing and of the first compile, by part; peak memory; the
    certificate's figures."""
    begin = time.process_time()
    old, new = (load_plan(str(folder / name)).plan for name in ("old.plan", "new.plan"))
    assert old is not None and new is not None
    started = last = time.process_time()
    parts = dict.fromkeys(PARTS, 0.0)
    ends = {ending: part for part, ending in PARTS.items()}

    def hook(name: str, _: object) -> None:
        nonlocal last
        if name in ends:
            now = time.process_time()
            parts[ends[name]] += now - last
            last = now

    certificate = compile_transition(old, new, hooks=(hook,)).certificate
    return {
        "parse": started - begin,
        "compile": time.process_time() - started,
        **parts,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "ops": certificate.num_ops,
        "moved_tb": certificate.moved_bytes / 1e12,
        "ratio": certificate.transfer_s / certificate.bound_transfer_s,
        "safe": certificate.safe,
    }


def measure(folder: Path) -> dict[str, float]:
    """The run of ``REPEATS`` that took the least CPU time: other work on the machine only adds to it."""
    command = [sys.executable, __file__, "--one", str(folder)]
    runs = [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(REPEATS)
    ]
    best: dict[str, float] = min(runs, key=lambda run: run["compile"])
    if not best["safe"]:
        raise SystemExit(f"{folder}: the certificate does not hold")
    return best


def main() -> int:
    columns = ("parse", "compile", *PARTS)
    print(f"{'GPUs':>6} " + " ".join(f"{name:>9}" for name in columns), end="")
    print(f" {'peak GB':>8} {'operations':>10} {'moved TB':>9} {'transfer/bound':>15} {'per GPU':>8}")
    first = None
    for num_gpus in SIZES:
        with tempfile.TemporaryDirectory() as name:
            write_pair(Path(name), num_gpus)
            run = measure(Path(name))
        first = first or run["compile"] / num_gpus
        print(f"{num_gpus:>6} " + " ".join(f"{run[name]:>9.3f}" for name in columns), end="")
        print(
            f" {run['peak_gb']:>8.2f} {run['ops']:>10,} {run['moved_tb']:>9.2f} {run['ratio']:>15.2f} "
            f"{run['compile'] / num_gpus / first:>8.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(compile_once(Path(sys.argv[2]))))
        sys.exit(0)
    sys.exit(main())
