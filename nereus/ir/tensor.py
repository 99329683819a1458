"""Logical tensors: one unsharded tensor of a model, named globally (global layer numbers, true vocabulary)."""

from __future__ import annotations

from dataclasses import dataclass


class CutError(ValueError):
    """A tensor-parallel degree that a dimension does not allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How tensor parallelism cuts a dimension: ``groups`` equal indivisible units (heads, kv heads, ffn columns, rows).

    A degree that divides ``groups`` gives every rank groups / tp of them. Where ``replicate`` is set (kv heads), a
    multiple of ``groups`` gives each rank one whole unit, tp / groups ranks holding the same one.
    """

    dim: int
    groups: int
    replicate: bool = False

    def allows(self, tp: int) -> bool:
        return self.groups % tp == 0 or (self.replicate and tp % self.groups == 0)

    def interval(self, extent: int, tp: int, rank: int) -> tuple[int, int]:
        """Half-open range of the dimension (of size ``extent``) that ``rank`` of ``tp`` holds."""
        if not self.allows(tp):
            raise CutError(f"{self.groups} units cannot be cut over tp={tp}")
        unit = extent // self.groups
        if self.groups % tp == 0:
            per_rank = self.groups // tp
            return rank * per_rank * unit, (rank + 1) * per_rank * unit
        owned = rank * self.groups // tp
        return owned * unit, (owned + 1) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalTensor:
    """``layer`` is the global layer number; None for tensors at the ends of the model, which ``first``/``last`` place.

    A tied embedding has both ``first`` and ``last`` set: one tensor, two pipeline holders.
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut | None = None  # None: replicated over tp
    layer: int | None = None
    first: bool = False
    last: bool = False
    #: Expert number for MoE expert weights, else None.
    expert: int | None = None

    @property
    def numel(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total
