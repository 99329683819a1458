"""Who owns a job's processes: what the controller (or a launching script) needs of them, whoever that is.

A provider lives in one process, which holds no part of any model. It owes its job one thing beyond these methods: that
the end of a process, however it came, is written into the record at once (``report_loss``). So the survivors hear of it
from the store and need neither the provider nor the controller for it; there is no other way for events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from nereus.ir.cluster import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node that is there now. ``name``: as plans call it; ``devices``: those on which it could run processes;
    ``leaves_in_s``: seconds until it is taken away, where that was announced."""

    name: str
    address: str
    devices: tuple[Device, ...]
    leaves_in_s: float | None = None


class ProcessProvider(Protocol):
    """The processes of one job; each runs the same function: ``function(store=..., device=..., spawn=..., **args)``,
    with ``part=...`` too where a device has several.

    ``name``: of the job; ``store``: torch's, which outlives every process of the job. Any thread may call any method.
    """

    @property
    def name(self) -> str: ...

    @property
    def store(self) -> Any: ...

    def inventory(self) -> tuple[Machine, ...]:
        """In the order of plans: by node, then by device. Machines come and go between two calls."""
        ...

    def spawn(self, device: Device, part: str = "") -> object:
        """Start the process of ``device`` (that of ``part``); returns once it runs. Raises Fault (CANNOT_START)."""
        ...

    def retire(self, device: Device) -> None:
        """End the processes of ``device``, if there are any, and give back what was held for them."""
        ...

    def close(self) -> None:
        """End all of them."""
        ...
