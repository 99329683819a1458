"""FSDP2 jobs moved between layouts, several moves in a row: each equals, element by element and in its next step, a
twin that torch built at the new layout from the same whole tensors."""

from __future__ import annotations

import math

import pytest
from frameworks.fsdp2_jobs import Layout, chain
from frameworks.harness import run

_FSDP4 = Layout(kind="fsdp", ranks=(0, 1, 2, 3))

CHAINS = {
    "4 -> 2 -> 3 -> 4, one rank with no row": (
        "uneven",
        (
            _FSDP4,
            Layout(kind="fsdp", ranks=(1, 3)),
            Layout(kind="fsdp", ranks=(0, 1, 2)),
            _FSDP4,
        ),
    ),
    "4 -> 2 x tp 2 -> hsdp -> ddp -> alone -> 4, tied": (
        "tied",
        (
            _FSDP4,
            Layout(kind="fsdp", ranks=(0, 1, 2, 3), tp=2),
            Layout(kind="hsdp", ranks=(0, 1, 2, 3)),
            Layout(kind="ddp", ranks=(0, 2)),
            Layout(kind="alone", ranks=(1,)),
            Layout(kind="fsdp", ranks=(0, 1, 2, 3), bf16=True),
        ),
    ),
    "experts, 4 -> 3 -> ddp": (
        "experts",
        (_FSDP4, Layout(kind="fsdp", ranks=(0, 1, 2)), Layout(kind="ddp", ranks=(2, 3))),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_moved_jobs_equal_what_torch_builds(name: str) -> None:
    model, layouts = CHAINS[name]
    by_rank = run(4, chain, model, layouts, timeout=300)
    unmoved = run(1, chain, model, (Layout(kind="alone", ranks=(0,)),) * len(layouts), timeout=200)[0]
    for number, expected in enumerate(unmoved):
        layout = layouts[max(number - 1, 0)]
        found = [by_rank[rank][number] for rank in layout.ranks]
        for result in found:
            loose = 2e-2 if layout.bf16 else 1e-4
            assert result["lr"] == expected["lr"]
            assert math.isclose(result["loss"], expected["loss"], rel_tol=loose)
            assert math.isclose(result["grad norm"], expected["grad norm"], rel_tol=loose * 10)
