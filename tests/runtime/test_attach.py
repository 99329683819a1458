"""Reads of another process's memory: any rows, who may, and a move over them; a sender that dies under the read."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nereus.kernels.flow import Flow, calls  # noqa: E402
from nereus.kernels.move import PIECE_BYTES  # noqa: E402
from nereus.runtime.transports.attach import Card, meet, place_of, read, reason  # noqa: E402

CHILD = Path(__file__).with_name("attach_child.py")
NUM_BYTES = 2 * 512 * 8192 * 2


def can_read() -> bool:
    card = Card()
    try:
        return bool(meet(card.text(), card.text())[0])
    finally:
        card.close()


needs_reads = pytest.mark.skipif(not can_read(), reason="this system does not let a process read another's memory")


@needs_reads
@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 3, 1024, 1025, 2500]), st.integers(1, 40), st.integers(0, 9), st.booleans())
def test_rows_are_read_into_one_run(num: int, size: int, gap: int, two: bool) -> None:
    """Without a C compiler too; flows of any shape are in tests/kernels/test_flow.py."""
    source = torch.randint(0, 256, (num, size + gap), dtype=torch.uint8)
    places = np.array([[source.data_ptr(), num, size, size + gap]])
    wanted = source[:, :size].reshape(-1)
    if two:
        places, wanted = np.concatenate((places, places)), torch.cat((wanted, wanted))
    target = torch.zeros(len(wanted) + 1, dtype=torch.uint8)
    read(os.getpid(), places, target[:-1])
    assert torch.equal(target[:-1], wanted)
    assert not target[-1]


@needs_reads
def test_what_cannot_be_read_is_an_error_that_says_so() -> None:
    room = torch.zeros(64, dtype=torch.uint8)
    flow = Flow(np.array([[room.data_ptr(), 1, 64, 64, 1, 0, 0, 0]]), 64)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for into in (room, flow) if calls() is not None else (room,):
        with pytest.raises(OSError, match="are sent, not 64"):
            read(os.getpid(), place_of(room[:32]), into)
        for odd in ([room.data_ptr(), 9, 0, 0], [room.data_ptr(), 0, 9, 9]):
            with pytest.raises(OSError, match="rows that cannot be"):
                read(os.getpid(), np.concatenate((np.array([odd]), place_of(room))), into)
        with pytest.raises(OSError) as caught:
            read(os.getpid(), np.array([[8, 1, 64, 64]]), into)
        assert caught.value.errno == errno.EFAULT
        with pytest.raises(OSError) as caught:
            read(ended.pid, place_of(room), into)
        assert caught.value.errno == errno.ESRCH


@needs_reads
def test_two_processes_meet_only_where_each_is_who_it_says(monkeypatch: Any) -> None:
    card = Card()
    host, number, address, nonce = card.text().split()
    assert meet(card.text(), card.text()) == (os.getpid(), "")
    assert meet(card.text(), f"another-host {number} {address} {nonce}") == (0, "")
    assert meet(card.text(), "") == (0, "")
    other = f"{int(nonce[:2], 16) ^ 1:02x}{nonce[2:]}"
    assert meet(card.text(), f"{host} {number} {address} {other}") == (0, "it has another process number here")
    assert meet(card.text(), f"{host} {number} 8 {nonce}")[1].startswith("its process number means another process")
    card.close()
    monkeypatch.setenv("NEREUS_SAME_HOST", "0")
    assert Card().text() == ""


def test_reasons_say_what_forbids_it(monkeypatch: Any) -> None:
    monkeypatch.setattr("nereus.runtime.transports.attach._yama", lambda: 2)
    assert "ptrace_scope is 2" in reason(OSError(errno.EPERM, "no"))
    monkeypatch.setattr("nereus.runtime.transports.attach._yama", lambda: 0)
    assert "CAP_SYS_PTRACE" in reason(OSError(errno.EPERM, "no"))
    assert "process_vm_readv" in reason(OSError(errno.ENOSYS, "no"))


def moved(folder: Path, *words: str, **environ: str) -> dict[str, Any]:
    command = [sys.executable, str(CHILD), str(folder)]
    env = {**os.environ, **environ}
    sender = subprocess.Popen([*command, "0", *words], env=env)
    try:
        done = subprocess.run(
            [*command, "1", *words], env=env, capture_output=True, text=True, timeout=120, check=False
        )
    finally:
        sender.kill()
        sender.wait()
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@needs_reads
@pytest.mark.procs
def test_a_move_takes_rows_from_storage_to_storage(tmp_path: Path) -> None:
    said = moved(tmp_path)
    assert said["right"] is True
    assert said["direct"] == said["received"] == NUM_BYTES
    assert said["staging"] == 0
    assert said["notes"] == []


@pytest.mark.procs
@pytest.mark.parametrize("without", ["compiler", "reads", "both"])
def test_switched_off_the_same_bytes_come_in_other_ways(tmp_path: Path, without: str) -> None:
    """Without a compiler rows are staged by both ends, without reads they come over TCP."""
    environ = {"compiler": {"NEREUS_NATIVE": "0"}, "reads": {"NEREUS_SAME_HOST": "0"}}
    said = moved(
        tmp_path, **{k: v for name, each in environ.items() if without in (name, "both") for k, v in each.items()}
    )
    assert said["right"] is True
    assert said["received"] == NUM_BYTES
    assert said["direct"] == (NUM_BYTES if without == "compiler" and can_read() else 0)
    flows = calls() is not None and without == "reads"
    assert said["staging"] == (0 if flows else PIECE_BYTES)


@needs_reads
@pytest.mark.procs
def test_a_sender_that_dies_under_the_read_ends_in_the_old_plan(tmp_path: Path) -> None:
    said = moved(tmp_path, "die")
    assert said["fault"] == "NRS6004"
    assert "process 0" in said["text"]
    assert said["old_whole"] is True
    assert said["held"] == 0
    assert said["seconds"] < 20
