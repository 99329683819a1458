"""A torch.distributed.checkpoint folder as a holding: every stored chunk where it lies in its file.

    source = bind(path, naming, wanted=live.state)     # opens only the chunks that meet this rank's regions
    copy_regions(source.binding, live)                 # reads only the intersections

A chunk is a stream of torch.save, whose tensor bytes lie uncompressed in a zip. Its header (a few kB) says where, so
the tensor is used from a private mapping of the file like any other storage and memory stays bounded by what is copied;
torch's own reader loads each chunk whole. A chunk that was saved with other strides than its own rows is the exception:
it is read into memory when it is bound, one at a time.
"""

from __future__ import annotations

import io
import mmap
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import torch

from nereus.ir.fragment import Fragment, RankState, Segment
from nereus.models.naming.base import Naming, UnknownParameter, Where
from nereus.models.naming.megatron import MegatronNaming
from nereus.runtime.adapters.base import DTYPE_NAMES, BindError, Binding, BindingBuilder, FrameworkMissing
from nereus.runtime.adapters.boxes import Box, chunk_fragments
from nereus.runtime.adapters.dcp_megatron import stacked
from nereus.runtime.adapters.dcp_metadata import read
from nereus.runtime.adapters.publish import missing
from nereus.runtime.adapters.regions import (
    Key,
    Rect,
    check_complete,
    check_model_naming,
    claims,
    fragment_rects,
    intersection,
    listed,
    logical_shapes,
)
from nereus.runtime.adapters.safetensors_files import map_file
from nereus.runtime.adapters.torch_state import SLOT_NAMES

#: What stands before a model's parameter names and before ``state.<name>.<slot>`` of its optimizer in the keys that
#: torch's get_state_dict, torchtitan, verl and plain scripts write.
MODEL_PREFIXES = ("", "model.", "module.", "app.model.", "state.model.", "state_dict.")
OPTIMIZER_PREFIXES = ("", "optim.", "optimizer.", "optimizers.", "app.optim.", "app.optimizer.", "state.optim.")


@dataclass(slots=True)
class Holding:
    """``entries``: everything in the checkpoint that is no region of a logical tensor, by key: parameter groups,
    schedulers, counters; 0-dim tensors as numbers, whose dtypes ``kinds`` keeps. ``unread``: keys whose objects torch
    refuses to load without running their code. ``parameters``: stored parameter -> its logical tensors; ``slots``:
    stored parameter -> slot -> dtype, whether wanted or not. ``dcp_job`` makes a job state of these."""

    binding: Binding
    entries: dict[str, object] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    slots: dict[str, dict[str, str]] = field(default_factory=dict)
    optimizer_prefixes: tuple[str, ...] = OPTIMIZER_PREFIXES


@dataclass(frozen=True, slots=True)
class _Chunk:
    key: str
    place: Any  # torch's _StorageInfo
    fragments: tuple[Fragment, ...]  # their storage and origin are set when it is opened
    dtype: torch.dtype
    sizes: tuple[int, ...]


def bind(
    path: str | Path,
    naming: Naming,
    *,
    rank: int = 0,
    weight_slot: str = "weight",
    wanted: RankState | None = None,
    share: tuple[int, int] | None = None,
    verify: bool = False,
    model_prefixes: Sequence[str] = MODEL_PREFIXES,
    optimizer_prefixes: Sequence[str] = OPTIMIZER_PREFIXES,
    ignore: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
) -> Holding:
    """``weight_slot``: what the stored parameters are (FSDP's fp32 parameters may be a job's master weights).
    ``wanted``: open only chunks that meet these regions (None: all); ``share``: (rank, size), only this process's even
    part of them. ``verify``: read what is opened once, against the checksums of its streams. ``ignore``: patterns of
    keys that are none of this model; ``allow_missing``: of logical tensors whose weights may be absent.

    BindError names every key that is not understood, wrong shape, truncated file or missing element, with the numbers.
    """
    check_model_naming(naming)
    folder = Path(path)
    metadata = _metadata(folder)
    reader = _Reader(folder, naming, weight_slot, tuple(model_prefixes), tuple(optimizer_prefixes))
    skipped = re.compile("|".join(f"(?:{pattern})" for pattern in ignore) or r"(?!)")
    holding_entries: dict[str, Any] = {}
    derived: list[str] = []
    chunks: list[_Chunk] = []
    places = _places(folder, metadata)
    for key, stored in metadata.state_dict_metadata.items():
        if skipped.search(key):
            derived.append(key)
        elif not hasattr(stored, "chunks") or len(stored.size) == 0:
            holding_entries[key] = stored
        else:
            chunks.extend(reader.chunks(key, stored, places))
    reader.finish()
    _check(folder, naming, chunks, weight_slot, allow_missing)
    builder = BindingBuilder(rank=rank)
    builder.derived.extend(derived)
    files = Files(folder)
    regions = None if wanted is None else _regions(wanted)
    for chunk in chunks if share is None else _share(chunks, *share):
        if regions is None or _meets(chunk, regions):
            _open(builder, files, chunk, verify=verify)
    holding = Holding(
        binding=builder.finish(),
        parameters=reader.parameters,
        slots=reader.slots,
        optimizer_prefixes=tuple(optimizer_prefixes),
    )
    unread = []
    for key, stored in holding_entries.items():
        try:
            value = files.load(places[key, ()] if hasattr(stored, "chunks") else places[key, None])
        except Exception:  # torch has no class of its own for what it will not unpickle
            unread.append(key)
            continue
        if isinstance(value, torch.Tensor):
            holding.kinds[key] = DTYPE_NAMES.get(value.dtype, "fp32")
            value = value.item()
        holding.entries[key] = value
    holding.unread = tuple(unread)
    return holding


def _metadata(folder: Path) -> Any:
    if not folder.is_dir():
        raise BindError(missing(folder))
    if not (folder / ".metadata").is_file():
        raise BindError(f"{folder}: no .metadata: not a torch.distributed.checkpoint folder, or its save did not end")
    try:
        metadata = read(folder)
    except Exception as error:  # whatever a damaged pickle raises
        raise BindError(f"{folder}/.metadata cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(metadata, "storage_data", None), dict):
        raise BindError(f"{folder}/.metadata does not say where its tensors are (format of another storage writer)")
    return metadata


def places_of(folder: Path) -> dict[tuple[str, tuple[int, ...] | None], Any]:
    """(key, offsets of the chunk; None: no tensor) -> where it is, in torch's terms."""
    return _places(folder, _metadata(folder))


def _places(folder: Path, metadata: Any) -> dict[tuple[str, tuple[int, ...] | None], Any]:
    """(key, offsets) -> place. BindError on files that are missing or too short, and on chunks that overlap."""
    found: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    wrong: list[str] = []
    for index, info in metadata.storage_data.items():
        found[index.fqn, None if index.offset is None else tuple(index.offset)] = info
        by_file.setdefault(info.relative_path, []).append((info.offset, info.length, index.fqn))
    for name, spans in by_file.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts or not path.is_file():
            wrong.append(f"{name} is missing")
            continue
        spans.sort()
        size, (offset, length, key) = path.stat().st_size, spans[-1]
        if offset + length > size:
            wrong.append(f"{name} is truncated: {size} bytes, but {key} ends at {offset + length}")
        for (at, num, one), (other_at, _, other) in pairwise(spans):
            if at + num > other_at:
                wrong.append(f"{name}: {one} ends at {at + num}, {other} begins at {other_at}")
    if wrong:
        raise BindError(f"{folder}: {listed(wrong)}")
    return found


#: Numbers along the leading axes of a stored tensor -> what lies there; one part without axes for most.
_Parts = dict[tuple[int, ...], tuple[Segment, ...]]


def _fragments(parts: _Parts, shape: tuple[int, ...], box: Box, slot: str) -> Iterator[Fragment]:
    axes = len(next(iter(parts)))
    inner = box[0][axes:], box[1][axes:]
    held = product(*(range(lo, lo + size) for lo, size in zip(box[0][:axes], box[1][:axes], strict=True)))
    for at, numbers in enumerate(held):
        origin = at * prod(inner[1])
        yield from chunk_fragments(parts[numbers], shape[axes:], inner, slot=slot, storage=0, origin=origin)


class _Reader:
    """Keys -> chunks, collecting what is not understood until ``finish``."""

    def __init__(
        self, folder: Path, naming: Naming, weight_slot: str, model: tuple[str, ...], optimizer: tuple[str, ...]
    ) -> None:
        self.folder, self.naming, self.weight_slot = folder, naming, weight_slot
        self.model, self.optimizer = model, optimizer
        self.used: dict[str, dict[str, str]] = {}  # slot kind -> prefix -> a key with it
        self.wrong: list[str] = []
        self.parameters: dict[str, tuple[str, ...]] = {}
        self.slots: dict[str, dict[str, str]] = {}

    def chunks(self, key: str, stored: Any, places: dict[tuple[str, tuple[int, ...] | None], Any]) -> Iterator[_Chunk]:
        shape, dtype = tuple(stored.size), stored.properties.dtype
        try:
            name, slot, parts = self._understand(key, shape)
        except UnknownParameter as error:
            self.wrong.append(f"{key} {list(shape)}: {error}")
            return
        if dtype not in DTYPE_NAMES:
            self.wrong.append(f"{key} {list(shape)}: state of dtype {dtype} is not known")
            return
        self.parameters[name] = tuple(dict.fromkeys(s.tensor for segments in parts.values() for s in segments))
        if slot != self.weight_slot:
            self.slots.setdefault(name, {})[slot] = DTYPE_NAMES[dtype]
        for part in stored.chunks:
            box: Box = (tuple(part.offsets), tuple(part.sizes))
            place = places.get((key, box[0]))
            if 0 in box[1]:
                continue
            if place is None:
                self.wrong.append(f"{key}: the chunk at {list(box[0])} is in no file")
                continue
            if any(o < 0 or o + s > n for o, s, n in zip(*box, shape, strict=True)):
                self.wrong.append(f"{key} {list(shape)}: a chunk at {list(box[0])} of {list(box[1])} reaches outside")
                continue
            yield _Chunk(key, place, tuple(_fragments(parts, shape, box, slot)), dtype, box[1])

    def _understand(self, key: str, shape: tuple[int, ...]) -> tuple[str, str, _Parts]:
        """(parameter, slot, its parts)."""
        own: UnknownParameter | None = None
        if isinstance(self.naming, MegatronNaming):
            try:
                found = stacked(key, shape, self.naming)
                numbers = product(*(range(extent) for extent in shape[: found.num_axes]))
                return found.parameter, found.slot or self.weight_slot, {n: found.segments(n) for n in numbers}
            except UnknownParameter as error:
                own = error  # it may be the state dict of a whole model, saved as any other
        try:
            name, slot, segments = self._plain(key, shape)
        except UnknownParameter as error:
            raise own or error from None
        return name, slot, {(): segments}

    def _plain(self, key: str, shape: tuple[int, ...]) -> tuple[str, str, tuple[Segment, ...]]:
        """(parameter, slot, segments)."""
        reasons: list[str] = []
        for prefix in self.model:
            if key.startswith(prefix):
                try:
                    found = self.naming.segments(key[len(prefix) :], shape, Where())
                except UnknownParameter as error:
                    reasons.append(str(error))
                    continue
                self.used.setdefault("weights", {}).setdefault(prefix, key)
                return key[len(prefix) :], self.weight_slot, found
        for prefix in self.optimizer:
            match = re.fullmatch(re.escape(prefix) + r"state\.(.+)\.(\w+)", key)
            if match is not None:
                found = self.naming.segments(match[1], shape, Where())
                self.used.setdefault("optimizer state", {}).setdefault(prefix, key)
                return match[1], SLOT_NAMES.get(match[2], match[2]), found
        raise UnknownParameter(" / ".join(reasons) or "no known prefix; name it in model_prefixes, or pass ignore")

    def finish(self) -> None:
        for what, prefixes in self.used.items():
            if len(prefixes) > 1:
                self.wrong.append(f"two copies of the {what}: {' and '.join(prefixes.values())}; pass ignore for one")
        if self.wrong:
            raise BindError(f"{self.folder}: {len(self.wrong)} keys are not understood: {listed(self.wrong)}")


def _check(folder: Path, naming: Naming, chunks: Sequence[_Chunk], weight_slot: str, allowed: Sequence[str]) -> None:
    """Weights are whole, and so is every other (tensor, slot) of which there is any element."""
    fragments = tuple(fragment for chunk in chunks for fragment in chunk.fragments)
    claimed = claims([RankState(rank=0, storages=(), fragments=fragments)])
    absent = re.compile("|".join(f"(?:{pattern})" for pattern in allowed) or r"(?!)")
    shapes = logical_shapes(naming.arch, naming.head)
    try:
        check_complete(claimed, {n: s for n, s in shapes.items() if not absent.search(n)}, (weight_slot,))
        for slot in dict.fromkeys(key[1] for key in claimed):
            check_complete(claimed, {n: s for n, s in shapes.items() if (n, slot) in claimed}, (slot,))
    except BindError as error:
        raise BindError(f"{folder}: {error}") from error


def _regions(wanted: RankState) -> dict[Key, list[Rect]]:
    found: dict[Key, list[Rect]] = {}
    for fragment in wanted.fragments:
        found.setdefault((fragment.tensor, fragment.slot), []).extend(fragment_rects(fragment))
    return found


def _meets(chunk: _Chunk, regions: dict[Key, list[Rect]]) -> bool:
    return any(
        intersection(rect, (f.row_lo, f.row_hi, f.col_lo, f.col_hi)) is not None
        for f in chunk.fragments
        for rect in regions.get((f.tensor, f.slot), ())
    )


def _share(chunks: Sequence[_Chunk], rank: int, size: int) -> Iterator[_Chunk]:
    """Large ones first, each to whoever has least; the same in all processes."""
    loads = [0] * size
    for chunk in sorted(chunks, key=lambda c: (-c.place.length, c.key, c.place.relative_path, c.place.offset)):
        least = loads.index(min(loads))
        loads[least] += chunk.place.length
        if least == rank:
            yield chunk


def _open(builder: BindingBuilder, files: Files, chunk: _Chunk, *, verify: bool) -> None:
    data = files.tensor(chunk.place, chunk.key, chunk.dtype, chunk.sizes)
    if verify:
        files.verify(chunk.place, chunk.key)
    storage = builder.storage(f"{chunk.place.relative_path}:{chunk.place.offset}:{chunk.key}", data, host=True)
    builder.fragments.extend(replace(fragment, storage=storage) for fragment in chunk.fragments)


class Files:
    """The folder's files, mapped when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mapped: dict[str, mmap.mmap] = {}

    def map(self, place: Any) -> mmap.mmap:
        name = place.relative_path
        if name not in self.mapped:
            self.mapped[name] = map_file(self.folder / name)
        return self.mapped[name]

    def stream(self, place: Any) -> _Slice:
        if getattr(place, "transform_descriptors", None):
            raise BindError(
                f"{place.relative_path}: stored through {', '.join(place.transform_descriptors)}; save plain"
            )
        return _Slice(memoryview(self.map(place))[place.offset : place.offset + place.length])

    def load(self, place: Any) -> object:
        return torch.load(self.stream(place), map_location="cpu", weights_only=True)  # type: ignore[arg-type]

    def verify(self, place: Any, key: str) -> None:
        """BindError where a part of the stream is not what its own checksum says."""
        try:
            with zipfile.ZipFile(self.stream(place)) as parts:
                wrong = parts.testzip()
        except zipfile.BadZipFile as error:
            wrong = str(error)
        if wrong is not None:
            raise BindError(f"{place.relative_path}: the bytes of {key} are not what was written ({wrong})")

    def tensor(self, place: Any, key: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        """The chunk's elements in their own order, 1-D, in the file's mapping."""
        what = f"{place.relative_path}: {key} at byte {place.offset}"
        stream = self.stream(place)
        try:
            header: Any = torch.load(stream, map_location="meta", weights_only=True)  # type: ignore[arg-type]
        except Exception as error:  # whatever a damaged stream raises
            raise BindError(f"{what} is no stream of torch.save: {type(error).__name__}: {error}") from error
        if not isinstance(header, torch.Tensor) or header.dtype != dtype or tuple(header.shape) != sizes:
            found = (
                f"{header.dtype} {list(header.shape)}" if isinstance(header, torch.Tensor) else type(header).__name__
            )
            raise BindError(f"{what} is {found}; .metadata says {dtype} {list(sizes)}")
        if not header.is_contiguous():
            copied: Any = self.load(place)
            return copied.contiguous().view(-1)
        offset = getattr(header.untyped_storage(), "_checkpoint_offset", None)
        if offset is None:
            raise FrameworkMissing(
                f"torch {torch.__version__} does not say where saved bytes lie; install 2.6 or newer"
            )
        first = place.offset + offset + header.storage_offset() * dtype.itemsize
        if first + header.numel() * dtype.itemsize > place.offset + place.length:
            raise BindError(f"{what}: its bytes end after its stream")
        return torch.frombuffer(self.map(place), dtype=dtype, offset=first, count=header.numel())


class _Slice(io.RawIOBase):
    """A part of a mapping as a file."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: len(self.data)}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), len(self.data) - self.at))
        buffer[:size] = self.data[self.at : self.at + size]
        self.at += size
        return size
