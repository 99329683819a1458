"""The contract of a naming: framework parameter -> segments of logical tensors. What it does not know, it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nereus.ir.arch import Arch
from nereus.ir.fragment import Segment


class UnknownParameter(ValueError):
    """A parameter whose segment map is not known. It is never guessed: see ``docs/frameworks.md``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The coordinates of the process that holds a local parameter. Global numbers: ``layers`` are the global numbers
    of the layers that it holds, in its local order; ``experts`` those of its experts, in its local order."""

    tp: int = 1
    tp_rank: int = 0
    etp: int = 1
    etp_rank: int = 0
    layers: Sequence[int] | None = None  # None: all, numbered globally
    experts: Sequence[int] | None = None  # None: all, in order


class Naming(Protocol):
    """One framework's names for one model. ``head``: lm or value."""

    @property
    def arch(self) -> Arch: ...

    @property
    def head(self) -> str: ...

    def segments(self, parameter: str, shape: Sequence[int], where: Where) -> tuple[Segment, ...]:
        """Segments of the local ``parameter`` of ``shape``. Raises UnknownParameter where the name, or the shape under
        ``where``, is not what this naming knows."""
        ...

    def parameters(self, where: Where) -> dict[str, tuple[int, ...]]:
        """Every parameter that a process at ``where`` holds, with its local shape."""
        ...
