"""The workers of the tests of a job with a controller: the bag of ``session_job``, trained step by step. The script
does not say who leads."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from runtime import session_job
from runtime.session_job import build, differences, probe

from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.faults import Fault
from nereus.runtime.session.attach import attach
from nereus.runtime.session.job import COMMUNICATION


def main(
    *,
    store: Any,
    device: str,
    spawn: Any,
    name: str,
    steps: int,
    folder: str,
    deadline_s: float = 60.0,
    stop: tuple[str, int] | None = None,
    lone: tuple[str, int] | None = None,
    ask: tuple[int, Any] | None = None,
    hold: tuple[str, int] | None = None,
    kill: tuple[str, str] | None = None,
    part: str = "",
) -> None:
    """``stop``: device and step of a process that stops answering, with its connections open. ``lone``: of one whose
    loop goes ways of its own. ``hold``: of one that lets the others wait in their collective until there is a file
    ``go``. ``kill``: device and phase of one that ends in the first change. ``ask``: at this step the workers ask for
    that plan. Generation has processes of its own, those of part ``engine``, and is a copy of what is trained."""
    torch.set_num_threads(1)

    def on_phase(phase: str) -> None:
        if kill == (device, phase) and job.epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    job = attach(
        store=store,
        device=device,
        part=part,
        name=name,
        deadline_s=deadline_s,
        snapshots=True,
        on_phase=on_phase,
    )
    job.bind("actor.train", build, probe=probe)
    job.bind("actor.generate", build, cache=True, part="engine")
    log: list[str] = []
    _leave(folder, f"pid-{device}", os.getpid())
    try:
        job.start()
        while job.loop["step"] < steps:
            step = job.loop["step"]
            try:
                if not job.serves:
                    job.start()
                    continue
                if stop == (device, step) and job.epoch == 1:
                    _leave(folder, f"stopped-{device}", os.getpid())
                    os.kill(os.getpid(), signal.SIGSTOP)
                if hold == (device, step) and job.epoch == 1:
                    _leave(folder, "holds", step)
                    while not Path(folder, "go").exists():
                        time.sleep(0.01)
                view, adapter = job.view("actor.train"), job.stage("actor.train")
                if view is not None and isinstance(adapter, PlainTorch):
                    with job.updating():
                        view.place.everyone.barrier()
                        session_job.train(adapter, step)
                if job.plan.find_stage("actor.generate") is not None:
                    job.sync("actor.train", "actor.generate")
                    served = job.stage("actor.generate")
                    if isinstance(served, PlainTorch) and (wrong := differences(served, step + 1)):
                        log.append(f"at {step} the engine has other weights: {wrong}")
                job.loop["step"] = step + 1
                if lone == (device, step):
                    job.loop["alone"] = True
                if ask is not None and ask[0] == step:
                    log.append(f"transition {job.transition(ask[1]).epoch} at {step}")
                elif (outcome := job.boundary()) is not None:
                    log.append(f"boundary {outcome.epoch} at {step}: {outcome.fault}")
            except COMMUNICATION as error:
                log.append(f"failed at {step}: {error}")
                _leave(folder, f"heard-{device}", time.time())
                outcome = job.recover(error)
                log.append(f"recovered in epoch {outcome.epoch} at {job.loop['step']}")
        held = job.stage("actor.generate" if part else "actor.train")
        wrong = differences(held, steps) if isinstance(held, PlainTorch) else ["nothing is here"]
        said = {"log": log, "wrong": wrong, "plan": job.plan.path, "version": job.version, "loop": job.loop}
        _leave(folder, f"result-{device}-{os.getpid()}", said)
        job.close()
    except Fault as error:
        _leave(folder, f"result-{device}-{os.getpid()}", {"log": log, "fault": error.code, "text": str(error)})
        raise SystemExit(4) from None


def _leave(folder: str, name: str, said: Any) -> None:
    """Processes of one device may say the same at the same time: the last one stands."""
    part = Path(folder, f"{name}.{os.getpid()}.part")
    part.write_text(json.dumps(said))
    part.rename(Path(folder, f"{name}.json"))


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]
