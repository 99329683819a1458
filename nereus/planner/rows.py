"""Rows of published or own measurements (CSV) -> runs.

Columns: ``REQUIRED`` must be there; the others may be absent or empty. What a row leaves open is assumed, and the
assumption is listed with it; one is not: fp16 runs are taken for older than flash attention. A row that cannot be used
(no batch, an unknown GPU) says why and stops nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass

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
_LEADING_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)")

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
    reader = csv.DictReader(text.splitlines(), strict=True)
    try:
        missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
        if missing:
            raise DiagnosticError([_no_table(path, f"it has no column {', '.join(missing)}")])
        found = [_row(cells, reader.line_num) for cells in reader]
    except csv.Error as error:
        raise DiagnosticError([_no_table(path, f"line {reader.line_num}: {error}")]) from None
    if not found:
        raise DiagnosticError([_no_table(path, "it has no rows")])
    return tuple(found)


def _no_table(path: str, why: str) -> Diagnostic:
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
    cells = {name: str(cell or "").strip() for name, cell in cells.items() if name in cells and name}
    id = cells.get("row_id") or f"line {line}"
    assumed: list[str] = []
    try:
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
    micro_batch = _number(cells, "micro_batch")
    if not micro_batch:
        micro_batch = 1.0
        assumed.append("micro_batch = 1")
    global_batch = _number(cells, "global_batch")
    if not global_batch:
        global_batch = dp * micro_batch
        assumed.append(f"global_batch = {global_batch:g}, one micro-batch a rank")
    recompute = cells.get("recompute", "").split(" ")[0]
    if recompute not in RECOMPUTE:
        recompute = "none"
        assumed.append("recompute = none")
    note, format = cells.get("note", ""), number_format(cells["precision"])
    moe = _MOE.search(note)
    num_experts, per_token = (int(moe.group(1)), int(moe.group(2))) if moe else (1, 1)
    shape = (layers, hidden, heads, kv_heads, ffn, vocab)
    mlp_matrices, params = _params(shape, _number(cells, "params_b"), gated=moe is not None, assumed=assumed)
    reading = cells.get("mem_basis", "")
    return Run(
        machine=machine_of(gpu, format),
        labels=step_labels(cells.get("source", ""), gpu, format, sharded="fsdp" in cells.get("zero_dist_opt", "")),
        memory_labels=memory_labels(cells, gpu, format),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        mlp_matrices=mlp_matrices,
        vocab=vocab,
        params=params,
        expert_params=float(layers * num_experts * mlp_matrices * hidden * ffn) if moe else 0.0,
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
        sharding=_sharding(cells.get("zero_dist_opt", ""), assumed),
        gradient_bytes=2 if cells["precision"] == "fp16" else 4,
        flash=not ("unfused" in note or "selective row" in note or cells["precision"] == "fp16"),
        step_time_s=_number(cells, "step_time_s"),
        peak_mem_gb=_number(cells, "peak_mem_gb"),
        constant_bytes=_CONSTANT_BYTES[memory_reading(reading)],
        gb_bytes=_GIB if "ib" in reading.lower() else 1e9,
        out_of_memory=cells.get("outcome", "").upper().startswith("OOM"),
    )


def _gpu(name: str) -> GpuType:
    for id in gpu_ids():
        if name.lower() in (id, gpu_type(id).name.lower()):
            return gpu_type(id)
    raise _Unusable(f"gpu_type {name!r} is not in the hardware table")


def _params(shape: tuple[int, ...], billions: float | None, *, gated: bool, assumed: list[str]) -> tuple[int, float]:
    """(matrices of the MLP, parameters): whichever of gated or not, tied or not comes nearest to ``params_b``."""
    layers, hidden, heads, kv_heads, ffn, vocab = shape
    attention = hidden * hidden * (2 + 2 * kv_heads / heads)
    whole = {
        (matrices, tables): layers * (attention + matrices * hidden * ffn) + vocab * hidden * tables
        for matrices in ((3,) if gated else (2, 3))
        for tables in (1, 2)
    }
    if billions is None:
        assumed.append("a gated MLP, untied embeddings")
        return 3, whole[3, 2]
    nearest = min(whole, key=lambda choice: abs(whole[choice] - billions * 1e9))
    return nearest[0], billions * 1e9


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
    match = _LEADING_NUMBER.match(cell)
    if cell and not match and cell != "unstated":
        raise _Unusable(f"{name} is {cell!r}, which is no number")
    return float(match.group(1)) if match else None


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
