"""Logical tensors: one unsharded tensor of a model, named globally (global layer numbers, true vocabulary)."""

from __future__ import annotations

from collections.abc import Sequence
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
    #: The dimension is the vocabulary: layouts that pad it cut the padded rows evenly (``Layout.vocab_multiple``).
    vocab: bool = False
    #: Rows ``lo .. hi`` of every ``period`` rows of a fused matrix are this tensor's (Megatron's grouped q..q k v):
    #: layouts with ``Layout.raw_rows`` cut the fused rows evenly, wherever that falls.
    fused: tuple[int, int, int, int] | None = None  # lo, hi, period, number of periods

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

    def raw_interval(self, tp: int, rank: int) -> tuple[int, int]:
        """Rows of this tensor among rows ``rank / tp .. (rank + 1) / tp`` of its fused matrix; maybe none."""
        assert self.fused is not None
        lo, hi, period, count = self.fused
        total = count * period
        if total % tp:
            raise CutError(f"{total} fused rows cannot be cut over tp={tp}")

        def before(row: int) -> int:
            return row // period * (hi - lo) + min(max(row % period - lo, 0), hi - lo)

        return before(rank * total // tp), before((rank + 1) * total // tp)

    def padded_interval(self, extent: int, multiple: int, tp: int, rank: int) -> tuple[int, int]:
        """True rows of ``rank`` where ``extent`` rows are padded to a multiple of ``multiple``, then cut evenly."""
        padded = -(-extent // multiple) * multiple
        if padded % tp:
            raise CutError(f"{extent} rows padded to {padded} cannot be cut over tp={tp}")
        size = padded // tp
        return min(rank * size, extent), min((rank + 1) * size, extent)


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
    #: False: it has a weight only, no optimizer state (buffers, the frozen base under an adapter).
    trainable: bool = True

    @property
    def numel(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, cols) of a tensor seen as a matrix: dim 0 by everything else; a vector is n x 1, a scalar 1 x 1."""
    cols = 1
    for extent in shape[1:]:
        cols *= extent
    return (shape[0] if shape else 1), cols
