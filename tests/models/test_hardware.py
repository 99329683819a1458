"""The data-sheet table: every row usable, empty cells filled on the slow side."""

from __future__ import annotations

import pytest

from nereus.models.hardware import gpu_ids, gpu_type


def test_a_full_row() -> None:
    gpu = gpu_type("h100-sxm-80gb")
    assert (gpu.mem_gb, gpu.capacity_bytes, gpu.bf16_tflops) == (80, 72_000_000_000, 989)
    assert (gpu.intra_bytes_per_s, gpu.pcie_bytes_per_s, gpu.default_nic_bytes_per_s) == (450e9, 63e9, 50e9)


def test_every_row_has_positive_numbers() -> None:
    assert len(gpu_ids()) == len(set(gpu_ids())) == 22
    for gpu in map(gpu_type, gpu_ids()):
        rates = (gpu.bf16_tflops, gpu.hbm_bytes_per_s, gpu.pcie_bytes_per_s, gpu.default_nic_bytes_per_s)
        assert min(gpu.mem_gb, *rates) > 0
        assert 0 < gpu.intra_peer_bytes_per_s <= gpu.intra_bytes_per_s


def test_text_ranges_and_empty_cells() -> None:
    volta = gpu_type("v100-sxm-32gb")
    assert (volta.bf16_tflops, volta.intra_peer_bytes_per_s) == (125, 25e9)
    assert gpu_type("h100-sxm-96gb").bf16_tflops < gpu_type("h100-sxm-80gb").bf16_tflops
    h20 = gpu_type("h20-96gb")
    assert h20.intra_bytes_per_s == h20.pcie_bytes_per_s == 31e9


def test_unknown_id() -> None:
    with pytest.raises(KeyError):
        gpu_type("h1000")
