"""``--same``: what the job states is compiled, shown, saved and judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import check_schema

OLD = """cluster { node n[0-1] { gpus = 2 x "h200-sxm-141gb" } }
model actor = "qwen2.5-0.5b"
workload { algorithm = grpo  prompts = 64  samples = 1  mini_batch = 64  prompt_len = 512  response_len = 512 }
stage actor.train { backend = megatron  on = n0  tp = 2  zero = 1  optimizer = adam }
"""
NEW = """extends "old.plan"
model ref = actor { frozen = true }
stage ref.infer { backend = megatron  on = n1  tp = 2 }
"""


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    for name, text in (("old.plan", OLD), ("new.plan", NEW)):
        (tmp_path / name).write_text(text)
    return str(tmp_path / "old.plan"), str(tmp_path / "new.plan")


def test_stated_weights_move_and_are_saved(nereusc, pair: tuple[str, str], tmp_path: Path):
    plain = nereusc("diff", *pair)
    assert "initialised by the framework" in plain.stdout
    path = str(tmp_path / "change.json")
    ran = nereusc("compile", *pair, "--same", "ref=actor", "-o", path)
    assert ran.code == 0, ran.stderr
    assert "initialised" not in ran.stdout
    assert "actor and ref hold the same weights now" in ran.stdout
    value = json.loads(Path(path).read_text())
    check_schema(value, "transition")
    assert value["options"]["same"] == [["actor", "ref"]]
    shown = nereusc("show", path)
    assert (shown.code, shown.stdout) == (0, ran.stdout), shown.stderr
    document = nereusc("show", "--json", path).json()
    check_schema(document, "diff")
    assert document["same"] == [["actor", "ref"]]
    judged = nereusc("verify", path)
    assert judged.code == 0, judged.stdout


def test_a_statement_that_is_taken_out_is_noticed(nereusc, pair: tuple[str, str], tmp_path: Path):
    path = tmp_path / "change.json"
    assert nereusc("compile", *pair, "--same", "actor=ref", "-o", str(path)).code == 0
    value = json.loads(path.read_text())
    del value["options"]["same"]
    path.write_text(json.dumps(value))
    judged = nereusc("verify", str(path))
    assert judged.code != 0
    assert "does not hold: digest, elements" in judged.stdout
    assert "NRS5511" in nereusc("show", str(path)).stderr
    value["options"]["same"] = "actor=ref"
    path.write_text(json.dumps(value))
    assert "NRS5502" in nereusc("show", str(path)).stderr


@pytest.mark.parametrize("text", ["actor", "actor=", "=ref", "a=b=c"])
def test_what_is_no_pair_is_a_usage_error(nereusc, pair: tuple[str, str], text: str):
    ran = nereusc("diff", *pair, "--same", text)
    assert ran.code == 64
    assert "--same: write MODEL=MODEL" in ran.stderr


def test_wrong_models_are_refused(nereusc, pair: tuple[str, str]):
    ran = nereusc("diff", *pair, "--same", "actor=critic")
    assert ran.code != 0
    assert "NRS5010" in ran.stderr
    assert "neither plan has a model critic" in ran.stderr


def test_the_estimate_compiles_nothing(nereusc, pair: tuple[str, str]):
    ran = nereusc("diff", *pair, "--coarse", "--same", "actor=ref")
    assert "cannot be used with --same" in ran.stderr
