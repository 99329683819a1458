"""Which parts of a slot lie in host memory where a plan says ``@host(share)``.

The rule is that of Megatron's HybridDeviceOptimizer (``_get_sub_optimizer_param_groups``): a rank walks what it holds,
parameter by parameter in the optimizer's order, and gives whole parts to the host for as long as those there are fewer
elements than ``share`` of all that it holds. So host memory has at least the share, and less than one part more. Here a
parameter is a logical tensor and the order is the model's; experts with shard groups of their own have an optimizer,
and so a walk, of their own. What a live optimizer really chose, its adapter reads (``DescribedLayout.host``).
"""

from __future__ import annotations

from math import ceil

import numpy as np

from nereus.ir.layout import BoolArray, IntArray


def in_host(numel: IntArray, share: float, apart: BoolArray | None = None) -> BoolArray:
    """``numel``: elements ``[shares, tensors]`` of each part; empty ones lie nowhere (False). ``apart``: tensors that
    are walked for themselves."""
    if apart is not None and apart.any():
        own, others = (in_host(np.where(mask, numel, 0), share) for mask in (apart, ~apart))
        return own | others
    before = np.cumsum(numel, axis=-1) - numel
    mask: BoolArray = (before < numel.sum(axis=-1, keepdims=True) * share) & (numel > 0)
    return mask


def least_in_host(total: int, share: float) -> int:
    """Elements in host memory at least, in whatever order a rank with ``total`` of them walks its parts."""
    return ceil(total * share)


def most_in_host(total: int, share: float, largest: int) -> int:
    """At most: the walk ends with a part that begins below the share. ``largest``: elements of a part."""
    return min(total, max(0, ceil(total * share) - 1 + largest))
