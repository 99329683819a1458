"""What the devices of this job are: processes of this machine as measured, or as slow as they are made.

A controller that predicts needs a data sheet. ``measured`` makes one of the processor that is there. Steps of a few
hundredths of a second on a machine that others use as well say little, so a demonstration *emulates* slower devices:
every forward pass takes at least as long as ``Pace`` says, asleep where the processor was faster. What is computed is
the same, to the last bit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log2

import torch

from nereus.ir.cluster import GpuType
from nereus.ir.plan import Plan
from nereus.models.tensors import num_params

_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of an emulated device: ``read_s`` to read all weights once, as each decoded token does; ``token_s`` to
    compute a token of one sequence, backward passes twice that again; ``hop_s`` for one sum over two ranks. An update
    reads and writes what the optimizer keeps, 14 times the weights.

    ``slow``: a stage that takes ``times`` as long in every layout with tensor parallelism: a planted slowdown, which no
    data sheet tells."""

    read_s: float = 0.08
    token_s: float = 0.0002
    hop_s: float = 0.002
    slow: str = ""
    times: float = 6.0

    def forward_s(self, stage: str, *, tokens: int, tp: int, layers: int, decodes: bool, learns: bool) -> float:
        """One forward pass of ``tokens`` tokens on one of ``tp`` ranks (with its backward pass where it ``learns``)."""
        passes = 3 if learns else 1
        seconds = passes * tokens * self.token_s / tp + (self.read_s / tp if decodes else 0.0)
        return self._planted(stage, tp) * (seconds + passes * 2 * layers * self.hop_s * log2(tp))

    def update_s(self, stage: str, *, tp: int) -> float:
        """One step of the optimizer."""
        return self._planted(stage, tp) * 14 * self.read_s / tp

    def _planted(self, stage: str, tp: int) -> float:
        return self.times if stage == self.slow and tp > 1 else 1.0


def emulated(plan: Plan, pace: Pace) -> GpuType:
    """The data sheet of such a device."""
    actor = plan.model("actor")
    params = num_params(actor.arch, actor.head)
    # Weights count as two bytes and a token as two operations for each. What moves between processes is not slowed.
    return _type("emulated", 2 * params / pace.token_s, 2 * params / pace.read_s, link=_copied_bytes_per_s() / 2)


def measured(plan: Plan) -> GpuType:
    """This machine's rates at matrices as small as the job's: one process, one core."""
    arch, rows = plan.model("actor").arch, plan.stages[0].micro_batch * plan.workload.seq_len
    left, right = torch.rand(rows, arch.hidden), torch.rand(arch.hidden, arch.ffn)
    copied, flops = _copied_bytes_per_s(), 2 * rows * arch.hidden * arch.ffn
    return _type("measured", flops / _least_s(lambda: left @ right), copied, link=copied / 2)


def on(plan: Plan, gpu: GpuType) -> Plan:
    """The plan on a cluster of such devices."""
    nodes = tuple(
        replace(node, gpu=gpu, nic_bytes_per_s=node.num_gpus * gpu.default_nic_bytes_per_s)
        for node in plan.cluster.nodes
    )
    return replace(plan, cluster=replace(plan.cluster, nodes=nodes))


def _copied_bytes_per_s() -> float:
    """Read and written together."""
    block = torch.rand(1 << 20)
    return 2 * block.nbytes / _least_s(block.clone)


def _type(id: str, flops_per_s: float, hbm_bytes_per_s: float, *, link: float) -> GpuType:
    return GpuType(
        id=id,
        name=f"{id} process",
        vendor="",
        # Each process may take all that the machine has.
        mem_gb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
        bf16_tflops=flops_per_s / 1e12,
        hbm_bytes_per_s=hbm_bytes_per_s,
        intra_bytes_per_s=link,
        intra_peer_bytes_per_s=link,
        pcie_bytes_per_s=link,
        default_nic_bytes_per_s=link,
    )


def _least_s(work: Callable[[], object]) -> float:
    def once() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return min(once() for _ in range(_REPEATS))
