"""Tables of measurements: what is read, what is assumed, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.ir.diagnostic import DiagnosticError
from nereus.planner.rows import REQUIRED, read_rows
from nereus.planner.runs import Run

HEADER = (
    "model,params_b,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,global_batch,micro_batch,gpus,gpu_type,tp,pp,dp,"
    "precision,recompute,zero_dist_opt,step_time_s,peak_mem_gb,mem_basis,note,row_id"
)
LLAMA = "llama,8.03,32,4096,32,8,14336,128256,4096,128,1,16,H100-SXM-80GB,2,2,4,bf16,full,dist_opt,12.5,60,GiB,,a-1"


def one(row: str) -> Run:
    (read,) = read_rows(f"{HEADER}\n{row}\n", "rows.csv")
    assert read.run is not None, read.problem
    return read.run


def problem(row: str) -> str:
    (read,) = read_rows(f"{HEADER}\n{row}\n", "rows.csv")
    assert read.run is None
    return read.problem


def test_a_whole_row() -> None:
    run = one(LLAMA)
    assert (run.tp, run.pp, run.dp, run.num_microbatches) == (2, 2, 4, 32)
    assert run.mlp_matrices == 3 and run.recompute == "full" and run.sharding == "optimizer"
    assert run.step_time_s == 12.5 and run.peak_mem_gb == 60 and run.gb_bytes == 2**30
    assert run.machine.flops_per_s == 989e12 and run.machine.domain == 8


def test_matrices_of_the_mlp_follow_from_the_parameters() -> None:
    gpt = LLAMA.replace("llama,8.03,32,4096,32,8,14336", "gpt,6.7,32,4096,32,32,16384")
    assert one(gpt).mlp_matrices == 2


def test_fp8_multiplies_faster_and_racks_have_larger_domains() -> None:
    row = LLAMA.replace("H100-SXM-80GB", "GB200-186GB").replace("bf16", "MXFP8")
    assert one(row).machine.flops_per_s == 5000e12 and one(row).machine.flops16_per_s == 2500e12
    assert one(row).machine.domain == 72


def test_experts_of_the_note() -> None:
    row = (
        "qwen,30.5,48,2048,32,4,768,151936,4096,512,4,8,H100-SXM-80GB,1,1,8,bf16,none,dist_opt,9,,,"
        "MoE 128 experts top-8,q-1"
    )
    run = one(row)
    assert run.experts_per_token == 8 and run.expert_params == 48 * 128 * 3 * 2048 * 768


def test_what_is_left_open_is_assumed_and_said() -> None:
    row = LLAMA.replace(",2,2,4,bf16,full,", ",2,2,,bf16,unstated,").replace("128256,4096,128,1,", "128256,4096,128,,")
    (read,) = read_rows(f"{HEADER}\n{row}\n", "rows.csv")
    assert read.run is not None and read.run.dp == 4 and read.run.recompute == "none"
    assert set(read.assumed) == {"dp = 4", "micro_batch = 1", "recompute = none"}


@pytest.mark.parametrize(
    "change, says",
    [
        (("H100-SXM-80GB", "H101"), "gpu_type 'H101' is not in the hardware table"),
        ((",4096,32,8,", ",much,32,8,"), "hidden is 'much', which is no number"),
        ((",16,H100", ",,H100"), ""),
        ((",2,2,4,bf16", ",2.5,2,4,bf16"), "tp is 2.5; a positive whole number is needed"),
        ((",2,2,4,bf16", ",16,2,,bf16"), "tp 16 x pp 2 x cp 1 needs more than its 16 gpus"),
        (("llama,8.03,32", "llama,8.03,"), "layers is missing"),
    ],
)
def test_a_row_of_no_use_says_why(change: tuple[str, str], says: str) -> None:
    row = LLAMA.replace(*change)
    assert row != LLAMA
    if says:
        assert problem(row) == says
    else:
        assert one(row).gpus == 16  # from dp x tp x pp


def test_a_table_without_the_columns_is_refused() -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_rows("model,gpus\na,8\n", "rows.csv")
    assert "it has no column layers, hidden" in caught.value.diagnostics[0].headline
    with pytest.raises(DiagnosticError, match="it has no rows"):
        read_rows(HEADER + "\n", "rows.csv")


@given(st.lists(st.text(alphabet=st.characters(codec="ascii", exclude_characters="\n\r"), max_size=12), max_size=20))
def test_any_text_is_read_or_refused(cells: list[str]) -> None:
    text = ",".join(REQUIRED) + "\n" + ",".join(cells) + "\n"
    try:
        rows = read_rows(text, "rows.csv")
    except DiagnosticError:
        return
    for row in rows:
        assert (row.run is None) == bool(row.problem)
