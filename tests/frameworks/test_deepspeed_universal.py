"""What a move delivers, beside what DeepSpeed's own conversion to universal checkpoints makes of the same engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.deepspeed_engines import NAMING, SHAPES, TENSORS, Group, build, train, whole_by_deepspeed
from frameworks.harness import ENVIRONMENT, run

from nereus.runtime.live import move

pytest.importorskip("deepspeed")


def _save_and_move(rank: int, world: int, folder: str) -> Any:
    from nereus.runtime.adapters.deepspeed import DeepSpeedAdapter

    engine = build(1, Group(world))
    train(engine, 0, 2)
    engine.save_checkpoint(folder, tag="t")
    group = Group(world - 1)
    moved = build(3, group, seed=9)
    source, target = DeepSpeedAdapter(engine, NAMING), DeepSpeedAdapter(moved, NAMING)
    old, new = source.bind(), target.bind()
    move(old, new if group.inside else None, TENSORS)
    target.finish(source.job_state())
    found = whole_by_deepspeed(moved)
    return {key: value.numpy() for key, value in found.items()}, source.job_state()


def test_a_move_delivers_what_the_universal_checkpoint_holds(tmp_path: Path) -> None:
    saved, universal = tmp_path / "saved", tmp_path / "universal"
    whole, state = run(3, _save_and_move, str(saved), timeout=400)[0]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(saved / "t"), "--output_folder", str(universal / "t")]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = {path.name for path in (universal / "t" / "zero").iterdir() if path.is_dir()}
    assert names == set(SHAPES)
    for name, shape in SHAPES.items():
        for slot, file in (("master", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            found = torch.load(universal / "t" / "zero" / name / f"{file}.pt", weights_only=False)
            value = found["param"] if isinstance(found, dict) else found
            assert torch.equal(value.reshape(shape).float(), torch.from_numpy(whole[name, slot])), (name, slot)
        step = torch.load(universal / "t" / "zero" / name / "step.pt", weights_only=False)
        assert int(step) == state["groups"][0]["step"] == 2
