"""How near predictions come to measurements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.planner.runs import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Errors are |predicted / measured - 1|. ``within_90``: share of measurements inside the predicted 90 % range."""

    num: int
    mean: float
    median: float
    largest: float
    within_90: float | None = None


def accuracy(predicted: Floats, measured: Floats, low: Floats | None = None, high: Floats | None = None) -> Accuracy:
    """At least one; all positive."""
    errors = np.abs(predicted / measured - 1)
    within = None
    if low is not None and high is not None:
        within = float(((low <= measured) & (measured <= high)).mean())
    return Accuracy(
        num=len(errors),
        mean=float(errors.mean()),
        median=float(np.median(errors)),
        largest=float(errors.max()),
        within_90=within,
    )
