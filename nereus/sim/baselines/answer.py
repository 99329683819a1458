"""What a baseline answers: steps of transfers with what they allocate, their bytes, their peak; or why it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from nereus.ir.layout import IntArray
from nereus.ir.plan import Plan
from nereus.ir.transition import LOCAL
from nereus.passes.atoms import AtomTable
from nereus.sim.baselines.problem import Problem

#: Place of external storage: no device, no memory space.
STORAGE = -1


@dataclass(frozen=True, slots=True)
class Transfer:
    """Intervals (numbers) of an atom table go from a place to a place, which may be ``STORAGE``. In one step a
    transfer may pass on what an earlier one of the step brings (rings): they run side by side."""

    src: int
    dst: int
    table: int
    intervals: IntArray
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a set of devices does together. ``acquired``, ``released``: bytes per memory space at its begin and end.

    A device begins when it has ended the steps in ``after``, or with ``barrier`` when all have. ``takes``, ``gives``:
    devices owned from begin, until end. Chains run independently of each other; inside a chain steps with a device in
    common are ordered.
    """

    name: str
    devices: tuple[int, ...]
    transfers: tuple[Transfer, ...] = ()
    acquired: Mapping[int, int] = field(default_factory=dict)
    released: Mapping[int, int] = field(default_factory=dict)
    fixed_s: float = 0.0
    after: tuple[int, ...] = ()
    barrier: bool = False
    chain: int = 0
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """``cannot``: the system does not do such changes at all (then there are no steps). ``fails``: it tries and does
    not get through; bytes and peak are what it would take. ``final``: per table, new groups that must be held at the
    end; ``outside_s``: seconds of stopped training that the steps do not contain."""

    baseline: str
    problem: Problem
    placed: Plan  # the new plan with the placement that the steps end in
    tables: tuple[AtomTable, ...] = ()
    final: tuple[tuple[int, ...], ...] = ()
    steps: tuple[Step, ...] = ()
    base_bytes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    outside_s: float = 0.0
    blocking: bool = False
    storage_bytes_per_s: float = 0.0
    cannot: str | None = None
    #: The change was made in other state than asked for; bytes and stop are then no comparison.
    altered: str | None = None
    fails: str | None = None
    #: Devices that an owner holds before the first step.
    owned: tuple[int, ...] = ()

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes over links, host links and storage; copies inside a memory are none."""
        links = self.problem.links
        return sum(
            t.num_bytes
            for step in self.steps
            for t in step.transfers
            if STORAGE in (t.src, t.dst) or links.link(t.src, t.dst) != LOCAL
        )

    @cached_property
    def peak_bytes(self) -> IntArray:
        """Most that each memory space can hold on any timing: chains that do not wait for each other add up, and so
        do steps on other GPUs of a node in its host memory."""
        peak = self.base_bytes.copy()
        for chain in sorted({step.chain for step in self.steps}):
            steps = [step for step in self.steps if step.chain == chain]
            in_turns = len({step.devices for step in steps}) == 1
            now = np.zeros_like(peak)
            high = np.zeros_like(peak)
            for step in steps:
                for space, num_bytes in step.acquired.items():
                    now[space] += num_bytes
                    high[space] = max(high[space], now[space])
                for space, num_bytes in step.released.items():
                    if in_turns or space < self.problem.num_devices:
                        now[space] -= num_bytes
            peak += high
        return peak

    @property
    def gpu_peak_bytes(self) -> int:
        return int(self.peak_bytes[: self.problem.num_devices].max())

    @property
    def overflows(self) -> bool:
        """Whether some memory space may not hold what the steps ask of it."""
        return bool(len(self.peak_bytes)) and bool((self.peak_bytes > self.problem.capacity).any())


class Baseline(Protocol):
    """One file each; ``name`` is what tables call it, ``system`` whose rule it is."""

    name: str
    system: str

    def solve(self, problem: Problem) -> Answer: ...


def refusal(baseline: str, problem: Problem, reason: str) -> Answer:
    return Answer(baseline=baseline, problem=problem, placed=problem.new, cannot=reason)


def positive(values: IntArray) -> dict[int, int]:
    """Space -> bytes of an array over spaces, zeros left out."""
    return {int(i): int(values[i]) for i in np.flatnonzero(values)}


def everything(tables: Iterable[AtomTable]) -> tuple[tuple[int, ...], ...]:
    """``Answer.final`` of a baseline whose new groups are all wanted."""
    return tuple(tuple(range(len(t.new_groups))) for t in tables)
