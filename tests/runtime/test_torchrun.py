"""Jobs that torchrun launches, by its own command: changes, losses with and without keepers, another number of
processes. What is trained is, bit for bit, what a run without any of it has."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from runtime.test_session import DP2, ONE, PP2, TP2, TP4, WITHOUT_3, good
from runtime.tiny import cluster

from nereus.runtime.faults import CANNOT_START, Fault
from nereus.runtime.providers.torchrun import Place, join

pytestmark = [pytest.mark.procs, pytest.mark.slow]
JOB = Path(__file__).with_name("torchrun_job.py")


def launch(folder: Path, *options: str, **words: Any) -> subprocess.Popen[str]:
    (folder / "words.json").write_text(json.dumps(words))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(JOB), str(folder)]
    return subprocess.Popen(command, env=environ, text=True, stderr=subprocess.PIPE, start_new_session=True)


def ended(agent: subprocess.Popen[str], timeout_s: float = 240.0) -> tuple[int, str]:
    try:
        _, text = agent.communicate(timeout=timeout_s)
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    return agent.returncode, text


def left(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]


def started(folder: Path) -> int:
    """How many processes torchrun has started."""
    return len(list(folder.glob("rank-*")))


def test_torchrun_starts_all_anew_and_the_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Without keepers the loss of one process is, by torchrun's rule, that of all."""
    fault = {"device": "n0.gpu1", "step": 3, "kind": "kill", "once": True}
    words = {"how": "alone", "plans": {2: TP2}, "steps": 6, "changes": {1: PP2}, "checkpoint": str(tmp_path / "saved")}
    agent = launch(tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=1", fault=fault, **words)
    code, text = ended(agent)
    assert code == 0, text
    assert started(tmp_path) == 4
    done = [r for r in left(tmp_path) if "wrong" in r]
    # Step 1 lies behind the restored job, so its plan is the first one again.
    good(done, "tp2", 2)


def test_a_lost_worker_ends_no_other(tmp_path: Path) -> None:
    """With keepers torchrun does not hear of it: the job goes on with three."""
    fault = {"device": "n0.gpu3", "step": 3, "kind": "kill"}
    words = {"how": "kept", "plans": {4: TP4}, "steps": 6, "changes": {1: DP2}, "fallback": [WITHOUT_3]}
    agent = launch(tmp_path, "--standalone", "--nproc-per-node=4", fault=fault, **words)
    code, text = ended(agent)
    assert code == 0, text
    assert started(tmp_path) == 4
    good(left(tmp_path), "without gpu3", 3)
    assert all("recovered in epoch 3 at 3" in r["log"] for r in left(tmp_path))


def test_a_job_that_cannot_go_on_is_torchruns(tmp_path: Path) -> None:
    """Only the lost one had what it had: the other worker ends, then the keepers, and torchrun starts all anew; then it
    goes well. A plan that leaves a process without work keeps neither it nor torchrun from ending."""
    fault = {"device": "n0.gpu1", "step": 3, "kind": "kill", "first": True}
    words: dict[str, Any] = {"how": "kept", "plans": {2: TP2}, "steps": 6, "fallback": [ONE], "changes": {4: ONE}}
    words["checkpoint"] = str(tmp_path / "saved")
    agent = launch(tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=1", fault=fault, **words)
    code, text = ended(agent)
    assert code == 0, text
    assert started(tmp_path) == 4
    results = left(tmp_path)
    assert [r["fault"] for r in results if "fault" in r] == ["NRS6010"]
    good([r for r in results if "wrong" in r], "one", 1)


def test_rank_0_has_a_controller(tmp_path: Path) -> None:
    agent = launch(tmp_path, "--standalone", "--nproc-per-node=4", how="led", plans={4: TP2}, steps=7)
    code, text = ended(agent)
    assert code == 0, text
    led = json.loads((tmp_path / "led.json").read_text())
    assert led == {"plans": ["tp2", "tp2 dp2", "tp2 dp2", "pp2"], "machines": [["n0", 4]]}
    good(left(tmp_path), "pp2", 2)
    assert started(tmp_path) == 4


def test_a_machine_is_lost(tmp_path: Path) -> None:
    """Two agents, as on two machines; the second ends with its worker. torchrun starts the first one's anew, alone, in
    the same store: its plan for one goes on from the checkpoint that two have written."""
    words = {"how": "alone", "plans": {2: PP2, 1: ONE}, "steps": 6, "deadline_s": 3.0}
    words["checkpoint"] = str(tmp_path / "saved")
    words["fault"] = {"device": "n1.gpu0", "step": 3, "kind": "machine"}
    quick = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ("--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--max-restarts=1", f"--rdzv-conf={quick}")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    at = (f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=lost")
    first = launch(tmp_path, *options, *at, **words)
    end = time.monotonic() + 60
    while socket.socket().connect_ex(("localhost", port)) and time.monotonic() < end:
        time.sleep(0.1)
    second = launch(tmp_path, *options, *at, **words)
    code, text = ended(first)
    assert code == 0, text
    assert ended(second)[0] == -signal.SIGKILL
    assert [path.read_text() for path in sorted(tmp_path.glob("rank-*"))].count("1") == 1
    good([r for r in left(tmp_path) if "wrong" in r], "one", 1)


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "2"), ("RANK", "-1"), ("MASTER_PORT", "70000"), ("LOCAL_RANK", "x")]
)
def test_an_environment_that_does_not_fit_together(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    half = {"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    for key, said in {**half, "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", name: value}.items():
        monkeypatch.setenv(key, said)
    with pytest.raises(Fault) as caught:
        Place.of_environment()
    assert caught.value.code == CANNOT_START
    assert value in str(caught.value)


def test_a_process_that_torchrun_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Fault, match="was not started by torchrun: no 'RANK'") as caught:
        join()
    assert caught.value.code == CANNOT_START
    place = Place(rank=3, size=4, node=1, local=1, address="localhost", port=1, shared=True)
    assert str(place.device(None)) == str(place.device(cluster(1, 2))) == "n1.gpu1"
    for other in (cluster(2), cluster(2, 1)):
        with pytest.raises(Fault, match="rank 3 is process 1 on machine 1: the plan has no such device"):
            place.device(other)
