"""``nereusc inventory`` on a machine whose GPUs are made up, and on one without."""

from __future__ import annotations

from typing import Any

import pytest

from nereus.cli.commands import inventory
from nereus.runtime.inventory.gpus import Gpu


def test_gpus_their_health_and_a_cluster_block(nereusc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(
        Gpu(
            index=n, name="NVIDIA H200", total_bytes=150_754_820_096, used_bytes=10**9, clock_mhz=1980,
            max_clock_mhz=1980, celsius=40, uncorrected=n,
        )
        for n in range(2)
    )  # fmt: skip
    monkeypatch.setattr(inventory, "_gpus", lambda: (gpus, ("no AMD driver",)))
    ran = nereusc("inventory")
    assert ran.code == 0 and 'gpus = 2 x "h200-sxm-141gb"' in ran.stdout
    assert ran.stdout.count("1 uncorrected memory errors") == 1
    document = nereusc("inventory", "--json").json()
    assert [gpu["problems"] for gpu in document["gpus"]] == [[], ["1 uncorrected memory errors"]]
    assert document["hosts"][0]["hardware"] == ["h200-sxm-141gb"] * 2 and "cluster {" in document["cluster"]


def test_a_machine_without_gpus_is_a_result(nereusc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_gpus", lambda: ((), ("no NVIDIA driver", "no AMD driver")))
    ran = nereusc("inventory")
    assert ran.code == 0 and "no GPUs: no NVIDIA driver; no AMD driver" in ran.stdout
    assert nereusc("inventory", "--json").json()["cluster"] is None


def test_ray_that_is_not_there_is_told(nereusc: Any) -> None:
    ran = nereusc("inventory", "--ray", "127.0.0.1:1")
    assert ran.code == 1 and ("Ray is not installed" in ran.stderr or "no Ray cluster answers" in ran.stderr)
