"""Which kernel runs a descriptor table: by the device of its tensors, and by what is installed.

| device | tried in turn |
|---|---|
| cpu | ``native`` (C, built with the system's compiler), ``reference`` |
| cuda (NVIDIA's and AMD's) | ``triton``, ``source`` (CUDA C++ or HIP, built with what there is), ``reference`` |
| any other | ``reference`` |

A kernel is used on a device only after it gave the definition's answer there, once in a process, for a table that has
every type, every conversion and odd strides in it. ``NEREUS_KERNELS=triton`` (or ``source``, or ``reference``) asks for
one on GPUs, and then its absence is an error; ``NEREUS_NATIVE=0`` turns off the one for CPUs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from nereus.kernels import native
from nereus.kernels.reference import Reference
from nereus.kernels.regions import (
    BF16,
    F16,
    F32,
    NUM_GIVEN,
    WIDTHS,
    IntArray,
    Plan,
    check_bases,
    plan,
)

NAMES = ("native", "triton", "source", "reference")


class Kernel(Protocol):
    """What runs tables on one device."""

    @property
    def name(self) -> str: ...

    def launch(self, what: Plan, bases: Sequence[torch.Tensor | None], sums: torch.Tensor | None) -> None:
        """Add the checksums to ``sums``; on a GPU, on torch's current stream. Arguments were checked."""


class KernelsUnavailable(RuntimeError):
    """The kernel that was asked for cannot run on that device; the text says why."""


def run(
    what: Plan | IntArray,
    bases: Sequence[torch.Tensor | None],
    sums: torch.Tensor | None = None,
    *,
    kernel: str | None = None,
) -> None:
    """Do all regions in one launch. ``bases``: contiguous tensors on one device; ``sums``: int64, added to, there too.

    On a GPU the launch is queued on torch's current stream, and ``sums`` are there when the stream has got so far.
    Raises TableError where a region would leave its base, and KernelsUnavailable.
    """
    checked = what if isinstance(what, Plan) else plan(what)
    device = check_bases(checked, bases, sums)
    if len(checked.table):
        choose(device, kernel).launch(checked, bases, sums)


def choose(device: torch.device, name: str | None = None) -> Kernel:
    """The kernel for ``device``; ``name``: that one or none (default: on GPUs what NEREUS_KERNELS says). Raises
    KernelsUnavailable."""
    name = name or (device.type == "cuda" and os.environ.get("NEREUS_KERNELS")) or None
    if name is not None and name not in NAMES:
        raise KernelsUnavailable(f"there is no kernel {name!r}; there are {', '.join(NAMES)}")
    # Whether there is a C compiler is asked anew, so that tests and users can turn it off.
    if device.type == "cpu" and name in (None, "native") and native.load() is not None:
        return native.Native()
    reasons: list[str] = []
    for candidate in (name,) if name else _candidates(device):
        found, reason = _ready(candidate, device)
        if found is not None:
            if reasons and candidate == "reference" and device.type == "cuda":
                _warn_slow(device, "; ".join(reasons))
            return found
        reasons.append(f"{candidate}: {reason}")
    raise KernelsUnavailable(f"no kernel for {device}: {'; '.join(reasons)}")


def _candidates(device: torch.device) -> tuple[str, ...]:
    return ("triton", "source", "reference") if device.type == "cuda" else ("reference",)


@functools.cache
def _ready(name: str, device: torch.device) -> tuple[Kernel | None, str]:
    """The kernel, tried out, or why there is none."""
    try:
        found = _make(name, device)
        if isinstance(found, str):
            return None, found
        wrong = "" if name == "reference" else disagreement(found, device)
    except Exception as error:  # compilers and drivers raise what they like, and another kernel can do the work
        return None, f"{type(error).__name__}: {error}"
    return (None, wrong) if wrong else (found, "")


def _make(name: str, device: torch.device) -> Kernel | str:
    if name == "reference":
        return Reference()
    if name == "native":
        return "it runs on CPUs only" if device.type != "cpu" else "no C compiler, or NEREUS_NATIVE=0"
    if device.type != "cuda":
        return "it runs on GPUs only"
    if name == "source":
        from nereus.kernels.driver import Source

        return Source(device)
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    from nereus.kernels.triton_regions import Triton

    return Triton()


def disagreement(kernel: Kernel, device: torch.device) -> str:
    """What ``kernel`` does otherwise than the definition, "" if nothing."""
    what, source, size = trial()
    answers = []
    for one, where in ((kernel, device), (Reference(), torch.device("cpu"))):
        target = torch.zeros(size, dtype=torch.uint8, device=where)
        sums = torch.arange(what.num_slots, device=where)
        one.launch(what, (source.to(where), target), sums)
        answers.append((target.cpu(), sums.cpu()))
    if not torch.equal(answers[0][0], answers[1][0]):
        return "it writes other bytes than the definition"
    return "" if torch.equal(answers[0][1], answers[1][1]) else "its checksums are not those of the definition"


def trial() -> tuple[Plan, torch.Tensor, int]:
    """A table with every type, conversion and alignment, its source's bytes, and the size of its target."""
    kinds = [(kind, kind) for kind in range(len(WIDTHS))]
    kinds += [(a, b) for a in (F16, BF16, F32) for b in (F16, BF16, F32) if a != b]
    rng = np.random.default_rng(20)
    table, ends = [], [0, 0]
    for number, (kind_in, kind_out) in enumerate(kinds):
        for rows, cols, gap, align in ((1, 5000, 0, 16), (3, 256, 16, 16), (5, 33, 1, 1), (1, 77, 0, 1), (40, 1, 2, 1)):
            begins = []
            for side, kind in enumerate((kind_in, kind_out)):
                step = max(align, int(WIDTHS[kind]))
                begins.append(-(-ends[side] // step) * step // int(WIDTHS[kind]))
                ends[side] = (begins[-1] + rows * (cols + gap)) * int(WIDTHS[kind])
            only_summed = kind_in == kind_out and gap == 2
            where = (0, begins[0], cols + gap, -1 if only_summed else 1, begins[1], cols + gap)
            slot = number % 5 - (0 if only_summed else 1)
            key, start, stride = int(rng.integers(1 << 62)) * 2 + 1, int(rng.integers(1 << 40)), cols + number
            table.append((*where, rows, cols, kind_in, kind_out, slot, key, start, stride))
    source = torch.from_numpy(rng.integers(0, 256, ends[0], dtype=np.uint8))
    return plan(np.array(table, dtype=np.int64).reshape(-1, NUM_GIVEN), tile_bytes=4096), source, ends[1]


@functools.cache
def _warn_slow(device: torch.device, reasons: str) -> None:
    warnings.warn(f"tables on {device} run region by region in torch, slowly: {reasons}", stacklevel=3)
