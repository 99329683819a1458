"""How the layers of a model are split over pipeline stages and, in an interleaved schedule, over their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class SplitError(ValueError):
    """``pp_split`` that does not come out; the message says what it has: ``31 layers of 32``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Every layer lies in exactly one chunk, and chunk i of ``chunks`` on pipeline stage i % pp."""

    pp_split: tuple[int, ...]  # layers per pipeline stage, length pp
    chunks: tuple[int, ...]  # in model order, length pp x vp; empty where vp is 1

    @classmethod
    def of_chunks(cls, counts: tuple[int, ...], pp: int, vp: int) -> Split:
        return cls(pp_split=tuple(sum(counts[stage::pp]) for stage in range(pp)), chunks=counts if vp > 1 else ())


def spread(written: Sequence[int | None], layers: int, pp: int, vp: int) -> tuple[int, ...]:
    """``pp_split`` as counts of layers: of each pipeline stage, or of each chunk where it names pp x vp.

    One None (``rest``) stands for all stages that are not named, which share the other layers evenly. Raises
    SplitError.
    """
    if None in written:
        return _with_rest(written, layers, pp)
    counts = tuple(n for n in written if n is not None)
    if len(counts) not in (pp, pp * vp):
        wanted = f"pp = {pp}" if vp == 1 else f"pp = {pp} and vp = {vp}: {pp} stages or {pp * vp} chunks"
        raise SplitError(f"{len(counts)} parts for {wanted}")
    if sum(counts) != layers:
        raise SplitError(f"{sum(counts)} layers of {layers}")
    return counts


def _with_rest(written: Sequence[int | None], layers: int, pp: int) -> tuple[int, ...]:
    named = [n for n in written if n is not None]
    if len(written) - len(named) > 1:
        raise SplitError("rest more than once")
    left, stages = layers - sum(named), pp - len(named)
    if stages < 1:
        raise SplitError(f"no stage left for rest: {len(named)} of {pp} are named")
    each, over = divmod(left, stages)
    if over or each < 1:
        raise SplitError(f"{left} layers left for the {stages} stages of rest")
    at = list(written).index(None)
    return (*named[:at], *(each,) * stages, *named[at:])


def even_split(layers: int, parts: int) -> tuple[int, ...]:
    """As even as can be; spare layers go to the middle, away from the embedding and the logits."""
    base, spare = divmod(layers, parts)
    middle = sorted(range(parts), key=lambda i: (abs(2 * i - parts + 1), i))
    return tuple(base + (i in middle[:spare]) for i in range(parts))
