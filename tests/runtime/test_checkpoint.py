"""A job's checkpoint written by some processes in one layout and read by others in another, two in a row; bit for bit
what a run without any of it has. Damage is found, and a save that fails leaves the one before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as torch_dcp
from runtime.session_job import ARCH, train, unmoved
from runtime.test_session import DP2, ENGINE_TP1, ENGINE_TP2, ONE, TP2, TP4, UNEVEN, good, run
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.base import BindError
from nereus.runtime.adapters.safetensors_state import Sink, shares, sources, verify
from nereus.runtime.session.local import LocalProcesses

TENSORS = logical_tensors(ARCH)
KINDS = {(t.name, slot): "fp32" for t in TENSORS for slot in ("weight", "exp_avg")}


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalProcesses]:
    with LocalProcesses("runtime.session_job:main") as found:
        yield found


def saved_bytes(results: list[Any]) -> list[int]:
    lines = [line for r in results for line in r["log"] if line.startswith("saved")]
    return [int(line.split()[1]) for line in lines]


@pytest.mark.procs
@pytest.mark.parametrize("form", ["safetensors", "dcp"])
@pytest.mark.parametrize(
    ("first", "second", "third"),
    [((TP2, 2), (UNEVEN, 3), (ONE, 1)), ((ONE, 1), (DP2, 4), (TP4, 4)), ((ENGINE_TP2, 4), (ENGINE_TP1, 4), (TP2, 2))],
)
def test_n_to_m_to_k(
    processes: LocalProcesses,
    tmp_path: Path,
    first: tuple[int, int],
    second: tuple[int, int],
    third: tuple[int, int],
    form: str,
) -> None:
    names = ("tp2", "tp2 dp2", "pp2", "tp4", "uneven", "one", "dp4", "", "", "engine tp2", "engine tp1")
    checkpoint = str(tmp_path / "checkpoint")
    whole = sum(t.numel for t in TENSORS) * 4 * 3
    for turn, (number, devices) in enumerate((first, second, third)):
        folder = tmp_path / f"{tmp_path.name}-{turn}"
        folder.mkdir()
        more: dict[str, Any] = {"restore": checkpoint} if turn else {}
        saves = {2 * turn + 1: checkpoint}
        results = run(
            processes,
            folder,
            first=number,
            devices=devices,
            expect=devices,
            steps=2 * turn + 2,
            saves=saves,
            form=form,
            **more,
        )
        good(results, names[number], devices)
        sizes = saved_bytes(results)
        # Weights and both moments, each element once, in even shares.
        assert len(sizes) == devices
        assert sum(sizes) == whole
        assert max(sizes) < whole / devices * 1.5
        if form == "dcp":
            assert_torch_loads(tmp_path / "checkpoint" / "actor.train", 2 * turn + 2)


def assert_torch_loads(folder: Path, steps: int) -> None:
    """Through torch's own ``dcp.load`` and ``set_state_dict``: what an unmoved run has after so many steps."""
    theirs, ours = unmoved(0), unmoved(steps)
    train(theirs, 0)  # an optimizer has no slots before
    model, optim = get_state_dict(theirs.module, theirs.optimizer)
    state = {"model": model, "optim": optim}
    torch_dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(theirs.module, theirs.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert theirs.optimizer is not None and ours.optimizer is not None
    for mine, other in zip(theirs.module.parameters(), ours.module.parameters(), strict=True):
        assert torch.equal(mine, other)
        have, want = theirs.optimizer.state[mine], ours.optimizer.state[other]
        assert have.keys() == want.keys() and all(torch.equal(have[key], want[key]) for key in want)


@pytest.mark.procs
@pytest.mark.parametrize("grid", [(4, 1), (2, 2)], ids=["rows", "grid"])
def test_a_folder_that_torch_wrote_of_sharded_state(
    processes: LocalProcesses, tmp_path: Path, grid: tuple[int, int]
) -> None:
    """Four ranks of torch's, whose DTensors are cut in rows, or in rows and columns, by ``dcp.save``; three processes
    in another layout go on from it. Then one, after a byte of what they wrote was damaged."""
    folder, saved = tmp_path / "torch", tmp_path / "ours"
    child, store = str(Path(__file__).with_name("dcp_child.py")), str(tmp_path / "store")
    command = [sys.executable, child, str(folder), *map(str, grid), "2", store]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environ, check=True, timeout=120)
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert max(len(m.chunks) for m in metadata.values() if hasattr(m, "chunks")) == 4
    folders = [tmp_path / f"{tmp_path.name}-{turn}" for turn in range(2)]
    for each in folders:
        each.mkdir()
    words = {"restore": str(folder), "saves": {1: str(saved)}, "form": "dcp", "loop": {"step": 2}, "steps": 4}
    results = run(processes, folders[0], first=UNEVEN, devices=3, expect=3, **{**words, "saves": {3: str(saved)}})
    good(results, "uneven", 3)
    assert_torch_loads(saved / "actor.train", 4)
    damaged = saved / "actor.train" / "__1_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    results = run(processes, folders[1], first=ONE, devices=1, expect=1, steps=5, restore=str(saved))
    assert "are not what was written" in results[0]["text"], results


@pytest.mark.procs
def test_a_save_that_fails_leaves_the_one_before(processes: LocalProcesses, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    folders = [tmp_path / f"{tmp_path.name}-{turn}" for turn in range(2)]
    for folder in folders:
        folder.mkdir()
    good(run(processes, folders[0], first=TP2, devices=2, expect=2, steps=1, saves={0: str(target)}), "tp2", 2)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    (damaged,) = (path for path in target.iterdir() if path.name.endswith("00001-of-00002.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 1
    damaged.write_bytes(data)
    results = run(processes, folders[1], first=ONE, devices=1, expect=1, steps=2, restore=str(target))
    assert "are not what was written" in results[0]["text"]
    damaged.write_bytes(before[damaged.name])
    folder = tmp_path / f"{tmp_path.name}-2"
    folder.mkdir()
    fault = {"device": "n0.gpu1", "kind": "kill", "save": True}
    words = {"restore": str(target), "saves": {1: str(target)}, "fault": fault, "deadline_s": 5.0}
    results = run(processes, folder, first=TP2, devices=2, expect=1, steps=3, fallback=(ONE,), wait_s=40, **words)
    assert results[0]["log"] == ["failed at 1: process 2 on n0.gpu1 has ended"]
    assert not list(tmp_path.glob(".checkpoint*"))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_shares_are_even_and_each_tensor_is_in_one() -> None:
    for size in (1, 2, 3, 5):
        found = shares(KINDS, TENSORS, size)
        assert sorted(key for own in found for key in own) == sorted(KINDS)
    with pytest.raises(BindError, match="no tensor other"):
        shares({("other", "weight"): "fp32"}, TENSORS, 2)


def test_files_are_safetensors_and_damage_is_named(tmp_path: Path) -> None:
    sink = Sink.lay_out(tmp_path / "a.safetensors", sorted(KINDS), KINDS, TENSORS)
    for number, data in enumerate(sink.binding.memory):
        data.fill_(number + 0.5)
    sink.finish()
    again = sources([sink.path])
    assert [(f.tensor, f.slot) for f in again.state.fragments] == [
        (f.tensor, f.slot) for f in sink.binding.state.fragments
    ]
    assert all((a == b).all() for a, b in zip(again.memory, sink.binding.memory, strict=True))
    for rank in range(3):
        verify([sink.path], rank, 3)
    data = bytearray(sink.path.read_bytes())
    data[-1] ^= 64
    sink.path.write_bytes(data)
    with pytest.raises(BindError, match="are not what was written"):
        for rank in range(3):
            verify([sink.path], rank, 3)
