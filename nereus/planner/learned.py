"""A quantity that is a sum of classes, each times a factor that is learned: step time, peak memory.

    log y = log sum_k x_k exp(prior_k + u_k) + v + noise

``x_k`` is what class k would be by the formulas. ``u_k`` is a sum of effects, one for each label that the run has (its
GPU type, its cluster, ...), so that what was learned on one cluster helps on another as far as they have labels in
common, and six runs of a new cluster already move its own. ``v`` is what neighbouring layouts of one cluster have in
common that no class explains; it fades with the distance of their layouts. Effects are Gaussian around zero, and this
is then a Gaussian process over runs whose covariance is

    cov(i, j) = sum_k s_ik s_jk spread_k^2 * labels(i, j) + near(i, j),    s_k = share of class k in the run's sum

(Rasmussen & Williams, ch. 2 and 3.7: the posterior mode by Gauss-Newton). Noise is Student's t: a run that was
disturbed pulls at nothing. Everything is solved over runs rather than effects, of which there are far more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus.planner.runs import Floats

_MOST_STEPS = 60
#: Steps end when the log posterior gains less than this.
_ENOUGH = 0.01
#: Factors are kept within these powers of e of their prior (a class without weight in any run is free to drift), and
#: so are v and the deviation of a prediction: what contradictory or changed runs say ends in numbers.
_FURTHEST = 8.0
#: A normal variable is within this many deviations in 90 of 100 cases.
DEVIATIONS_90 = 1.645


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """Deviations of logarithms, before any run is seen. ``by_label``: of an effect, by the kind of its label."""

    prior: Floats  # [classes] log of the factors
    spread: Floats  # [classes] multiplies every deviation below
    everywhere: float  # what all runs have in common against the prior
    by_label: Mapping[str, float]
    near: float  # of v
    reach: float  # distance of layouts over which v fades by e
    near_label: str  # v is shared by runs with the same label of this kind
    noise: float
    freedom: float  # degrees of freedom of the noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the model needs of runs. ``labels``: [runs][kinds], the same kinds in the same order for all."""

    x: Floats  # [runs, classes], at least one positive a run
    labels: tuple[tuple[str, ...], ...]
    place: Floats  # [runs, dims] of v

    def part(self, chosen: NDArray[np.intp]) -> Seen:
        return Seen(x=self.x[chosen], labels=tuple(self.labels[i] for i in chosen), place=self.place[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    value: Floats
    #: Deviation of log value; noise included.
    deviation: Floats

    def within_90(self) -> tuple[Floats, Floats]:
        """Between these the measurement is expected in 90 of 100 cases."""
        factor = np.exp(DEVIATIONS_90 * self.deviation)
        return self.value / factor, self.value * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """``pull`` [runs, classes] and ``near_pull`` [runs]: what each run seen adds to the effects of runs like it."""

    beliefs: Beliefs
    seen: Seen
    pull: Floats
    near_pull: Floats
    noise_variance: Floats  # [runs] as the last step weighed them
    #: Measured deviation of runs left out, over the predicted one.
    honesty: float
    #: [runs] log of measured / predicted from all the others; empty once the model has been saved.
    left_out: Floats

    def measured(self) -> Floats:
        """[runs] what was measured of the runs seen: a saved model holds it as the pull and the noise of each."""
        total = np.log((self.seen.x * self.factors(self.seen)).sum(axis=1))
        found: Floats = np.exp(total + _near(self.beliefs, self.seen, self.seen) @ self.near_pull + self._residual())
        return found

    def _residual(self) -> Floats:
        """[runs] log of measured / explained: at the mode noise is what its precision lets the pull be."""
        return self.near_pull * self.noise_variance

    def factors(self, runs: Seen) -> Floats:
        """[runs, classes] what each class takes, in times of its formula."""
        return np.exp(_limited(self.beliefs, _common(self.beliefs, runs, self.seen) @ self.pull))

    def expect(self, runs: Seen) -> Floats:
        """The values of ``predict`` alone, which take a fraction of its time."""
        total = (runs.x * self.factors(runs)).sum(axis=1)
        expected: Floats = total * np.exp(_clipped(_near(self.beliefs, runs, self.seen) @ self.near_pull))
        return expected

    def predict(self, runs: Seen) -> Predicted:
        beliefs = self.beliefs
        common, near = _common(beliefs, runs, self.seen), _near(beliefs, runs, self.seen)
        parts = runs.x * np.exp(_limited(beliefs, common @ self.pull))
        total = parts.sum(axis=1)
        value = total * np.exp(_clipped(near @ self.near_pull))
        weight = parts / total[:, None] * beliefs.spread
        own = (weight**2).sum(axis=1) * _common_to_itself(beliefs, runs) + beliefs.near**2
        if len(self.pull):
            known, covariance = self._covariance()
            cross = common * (weight @ known.T) + near
            own = own - (cross * np.linalg.solve(covariance, cross.T).T).sum(axis=1)
        variance = np.maximum(own, 0.0) + beliefs.noise**2
        return Predicted(value=value, deviation=_clipped(self.honesty * np.sqrt(variance)))

    def _covariance(self) -> tuple[Floats, Floats]:
        """Weighted shares of the runs seen, and the covariance of their logarithms, noise included."""
        common = _common(self.beliefs, self.seen, self.seen)
        parts = self.seen.x * np.exp(_limited(self.beliefs, common @ self.pull))
        weight = parts / parts.sum(axis=1)[:, None] * self.beliefs.spread
        near = _near(self.beliefs, self.seen, self.seen)
        return weight, common * (weight @ weight.T) + near + np.diag(self.noise_variance)


def learn(
    beliefs: Beliefs,
    seen: Seen,
    measured: Floats,
    doubt: Floats | None = None,
    confirmed: NDArray[np.bool_] | None = None,
) -> Learned:
    """``measured``: [runs], positive. No runs are fine: then there is the prior. ``doubt``: [runs] multiplies the
    variance of a run's noise; 1 where it is not given. ``confirmed``: [runs] was measured often enough to be no
    outlier: its noise is normal. None is where it is not given."""
    num = len(measured)
    noise = _Noise(
        variance=np.full(num, beliefs.noise**2) * (1.0 if doubt is None else doubt),
        normal=np.zeros(num, dtype=bool) if confirmed is None else confirmed,
        freedom=beliefs.freedom,
    )
    pull, near_pull = np.zeros_like(seen.x), np.zeros(num)
    if not num:
        none = np.zeros(0)
        return Learned(
            beliefs=beliefs, seen=seen, pull=pull, near_pull=near_pull, noise_variance=none, honesty=1.0, left_out=none
        )
    common, near, target = _common(beliefs, seen, seen), _near(beliefs, seen, seen), np.log(measured)
    now = _State.at(beliefs, seen, target, common, near, pull, near_pull, noise)
    for _ in range(_MOST_STEPS):
        weight = now.share * beliefs.spread
        covariance = common * (weight @ weight.T) + near + np.diag(1 / now.precision)
        solved = np.linalg.solve(covariance, (now.share * now.effect).sum(axis=1) + now.offset - now.residual)
        to_pull, step = weight * beliefs.spread * solved[:, None], 1.0
        while step > 1e-3:  # the problem is not convex: a whole step may go too far
            then = _State.at(
                beliefs, seen, target, common, near,
                now.pull + step * (to_pull - now.pull), now.near_pull + step * (solved - now.near_pull), noise,
            )  # fmt: skip
            if then.energy < now.energy:
                break
            step /= 2
        else:
            break
        gained, now = now.energy - then.energy, then
        if gained < _ENOUGH:
            break
    weight = now.share * beliefs.spread
    covariance = common * (weight @ weight.T) + near + np.diag(1 / now.precision)
    inverse = np.linalg.inv(covariance)
    at_mode = (now.share * now.effect).sum(axis=1) + now.offset - now.residual
    left_out, expected = inverse @ at_mode / np.diag(inverse), 1 / np.sqrt(np.diag(inverse))
    honesty = max(1.0, float(np.quantile(np.abs(left_out) / expected, 0.9)) / DEVIATIONS_90)
    return Learned(
        beliefs=beliefs,
        seen=seen,
        pull=now.pull,
        near_pull=now.near_pull,
        noise_variance=1 / now.precision,
        honesty=honesty,
        left_out=left_out,
    )


@dataclass(frozen=True, slots=True)
class _State:
    """The model at one choice of pulls, linearised there."""

    pull: Floats
    near_pull: Floats
    effect: Floats  # u
    offset: Floats  # v
    share: Floats
    residual: Floats
    precision: Floats  # of the noise, as a normal variable that explains the residual as well
    energy: float  # minus the log posterior

    @staticmethod
    def at(
        beliefs: Beliefs,
        seen: Seen,
        target: Floats,
        common: Floats,
        near: Floats,
        pull: Floats,
        near_pull: Floats,
        noise: _Noise,
    ) -> _State:
        effect, offset = common @ pull, near @ near_pull
        parts = seen.x * np.exp(_limited(beliefs, effect))
        total = parts.sum(axis=1)
        residual = np.log(total) + offset - target
        energy = 0.5 * float((pull * effect / beliefs.spread**2).sum() + near_pull @ offset)
        energy += noise.energy(residual)
        precision = noise.precision(residual)
        return _State(pull, near_pull, effect, offset, parts / total[:, None], residual, precision, energy)


@dataclass(frozen=True, slots=True)
class _Noise:
    variance: Floats
    normal: NDArray[np.bool_]  # Student's t where it is not
    freedom: float

    def energy(self, residual: Floats) -> float:
        """Minus the log likelihood, but for a constant."""
        square = residual**2 / self.variance
        heavy = (self.freedom + 1) / 2 * np.log1p(square / self.freedom)
        return float(np.where(self.normal, square / 2, heavy).sum())

    def precision(self, residual: Floats) -> Floats:
        """Of the normal noise that explains the residual as well."""
        heavy = (self.freedom + 1) / (self.freedom * self.variance + residual**2)
        return np.where(self.normal, 1 / self.variance, heavy)


def _limited(beliefs: Beliefs, effect: Floats) -> Floats:
    """Log of the factors."""
    return beliefs.prior + _clipped(effect)


def _clipped(log: Floats) -> Floats:
    return np.clip(log, -_FURTHEST, _FURTHEST)


def _common(beliefs: Beliefs, a: Seen, b: Seen) -> Floats:
    """[a, b] variance of the effects that two runs share, before ``spread``."""
    found = np.full((len(a.labels), len(b.labels)), beliefs.everywhere**2)
    for of_a, of_b in zip(_by_kind(a), _by_kind(b), strict=False):
        found += _deviation(beliefs, of_a or of_b) ** 2 * _same(of_a, of_b)
    return found


def _common_to_itself(beliefs: Beliefs, a: Seen) -> float:
    kinds = [_deviation(beliefs, column) ** 2 for column in _by_kind(a)]
    return beliefs.everywhere**2 + sum(kinds)


def _near(beliefs: Beliefs, a: Seen, b: Seen) -> Floats:
    """[a, b] covariance of v."""
    apart: Floats = np.sqrt(((a.place[:, None, :] - b.place[None, :, :]) ** 2).sum(axis=2))
    found: Floats = beliefs.near**2 * np.exp(-apart / beliefs.reach)
    for of_a, of_b in zip(_by_kind(a), _by_kind(b), strict=False):
        if _kind(of_a or of_b) == beliefs.near_label:
            found = found * _same(of_a, of_b)
    return found


def _by_kind(runs: Seen) -> list[tuple[str, ...]]:
    return list(zip(*runs.labels, strict=True))


def _kind(column: Sequence[str]) -> str:
    return column[0].split(":", 1)[0] if column else ""


def _deviation(beliefs: Beliefs, column: Sequence[str]) -> float:
    return beliefs.by_label.get(_kind(column), 0.0)


def _same(of_a: Sequence[str], of_b: Sequence[str]) -> Floats:
    code = {label: number for number, label in enumerate(dict.fromkeys((*of_a, *of_b)))}
    a, b = np.array([code[label] for label in of_a]), np.array([code[label] for label in of_b])
    same: Floats = (a[:, None] == b[None, :]).astype(np.float64)
    return same
