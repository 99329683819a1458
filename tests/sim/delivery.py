"""Follows the transfers of a baseline's answer: who has what when, and whether everybody has all at the end."""

from __future__ import annotations

import numpy as np

from nereus.passes.diff import diff
from nereus.passes.hold import hold
from nereus.sim.baselines.answer import STORAGE, Answer


def check_delivery(answer: Answer) -> None:
    """Every transfer sends what its source has by then; every wanted interval ends where it is wanted."""
    topology = answer.problem.topology
    held: dict[tuple[int, int], np.ndarray] = {}

    def of(place: int, table: int) -> np.ndarray:
        if (place, table) not in held:
            held[place, table] = np.zeros(len(answer.tables[table].cell), dtype=bool)
        return held[place, table]

    for number, table in enumerate(answer.tables):
        by_class = table.intervals_of_classes()
        for cls, groups in enumerate(table.class_holders):
            for place in {p for g in groups for p in table.old_groups[g].places}:
                if topology.alive[topology.node_of_place(place)]:
                    of(place, number)[by_class[cls]] = True
    for step in answer.steps:
        for t in step.transfers:
            assert of(t.src, t.table)[t.intervals].all(), f"{step.name}: {t.src} sends what it does not have"
            expected = int(answer.tables[t.table].num_bytes[t.intervals].sum())
            assert t.num_bytes == expected or t.dst == STORAGE
            of(t.dst, t.table)[t.intervals] = True
            for place in (t.src, t.dst):
                if place != STORAGE:
                    assert place % answer.problem.num_devices in step.devices
    for number, table in enumerate(answer.tables):
        by_class = table.intervals_of_classes()
        wanted_groups = set(answer.final[number])
        for cls, groups in enumerate(table.class_wanters):
            for place in {p for g in groups if g in wanted_groups for p in table.new_groups[g].places}:
                have = of(place, number)[by_class[cls]]
                if not have.all() and table.class_holders[cls]:
                    own = table.derived.get(place, np.zeros(0, dtype=np.int64))
                    have = have | np.isin(by_class[cls], own)
                    assert have.all(), f"table {number}: place {place} lacks a part of class {cls}"


def bound_bytes(answer: Answer) -> int:
    """Least bytes that end in the answer's placement: each GPU takes in once what it lacks and cannot derive, each
    node's host memory once what it lacks."""
    problem = answer.problem
    found = diff(problem.old_holdings, hold(answer.placed), problem.topology)
    total = 0
    for demand in found.demands:
        gpus = [p for p in demand.wanters if p < problem.num_devices]
        hosts = len(gpus) < len(demand.wanters)
        near = (
            p >= problem.num_devices and problem.links.node(p) == demand.node
            for p in found.holders[demand.table][demand.cls]
        )
        total += demand.num_bytes * (len(gpus) + (hosts and not any(near)))
    return total
