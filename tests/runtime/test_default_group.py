"""torch's default group, one for every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nereus.runtime.session.local import LocalProcesses

pytestmark = pytest.mark.procs


def test_two_beside_each_other(tmp_path: Path) -> None:
    """Of different processes; each with groups inside, either in force in turn; shut by one process they end the waits
    of the others; closed, all their groups are gone."""
    with LocalProcesses("runtime.worlds_job:main", args={"folder": str(tmp_path)}) as processes:
        for number in range(3):
            processes.spawn(f"n0.gpu{number}")
        assert set(processes.wait(120.0).values()) == {0}
    first, second, third = (json.loads((tmp_path / f"result-{n}.json").read_text()) for n in range(3))
    assert first == {"left": [0, 2, 22.0], "ended": True}
    assert second["left"] == [1, 2, 22.0] and second["right"] == [0, 2, 220.0]
    assert third == {"right": [1, 2, 220.0], "ended": True}
    assert second["before"] - second["after"] == 3  # it is not in the group of rank 0 alone
