"""How long operations take in one run: the job's own figures, disturbed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.sim.job import FloatArray, Job

LAWS = ("lognormal", "loguniform")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timing:
    """Random factors of every operation, equal for equal seeds.

    ``fixed_spread`` and ``rate_spread`` are spreads of the natural logarithm of the factor on ``fixed_s`` and on the
    bytes to pass (a transfer that runs at half its rate holds its ports twice as long): standard deviation where
    ``law`` is lognormal, largest deviation where it is loguniform. ``delay_s``: mean of an exponential delay before
    every operation that has none of its own. ``durations``: seconds per operation that override all of this, and
    ports too; NaN: not given.
    """

    seed: int = 0
    fixed_spread: float = 0.0
    rate_spread: float = 0.0
    delay_s: float = 0.0
    law: str = "lognormal"
    durations: FloatArray | None = None

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise ValueError(f"the law of a spread is {' or '.join(LAWS)}, not {self.law!r}")
        if min(self.fixed_spread, self.rate_spread, self.delay_s) < 0:
            raise ValueError("spreads and delays are not negative")

    def draw(self, job: Job) -> tuple[FloatArray, FloatArray]:
        """(seconds before the transfer, bytes to pass) of every operation. Raises ValueError for durations that do not
        fit the job."""
        generator = np.random.default_rng(self.seed)
        fixed = np.asarray(job.fixed_s, dtype=np.float64).copy()
        work = np.asarray(job.num_bytes, dtype=np.float64).copy()
        if self.fixed_spread:
            fixed *= self._factors(generator, self.fixed_spread, len(fixed))
        if self.rate_spread:
            work *= self._factors(generator, self.rate_spread, len(fixed))
        if self.delay_s:
            fixed += generator.exponential(self.delay_s, len(fixed))
        if self.durations is not None:
            given = np.asarray(self.durations, dtype=np.float64)
            if given.shape != fixed.shape:
                raise ValueError(f"durations of {len(given)} operations are given for a job of {len(fixed)}")
            known = ~np.isnan(given)
            if bool((given[known] < 0).any()):
                raise ValueError("durations are not negative")
            fixed = np.where(known, given, fixed)
            work = np.where(known, 0.0, work)
        return fixed, work

    def _factors(self, generator: np.random.Generator, spread: float, count: int) -> FloatArray:
        if self.law == "lognormal":
            return np.exp(generator.normal(0.0, spread, count))
        return np.exp(generator.uniform(-spread, spread, count))


#: The job's own figures.
EXACT = Timing()
