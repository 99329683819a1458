"""The state of a boundary, as it was: live objects (clean since then), or copies of them in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nereus.runtime.adapters.base import Adapter, Binding


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One stage's part in this process."""

    binding: Binding
    job_state: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """``version``: boundaries passed. ``loop``: the training loop's state there. ``ward``: what this process keeps of
    one that is lost (``peers.py``)."""

    version: int
    stages: dict[str, Held] = field(default_factory=dict)
    ward: dict[str, Held] = field(default_factory=dict)
    loop: Mapping[str, Any] = field(default_factory=dict)

    def held(self, stage: str) -> tuple[Held, ...]:
        return tuple(held[stage] for held in (self.stages, self.ward) if stage in held)

    @property
    def num_bytes(self) -> int:
        return sum(m.numel() * m.element_size() for held in self.stages.values() for m in held.binding.memory)


def live(adapters: Mapping[str, Adapter], loop: Mapping[str, Any], version: int) -> Snapshot:
    """The objects themselves."""
    held = {name: Held(binding=a.bind(), job_state=a.job_state()) for name, a in adapters.items()}
    return Snapshot(version=version, stages=held, loop=loop)


def copied(adapters: Mapping[str, Adapter], loop: Mapping[str, Any], version: int) -> Snapshot:
    """Copies in host memory: training may write on."""
    now = live(adapters, loop, version)
    stages = {
        name: Held(
            binding=Binding(h.binding.state, tuple(m.detach().to("cpu", copy=True) for m in h.binding.memory)),
            job_state=h.job_state,
        )
        for name, h in now.stages.items()
    }
    return Snapshot(version=version, stages=stages, loop=loop)
