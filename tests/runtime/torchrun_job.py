"""What torchrun starts in the tests: ``torchrun ... torchrun_job.py FOLDER``, where ``words.json`` says what to do."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime import led_job, session_job
from runtime.test_session import PLANS
from runtime.tiny import cluster

import nereus
from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.runtime.providers import torchrun
from nereus.runtime.providers.keeper import keep
from nereus.runtime.providers.torchrun import TorchrunProcesses


def main(folder: Path) -> None:
    """``how``: "alone", torchrun's processes are the job's; "kept", each keeps one; "led", and rank 0 a controller too.
    ``plans``: first plan by number of processes. ``checkpoint``: begin from it where it is there. A fault with
    ``first`` is one of the first start only. Where torchrun has several agents each plays a machine."""
    said = json.loads((folder / "words.json").read_text())
    how, first = said.pop("how"), PLANS[said.pop("plans")[os.environ["WORLD_SIZE"]]]
    checkpoint = said.pop("checkpoint", "")
    folder.joinpath(f"rank-{os.environ['RANK']}-{os.getpid()}").write_text(os.environ["WORLD_SIZE"])
    if said.get("fault", {}).pop("first", False) and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        del said["fault"]
    words: dict[str, Any] = {"folder": str(folder), "name": "nereus", **said}
    if how == "led":
        leading = lambda provider: lead(provider, first, folder)  # noqa: E731
        keep(led_job.main, args=words, lead=leading, cluster=first.cluster)
        return
    if (nodes := int(os.environ["GROUP_WORLD_SIZE"])) > 1:
        first = on_machines(first, cluster(*[int(os.environ["LOCAL_WORLD_SIZE"])] * nodes))
    words |= {"plans": (first, *PLANS), "fallback": tuple(n + 1 for n in said.get("fallback", ()))}
    words["changes"] = {int(step): n + 1 for step, n in said.get("changes", {}).items()}
    if checkpoint:
        words["saves"] = dict.fromkeys(range(said["steps"]), checkpoint)
        words["restore"] = checkpoint if Path(checkpoint).exists() else ""
    if how == "kept":
        keep(session_job.main, args=words, cluster=first.cluster)
    else:
        found = torchrun.join(first.cluster)
        session_job.main(store=found["store"], device=str(found["device"]), spawn=None, **words)


def on_machines(plan: Plan, on: Any) -> Plan:
    (only,) = plan.stages
    return replace(plan, cluster=on, stages=(replace(only, devices=on.devices),))


def lead(provider: TorchrunProcesses, first: Plan, folder: Path) -> None:
    """A plan for all, then the loss of a process, then a plan of two, after which a device's processes go."""

    def replan(plan: Plan, lost: tuple[Device, ...]) -> Plan:
        return plan  # a new process takes the place

    job = nereus.attach(first, provider=provider, replan=replan)
    job.start({"step": 0})
    for boundary in job.boundaries():
        if boundary.version == 2 and job.epoch == 1:
            job.request(PLANS[1])
        if boundary.version == 4 and job.epoch == 2:
            (pid,) = (m.pid for m in job.members if m.device == Device("n0", 2))
            os.kill(pid, signal.SIGKILL)
        if boundary.version == 5 and job.epoch == 3:
            job.request(PLANS[2])
        if boundary.version == 6:
            job.retire(Device("n0", 3))
    machines = [(m.name, len(m.devices)) for m in provider.inventory()]
    plans = [o.plan.path for o in job.outcomes if o.committed]
    (folder / "led.json").write_text(json.dumps({"plans": plans, "machines": machines}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
