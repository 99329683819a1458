"""One training run as the cost model sees it: shapes, batch, layout and machine, and what was measured of it.

A run comes from a row of measurements (``rows.py``) or from a stage of a plan. ``columns`` turns many of them into
arrays, because a search asks for thousands at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

#: How weights, gradients and optimizer are cut over the data-parallel ranks, least first.
SHARDING = ("none", "optimizer", "gradients", "full")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Data-sheet rates of one GPU and of its links, each per direction."""

    gpu: str  # name in the hardware table
    #: Dense matrix multiplication in the run's number format and in 16 bits.
    flops_per_s: float
    flops16_per_s: float
    hbm_bytes_per_s: float
    intra_bytes_per_s: float
    nic_bytes_per_s: float  # this GPU's share of its node's
    domain: int  # GPUs that the fast links join
    mem_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``params``: all of them; ``expert_params``: those in routed experts. Sequences count in tokens.

    ``labels``: what it has in common with other runs, coarse to fine (``labels.py``). ``micro_batch`` may be a
    fraction where a micro-batch is less than one sequence a rank.
    """

    machine: Machine
    labels: tuple[str, ...]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    mlp_matrices: int  # 3 where the MLP is gated, else 2
    vocab: int
    params: float
    expert_params: float
    experts_per_token: int  # 1 for a dense model
    shared_experts: int
    seq_len: int
    global_batch: float
    micro_batch: float
    gpus: int
    tp: int
    pp: int
    dp: float
    cp: int
    vp: int
    ep: int
    recompute: str
    sharding: str
    gradient_bytes: int  # a parameter
    flash: bool  # attention never writes its scores out
    tied: bool = False  # one table embeds tokens and makes logits
    #: Ranks of a tensor-parallel group keep their own parts of what lies between its matrices.
    sequence_parallel: bool = True
    #: The peak was read on the last stage of the pipeline, else on the fullest GPU.
    read_last: bool = False
    forward_only: bool = False  # log-probabilities, rewards, values: no backward pass, no update
    #: Seconds; GB as the row counts them. None where they were not measured.
    step_time_s: float | None = None
    peak_mem_gb: float | None = None
    memory_labels: tuple[str, ...] = ()
    #: What this kind of reading counts beside tensors (context, communicators), about.
    constant_bytes: float = 1e9
    #: Bytes in one GB of ``peak_mem_gb``.
    gb_bytes: float = 1e9
    out_of_memory: bool = False

    @property
    def num_microbatches(self) -> float:
        return max(self.global_batch / (self.dp * self.micro_batch), 1.0)


@dataclass(frozen=True, slots=True)
class Columns:
    """The numbers of many runs, one array each."""

    layers: Floats
    hidden: Floats
    heads: Floats
    kv_heads: Floats
    ffn: Floats
    mlp_matrices: Floats
    vocab: Floats
    params: Floats
    expert_params: Floats
    experts_per_token: Floats
    shared_experts: Floats
    seq_len: Floats
    global_batch: Floats
    micro_batch: Floats
    gpus: Floats
    tp: Floats
    pp: Floats
    dp: Floats
    cp: Floats
    vp: Floats
    ep: Floats
    gradient_bytes: Floats
    flash: Floats
    tied: Floats
    sequence_parallel: Floats
    read_last: Floats
    forward_only: Floats
    constant_bytes: Floats
    num_microbatches: Floats
    recompute: Floats  # place in RECOMPUTE
    sharding: Floats  # place in SHARDING
    flops_per_s: Floats
    flops16_per_s: Floats
    hbm_bytes_per_s: Floats
    intra_bytes_per_s: Floats
    nic_bytes_per_s: Floats
    domain: Floats

    def wide(self, num: int) -> dict[str, Floats]:
        """By name, of one run: as if there were ``num`` like it."""
        return {field.name: np.broadcast_to(getattr(self, field.name), num) for field in fields(self)}


_OF_MACHINE = {field.name for field in fields(Machine)}
_PLACES = {"recompute": RECOMPUTE, "sharding": SHARDING}


def columns(runs: Sequence[Run]) -> Columns:
    def column(name: str) -> Floats:
        if name in _PLACES:
            return np.array([_PLACES[name].index(getattr(run, name)) for run in runs], float)
        if name in _OF_MACHINE:
            return np.array([getattr(run.machine, name) for run in runs], float)
        return np.array([getattr(run, name) for run in runs], float)

    return Columns(*(column(field.name) for field in fields(Columns)))
