"""Rows of published or own measurements (CSV) -> runs.

Columns: ``REQUIRED`` must be there; the others may be absent or empty. What a row leaves open is assumed, and the
assumption is listed with it; one is not: fp16 runs are taken for older than flash attention. A row that cannot be used
(no batch, an unknown GPU) says why and stops nothing.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from nereus.ir.cluster import GpuType
from nereus.ir.diagnostic import Diagnostic, DiagnosticError, Severity
from nereus.models.hardware import gpu_ids, gpu_type
from nereus.planner.labels import memory_labels, memory_reading, number_format, step_labels
from nereus.planner.machines import machine_of
from nereus.planner.runs import RECOMPUTE, Run

REQUIRED = (
    "layers", "hidden", "heads", "ffn", "vocab", "seq_len", "global_batch", "micro_batch", "gpus", "gpu_type",
    "tp", "pp", "precision",
)  # fmt: skip

_GIB = 2**30
#: What a reading counts beside tensors: an allocator nothing, a device its context, libraries and communicators.
_CONSTANT_BYTES = {"allocated": 0.1e9, "reserved": 0.5e9, "device": 2e9, "unstated": 1e9}
_MOE = re.compile(r"MoE (\d+) \w+ top-(\d+)")
#: A number, and perhaps words behind it. "1,024" is none, rather than 1.
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?(?=\s|$)", re.ASCII | re.IGNORECASE)
#: No size, count or measurement is larger; what is would end in sums that are not finite.
_LARGEST = 1e12

_Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``run`` is None where ``problem`` says why. ``assumed``: what the row leaves open and was filled in."""

    id: str
    line: int
    run: Run | None
    problem: str = ""
    assumed: tuple[str, ...] = ()


def read_rows(text: str, path: str) -> tuple[Row, ...]:
    """Raises DiagnosticError (NRS7001) where the text is no table of measurements."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        reader.fieldnames = header = [name.strip().lower() for name in reader.fieldnames or ()]
        if problem := _problem_of(header):
            raise DiagnosticError([no_table(path, problem)])
        found = [_row(cells, reader.line_num) for cells in reader]
    except csv.Error as error:
        raise DiagnosticError([no_table(path, f"line {reader.reader.line_num}: {error}")]) from None
    if not found:
        raise DiagnosticError([no_table(path, "it has no rows")])
    return tuple(found)


def _problem_of(header: Sequence[str]) -> str:
    missing = [name for name in REQUIRED if name not in header]
    if missing == [*REQUIRED]:
        return "its first line names none of the columns that are needed, with commas between them"
    if missing:
        return f"it has no column {', '.join(missing)}"
    twice = [name for name, num in Counter(header).items() if name and num > 1]
    return f"it has column {', '.join(twice)} more than once" if twice else ""


def no_table(path: str, why: str) -> Diagnostic:
    return Diagnostic(
        code="NRS7001",
        severity=Severity.ERROR,
        headline=f"{path} is no table of measurements: {why}",
        help=f"a CSV file with a header line; needed are {', '.join(REQUIRED)}",
    )


class _Unusable(Exception):
    """Why a row is no run."""


def _row(cells: _Row, line: int) -> Row:
    # A row longer than the header has its rest under None, a shorter one has None for what it lacks.
    too_long = None in cells
    cells = {name: str(cell or "").strip() for name, cell in cells.items() if name}
    id = cells.get("row_id") or f"line {line}"
    assumed: list[str] = []
    try:
        if too_long:
            raise _Unusable("it has more cells than the header")
        return Row(id=id, line=line, run=_run(cells, assumed), assumed=tuple(assumed))
    except _Unusable as reason:
        return Row(id=id, line=line, run=None, problem=str(reason), assumed=tuple(assumed))


def _run(cells: _Row, assumed: list[str]) -> Run:
    gpu = _gpu(cells["gpu_type"])
    layers, hidden, heads = (_whole(cells, name) for name in ("layers", "hidden", "heads"))
    ffn, vocab, seq_len = (_whole(cells, name) for name in ("ffn", "vocab", "seq_len"))
    kv_heads = _whole(cells, "kv_heads", heads)
    tp, pp = (_whole(cells, name, 1, assumed) for name in ("tp", "pp"))
    cp, vp, ep = (_whole(cells, name, 1) for name in ("cp", "vp", "ep"))
    dp = _number(cells, "dp") or 0.0
    gpus = _whole(cells, "gpus", round(dp * tp * pp * cp) or None)
    if not dp:
        dp = gpus / (tp * pp * cp)
        if dp < 1:
            raise _Unusable(f"tp {tp} x pp {pp} x cp {cp} needs more than its {gpus} gpus")
        assumed.append(f"dp = {dp:g}")
    elif round(dp * tp * pp * cp) != gpus:
        raise _Unusable(f"dp {dp:g} x tp {tp} x pp {pp} x cp {cp} is not its {gpus} gpus")
    for part, size, whole, limit in (
        ("kv_heads", kv_heads, "heads", heads), ("heads", heads, "hidden", hidden), ("pp", pp, "layers", layers),
        ("ep", ep, "gpus", gpus),
    ):  # fmt: skip
        if size > limit:
            raise _Unusable(f"{part} {size} is more than {whole} {limit}")
    micro_batch = _number(cells, "micro_batch")
    if not micro_batch:
        micro_batch = 1.0
        assumed.append("micro_batch = 1")
    global_batch = _number(cells, "global_batch")
    if not global_batch:
        global_batch = dp * micro_batch
        assumed.append(f"global_batch = {global_batch:g}, one micro-batch a rank")
    if dp * micro_batch > global_batch * 1.001:
        raise _Unusable(f"dp {dp:g} x micro_batch {micro_batch:g} is more than global_batch {global_batch:g}")
    sharding = cells.get("zero_dist_opt", "").lower()
    recompute = cells.get("recompute", "").lower().split(" ")[0]
    if recompute not in RECOMPUTE:
        recompute = "none"
        assumed.append("recompute = none")
    note, format = cells.get("note", ""), number_format(cells["precision"])
    moe = _MOE.search(note)
    num_experts, per_token = (int(moe.group(1)), int(moe.group(2))) if moe else (1, 1)
    if not 1 <= per_token <= num_experts <= _LARGEST:
        raise _Unusable(f"top-{per_token} of {num_experts} experts")
    if format == "16" and "16" not in cells["precision"]:
        assumed.append("precision = bf16")
    shape = (layers, hidden, heads, kv_heads, ffn, vocab)
    billions = _number(cells, "params_b") or None
    mlp_matrices, tables, params = _params(shape, billions, num_experts=num_experts if moe else None, assumed=assumed)
    # First layers without experts are told by the sum alone.
    others = layers * _attention_params(shape) + vocab * hidden
    expert_params = min(float(layers * num_experts * mlp_matrices * hidden * ffn), max(params - others, 0.0))
    reading = cells.get("mem_basis", "")
    return Run(
        machine=machine_of(gpu, format),
        labels=step_labels(cells.get("source", ""), gpu, format, sharded="fsdp" in sharding),
        memory_labels=memory_labels(cells, gpu, format),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        mlp_matrices=mlp_matrices,
        vocab=vocab,
        params=params,
        expert_params=expert_params if moe else 0.0,
        experts_per_token=per_token,
        shared_experts=1 if moe and "shared" in note else 0,
        seq_len=seq_len,
        global_batch=global_batch,
        micro_batch=micro_batch,
        gpus=gpus,
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        vp=vp,
        ep=ep,
        recompute=recompute,
        sharding=_sharding(sharding.replace("-", ""), assumed),
        gradient_bytes=2 if cells["precision"] == "fp16" else 4,
        flash=not ("unfused" in note or "selective row" in note or cells["precision"] == "fp16"),
        tied=tables == 1,
        sequence_parallel=_sequence_parallel(note, recompute, mlp_matrices, tp, assumed),
        read_last="logging rank" in reading,
        step_time_s=_number(cells, "step_time_s"),
        peak_mem_gb=_number(cells, "peak_mem_gb"),
        constant_bytes=_CONSTANT_BYTES[memory_reading(reading)],
        gb_bytes=_GIB if "ib" in reading.lower() else 1e9,
        out_of_memory=cells.get("outcome", "").upper().startswith("OOM"),
    )


def _gpu(name: str) -> GpuType:
    if not name:
        raise _Unusable("gpu_type is missing")
    for id in gpu_ids():
        if name.lower() in (id, gpu_type(id).name.lower()):
            return gpu_type(id)
    near = [id for id in gpu_ids() if name.lower() in id] or get_close_matches(name.lower(), gpu_ids())
    hint = f"; there is {', '.join(near)}" if near else ""
    raise _Unusable(f"gpu_type {name!r} is not in the hardware table{hint}")


def _attention_params(shape: tuple[int, ...]) -> float:
    """Of one layer."""
    _, hidden, heads, kv_heads, _, _ = shape
    return hidden * hidden * (2 + 2 * kv_heads / heads)


def _params(
    shape: tuple[int, ...], billions: float | None, *, num_experts: int | None, assumed: list[str]
) -> tuple[int, int, float]:
    """(matrices of the MLP, tables of tokens, parameters): whichever of gated or not, tied or not comes nearest to
    ``params_b``. Experts are gated."""
    layers, hidden, _, _, ffn, vocab = shape
    mlp = hidden * ffn * (num_experts or 1)
    whole = {
        (matrices, tables): layers * (_attention_params(shape) + matrices * mlp) + vocab * hidden * tables
        for matrices in ((2, 3) if num_experts is None else (3,))
        for tables in (1, 2)
    }
    if billions is None:
        assumed.append("a gated MLP, untied embeddings")
        return 3, 2, whole[3, 2]
    nearest = min(whole, key=lambda choice: abs(whole[choice] - billions * 1e9))
    return *nearest, billions * 1e9


def _sequence_parallel(note: str, recompute: str, mlp_matrices: int, tp: int, assumed: list[str]) -> bool:
    """Models without a gated MLP are of a time before it."""
    if "sequence parallel" in note:
        return "selective row" not in note or recompute == "selective"
    if tp > 1:
        assumed.append(f"{'' if mlp_matrices == 3 else 'no '}sequence parallelism")
    return mlp_matrices == 3


def _sharding(word: str, assumed: list[str]) -> str:
    if ("fsdp" in word and "zero2" not in word) or "zero3" in word:
        return "full"
    if "zero2" in word:
        return "gradients"
    if "zero1" in word or "dist" in word:
        return "optimizer"
    if word in ("none", "zero0"):
        return "none"
    assumed.append("optimizer not sharded")
    return "none"


def _number(cells: _Row, name: str) -> float | None:
    cell = cells.get(name, "")
    if not cell or cell == "unstated":
        return None
    match = _NUMBER.match(cell)
    if match is None:
        raise _Unusable(f"{name} is {cell!r}, which is no plain number")
    found = float(match.group())
    if found > _LARGEST or 0 < found < 1 / _LARGEST:
        raise _Unusable(f"{name} is {cell!r}, which is out of all proportion")
    return found


def _whole(cells: _Row, name: str, default: int | None = None, assumed: list[str] | None = None) -> int:
    found = _number(cells, name)
    if found is None:
        if default is None:
            raise _Unusable(f"{name} is missing")
        if assumed is not None:
            assumed.append(f"{name} = {default}")
        return default
    if found < 1 or found != int(found):
        raise _Unusable(f"{name} is {found:g}; a positive whole number is needed")
    return int(found)
