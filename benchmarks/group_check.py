"""Moves over torch.distributed's own groups on this machine: `python benchmarks/group_check.py [--backend nccl|gloo]`.

A process for each GPU (over gloo: `--procs` of them) sends every other one pieces of its memory, twenty transitions one
after another, each with a group of its own. Every byte is compared; after the twenty nothing of them is left: no group,
thread, descriptor, or memory of the GPU. Then a wait for a process that is silent is ended from another thread. NCCL
refuses two processes on one GPU: with one GPU the group has one process, which shows that it is made, agrees and goes.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.multiprocessing

from nereus.ir.cluster import Device
from nereus.runtime.communicator import BACKENDS, GLOO, NCCL, open_communicators
from nereus.runtime.faults import Fault
from nereus.runtime.transports.base import Outgoing, Parcel
from nereus.runtime.transports.groups import ProcessGroups
from nereus.runtime.transports.sockets import open_store

TIMES, WARM = 20, 2
PIECES = 8
DEADLINE_S = 60.0
#: Of the GPU's memory that a driver may keep for later.
SLACK_BYTES = 256 << 20


def device(number: int) -> Device:
    return Device("n0", number)


class Process:
    def __init__(self, rank: int, size: int, backend: str, piece_bytes: int, folder: str) -> None:
        self.rank, self.size, self.backend, self.piece_bytes = rank, size, backend, piece_bytes
        self.memory = torch.device("cuda", rank) if backend == NCCL else torch.device("cpu")
        self.store: Any = open_store(os.path.join(folder, "store"), size)

    def transport(self, name: str) -> ProcessGroups:
        return ProcessGroups(
            store=self.store,
            name=name,
            process=self.rank,
            num_processes=self.size,
            process_of={device(number): number for number in range(self.size)},
            deadline_s=DEADLINE_S,
            backend=self.backend,
        )

    def pieces(self, to: int) -> Iterator[Parcel]:
        """Bytes that tell the sender, the receiver and the part; the checksum is the first one."""
        for part in range(PIECES):
            first = (31 * self.rank + 7 * to + part) % 256
            data = (torch.arange(self.piece_bytes, device=self.memory) + first).to(torch.uint8)
            yield Parcel(self.rank * self.size + to, device(self.rank), device(to), data, first, part)

    def transition(self, name: str) -> None:
        transport, come = self.transport(name), 0

        def arrived(parcel: Parcel, checksum: int) -> None:
            nonlocal come
            come += 1
            expected = (torch.arange(self.piece_bytes, device=self.memory) + checksum).to(torch.uint8)
            sender = parcel.tag // self.size
            assert checksum == (31 * sender + 7 * self.rank + parcel.part) % 256, "another piece than was expected"
            assert torch.equal(parcel.data, expected), "a wrong byte"

        receives = [
            Parcel(
                number * self.size + self.rank,
                device(number),
                device(self.rank),
                torch.zeros(self.piece_bytes, dtype=torch.uint8, device=self.memory),
                part=part,
            )
            for number in range(self.size)
            for part in range(PIECES)
        ]
        sends = [
            Outgoing(self.rank * self.size + to, device(self.rank), device(to), self.pieces(to))
            for to in range(self.size)
        ]
        transport.exchange(sends, receives, arrived, DEADLINE_S)
        assert come == self.size * PIECES
        transport.decide(DEADLINE_S)
        transport.close(DEADLINE_S)

    def held(self) -> tuple[int, int, int, int]:
        """Groups, descriptors, threads; bytes of the GPU, whoever has them."""
        gc.collect()
        used = 0
        if self.backend == NCCL:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            used = total - free
        return len(open_communicators()), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), used

    def aborted(self) -> float:
        """Seconds until a wait for a silent process has ended; of process 0."""
        transport, taken = self.transport("abort"), 0.0
        if self.rank == 0:
            told: list[float] = []

            def abort() -> None:
                told.append(time.perf_counter())
                transport.abort("a drill")

            threading.Timer(0.5, abort).start()
            into = Parcel(0, device(1), device(0), torch.zeros(self.piece_bytes, dtype=torch.uint8, device=self.memory))
            try:
                transport.exchange([], [into], lambda *_: None, 3600.0)
                raise AssertionError("nothing came, and the wait ended well")
            except Fault as fault:
                assert "a drill" in str(fault), fault
            taken = time.perf_counter() - told[0]
            self.store.set("over", "1")
        else:
            self.store.wait(["over"])
        transport.drop()
        return taken


def process(rank: int, size: int, backend: str, piece_bytes: int, folder: str) -> None:
    if backend == NCCL:
        torch.cuda.set_device(rank)
    at = Process(rank, size, backend, piece_bytes, folder)
    before = (0, 0, 0, 0)
    for number in range(WARM + TIMES):
        if number == WARM:  # what is made once is there
            before = at.held()
        at.transition(f"t{number}")
    after = at.held()
    assert after[:3] == before[:3], f"groups, descriptors, threads: {before} became {after}"
    assert after[0] == 0
    assert after[3] <= before[3] + SLACK_BYTES, f"bytes of the GPU: {before} became {after}"
    taken = at.aborted() if size > 1 else None
    if rank == 0:
        print(f"groups {backend}: {size} processes, {TIMES} transitions, every byte right, nothing left behind")
        print(
            f"groups {backend}: a wait for a silent process ended {taken:.2f} s after the word"
            if taken is not None
            else f"groups {backend}: one process: nothing to send to, and nobody to wait for"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default=NCCL if torch.cuda.is_available() else GLOO)
    parser.add_argument("--procs", type=int, default=3, help="over gloo (default: 3)")
    parser.add_argument("--piece-kb", type=int, default=2048, help="of each of eight pieces (default: 2048)")
    args = parser.parse_args()
    size = torch.cuda.device_count() if args.backend == NCCL else args.procs
    if not size:
        print("no GPU: nothing to try NCCL on")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, args=(size, args.backend, args.piece_kb << 10, folder), nprocs=size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
