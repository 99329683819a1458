"""A torch.distributed.checkpoint folder written from live storages, which ``dcp.load`` reads at any other layout.

torch writes it: a SavePlanner says which boxes of which parameters each rank gives. Every element is written once
(``regions.claims``); a flat range becomes up to three rectangles, a rectangle of stacked experts up to one box for each
run of whole experts and its two ends. The folder is written beside its target, each rank compares what it wrote with
its memory, and rank 0 renames it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from nereus.models.naming.base import Naming, Where
from nereus.runtime.adapters import dcp
from nereus.runtime.adapters.base import BindError, Binding
from nereus.runtime.adapters.boxes import Box, rect_boxes, segment_rect, shift
from nereus.runtime.adapters.publish import begin, discard, publish
from nereus.runtime.adapters.regions import (
    Claim,
    Key,
    check_complete,
    check_model_naming,
    claimed_view,
    claims,
    intersection,
    logical_shapes,
    rects_of,
    slot_dtypes,
)
from nereus.runtime.adapters.safetensors_files import TORCH_DTYPES
from nereus.runtime.adapters.together import Ranks

#: Paths in the nested state dict that torch's get_state_dict gives; joined by dots they are the keys.
MODEL_PATH = ("model", "{name}")
OPTIMIZER_PATH = ("optim", "state", "{name}", "{slot}")


@dataclass(frozen=True, slots=True)
class _Item:
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    view: torch.Tensor  # live

    @property
    def name(self) -> str:
        return ".".join(self.path)


def save(
    path: str | Path,
    binding: Binding,
    naming: Naming,
    *,
    group: dist.ProcessGroup | None = None,
    weight_slot: str = "weight",
    slots: Sequence[str] | None = None,
    model_path: Sequence[str] = MODEL_PATH,
    optimizer_path: Sequence[str] = OPTIMIZER_PATH,
    slot_keys: Mapping[str, str] | None = None,
    entries: Mapping[str, Any] | None = None,
) -> int:
    """Write all slots (or ``slots``) that the ranks of ``group`` hold together. Returns the bytes this rank wrote.

    ``weight_slot`` is stored under ``model_path``, the others under ``optimizer_path``, by the optimizer's own names
    where ``slot_keys`` has one. ``entries``: a nested dict of what else the folder holds (parameter groups, steps,
    schedulers: ``dcp_job.entries_of``), taken from rank 0. Parameters are those of
    ``naming.parameters``, and a tied head under its own name too, as torch saves it. BindError on all ranks, with the
    older checkpoint in place, where elements are missing or a write fails.
    """
    check_model_naming(naming)
    target, ranks = Path(path), Ranks(group)
    states = ranks.gather(binding.state)
    shapes = logical_shapes(naming.arch, naming.head)
    kept = tuple(dict.fromkeys(s for state in states for s in state.slots())) if slots is None else tuple(slots)
    claimed = claims(states, keep=lambda key: key[1] in kept and key[0] in shapes)
    check_complete(claimed, shapes, (weight_slot,))
    for slot in kept:
        check_complete(claimed, {n: s for n, s in shapes.items() if (n, slot) in claimed}, (slot,))
    dtypes = {slot: slot_dtypes(states, slot) for slot in kept}
    mine = {key: [claim for claim in found if claim.holder == ranks.rank] for key, found in claimed.items()}
    paths = {slot: tuple(model_path if slot == weight_slot else optimizer_path) for slot in kept}
    paths = {s: tuple(p.replace("{slot}", (slot_keys or {}).get(s, s)) for p in path) for s, path in paths.items()}
    items = list(_items(naming, binding, mine, dtypes, paths, weight_slot))
    folder = Path(ranks.first(lambda: str(begin(target)), f"laying out {target}"))
    try:
        planner = _Planner(items)
        more = dict(entries or {}) if ranks.rank == 0 else {}
        ranks.agree(lambda: _save(more, folder, planner, group, ranks), f"writing {target}")
        ranks.agree(lambda: _verify(folder, items), f"reading back {target}")
        ranks.first(lambda: publish(folder, target), f"publishing {target}")
    except BaseException:
        if ranks.rank == 0:
            discard(folder)
        raise
    return sum(item.view.numel() * item.dtype.itemsize for item in items)


def _save(more: dict[str, Any], folder: Path, planner: _Planner, group: Any, ranks: Ranks) -> None:
    writer = FileSystemWriter(folder)
    dcp_save(more, storage_writer=writer, planner=planner, process_group=group, no_dist=not ranks.joined)


def _items(
    naming: Naming,
    binding: Binding,
    mine: Mapping[Key, Sequence[Claim]],
    dtypes: Mapping[str, Mapping[str, str]],
    paths: Mapping[str, tuple[str, ...]],
    weight_slot: str,
) -> Iterator[_Item]:
    held = rects_of(binding)
    parameters = dict(naming.parameters(Where()))
    tied = naming.arch.tied_embeddings and naming.head == "lm"
    if tied:
        parameters["lm_head.weight"] = (naming.arch.vocab, naming.arch.hidden)
    for name, shape in parameters.items():
        segments = naming.segments(name, shape, Where())
        for slot, path in paths.items():
            if tied and name == "lm_head.weight" and slot != weight_slot:
                continue  # the optimizer knows the embedding only
            kinds = {dtypes[slot].get(segment.tensor, "nothing") for segment in segments}
            if kinds == {"nothing"}:
                continue
            if len(kinds) > 1:
                raise BindError(f"{name} ({slot}) is made of tensors of {' and '.join(sorted(kinds))}")
            dtype = TORCH_DTYPES[kinds.pop()]
            full = tuple(step.replace("{name}", name) for step in path)
            for segment in segments:
                key, where = (segment.tensor, slot), segment_rect(segment)
                rows, cols = segment.at_row - segment.row_lo, segment.at_col - segment.col_lo
                for claim in mine[key]:
                    common = intersection(shift(claim.rect, rows, cols), where)
                    if common is None:
                        continue
                    for box, rect in rect_boxes(shape, common):
                        view = claimed_view(held[key], shift(rect, -rows, -cols))
                        yield _Item(full, tuple(shape), dtype, box, view)


class _Planner(DefaultSavePlanner):
    """What the state dict holds, and this rank's boxes."""

    def __init__(self, items: Sequence[_Item]) -> None:
        super().__init__()
        self.items = {(item.name, item.box[0]): item for item in items}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        paths = {item.name: item.path for item in self.items.values()}
        found = [
            WriteItem(
                index=MetadataIndex(item.name, item.box[0]),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(item.box[0]), sizes=torch.Size(item.box[1])),
                    properties=TensorProperties(dtype=item.dtype),
                    size=torch.Size(item.shape),
                ),
            )
            for item in self.items.values()
        ]
        self.plan = replace(plan, items=[*plan.items, *found], planner_data={**(plan.planner_data or {}), **paths})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        offset = write_item.index.offset
        item = self.items.get((write_item.index.fqn, () if offset is None else tuple(offset)))
        if item is None:
            return super().resolve_data(write_item)
        return item.view.reshape(item.box[1])


def _verify(folder: Path, items: Sequence[_Item]) -> None:
    """Every box of this rank is in its file, byte for byte. One at a time."""
    places, files = dcp.places_of(folder), dcp.Files(folder)
    for item in items:
        data = files.tensor(places[item.name, item.box[0]], item.name, item.dtype, item.box[1])
        live = item.view.detach().to("cpu").contiguous().view(-1)
        if not torch.equal(data.view(torch.uint8), live.view(torch.uint8)):
            raise BindError(f"{item.name} at {list(item.box[0])} was not read back as written")
