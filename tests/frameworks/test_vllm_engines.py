"""Moves into live vLLM engines: greedy tokens and every parameter as a fresh engine's, twice in a row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import vllm_engines as engines
from frameworks.harness import run
from frameworks.vllm_engines import Seen
from frameworks.vllm_models import arch_of

from nereus.ir.tensor import matrix_shape
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters import vllm_worker
from nereus.runtime.describe import DescribeError, Facts, LiveStage, plan_of

TIMEOUT_S = 500


def _check(fresh: Seen, moved: list[Seen]) -> None:
    """``moved``: the engine as it started, after a move to what ``fresh`` started with, and after the way back."""
    first, second, again = moved
    assert first.tokens != fresh.tokens
    assert second == fresh
    assert again == first


def _said(llm: Any, *, stage: bool) -> Any:
    """What the worker in this process says of itself, as it would come back from another one."""
    said = engines.ask(llm, "nereus_describe", stage), engines.ask(llm, "nereus_coordinates")
    return json.loads(json.dumps(said))


def _assert_described(family: str, said: list[Any], **degrees: int) -> None:
    """The plan of a live engine, from its workers' answers."""
    facts = [
        Facts(host="here", index=i, coordinates=vllm_worker.coordinates_of(c), state=vllm_worker.state_of(s))
        for i, (s, c) in enumerate(said)
    ]
    live = LiveStage(model="actor", kind="generate", arch=arch_of(family), source="tiny.json", engine="vllm")
    found = plan_of([(live, facts)], {"here": len(facts)}, gpu="h100-sxm-80gb")
    (stage,) = found.plan.stages
    assert {axis: getattr(stage, axis) for axis in degrees} == degrees and found.notes == ()
    assert [d.index for d in stage.ranks] == list(range(len(said)))
    if len(facts) > 1:
        turned = [replace(fact, state=facts[1 - i].state) for i, fact in enumerate(facts)]
        with pytest.raises(DescribeError, match="weight of"):
            plan_of([(live, turned)], {"here": len(facts)}, gpu="h100-sxm-80gb")


def _between_engines(rank: int, world_size: int, first: Path, second: Path, at: list[str]) -> tuple[Any, ...]:
    """Two processes are an engine at tp 2 on ``first``, the third one at tp 1 on ``second``, which sends; then it
    loads ``first`` the way of vLLM and sends again."""
    tp = world_size - 1
    if rank == tp:
        llm = engines.engine_here(second, at[0], plain=True)
        engines.ask(llm, "nereus_join", at[1], tp, world_size, "test", 240.0)
        fresh, said = engines.seen(llm), _said(llm, stage=False)
        engines.ask(llm, "nereus_send", 240.0)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(first)})
        engines.ask(llm, "nereus_send", 240.0)
        return fresh, said
    llm = engines.engine_here(second, at[2], rank=rank, tp=tp, plain=True)
    fresh = engines.seen(llm)
    engines.close_here(llm)
    llm = engines.engine_here(first, at[3], rank=rank, tp=tp, plain=True)
    engines.ask(llm, "nereus_join", at[1], 0, world_size, "test", 240.0)
    moved = [engines.seen(llm)]
    for version in (1, 2):
        engines.ask(llm, "nereus_receive", version, 240.0)
        assert llm.reset_prefix_cache()
        assert engines.ask(llm, "nereus_version") == version
        moved.append(engines.seen(llm))
    return fresh, moved, _said(llm, stage=False)


def test_from_an_engine_at_tp_1_into_one_at_tp_2(tmp_path: Path) -> None:
    first, second = (engines.checkpoint(tmp_path / f"llama-{seed}", "llama", seed) for seed in (1, 2))
    at = [engines.address() for _ in range(4)]
    *workers, (source, alone) = run(3, _between_engines, first, second, at, init=False, timeout=TIMEOUT_S)
    for fresh, moved, _ in workers:
        _check(fresh, moved)
        assert fresh.tokens == source.tokens
    _assert_described("llama", [alone], tp=1, dp=1, pp=1)
    _assert_described("llama", [said for *_, said in workers], tp=2, dp=1, pp=1)


def _into_kernels(rank: int, world_size: int, family: str, first: Path, second: Path, at: list[str]) -> Any:
    """An engine at tp 2 whose kernels pack their weights, and a trainer process."""
    from nereus.runtime.adapters.joint import join_group
    from nereus.runtime.live import move

    tp = world_size - 1
    if rank == tp:
        group = join_group(at[0], tp, world_size, name="test", timeout_s=240)
        for seed in (2, 1):
            move(engines.whole(family, seed), None, logical_tensors(arch_of(family)), group, deadline_s=240)
        return None
    llm = engines.engine_here(second, at[1], rank=rank, tp=tp)
    fresh = engines.seen(llm)
    engines.close_here(llm)
    llm = engines.engine_here(first, at[2], rank=rank, tp=tp)
    refusal = engines.ask(llm, "test_refusal")
    moved = [engines.seen(llm)]
    engines.ask(llm, "nereus_join", at[0], 0, world_size, "test", 240.0)
    for version in (1, 2):
        engines.ask(llm, "nereus_receive", version, 240.0)
        assert llm.reset_prefix_cache()
        moved.append(engines.seen(llm))
    return fresh, moved, refusal, _said(llm, stage=True)


def test_experts_into_kernels_that_pack_them(tmp_path: Path) -> None:
    first, second = (engines.checkpoint(tmp_path / f"moe-{seed}", "qwen3_moe", seed) for seed in (1, 2))
    at = [engines.address() for _ in range(3)]
    *workers, _ = run(3, _into_kernels, "qwen3_moe", first, second, at, init=False, timeout=TIMEOUT_S)
    for fresh, moved, refusal, _ in workers:
        _check(fresh, moved)
        assert "w13_weight (expert kernels of backend CPU rearrange it in its own shape)" in refusal
        assert "bind with stage=True" in refusal
    _assert_described("qwen3_moe", [said for *_, said in workers], tp=2, dp=1, ep=1, etp=2)


def _written(rank: int, world_size: int, family: str, dtype: str, folders: list[Path], at: list[str]) -> Any:
    """One process: rectangles written through the worker's plain calls, in two uneven bands a tensor."""
    llm = engines.engine_here(folders[1], at[0], dtype=dtype)
    fresh = engines.seen(llm)
    engines.close_here(llm)
    llm = engines.engine_here(folders[0], at[1], dtype=dtype)
    refusal, moved = engines.ask(llm, "test_refusal"), [engines.seen(llm)]
    for version, seed in ((1, 2), (2, 1)):
        engines.ask(llm, "nereus_begin")
        for name, value in engines.weights_of(arch_of(family), seed).items():
            data = value.to(getattr(torch, dtype)).view(matrix_shape(tuple(value.shape)))
            cut = data.shape[0] // 3
            for row, band in ((0, data[:cut]), (cut, data[cut:])):
                content = band.contiguous().view(torch.uint8).numpy().tobytes()
                short = {"bfloat16": "bf16", "float32": "fp32"}[dtype]
                assert engines.ask(llm, "nereus_write", name, row, 0, list(band.shape), short, content)
        engines.ask(llm, "nereus_finish", version)
        assert llm.reset_prefix_cache() and engines.ask(llm, "nereus_version") == version
        moved.append(engines.seen(llm))
    engines.ask(llm, "nereus_begin")
    with pytest.raises(Exception, match=r"never written: model\.embed_tokens\.weight: 64000 elements"):
        engines.ask(llm, "nereus_finish", 3)
    return fresh, moved, refusal


def test_linears_into_handles_that_leave_empty_weights(tmp_path: Path) -> None:
    folders = [engines.checkpoint(tmp_path / f"llama-{seed}", "llama", seed, torch.float32) for seed in (1, 2)]
    at = [engines.address() for _ in range(2)]
    ((fresh, moved, refusal),) = run(1, _written, "llama", "float32", folders, at, init=False, timeout=TIMEOUT_S)
    _check(fresh, moved)
    assert "qkv_proj.weight (the engine replaced (384, 256) torch.float32 by (0,) torch.float32" in refusal
