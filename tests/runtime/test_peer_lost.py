"""A process that is killed, or stops, in the middle of a move: the other one's wait ends, what it had is whole, and the
same change goes well with the next process. Twenty of these leave no descriptor, thread or memory behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from nereus.runtime.faults import DEADLINE, PARTICIPANT_FAILED

CHILD = Path(__file__).with_name("peer_child.py")
KILLED = 0xFFF7  # as the child says -9

pytestmark = pytest.mark.procs


def changes(folder: Path, *words: str, same_host: str = "0") -> dict[str, Any]:
    # One arena: what the allocator keeps for each thread that ever was would hide a leak, or look like one.
    env = {**os.environ, "NEREUS_SAME_HOST": same_host, "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(CHILD), str(folder), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("same_host", ["0", "1"])
@pytest.mark.parametrize("name", ["kill", "stop"])
@pytest.mark.parametrize("mine", [0, 1])
def test_what_remains_is_whole_and_the_next_change_goes_well(
    tmp_path: Path, mine: int, name: str, same_host: str
) -> None:
    deadline_s = 30.0 if name == "kill" else 2.0
    lost, well = changes(tmp_path, str(mine), name, "tcp", "2", str(deadline_s), same_host=same_host)["rounds"]
    # Who is killed closes its connections: nobody waits for the deadline. Who only stops is found by it, and learns
    # when it wakes that the change was given up.
    assert lost["code"] == (PARTICIPANT_FAILED if name == "kill" else DEADLINE)
    assert lost["seconds"] < (deadline_s / 2 if name == "kill" else deadline_s + 5)
    assert lost["right"] == [True] * (mine == 0)
    assert lost["other"] == (KILLED if name == "kill" else 0)
    assert (well["code"], well["right"], well["other"]) == ("", [True], 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "gloo"])
def test_twenty_changes_of_which_ten_lose_a_process_leave_nothing_behind(tmp_path: Path, kind: str) -> None:
    said = changes(tmp_path, "1", "kill", kind, "24", "30")
    assert [one["code"] for one in said["rounds"]] == [PARTICIPANT_FAILED, ""] * 12
    assert [one["right"] for one in said["rounds"]] == [[], [True]] * 12
    files, threads, memory = zip(*said["left"][3:], strict=True)
    assert len(set(files)) == len(set(threads)) == 1
    # Each brings 16 MB into memory of 18.
    assert max(memory[1:]) - memory[0] < 12 << 20, [m >> 10 for m in memory]
