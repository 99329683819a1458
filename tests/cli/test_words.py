"""What a diff and a check say of plain facts: the plan language's words and units, never Python's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

OLD = """\
cluster { node n0 { gpus = 8 x "h100-sxm-80gb"  nic = 200 GB/s }  pool { min = 4 } }
model actor = "llama-3.2-1b"
workload { algorithm = sft  prompts = 64  mini_batch = 64 }
stage actor.train { on = n0  micro_batch = 2 }
"""
NEW = """\
cluster {
  node n0 { gpus = 8 x "h100-sxm-80gb"  nic = 400 Gbit/s  host_mem = 2 TiB }
  pool { min = 8  notice = 30 s }
}
model actor = "llama-3.2-1b"
workload { algorithm = sft  prompts = 64  mini_batch = 64  max_tokens = 8192 }
stage actor.train { on = n0  fsdp = 4  max_tokens = 8192  idle = offload }
"""


@pytest.fixture(autouse=True)
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.plan").write_text(OLD)
    Path("new.plan").write_text(NEW)


@pytest.mark.parametrize("pair_of", [("old.plan", "new.plan"), ("new.plan", "old.plan")])
def test_no_word_of_python(nereusc, pair_of: tuple[str, str]) -> None:
    text = nereusc("diff", *pair_of).stdout
    assert "None" not in text and "True" not in text and "False" not in text
    assert not re.search(r"\d{7}|_bytes|_s \d|fsdp 0", text), text


def test_units_and_keys_of_the_plan_language(nereusc) -> None:
    text = " ".join(nereusc("diff", "old.plan", "new.plan").stdout.split())
    for words in (
        "n0.host_mem 1 TiB -> 2 TiB",
        "n0.nic 200 GB/s -> 50 GB/s",
        "pool.min 4 -> 8",
        "pool.notice none -> 30 s",
        "workload max_tokens none -> 8,192",
        "fsdp off -> 4",
    ):
        assert words in text


def test_amounts_that_look_alike_are_told_apart(nereusc) -> None:
    Path("new.plan").write_text(OLD.replace("200 GB/s", "200.01 GB/s"))
    assert "n0.nic 200,000,000,000 B/s -> 200,010,000,000 B/s" in nereusc("diff", "old.plan", "new.plan").stdout


def test_accumulation_of_token_budgets(nereusc) -> None:
    """8 samples of 2,048 tokens per data-parallel rank, four of which fill a budget of 8,192."""
    assert re.search(r"actor\.train .* 8,192 tokens +2 ", nereusc("check", "new.plan").stdout)
    (stage,) = nereusc("check", "--json", "new.plan").json()["files"][0]["plan"]["stages"]
    assert stage["accumulation"] == 2
