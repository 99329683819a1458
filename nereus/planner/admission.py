"""When a change that would pay is made, though nobody knows for how long it will: rent or buy, with a forecast.

Staying with a plan while another is faster is rent, paid with every step; the stop of the change is the price. The
rent paid so far is the regret. A change is made once the regret has reached

    trust * stop     where the forecast says that the change will pay,
    stop / trust     where it says that it will not,

so for one change that is not taken back, with steps that are small against the stop, what is paid beyond the faster
plan is at most

    1 + trust        times the optimum of one who knew the future, where the forecast is right,
    1 + 1 / trust    times it, whatever the forecast says,

(Purohit, Svitkina and Kumar, 2018; trust = 1 is the classic rule with factor 2.) A regret never falls below zero: what
staying gained before the other plan became the faster one does not count against it. Between two plans, there and back
for ever and against forecasts that are always wrong, the factor is (1 + 1 / trust) squared.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping


class RentOrBuy:
    """Regrets of the plan that runs, one for each alternative. ``trust``: in the forecast, above 0, at most 1."""

    def __init__(self, trust: float) -> None:
        if not 0 < trust <= 1:
            raise ValueError(f"trust {trust} must be above 0 and at most 1")
        self.trust = trust
        self._regret_s: dict[Hashable, float] = {}

    def step(self, gains_s: Mapping[Hashable, float]) -> None:
        """``gains_s``: what each alternative would have saved in the step that ended; below zero where it is slower. An
        alternative that was not looked at before is taken to have been as good as the best of those that were."""
        known = max(self._regret_s.values(), default=0.0)
        self._regret_s = {key: max(0.0, self._regret_s.get(key, known) + gain) for key, gain in gains_s.items()}

    def regret_s(self, key: Hashable) -> float:
        return self._regret_s.get(key, 0.0)

    def due(self, key: Hashable, *, stop_s: float, forecast_s: float) -> bool:
        """``forecast_s``: what the change is expected to save from now on."""
        needed_s = self.trust * stop_s if forecast_s >= stop_s else stop_s / self.trust
        return self.regret_s(key) >= needed_s

    def moved(self) -> None:
        """Another plan runs now; nothing is regretted of it."""
        self._regret_s = {}
