"""The certificate's figures against a recount from plans and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.models.priors import MESSAGE_S
from nereus.verify.bounds import Bounds
from nereus.verify.case import Case
from nereus.verify.coverage import fetched_bytes
from nereus.verify.document import LifecycleOp
from nereus.verify.finding import DamagedDocument, Violation
from nereus.verify.graph import num_edges, num_ops
from nereus.verify.links import busy_ports, link_classes
from nereus.verify.memory import Use
from nereus.verify.proof import proved_seconds
from nereus.verify.storages import Storages
from nereus.verify.waves import predicted_seconds

_CLASSES = ("local", "host", "intra-node", "inter-node")
_CLOSE = 1e-6  # relative: sums of seconds in another order
#: Stated by the certificate and not judged: edges of tight mode, and bounds over all placements (but that they are not
#: above those of this one).
NOT_JUDGED = (
    "num_edges in tight mode",
    "best_bound_transfer_s",
    "best_bound_peak_bytes_max",
    "placement_s",
)


@dataclass(frozen=True, slots=True)
class _Figures:
    values: Mapping[str, Any]

    def count(self, name: str) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise DamagedDocument(f"certificate.{name} is missing or of a wrong kind")
        return value

    def seconds(self, name: str) -> float:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DamagedDocument(f"certificate.{name} is missing or of a wrong kind")
        return float(value)


def check_bounds(case: Case, bounds: Bounds) -> str:
    """What is called a lower bound is one: bytes as counted anew, seconds not above what these moves need anyway."""
    said = _Figures(case.document.certificate)
    most_in = int(bounds.node_in_bytes.max(initial=0))
    for name, true in (("bound_moved_bytes", bounds.moved_bytes), ("bound_node_in_bytes_max", most_in)):
        if said.count(name) != true:
            raise Violation(f"{name} is {true:,} and the certificate says {said.count(name):,}")
        if said.count(f"best_{name}") > true:
            raise Violation(f"best_{name} is above the bound of this placement, {true:,}")
    busy = busy_ports(case)
    # What is sent is there a message after its ports are done with it.
    bound_s, most_s = said.seconds("bound_transfer_s"), _and_message(max(busy.worst, busy.copies_s))
    if bound_s > most_s * (1 + _CLOSE):
        raise Violation(f"bound_transfer_s is {bound_s:.6g}, and no port is busy for more than {most_s:.6g} s")
    proved_s = _and_message(proved_seconds(case))
    # The compiler's closed form may be weaker than trees where several ports count, or where places that derive a part
    # lack different parts of the same bytes: then it claims less than is proved, which is still a bound.
    exact = len(case.document.prices or ()) <= 1 and not bounds.derived_bytes
    if bound_s > proved_s * (1 + _CLOSE) or (exact and bound_s < proved_s * (1 - _CLOSE)):
        raise Violation(f"bound_transfer_s is {bound_s:.9g}, and the prices of its ports prove {proved_s:.9g} s")
    if said.seconds("best_bound_transfer_s") > bound_s * (1 + _CLOSE):
        raise Violation("best_bound_transfer_s is above bound_transfer_s")
    if said.seconds("best_bound_placement_s") > said.seconds("placement_s") * (1 + _CLOSE):
        raise Violation("best_bound_placement_s is above placement_s")
    if said.seconds("bound_downtime_s") > said.seconds("downtime_s") * (1 + _CLOSE):
        raise Violation("bound_downtime_s is above downtime_s")
    if said.count("best_bound_peak_bytes_max") > said.count("bound_peak_bytes_max"):
        raise Violation("best_bound_peak_bytes_max is above bound_peak_bytes_max")
    return f"at least {bounds.moved_bytes:,} bytes move, {most_in:,} into one node, in {bound_s:.6g} s"


def _and_message(busy_s: float) -> float:
    return busy_s + MESSAGE_S if busy_s else 0.0


def check_certificate(case: Case, bounds: Bounds, use: Use, storages: Storages) -> str:
    document, world = case.document, case.world
    said = _Figures(document.certificate)
    kind, size = link_classes(case), case.numel * case.element_bytes
    by_class = {name: int(size[kind == i].sum()) for i, name in enumerate(_CLASSES)}
    node_in = np.zeros(len(world.nodes), dtype=np.int64)
    between = kind == 3
    np.add.at(node_in, world.node_of_places(document.moves.dst)[between], size[between])
    true = {
        "moved_bytes": sum(by_class.values()) - by_class["local"],
        "local_bytes": by_class["local"],
        "node_in_bytes_max": int(node_in.max(initial=0)),
        "kept_bytes": bounds.kept_bytes,
        "derived_bytes": bounds.derived_bytes - fetched_bytes(case),
        "num_waves": document.num_waves,
        "num_ops": num_ops(case, storages),
    }
    edges = num_edges(case, storages)
    if edges is not None:
        true["num_edges"] = edges
    if storages.staged_bytes or "staged_bytes" in said.values:  # later than the first files
        true["staged_bytes"] = storages.staged_bytes
    links = said.values.get("bytes_by_link")
    if not isinstance(links, dict):
        raise DamagedDocument("certificate.bytes_by_link is missing or of a wrong kind")
    for name, value in true.items():
        if said.count(name) != value:
            raise Violation(f"{name} is {value:,} and the certificate says {said.count(name):,}")
    for name in _CLASSES[1:]:
        if links.get(name) != by_class[name]:
            raise Violation(f"{by_class[name]:,} bytes are {name} and the certificate says {links.get(name)}")
    if said.count("moved_bytes") < said.count("bound_moved_bytes"):
        raise Violation("fewer bytes move than must")
    _check_peak(case, use, said)
    _check_seconds(case, storages, said)
    _check_promises(case, said)
    return f"{len(true) + len(links) + 8} figures recounted from plans and schedule"


def _check_peak(case: Case, use: Use, said: _Figures) -> None:
    world = case.world
    peak = use.peak
    names = {world.space_name(space): space for space in range(world.num_spaces)}
    space = names.get(str(said.values.get("peak_device")))
    if space is None:
        raise Violation(f"peak_device {said.values.get('peak_device')} is none")
    figure, true = said.count("peak_bytes_max"), int(peak[space])
    # In host memory the certificate may count on less being agreed; on a GPU there is one process and no doubt.
    if figure < true or (figure > true and space < world.num_devices):
        raise Violation(f"{world.space_name(space)} holds up to {true:,} bytes and the certificate says {figure:,}")
    if said.count("capacity_bytes") != int(use.capacity[space]):
        raise Violation(f"capacity_bytes is {int(use.capacity[space]):,}, not {said.count('capacity_bytes'):,}")
    living = np.concatenate((world.alive, np.isin(np.arange(len(world.nodes)), world.node_of[world.alive])))
    room = np.where(living, use.capacity - peak, np.iinfo(np.int64).max)
    if int(room.min()) < said.count("capacity_bytes") - figure:
        fullest = int(room.argmin())
        left = int(room[fullest])
        raise Violation(f"{world.space_name(fullest)} has less room than the certificate's peak device: {left:,} bytes")
    # In tight mode the bound allows for one storage in flight, which this change may not need.
    if case.document.mode != "tight" and said.count("bound_peak_bytes_max") > figure:
        raise Violation("bound_peak_bytes_max is above peak_bytes_max")
    phase = said.values.get("peak_phase")
    if phase not in use.phases or (space < world.num_devices and int(use.phases[phase][space]) != true):
        raise Violation(f"the peak is not {phase}")


def _check_seconds(case: Case, storages: Storages, said: _Figures) -> None:
    life = case.document.lifecycle
    transfer = predicted_seconds(case, storages)
    setup = max(_chain(life, "engine-start"), _chain(life, "spawn")) + _chain(life, "build-groups")
    background = max(_chain(life, kind, background=True) for kind in ("engine-start", "spawn"))
    downtime = _stop_s(case, said)
    for name, value, least in (
        ("transfer_s", transfer, transfer),
        ("setup_s", setup, 1.0),
        ("background_s", background, 1.0),
        ("downtime_s", downtime, 1.0),
    ):
        if abs(said.seconds(name) - value) > _CLOSE * max(least, value):
            raise Violation(f"{name} is {value:.6g} and the certificate says {said.seconds(name):.6g}")


def _stop_s(case: Case, said: _Figures) -> float:
    """The stop, worked out from when each operation starts: one at a time on a device, communicators after their
    processes, the transfer after every process (and, in tight mode, communicator), the commit after all."""
    life = [op for op in case.document.lifecycle if not op.background and op.kind != "retire"]
    drain = said.seconds("drain_s")
    idle: dict[int, tuple[float, str]] = {}
    spawned: dict[str, float] = {}
    begin = done = drain
    for op in sorted(life, key=lambda op: (op.start_s, op.start_s + op.seconds)):
        end = op.start_s + op.seconds
        late = max([idle[d] for d in op.devices.tolist() if d in idle], default=(0.0, ""))
        if op.start_s < late[0] - _CLOSE * max(1.0, end) or op.start_s < 0:
            raise Violation(f"{op.kind} of {op.stage} starts at {op.start_s:.6g} s, during {late[1]}")
        if op.kind == "build-groups" and op.start_s < spawned.get(op.stage, 0.0) - _CLOSE * max(1.0, end):
            raise Violation(f"{op.stage} has communicators set up before its processes are there")
        idle.update(dict.fromkeys(op.devices.tolist(), (end, f"{op.kind} of {op.stage}")))
        if op.kind == "spawn":
            spawned[op.stage] = max(spawned.get(op.stage, 0.0), end)
        if op.kind != "build-groups" or case.document.mode == "tight":
            begin = max(begin, end)
        done = max(done, end)
    return max(begin + said.seconds("transfer_s"), done) + said.seconds("commit_s")


def _chain(life: tuple[LifecycleOp, ...], kind: str, *, background: bool = False) -> float:
    """Operations of a kind on one device follow each other; the longest such chain."""
    busy: dict[int, float] = {}
    for op in life:
        if op.kind == kind and op.background == background:
            for device in op.devices.tolist():
                busy[device] = busy.get(device, 0.0) + op.seconds
    return max(busy.values(), default=0.0)


def _check_promises(case: Case, said: _Figures) -> None:
    document = case.document
    mode, first = said.values.get("mode"), min(document.release.values(), default=None)
    nothing = not len(document.moves) and not document.lifecycle
    if mode != document.mode and not (mode == "none" and nothing):
        raise Violation(f"the certificate is about mode {mode} and the schedule is {document.mode}")
    words = said.values.get("point_of_no_return")
    true = None if first is None else f"the first release, at the end of wave {first}"
    if words != true:
        raise Violation(f"the point of no return is {true or 'the commit'} and the certificate says {words}")
    checks = said.values.get("checks")
    holding = isinstance(checks, list) and all(isinstance(c, dict) and c.get("holds") is True for c in checks)
    if said.values.get("safe") is not True or not holding:
        raise Violation("the certificate itself does not say that the transition is safe")
