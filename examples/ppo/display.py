"""What a reader of a run sees: plans that are wrong, a line for every step."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from nereus.ir.plan import Plan
from nereus.lang.api import load_plan, pinned
from nereus.lang.render import render


def load(path: str) -> Plan:
    """The placed plan; the process ends with the compiler's messages where it has errors."""
    result = load_plan(path)
    if result.plan is None:
        sys.exit(render(result.diagnostics, color=False))
    return pinned(result.plan)


def line(point: Mapping[str, float], total_s: float, parts_s: Mapping[str, float]) -> str:
    """One step for a reader."""
    bar = "#" * round(24 * point["reward"])
    parts = " ".join(f"{name} {value:.2f}" for name, value in parts_s.items())
    return (
        f"step {point['step']:4.0f}  reward {point['reward']:.3f} |{bar:<24}|  "
        f"response {point['length']:5.1f} of {point['allowed']:2.0f}  kl {point['kl']:5.2f}  "
        f"{total_s:5.2f} s ({parts})"
    )
