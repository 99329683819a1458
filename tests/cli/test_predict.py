"""``nereusc fit`` and ``nereusc predict``: text, JSON, faulty input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

HEADER = (
    "layers,hidden,heads,kv_heads,ffn,vocab,seq_len,global_batch,micro_batch,gpus,gpu_type,tp,pp,precision,"
    "step_time_s,peak_mem_gb,source,row_id\n"
)


def rows(*cells: tuple[int, int, object, str]) -> str:
    return HEADER + "".join(
        f"32,4096,32,8,14336,128256,4096,128,1,16,H100-SXM-80GB,{tp},{pp},bf16,{step},,mine,{name}\n"
        for tp, pp, step, name in cells
    )


@pytest.fixture
def measured(tmp_path: Path) -> str:
    path = tmp_path / "measured.csv"
    path.write_text(rows((1, 2, 9.0, "a"), (2, 1, 8.6, "b"), (2, 2, 9.4, "c"), (4, 1, 9.9, "d"), (8, 1, 12.5, "e")))
    return str(path)


def test_what_was_measured_is_learned(nereusc: Any, measured: str, tmp_path: Path) -> None:
    calibration = str(tmp_path / "cal.json")
    fitted = nereusc("fit", measured, "-o", calibration)
    assert (fitted.code, fitted.stderr) == (0, "")
    assert "5 rows, 5 of use" in fitted.stdout and "mine h100-sxm-80gb" in fitted.stdout
    assert "peak memory: no row measured it" in fitted.stdout
    before = nereusc("predict", "--json", measured).json()
    after = nereusc("predict", "--json", "--calibration", calibration, measured).json()
    assert after["accuracy"]["step_time_s"]["mean"] < min(0.03, before["accuracy"]["step_time_s"]["mean"])
    for entry in after["rows"]:
        low, high = entry["step_time_s_within_90"]
        assert low < entry["step_time_s"] < high
        assert entry["step_time_s_error"] == entry["step_time_s"] / entry["measured_step_time_s"] - 1
        assert entry["peak_mem_gb"] > 0 and "peak_mem_gb_error" not in entry and "dp = " in entry["assumed"][0]
    ranges = [[e["step_time_s_within_90"] for e in d["rows"]] for d in (before, after)]
    assert all(b[1] / b[0] > a[1] / a[0] for b, a in zip(*ranges, strict=True))


def test_json_of_fit(nereusc: Any, measured: str, tmp_path: Path) -> None:
    document = nereusc("fit", "--json", measured, "-o", str(tmp_path / "cal.json")).json()
    assert document["step_time"]["all"]["num"] == 5 and document["peak_memory"] == {}


def test_text_of_predict(nereusc: Any, measured: str) -> None:
    ran = nereusc("predict", measured)
    lines = ran.stdout.splitlines()
    assert ran.code == 0 and lines[0].split()[:2] == ["row", "step"] and len(lines) == 9
    assert lines[-2].startswith("step time: 5 measured, mean error ")
    assert lines[-1].startswith("from data sheets and priors alone")


def test_rows_of_no_use_are_named_and_the_others_used(nereusc: Any, measured: str) -> None:
    path = Path(measured)
    path.write_text(path.read_text().replace("H100-SXM-80GB,2,1", "H101,2,1"))
    ran = nereusc("predict", "--json", measured)
    document = ran.json()
    assert ran.code == 0 and "NRS7003" in ran.stderr and "b cannot be used: gpu_type 'H101'" in ran.stderr
    assert [entry["problem"] is None for entry in document["rows"]] == [True, False, True, True, True]


def test_faulty_input_has_its_code(nereusc: Any, measured: str, tmp_path: Path) -> None:
    assert "NRS7001" in nereusc("predict", __file__).stderr
    broken = tmp_path / "broken.json"
    for text in ("{", "{}", "[]", json.dumps({"version": 2})):
        broken.write_text(text)
        ran = nereusc("predict", "--calibration", str(broken), measured)
        assert ran.code == 1 and "NRS7002" in ran.stderr
    unmeasured = tmp_path / "unmeasured.csv"
    unmeasured.write_text(rows((1, 1, "", "a")))
    ran = nereusc("fit", str(unmeasured), "-o", str(tmp_path / "none.json"))
    assert ran.code == 1 and "NRS7004" in ran.stderr and not (tmp_path / "none.json").exists()
    assert nereusc("predict", "--calibration", str(tmp_path / "absent"), measured).code == 1


def test_the_step_of_a_plan(nereusc: Any, tmp_path: Path) -> None:
    path = tmp_path / "job.plan"
    path.write_text(
        'cluster { node n0 { gpus = 8 x "h100-sxm-80gb" } }\nmodel actor = "qwen2.5-7b"\n'
        "workload { algorithm = sft  prompts = 512  mini_batch = 128 }\n"
        "stage actor.train { on = n0  tp = 2  backend = megatron  optimizer = adam  zero = 1 }\n"
    )
    ran = nereusc("predict", str(path))
    assert ran.code == 0 and "s a step, 90 in 100 between" in ran.stdout and "actor.train" in ran.stdout
    document = nereusc("predict", "--json", str(path)).json()
    assert document["seconds"] == document["stages"][0]["seconds"] and document["stages"][0]["critical"]
    path.write_text("cluster {")
    assert nereusc("predict", str(path)).code == 1


def test_the_best_plan_is_written_as_a_variant(nereusc: Any, tmp_path: Path, repo_root: Path) -> None:
    plans = repo_root / "tests" / "plans"
    job = tmp_path / "job.plan"
    job.write_text((plans / "ppo-8b-4k-refused.plan").read_text().replace('extends "', f'extends "{plans}/'))
    better = tmp_path / "better.plan"
    ran = nereusc("plan", str(job), "-o", str(better), "--best", "1")
    assert ran.code == 0 and "does not fit" in ran.stdout and "1. " in ran.stdout
    assert nereusc("check", "--quiet", str(better)).code == 0
    document = nereusc("plan", "--json", "--pin", "ref.infer", str(job)).json()
    assert document["present_seconds"] is None and "ref.infer" not in document["best"][0]["changes"]
    assert all(s["peak_bytes"] <= s["capacity_bytes"] for s in document["best"][0]["stages"])
    assert nereusc("plan", "--pin", "nobody", str(job)).code == 64


def test_stages_move_within_limits(nereusc: Any, tmp_path: Path, repo_root: Path) -> None:
    plan, better = repo_root / "tests" / "plans" / "ppo-8b-4k-refused.plan", tmp_path / "better.plan"
    limits = ("--move", "--gpus", "actor.train=8", "--gpus", "ref.infer=1-4", "--only", "actor.train.tp=2,4")
    ran = nereusc("plan", str(plan), *limits, "--smallest", "--json", "-o", str(better))
    assert ran.code == 0, ran.stderr
    document = ran.json()
    assert document["num_placements"] >= 1
    assert document["smallest"]["num_gpus"] <= 16 and document["smallest"]["seconds"] > document["best"][0]["seconds"]
    checked = nereusc("check", "--json", str(better)).json()
    stages = {stage["name"]: stage for stage in checked["files"][0]["plan"]["stages"]}
    assert len(stages["actor.train"]["devices"]) == 8 and stages["actor.train"]["tp"] in (2, 4)
    assert 1 <= len(stages["ref.infer"]["devices"]) <= 4
    text = nereusc("plan", str(plan), "--move", "--free", "n1", "--smallest", "--best", "1").stdout
    assert "on = n0" in text and "the smallest pool that holds all stages: the first " in text
    for wrong in (
        ("--gpus", "actor.train=8"),
        ("--smallest",),
        ("--move", "--gpus", "actor.train=8-4"),
        ("--move", "--gpus", "nobody=8"),
        ("--move", "--free", "n7"),
        ("--only", "actor.train.cp=1"),
        ("--only", "actor.train=1"),
        ("--only", "actor.train.tp=2,,4"),
        ("--only", "actor.train.zero=4"),
        ("--only", "actor.train.recompute=some"),
        ("--pin", "actor.train", "--only", "actor.train.tp=3"),
        ("--move", "--pin", "actor.train", "--free", "n0"),
        ("--move", "--pin", "actor.train", "--gpus", "actor.train=3"),
    ):
        ran = nereusc("plan", str(plan), *wrong)
        assert ran.code == 64 and ("go with --move" in ran.stderr or wrong[-1].split("=")[0] in ran.stderr), wrong
    ran = nereusc("plan", str(plan), "--only", "actor.train.tp=64")
    assert ran.code == 3 and "no plan that keeps to these limits fits" in ran.stdout


def test_no_input_is_written_over(nereusc: Any, measured: str, good_plan: str, tmp_path: Path) -> None:
    variant, link = tmp_path / "variant.plan", tmp_path / "link.plan"
    variant.write_text(f'extends "{good_plan}"\n')
    link.symlink_to(good_plan)
    for command in (
        ("fit", measured, "-o", measured),
        ("plan", good_plan, "-o", f"./{good_plan}"),
        ("plan", good_plan, "-o", str(link)),
        ("plan", str(variant), "-o", good_plan),
    ):
        before = Path(command[-1]).read_text()
        ran = nereusc(*command)
        assert ran.code == 1 and "is read by this command" in ran.stderr
        assert Path(command[-1]).read_text() == before


def test_nothing_usable_is_an_error(nereusc: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(rows((3000, 1, 1.0, "a")))
    ran = nereusc("predict", str(path))
    assert ran.code == 1 and "NRS7003" in ran.stderr and "none of its rows can be used" in ran.stderr


PLAN = """
cluster { node n[0-1] { gpus = 8 x "h100-sxm-80gb" } }
model actor = "llama-3.1-8b"
model ref = actor { frozen = true }
workload { algorithm = grpo  prompts = 64  samples = 8  mini_batch = 256  prompt_len = 128  response_len = 1024 }
stage actor.generate { on = n[0-1]  tp = 2  engine = vllm  kv_cache = 24 GiB  idle = offload }
stage actor.logprob { with = actor.train }
stage ref.infer { on = n[0-1]  tp = 2  idle = offload }
stage actor.train { on = n[0-1]  tp = 2  pp = 2  backend = megatron  optimizer = adam }
"""
EXPORTS = Path(__file__).parents[1] / "data" / "exports"


@pytest.mark.parametrize(
    "name", ["verl_console.log", "verl_file.jsonl", "nemo_wandb_history.csv", "openrlhf_console.log", "."]
)
def test_a_run_that_wrote_down_its_steps_is_learned(nereusc: Any, tmp_path: Path, name: str) -> None:
    plan, calibration = tmp_path / "job.plan", str(tmp_path / "cal.json")
    plan.write_text(PLAN)
    fitted = nereusc("fit", "--json", str(EXPORTS / name), "--plan", str(plan), "-o", calibration).json()
    assert fitted["steps"] in (2, 3) and len(fitted["stages"]) == 4
    for stage in fitted["stages"]:
        assert stage["after"] < stage["before"] and stage["before"] > 0.3
        # Two or three steps are too few to say that training is four times as slow as its neighbours' classes.
        assert stage["after"] < 0.05 or stage["stage"] == "actor.train"
    found = nereusc("predict", "--json", str(plan), "--calibration", calibration).json()
    measured = {stage["stage"]: stage["measured_s"] for stage in fitted["stages"]}
    assert {stage["stage"] for stage in found["stages"]} == {*measured, "actor.sync"}
    for stage in found["stages"]:  # of other lengths
        if stage["stage"] == "actor.sync":
            continue
        assert stage["stage"] == "actor.train" or stage["seconds"] == pytest.approx(measured[stage["stage"]], rel=0.35)
    text = nereusc("fit", str(EXPORTS / name), "--plan", str(plan), "-o", calibration)
    assert text.code == 0 and f"steps of {fitted['framework']}, run as" in text.stdout


def test_whole_steps_alone_are_dealt_to_the_stages(nereusc: Any, tmp_path: Path) -> None:
    plan, history = tmp_path / "job.plan", tmp_path / "history.csv"
    plan.write_text(PLAN)
    history.write_text("_step,timing_s/step,response_length/mean\n" + "".join(f"{n},80,{1000 + n}\n" for n in range(9)))
    ran = nereusc("fit", str(history), "--plan", str(plan), "-o", str(tmp_path / "cal.json"))
    assert ran.code == 0 and "no stage was timed" in ran.stdout
    found = nereusc("predict", "--json", str(plan), "--calibration", str(tmp_path / "cal.json")).json()
    assert 60 < found["seconds"] < 82


def test_a_file_that_is_no_export_is_told(nereusc: Any, tmp_path: Path) -> None:
    plan, history = tmp_path / "job.plan", tmp_path / "history.csv"
    plan.write_text(PLAN)
    history.write_text("_step,loss\n1,0.5\n")
    ran = nereusc("fit", str(history), "--plan", str(plan), "-o", str(tmp_path / "cal.json"))
    assert ran.code == 1 and "NRS7006" in ran.stderr and not (tmp_path / "cal.json").exists()
    ran = nereusc("fit", str(tmp_path / "gone.csv"), "--plan", str(plan), "-o", str(tmp_path / "cal.json"))
    assert ran.code == 1 and "cannot read" in ran.stderr
