"""Tables of measurements: what is read, what is assumed, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.ir.diagnostic import DiagnosticError
from nereus.planner.rows import REQUIRED, read_rows
from nereus.planner.runs import Run, columns
from nereus.planner.step_time import class_seconds

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
    assert set(read.assumed) == {"dp = 4", "micro_batch = 1", "recompute = none", "sequence parallelism"}


def test_sequence_parallelism_is_said_by_the_note_or_the_time_of_the_model() -> None:
    gpt = LLAMA.replace("llama,8.03,32,4096,32,8,14336", "gpt,6.7,32,4096,32,32,16384")
    assert one(LLAMA).sequence_parallel and not one(gpt).sequence_parallel
    assert one(gpt.replace("GiB,,", "GiB,sequence parallel; flash,")).sequence_parallel
    assert not one(LLAMA.replace("GiB,,", "GiB,selective row = sequence parallel,")).sequence_parallel


def test_a_peak_of_the_logging_rank_is_one_of_the_last_stage() -> None:
    assert not one(LLAMA).read_last
    assert one(LLAMA.replace("GiB,", "GiB of the logging rank,")).read_last


@pytest.mark.parametrize(
    "change, says",
    [
        (("H100-SXM-80GB", "H101"), "gpu_type 'H101' is not in the hardware table"),
        ((",4096,32,8,", ",much,32,8,"), "hidden is 'much', which is no plain number"),
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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("12.5,60", "-1,60"), "step_time_s is '-1', which is no plain number"),
        (("12.5,60", '"1,024",60'), "step_time_s is '1,024', which is no plain number"),
        (("12.5,60", "0x10,60"), "step_time_s is '0x10', which is no plain number"),
        (("12.5,60", "1e400,60"), "step_time_s is '1e400', which is out of all proportion"),
        ((",4096,128,1,16,H100", ",4096,1e400,1,16,H100"), "global_batch is '1e400', which is out of all proportion"),
        ((",2,2,4,bf16", ",2,2,3,bf16"), "dp 3 x tp 2 x pp 2 x cp 1 is not its 16 gpus"),
        ((",128,1,16,H100", ",128,64,16,H100"), "dp 4 x micro_batch 64 is more than global_batch 128"),
        ((",32,8,14336", ",32,64,14336"), "kv_heads 64 is more than heads 32"),
        (("H100-SXM-80GB", ""), "gpu_type is missing"),
        (("H100-SXM-80GB", "gb300"), "gpu_type 'gb300' is not in the hardware table; there is gb300-288gb"),
        (("GiB,,a-1", "GiB,MoE 8 experts top-16,a-1"), "top-16 of 8 experts"),
        (("GiB,,a-1", "GiB,,a-1,more"), "it has more cells than the header"),
    ],
)
def test_what_cannot_be_is_refused(change: tuple[str, str], says: str) -> None:
    row = LLAMA.replace(*change)
    assert row != LLAMA and problem(row) == says


def test_numbers_may_have_an_exponent_and_words_behind_them() -> None:
    assert one(LLAMA.replace("12.5,60", "1.25e1,60 of 80")).step_time_s == 12.5


def test_headers_and_lines_are_read_as_spreadsheets_write_them() -> None:
    header, noted = HEADER.replace(",", " , ").upper(), LLAMA.replace("GiB,", "GiB,a\x0cb")
    for end, row in (("\r\n", LLAMA), ("\r", LLAMA), ("\n", noted)):
        (read,) = read_rows(f"{header}{end}{row}{end}", "rows.csv")
        assert read.run is not None and read.run.tp == 2


def test_a_column_twice_is_no_table() -> None:
    with pytest.raises(DiagnosticError, match="column tp more than once"):
        read_rows(f"{HEADER},tp\n{LLAMA},4\n", "rows.csv")


@pytest.mark.parametrize("params_b", ["", "671"])
def test_no_class_of_experts_takes_less_than_nothing(params_b: str) -> None:
    """Without ``params_b`` experts count too; with it, first layers have none."""
    run = one(
        f"deepseek,{params_b},61,7168,128,128,2048,129280,4096,4096,1,256,GB200-186GB,1,4,64,MXFP8,none,dist_opt,13,,,"
        "MoE 256 experts top-8,d-1"
    )
    assert 600e9 < run.expert_params < run.params
    assert (class_seconds(columns([run])) >= 0).all()
