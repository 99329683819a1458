"""Codes of the cost model and the search (nereus.planner)."""

from __future__ import annotations

from nereus.lang.catalog.entry import CodeEntry

_PLAN = """cluster { node n0 { gpus = 8 x "h100-sxm-80gb" } }
model actor = "llama-3.1-8b"
workload {
  algorithm = grpo  prompts = 64  samples = 8  mini_batch = 256  prompt_len = 512  response_len = 512
}
stage actor.train { on = n0  tp = 2  backend = megatron  optimizer = adam }
"""
_HEADER = "layers,hidden,heads,ffn,vocab,seq_len,global_batch,micro_batch,gpus,gpu_type,tp,pp,precision,step_time_s"

ENTRIES: tuple[CodeEntry, ...] = (
    CodeEntry(
        code="NRS7001",
        title="this is no table of measurements",
        cause=(
            "`nereusc fit` and `nereusc predict` read a CSV file with one training run a row. A column without which "
            "nothing can be said is missing, or the text is no CSV."
        ),
        example={"rows.csv": "model,gpus,step_time_s\nllama-3.1-8b,16,12.5\n"},
        command="fit",
        options=("-o", "calibration.json"),
        fix="Add the columns that the message names; docs/cost-model.md lists all of them.",
    ),
    CodeEntry(
        code="NRS7002",
        title="this is no calibration",
        cause="The file was not written by `nereusc fit`, was changed since, or was written by another version of it.",
        example={
            "rows.csv": f"{_HEADER}\n32,4096,32,14336,128256,4096,128,1,16,H100-SXM-80GB,2,2,bf16,12.5\n",
            "calibration.json": "{}\n",
        },
        command="predict",
        options=("--calibration", "calibration.json"),
        fix="Write it again with `nereusc fit ROWS.csv -o FILE`.",
    ),
    CodeEntry(
        code="NRS7003",
        title="a row cannot be used",
        cause=(
            "The named row lacks a number, has one that cannot be, or names a GPU that the hardware table does not "
            "know. The other rows are used."
        ),
        example={"rows.csv": f"{_HEADER}\n32,4096,32,14336,128256,4096,128,1,16,H101,2,2,bf16,12.5\n"},
        command="fit",
        options=("-o", "calibration.json"),
        fix="Correct the row, or leave it out.",
    ),
    CodeEntry(
        code="NRS7004",
        title="no row was measured",
        cause="A calibration is learned from rows with step_time_s or peak_mem_gb; none of the usable rows has one.",
        example={"rows.csv": f"{_HEADER}\n32,4096,32,14336,128256,4096,128,1,16,H100-SXM-80GB,2,2,bf16,\n"},
        command="fit",
        options=("-o", "calibration.json"),
        fix="Add measured rows.",
    ),
    CodeEntry(
        code="NRS7005",
        title="this is no trace that can be replayed",
        cause=(
            "`nereusc replay` reads a CSV file with one step of a job a row, in order. There is no column "
            "response_mean, a cell is no number that can be, the GPUs of a step are not whole nodes of the plan's "
            "cluster, or nothing fits on them at these lengths."
        ),
        example={
            "job.plan": (
                'cluster { node n0 { gpus = 8 x "h100-sxm-80gb" } }\nmodel actor = "qwen2.5-0.5b"\n'
                "workload { algorithm = grpo  prompts = 8  mini_batch = 8 }\n"
                "stage actor.train { on = n0  optimizer = adam }\n"
            ),
            "run.csv": "step,tokens\n0,1200\n",
        },
        command="replay",
        options=("run.csv",),
        fix="Name the columns as docs/trace-study.md does; what a job does not log may be left out.",
    ),
    CodeEntry(
        code="NRS7006",
        title="this is no export of a run",
        cause=(
            "`nereusc fit --plan` reads what verl, NeMo-RL or OpenRLHF wrote down of a run: a W&B history (CSV, JSON, "
            "JSON lines), TensorBoard events, or a console log. None of their metric names was found, or the file "
            "is something else."
        ),
        example={"run.csv": "_step,loss\n1,0.7\n", "job.plan": _PLAN},
        command="fit",
        options=("--plan", "job.plan", "-o", "calibration.json"),
        fix="Export the whole history of one run; docs/cost-model.md lists the names that are read.",
    ),
)
