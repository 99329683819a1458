"""A program is checked before it runs: nothing it says may touch what it must not."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nereus.ir.program import Blocks, Program
from nereus.kernels.pack import find_outside
from nereus.runtime.faults import PROGRAM_FAULT, Fault


def validate(program: Program) -> None:
    """Raises Fault where a block leaves its storage, reads what is not there (yet or any more), writes anything but new
    storages, or where storages are not acquired exactly once and released as the mode allows."""
    _Validator(program).run()


class _Validator:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.roles = np.array([s.role for s in program.storages])
        self.lengths = np.array([s.numel for s in program.storages], dtype=np.int64)
        self.there = np.isin(self.roles, ("old", "kept"))
        self.acquired: set[int] = set()

    def run(self) -> None:
        for number, spec in enumerate(self.program.storages):
            if spec.id != number or spec.role not in ("old", "kept", "new", "staged"):
                raise self._fault(f"storage {number} is numbered {spec.id} and has the role '{spec.role}'")
        for number, wave in enumerate(self.program.waves):
            for storage in wave.acquire:
                if self.roles[storage] not in ("new", "staged") or storage in self.acquired:
                    raise self._fault(f"wave {number} acquires storage {storage}, which is there already")
                self.acquired.add(storage)
                self.there[storage] = True
            for copy in (*wave.copies, *wave.derives):
                self._read(copy.src, number)
                self._write(copy.dst, number)
            tags = [m.tag for m in wave.sends]
            for message in wave.sends:
                self._read(message.blocks, number)
            for message in wave.receives:
                self._write(message.blocks, number)
            for repeated in (tags, [m.tag for m in wave.receives]):
                if len(set(repeated)) != len(repeated):
                    raise self._fault(f"wave {number} uses a message tag twice")
            if wave.release and self.program.mode != "tight":
                raise self._fault(f"wave {number} releases storages in {self.program.mode} mode")
            self._release(wave.release)
        self._release(self.program.commit_release)
        left = np.flatnonzero((self.roles == "staged") & self.there)
        if len(left):
            raise self._fault(f"storage {int(left[0])} stays in host memory")
        missing = [s.id for s in self.program.storages if s.role in ("new", "staged") and s.id not in self.acquired]
        if missing:
            raise self._fault(f"storage {missing[0]} is never acquired")

    def _release(self, storages: Iterable[int]) -> None:
        for storage in storages:
            if self.roles[storage] not in ("old", "staged") or not self.there[storage]:
                raise self._fault(f"storage {storage} is released, but is not an old or staged one that is there")
            self.there[storage] = False

    def _read(self, blocks: Blocks, wave: int) -> None:
        table = blocks.table
        bad = find_outside(table, self.lengths)
        if bad is not None:
            raise self._fault(f"block {bad} of a transfer in wave {wave} leaves its storage")
        if len(table) and not self.there[table[:, 0]].all():
            raise self._fault(f"wave {wave} uses a storage that is not there")

    def _write(self, blocks: Blocks, wave: int) -> None:
        self._read(blocks, wave)
        if len(blocks.table) and not np.isin(self.roles[blocks.table[:, 0]], ("new", "staged")).all():
            raise self._fault(f"wave {wave} writes a storage of the old plan")

    def _fault(self, text: str) -> Fault:
        return Fault(PROGRAM_FAULT, text, where=str(self.program.device))
