"""Limits of a search for plans, from the command line."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from nereus.cli.errors import UsageError
from nereus.lang.schema import RECOMPUTE

if TYPE_CHECKING:
    from nereus.ir.plan import Plan
    from nereus.planner.limits import Limits

_ONLY = re.compile(r"(?P<stage>[^=]+)\.(?P<key>\w+)=(?P<values>[\w,]+)")
_COUNT = re.compile(r"[1-9]\d{0,6}")
#: Values that are no counts, by key.
_WORDS = {"zero": ("0", "1", "2", "3"), "recompute": RECOMPUTE}
_GPUS = re.compile(r"(?P<stage>[^=]+)=(?P<least>\d{1,7})(-(?P<most>\d{1,7}))?")


def limits_of(plan: Plan, args: argparse.Namespace) -> Limits:
    """Of ``--pin``, ``--only``, ``--move``, ``--gpus``, ``--free`` and the plan's ``pool``. Raises UsageError."""
    from nereus.models.memory.neighbours import members
    from nereus.planner.limits import LIMITED, Limits, broken
    from nereus.planner.placements import stays

    names = [stage.name for stage in plan.stages]

    def known(option: str, name: str) -> str:
        if name not in names:
            raise UsageError(f"{option}: the plan has no stage {name}, but {', '.join(names)}")
        if plan.stage(name).service is not None:
            raise UsageError(f"{option}: {name} is a service, which has no GPUs of this cluster")
        return name

    values, num_gpus = {}, {}
    for text in args.only:
        match = _ONLY.fullmatch(text)
        if match is None or match["key"] not in LIMITED:
            raise UsageError(f"--only {text}: STAGE.KEY=V,V with a key of {', '.join(LIMITED)}")
        given = match["values"].split(",")
        for value in given:
            if not _is_value(match["key"], value):
                raise UsageError(f"--only {text}: {match['key']} is never '{value}'")
        values[known(f"--only {text}", match["stage"]), match["key"]] = frozenset(given)
    if not args.move and (args.gpus or args.free or args.smallest):
        raise UsageError("--gpus, --free and --smallest go with --move: without it stages stay on their GPUs")
    for text in args.gpus:
        match = _GPUS.fullmatch(text)
        least, most = (int(match["least"]), int(match["most"] or match["least"])) if match else (0, 0)
        if match is None or not 1 <= least <= most:
            raise UsageError(f"--gpus {text}: STAGE=N or STAGE=N-M, at least 1 and not backwards")
        num_gpus[known(f"--gpus {text}", match["stage"])] = least, most
    nodes = [node.name for node in plan.cluster.nodes]
    for name in args.free:
        if name not in nodes:
            raise UsageError(f"--free {name}: the cluster has no such node")
    limits = Limits(
        pinned=frozenset(known(f"--pin {name}", name) for name in args.pin),
        values=values,
        num_gpus=num_gpus,
        move=args.move,
        free=frozenset(args.free),
        most_gpus=_most_gpus(plan, args.free) if args.move else None,
    )
    for owner in plan.owners():
        if stays(plan, owner, limits) and (against := broken(plan, members(plan, owner), limits)) is not None:
            raise UsageError(f"--pin keeps {owner.name} as and where it is, and {against} does not allow that")
    return limits


def _is_value(key: str, text: str) -> bool:
    return text in _WORDS[key] if key in _WORDS else _COUNT.fullmatch(text) is not None


def _most_gpus(plan: Plan, free: list[str]) -> int | None:
    """What the plan's pool leaves: at most ``max``, and ``standby`` kept free."""
    pool = plan.cluster.pool
    if pool is None:
        return None
    there = sum(node.num_gpus for node in plan.cluster.nodes if node.name not in free)
    return max(0, min(there - pool.standby_gpus, pool.max_gpus or there))
