"""A folder of HF safetensors as a holding: its tensors where they lie in the files, as fragments of logical tensors.

    source = bind("/models/qwen", HfNaming(arch))     # any process that sees the path
    copy_regions(source, live_binding)                # reads exactly the regions that this rank wants

Memory is a private mapping of each file, so pages come in when a region is copied, and writing to it never reaches the
file. Files that state checksums of their tensors (``safetensors_write`` gives them) are read once before, to check
these: each rank alone in ``bind``, or all of them together with ``verify``. ``safetensors_write`` is the other
direction.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from nereus.ir.fragment import Fragment, fragments_of
from nereus.ir.tensor import matrix_shape
from nereus.ir.units import DTYPE_BYTES
from nereus.models.fp8 import SUFFIX
from nereus.models.naming.base import Naming, UnknownParameter, Where
from nereus.runtime.adapters.base import DTYPE_NAMES, BindError, Binding, BindingBuilder
from nereus.runtime.adapters.publish import missing
from nereus.runtime.adapters.regions import (
    Convert,
    Key,
    Rect,
    check_complete,
    check_model_naming,
    claims,
    listed,
    logical_shapes,
)
from nereus.runtime.adapters.safetensors_header import FileHeader, TensorEntry, read_header
from nereus.runtime.adapters.safetensors_sums import check
from nereus.runtime.adapters.together import Ranks
from nereus.runtime.adapters.whole import pieces

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

#: Old Llama checkpoints hold the rotary frequencies: made again from the configuration, never state.
DERIVED = (r"\.rotary_emb\.inv_freq$",)
TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def bind(
    path: str | Path,
    naming: Naming,
    *,
    rank: int = 0,
    slot: str = "weight",
    ignore: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    fp8_block: tuple[int, int] | None = None,
    verify: bool = True,
) -> Binding:
    """Storages are file ranges, one for each (file, dtype).

    ``path``: folder, index or single file. ``ignore``: patterns of tensors that are none of this model's state (layers
    for multi-token prediction, say); ``allow_missing``: patterns of logical tensors that may be absent. Scales of fp8
    weights become tensors of their own, ``<weight>_scale_inv``; ``fp8_block`` is read from config.json where None.
    ``verify``: compare tensors with the checksums that their files state; without, only the headers are read.

    BindError names every unknown name, wrong shape, truncated file, missing tensor, or tensor whose content is not what
    was written, with the numbers.
    """
    check_model_naming(naming)
    folder, files = _files(Path(path))
    headers = [read_header(file) for file in files]
    skipped = re.compile("|".join(f"(?:{pattern})" for pattern in (*DERIVED, *ignore)))
    builder = BindingBuilder(rank=rank)
    dtypes = {entry.name: entry for header in headers for entry in header.entries}
    wrong: list[str] = []
    copies: list[Fragment] = []  # a tied head, say: last, so that the tensor under its own name is what is read
    for header in headers:
        place = _mapping(builder, header)
        for entry in header.entries:
            if skipped.search(entry.name):
                builder.derived.append(entry.name)
                continue
            try:
                if entry.name.endswith(SUFFIX):
                    block = fp8_block = fp8_block or block_of(folder)
                    builder.fragments.append(_scale(entry, dtypes, naming, block, slot, place(entry)))
                    continue
                storage, origin = place(entry)
                num_cols = matrix_cols(entry.shape)
                segments = naming.segments(entry.name, entry.shape, Where())
                found = fragments_of(segments, num_cols=num_cols, slot=slot, storage=storage, origin=origin)
                (builder.fragments if entry.name == segments[0].tensor else copies).extend(found)
            except (UnknownParameter, BindError) as error:
                wrong.append(f"{entry.name} {list(entry.shape)} in {header.path.name}: {error}")
    if wrong:
        raise BindError(f"{folder}: {len(wrong)} tensors are not understood: {listed(wrong)}")
    builder.fragments.extend(copies)
    binding = builder.finish()
    absent = re.compile("|".join(f"(?:{pattern})" for pattern in allow_missing) or r"(?!)")
    shapes = {n: s for n, s in logical_shapes(naming.arch, naming.head).items() if not absent.search(n)}
    try:
        check_complete(claims([binding.state]), shapes, (slot,))
    except BindError as error:
        raise BindError(f"{folder}: {error}") from error
    if verify:
        check(headers, lambda name: not skipped.search(name))
    return binding


def verify(path: str | Path, *, group: dist.ProcessGroup | None = None) -> int:
    """Check what the files state of their tensors, each rank of ``group`` a part of them; the bytes this rank read.
    Where any finds a fault, the same BindError on all. ``bind(..., verify=False)`` then needs not do it again."""
    ranks = Ranks(group)

    def check_own() -> int:
        headers = [read_header(file) for file in _files(Path(path))[1]]
        names = [e.name for header in headers for e in sorted(header.entries, key=lambda e: -e.num_bytes)]
        own = set(names[ranks.rank :: ranks.size])
        return check(headers, own.__contains__)

    return ranks.agree(check_own, f"verifying {path}")[ranks.rank]


def matrix_cols(shape: Sequence[int]) -> int:
    """Columns of a parameter as ``Segment`` sees it: all dims but the last by the last; a vector is n x 1."""
    return shape[-1] if len(shape) > 1 else 1


def dequantizer(binding: Binding, block: tuple[int, int], dtype: torch.dtype | None = None) -> Convert:
    """For ``copy_regions``: fp8 weights times their block scales (in fp32, then rounded to ``dtype``, bf16 where None),
    so that any region can be had although fp8 itself may only be cut at block borders. Others must match the target."""
    scales: dict[str, torch.Tensor] = {}
    for fragment, _, view in pieces(binding):
        if fragment.tensor.endswith(SUFFIX):
            scales[fragment.tensor.removesuffix(SUFFIX)] = view
    wanted = dtype or torch.bfloat16

    def convert(key: Key, rect: Rect, data: torch.Tensor) -> torch.Tensor:
        if data.dtype != torch.float8_e4m3fn:
            return data
        if key[0] not in scales:
            raise BindError(f"{key[0]}: fp8 without {key[0]}{SUFFIX}")
        rows = torch.arange(rect[0], rect[1]) // block[0]
        cols = torch.arange(rect[2], rect[3]) // block[1]
        return (data.float() * scales[key[0]][rows][:, cols].float()).to(wanted)

    return convert


def block_of(folder: Path) -> tuple[int, int]:
    """Rows and columns that share an fp8 scale, as config.json says."""
    try:
        config = json.loads((folder / "config.json").read_text())
        rows, cols = config["quantization_config"]["weight_block_size"]
        if type(rows) is int and type(cols) is int and min(rows, cols) > 0:
            return rows, cols
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BindError("fp8 scales, but config.json has no quantization_config.weight_block_size; pass fp8_block")


def _files(path: Path) -> tuple[Path, list[Path]]:
    if path.is_file():
        return (path.parent, [path]) if path.name != INDEX else (path.parent, _indexed(path))
    if not path.is_dir():
        raise BindError(missing(path))
    single, index = path / SINGLE, path / INDEX
    if index.is_file():
        files = _indexed(index)
        if single.is_file() and single not in files:
            raise BindError(f"{path}: {SINGLE} beside {INDEX}, which does not name it: two checkpoints, remove one")
        return path, files
    if single.is_file():
        return path, [single]
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise BindError(f"{path}: neither {INDEX} nor {SINGLE}, and {len(found)} other safetensors files")
    return path, found


def _indexed(index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_text())["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
            raise TypeError("weight_map does not map names of tensors to names of files in the folder")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BindError(f"{index}: not an index of safetensors files: {error}") from error
    files = [index.parent / name for name in dict.fromkeys(names.values())]
    wrong = [f"{file.name} is missing" for file in files if not file.is_file()]
    if wrong:
        raise BindError(f"{index}: {listed(wrong)}")
    inside = {entry.name: file.name for file in files for entry in read_header(file).entries}
    wrong += [f"{name} is not in {file}" for name, file in names.items() if inside.get(name) != file]
    wrong += [f"{name} is in {file} but not in the index" for name, file in inside.items() if name not in names]
    if wrong:
        raise BindError(f"{index}: {listed(wrong)}")
    return files


def map_file(path: Path) -> mmap.mmap:
    """Private mapping of a whole file: pages that someone writes become copies, the file stays as it is."""
    with open(path, "rb") as file:
        # Without reserve: the copies that nobody makes need not fit into memory.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _mapping(builder: BindingBuilder, header: FileHeader) -> Callable[[TensorEntry], tuple[int, int]]:
    """Entry -> (storage, element of it at which the tensor starts)."""
    file = map_file(header.path) if header.num_data_bytes else None
    storages: dict[str, int] = {}

    def place(entry: TensorEntry) -> tuple[int, int]:
        if not entry.num_bytes or file is None:
            return builder.storage(f"{header.path.name}:{entry.name}", torch.empty(0), host=True), 0
        size = DTYPE_BYTES[entry.dtype]
        if entry.begin % size:  # never where tensors are ordered by element size, as the package orders them
            start, count = header.data_start + entry.begin, entry.num_bytes // size
            data = torch.frombuffer(file, dtype=TORCH_DTYPES[entry.dtype], offset=start, count=count)
            return builder.storage(f"{header.path.name}:{entry.name}", data, host=True), 0
        if entry.dtype not in storages:
            count = header.num_data_bytes // size
            data = torch.frombuffer(file, dtype=TORCH_DTYPES[entry.dtype], offset=header.data_start, count=count)
            storages[entry.dtype] = builder.storage(f"{header.path.name}:{entry.dtype}", data, host=True)
        return storages[entry.dtype], entry.begin // size

    return place


def _scale(
    entry: TensorEntry,
    dtypes: dict[str, TensorEntry],
    naming: Naming,
    block: tuple[int, int],
    slot: str,
    at: tuple[int, int],
) -> Fragment:
    name = entry.name.removesuffix(SUFFIX)
    weight = dtypes.get(name)
    if weight is None or weight.dtype != "fp8":
        raise BindError(f"a scale without the fp8 weight {name}")
    (segment, *more) = naming.segments(name, weight.shape, Where())
    rows, cols = matrix_shape(weight.shape)
    if more or (segment.row_lo, segment.row_hi, segment.col_lo, segment.col_hi) != (0, rows, 0, cols):
        raise BindError("scales of a fused weight are not known")
    expected = (-(-rows // block[0]), -(-cols // block[1]))
    if entry.shape != expected:
        raise BindError(f"{rows} x {cols} in blocks of {block[0]} x {block[1]} need scales {list(expected)}")
    return Fragment(
        tensor=segment.tensor + SUFFIX,
        slot=slot,
        storage=at[0],
        row_lo=0,
        row_hi=expected[0],
        col_lo=0,
        col_hi=expected[1],
        start=0,
        stop=expected[0] * expected[1],
        origin=at[1],
        stride=expected[1],
    )
