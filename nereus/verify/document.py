"""A saved transition as columns. Only its own numbers are checked here (kinds, lengths, ranges), nothing it claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.verify.finding import DamagedDocument
from nereus.verify.segments import IntArray, within

_MOST_SLICES, _MOST_WAVES, _MOST_WEIGHT = 100_000_000, 2**40, 2**53

#: (device, stage, slot, tensor number) of a storage.
Key = tuple[int, str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Slots of a model whose moves share regions; ``cells`` numbers the grid that regions refer to."""

    model: str
    slots: tuple[str, ...]
    dtypes: tuple[str, ...]
    slot_bytes: tuple[int, ...]
    cells: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Boxes that tile the tensors (as matrices), in tensor order and row-major inside a tensor."""

    tensors: tuple[str, ...]
    tensor: IntArray
    row_lo: IntArray
    row_hi: IntArray
    col_lo: IntArray
    col_hi: IntArray

    @property
    def numel(self) -> IntArray:
        return (self.row_hi - self.row_lo) * (self.col_hi - self.col_lo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """Flat (cell, start, stop) rows; region r has rows ``first[r] .. first[r + 1]``."""

    first: IntArray
    cell: IntArray
    start: IntArray
    stop: IntArray

    def rows_of(self, region: IntArray) -> tuple[IntArray, IntArray]:
        """(position in ``region``, row) of every row of every region."""
        counts = (self.first[1:] - self.first[:-1])[region]
        owner = np.repeat(np.arange(len(region), dtype=np.int64), counts)
        return owner, np.repeat(self.first[:-1][region], counts) + within(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """``wave``: first of ``slices`` consecutive waves. ``link``: number of ``Document.links``. ``slots``: bit mask over
    the table's slots, -1 for all. Move i relays what ``after[after_first[i] : after_first[i + 1]]`` bring."""

    src: IntArray
    dst: IntArray
    table: IntArray
    region: IntArray
    num_bytes: IntArray
    wave: IntArray
    slices: IntArray
    link: IntArray
    slots: IntArray
    after_first: IntArray
    after: IntArray
    #: False in files of before there were slices, whose digests do not speak of them.
    sliced: bool

    def __len__(self) -> int:
        return len(self.src)

    @property
    def relays(self) -> IntArray:
        return np.flatnonzero(self.after_first[1:] > self.after_first[:-1])

    def has_slot(self, number: int) -> Any:
        """Which moves carry slot ``number`` of their table."""
        return (self.slots < 0) | ((self.slots >> number) & 1 == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleOp:
    kind: str
    stage: str
    devices: IntArray
    seconds: float
    start_s: float
    background: bool
    running_bytes: IntArray
    after_bytes: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPromise:
    """Per device: staging, what processes take before and after, capacity; per living node: host memory."""

    staging: IntArray
    before: IntArray
    after: IntArray
    capacity: IntArray
    hosts: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    texts: dict[str, str]  # old, new
    fingerprints: dict[str, str]
    #: Models whose weights the job states to be equal: (the name that stands for both, the other).
    same: tuple[tuple[str, str], ...]
    digest: str
    certificate: Mapping[str, Any]
    #: Of ports: (kind, name of the GPU or node, weight). None in files of before the bound's proof was part of them.
    prices: tuple[tuple[str, str, int], ...] | None
    mode: str
    num_waves: int
    window_bytes: int
    devices: tuple[str, ...]
    tables: tuple[Table, ...]
    grids: tuple[Grid, ...]
    regions: Regions
    moves: Moves
    links: tuple[str, ...]
    acquire: dict[Key, int]
    release: dict[Key, int]
    #: Old storages that pass through host memory: (wave in which each is copied there, wave after which it leaves it).
    staged: dict[Key, tuple[int, int]]
    lifecycle: tuple[LifecycleOp, ...]
    memory: MemoryPromise


class _Reader:
    """Entries of a JSON object by path. DamagedDocument names the path."""

    def __init__(self, value: Any, path: str = "") -> None:
        self.value, self.path = value, path

    def __getitem__(self, key: str | int) -> _Reader:
        path = f"{self.path}.{key}" if self.path else str(key)
        try:
            found = self.value[key]
        except (KeyError, IndexError, TypeError):
            raise DamagedDocument(f"{path} is missing") from None
        return _Reader(found, path)

    def of(self, kind: type) -> Any:
        if not isinstance(self.value, kind) or (kind is int and isinstance(self.value, bool)):
            raise DamagedDocument(f"{self.path} is of a wrong kind")
        return self.value

    def each(self) -> list[_Reader]:
        return [_Reader(value, f"{self.path}[{i}]") for i, value in enumerate(self.of(list))]

    def strings(self) -> tuple[str, ...]:
        return tuple(entry.of(str) for entry in self.each())

    def column(self, length: int | None = None, *, low: int | None = None, stop: int | None = None) -> IntArray:
        values = self.of(list)
        try:
            found = np.array(values if values else np.zeros(0, dtype=np.int64))
        except (ValueError, OverflowError):
            found = np.zeros((1, 1))
        if found.ndim != 1 or found.dtype.kind != "i":
            raise DamagedDocument(f"{self.path} is no column of integers")
        if length is not None and len(found) != length:
            raise DamagedDocument(f"{self.path} has {len(found)} entries and not {length}")
        found = found.astype(np.int64)
        if low is not None and len(found) and int(found.min()) < low:
            raise DamagedDocument(f"{self.path} has {int(found.min())}, below {low}")
        if stop is not None and len(found) and int(found.max()) >= stop:
            raise DamagedDocument(f"{self.path} has {int(found.max())}, which is beyond the last")
        return found


def read_document(value: Mapping[str, Any]) -> Document:
    """Raises DamagedDocument."""
    root = _Reader(value)
    schedule = root["schedule"]
    devices = schedule["devices"].strings()
    tables = tuple(_table(entry) for entry in schedule["tables"].each())
    grids = tuple(_grid(entry) for entry in schedule["cells"].each())
    if any(not 0 <= table.cells < len(grids) for table in tables):
        raise DamagedDocument("schedule.tables names cells that are not there")
    regions = _regions(schedule["regions"])
    links = schedule["links"].strings()
    moves = _moves(schedule["moves"], len(devices), tables, grids, regions, links)
    certificate = root["certificate"].of(dict)
    return Document(
        texts={side: root["plans"][side]["text"].of(str) for side in ("old", "new")},
        fingerprints={
            name: root["fingerprints"][name].of(str) for name in ("old_plan", "new_plan", "cluster", "models")
        },
        same=_same(root["options"]),
        digest=root["digest"].of(str),
        certificate=certificate,
        prices=_prices(root["bound"]["prices"]) if "bound" in root.of(dict) else None,
        mode=schedule["mode"].of(str),
        num_waves=schedule["num_waves"].of(int),
        window_bytes=schedule["window_bytes"].of(int),
        devices=devices,
        tables=tables,
        grids=grids,
        regions=regions,
        moves=moves,
        links=links,
        acquire=_waves(schedule["acquire"]),
        release=_waves(schedule["release"]),
        staged=_staged(schedule["staged"]) if "staged" in schedule.of(dict) else {},
        lifecycle=tuple(_operation(entry, len(devices)) for entry in root["lifecycle"].each()),
        memory=_memory(root["memory"], len(devices)),
    )


def _same(options: _Reader) -> tuple[tuple[str, str], ...]:
    pairs = [entry.strings() for entry in options["same"].each()] if "same" in options.of(dict) else []
    if any(len(pair) != 2 for pair in pairs):
        raise DamagedDocument("options.same has an entry that is no pair of models")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _table(entry: _Reader) -> Table:
    slots = entry["slots"].strings()
    dtypes = entry["dtypes"].strings()
    widths = entry["slot_bytes"].column(len(slots), low=1)
    if len(dtypes) != len(slots):
        raise DamagedDocument(f"{entry.path}.dtypes has {len(dtypes)} entries and not {len(slots)}")
    return Table(
        model=entry["model"].of(str),
        slots=slots,
        dtypes=dtypes,
        slot_bytes=tuple(widths.tolist()),
        cells=entry["cells"].of(int),
    )


def _grid(entry: _Reader) -> Grid:
    names = entry["tensors"].strings()
    tensor = entry["tensor"].column(low=0, stop=len(names))
    bounds = {name: entry[name].column(len(tensor), low=0) for name in ("row_lo", "row_hi", "col_lo", "col_hi")}
    return Grid(tensors=names, tensor=tensor, **bounds)


def _regions(entry: _Reader) -> Regions:
    counts = entry["counts"].column(low=0)
    total = int(counts.sum())
    return Regions(
        first=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts))),
        cell=entry["cell"].column(total, low=0),
        start=entry["start"].column(total),
        stop=entry["stop"].column(total),
    )


def _moves(
    entry: _Reader,
    num_devices: int,
    tables: tuple[Table, ...],
    grids: tuple[Grid, ...],
    regions: Regions,
    links: tuple[str, ...],
) -> Moves:
    src = entry["src"].column(low=0, stop=2 * num_devices)
    count = len(src)
    after_counts = entry["after_counts"].column(count, low=0)
    # A file of before there were slices: every move travels whole.
    whole = not isinstance(entry.value, dict) or "slices" not in entry.value
    moves = Moves(
        src=src,
        dst=entry["dst"].column(count, low=0, stop=2 * num_devices),
        table=entry["table"].column(count, low=0, stop=len(tables)),
        region=entry["region"].column(count, low=0, stop=len(regions.first) - 1),
        num_bytes=entry["bytes"].column(count),
        wave=entry["wave"].column(count, low=0, stop=_MOST_WAVES),
        slices=np.ones(count, dtype=np.int64) if whole else entry["slices"].column(count, low=1),
        link=entry["link"].column(count, low=0, stop=len(links)),
        slots=entry["slots"].column(count, low=-1),
        after_first=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(after_counts))),
        after=entry["after"].column(int(after_counts.sum()), low=0, stop=count),
        sliced=not whole,
    )
    if int(moves.slices.sum()) > _MOST_SLICES:
        raise DamagedDocument(
            f"schedule.moves.slices: {int(moves.slices.sum()):,} slices are more than any schedule has"
        )
    if count:
        most = np.array([len(grids[table.cells].tensor) for table in tables], dtype=np.int64)[moves.table]
        pairs = np.unique(np.stack((moves.region, most), axis=1), axis=0)
        owner, rows = regions.rows_of(pairs[:, 0])
        if bool((regions.cell[rows] >= pairs[owner, 1]).any()):
            raise DamagedDocument("schedule.regions names a cell that its table does not have")
    return moves


def _waves(entry: _Reader) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for row in entry.each():
        values = row.of(list)
        kinds = (int, str, str, int, int)
        if len(values) != 5 or not all(isinstance(v, k) for v, k in zip(values, kinds, strict=True)):
            raise DamagedDocument(f"{row.path} is no [device, stage, slot, tensor, wave]")
        key = (values[0], values[1], values[2], values[3])
        if key in found:
            raise DamagedDocument(f"{row.path} repeats a storage")
        found[key] = values[4]
    return found


def _prices(entry: _Reader) -> tuple[tuple[str, str, int], ...]:
    found = []
    for row in entry.each():
        values = row.of(list)
        kinds = (str, str, int)
        if len(values) != 3 or not all(isinstance(v, k) for v, k in zip(values, kinds, strict=True)):
            raise DamagedDocument(f"{row.path} is no [kind of port, GPU or node, weight]")
        if not 0 < values[2] < _MOST_WEIGHT:
            raise DamagedDocument(f"{row.path} is out of range")
        found.append((values[0], values[1], values[2]))
    return tuple(found)


def _staged(entry: _Reader) -> dict[Key, tuple[int, int]]:
    found: dict[Key, tuple[int, int]] = {}
    for row in entry.each():
        values = row.of(list)
        kinds = (int, str, str, int, int, int)
        if len(values) != 6 or not all(isinstance(v, k) for v, k in zip(values, kinds, strict=True)):
            raise DamagedDocument(f"{row.path} is no [device, stage, slot, tensor, wave, wave]")
        key = (values[0], values[1], values[2], values[3])
        if key in found:
            raise DamagedDocument(f"{row.path} repeats a storage")
        found[key] = (values[4], values[5])
    return found


def _operation(entry: _Reader, num_devices: int) -> LifecycleOp:
    devices = entry["devices"].column(low=0, stop=num_devices)
    seconds, start = entry["seconds"].value, entry["start_s"].value
    for name, value in (("seconds", seconds), ("start_s", start)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DamagedDocument(f"{entry.path}.{name} is of a wrong kind")
    return LifecycleOp(
        kind=entry["kind"].of(str),
        stage=entry["stage"].of(str),
        devices=devices,
        seconds=float(seconds),
        start_s=float(start),
        background=entry["background"].of(bool),
        running_bytes=entry["running_bytes"].column(len(devices)),
        after_bytes=entry["after_bytes"].column(len(devices)),
    )


def _memory(entry: _Reader, num_devices: int) -> MemoryPromise:
    hosts = entry["hosts"]
    return MemoryPromise(
        staging=entry["staging"].column(num_devices),
        before=entry["before"].column(num_devices),
        after=entry["after"].column(num_devices),
        capacity=entry["capacity"].column(num_devices),
        hosts={name: hosts[name].of(int) for name in hosts.of(dict)},
    )
