"""GPU types and nodes -> the rates that formulas are given."""

from __future__ import annotations

from nereus.ir.cluster import GpuType, Node
from nereus.ir.units import TB
from nereus.models.hardware import fast_domain, fp8_tflops
from nereus.planner.runs import Machine

#: fp4 multiplies in at least one and a half times the rate of fp8 on the parts that have it.
_FP4_OVER_FP8 = 1.5


def machine_of(gpu: GpuType, format: str, node: Node | None = None) -> Machine:
    """``format``: what matrices are multiplied in (``labels.number_format``). ``node``: whose NIC it shares; without
    one, the data sheet's usual."""
    flops16 = gpu.bf16_tflops * TB
    fp8 = (fp8_tflops(gpu.id) or gpu.bf16_tflops) * TB
    return Machine(
        gpu=gpu.name,
        flops_per_s={"16": flops16, "fp8": fp8, "fp4": fp8 * _FP4_OVER_FP8}[format],
        flops16_per_s=flops16,
        hbm_bytes_per_s=gpu.hbm_bytes_per_s,
        intra_bytes_per_s=gpu.intra_bytes_per_s,
        nic_bytes_per_s=gpu.default_nic_bytes_per_s if node is None else node.nic_bytes_per_s / node.num_gpus,
        domain=fast_domain(gpu.id) if node is None else max(node.num_gpus, fast_domain(gpu.id)),
        mem_gb=gpu.mem_gb,
    )
