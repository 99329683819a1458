"""How many random examples a test draws: few by default, many with NEREUS_SOAK=N (a factor)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SOAK = int(os.environ.get("NEREUS_SOAK", "1"))


def examples(count: int) -> settings:
    return settings(
        max_examples=count * SOAK,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
