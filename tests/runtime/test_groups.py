"""Communicators without a default group: values, counts back to the baseline, and ends of every wait."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from frameworks.harness import run  # noqa: E402
from runtime.tiny import ARCH, cluster, stage  # noqa: E402

from nereus.ir.plan import Model  # noqa: E402
from nereus.runtime.faults import DEADLINE, PARTICIPANT_FAILED, Fault  # noqa: E402
from nereus.runtime.groups import Group, Groups  # noqa: E402

pytestmark = pytest.mark.procs

NUM_EPOCHS = 20
ON = cluster(4)
PROCESS_OF = {device: number for number, device in enumerate(ON.devices)}
ACTOR = Model(name="actor", arch=ARCH, source="tiny")
STAGES = (
    stage(ACTOR, "train", ON.devices, tp=2, pp=2),
    stage(ACTOR, "generate", ON.devices, tp=2),
    stage(ACTOR, "infer", ON.devices[1:3], tp=1),
)


def _store(folder: str, rank: int, world: int) -> Any:
    """A TCP store on a free port, which its keeper leaves in a file."""
    note = Path(folder) / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
        (Path(folder) / "port.new").write_text(str(store.port))
        os.rename(Path(folder) / "port.new", note)
        return store
    while not note.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(note.read_text()), world, False)


def _leave(store: Any, rank: int, world: int) -> None:
    """The keeper of the store goes last."""
    store.set(f"left/{rank}", "1")
    if rank == 0:
        store.wait([f"left/{number}" for number in range(world)])


def _meet(store: Any, name: str, world: int) -> None:
    store.add(name, 1)
    while store.add(name, 0) < world:
        time.sleep(0.01)


def _resources() -> tuple[int, int, float]:
    """Threads, open files, resident MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGESIZE") / 1e6


def _settled(expected: tuple[int, int, float]) -> tuple[int, int, float]:
    """The system counts an ended thread a moment longer."""
    end = time.monotonic() + 5
    while (now := _resources())[:2] != expected[:2] and time.monotonic() < end:
        time.sleep(0.05)
    return now


def _epochs(rank: int, world: int, folder: str) -> list[Any]:
    store = _store(folder, rank, world)
    counts, before, after = [], (0, 0, 0.0), (0, 0, 0.0)
    for epoch in range(NUM_EPOCHS):
        groups = Groups(store, epoch, rank, deadline_s=20)
        everyone = groups.make("world", range(world))
        assert everyone.all_reduce(torch.tensor([float(rank)])).item() == 6.0
        for each in STAGES:
            place = groups.place(each, PROCESS_OF)
            if place is None:
                assert rank in (0, 3) and each.name == "actor.infer"
                continue
            for axis in ("tp", "pp", "dp"):
                group, (mine, size) = getattr(place, axis), getattr(place.at, axis)
                assert (group.rank, group.size) == (mine, size)
                parts = group.all_gather(torch.tensor([float(rank)]))
                assert [int(part) for part in parts] == list(group.members)
                assert group.broadcast(torch.tensor([rank]), root=size - 1).item() == group.members[-1]
        if rank < 2:
            pair = groups.make("pair", (1, 0))
            if rank == 0:
                pair.send(torch.arange(3.0), to=0)
            else:
                assert pair.receive(torch.zeros(3), source=1).tolist() == [0.0, 1.0, 2.0]
        counts.append(len(groups))
        everyone.barrier()
        groups.close()
        assert len(groups) == 0
        with pytest.raises(Fault, match="closed"):
            everyone.barrier()
        del groups, everyone, place
        if rank < 2:
            del pair
        if "group" in locals():
            del group
        if epoch in (2, NUM_EPOCHS - 1):
            _meet(store, f"closed {epoch}", world)
            if epoch == 2:
                time.sleep(0.5)  # what ends in the others and in the system, ends
                before = _resources()
            after = _settled(before)
            _meet(store, f"measured {epoch}", world)
    _leave(store, rank, world)
    return [counts, before, after]


def test_everything_is_back_after_20_epochs(tmp_path: Path) -> None:
    for rank, (counts, before, after) in enumerate(run(4, _epochs, str(tmp_path), init=False)):
        # world, the stages' lines and all their ranks (equal lists once), the pair
        expected = 1 + len({tuple(members) for members in _lists(rank)}) + (rank < 2)
        assert counts == [expected] * NUM_EPOCHS
        assert after[:2] == before[:2], "threads and open files"
        assert after[2] - before[2] < 8, "resident MB"


def _lists(rank: int) -> list[tuple[int, ...]]:
    """Member lists of more than one that hold ``rank``: train tp2 pp2 (tp fastest), generate tp2 dp2, infer dp2."""
    lists = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3), (1, 2)]
    return [members for members in lists if rank in members]


def _outcome(wait: Any) -> tuple[str, str, str, float]:
    begin = time.monotonic()
    try:
        wait()
    except Fault as fault:
        return fault.code, fault.where, fault.text, time.monotonic() - begin
    return "", "", "it did not fail", time.monotonic() - begin


def _aborted(rank: int, world: int, folder: str) -> list[Any]:
    """0 adds up until its own second thread aborts, 1 receives from 0, 2 receives from 1, 3 waits for a group."""
    store = _store(folder, rank, world)
    groups = Groups(store, 0, rank, deadline_s=30)
    other = Groups(store, 1, rank, deadline_s=30)
    everyone, bystander = groups.make("world", range(world)), other.make("world", range(world))
    everyone.barrier()
    if rank == 0:
        threading.Timer(0.5, groups.abort, ["process 3 is gone"]).start()
    waits = (
        lambda: everyone.all_reduce(torch.ones(4)),
        lambda: everyone.receive(torch.ones(4), source=0),
        lambda: everyone.receive(torch.ones(4), source=1),
        lambda: groups.make("later", (0, 3)),
    )
    first = _outcome(waits[rank])
    if rank:
        groups.abort("another was")  # the first word stands
    again = _outcome(everyone.barrier)
    groups.close()
    value = bystander.all_reduce(torch.ones(1)).item()
    other.close()
    _leave(store, rank, world)
    return [first, again, value, len(groups) + len(other)]


def test_abort_ends_every_wait_at_once(tmp_path: Path) -> None:
    for first, again, value, left in run(4, _aborted, str(tmp_path), init=False):
        assert first[:2] == (PARTICIPANT_FAILED, "process 0"), first
        assert "process 3 is gone" in first[2]
        assert first[3] < 5
        assert again[0] == PARTICIPANT_FAILED and again[3] < 1
        assert value == 4.0, "the communicators of another epoch are whole"
        assert left == 0


def _silent(rank: int, world: int, folder: str) -> list[Any]:
    """1 makes its group and then says nothing for longer than the others wait; 2 never makes its second one."""
    store = _store(folder, rank, world)
    groups = Groups(store, 0, rank, deadline_s=1)
    everyone: Group = groups.make("world", range(world))
    found = []
    if rank == 0:
        found.append(_outcome(lambda: everyone.receive(torch.ones(4), source=1)))
        found.append(_outcome(lambda: groups.make("never", (0, 2))))
    _meet(store, "seen", world)
    _leave(store, rank, world)
    return found


def test_a_silent_peer_costs_the_deadline(tmp_path: Path) -> None:
    received, made = run(3, _silent, str(tmp_path), init=False)[0]
    assert received[0] == DEADLINE, received
    assert "receiving from process 1" in received[2]
    assert made[0] == DEADLINE, made
    assert "no word from process 2" in made[2]
    assert all(0.5 < outcome[3] < 5 for outcome in (received, made))
