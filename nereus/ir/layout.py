"""Layouts: which coordinate holds which part of a model, and how a stage's devices map to coordinates.

A coordinate is (tp, pp, dp, cp). What a rank holds of a slot follows in two steps: (tp, pp) chooses a box of each
logical tensor (``TensorParallel x Pipeline``); then, where the slot is sharded over data parallelism, ``Shards``
chooses a range of that box:

- ``none``   every dp rank holds the box whole,
- ``flat``   the boxes of a (tp, pp) coordinate laid end to end in model order, padded to a multiple of the shard
  count and
             cut into equal ranges (Megatron's distributed optimizer, DeepSpeed ZeRO-1/2),
- ``param``  the same per tensor (DeepSpeed ZeRO-3),
- ``dim0``   rows of each local box in chunks of ceil(rows / shards), the last ones shorter or empty (FSDP2,
  torch.chunk).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereus.ir.cluster import Device
from nereus.ir.plan import Stage
from nereus.ir.tensor import LogicalTensor

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SHARD_NONE, SHARD_FLAT, SHARD_PARAM, SHARD_DIM0 = "none", "flat", "param", "dim0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one copy of a model lies on its ranks. Equal layouts place equal bytes at equal ranks."""

    tp: int
    pp: int
    dp: int
    cp: int
    order: str
    pp_split: tuple[int, ...]  # layers per pipeline stage
    num_shards: int  # shard-group size along dp
    weight_shards: str  # rule for the weight slot
    optimizer_shards: str  # rule for every other slot

    @property
    def num_coords(self) -> int:
        """(tp, pp) coordinates."""
        return self.tp * self.pp

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def shard_rule(self, slot: str) -> str:
        return self.weight_shards if slot == "weight" else self.optimizer_shards

    def pipeline_stage_of_layer(self, layer: int) -> int:
        bound = 0
        for stage, count in enumerate(self.pp_split):
            bound += count
            if layer < bound:
                return stage
        raise ValueError(f"layer {layer} lies on no pipeline stage of {self.pp_split}")

    def pipeline_stages(self, tensor: LogicalTensor) -> tuple[int, ...]:
        """Pipeline stages that hold ``tensor``: one, or two for a tied embedding on more than one stage."""
        if tensor.layer is not None:
            return (self.pipeline_stage_of_layer(tensor.layer),)
        ends = ({0} if tensor.first else set()) | ({self.pp - 1} if tensor.last else set())
        return tuple(sorted(ends))

    def coordinates(self) -> dict[str, IntArray]:
        """Axis name -> coordinate of every rank, from ``order`` (fastest axis first)."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp}
        rank = np.arange(self.num_ranks, dtype=np.int64)
        coords: dict[str, IntArray] = {}
        for axis in self.order.split("-"):
            if axis not in sizes:  # ep: carved out of cp x dp, does not move dense tensors
                continue
            coords[axis] = rank % sizes[axis]
            rank = rank // sizes[axis]
        return coords

    def coord_of_rank(self) -> IntArray:
        """(tp, pp) coordinate number ``pp * tp_degree + tp`` of every rank."""
        coords = self.coordinates()
        return coords["pp"] * self.tp + coords["tp"]

    def shard_of_rank(self) -> IntArray:
        """Index in the shard group of every rank: the ranks of a group follow each other along dp."""
        return self.coordinates()["dp"] % self.num_shards


def layout_of(stage: Stage) -> Layout:
    weight, optimizer = SHARD_NONE, SHARD_NONE
    if stage.fsdp:
        weight = optimizer = SHARD_DIM0
    elif stage.zero >= 3:
        weight = optimizer = SHARD_PARAM
    elif stage.zero:
        optimizer = SHARD_FLAT
    return Layout(
        tp=stage.tp,
        pp=stage.pp,
        dp=stage.dp,
        cp=stage.cp,
        order=stage.order,
        pp_split=stage.pp_split,
        num_shards=stage.num_shards,
        weight_shards=weight,
        optimizer_shards=optimizer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLayout:
    """A layout on devices: rank r lies on ``ranks[r]``."""

    layout: Layout
    ranks: tuple[Device, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.layout.num_ranks:
            raise ValueError(f"{len(self.ranks)} devices for {self.layout.num_ranks} ranks")
