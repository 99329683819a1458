"""The oracle does not inherit the compiler's mistakes: planted ones are found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from runtime.tiny import cluster, trainer

from nereus.ir import layout
from nereus.ir.layout import Layout
from nereus.ir.plan import ORDER_MEGATRON
from nereus.ir.tensor import Cut
from nereus.passes import device_storages
from nereus.runtime.run import run_pair

EIGHT = cluster(4, 4)
OLD, NEW = trainer(EIGHT, tp=2, fsdp=4, order=ORDER_MEGATRON), trainer(EIGHT, tp=4, pp=2)


def test_without_a_fault_all_is_right() -> None:
    assert run_pair(OLD, NEW, scale="none").ok


def _shards_backwards(patch: pytest.MonkeyPatch) -> None:
    right = Layout.shard_of_rank
    patch.setattr(Layout, "shard_of_rank", lambda self: (self.num_shards - 1) - right(self))


def _axes_in_another_order(patch: pytest.MonkeyPatch) -> None:
    right = Layout.coordinates

    def wrong(self: Layout) -> dict[str, Any]:
        coords = right(self)
        coords["tp"] = np.where(coords["pp"] == 1, self.tp - 1 - coords["tp"], coords["tp"])
        return coords

    patch.setattr(Layout, "coordinates", wrong)


def _ranks_of_a_cut_swapped(patch: pytest.MonkeyPatch) -> None:
    right = Cut.interval
    patch.setattr(Cut, "interval", lambda self, extent, tp, rank: right(self, extent, tp, rank ^ 1 if tp > 1 else rank))


def _layers_from_the_back(patch: pytest.MonkeyPatch) -> None:
    right = Layout.pipeline_stage_of_layer
    patch.setattr(Layout, "pipeline_stage_of_layer", lambda self, layer: self.pp - 1 - right(self, layer))


def _columns_one_further(patch: pytest.MonkeyPatch) -> None:
    right = device_storages.rectangles

    def wrong(cells: Any, region: Any) -> Any:
        row, col, num_rows, num_cols, cell = right(cells, region)
        narrow = num_cols > 1
        return row, np.where(narrow, col + 1, col), num_rows, np.where(narrow, num_cols - 1, num_cols), cell

    patch.setattr(device_storages, "rectangles", wrong)


@pytest.fixture(autouse=True)
def _coordinates_are_not_remembered() -> Iterator[None]:
    layout._coordinates.cache_clear()
    yield
    layout._coordinates.cache_clear()


@pytest.mark.parametrize(
    "fault",
    [
        _shards_backwards,
        _axes_in_another_order,
        _ranks_of_a_cut_swapped,
        _layers_from_the_back,
        _columns_one_further,
    ],
)
def test_a_planted_fault_of_the_compiler_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    report = run_pair(OLD, NEW, scale="none")
    assert not report.ok
    assert report.diagnostics[0].code in ("NRS6007", "NRS9601")
