"""How long the parts of a stop really take: what executed changes say of the coarse estimate.

A change is timed in every process (``Outcome.phases_s``). Its phases follow one another, so the stop is their sum, and
each has one factor: measured over estimated, the median of the last changes, so that one disturbed change moves nothing
and a machine that has become slower is followed. A little is added to every estimate, since a phase that the estimate
takes for nothing still asks the other processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from nereus.passes.coarse import CoarseEstimate

#: The phases of a change (``nereus/runtime/session/change.py``) that each part of the estimate is measured by.
PHASES: Mapping[str, tuple[str, ...]] = {
    "drain": ("offer",),
    "setup": ("prepare",),
    "transfer": ("move",),
    "verify": ("probe", "finish", "vote"),
}
_LEAST_S = 0.05
#: Changes remembered.
_KEPT = 8
#: A ratio further from one is no measurement.
_FURTHEST = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """``ratios``: by part, of the last changes, oldest first."""

    ratios: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def stop_s(self, estimate: CoarseEstimate) -> float:
        """Seconds of a stop; the estimate's own where no change was seen."""
        if not estimate.stop_s or not self.ratios:
            return estimate.stop_s
        return sum(seconds * self.factor(part) for part, seconds in _parts(estimate).items())

    def factor(self, part: str) -> float:
        """Seconds that a part takes for each that is estimated."""
        return median(self.ratios[part]) if self.ratios.get(part) else 1.0

    def seen(self, estimate: CoarseEstimate, phases_s: Mapping[str, float]) -> Stops:
        """With one more change, which was executed. A part none of whose phases was timed stays as it is."""
        ratios = dict(self.ratios)
        for part, estimated_s in _parts(estimate).items():
            took = [phases_s[phase] for phase in PHASES[part] if phase in phases_s]
            if took and 0 < sum(took) < math.inf:
                ratio = min(max(sum(took) / estimated_s, 1 / _FURTHEST), _FURTHEST)
                ratios[part] = (*ratios.get(part, ()), ratio)[-_KEPT:]
        return Stops(ratios=ratios)


def _parts(estimate: CoarseEstimate) -> dict[str, float]:
    of = {
        "drain": estimate.drain_s,
        "setup": estimate.setup_s + estimate.groups_s,
        "transfer": estimate.transfer_s,
        "verify": estimate.commit_s,
    }
    return {part: seconds + _LEAST_S for part, seconds in of.items()}


def save(stops: Stops) -> dict[str, Any]:
    return {part: [float(f"{ratio:.4g}") for ratio in ratios] for part, ratios in stops.ratios.items()}


def load(saved: Mapping[str, Any]) -> Stops:
    """Raises ValueError, TypeError or AttributeError where ``saved`` is none."""
    ratios = {part: tuple(float(ratio) for ratio in found) for part, found in saved.items()}
    if unknown := set(ratios) - set(PHASES):
        raise ValueError(f"'stops' has {', '.join(sorted(unknown))}")
    if not all(1 / _FURTHEST <= ratio <= _FURTHEST for found in ratios.values() for ratio in found):
        raise ValueError("'stops' has a ratio that is no measurement")
    return Stops(ratios={part: found[-_KEPT:] for part, found in ratios.items() if found})
