"""``nereusc run``: what people see when a change between plans is carried out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import Ran, check_schema

from nereus.lang.catalog import CATALOG, CodeEntry

pytest.importorskip("torch")

OLD = """\
cluster { node n0 { gpus = 4 x "h100-sxm-80gb" } }
model actor = "qwen2.5-0.5b"
workload { algorithm = sft  prompts = 64  mini_batch = 64 }
stage actor.train { on = n0  tp = 2  optimizer = adam }
"""
NEW = OLD.replace("tp = 2", "tp = 1  pp = 4")


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.plan").write_text(OLD)
    Path("new.plan").write_text(NEW)


@pytest.mark.usefixtures("pair")
def test_a_change_is_carried_out_and_checked(nereusc: Callable[..., Ran]) -> None:
    ran = nereusc("run", "old.plan", "new.plan")
    assert ran.code == 0
    assert "old.plan -> new.plan" in ran.stdout
    assert ", as predicted" in ran.stdout
    assert "each in its place" in ran.stdout
    assert "moving" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.usefixtures("pair")
def test_a_change_that_moves_nothing_is_not_called_right(nereusc: Callable[..., Ran]) -> None:
    Path("same.plan").write_text(OLD.replace("tp = 2", "tp = 2  micro_batch = 2"))
    ran = nereusc("run", "old.plan", "same.plan")
    assert ran.code == 0
    verdict = ran.stdout.strip().splitlines()[-1]
    assert verdict.startswith("nothing moved: ") and "at another --scale something may move" in verdict
    assert "right" not in ran.stdout
    assert ran.stderr.index("compiling") < ran.stderr.index("loading torch") < ran.stderr.index("building tensors")
    # Of a chain, one change that moves something is enough.
    assert "\nright: " in nereusc("run", "old.plan", "same.plan", "new.plan").stdout


@pytest.mark.usefixtures("pair")
def test_nothing_compared_is_said(nereusc: Callable[..., Ran]) -> None:
    cache = OLD.replace(
        "train { on = n0  tp = 2  optimizer = adam }", "generate { on = n0  tp = 2  idle = discard  kv_cache = 2 GiB }"
    )
    Path("old.plan").write_text(cache)
    Path("new.plan").write_text(cache.replace("tp = 2", "tp = 1"))
    ran = nereusc("run", "old.plan", "new.plan")
    assert ran.code == 0
    assert ran.stdout.strip().splitlines()[-1].startswith("nothing compared: ")


@pytest.mark.usefixtures("pair")
def test_processes_that_start_are_not_called_compiling(nereusc: Callable[..., Ran]) -> None:
    ran = nereusc("run", "old.plan", "new.plan", "--procs", "2")
    assert ran.code == 0
    assert "loading torch" not in ran.stderr
    assert ran.stderr.index("compiling") < ran.stderr.index("starting processes") < ran.stderr.index("building tensors")


@pytest.mark.usefixtures("pair")
def test_json_of_a_chain_there_and_back(nereusc: Callable[..., Ran]) -> None:
    ran = nereusc("run", "old.plan", "new.plan", "old.plan", "--json", "--scale", "32,4")
    document = ran.json()
    check_schema(document, "run")
    assert ran.code == 0
    assert document["ok"] is True
    steps = document["run"]["steps"]
    assert [step["new"] for step in steps] == ["new.plan", "old.plan"]
    for step in steps:
        assert step["moved_bytes"] == step["predicted_moved_bytes"] > 0
        assert 0 < step["peak_bytes"] <= step["predicted_peak_bytes"]


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--procs", "-1"), "--procs"),
        (("--procs", "two"), "--procs"),
        (("--scale", "tiny"), "a scale is auto"),
        (("--deadline", "0"), "--deadline"),
        (("--deadline", "nan"), "--deadline"),
        (("--transport", "tcp"), "--procs 2"),
        (("--transport", "inprocess", "--procs", "2"), "one process"),
        (("--drill", "hang"), "--procs 2"),
    ],
)
def test_wrong_usage_is_said_in_a_sentence(nereusc: Callable[..., Ran], options: tuple[str, ...], word: str) -> None:
    ran = nereusc("run", "old.plan", "new.plan", *options)
    assert ran.code == 64
    assert word in ran.stderr
    assert ran.stdout == ""


@pytest.mark.usefixtures("pair")
def test_plans_that_do_not_work_end_with_their_own_codes(nereusc: Callable[..., Ran]) -> None:
    Path("bad.plan").write_text(NEW.replace("pp = 4", "pp = 3"))
    assert nereusc("run", "old.plan", "bad.plan").code == 1
    assert nereusc("run", "old.plan", "missing.plan").code == 1
    lost = OLD.replace("node n0", "node n1").replace("on = n0", "on = n1")
    Path("lost.plan").write_text(lost)
    ran = nereusc("run", "old.plan", "lost.plan", "--json")
    assert ran.code == 3
    check_schema(ran.json(), "run")
    assert ran.json()["run"] is None
    assert ran.json()["diagnostics"][0]["code"].startswith("NRS5")


@pytest.mark.usefixtures("pair")
def test_more_layers_than_stages_are_kept(nereusc: Callable[..., Ran]) -> None:
    ran = nereusc("run", "old.plan", "new.plan", "--scale", "16,1")
    assert ran.code == 0
    assert "layers 24 -> 4" in ran.stdout


_SHOWN = [e for e in CATALOG.values() if e.command == "run" and e.shown]


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, marks=[pytest.mark.procs] if "--procs" in e.options else []) for e in _SHOWN],
    ids=[e.code for e in _SHOWN],
)
def test_documented_examples_say_their_code(
    entry: CodeEntry, nereusc: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in entry.example.items():
        Path(name).write_text(text)
    ran = nereusc("run", *entry.example, *entry.options)
    assert ran.code == 1
    assert f"[{entry.code}]" in ran.stderr
    assert "Traceback" not in ran.stderr
