"""Candidates of a plan's owners on any GPUs, looked for once for all runs of GPUs that are alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nereus.ir.cluster import Device
from nereus.ir.plan import Plan, Stage
from nereus.planner.calibration import Calibration
from nereus.planner.candidates import Candidates, candidates
from nereus.planner.limits import Limits
from nereus.planner.placements import Placement, stays


class Layouts:
    """Candidates of owners by the GPUs that they have: alike on all runs of GPUs of the same nodes."""

    def __init__(self, *, plan: Plan, calibration: Calibration, limits: Limits) -> None:
        self.plan = plan
        self.calibration = calibration
        self.limits = limits
        self.facts = {node.name: replace(node, name="") for node in plan.cluster.nodes}
        self.kinds = {facts: number for number, facts in enumerate(dict.fromkeys(self.facts.values()))}
        self.known: dict[tuple[str, bool, tuple[int, ...]], Candidates | None] = {}
        self.shapes: dict[tuple[Device, ...], tuple[int, ...]] = {}

    def all_of(self, placement: Placement) -> dict[str, Candidates] | None:
        """By owner; None where one has no layout on these GPUs."""
        found = {}
        for owner in self.plan.owners():
            of_owner = self._of(owner, placement.devices[owner.name], anywhere=False)
            if of_owner is None:
                return None
            found[owner.name] = of_owner
        return found

    def present(self, owner: Stage) -> tuple[Candidates, int]:
        """The layout that an owner has, whatever the limits: candidates, and which of them it is."""
        of_owner = self._of(owner, owner.devices, anywhere=False)
        at = None if of_owner is None else of_owner.present()
        if of_owner is None or at is None:
            of_owner, at = candidates(self.plan, owner, self.calibration, pinned=True), 0
        assert of_owner is not None, "a plan has the layout that it has"
        return of_owner, at

    def fastest(self, name: str, devices: tuple[Device, ...]) -> Mapping[str, float] | None:
        """Of all layouts of an owner on these GPUs or others that are alike, by stage."""
        of_owner = self._of(self.plan.stage(name), devices, anywhere=True)
        return None if of_owner is None else of_owner.fastest

    def num_candidates(self) -> dict[str, int]:
        found = dict.fromkeys((owner.name for owner in self.plan.owners()), 0)
        for (name, _, _), of_owner in self.known.items():
            found[name] += 0 if of_owner is None else len(of_owner.all)
        return found

    def _of(self, owner: Stage, devices: tuple[Device, ...], *, anywhere: bool) -> Candidates | None:
        same = devices == owner.devices or (anywhere and self._shape(devices) == self._shape(owner.devices))
        moved, devices = not same, owner.devices if same else devices
        key = (owner.name, moved, self._shape(devices))
        if key not in self.known:
            put = Placement(devices={o.name: devices if o is owner else o.devices for o in self.plan.owners()})
            plan = put.put(self.plan) if moved else self.plan
            pinned = stays(plan, owner, self.limits)
            self.known[key] = candidates(
                plan,
                plan.stage(owner.name),
                self.calibration,
                pinned=pinned,
                moved=moved,
                limits=self.limits,
            )
        return self.known[key]

    def _shape(self, devices: tuple[Device, ...]) -> tuple[int, ...]:
        """Kind of node and number of GPUs of each run of one node."""
        if devices not in self.shapes:
            shape: list[int] = []
            last = ""
            for device in devices:
                if device.node != last:
                    shape += [self.kinds[self.facts[device.node]], 0]
                    last = device.node
                shape[-1] += 1
            self.shapes[devices] = tuple(shape)
        return self.shapes[devices]
