"""Generation throughput against published measurements (benchmarks/data/generation.csv): `make bench` prints it.

python benchmarks/decode.py            every measurement predicted from folds that do not hold it
... --write                            a table into docs/cost-model.md, under its own heading

A saturated engine runs as many sequences as its cache holds; that number is not published and is computed here.
"""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from accuracy_tables import header, line, main

from nereus.models.hardware import gpu_ids, gpu_type
from nereus.planner.accuracy import accuracy
from nereus.planner.calibration import GENERATION, served
from nereus.planner.generation import Serving
from nereus.planner.labels import engine_labels
from nereus.planner.learned import learn
from nereus.planner.machines import machine_of

ROOT = Path(__file__).resolve().parent
DATA = ROOT / "data" / "generation.csv"
NUM_FOLDS = 10
#: layers, hidden, heads, kv heads.
SHAPES = {
    "llama3.1-8b": (32, 4096, 32, 8),
    "llama3.1-70b": (80, 8192, 64, 8),
    "llama3.3-70b": (80, 8192, 64, 8),
    "llama3.1-405b": (126, 16384, 128, 8),
    "llama-7b": (32, 4096, 32, 32),
    "llama2-70b": (80, 8192, 64, 8),
    "gpt-13b": (40, 5120, 40, 40),
}
GPUS = {gpu_type(id).name: id for id in gpu_ids()}
#: Shortest response whose throughput says something about decoding.
SHORTEST = 16
#: Share of the GPU that a serving engine is given, and the most sequences it schedules at once.
ENGINE_SHARE, MOST_SEQUENCES = 0.95, 2048


def measured() -> tuple[list[Serving], list[float]]:
    """(engines, seconds per generated token)."""
    engines, seconds = [], []
    with open(DATA, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            serving = _serving(row)
            if serving.response_len < SHORTEST:
                continue
            if row["out_tokens_per_s_total"]:
                seconds.append(1 / float(row["out_tokens_per_s_total"]))
            elif row["request_latency_s"]:
                seconds.append(float(row["request_latency_s"]) / serving.response_len / serving.batch)
            else:
                continue
            engines.append(serving)
    return engines, seconds


def _serving(row: dict[str, str]) -> Serving:
    gpu = gpu_type(GPUS[row["gpu_type"]])
    layers, hidden, heads, kv_heads = SHAPES[row["model"]]
    format = "fp8" if row["precision"] == "fp8" else "16"
    serving = Serving(
        machine=machine_of(gpu, format),
        labels=engine_labels(row["engine"], row["model"], gpu, format),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        active_params=float(row["params_b"]) * 1e9,
        params=float(row["params_b"]) * 1e9,
        weight_bytes=1 if format == "fp8" else 2,
        cache_bytes=1 if row["kv_precision"] == "fp8" else 2,
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        prompt_len=float(row["input_len"]),
        response_len=float(row["output_len"]),
        batch=1,
    )
    if row["batch_or_concurrency"].isdigit():
        return replace(serving, batch=float(row["batch_or_concurrency"]))
    # Data sheets count a GPU's memory in GiB and call them GB.
    room = ENGINE_SHARE * gpu.mem_gb * 2**30 - serving.params * serving.weight_bytes / serving.tp
    held = room / serving.cache_token_bytes / (serving.prompt_len + serving.response_len)
    return replace(serving, batch=float(np.clip(held, 1, MOST_SEQUENCES)))


def across_folds(engines: list[Serving], seconds: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(predicted, low, high) seconds per token, each from the folds that do not hold it."""
    seen, y = served(engines), np.array(seconds)
    fold = np.random.default_rng(0).permutation(len(y)) % NUM_FOLDS
    value, low, high = np.zeros(len(y)), np.zeros(len(y)), np.zeros(len(y))
    for number in range(NUM_FOLDS):
        out, others = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
        predicted = learn(GENERATION, seen.part(others), y[others]).predict(seen.part(out))
        value[out] = predicted.value
        low[out], high[out] = predicted.within_90()
    return value, low, high


def report() -> str:
    engines, seconds = measured()
    value, low, high = across_folds(engines, seconds)
    y = np.array(seconds)
    groups: dict[str, list[int]] = {}
    for number, engine in enumerate(engines):
        groups.setdefault(f"{engine.labels[1].partition(':')[2]}, {engine.machine.gpu}", []).append(number)
    lines = [
        f"{len(y)} throughputs; each predicted from the other {NUM_FOLDS - 1} of {NUM_FOLDS} folds. Regenerate with "
        "`python benchmarks/decode.py --write`.",
        "",
        *header("engine"),
        line("all", accuracy(value, y, low, high)),
    ]
    for name, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        if len(members) >= 5:
            lines.append(line(name, accuracy(value[members], y[members], low[members], high[members])))
    return "\n".join(lines)


if __name__ == "__main__":
    main(__doc__, "decode", report)
