"""What is wrong with a timeline, worked out from its start times alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from nereus.ir.layout import IntArray
from nereus.passes.timeline import Timeline
from nereus.passes.timeline_problem import EXCLUSIVE, TICKS, CoarseOp


def check_timeline(timeline: Timeline, base: IntArray, capacity: IntArray) -> str | None:
    """What is wrong with a timeline, or None; worked out from its start times alone."""
    ops, start = timeline.ops, timeline.start_s
    end = [at + op.seconds for at, op in zip(start, ops, strict=True)]
    slack = 2 / TICKS
    for number, op in enumerate(ops):
        for before in op.after:
            if ops[before].background == op.background and start[number] < end[before] - slack:
                return f"{op.kind} of {op.stage} starts before {ops[before].kind} of {ops[before].stage} ends"
    for background in (False, True):
        per_device: dict[int, list[int]] = {}
        for number, op in enumerate(ops):
            if op.background == background:
                for device in op.devices:
                    per_device.setdefault(device, []).append(number)
        for device, numbers in per_device.items():
            setup = sorted((start[n], end[n], n) for n in numbers if ops[n].kind in EXCLUSIVE)
            for (_, first_end, _), (second, _, n) in itertools.pairwise(setup):
                if second < first_end - slack:
                    return f"{ops[n].kind} of {ops[n].stage} overlaps another on device {device}"
            if background or always_over(ops, numbers, device, base, capacity):
                continue
            for moment in sorted({start[n] for n in numbers} | {end[n] for n in numbers}):
                held = int(base[device])
                for n in numbers:
                    at = ops[n].devices.index(device)
                    if ops[n].running_bytes and start[n] <= moment + slack / 4 and moment < end[n] - slack:
                        held += ops[n].running_bytes[at]
                    elif ops[n].after_bytes and end[n] <= moment + slack:
                        held += ops[n].after_bytes[at]
                if held > capacity[device]:
                    return f"device {device} holds {held:,} of {int(capacity[device]):,} bytes at {moment:.3f} s"
    if timeline.stop_s < max((end[n] for n, op in enumerate(ops) if not op.background), default=0.0) - slack:
        return "the stop ends before its last operation"
    return None


def always_over(
    ops: Sequence[CoarseOp], numbers: Sequence[int], device: int, base: IntArray, capacity: IntArray
) -> bool:
    """Whether one operation alone, or all of them at rest, exceed the device."""
    rest = alone = 0
    for n in numbers:
        at = ops[n].devices.index(device)
        rest += ops[n].after_bytes[at] if ops[n].after_bytes else 0
        alone = max(alone, ops[n].running_bytes[at] if ops[n].running_bytes else 0)
    return int(base[device]) + max(rest, alone) > int(capacity[device])
