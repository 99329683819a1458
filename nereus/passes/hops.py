"""A hop: elements of a flow on their way from one place to the next."""

from __future__ import annotations

from typing import NamedTuple


class Hop(NamedTuple):
    """Elements ``lo..hi`` of flow ``atom`` go from ``src`` to ``dst``; ``parent``: the earlier hop (its position in the
    list) that brought at least them to ``src``, -1 where ``src`` holds them."""

    atom: int
    lo: int
    hi: int
    src: int
    dst: int
    parent: int
