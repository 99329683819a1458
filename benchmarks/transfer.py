"""What moving bytes costs beside the plain means of the same machine, in one run: `python benchmarks/transfer.py`.

Processes hold a matrix cut by rows. In turns, between barriers, they: bring it one place round by compiled, verified
moves (contiguous regions, in place) and by one large gloo message each; cut it by columns instead (strided) and
exchange as many bytes as plain gloo messages; copy as many bytes by memcpy, all at the same time; and save and load it
with torch.distributed.checkpoint in shared memory. Moves go over TCP, by reads of each other's memory, and over a group
of torch.distributed's (gloo). All of it is compared by the seconds between barriers and by the processors' seconds that
all processes used: on a shared machine the first mean little. Ratios are medians over turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

#: Columns, so that a quarter of a row is 8 kB (long rows) or 512 bytes (short ones).
LONG, SHORT = 8192, 512


@dataclass(frozen=True, kw_only=True)
class Setting:
    procs: int
    num_bytes: int  # of all processes together
    turns: int
    folder: str
    checkpoint: bool


def binding(rows: tuple[int, int], cols: tuple[int, int], data: Any, rank: int) -> Any:
    """A rectangle of the tensor ``a``."""
    from nereus.ir.fragment import Fragment
    from nereus.runtime.adapters.base import BindingBuilder

    builder = BindingBuilder(rank=rank)
    number = builder.storage("part", data)
    height, width = rows[1] - rows[0], cols[1] - cols[0]
    builder.fragments.append(
        Fragment(
            tensor="a",
            slot="weight",
            storage=number,
            row_lo=rows[0],
            row_hi=rows[1],
            col_lo=cols[0],
            col_hi=cols[1],
            start=0,
            stop=height * width,
            origin=0,
            stride=width,
        )
    )
    return builder.finish()


class Process:
    """One process at all of its works; each is called with nothing, in all processes at once."""

    def __init__(self, rank: int, setting: Setting) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.rank, self.setting, self.torch, self.dist = rank, setting, torch, dist
        store = dist.FileStore(f"{setting.folder}/store", setting.procs)
        # What a barrier, and plain messages, go over.
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=setting.procs, timeout=timedelta(seconds=120)
        )
        self.store: Any = dist.TCPStore(
            "127.0.0.1", int(os.environ["NEREUS_BENCH_PORT"]), setting.procs, rank == 0, timedelta(seconds=120)
        )
        self.phases: dict[str, dict[str, float]] = {}
        self.extra: dict[str, float] = {}
        #: Staging at most, staging promised, storages, in bytes.
        self.peaks: dict[str, tuple[int, int, int]] = {}
        self.shared = ""

    def moved(
        self, name: str, cols: int, *, columns: bool, same_host: bool, rows: int = 0, kind: str = "tcp"
    ) -> Callable[[], None]:
        """Compiled once; each call executes and verifies it."""
        torch, procs = self.torch, self.setting.procs
        from nereus.ir.tensor import LogicalTensor
        from nereus.runtime.live import Connections, prepare_among

        rows = rows or self.setting.num_bytes // 4 // cols // procs * procs
        height, width = rows // procs, cols // procs
        old = torch.full((height, cols), float(self.rank)) + torch.arange(cols)
        there = (self.rank + 1) % procs
        new = torch.zeros((rows, width) if columns else (height, cols))
        wanted = ((0, rows), (self.rank * width, (self.rank + 1) * width))
        if not columns:
            wanted = ((there * height, (there + 1) * height), (0, cols))
        os.environ["NEREUS_SAME_HOST"] = "1" if same_host else "0"
        begin = time.perf_counter()
        prepared = prepare_among(
            binding((self.rank * height, (self.rank + 1) * height), (0, cols), old, self.rank),
            binding(*wanted, new, self.rank),
            (LogicalTensor(name="a", shape=(rows, cols)),),
            store=self.store,
            name=f"prepare/{name}",
            rank=self.rank,
            size=procs,
        )
        self.extra[f"{name}: compile"] = time.perf_counter() - begin
        connections, calls = Connections(kind=kind), iter(range(1 << 30))

        def work() -> None:
            os.environ["NEREUS_SAME_HOST"] = "1" if same_host else "0"
            report = prepared.run(self.store, f"run/{name}/{next(calls)}", 120.0, connections)
            self.phases[name] = dict(report.phases_s)
            ((_, peak, _, staging),) = report.peaks
            ((_, promised),) = report.promised
            both = sum(m.numel() * 4 for m in (old, new))
            # Old and new side by side and staging, which is never more than all messages of a wave.
            assert peak <= promised and peak <= both + staging and staging <= promised - both, report
            self.peaks[name] = (peak - both, promised - both, both)
            assert (report.direct_bytes > 0) == same_host or self.setting.procs == 1, report.notes

        work()
        expected = old if procs == 1 else torch.full((height, cols), float(there)) + torch.arange(cols)
        if columns:
            expected = torch.arange(procs).repeat_interleave(height).view(-1, 1) + torch.arange(
                self.rank * width, (self.rank + 1) * width
            )
        assert torch.equal(new, expected.float())
        return work

    def messages(self, num_bytes: int, peers: list[tuple[int, int]]) -> Callable[[], None]:
        """One large message to, and one from, each pair of (to, from); nothing packed, nothing verified."""
        torch, dist = self.torch, self.dist
        buffers = [(torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)) for _ in peers]

        def work() -> None:
            operations = []
            for (to, source), (out, into) in zip(peers, buffers, strict=True):
                operations += [dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)]
            for request in dist.batch_isend_irecv(operations):
                request.wait()

        return work

    def copied(self, num_bytes: int) -> Callable[[], None]:
        source, target = self.torch.ones(num_bytes // 4), self.torch.zeros(num_bytes // 4)
        return lambda: target.copy_(source)  # type: ignore[no-any-return]

    def read(self, num_bytes: int, source: int) -> Callable[[], None]:
        """What the same-host path does to bytes, and nothing else: no checksum, no word between processes."""
        import numpy as np

        from nereus.runtime.transports import attach

        mine, target = (
            self.torch.ones(num_bytes, dtype=self.torch.uint8),
            self.torch.zeros(num_bytes, dtype=self.torch.uint8),
        )
        said: list[Any] = [None] * self.setting.procs
        self.dist.all_gather_object(said, (os.getpid(), mine.data_ptr()))
        pid, address = said[source]
        piece = 8 << 20

        def work() -> None:
            for at in range(0, num_bytes, piece):
                part = target[at : at + piece]
                attach.read(pid, np.array([[address + at, 1, len(part), len(part)]]), part)

        self.keep = mine
        return work

    def stored(self, cols: int) -> Callable[[], None]:
        """torch's own way to another layout: cut by rows into shared memory, and from there by columns."""
        import torch.distributed.checkpoint as torch_dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        torch, procs = self.torch, self.setting.procs
        rows = self.setting.num_bytes // 4 // cols // procs * procs
        mesh = init_device_mesh("cpu", (procs,))
        old = DTensor.from_local(torch.ones(rows // procs, cols), mesh, [Shard(0)], run_check=False)
        new = DTensor.from_local(torch.zeros(rows, cols // procs), mesh, [Shard(1)], run_check=False)
        if self.rank == 0:
            self.shared = tempfile.mkdtemp(dir="/dev/shm")
        box = [self.shared]
        self.dist.broadcast_object_list(box)

        def work() -> None:
            torch_dcp.save({"a": old}, checkpoint_id=box[0])
            torch_dcp.load({"a": new}, checkpoint_id=box[0])

        return work

    def timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds, the slowest process's; processor seconds, of all together."""
        self.dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        work()
        mine = time.process_time() - used
        self.dist.barrier()
        wall = time.perf_counter() - begin
        total = self.torch.tensor([mine])
        self.dist.all_reduce(total)
        return wall, float(total)


def process(rank: int, setting: Setting) -> None:
    at = Process(rank, setting)
    procs, share = setting.procs, setting.num_bytes // setting.procs
    ring = [((rank + 1) % procs, (rank - 1) % procs)]
    others = [((rank + k) % procs, (rank - k) % procs) for k in range(1, procs)]
    works: dict[str, Callable[[], object]] = {
        "gloo, one message": at.messages(share, ring),
        "gloo, to each": at.messages(share // procs, others),
        "memcpy": at.copied(share),
        "memcpy of what crosses": at.copied(share // procs * (procs - 1)),
        "read, same host": at.read(share, (rank - 1) % procs),
    }
    for where, same_host in (("TCP", False), ("same host", True)):
        for what, cols, columns in (
            ("contiguous", LONG, False),
            ("long rows", LONG, True),
            ("short rows", SHORT, True),
        ):
            works[f"{what}, {where}"] = at.moved(f"{what}, {where}", cols, columns=columns, same_host=same_host)
        works[f"tiny, {where}"] = at.moved(f"tiny, {where}", 64, columns=True, same_host=same_host, rows=4 * procs)
    for what, columns in (("contiguous", False), ("long rows", True)):
        name = f"{what}, torch's group"
        works[name] = at.moved(name, LONG, columns=columns, same_host=False, kind="gloo")
    if setting.checkpoint:
        works["torch DCP"] = at.stored(LONG)
    turns = [{name: at.timed(work) for name, work in works.items()} for _ in range(setting.turns + 1)][1:]
    if rank == 0:
        said = {"turns": turns, "phases": at.phases, "extra": at.extra, "peaks": at.peaks}
        Path(setting.folder, "results").write_text(json.dumps(said))
    at.dist.barrier()
    if at.shared:
        shutil.rmtree(at.shared)
    at.dist.destroy_process_group()


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


#: (what is compared, with what, how many times as fast it is to be)
GOALS = (
    ("contiguous, TCP", "gloo, one message", 0.85),
    ("long rows, TCP", "gloo, to each", 0.55),
    ("short rows, TCP", "gloo, to each", 0.55),
    ("contiguous, torch's group", "gloo, one message", None),
    ("long rows, torch's group", "gloo, to each", None),
    ("read, same host", "memcpy", 0.5),
    ("contiguous, same host", "memcpy", 0.5),
    ("long rows, same host", "memcpy of what crosses", None),
    ("short rows, same host", "memcpy of what crosses", None),
    ("contiguous, same host", "gloo, one message", None),
    ("long rows, same host", "gloo, to each", None),
    ("long rows, TCP", "torch DCP", 4.0),
    ("long rows, same host", "torch DCP", 10.0),
)


def table(turns: list[dict[str, tuple[float, float]]], setting: Setting) -> list[str]:
    lines = [
        f"| {setting.procs} processes, {setting.num_bytes / 1e6:,.0f} MB | beside | times as fast (processor s) | "
        "times as fast (s) | goal |",
        "|---|---|---|---|---|",
    ]
    for name, beside, goal in GOALS:
        if beside not in turns[0]:
            continue
        wall, cpu = (statistics.median(turn[beside][i] / turn[name][i] for turn in turns) for i in (0, 1))
        lines.append(f"| {name} | {beside} | {cpu:.2f} | {wall:.2f} | {'' if goal is None else goal} |")
    for name in turns[0]:
        wall, cpu = (statistics.median(turn[name][i] for turn in turns) for i in (0, 1))
        lines.append(f"| {name} | | {1e3 * cpu:.0f} ms | {1e3 * wall:.0f} ms | |")
    for name in ("tiny, TCP", "tiny, same host"):
        wall, cpu = (1e3 * statistics.median(turn[name][i] for turn in turns) for i in (0, 1))
        lines.append(f"| {name} | | {cpu:.1f} ms | {wall:.1f} ms | |")
    return lines


def run(setting: Setting) -> dict[str, Any]:
    import torch.multiprocessing as mp

    os.environ["NEREUS_BENCH_PORT"] = str(free_port())
    mp.spawn(process, args=(setting,), nprocs=setting.procs)
    found: dict[str, Any] = json.loads(Path(setting.folder, "results").read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--procs", type=int, default=4)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--no-checkpoint", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            procs=args.procs,
            num_bytes=args.mb * 10**6,
            turns=args.turns,
            folder=folder,
            checkpoint=not args.no_checkpoint,
        )
        said = run(setting)
    print("\n".join(table(said["turns"], setting)))
    for name, phases in said["phases"].items():
        words = ", ".join(f"{phase} {1e3 * seconds:.1f}" for phase, seconds in phases.items())
        print(
            f"\n{name}, the first process, ms: {words}; compiled once in {1e3 * said['extra'][f'{name}: compile']:.0f}"
        )
        staged, promised, both = (number / 1e6 for number in said["peaks"][name])
        print(f"its memory: {both:.0f} MB in storages, {staged:.1f} MB staged at most, {promised:.0f} MB promised")
    return 0


if __name__ == "__main__":
    sys.exit(main())
