"""A schedule as the simulator sees it: operations of participants on ports, memory spaces and devices.

Every planner under comparison, ours and the baselines, is turned into a ``Job``; the engine knows nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

#: Ports of one operation: device out, device in, NIC out, NIC in; -1 where it passes none.
PORTS_PER_OP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """``port_bytes_per_s``: rate of each port. ``space_base_bytes``: what lies in a memory space at the start and
    stays (contexts, kept storages, staging); ``space_capacity_bytes``: what it holds at most. ``num_devices``: devices
    that one owner at a time may run on."""

    port_bytes_per_s: FloatArray
    space_base_bytes: IntArray
    space_capacity_bytes: IntArray
    num_devices: int
    #: Devices that somebody owns at the start; an operation that ``gives`` such a device makes it free.
    owned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Columnar, one row an operation.

    An operation starts when all that ``edges`` put before it have finished and, in order: it ``takes`` its device (-1:
    none), which must be free; it acquires ``acquired`` bytes of ``space``, which must be free where ``blocking``. It
    lasts ``fixed_s`` and then until ``num_bytes`` have passed its ports, which it shares with others. When it
    finishes, it releases ``released`` bytes of ``space`` and ``gives`` its device.

    ``blocking``: an operation waits for memory that is not there (independent migrations); otherwise it goes on and an
    overflow is recorded: what a schedule promised is judged, not helped.
    """

    resources: Resources
    name: tuple[str, ...]  # for traces and error texts
    fixed_s: FloatArray
    num_bytes: IntArray
    ports: IntArray  # [ops, PORTS_PER_OP]
    space: IntArray
    acquired: IntArray
    released: IntArray
    takes: IntArray
    gives: IntArray
    edges: IntArray  # [edges, 2]: before, after
    blocking: bool = False
    #: [ops, PORTS_PER_OP]: how much of a port's rate one byte per second takes; 1 where None. (A byte that enters a
    #: GPU over PCIe takes more of its port than one over NVLink.)
    weights: FloatArray | None = None

    @property
    def num_ops(self) -> int:
        return len(self.fixed_s)
