"""The processes of the tests of a living job: a bag of tensors cut by tensor and pipeline parallelism, and Adam.

A step's gradient of an element depends on that element and the step alone, so that every layout trains alike, bit for
bit, and a run without any change says what all of it must be.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nereus.ir.arch import Arch
from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.models.naming.base import Where
from nereus.models.naming.hf import HfNaming
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters import safetensors_state
from nereus.runtime.adapters.torch_plain import PlainTorch
from nereus.runtime.faults import EXPELLED, Fault
from nereus.runtime.live import Prepared
from nereus.runtime.session.attach import attach
from nereus.runtime.session.job import COMMUNICATION, Aborted, Job
from nereus.runtime.session.members import View
from nereus.runtime.transports.base import Parcel
from nereus.runtime.transports.groups import ProcessGroups
from nereus.runtime.transports.sockets import Sockets

ARCH = Arch(
    family="llama",
    num_layers=4,
    hidden=8,
    num_heads=4,
    num_kv_heads=4,
    head_dim=2,
    ffn=12,
    vocab=20,
    tied_embeddings=False,
)


class Bag(torch.nn.Module):
    """This rank's parts of the model's tensors, by name; each element begins as a small multiple of its own number."""

    def __init__(self, tp: tuple[int, int], layers: range, *, filled: bool) -> None:
        super().__init__()
        first = 0
        self.names: list[str] = []
        for tensor in logical_tensors(ARCH):
            value = torch.arange(first, first + tensor.numel, dtype=torch.float32).reshape(tensor.shape) / 1024
            first += tensor.numel
            here = tensor.layer in layers if tensor.layer is not None else True
            if tensor.first and not tensor.last:
                here = layers.start == 0
            if tensor.last and not tensor.first:
                here = layers.stop == ARCH.num_layers
            if not here:
                continue
            if tensor.cut is not None:
                value = value.chunk(tp[1], dim=tensor.cut.dim)[tp[0]]
            value = value.contiguous() if filled else torch.full_like(value, -7.0)
            owner: torch.nn.Module = self
            *path, leaf = tensor.name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner._modules[part]  # type: ignore[assignment]
            owner.register_parameter(leaf, torch.nn.Parameter(value.clone()))
            self.names.append(tensor.name)

    def part(self, name: str) -> torch.nn.Parameter:
        return self.get_parameter(name)


def layers_of(split: tuple[int, ...], rank: int) -> range:
    return range(sum(split[:rank]), sum(split[: rank + 1]))


def build(view: View) -> PlainTorch:
    at = view.place.at
    bag = Bag(at.tp, layers_of(view.stage.pp_split, at.pp[0]), filled=view.job_state is None)
    optimizer = torch.optim.Adam(bag.parameters(), lr=0.125) if view.stage.is_train else None
    return PlainTorch(bag, optimizer, naming=HfNaming(arch=ARCH), where=Where(tp=at.tp[1], tp_rank=at.tp[0]), rank=0)


def train(adapter: PlainTorch, step: int) -> None:
    for parameter in adapter.module.parameters():
        parameter.grad = parameter.detach() * 0.25 + (step % 5) * 0.0625
    assert adapter.optimizer is not None
    adapter.optimizer.step()
    adapter.optimizer.zero_grad()


def probe(adapter: PlainTorch, view: View) -> list[float]:
    """The sum of all elements, each counted once."""
    total = torch.zeros(1, dtype=torch.float64)
    bag = adapter.module
    assert isinstance(bag, Bag)
    for name in bag.names:
        tensor = next(t for t in logical_tensors(ARCH) if t.name == name)
        copies = view.place.at.dp[1] * (view.place.at.tp[1] if tensor.cut is None else 1)
        total += bag.part(name).detach().double().sum() / copies
    view.place.everyone.all_reduce(total)
    return total.tolist()


def unmoved(steps: int) -> PlainTorch:
    """The whole model after so many steps in one process."""
    bag = Bag((0, 1), range(ARCH.num_layers), filled=True)
    adapter = PlainTorch(
        bag, torch.optim.Adam(bag.parameters(), lr=0.125), naming=HfNaming(arch=ARCH), where=Where(), rank=0
    )
    for step in range(steps):
        train(adapter, step)
    return adapter


def differences(adapter: PlainTorch, steps: int) -> list[str]:
    """Fragments that are not, bit for bit, what the unmoved run has there."""
    whole: dict[tuple[str, str], torch.Tensor] = {}
    expected = unmoved(steps).bind()
    for f in expected.state.fragments:
        whole[f.tensor, f.slot] = expected.memory[f.storage].view(f.num_rows, f.num_cols)
    wrong = []
    binding = adapter.bind()
    for f in binding.state.fragments:
        mine = torch.as_strided(binding.memory[f.storage], (f.num_rows, f.num_cols), (f.stride, 1), f.origin)
        if not torch.equal(mine, whole[f.tensor, f.slot][f.row_lo : f.row_hi, f.col_lo : f.col_hi]):
            wrong.append(f"{f.tensor} {f.slot} rows {f.row_lo}..{f.row_hi}")
    return wrong


def main(
    *,
    store: Any,
    device: str,
    spawn: Any,
    name: str,
    plans: tuple[Plan, ...],
    steps: int,
    changes: dict[int, int],
    folder: str,
    fault: dict[str, Any] | None = None,
    deadline_s: float = 20.0,
    fallback: tuple[int, ...] = (),
    requests: dict[int, int] | None = None,
    spawns: bool = True,
    rehearsals: dict[int, int] | None = None,
    saves: dict[int, str] | None = None,
    restore: str = "",
    form: str = "safetensors",
    loop: dict[str, Any] | None = None,
    peers: int = 0,
    transport: str = "tcp",
) -> None:
    """``changes``: after step s to plan number p. ``fault``: {"device", "phase" | "step" | "piece", "kind", "epoch"};
    "piece": when that many pieces of moves have arrived.
    ``restore``: a checkpoint to begin from; ``saves``: after step s to a checkpoint of ``form``.
    ``rehearsals``: after step s of plan number p, before the change.
    ``requests``: after step s one process asks for plan number p, to be served at that boundary or the next.
    ``fallback``: plans to try after a loss: the first that needs no lost device."""
    torch.set_num_threads(1)
    # A process that replaces another is not to fail as that one did.
    broken = fault is not None and fault.get("once", False) and bool(list(Path(folder).glob(f"journal-{device}-*")))
    pieces = itertools.count()
    job: Job

    def on_phase(phase: str) -> None:
        nonlocal broken
        if fault is None or broken or (device, phase) != (fault["device"], fault.get("phase")):
            return
        if job.epoch + 1 < fault.get("epoch", 2):
            return
        broken = True
        strike(fault["kind"])

    def on_piece(data: torch.Tensor) -> int:
        nonlocal broken
        if fault is None or broken or device != fault["device"] or next(pieces) != fault.get("piece"):
            return 0
        broken = True
        strike(fault["kind"])
        if fault["kind"] == "corrupt" and len(data):
            data[len(data) // 2] ^= 16
        return 16 if fault["kind"] == "corrupt" and not len(data) else 0

    def strike(kind: str) -> None:
        Path(folder, f"struck-{device}").touch()
        if kind == "machine":  # the parent stands for it
            os.kill(os.getppid(), signal.SIGKILL)
            kind = "kill"
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind in ("kill store", "kill both", "stop store"):
            assert fault is not None
            os.kill(fault["pid"], signal.SIGSTOP if kind == "stop store" else signal.SIGKILL)
        if kind == "kill both":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            _wake_later(deadline_s * 2.5)
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "raise":
            raise RuntimeError("a planted failure")
        if kind == "memory":
            raise MemoryError("a planted refusal")
        if kind == "delay":
            time.sleep(1.0)

    def replan(plan: Plan, lost: tuple[Device, ...]) -> Plan:
        if fault is not None and fault.get("once"):
            return plans[fallback[0]]  # a new process takes the place
        for number in fallback:
            if not {d for s in plans[number].owners() for d in s.ranks} & set(lost):
                return plans[number]
        raise Fault("NRS6009", f"no plan without {lost}")

    job = attach(
        plans[0],
        store=store,
        name=name,
        device=device,
        deadline_s=deadline_s,
        snapshots=True,
        peers=peers,
        transport=transport,
        spawn=spawn if spawns else None,
        journal=Path(folder, f"journal-{device}-{os.getpid()}"),
        on_phase=on_phase,
    )
    if fault is not None and fault.get("copy") and device == fault["device"]:
        genuine = Prepared.run

        def run(prepared: Prepared, store: Any, name: str, *more: Any) -> Any:
            if f"/peers/{fault['copy']}/" in name:
                strike("kill")
            return genuine(prepared, store, name, *more)

        Prepared.run = run  # type: ignore[method-assign]
    job.bind("actor.train", build, probe=probe)
    job.bind("actor.generate", build)
    log: list[str] = []
    compiled = _counted()
    _tell_of_pieces(on_piece)
    try:
        job.start(loop or {"step": 0})
        if restore:
            job.restore(restore)
        while job.loop["step"] < steps:
            step = job.loop["step"]
            try:
                if not job.serves:
                    job.start()
                    continue
                if fault is not None and not broken and (device, step) == (fault["device"], fault.get("step")):
                    broken = True
                    strike(fault["kind"])
                with job.updating():
                    view, adapter = job.view("actor.train"), job.stage("actor.train")
                    if view is not None:
                        view.place.everyone.barrier()
                        assert isinstance(adapter, PlainTorch)
                        train(adapter, step)
                if job.plan.find_stage("actor.generate") is not None:
                    job.sync("actor.train", "actor.generate")
                    served = job.stage("actor.generate")
                    if isinstance(served, PlainTorch) and (wrong := differences(served, step + 1)):
                        log.append(f"at {step} the engine has other weights: {wrong}")
                job.loop["step"] = step + 1
                if (path := (saves or {}).get(step)) is not None:
                    if fault is not None and fault.get("save") and device == fault["device"]:
                        safetensors_state.Sink.finish = lambda _: strike("kill")  # type: ignore[method-assign]
                    log.append(f"saved {job.checkpoint(path, form)} bytes at {step}")
                if (number := (rehearsals or {}).get(step)) is not None:
                    phases = job.rehearse(plans[number]).phases_s
                    log.append(f"rehearsed at {step}: {' '.join(phases)}; compiled {len(compiled)}")
                if (number := changes.get(step)) is not None:
                    try:
                        log.append(f"epoch {job.transition(plans[number]).epoch} at {step}; compiled {len(compiled)}")
                    except Aborted as aborted:
                        assert aborted.outcome.fault is not None
                        log.append(f"aborted at {step}: {aborted.outcome.fault.code} {aborted.outcome.fault}")
                        if not job.all_alive:
                            raise aborted.outcome.fault from None
                else:
                    # One process asks, another one leads.
                    if (wanted := (requests or {}).get(step)) is not None and device == "n0.gpu1":
                        job.request(plans[wanted])
                    if (outcome := job.boundary()) is not None:
                        log.append(f"boundary {outcome.epoch} at {step}: {outcome.fault}")
            except COMMUNICATION as error:
                log.append(f"failed at {step}: {error}")
                outcome = job.recover(error, replan)
                log.append(f"recovered in epoch {outcome.epoch} at {job.loop['step']}")
        trained = job.stage("actor.train")
        wrong = differences(trained, steps) if isinstance(trained, PlainTorch) else []
        _leave(folder, device, {"log": log, "wrong": wrong, "plan": job.plan.path, "version": job.version})
        job.close()
    except Fault as error:
        _leave(folder, device, {"log": log, "fault": error.code, "text": str(error)})
        raise SystemExit(3 if error.code == EXPELLED else 4) from None


def _tell_of_pieces(on_piece: Callable[[torch.Tensor], int]) -> None:
    """``on_piece`` is called with the memory of everything that arrives in a move, before it is looked at; with nothing
    for what was summed on its way, whose checksum it may then change."""
    for kind in (Sockets, ProcessGroups):
        _tell_of_pieces_of(kind, on_piece)


def _tell_of_pieces_of(kind: Any, on_piece: Callable[[torch.Tensor], int]) -> None:
    genuine = kind.exchange

    def exchange(self: Any, sends: Any, receives: Any, arrived: Any, deadline_s: float) -> None:
        def told(parcel: Parcel, checksum: int) -> None:
            arrived(parcel, checksum ^ on_piece(parcel.data))

        genuine(self, sends, receives, told, deadline_s)

    kind.exchange = exchange


def _counted() -> list[str]:
    """Grows with every move that is compiled, and not remembered, from now on."""
    import nereus.runtime.live as live

    genuine, calls = live._compiled, list[str]()

    def compiled(*given: Any) -> Any:
        calls.append("")
        return genuine(*given)

    live._compiled = compiled
    return calls


def _leave(folder: str, device: str, said: dict[str, Any]) -> None:
    path = Path(folder, f"result-{device}-{os.getpid()}.json")
    path.with_suffix(".part").write_text(json.dumps(said))
    path.with_suffix(".part").rename(path)


def _wake_later(seconds: float) -> None:
    """A process that sends this one SIGCONT."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
