"""A folder's ``.metadata`` without running what it says: it is a pickle, and a changed one may name any function.

Only the classes that torch writes there are made, and types of elements; whatever else is named is refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

_METADATA = (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
)
#: Megatron leaves its plans of the save in there too.
_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
_FOUND: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _METADATA},
    **{(planner.__name__, name): getattr(planner, name) for name in _PLANS},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # Where it was saved, which nobody asks.
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "WindowsPath"): lambda *parts: "/".join(parts),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (found := _FOUND.get((module, name))) is not None:
            return found
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of torch's has there")


def read(folder: Path) -> Any:
    """torch's ``Metadata``. Raises whatever a damaged pickle raises; UnpicklingError where it names anything else."""
    with open(folder / ".metadata", "rb") as file:
        return _Reader(file).load()
