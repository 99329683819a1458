"""``nereus.attach``: a process joins a job, or a driver leads one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, overload

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan
from nereus.runtime.providers.base import ProcessProvider
from nereus.runtime.session.change import OnPhase
from nereus.runtime.session.controller import Controller
from nereus.runtime.session.job import Job
from nereus.runtime.session.lead import Spawn
from nereus.runtime.session.members import Seat, device_of
from nereus.runtime.session.record import own_address
from nereus.runtime.session.recovery import Replan
from nereus.runtime.transports.choice import TCP


@overload
def attach(
    plan: Plan | None = None,
    *,
    store: Any,
    device: str | Device,
    part: str = ...,
    name: str = ...,
    deadline_s: float = ...,
    journal: str | os.PathLike[str] | None = ...,
    snapshots: bool = ...,
    peers: int = ...,
    spawn: Spawn | None = ...,
    address: str | None = ...,
    transport: str = ...,
    on_phase: OnPhase = ...,
) -> Job: ...


@overload
def attach(
    plan: Plan,
    *,
    provider: ProcessProvider,
    replan: Replan | None = ...,
    parts: Mapping[str, str] | None = ...,
    deadline_s: float = ...,
) -> Controller: ...


def attach(
    plan: Plan | None = None,
    *,
    provider: ProcessProvider | None = None,
    replan: Replan | None = None,
    parts: Mapping[str, str] | None = None,
    store: Any = None,
    device: str | Device | None = None,
    part: str = "",
    name: str = "nereus",
    deadline_s: float = 60.0,
    journal: str | os.PathLike[str] | None = None,
    snapshots: bool = False,
    peers: int = 0,
    spawn: Spawn | None = None,
    address: str | None = None,
    transport: str = TCP,
    on_phase: OnPhase = lambda phase: None,
) -> Job | Controller:
    """Join the job ``name`` of ``store`` as the process of ``device``. Nothing is waited for before ``start``.

    ``snapshots``: keep a copy of the state of each boundary in host memory, so that a process lost in the middle of a
    step loses no more than the step. ``peers``: at every so many boundaries, what only one process holds is copied to
    another one's host memory (0: never), so that it is not lost with its holder; with ``snapshots``. ``deadline_s``: of
    every wait for others; whoever is silent for so long counts as lost where the others agree on that. ``address``: of
    this machine among the others; None: that from which it reaches the store. ``transport``: how state travels, the
    same in all processes (``transports/choice.py``). ``plan``: None where a controller has it.

    ``part``: which of its device's processes this is, where a device has several; the stages that it serves are bound
    with the same one.

    With ``provider`` instead of store and device: the controller of the job whose processes the provider owns, in a
    process that holds no part of any model (see ``Controller``). ``parts``: of the stages that have one.
    """
    if provider is not None:
        if plan is None:
            raise TypeError("attach: a controller needs the plan to begin with")
        return Controller(plan, provider, replan=replan, parts=parts or {}, deadline_s=deadline_s)
    if peers and not snapshots:
        raise TypeError("attach: copies at peers are of boundaries, which snapshots=True keeps")
    if store is None or device is None:
        raise TypeError("attach: a process needs store and device; a controller needs provider")
    return Job(
        plan,
        store=store,
        seat=Seat(device_of(device), part),
        name=name,
        deadline_s=deadline_s,
        journal=journal,
        snapshots=snapshots,
        peers=peers,
        spawn=spawn,
        address=address or own_address(store),
        transport=transport,
        on_phase=on_phase,
    )
