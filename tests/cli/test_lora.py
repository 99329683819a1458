"""What ``check`` and ``diff`` say about adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PLAN = """\
cluster { node n0 { gpus = 8 x "h100-sxm-80gb" } }
model actor = "llama-3.2-1b" { lora { rank = 8  targets = (q_proj, v_proj) } }
model ref   = actor { frozen = true  lora = none }
workload { algorithm = grpo  prompts = 64  samples = 8  mini_batch = 128 }
stage actor.train    { on = n0  tp = 2  micro_batch = 2 }
stage actor.logprob  { with = actor.train }
stage ref.infer      { with = actor.train }
stage actor.generate { engine = vllm  on = n0  tp = 2  kv_cache = 8 GiB  idle = offload }
"""
#: 16 layers x 8 x ((2048 + 2048) + (2048 + 512)).
TRAINED = 851_968


def test_check_counts_what_trains(tmp_path: Path, nereusc: Any) -> None:
    path = tmp_path / "job.plan"
    path.write_text(PLAN)
    text = nereusc("check", str(path)).stdout
    assert f"actor llama-3.2-1b (LoRA of rank 8: {TRAINED:,} parameters), ref llama-3.2-1b" in text
    (file,) = nereusc("check", "--json", str(path)).json()["files"]
    actor, ref = file["plan"]["models"]
    assert actor["lora"] == {"rank": 8, "alpha": 8.0, "targets": ["q_proj", "v_proj"], "num_trained": TRAINED}
    assert "lora" not in ref
    assert [d["code"] for d in file["diagnostics"]] == ["NRS3026"]


def test_a_change_moves_adapters_with_their_moments(tmp_path: Path, nereusc: Any) -> None:
    old, new = tmp_path / "old.plan", tmp_path / "new.plan"
    old.write_text(PLAN)
    new.write_text(PLAN.replace("on = n0  tp = 2  micro_batch", "on = n0  tp = 4  micro_batch"))
    ran = nereusc("diff", "--json", str(old), str(new))
    assert ran.code == 0, ran.stderr
    assert ran.json()["ok"]


def test_another_adapter_is_another_model(tmp_path: Path, nereusc: Any) -> None:
    old, new = tmp_path / "old.plan", tmp_path / "new.plan"
    old.write_text(PLAN)
    new.write_text(PLAN.replace("rank = 8", "rank = 16"))
    ran = nereusc("diff", str(old), str(new))
    assert ran.code != 0 and "Traceback" not in ran.stderr
    assert "model actor is another model in the new plan" in ran.stdout + ran.stderr
