"""What each subcommand prints, to which stream, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import GOOD_PLAN, SCHEMAS, check_schema

from nereus.cli.commands import doctor
from nereus.lang.catalog import CATALOG


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


# check


def test_check_prints_stages_memory_and_assumptions(nereusc, good_plan):
    ran = nereusc("check", good_plan)
    assert ran.code == 0
    assert "error" not in ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == good_plan
    header = next(line.split() for line in lines if line.split()[:2] == ["stage", "on"])
    assert header == ["stage", "on", "dp", "tp", "pp", "EMUs", "micro", "accum", "GB", "of"]
    train = next(line.split() for line in lines if line.split()[:2] == ["actor.train", "n[0-1]"])
    assert train[2:8] == ["4", "2", "2", "4", "1", "64"]
    assert train[9] == "72.0"
    assert any(line.strip().startswith("zero = 0: actor.train") for line in lines)
    assert any("0.5 GB of context" in line for line in lines)


def test_check_json_agrees_with_the_plan(nereusc, good_plan):
    ran = nereusc("check", "--json", good_plan)
    assert ran.code == 0
    document = ran.json()
    assert document["ok"] is True
    (file,) = document["files"]
    assert file["path"] == good_plan
    stages = {stage["name"]: stage for stage in file["plan"]["stages"]}
    train = stages["actor.train"]
    assert [train[axis] for axis in ("dp", "tp", "pp")] == [4, 2, 2]
    assert train["assumed"]["idle"] == "resident"
    assert "recompute" not in train["assumed"]
    memory = train["memory"]
    assert memory["need_bytes"] == sum(part["num_bytes"] for part in memory["parts"])
    assert memory["fits"] is True
    assert memory["capacity_bytes"] == 72_000_000_000


def test_check_reports_every_file_and_the_gravest_code_wins(nereusc, good_plan):
    bad = write("bad.plan", GOOD_PLAN.replace("tp = 2  pp = 2", "tp = 3  pp = 2").replace("qwen2.5-7b", "qwen2.5-7c"))
    tight = write("tight.plan", GOOD_PLAN.replace("recompute = full", "micro_batch = 64"))
    assert nereusc("check", good_plan, tight).code == 3
    ran = nereusc("check", good_plan, bad, tight)
    assert ran.code == 1
    assert good_plan in ran.stdout
    assert "bad.plan" in ran.stderr
    assert "tight.plan" in ran.stderr
    document = nereusc("check", "--json", good_plan, bad, tight).json()
    assert [file["ok"] for file in document["files"]] == [True, False, False]
    assert document["files"][1]["diagnostics"]


def test_check_of_a_plan_that_does_not_fit_still_shows_the_memory(nereusc, good_plan):
    tight = write("tight.plan", GOOD_PLAN.replace("recompute = full", "micro_batch = 64"))
    ran = nereusc("check", tight)
    assert ran.code == 3
    assert "does not fit" in ran.stdout
    assert "NRS4" in ran.stderr


def test_check_quiet_prints_only_what_is_wrong(nereusc, good_plan):
    ran = nereusc("check", "--quiet", good_plan)
    assert (ran.code, ran.stdout) == (0, "")


def test_check_concise_is_one_line_a_message(nereusc, good_plan):
    bad = write("bad.plan", GOOD_PLAN.replace("qwen2.5-7b", "qwen2.5-7c"))
    ran = nereusc("check", "--output-format", "concise", bad)
    assert ran.code == 1
    errors = [line for line in ran.stderr.splitlines() if "error" in line]
    assert errors
    assert all(line.startswith("bad.plan:") and "NRS" in line for line in errors)


def test_check_warns_of_experts_that_no_change_can_move(nereusc, good_plan):
    """The plan is legal and its job may run, so it is no error; but a user of diff must not be the first to hear it."""
    text = (
        'cluster { node n0 { gpus = 8 x "h200-sxm-141gb" } }\nmodel actor = "qwen3-30b-a3b"\n'
        "workload { algorithm = sft  prompts = 128 }\n"
        "stage actor.train { on = n0  ep = 8  fsdp = 8  recompute = full }\n"
    )
    old = write("spread.plan", text)
    ran = nereusc("check", old)
    assert ran.code == 0
    assert "warning[NRS5006]" in ran.stderr and "diff, compile and run refuse every change" in ran.stderr
    refused = nereusc("diff", old, write("other.plan", text.replace("ep = 8", "ep = 4")))
    assert refused.code != 0 and "error[NRS5006]" in refused.stderr
    assert "NRS5006" not in nereusc("check", write("whole.plan", text.replace("ep = 8", "ep = 1"))).stderr


def test_check_spells_out_rest_and_chunks(nereusc, good_plan):
    text = (
        'cluster { node n0 { gpus = 8 x "h100-sxm-80gb" } }\nmodel actor = "llama-3.1-8b"\n'
        "workload { algorithm = sft  prompts = 128 }\n"
        "stage actor.train { on = n0  pp = 4  KEYS }\n"
    )
    chunks = nereusc("check", write("chunks.plan", text.replace("KEYS", "vp = 2  pp_split = (6, rest, 6)"))).stdout
    said = " ".join(chunks.split())
    assert "layers of each pipeline stage actor.train 6, 10, 10, 6, each in 2 chunks: stage 0: 0-2, 16-18;" in said
    assert "stage 3: 13-15, 29-31" in said
    plain = " ".join(nereusc("check", write("rest.plan", text.replace("KEYS", "pp_split = (rest, 2)"))).stdout.split())
    assert "actor.train 10, 10, 10, 2: stage 0: 0-9; stage 1: 10-19; stage 2: 20-29; stage 3: 30-31" in plain
    assert "layers of each" not in nereusc("check", write("even.plan", text.replace("KEYS", ""))).stdout


def test_check_reads_stdin(spawned):
    ran = spawned(["check", "-"], stdin=GOOD_PLAN.encode())
    assert ran.code == 0
    assert ran.stdout.startswith("<stdin>\n")


@pytest.mark.parametrize("name", ["missing.plan", ".", "nul\x00byte"])
def test_check_of_what_is_no_file(nereusc, good_plan, name):
    ran = nereusc("check", name)
    assert ran.code == 1
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr
    assert ran.stderr


def test_colour_changes_escape_codes_only(spawned, good_plan):
    plain = spawned(["check", good_plan, "--color", "never"])
    forced = spawned(["check", good_plan], env={"FORCE_COLOR": "1"})
    off = spawned(["check", good_plan], env={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert "\x1b[" in forced.stdout
    assert off.stdout == plain.stdout
    assert "\x1b[" not in plain.stdout + plain.stderr
    without = forced.stdout
    for code in ("\x1b[1m", "\x1b[0m"):
        without = without.replace(code, "")
    assert without == plain.stdout


def test_same_input_same_bytes(spawned, good_plan):
    first, second = (spawned(["check", "--json", good_plan], env={"PYTHONHASHSEED": seed}) for seed in ("1", "2"))
    assert first == second


# fmt

UNFORMATTED = "# kept\n" + GOOD_PLAN.replace("tp = 2  pp = 2", "tp=2,pp   =   2")


def test_fmt_rewrites_once_and_keeps_mode_and_comments(nereusc, good_plan):
    path = Path(write("x.plan", UNFORMATTED))
    path.chmod(0o640)
    ran = nereusc("fmt", "x.plan")
    assert (ran.code, ran.stdout) == (0, "")
    text = path.read_text()
    assert text != UNFORMATTED
    assert text.startswith("# kept\n")
    assert path.stat().st_mode & 0o777 == 0o640
    assert nereusc("fmt", "--check", "x.plan").code == 0
    assert sorted(p.name for p in Path().iterdir()) == [good_plan, "x.plan"]


def test_fmt_check_writes_nothing_and_exits_5(nereusc, good_plan):
    write("x.plan", UNFORMATTED)
    ran = nereusc("fmt", "--check", "x.plan")
    assert ran.code == 5
    assert "would change x.plan" in ran.stderr
    assert Path("x.plan").read_text() == UNFORMATTED


def test_fmt_diff_shows_lines_and_writes_nothing(nereusc, good_plan):
    write("x.plan", UNFORMATTED)
    ran = nereusc("fmt", "--diff", "x.plan")
    assert ran.code == 0
    assert ran.stdout.startswith("--- x.plan\n+++ x.plan (formatted)\n@@")
    assert any(line.startswith("-") and "pp   =   2" in line for line in ran.stdout.splitlines())
    assert Path("x.plan").read_text() == UNFORMATTED


def test_fmt_stdin_to_stdout(spawned, nereusc, good_plan):
    ran = spawned(["fmt", "-"], stdin=UNFORMATTED.encode())
    assert ran.code == 0
    write("x.plan", UNFORMATTED)
    nereusc("fmt", "x.plan")
    assert ran.stdout == Path("x.plan").read_text()


def test_fmt_leaves_a_faulty_plan_alone(nereusc, good_plan):
    write("x.plan", "stage actor.train {{ tp =")
    ran = nereusc("fmt", "x.plan")
    assert ran.code == 1
    assert "NRS1" in ran.stderr
    assert Path("x.plan").read_text() == "stage actor.train {{ tp ="


def test_fmt_says_what_cannot_be_read_or_written(nereusc, good_plan):
    assert (
        nereusc("fmt", "missing.plan").stderr == "nereusc: error: cannot read missing.plan: No such file or directory\n"
    )
    Path("latin.plan").write_bytes(b"# caf\xe9\n")
    ran = nereusc("fmt", "latin.plan")
    assert (ran.code, ran.stderr) == (1, "nereusc: error: cannot read latin.plan: not UTF-8 text (byte 5)\n")


# explain


def test_explain_one_code(nereusc):
    code = sorted(CATALOG)[0]
    for spelling in (code, code.lower(), code[3:]):
        ran = nereusc("explain", spelling)
        assert (ran.code, ran.stderr) == (0, "")
        assert ran.stdout.startswith(f"{code}: {CATALOG[code].title}\n")
        assert "Cure: " in ran.stdout


def test_explain_all_lists_every_code(nereusc):
    ran = nereusc("explain", "--all")
    assert ran.code == 0
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:]] == sorted(CATALOG)


def test_explain_all_json(nereusc):
    document = nereusc("explain", "--all", "--json").json()
    assert [entry["code"] for entry in document["codes"]] == sorted(CATALOG)


# import

VERL = """\
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=2048 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.n=4 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2
"""


def test_import_gives_a_plan_that_loads(nereusc, good_plan):
    script = write("run.sh", VERL)
    ran = nereusc("import", "verl", script, "--gpu", "h100-sxm-80gb")
    assert ran.code == 0
    assert "stage actor.train" in ran.stdout
    written = nereusc("import", "verl", script, "--gpu", "h100-sxm-80gb", "-o", "made.plan")
    assert (written.code, written.stdout) == (0, "")
    assert Path("made.plan").read_text() == ran.stdout
    assert nereusc("check", "made.plan").code in (0, 3)
    document = nereusc("import", "verl", script, "--gpu", "h100-sxm-80gb", "--json").json()
    assert document["plan_text"] == ran.stdout


def test_import_of_what_is_no_configuration(nereusc, good_plan):
    script = write("run.sh", "echo hello\n")
    ran = nereusc("import", "verl", script)
    assert ran.code == 1
    assert ran.stdout == ""
    assert ran.stderr


def test_a_folder_is_no_place_for_a_plan(nereusc, good_plan):
    ran = nereusc("import", "verl", write("run.sh", VERL), "--gpu", "h100-sxm-80gb", "-o", "no/such/folder/x.plan")
    assert ran.code == 1
    assert "cannot write no/such/folder/x.plan: No such file or directory" in ran.stderr


# version, doctor


def test_version_json(nereusc):
    document = nereusc("version", "--json").json()
    assert set(document["packages"]) >= {"lark", "numpy", "networkx", "ortools", "rich"}
    assert all(document["packages"].values())


def test_doctor_quick_names_what_is_missing_and_the_extra(nereusc, monkeypatch):
    monkeypatch.setattr(doctor, "package_version", lambda *names: None if "ray" in names else "1.0")
    ran = nereusc("doctor", "--quick")
    assert (ran.code, ran.stderr) == (0, "")
    ray = next(line for line in ran.stdout.splitlines() if " ray " in line)
    assert ray.split()[0] == "missing"
    assert "[extra: ray]" in ray
    document = nereusc("doctor", "--quick", "--json").json()
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["ray"]["install"] == "pip install '.[ray]'"
    assert checks["vllm"]["state"] == "installed"


def test_doctor_never_fails_when_everything_is_missing(nereusc, monkeypatch):
    monkeypatch.setattr(doctor, "package_version", lambda *names: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    document = nereusc("doctor", "--json").json()
    states = {check["name"]: check["state"] for check in document["checks"]}
    assert states["core"] == "broken"
    assert states["torch"] == states["gloo"] == states["nvcc"] == "missing"


@pytest.mark.procs
def test_doctor_tries_two_processes(nereusc):
    pytest.importorskip("torch")
    document = nereusc("doctor", "--json").json()
    (gloo,) = [check for check in document["checks"] if check["name"] == "gloo"]
    assert gloo["state"] == "works"


# parts


def test_schemas_are_valid_and_strict_enough():
    import jsonschema

    for path in SCHEMAS.glob("*.json"):
        schema = json.loads(path.read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$id"] == f"nereus:{path.stem}"
    with pytest.raises(jsonschema.ValidationError):
        check_schema({"format_version": "2.0", "kind": "version"}, "version")
