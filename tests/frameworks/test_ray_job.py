"""A job on a Ray cluster of several raylets, driven from a controller without any part of a model: an actor and a whole
raylet are killed, machines join and leave; what is trained stays, bit for bit, what an unmoved run has."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from frameworks.ray_cluster import DEVICE, RayCluster, ray_cluster, until
from runtime.led_job import results
from runtime.session_job import ARCH
from runtime.tiny import cluster, trainer

import nereus
from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.models.slots import default_slots
from nereus.runtime.faults import CANNOT_START, Fault
from nereus.runtime.providers.ray_actors import RayActors
from nereus.runtime.session.members import Member

#: Two machines of two devices each.
ON = cluster(2, 2)
DEADLINE_S = 300.0


def plan(name: str, devices: tuple[Device, ...], **degrees: Any) -> Plan:
    slots = default_slots(trains=True, precision="fp32", optimizer="adam")
    found = trainer(ON, len(devices), arch=ARCH, slots=slots, **degrees)
    (only,) = found.stages
    return replace(found, path=name, stages=(replace(only, devices=devices),))


BOTH = plan("both", ON.devices, tp=2)
FIRST, SECOND = (plan(node.name, node.devices, tp=2) for node in ON.nodes)


@pytest.fixture(scope="module")
def machines() -> Iterator[RayCluster]:
    with ray_cluster(2, 2) as found:
        yield found


def provider(folder: Path, steps: int, **more: Any) -> RayActors:
    args = {"name": folder.name, "steps": steps, "folder": str(folder), "deadline_s": DEADLINE_S, **more}
    return RayActors("runtime.led_job:main", cluster=ON, bundle={DEVICE: 1}, args=args, name=folder.name)


def good(folder: Path, name: str, count: int, steps: int) -> list[dict[str, Any]]:
    found = [r for r in results(folder) if "wrong" in r]
    assert len(found) == count, results(folder)
    assert all(r["wrong"] == [] and r["plan"] == name and r["loop"] == {"step": steps} for r in found), found
    return found


def raylet_of(member: Member) -> int:
    """The process that started it: each machine's raylet starts that machine's."""
    stat = Path(f"/proc/{member.pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


class Strike(threading.Thread):
    """``strike``, once all others wait in a collective for the process that holds; that one goes on when those on
    ``hear`` have heard of it, so they heard it from nobody's connection but the store's."""

    def __init__(self, folder: Path, strike: Callable[[], None], hear: Sequence[Device]) -> None:
        super().__init__(daemon=True)
        self._folder, self._strike, self._hear = folder, strike, hear
        self.at = 0.0

    def run(self) -> None:
        until((self._folder / "holds.json").exists, "the process that holds")
        time.sleep(0.5)
        self.at = time.time()
        self._strike()
        until(lambda: all(self._heard(device).exists() for device in self._hear), "word of the loss")
        (self._folder / "go").touch()

    def heard_s(self) -> list[float]:
        return [json.loads(self._heard(device).read_text()) - self.at for device in self._hear]

    def _heard(self, device: Device) -> Path:
        return self._folder / f"heard-{device}.json"


def test_an_actors_end_is_heard_by_all_at_once(machines: RayCluster, tmp_path: Path) -> None:
    """Its peers wait in gloo for one that lives, and the deadline is far away. A new actor takes the place."""
    steps = 6
    with provider(tmp_path, steps, hold=("n0.gpu0", 3)) as actors:
        job = nereus.attach(BOTH, provider=actors, replan=lambda now, gone: now, deadline_s=DEADLINE_S)
        job.start({"step": 0})
        victim = next(m for m in job.members if m.device == Device("n0", 1))
        strike = Strike(tmp_path, lambda: os.kill(victim.pid, signal.SIGKILL), ON.nodes[1].devices)
        strike.start()
        assert [boundary.version for boundary in job.boundaries()] == list(range(1, steps + 1))
        strike.join()
        assert len(job.outcomes) == 2 and job.outcomes[-1].committed
        done = good(tmp_path, BOTH.path, 4, steps)
        assert max(strike.heard_s()) < DEADLINE_S / 3
        assert sum("recovered in epoch 2 at 3" in r["log"] for r in done) == 3, done


def test_machines_are_lost_join_and_leave(machines: RayCluster, tmp_path: Path) -> None:
    """Training over two machines. One vanishes in the middle of a step: the job goes on on the other, at one version. A
    new machine takes the place, and the job grows onto it. That one is to be taken away: the job leaves it in good
    order, and its processes end."""
    import ray

    steps, lost = 9, []
    known = {machine["NodeID"] for machine in ray.nodes()}

    def replan(now: Plan, gone: tuple[Device, ...]) -> Plan:
        lost.extend(gone)
        return FIRST

    with provider(tmp_path, steps, hold=("n0.gpu0", 3)) as actors:
        job = nereus.attach(BOTH, provider=actors, replan=replan, deadline_s=DEADLINE_S)
        job.start({"step": 0})
        # Ranks follow the plan: each node's processes on one machine of Ray's, the two on two.
        homes = [raylet_of(member) for member in sorted(job.members, key=lambda m: m.device)]
        assert homes[0] == homes[1] != homes[2] == homes[3]
        assert [(m.name, m.leaves_in_s) for m in actors.inventory()] == [("n0", None), ("n1", None)]
        strike = Strike(tmp_path, lambda: machines.kill_raylet(homes[2]), [Device("n0", 1)])
        strike.start()
        seen = []
        for boundary in job.boundaries():
            seen.append(boundary.plan.path)
            if boundary.version == 5:
                assert [m.name for m in actors.inventory()] == ["n0"]
                machines.add()
                until(lambda: len(actors.inventory()) == 2, "the new machine")
                job.request(BOTH)
            if boundary.version == 7:
                (new,) = {machine["NodeID"] for machine in ray.nodes()} - known
                machines.drain(new, 3600)
                until(lambda: actors.inventory()[1].leaves_in_s is not None, "the notice")
                assert 3000 < (actors.inventory()[1].leaves_in_s or 0) <= 3600
                leaving = [m for m in job.members if m.device.node == "n1"]
                job.request(FIRST)
            if boundary.version == 8:
                for device in ON.nodes[1].devices:
                    job.retire(device)
                until(lambda gone=leaving: not any(map(alive, gone)), "the end of its processes")
        strike.join()
        assert set(lost) == set(ON.nodes[1].devices)
        assert seen == [BOTH.path] * 3 + [FIRST.path] * 2 + [BOTH.path] * 2 + [FIRST.path] * 2
        done = good(tmp_path, FIRST.path, 2, steps)
        assert all("recovered in epoch 2 at 3" in r["log"] for r in done), done
    until(lambda: not any(map(alive, job.members)), "the end of the actors", 30.0)


def test_what_ray_cannot_give_is_said(machines: RayCluster, tmp_path: Path) -> None:
    far = cluster(2, 2, 2, 2)
    with RayActors("runtime.led_job:main", cluster=far, bundle={DEVICE: 1}, name=tmp_path.name) as actors:
        with pytest.raises(Fault, match="no machine for node n3") as caught:
            actors.spawn(Device("n3", 0))
        assert caught.value.code == CANNOT_START
    with pytest.raises(ValueError, match="no accelerator"):
        RayActors("runtime.led_job:main", cluster=ON, bundle={"CPU": 1})


def alive(member: Member) -> bool:
    return Path(f"/proc/{member.pid}").exists()
