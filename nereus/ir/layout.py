"""Layouts: which coordinate holds which part of a model, and how a stage's devices map to coordinates.

A rank's coordinate is (pp, tp), and for models with experts (pp, tp, ep, etp): the expert axes are carved out of the
ranks of one pipeline stage, so they may cross tp, cp and dp. What a rank holds of a slot follows in two steps: the
coordinate chooses a box of each logical tensor; then, where the slot is sharded over data parallelism, its *share*
chooses a range of that box. Shards run over dp x cp in the order of ranks: cp ranks hold the same weights.

- ``none``   every rank of dp x cp holds the box whole,
- ``flat``   the boxes of a coordinate laid end to end in model order, padded to a multiple of the shard count and cut
  into equal ranges (ZeRO-1/2, Megatron's distributed optimizer); experts in a buffer of their own, over expert dp,
- ``param``  the same per tensor (DeepSpeed ZeRO-3),
- ``dim0``   rows of each local box in chunks of ceil(rows / shards), the last ones shorter or empty (FSDP2,
  torch.chunk).

``Layout`` follows from a plan. ``DescribedLayout`` (``nereus.ir.described``) is read from a framework's objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nereus.ir.cluster import Device
from nereus.ir.plan import Stage
from nereus.ir.tensor import Cut, LogicalTensor

if TYPE_CHECKING:
    from nereus.ir.described import DescribedLayout

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SHARD_NONE, SHARD_FLAT, SHARD_PARAM, SHARD_DIM0 = "none", "flat", "param", "dim0"

#: Megatron pads the vocabulary to a multiple of this times tp (``make-vocab-size-divisible-by``).
MEGATRON_VOCAB_MULTIPLE = 128
#: vLLM and SGLang pad it to a multiple of this, whatever tp is.
ENGINE_VOCAB_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one copy of a model lies on its ranks. Equal layouts place equal bytes at equal ranks."""

    tp: int
    pp: int
    dp: int
    cp: int
    order: str
    pp_split: tuple[int, ...]  # layers per pipeline stage
    num_shards: int  # ranks of a shard group, out of dp x cp
    weight_shards: str  # rule for the weight slot
    optimizer_shards: str  # rule for every other slot
    ep: int = 1
    etp: int = 0  # 0: as tp
    chunks: tuple[int, ...] = ()  # ``Stage.chunks``
    raw_rows: bool = False  # fused matrices are cut by raw rows (Megatron)
    vocab_multiple: int = 0  # 0: no padding

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def splits_experts(self) -> bool:
        """Whether experts have coordinates and shard groups of their own."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def num_expert_shards(self) -> int:
        """Size of the shard groups of expert tensors: under ZeRO all expert-dp ranks, which may be more than dp x cp
        (and that may be 1); under FSDP as many as for the others, where there are so many."""
        if not self.splits_experts or self.optimizer_shards == SHARD_NONE:
            return self.num_shards
        if self.optimizer_shards == SHARD_DIM0:
            return min(self.num_shards, self.expert_dp)
        return self.expert_dp

    @property
    def num_coords(self) -> int:
        return len(_coordinates(self).table)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def shard_rule(self, slot: str) -> str:
        return self.weight_shards if slot == "weight" else self.optimizer_shards

    def pipeline_stage_of_layer(self, layer: int) -> int:
        """Raises ValueError for a layer that no stage has: every layer lies on exactly one."""
        bound = 0
        for chunk, count in enumerate(self.chunks or self.pp_split):
            bound += count
            if layer < bound:
                return chunk % self.pp
        raise ValueError(f"layer {layer} lies on no pipeline stage of {self.pp_split}")

    def pipeline_stages(self, tensor: LogicalTensor) -> tuple[int, ...]:
        """Pipeline stages that hold ``tensor``: one, or two for a tied embedding on more than one stage."""
        if tensor.layer is not None:
            return (self.pipeline_stage_of_layer(tensor.layer),)
        ends = ({0} if tensor.first else set()) | ({self.pp - 1} if tensor.last else set())
        return tuple(sorted(ends))

    def interval(self, cut: Cut, extent: int, degree: int, rank: int) -> tuple[int, int]:
        """Half-open range of a cut dimension that tensor-parallel ``rank`` of ``degree`` holds. Raises CutError."""
        if cut.vocab and self.vocab_multiple:
            return cut.padded_interval(extent, self.vocab_multiple, degree, rank)
        if cut.fused is not None and self.raw_rows:
            return cut.raw_interval(degree, rank)
        return cut.interval(extent, degree, rank)

    def coordinates(self) -> dict[str, IntArray]:
        """Axis name -> coordinate of every rank, from ``order`` (fastest axis first)."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp}
        rank = np.arange(self.num_ranks, dtype=np.int64)
        coords: dict[str, IntArray] = {}
        for axis in self.order.split("-"):
            if axis not in sizes:  # ep: carved out of tp x cp x dp, does not move dense tensors
                continue
            coords[axis] = rank % sizes[axis]
            rank = rank // sizes[axis]
        return coords

    def expert_coordinates(self) -> dict[str, IntArray]:
        """``etp``, ``ep`` and ``edp`` coordinate of every rank.

        The ranks of a pipeline stage, counted in ``order``, are cut anew: etp takes the place of tp, ep comes where
        the order names it (before dp if it does not), expert dp takes the place of dp. That is Megatron's rule.
        """
        coords = self.coordinates()
        within = np.zeros(self.num_ranks, dtype=np.int64)
        size = 1
        axes = [axis for axis in self.order.split("-") if axis in ("tp", "cp", "dp")]
        for axis in axes:
            within += coords[axis] * size
            size *= {"tp": self.tp, "cp": self.cp, "dp": self.dp}[axis]
        sizes = {"tp": self.expert_tp, "ep": self.ep, "dp": self.expert_dp}
        names = {"tp": "etp", "ep": "ep", "dp": "edp"}
        order = [axis for axis in self.order.split("-") if axis in sizes]
        if "ep" not in order:
            order.insert(order.index("dp"), "ep")
        found: dict[str, IntArray] = {}
        for axis in order:
            found[names[axis]] = within % sizes[axis]
            within = within // sizes[axis]
        return found

    def coord_table(self) -> IntArray:
        """(pp, tp, ep, etp) of every coordinate that some rank has, ``[num_coords, 4]``, ascending."""
        return _coordinates(self).table

    def coord_of_rank(self) -> IntArray:
        """Number in ``coord_table`` of every rank's coordinate; without experts that is ``pp * tp_degree + tp``."""
        return _coordinates(self).of_rank

    def shard_of_rank(self) -> IntArray:
        """Number of every rank's share: its place in its shard group (the ranks of a group follow each other along
        dp x cp, counted in ``order``), and, where experts have groups of their own, ``dense + num_shards * expert``."""
        coords = self.coordinates()
        axes = sorted(("cp", "dp"), key=self.order.split("-").index)
        size = {"cp": self.cp, "dp": self.dp}[axes[0]]
        dense: IntArray = (coords[axes[0]] + coords[axes[1]] * size) % self.num_shards
        if not self.splits_experts:
            return dense
        return dense + self.num_shards * (self.expert_coordinates()["edp"] % self.num_expert_shards)


@dataclass(frozen=True, slots=True, eq=False)
class _Coordinates:
    table: IntArray
    of_rank: IntArray


@lru_cache(maxsize=256)
def _coordinates(layout: Layout) -> _Coordinates:
    coords = layout.coordinates()
    if layout.splits_experts:
        experts = layout.expert_coordinates()
        columns = (coords["pp"], coords["tp"], experts["ep"], experts["etp"])
    else:
        columns = (coords["pp"], coords["tp"], np.zeros_like(coords["pp"]), coords["tp"])
    table, of_rank = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return _Coordinates(table, of_rank.reshape(-1).astype(np.int64))


def layout_of(stage: Stage, *, experts: bool | None = None) -> Layout:
    """``experts``: whether the stage's model has any; None: as its degrees suggest (enough to compare two layouts)."""
    weight, optimizer = SHARD_NONE, SHARD_NONE
    if stage.fsdp:
        weight = optimizer = SHARD_DIM0
    elif stage.zero >= 3:
        weight = optimizer = SHARD_PARAM
    elif stage.zero:
        optimizer = SHARD_FLAT
    # An engine without expert parallelism cuts experts like everything else.
    like_tp = stage.kind == "generate" and stage.ep == 1 and stage.etp == 1
    if not (stage.ep > 1 or stage.etp > 1 if experts is None else experts):
        like_tp = True
    vocab = 0
    if stage.backend == "megatron":
        vocab = MEGATRON_VOCAB_MULTIPLE * stage.tp
    elif stage.engine in ("vllm", "sglang"):
        vocab = ENGINE_VOCAB_MULTIPLE
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
        ep=stage.ep,
        # 0 where it is tp, so that equal layouts are equal.
        etp=0 if stage.etp == stage.tp or like_tp else stage.etp,
        chunks=stage.chunks,
        raw_rows=stage.backend == "megatron",
        vocab_multiple=vocab,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLayout:
    """A layout on devices: rank r lies on ``ranks[r]``."""

    layout: Layout | DescribedLayout
    ranks: tuple[Device, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.layout.num_ranks:
            raise ValueError(f"{len(self.ranks)} devices for {self.layout.num_ranks} ranks")
