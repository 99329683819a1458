"""Real processes, with compiled programs: N to M, chains, growth, shrink, lost nodes, and every drill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from runtime.tiny import cluster, ppo, trainer

from nereus.ir.plan import ORDER_MEGATRON, Plan
from nereus.runtime.faults import Drill
from nereus.runtime.report import RunReport
from nereus.runtime.run import run_pair

pytestmark = pytest.mark.procs

FOUR, EIGHT = cluster(4), cluster(4, 4)


def run(*plans: Plan, procs: int, **more: Any) -> RunReport:
    more.setdefault("scale", "none")
    return run_pair(plans[0], plans[1], chain=plans[2:], procs=procs, **more)


def good(report: RunReport) -> RunReport:
    assert report.diagnostics == ()
    assert report.ok
    for step in report.steps:
        assert step.moved_bytes == step.predicted_moved_bytes
        assert step.peak_bytes <= step.predicted_peak_bytes
        assert step.num_elements > 0
    return report


@pytest.mark.parametrize(("transport", "same_host"), [("tcp", "0"), ("tcp", "1"), ("gloo", "0")])
def test_four_processes(monkeypatch: pytest.MonkeyPatch, transport: str, same_host: str) -> None:
    """Over TCP alone, by reads of each other's memory, and over torch.distributed."""
    monkeypatch.setenv("NEREUS_SAME_HOST", same_host)
    report = good(run(trainer(FOUR, tp=2, pp=2), trainer(FOUR, tp=4), procs=4, transport=transport))
    assert (report.transport, report.num_processes) == (transport, 4)
    assert report.steps[0].moved_bytes > 0


def test_eight_processes_three_models() -> None:
    old = ppo(EIGHT, actor={"tp": 2, "pp": 2, "zero": 1}, critic={"tp": 2}, ref={"tp": 4})
    new = ppo(
        EIGHT,
        actor={"tp": 4, "zero": 1, "order": ORDER_MEGATRON},
        critic={"fsdp": 8},
        ref={"on": EIGHT.devices[4:], "pp": 2},
    )
    good(run(old, new, procs=8))


@pytest.mark.parametrize(("procs", "transport"), [(2, "tcp"), (3, "tcp"), (8, "tcp"), (2, "gloo"), (5, "gloo")])
def test_a_chain_n_to_m_with_growth_shrink_and_uneven_shards(procs: int, transport: str) -> None:
    chain = [
        trainer(EIGHT, 6, fsdp=6),
        trainer(EIGHT, tp=2, pp=2, zero=1),
        trainer(EIGHT, 5, fsdp=5),
        trainer(EIGHT, 3, pp=3),
        trainer(EIGHT, tp=8),
    ]
    report = good(run(*chain, procs=procs, transport=transport))
    assert [s.num_devices for s in report.steps] == [8, 8, 5, 8]


def test_a_node_is_lost_and_another_comes() -> None:
    old = trainer(EIGHT, tp=2, pp=2)
    lost = trainer(cluster(4, first=1), tp=4)  # n0 is gone with all that was on it
    grown = trainer(cluster(4, 4, first=1), tp=2, fsdp=4)
    report = good(run(old, lost, grown, procs=4))
    assert [s.num_devices for s in report.steps] == [4, 8]


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
@pytest.mark.parametrize(
    ("kind", "code", "word"),
    [
        ("corrupt", "NRS6003", "arrived damaged"),
        ("allocation", "NRS6002", "no memory"),
        ("raise", "NRS6004", "told to fail"),
        ("exit", "NRS6006", "process 2"),
        ("hang", "NRS6005", "no answer within 3 s"),
    ],
)
def test_drills_end_in_a_diagnostic_and_leave_the_old_state(kind: str, code: str, word: str, transport: str) -> None:
    """The text is that of the process at fault, whoever noticed; nothing of the old plan is touched; nothing hangs."""
    begin = time.monotonic()
    report = run(
        trainer(EIGHT, tp=2, pp=2),
        trainer(EIGHT, tp=4, zero=1),
        procs=4,
        drill=Drill(kind=kind, process=2),
        deadline_s=3.0,
        transport=transport,
    )
    assert time.monotonic() - begin < 40
    assert not report.ok
    assert report.diagnostics[0].code == code
    assert word in report.diagnostics[0].headline
    if kind in ("exit", "hang"):  # one process cannot say what it holds any more
        assert report.old_whole is False
    else:
        assert report.old_whole is True
        assert "every element" in report.diagnostics[0].notes[-1]


def test_a_failure_in_the_second_step_keeps_the_first() -> None:
    report = run(
        trainer(FOUR, tp=2),
        trainer(FOUR, tp=4),
        trainer(FOUR, tp=2, pp=2),
        procs=4,
        drill=Drill(kind="raise", process=1, step=1),
        deadline_s=5.0,
    )
    assert not report.ok
    assert len(report.steps) == 1
    assert report.old_whole is True


_PARENT = """
import json, sys
from nereus.runtime.faults import Drill
from nereus.runtime.run import run_pair
from runtime.tiny import cluster, trainer
four = cluster(4)
def tell(event):
    print(json.dumps(event), flush=True)
run_pair(trainer(four, tp=2), trainer(four, tp=4), procs=4, scale="none", on_event=tell,
         drill=Drill(kind="hang", process=1), deadline_s=100.0)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_parent(end: signal.Signals, repo_root: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{repo_root}:{repo_root / 'tests'}"}
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        # A test run in the background would hand down an interrupt that is ignored.
        preexec_fn=_interruptible,  # noqa: PLW1509 - this process has one thread
    )
    assert parent.stdout is not None
    at_work: set[int] = set()  # all of them: the first may be at work before the last has been forked
    for line in parent.stdout:
        event = json.loads(line)
        if event.get("phase") == "execute":
            at_work.add(event["process"])
        if len(at_work) == 4:
            break
    workers = _descendants(parent.pid)
    assert len(workers) == 5  # the supervisor and four workers
    parent.send_signal(end)
    parent.wait(timeout=20)
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in workers if _alive(pid)] == []
    parent.stdout.close()


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found += [int(entry.name), *_descendants(int(entry.name))]
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
