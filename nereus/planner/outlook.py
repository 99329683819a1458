"""What the lengths of the next steps will be, and for how many steps that may be relied on.

The trend is the median slope of the logarithms of the last lengths (Theil and Sen: one odd batch does not turn it).
Nothing says how long it lasts; the rule that loses least without knowing is to expect that what has lasted n steps
lasts n more, so the horizon doubles while nothing changes. Where things have changed k times in T steps, they are taken
to go on changing so (Laplace: k + 1 times in T), which is what there is to expect right after a change.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

#: Lengths that the trend is taken from.
_WINDOW = 8
#: Deviations of the lengths around their trend that count as the end of it.
_BROKEN = 4.0
#: Least deviation taken for noise: 2 %.
_LEAST_NOISE = 0.02


class Outlook:
    """``remaining_steps``: of the whole job, where it is known."""

    def __init__(self, remaining_steps: int | None = None) -> None:
        self._logs: deque[float] = deque(maxlen=_WINDOW)
        self._lasted = self._seen = self._changes = 0
        self._remaining = remaining_steps

    def observe(self, length: float) -> None:
        """The mean length of a step that ended."""
        value = math.log(length)
        broken = len(self._logs) >= 3 and abs(value - self._at(1)) > _BROKEN * max(self._noise(), _LEAST_NOISE)
        if broken:  # a jump: what was before it says nothing of what comes
            self._logs.clear()
            self._lasted = 0
            self._changes += 1
        self._logs.append(value)
        self._lasted += 1
        self._seen += 1
        if self._remaining is not None:
            self._remaining = max(0, self._remaining - 1)

    def restart(self) -> None:
        """Something else changed, the pool for one."""
        self._lasted = min(self._lasted, 1)
        self._changes += 1

    @property
    def horizon_steps(self) -> int:
        steps = max(self._lasted, self._seen // (self._changes + 1))
        return steps if self._remaining is None else min(steps, self._remaining)

    @property
    def slope(self) -> float:
        """Of the logarithm, per step; 0 until three lengths are known."""
        logs = list(self._logs)
        if len(logs) < 3:
            return 0.0
        return median((logs[b] - logs[a]) / (b - a) for a in range(len(logs)) for b in range(a + 1, len(logs)))

    def length(self, ahead: float) -> float:
        """Expected ``ahead`` steps after the last."""
        return math.exp(self._at(ahead))

    def _at(self, ahead: float) -> float:
        logs, slope = list(self._logs), self.slope
        level = median(value - slope * number for number, value in enumerate(logs))
        return level + slope * (len(logs) - 1 + ahead)

    def _noise(self) -> float:
        """Deviation around the trend, from the median of its absolute values."""
        expected = [self._at(number - len(self._logs) + 1) for number in range(len(self._logs))]
        return 1.4826 * median(abs(value - at) for value, at in zip(self._logs, expected, strict=True))
