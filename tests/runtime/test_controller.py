"""A job whose controller is in a process without any part of a model: plans, losses and the loop's state from there.
The workers' state is, bit for bit, what an unmoved run has."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime.led_job import results
from runtime.session_job import ARCH
from runtime.tiny import cluster, stage, trainer
from runtime.tiny import plan as make_plan

import nereus
from nereus.ir.cluster import Device
from nereus.ir.plan import Model, Plan
from nereus.models.slots import default_slots
from nereus.planner.advisor import Advisor
from nereus.planner.calibration import calibrate
from nereus.runtime.faults import CANNOT_START, PROCESS_ENDED, WRONG_STATE, Fault
from nereus.runtime.session.controller import Controller
from nereus.runtime.session.local import LocalProcesses
from nereus.runtime.session.members import report_loss

pytestmark = pytest.mark.procs
STEPS = 6


def plan(name: str, count: int, *, first: int = 0, **degrees: Any) -> Plan:
    slots = default_slots(trains=True, precision="fp32", optimizer="adam")
    found = trainer(cluster(4), count, arch=ARCH, slots=slots, **degrees)
    (only,) = found.stages
    return replace(found, path=name, stages=(replace(only, devices=found.cluster.devices[first : first + count]),))


TP2, TP2_DP2, PP2 = plan("tp2", 2, tp=2), plan("tp2 dp2", 4, tp=2), plan("pp2", 2, pp=2)
DP3, DP4, LAST3 = plan("dp3", 3), plan("dp4", 4), plan("last three", 3, first=1)


def with_engine(name: str, *, trained: dict[str, int], served: dict[str, int]) -> Plan:
    """Both stages on the first two devices."""
    slots = default_slots(trains=True, precision="fp32", optimizer="adam")
    on = cluster(4)
    actor = Model(name="actor", arch=ARCH, source="tiny", precision="fp32")
    stages = (
        stage(actor, "train", on.devices[:2], slots=slots, **trained),
        stage(actor, "generate", on.devices[:2], slots=slots[:1], kv_cache_bytes=10**6, **served),
    )
    return replace(make_plan(*stages, on=on, models=(actor,)), path=name)


@contextmanager
def job(
    folder: Path, first: Plan, *, replan: Any = None, deadline_s: float = 60.0, **args: Any
) -> Iterator[Controller]:
    words = {"name": "led", "steps": STEPS, "folder": str(folder), "deadline_s": deadline_s, **args}
    with LocalProcesses("runtime.led_job:main", name="led", cluster=first.cluster, args=words) as provider:
        yield nereus.attach(
            first, provider=provider, replan=replan, parts={"actor.generate": "engine"}, deadline_s=deadline_s
        )


def good(folder: Path, name: str, count: int) -> list[dict[str, Any]]:
    found = [r for r in results(folder) if "wrong" in r]
    assert len(found) == count and all(r["wrong"] == [] and r["plan"] == name for r in found), results(folder)
    return found


def test_plans_and_the_loop_come_from_the_controller(tmp_path: Path) -> None:
    """What the loop over boundaries asks for is made at that boundary; what it writes into the loop's state reaches all
    workers, those that come later too; a plan that cannot begin is an outcome, and the old one goes on."""
    nowhere = replace(TP2, path="nowhere", cluster=cluster(4, 4))
    (only,) = nowhere.stages
    nowhere = replace(nowhere, stages=(replace(only, devices=(Device("n7", 0), *only.devices[1:])),))
    with job(tmp_path, TP2, deadline_s=20.0) as led:
        assert led.start({"step": 0}).committed
        assert [m.name for m in led.provider.inventory()] == ["n0"]
        seen = []
        wanted = {2: TP2_DP2, 4: PP2}
        for boundary in led.boundaries():
            seen.append((boundary.version, boundary.loop["step"], boundary.plan.path))
            if boundary.version == 1:
                led.loop["rate"] = 0.5
                led.rehearse(TP2_DP2)
            if boundary.version == 3:
                led.request(nowhere)
            if (other := wanted.get(boundary.version)) is not None:
                led.request(other)
        assert [v for v, _, _ in seen] == [step for _, step, _ in seen] == list(range(1, STEPS + 1))
        assert [name for _, _, name in seen] == ["tp2", "tp2", "tp2 dp2", "tp2 dp2", "pp2", "pp2"]
        assert [o.plan.path for o in led.outcomes if o.committed] == ["tp2", "tp2 dp2", "pp2"]
        assert [o.fault.text for o in led.outcomes if o.fault] == [
            "no process was started for n7.gpu0: no node here has it"
        ]
        assert led.outcomes[1].moved_bytes > 0
        assert set(led.outcomes[1].phases_s) == {"offer", "probe", "prepare", "move", "finish", "vote"}
        epochs = [key.split("/boundary/")[0] for key in led.provider.store.list_keys() if key.endswith("/digest")]
        assert len(epochs) == len(set(epochs)) == 3  # of each epoch the last boundary's are left
        done = good(tmp_path, "pp2", 2)
        assert all(r["loop"] == {"step": STEPS, "rate": 0.5} for r in done) and led.loop["step"] == STEPS


def test_a_change_that_the_workers_ask_for(tmp_path: Path) -> None:
    with job(tmp_path, TP2, ask=(2, PP2)) as led:
        led.start({"step": 0})
        plans = [boundary.plan.path for boundary in led.boundaries()]
        assert plans == ["tp2"] * 3 + ["pp2"] * 3
        assert all("transition 2 at 2" in r["log"] for r in good(tmp_path, "pp2", 2))


def test_a_silent_process_costs_no_deadline_once_it_is_known_to_be_lost(tmp_path: Path) -> None:
    """A machine that vanishes closes no connection, so its peers would wait out gloo's deadline: a stopped process is
    the same to them. Whoever knows of the loss says so, and the waits end; the survivors go on from the boundary
    before."""
    lost: list[tuple[Device, ...]] = []

    def replan(now: Plan, gone: tuple[Device, ...]) -> Plan:
        lost.append(gone)
        return DP3

    with job(tmp_path, TP2_DP2, replan=replan, deadline_s=600.0, stop=("n0.gpu3", 3)) as led:
        led.start({"step": 0})
        end = time.monotonic() + 300.0
        versions = []
        boundaries = led.boundaries()
        while len(versions) < 3:
            versions.append(next(boundaries).version)
        boundaries_after = _while_stopped(tmp_path, boundaries, led)
        versions += boundaries_after
        assert time.monotonic() < end, "the survivors waited for the deadline"
        assert lost == [(Device("n0", 3),)] and led.plan.path == "dp3"
        assert versions == list(range(1, STEPS + 1))
        done = good(tmp_path, "dp3", 3)
        assert all("process" in r["log"][0] and "has ended" in r["log"][0] for r in done), done
        assert all(r["log"][1] == "recovered in epoch 2 at 3" for r in done), done


def _while_stopped(folder: Path, boundaries: Any, led: Controller) -> list[int]:
    """Goes on in a thread that reports the stopped process as a provider would, once the others wait for it."""
    import threading

    def report() -> None:
        path = folder / "stopped-n0.gpu3.json"
        while not path.exists():
            time.sleep(0.02)
        time.sleep(0.5)
        report_loss(led.record.apart(), (socket.gethostname(), json.loads(path.read_text())))

    thread = threading.Thread(target=report)
    thread.start()
    found = [boundary.version for boundary in boundaries]
    thread.join()
    return found


@pytest.mark.parametrize(
    ("who", "phase"), [("n0.gpu0", "move"), ("n0.gpu3", "vote"), ("n0.gpu0", "decide"), ("n0.gpu3", "commit")]
)
def test_a_process_killed_in_a_change(tmp_path: Path, who: str, phase: str) -> None:
    """On whichever side of the decision; the controller follows what the members decided."""
    rest = LAST3 if who == "n0.gpu0" else DP3
    with job(tmp_path, TP2_DP2, replan=lambda now, gone: rest, kill=(who, phase)) as led:
        led.start({"step": 0})
        versions = []
        for boundary in led.boundaries():
            versions.append(boundary.version)
            if boundary.version == 2 and led.epoch == 1:
                led.request(DP4)
        assert led.plan.path == rest.path and versions == list(range(1, STEPS + 1))
        assert [o.plan.path for o in led.outcomes] == [TP2_DP2.path, DP4.path, rest.path]
        good(tmp_path, rest.path, 3)


def test_the_advisor_says_how_to_go_on_without_a_node(tmp_path: Path) -> None:
    """Two nodes of two devices hold the same; one process of the second is killed, and with it the node is given up."""
    slots = default_slots(trains=True, precision="fp32", optimizer="adam")
    first = replace(trainer(cluster(2, 2), arch=ARCH, slots=slots, tp=2), path="both")
    advisor = Advisor(first, calibrate(()), pinned=["actor.train"])
    with job(tmp_path, first, replan=advisor.replan) as led:
        led.start({"step": 0})
        versions = []
        for boundary in led.boundaries():
            versions.append(boundary.version)
            if boundary.version == 2:
                advisor.prepare(float(first.workload.response_len))
            if boundary.version == 3 and led.epoch == 1:
                os.kill(next(m.pid for m in led.members if str(m.device) == "n1.gpu0"), signal.SIGKILL)
        assert versions == list(range(1, STEPS + 1))
        assert {device.node for stage in led.plan.stages for device in stage.devices} == {"n0"}
        assert [(said.trigger, said.action) for said in advisor.log] == [("lost", "go")]
        assert "the plan was ready" in advisor.log[0].reason
        good(tmp_path, led.plan.path, 2)


def test_several_processes_a_device(tmp_path: Path) -> None:
    """A trainer's and an engine's, on the same devices; the plan changes under both, then an engine's process ends and
    is replaced. No step is served with other weights than its own."""
    first = with_engine("tp2", trained={"tp": 2}, served={"tp": 1})
    second = with_engine("pp2", trained={"pp": 2}, served={"tp": 2})
    with job(tmp_path, first, replan=lambda now, gone: now) as led:
        led.start({"step": 0})
        assert [str(m.seat) for m in sorted(led.members, key=lambda m: m.seat)] == [
            "n0.gpu0",
            "n0.gpu0 (engine)",
            "n0.gpu1",
            "n0.gpu1 (engine)",
        ]
        for boundary in led.boundaries():
            if boundary.version == 2 and led.epoch == 1:
                led.request(second)
            if boundary.version == 4 and led.epoch == 2:
                os.kill(next(m.pid for m in led.members if m.seat.part), signal.SIGKILL)
        assert [o.plan.path for o in led.outcomes if o.committed] == ["tp2", "pp2", "pp2"]
        done = good(tmp_path, "pp2", 4)
        assert not any("other weights" in line for r in done for line in r["log"]), done


def test_what_no_survivor_holds_is_no_fresh_start(tmp_path: Path) -> None:
    """The engine is left, which is a copy: the trainers' state is lost, and that is said."""
    first = with_engine("tp2", trained={"tp": 2}, served={"tp": 1})
    with job(tmp_path, first, replan=lambda now, gone: now) as led:
        led.start({"step": 0})
        with pytest.raises(Fault, match=r"actor\.train: nobody who is left holds any of it") as caught:
            for boundary in led.boundaries():
                if boundary.version == 3:
                    for member in led.members:
                        if not member.seat.part:
                            os.kill(member.pid, signal.SIGKILL)
        assert caught.value.code == WRONG_STATE


def test_no_process_is_left(tmp_path: Path) -> None:
    with job(tmp_path, TP2) as led:
        led.start({"step": 0})
        with pytest.raises(Fault) as caught:
            for boundary in led.boundaries():
                if boundary.version == 2:
                    for device in led.plan.stages[0].ranks:
                        led.provider.retire(device)
        assert caught.value.code == PROCESS_ENDED


def test_loops_that_differ_are_seen_at_the_boundary(tmp_path: Path) -> None:
    with job(tmp_path, TP2, lone=("n0.gpu1", 2)) as led:
        led.start({"step": 0})
        with pytest.raises(Fault, match="differs between process") as caught:
            for _ in led.boundaries():
                pass
        assert caught.value.code == WRONG_STATE


def test_one_controller_a_job(tmp_path: Path) -> None:
    with job(tmp_path, TP2) as led:
        with pytest.raises(Fault, match="has a controller already") as caught:
            nereus.attach(PP2, provider=led.provider)
        assert caught.value.code == CANNOT_START
        with pytest.raises(ValueError, match="serves the plan"):
            led.retire(Device("n0", 1))
