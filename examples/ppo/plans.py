"""Plans for this job: read from a file, or laid out otherwise."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from nereus.ir.plan import Plan
from nereus.lang.api import load_plan, pinned
from nereus.lang.render import render


def load(path: str) -> Plan:
    """The placed plan; the process ends with the compiler's messages where it has errors."""
    result = load_plan(path)
    if result.plan is None:
        sys.exit(render(result.diagnostics, color=False))
    return pinned(result.plan)


def laid_out(plan: Plan, count: int, tp: Mapping[str, int], name: str) -> Plan:
    """All stages on the first ``count`` devices; ``tp``: degrees by stage, 1 where none is named."""
    stages = []
    for stage in plan.stages:
        devices, degree = stage.ranks[:count], tp.get(stage.name, 1)
        stages.append(replace(stage, devices=devices, place=devices, tp=degree, dp=count // degree))
    return replace(plan, stages=tuple(stages), path=name)


def alone(plan: Plan) -> Plan:
    """On the first device of a cluster that has no other."""
    one = laid_out(plan, 1, {}, f"{plan.path} on one device")
    (node,) = (node for node in plan.cluster.nodes if node.name == one.stages[0].ranks[0].node)
    return replace(one, cluster=replace(one.cluster, nodes=(replace(node, num_gpus=1),)))
