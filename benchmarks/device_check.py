"""Builds, checks and times every kernel that this machine can run. Called by device_check.sh.

A rate is bytes read and written over time; a ratio is that rate over the rate of one large copy_ on the same device,
measured in the same run. Rows of 512 bytes and more should reach 0.85.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from nereus.kernels import dispatch
from nereus.kernels import regions as r
from nereus.kernels import source as sources
from nereus.kernels.reference import Reference

GOAL, GOAL_ROW_BYTES = 0.85, 512
WRONG, NO_GPU, SLOW = 1, 2, 3
REPEATS = 9
#: Random tables are checked for so long, cases are timed until so long after the start.
CHECK_S, TIME_UNTIL_S = 10.0, 120.0
GROUPS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``row_bytes``: of the narrower side, for the goal; ``touched``: bytes read and written."""

    name: str
    row_bytes: int
    table: r.IntArray
    source_bytes: int
    target_bytes: int
    touched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    kernel: str
    case: str
    row_bytes: int
    seconds: float
    ratio: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write everything to this file")
    parser.add_argument("--size-mb", type=int, help="bytes of a case in MB (default: 1024 on a GPU, 64 on a CPU)")
    parser.add_argument("--only", default="", help="time only cases with this word in their name")
    args = parser.parse_args()
    begin = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    print(f"torch {torch.__version__}, {about(device)}")
    if device.type == "cpu":
        print("No GPU here: kernels are built for GPUs, and checked and timed on this CPU only.")
    builds = list(build(device))
    kernels = found(device)
    wrong = [text for kernel in kernels for text in check(kernel, device)]
    timings: list[Timing] = []
    if device.type == "cuda":
        wrong += groups()
    if not wrong:
        size = (args.size_mb or (1024 if device.type == "cuda" else 64)) << 20
        timings = list(measure(kernels, device, size, args.only, begin))
    if args.json:
        document = {"device": about(device), "torch": torch.__version__, "builds": builds, "wrong": wrong}
        with open(args.json, "w") as file:
            json.dump({**document, "timings": [asdict(t) for t in timings]}, file, indent=1)
    code = verdict(wrong, timings, device)
    print(f"{time.monotonic() - begin:.0f} s in all")
    return code


def about(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    kind = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {kind}"


def build(device: torch.device) -> Iterator[dict[str, Any]]:
    """regions.cu by every compiler that there is, for this GPU, or for some where there is none."""
    if device.type == "cpu":
        archs = ["sm_80", "sm_90", "gfx90a", "gfx942"]
    elif torch.version.hip:
        archs = [torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]]
    else:
        archs = ["sm_{}{}".format(*torch.cuda.get_device_capability(device))]
    for arch in archs:
        for name in sources.compilers(arch):
            begin = time.monotonic()
            try:
                said = f"{len(sources.build(arch, only=name)) // 1000} kB in {time.monotonic() - begin:.1f} s"
            except sources.BuildError as error:
                said = str(error).rpartition(f"{name}: ")[2]
            print(f"build  {arch:8} {name:8} {said}")
            yield {"arch": arch, "compiler": name, "said": said}


def found(device: torch.device) -> list[dispatch.Kernel]:
    kernels = []
    for name in ("triton", "source", "reference") if device.type == "cuda" else ("native", "reference"):
        begin = time.monotonic()
        try:
            kernels.append(dispatch.choose(device, name))
            print(f"start  {name:10} right on the trial table, {time.monotonic() - begin:.1f} s with its build")
        except dispatch.KernelsUnavailable as error:
            print(f"start  {name:10} {error}")
    return kernels


def check(kernel: dispatch.Kernel, device: torch.device) -> list[str]:
    """Random tables against the reference on a CPU."""
    if kernel.name == "reference" and device.type == "cpu":
        return []
    begin, number = time.monotonic(), 0
    while time.monotonic() - begin < CHECK_S and number < 200:
        what, source, size = random_table(np.random.default_rng(number))
        number += 1
        answers = []
        for one, where in ((kernel, device), (Reference(), torch.device("cpu"))):
            target, sums = (
                torch.zeros(size, dtype=torch.uint8, device=where),
                torch.zeros(4, dtype=torch.int64).to(where),
            )
            one.launch(what, [source.to(where), target], sums)
            answers.append((target.cpu(), sums.cpu()))
        same = [torch.equal(a, b) for a, b in zip(*answers, strict=True)]
        if not all(same):
            text = f"{kernel.name}: table {number - 1}: wrong " + " and ".join(
                name for name, good in zip(("bytes", "checksums"), same, strict=True) if not good
            )
            print(f"check  {text}")
            return [text]
    print(f"check  {kernel.name:10} {number} random tables: right")
    return []


def groups() -> list[str]:
    """Transitions over NCCL's groups, a process for each GPU; it may hang where it is wrong."""
    command = [sys.executable, "-W", "ignore", os.path.join(os.path.dirname(__file__), "group_check.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as started:
        try:
            said, _ = started.communicate(timeout=GROUPS_S)
        except subprocess.TimeoutExpired:
            started.kill()
            return [f"groups nccl: not done within {GROUPS_S:g} s"]
    print(said.strip())
    return [f"groups nccl: {said.strip().splitlines()[-1]}"] if started.returncode else []


def random_table(rng: np.random.Generator) -> tuple[r.Plan, torch.Tensor, int]:
    kinds = [(kind, kind) for kind in range(7)]
    kinds += [(a, b) for a in (r.F16, r.BF16, r.F32) for b in (r.F16, r.BF16, r.F32) if a != b]
    table, ends = [], [0, 0]
    for _ in range(int(rng.integers(1, 40))):
        pair = kinds[int(rng.integers(len(kinds)))]
        rows, cols = int(rng.integers(1, 30)), int(rng.choice([1, 2, 3, 7, 8, 33, 64, 256, 1000, 9000]))
        begins, strides = [], []
        for side, kind in enumerate(pair):
            width, step = int(r.WIDTHS[kind]), int(rng.choice([1, 4, 16]))
            step = max(step, width)
            begins.append(-(-ends[side] // step) * step // width)
            strides.append(cols + int(rng.choice([0, 1, 4, 8, 64])))
            ends[side] = (begins[-1] + rows * strides[-1]) * width
        target = -1 if pair[0] == pair[1] and rng.random() < 0.2 else 1
        slot = int(rng.integers(0 if target < 0 else -1, 4))
        numbered = (slot, int(rng.integers(1 << 62)), int(rng.integers(1 << 40)), cols + int(rng.integers(9)))
        table.append((0, begins[0], strides[0], target, begins[1], strides[1], rows, cols, *pair, *numbered))
    source = torch.from_numpy(rng.integers(0, 256, ends[0], dtype=np.uint8))
    return r.plan(np.array(table, dtype=np.int64)), source, max(ends[1], 1)


def cases(size: int) -> Iterator[Case]:
    """About ``size`` bytes moved in each."""
    for row_bytes in (64, 256, 512, 1024, 4096, 65536):
        cols, rows = row_bytes // 2, size // row_bytes
        for summed in (False, True):
            slot, name = (0, " + checksum") if summed else (-1, "")
            tail = (r.BITS16, r.BITS16, slot, 5, 0, cols)
            pack = (0, 0, 2 * cols, 1, 0, cols, rows, cols, *tail)
            yield case(f"pack{name}, bf16, rows of {row_bytes}", row_bytes, [pack], 2 * size, size, 2 * size)
            unpack = (0, 0, cols, 1, 0, 2 * cols, rows, cols, *tail)
            yield case(f"unpack{name}, bf16, rows of {row_bytes}", row_bytes, [unpack], size, 2 * size, 2 * size)
    half = size // 2
    for summed in (False, True):
        slot, name = (0, " + checksum") if summed else (-1, "")
        for kind, width, label in ((r.BITS8, 1, "int8"), (r.BITS16, 2, "bf16"), (r.BITS32, 4, "fp32")):
            row = (0, 0, 0, 1, 0, 0, 1, size // width, kind, kind, slot, 5, 0, 0)
            yield case(f"contiguous{name}, {label}", 1 << 20, [row], size, size, 2 * size)
        cast = (0, 0, 0, 1, 0, 0, 1, size // 4, r.F32, r.BF16, slot, 5, 0, 0)
        yield case(f"cast{name}, fp32 to bf16", 1 << 20, [cast], size, half, size + half)
        dim, hidden = 128, 4096  # 8 query heads to a group
        groups = max(1, size // (2 * 10 * dim * hidden))
        sizes = (8 * dim * groups, dim * groups, dim * groups)
        starts = np.cumsum((0, *sizes[:-1])) * hidden
        parts = [(0, int(s), n // groups) for s, n in zip(starts, sizes, strict=True)]
        qkv = r.interleave(parts, groups=groups, cols=hidden, dst=1, dtype=torch.bfloat16, slot=slot)
        moved = sum(sizes) * hidden * 2
        yield case(f"q|k|v fused{name}, bf16", 2 * dim * hidden, qkv, moved, moved, 2 * moved)
        num = min(size // 4096, 50_000)
        many = [(0, i * 2048, 0, 1, i * 1024, 0, 1, 1024, r.BITS16, r.BITS16, slot, 5, i * 1024, 0) for i in range(num)]
        yield case(f"{num} regions of 2048{name}, bf16", 2048, many, num * 4096, num * 2048, num * 4096)
    summed_only = (0, 0, 0, -1, 0, 0, 1, size // 2, r.BITS16, r.BITS16, 0, 5, 0, 0)
    yield case("checksum of what lies there, bf16", 1 << 20, [summed_only], size, 0, size)


def case(name: str, row_bytes: int, rows: Any, source_bytes: int, target_bytes: int, touched: int) -> Case:
    table = np.array(rows, dtype=np.int64)
    return Case(
        name=name,
        row_bytes=row_bytes,
        table=table,
        source_bytes=source_bytes,
        target_bytes=target_bytes,
        touched=touched,
    )


def measure(
    kernels: list[dispatch.Kernel], device: torch.device, size: int, only: str, begin: float
) -> Iterator[Timing]:
    room = torch.randint(0, 120, (2 * size,), dtype=torch.uint8, device=device)
    into = torch.empty(2 * size, dtype=torch.uint8, device=device)
    copied_s = seconds(lambda: into[:size].copy_(room[:size]), device)
    print(f"\ncopy_ of {size >> 20} MB: {2 * size / copied_s / 1e9:.0f} GB/s read and written; ratios are to that\n")
    names = [kernel.name for kernel in kernels if kernel.name != "reference"]
    print(f"{'':46}{''.join(name.rjust(10) for name in names)}")
    for one in cases(size):
        if only not in one.name:
            continue
        if time.monotonic() - begin > TIME_UNTIL_S:
            print("out of time: the other cases were not timed")
            return
        what = r.plan(one.table)
        bases = [room[: one.source_bytes], into[: one.target_bytes] if one.target_bytes else None]
        sums = torch.zeros(1, dtype=torch.int64, device=device)
        line = f"{one.name:46}"
        for kernel in kernels:
            if kernel.name == "reference":
                continue
            taken_s = seconds(partial(kernel.launch, what, bases, sums), device)
            ratio = one.touched / taken_s / (2 * size / copied_s)
            line += f"{ratio:9.2f}" + ("*" if one.row_bytes >= GOAL_ROW_BYTES and ratio < GOAL else " ")
            yield Timing(
                kernel=kernel.name, case=one.name, row_bytes=one.row_bytes, seconds=taken_s, ratio=round(ratio, 3)
            )
        print(line.rstrip(), flush=True)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Median of some runs, after two that do not count."""
    for _ in range(2):
        work()
    taken = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def verdict(wrong: list[str], timings: list[Timing], device: torch.device) -> int:
    print()
    if wrong:
        print("WRONG: " + "; ".join(wrong))
        return WRONG
    if device.type == "cpu":
        print("Nothing was measured on a GPU: there is none here.")
        return NO_GPU
    best: dict[str, float] = {}
    for timing in timings:
        if timing.row_bytes >= GOAL_ROW_BYTES:
            best[timing.case] = max(best.get(timing.case, 0.0), timing.ratio)
    slow = [name for name, ratio in best.items() if ratio < GOAL]
    goal = f"{GOAL:.0%} of a copy, rows of {GOAL_ROW_BYTES} bytes and more, by the faster kernel"
    if not best:
        print(f"no kernel for this GPU was timed; goal: {goal}")
        return SLOW
    print(f"goal ({goal}): " + (f"missed in {len(slow)} of {len(best)} cases" if slow else "reached in every case"))
    print("\n".join(f"  {name}: {best[name]:.2f}" for name in slow))
    return SLOW if slow else 0


if __name__ == "__main__":
    sys.exit(main())
