"""GPUs through the C interfaces of NVML and ROCm SMI (libraries built here answer as a node's would), Ray's nodes, and
the cluster block of it all."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pynvml
import pytest
from planner.test_rl_step import COLOCATED, PRIOR, plan_of

from nereus.lang.api import resolve_text
from nereus.models.hardware import gpu_ids
from nereus.planner.advisor import Advisor
from nereus.runtime.inventory.block import cluster_block
from nereus.runtime.inventory.gpus import Host, NotThere, hardware_id, problems_of
from nereus.runtime.inventory.nvml import nvidia_gpus
from nereus.runtime.inventory.ray_nodes import hosts_of
from nereus.runtime.inventory.rocm import amd_gpus
from nereus.runtime.inventory.xids import Xids

SOURCES = Path(__file__).parent / "inventory_libraries"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("libraries")
    for name, library in (("nvml.c", "libnvidia-ml.so.1"), ("rocm_smi.c", "librocm_smi64.so")):
        subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / library, SOURCES / name], check=True)
    return folder


@pytest.fixture
def driver(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's bindings find the library built here where the driver's would be."""
    monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(str(built / name)))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


@pytest.mark.usefixtures("driver")
def test_nvidia_gpus_and_what_is_wrong_with_them() -> None:
    good, hot, virtual = nvidia_gpus()
    assert {gpu.hardware for gpu in (good, hot, virtual)} == {"h100-sxm-80gb"}
    assert (good.total_bytes, good.used_bytes) == (85520809984, 484966400)
    assert (good.clock_mhz, good.max_clock_mhz, good.celsius, good.uncorrected) == (1980, 1980, 34, 0)
    assert good.problems == ()
    assert (hot.clock_mhz, hot.celsius) == (1095, 88)
    slowed = ("slowed by hardware", "slowed by hardware: too hot")
    faults = ("2 uncorrected memory errors", "bad memory rows wait for a reset")
    assert hot.problems == (*slowed, *faults) and hot.faults == faults
    assert virtual.clock_mhz is virtual.celsius is virtual.uncorrected is None and virtual.problems == ()
    told = [(problem.text, problem.slows) for problem in problems_of((good, hot, virtual), {1: (79,)})]
    assert told == [(f"GPU 1: {why}", True) for why in slowed] + [
        (f"GPU 1: {why}", False) for why in (*faults, "XID 79")
    ]


@pytest.mark.usefixtures("driver")
def test_xids_that_no_application_brings_about_are_kept() -> None:
    with Xids() as xids:
        assert xids.seen() == xids.seen() == {1: (79, 48)}
        advisor = Advisor(plan_of(COLOCATED), PRIOR, pool=["n0", "n1"])
        problems = {
            "n1": problems_of(nvidia_gpus()[:1], xids.seen()),
            "n0": problems_of(nvidia_gpus()[1:2], xids.seen()),
        }
        decision = advisor.observe(step=1, response_len=1500, problems=problems)
    assert problems["n1"] == () and [node for node, _ in decision.unfit] == ["n0"]
    assert decision.trigger == "health" and "XID 79; GPU 1: XID 48" in decision.unfit[0][1]


def test_amd_gpus_and_what_is_wrong_with_them(built: Path) -> None:
    good, bad = amd_gpus(str(built / "librocm_smi64.so"))
    assert {good.hardware, bad.hardware} == {"mi300x-192gb"}
    assert (good.celsius, bad.celsius) == (47, 41), "the junction's where the edge has no sensor"
    assert good.problems == () and bad.problems == ("3 uncorrected memory errors",)


def test_a_machine_without_a_driver_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(str(tmp_path / name)))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    with pytest.raises(NotThere, match="no NVIDIA driver"):
        nvidia_gpus()
    with pytest.raises(NotThere, match="NVML does not start"):
        Xids()
    with pytest.raises(NotThere, match="no AMD driver"):
        amd_gpus(str(tmp_path / "librocm_smi64.so"))


@pytest.mark.parametrize(
    ("name", "gib", "id"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.1, "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-pcie-80gb"),
        ("NVIDIA H100 PCIe", 79.6, "h100-pcie-80gb"),
        ("NVIDIA H200", 140.4, "h200-sxm-141gb"),
        ("NVIDIA B200", 179.1, "b200-sxm-180gb"),
        ("NVIDIA L40S", 45.0, "l40s-48gb"),
        ("NVIDIA RTX A6000", 48.0, "a6000-48gb"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-sxm-32gb"),
        ("AMD Instinct MI250X", 64.0, "mi250x-gcd-64gb"),
        ("AMD Instinct MI325X", 256.0, "mi325x-256gb"),
        ("NVIDIA GeForce RTX 4090", 24.0, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8, None),
    ],
)
def test_parts_by_the_names_that_drivers_give(name: str, gib: float, id: str | None) -> None:
    assert hardware_id(name, round(gib * 2**30)) == id


def node(address: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    """As ``ray.nodes()`` has them."""
    found = {key.replace("accelerator_", "accelerator_type:"): value for key, value in resources.items()}
    return {
        "NodeID": "5a1f", "Alive": alive, "NodeManagerAddress": address, "NodeName": address,
        "Resources": {"CPU": 96.0, "memory": 1.9e12, f"node:{address}": 1.0, **found}, "Labels": {},
    }  # fmt: skip


def test_nodes_of_a_ray_cluster_become_a_cluster_block() -> None:
    hosts = hosts_of(
        [
            node("10.0.0.2", GPU=8.0, accelerator_H100=1.0),
            node("10.0.0.1", GPU=8.0, accelerator_H100=1.0),
            node("10.0.0.3", GPU=8.0, accelerator_H100=1.0, alive=False),
            node("10.0.0.4", GPU=4.0, **{"accelerator_A100-40G": 1.0}),
            node("10.0.0.5"),
            node("10.0.0.6", GPU=2.0, accelerator_T4=1.0),
        ]
    )
    assert [host.name for host in hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.4", "10.0.0.6"]
    text = cluster_block(hosts)
    assert "# 10.0.0.6: the hardware table has no such GPU" in text
    result = resolve_text(
        text + 'model actor = "qwen2.5-0.5b"\nworkload { algorithm = grpo  prompts = 8  mini_batch = 8 }\n'
        "stage actor.train { on = n0  optimizer = adam }\n",
        path="job.plan",
        base_dir=".",
    )
    assert result.plan is not None, result.diagnostics
    assert [(n.name, n.num_gpus, n.gpu.id) for n in result.plan.cluster.nodes] == [
        ("n0", 8, "h100-sxm-80gb"),
        ("n1", 8, "h100-sxm-80gb"),
        ("n2", 4, "a100-sxm-40gb"),
    ]


def test_every_part_of_the_table_can_be_written() -> None:
    hosts = [Host(name=id, hardware=(id,) * 8, mem_bytes=2**41) for id in gpu_ids()]
    assert cluster_block(hosts).count("host_mem = 2048 GiB") == len(hosts)
    mixed = cluster_block([Host(name="odd", hardware=("h100-sxm-80gb", "h200-sxm-141gb"))])
    assert "# odd: its GPUs are of several kinds" in mixed
