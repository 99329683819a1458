"""Seconds of whole RL steps against published ones (benchmarks/data/rl_steps.csv): `make bench` prints it.

python benchmarks/rl_steps.py          every row, as predicted and with one factor learned from other rows
... --write                            a table into docs/cost-model.md, under its own heading

Rows are NeMo-RL's GRPO runs. What they do not tell is assumed: prompts of 128 tokens, packed micro-batches of one whole
sequence, full recomputation, a sharded optimizer, log-probabilities and the reference in the trainer's processes, even
pipelines, and in the asynchronous runs half of the GPUs for generation. What a framework adds to every step (weight
sync, waking engines, data, padding) is in no prediction; a job learns it from its own steps (``planner.online``). Here
it is one factor: of the same model's other rows, or of all other models. One published row is left out: its step time
and its mean length are the same number.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from accuracy_tables import main
from cost_model import run_of, usable
from decode import GPUS, measured
from numpy.typing import NDArray

from nereus.ir.plan import Plan
from nereus.lang.api import resolve_text
from nereus.models.presets import preset
from nereus.planner.calibration import calibrate
from nereus.planner.weight_sync import synced_step_time

ROOT = Path(__file__).resolve().parent
DATA = ROOT / "data" / "rl_steps.csv"
PROMPT_LEN = 128
MODELS = {
    "llama3.1-8b": "llama-3.1-8b",
    "qwen3-32b": "qwen3-32b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
    "deepseek-v3": "deepseek-v3",
}
#: GPUs of a node.
NODE = {"H100-SXM-80GB": 8, "GB200-186GB": 4}


def plan_of(row: dict[str, str]) -> Plan | None:
    """None where the row's layout cannot be said in a plan."""
    if row["actor_model"] not in MODELS or row["precision"] != "bf16":
        return None
    gpus, node = int(row["gpus"]), NODE[row["gpu_type"]]
    nodes = gpus // node
    asynchronous = row["sync_mode"] != "on-policy"
    first = f"n[0-{nodes // 2 - 1}]" if asynchronous else f"n[0-{nodes - 1}]"
    second = f"n[{nodes // 2}-{nodes - 1}]" if asynchronous else first
    samples = int(row["samples_per_step"])
    response = round(float(row["avg_response_len"])) - PROMPT_LEN
    longest = int(row["max_seq_len"])
    ep, pp, layers = int(row["train_ep"]), int(row["train_pp"]), preset(MODELS[row["actor_model"]]).num_layers
    uneven = ", ".join(str(layers // pp + (stage < layers % pp)) for stage in range(pp))
    text = f"""
cluster {{ node n[0-{nodes - 1}] {{ gpus = {node} x "{GPUS[row["gpu_type"]]}"  host_mem = 4 TiB }} }}
model actor = "{MODELS[row["actor_model"]]}"
model ref = actor {{ frozen = true }}
workload {{
  algorithm = grpo  mode = {"async { staleness = 1 }" if asynchronous else "sync"}
  prompts = {samples // 16}  samples = 16  mini_batch = {row["train_global_batch"]}
  prompt_len = {PROMPT_LEN}  response_len = {response}  max_response = {longest - PROMPT_LEN}
}}
stage actor.generate {{ engine = vllm  on = {first}  tp = {row["gen_tp"]}  pp = {row["gen_pp"]}  idle = offload }}
stage actor.train {{
  backend = megatron  on = {second}  tp = {row["train_tp"]}  cp = {row["train_cp"]}  pp = {row["train_pp"]}
  {f"ep = {ep}  etp = 1" if ep > 1 else ""}  {f"pp_split = ({uneven})" if layers % pp else ""}
  max_tokens = {longest}  recompute = full  zero = 1  optimizer = adam
}}
stage actor.logprob {{ with = actor.train }}
stage ref.infer {{ with = actor.train  swap = host }}
"""
    return resolve_text(text, path="row.plan", base_dir=".").plan


def factors(ratio: NDArray[np.float64], groups: list[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(of the group's other rows, of all other groups): geometric means of measured / predicted; nan where there is
    no other row."""
    logs, names = np.log(ratio), np.array(groups)
    own, others = np.full(len(logs), np.nan), np.full(len(logs), np.nan)
    for number, name in enumerate(groups):
        alike = (names == name) & (np.arange(len(logs)) != number)
        mode = name.rpartition(", ")[2]
        apart = (names != name) & np.array([other.rpartition(", ")[2] == mode for other in groups])
        if alike.any():
            own[number] = np.exp(logs[alike].mean())
        if apart.any():
            others[number] = np.exp(logs[apart].mean())
    return own, others


def report() -> str:
    calibration = calibrate([run_of(row) for row in usable()], *measured())
    predicted, seconds, groups, skipped = [], [], [], 0
    with open(DATA, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            plan = plan_of(row)
            if plan is None:
                skipped += 1
                continue
            mode = "on policy" if row["sync_mode"] == "on-policy" else "one step off"
            predicted.append(synced_step_time(plan, calibration).seconds)
            seconds.append(float(row["step_time_s"]))
            groups.append(f"{row['actor_model']}, {mode}")
    y, p = np.array(seconds), np.array(predicted)
    own, others = factors(y / p, groups)
    lines = [
        f"{len(y)} steps of NeMo-RL 0.4 to 0.6 (median of measured / predicted, and its range); {skipped} rows cannot "
        "be said in a plan. Regenerate with `python benchmarks/rl_steps.py --write`.",
        "",
        "| model, mode | steps | measured / predicted | mean error, factor of the same job | of other jobs |",
        "|---|---|---|---|---|",
    ]
    for name in ["all", *dict.fromkeys(groups)]:
        at = np.array([name in ("all", group) for group in groups])
        ratio = (y / p)[at]
        errors = [np.abs(p[at] * factor[at] / y[at] - 1) for factor in (own, others)]
        means = [f"{np.nanmean(error):.1%}" if np.isfinite(error).any() else "-" for error in errors]
        lines.append(
            f"| {name} | {at.sum()} | {np.median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f}) | "
            f"{means[0]} | {means[1]} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(__doc__, "rl steps", report)
