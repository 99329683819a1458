"""Programs run in-process over numpy buffers whose elements are their own global numbers.

Devices advance in random order. A message is complete when both ends have posted it (rendezvous), so a wrong order
hangs here as it would on a network; in tight mode a wave ends when all have agreed. Reading or writing a storage that
is not allocated, or an element that nothing has written, is an error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from passes.oracle import Ids, Key

from nereus.ir.cluster import Device
from nereus.ir.program import LocalCopy, Message, Program, StorageSpec
from nereus.ir.units import DTYPE_BYTES

UNWRITTEN = -1
#: A memory space: a device, or a node's name for its host memory.
Space = Device | str


class Wrong(AssertionError):
    """The programs do something that no runtime could do right."""


def spec_key(device: Device, spec: StorageSpec) -> Key:
    return device, spec.stage, spec.slot, spec.tensor


@dataclass
class Outcome:
    buffers: dict[Key, Ids]
    peak: dict[Space, int]  # bytes of storages and of messages that are posted
    moved_bytes: int  # that arrived in a memory space from another device


@dataclass
class _Rank:
    program: Program
    buffers: dict[int, Ids] = field(default_factory=dict)
    posted: set[tuple[int, Device, Device]] = field(default_factory=set)
    at: str = "ready"  # ready | posted | agree | done
    wave: int = -1
    barriers: int = 0  # agreements reached


class Interpreter:
    def __init__(
        self, programs: Mapping[Device, Program], before: Mapping[Key, Ids], weight_of: Ids, seed: int
    ) -> None:
        self.random = random.Random(seed)
        self.weight_of = weight_of
        self.ranks = {device: _Rank(program) for device, program in programs.items()}
        self.mail: dict[tuple[int, Device, Device], list[tuple[str, str, bool, Ids]]] = {}
        self.used: dict[Space, int] = {}
        self.peak: dict[Space, int] = {}
        self.moved = 0
        lengths = {len(r.program.waves) for r in self.ranks.values()}
        if len(lengths) > 1 or len({(r.program.mode, r.program.digest) for r in self.ranks.values()}) > 1:
            raise Wrong("programs of different transitions")
        self.agrees = any(r.program.mode == "tight" for r in self.ranks.values())
        unused = {key for key in before if key[0] in self.ranks}
        for device, rank in self.ranks.items():
            for number, spec in enumerate(rank.program.storages):
                if spec.id != number:
                    raise Wrong("a storage's id is not its index")
                if spec.role in ("new", "staged"):
                    continue
                key = spec_key(device, spec)
                values = before.get(key)
                if values is None or len(values) != spec.numel:
                    raise Wrong(f"{key} is not what the old plan holds")
                rank.buffers[number] = np.array(values)
                self._use(device, spec, spec.numel)
                unused.discard(key)
        if unused:
            raise Wrong(f"no program knows the old storages {sorted(map(str, unused))[:3]}")

    # -- memory -----------------------------------------------------------------------------------------------------

    def _use(self, device: Device, spec: StorageSpec, numel: int) -> None:
        self._bytes(device.node if spec.host else device, numel * DTYPE_BYTES[spec.dtype])

    def _bytes(self, space: Space, amount: int) -> None:
        self.used[space] = self.used.get(space, 0) + amount
        self.peak[space] = max(self.peak.get(space, 0), self.used[space])

    # -- blocks -----------------------------------------------------------------------------------------------------

    def _positions(self, rank: _Rank, block: Ids) -> tuple[int, Ids]:
        storage, offset, rows, cols, stride = (int(v) for v in block[:5])
        if storage not in rank.buffers:
            raise Wrong(f"{rank.program.device}: storage {rank.program.storages[storage]} is not allocated")
        at = (offset + np.arange(rows)[:, None] * stride + np.arange(cols)).reshape(-1)
        if rows < 1 or cols < 1 or at.min() < 0 or at.max() >= len(rank.buffers[storage]):
            raise Wrong(f"{rank.program.device}: block {block} outside its storage")
        return storage, at

    def _read(self, rank: _Rank, block: Ids) -> tuple[str, str, bool, Ids]:
        storage, at = self._positions(rank, block)
        values = rank.buffers[storage][at]
        spec = rank.program.storages[storage]
        if (values == UNWRITTEN).any():
            raise Wrong(f"{rank.program.device}: reads unwritten elements of {spec}")
        return spec.slot, spec.dtype, spec.host, values

    def _write(self, rank: _Rank, block: Ids, values: Ids) -> None:
        storage, at = self._positions(rank, block)
        if rank.program.storages[storage].role not in ("new", "staged"):
            raise Wrong(f"{rank.program.device}: writes into {rank.program.storages[storage]}")
        if (rank.buffers[storage][at] != UNWRITTEN).any():
            raise Wrong(f"{rank.program.device}: writes twice into {rank.program.storages[storage]}")
        rank.buffers[storage][at] = values

    def _copy(self, rank: _Rank, copy: LocalCopy) -> None:
        if len(copy.src) != len(copy.dst) or (copy.src.table[:, 2:4] != copy.dst.table[:, 2:4]).any():
            raise Wrong("the two sides of a local copy have different shapes")
        for src, dst in zip(copy.src.table, copy.dst.table, strict=True):
            *_, values = self._read(rank, src)
            self._write(rank, dst, self.weight_of[values] if copy.cast else values)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _wire(self, message: Message, device: Device, outgoing: bool) -> tuple[int, Device, Device]:
        return (message.tag, device, message.peer) if outgoing else (message.tag, message.peer, device)

    def _staged(self, rank: _Rank, message: Message) -> int:
        """Bytes of a message that its device stages. Between two processes' parts of one host memory there is no
        staging."""
        total = 0
        for block in message.blocks.table:
            spec = rank.program.storages[int(block[0])]
            if not (spec.host and message.peer.node == rank.program.device.node):
                total += int(block[2] * block[3]) * DTYPE_BYTES[spec.dtype]
        return total

    def _run(self, device: Device, rank: _Rank) -> Iterator[str]:
        for number, wave in enumerate(rank.program.waves):
            rank.wave = number
            for storage in wave.acquire:
                spec = rank.program.storages[storage]
                if storage in rank.buffers or spec.role not in ("new", "staged"):
                    raise Wrong(f"{device}: acquires {spec} twice")
                rank.buffers[storage] = np.full(spec.numel, UNWRITTEN, dtype=np.int64)
                self._use(device, spec, spec.numel)
                yield "ready"
            for copy in wave.copies:
                self._copy(rank, copy)
            yield "ready"
            held = sum(self._staged(rank, message) for message in (*wave.receives, *wave.sends))
            self._bytes(device, held)
            for message in wave.receives:
                rank.posted.add(self._wire(message, device, False))
            for message in wave.sends:
                wire = self._wire(message, device, True)
                if wire in self.mail:
                    raise Wrong(f"tag {message.tag} is used twice")
                self.mail[wire] = [self._read(rank, block) for block in message.blocks.table]
                rank.posted.add(wire)
            yield "posted"
            for message in wave.receives:
                self._unpack(rank, message, device)
            self._bytes(device, -held)
            for copy in wave.derives:
                self._copy(rank, copy)
            if self.agrees:
                yield "agree"
            for storage in wave.release:
                self._release(device, rank, storage)
                yield "ready"
        yield "agree"
        for storage in rank.program.commit_release:
            self._release(device, rank, storage)

    def _unpack(self, rank: _Rank, message: Message, device: Device) -> None:
        parts = self.mail.pop(self._wire(message, device, False))
        kinds = [(slot, dtype, host) for slot, dtype, host, values in parts for _ in values]
        values = np.concatenate([values for *_, values in parts])
        position = 0
        for block in message.blocks.table:
            count = int(block[2] * block[3])
            spec = rank.program.storages[int(block[0])]
            for slot, dtype, host in set(kinds[position : position + count]):
                if (slot, dtype) != (spec.slot, spec.dtype):
                    raise Wrong(f"{device}: a message brings {slot} where its receiver expects {spec.slot}")
                if not (spec.host and host and message.peer.node == device.node):
                    same = kinds[position : position + count].count((slot, dtype, host))
                    self.moved += same * DTYPE_BYTES[dtype]
            self._write(rank, block, values[position : position + count])
            position += count
        if position != len(values):
            raise Wrong(f"{device}: expects {position} elements of {len(values)} sent")

    def _release(self, device: Device, rank: _Rank, storage: int) -> None:
        spec = rank.program.storages[storage]
        if storage not in rank.buffers or spec.role not in ("old", "staged"):
            raise Wrong(f"{device}: releases {spec}")
        del rank.buffers[storage]
        self._use(device, spec, -spec.numel)

    def _can_go(self, device: Device, rank: _Rank) -> bool:
        if rank.at == "posted":
            wave = rank.program.waves[rank.wave]
            return all(
                wire in self.ranks[peer].posted
                for peer, wire in (
                    *((m.peer, self._wire(m, device, True)) for m in wave.sends),
                    *((m.peer, self._wire(m, device, False)) for m in wave.receives),
                )
            )
        return rank.at != "done" and all(other.barriers >= rank.barriers for other in self.ranks.values())

    def run(self) -> Outcome:
        running = {device: self._run(device, rank) for device, rank in self.ranks.items()}
        while running:
            able = [device for device in running if self._can_go(device, self.ranks[device])]
            if not able:
                raise Wrong("deadlock: " + ", ".join(f"{d} in wave {self.ranks[d].wave}" for d in running))
            device = self.random.choice(able)
            rank = self.ranks[device]
            rank.at = next(running[device], "done")
            if rank.at == "agree":
                rank.barriers += 1
            if rank.at == "done":
                del running[device]
        if self.mail:
            raise Wrong(f"nobody received {sorted(self.mail)[:3]}")
        buffers = {
            spec_key(device, rank.program.storages[number]): values
            for device, rank in self.ranks.items()
            for number, values in rank.buffers.items()
        }
        return Outcome(buffers, self.peak, self.moved)
