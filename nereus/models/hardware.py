"""GPU data sheets: one ``GpuType`` per row of ``data/hardware.csv`` (the ids are its first column)."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

from nereus.ir.cluster import GpuType
from nereus.ir.units import GB, TB

# Where a data sheet leaves a cell empty the plan still needs a number. Each default errs on the slow side: predicted
# stops come out too long, never too short, until the run is calibrated.
#: PCIe 4 x16. The rows without a host link (GH200, H20, GB200, GB300) are all parts with PCIe 5 or NVLink-C2C.
_PCIE_DEFAULT_GB_S = 31.0
#: The slowest memory of a Hopper row (H100 PCIe); only the H20 row lacks a number.
_HBM_DEFAULT_TB_S = 2.0
#: bf16 of H100 PCIe, the slowest H100 row; only the 96 GB HBM2e part ("between NVL and SXM") lacks a number.
_BF16_DEFAULT_TFLOPS = 756.0

#: GPUs of a node where the data sheet names no larger domain.
_NODE_GPUS = 8
_DOMAIN = re.compile(r"(\d+)-GPU domain")
_LEADING_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)")


def gpu_ids() -> tuple[str, ...]:
    """Ids that a plan may write in quotes, in the order of the table."""
    return tuple(_table())


def gpu_type(id: str) -> GpuType:
    """Raises KeyError for an id that is not in the table."""
    return _table()[id]


def fp8_tflops(id: str) -> float | None:
    """Dense; None where the part has no fp8 or its data sheet gives no number."""
    row = _rows().get(id)  # a machine that was measured is in no table
    return _number(row["fp8_dense_tflops"], 0.0) or None if row is not None else None


def fast_domain(id: str) -> int:
    """GPUs that the intra-node links join: a node's, or those of a rack-scale domain."""
    row = _rows().get(id)
    match = _DOMAIN.search(row["intra_link"]) if row is not None else None
    return int(match.group(1)) if match else _NODE_GPUS


@cache
def _table() -> Mapping[str, GpuType]:
    return {id: _from_row(row) for id, row in _rows().items()}


@cache
def _rows() -> Mapping[str, Mapping[str, str]]:
    text = (resources.files("nereus.models") / "data" / "hardware.csv").read_text(encoding="utf-8")
    return {row["id"]: row for row in csv.DictReader(text.splitlines())}


def _from_row(row: Mapping[str, str]) -> GpuType:
    pcie = _number(row["pcie_uni_gb_s"], _PCIE_DEFAULT_GB_S)
    # An empty link cell (A800, H20) falls back to the host link, which every part has and peers can always use.
    intra = _number(row["intra_uni_gb_s_all_peers"], pcie)
    return GpuType(
        id=row["id"],
        name=row["gpu"],
        vendor=row["vendor"],
        mem_gb=float(row["mem_gb"]),
        # "125 (fp16 only)": 16-bit arithmetic of that part, whatever the format.
        bf16_tflops=_number(row["bf16_dense_tflops"], _BF16_DEFAULT_TFLOPS),
        hbm_bytes_per_s=_number(row["hbm_tb_s"], _HBM_DEFAULT_TB_S) * TB,
        intra_bytes_per_s=intra * GB,
        # "25-50" (V100: one or two links to a peer) counts as the slower one.
        intra_peer_bytes_per_s=_number(row["intra_uni_gb_s_per_peer"], intra) * GB,
        pcie_bytes_per_s=pcie * GB,
        default_nic_bytes_per_s=float(row["default_nic_gb_s_per_gpu"]) * GB,
    )


def _number(cell: str, default: float) -> float:
    """The number a cell starts with, or ``default`` where it starts with none."""
    match = _LEADING_NUMBER.match(cell)
    return float(match.group(1)) if match else default
