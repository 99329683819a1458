"""megatron-core's own checkpoints (torch_dist): saved by Megatron at one layout, read by Nereus into another, and equal
to what Megatron itself loads there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from frameworks.harness import run
from frameworks.megatron_models import DENSE, SPARSE, TIED, At, Trainer, build, randomise, whole_of

from nereus.ir.arch import Arch
from nereus.models.naming.megatron import MegatronNaming
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters import dcp
from nereus.runtime.adapters.base import BindError
from nereus.runtime.adapters.regions import copy_regions
from nereus.runtime.live import move

FULLY, ALONG_BUCKETS = "fully_reshardable", "dp_reshardable"
CASES: dict[str, tuple[Arch, At, At]] = {
    "bf16": (DENSE, At(tp=2, pp=2, bf16=True), At(tp=4, bf16=True)),
    "fp32, uneven stages": (DENSE, At(pp=2, first=1), At(tp=2)),
    "tied and padded": (replace(TIED, num_layers=2), At(tp=4, vocab_multiple=64), At(pp=2, vocab_multiple=64)),
    "experts": (SPARSE, At(ep=4, bf16=True), At(ep=2, pp=2, bf16=True)),
}


def _state(trainer: Trainer, *, loading: bool, kind: str = FULLY) -> dict[str, Any]:
    (chunk,) = trainer.chunks
    while hasattr(chunk, "module"):
        chunk = chunk.module
    model = chunk.sharded_state_dict()
    optimizer = trainer.optimizer.sharded_state_dict(
        model, is_loading=loading, metadata={"distrib_optim_sharding_type": kind}
    )
    return {"model": model, "optimizer": optimizer}


def _loaded(trainer: Trainer, folder: str, kind: str = FULLY) -> None:
    """By Megatron itself."""
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load(_state(trainer, loading=True, kind=kind), folder)
    (chunk,) = trainer.chunks
    while hasattr(chunk, "module"):
        chunk = chunk.module
    chunk.load_state_dict(found["model"])
    with torch.no_grad():  # Megatron writes masters of fp32 parameters in place
        trainer.optimizer.load_state_dict(found["optimizer"])


def _through(rank: int, world: int, folder: str, arch: Arch, first: At, second: At) -> tuple[int, str]:
    """How many tensors agreed, and what is said of a folder along buckets."""
    from megatron.core import dist_checkpointing

    torch.set_num_threads(1)
    source = build(arch, first)
    randomise(source, 3)
    source.step(0)
    before = whole_of(source.adapter().bind(), arch)
    if rank == 0:
        Path(folder).mkdir()
        Path(f"{folder}.buckets").mkdir()
    dist.barrier()
    dist_checkpointing.save(_state(source, loading=False), folder)
    dist_checkpointing.save(_state(source, loading=False, kind=ALONG_BUCKETS), f"{folder}.buckets")
    dist.barrier()

    target = build(arch, second, seed=9)
    new = target.adapter().bind()
    for memory in new.memory:
        memory.zero_()
    naming = MegatronNaming(arch=arch, vocab_multiple=second.vocab_multiple)
    holding = dcp.bind(folder, naming, rank=rank, wanted=new.state)
    copy_regions(holding.binding, new)
    arrived = whole_of(new, arch)
    assert arrived.keys() == before.keys()
    for key, values in before.items():
        assert torch.equal(arrived[key], values), key
    other = build(arch, second, seed=11)
    _loaded(other, folder)
    theirs = whole_of(other.adapter().bind(), arch)
    for key, values in theirs.items():
        assert torch.equal(arrived[key], values), key
    # Along buckets only Megatron knows what is where, and only at the tp and pp of the writer: from there it is moved.
    there = build(arch, first, seed=13)
    _loaded(there, f"{folder}.buckets", ALONG_BUCKETS)
    last = build(arch, second, seed=15).adapter().bind()
    move(there.adapter().bind(), last, logical_tensors(arch))
    moved = whole_of(last, arch)
    assert moved.keys() == before.keys()
    for key, values in before.items():
        assert torch.equal(moved[key], values), key
    said = ""
    try:
        dcp.bind(f"{folder}.buckets", naming, rank=rank)
    except BindError as error:
        said = str(error)
    weights = dcp.bind(f"{folder}.buckets", naming, rank=rank, ignore=(r"^(chained_\d+\.)?optimizer\.",)).binding
    assert set(weights.state.slots()) == {"weight"}
    return len(theirs), said


@pytest.mark.parametrize("name", CASES)
def test_read_at_another_layout_as_megatron_loads_it(name: str, tmp_path: Path) -> None:
    for count, said in run(4, _through, str(tmp_path / "checkpoint"), *CASES[name], timeout=300):
        assert count > 40
        assert "saved along Megatron's buckets" in said
