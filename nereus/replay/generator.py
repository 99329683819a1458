"""Traces from a few numbers and a seed: how lengths grow and pools change in published runs.

Lengths: ``growth`` is the Nereus paper's first trace, a mean of 1,147 to 3,722 tokens over 26 steps, and its shape over
more steps; ``reasoning`` a longer growth as of a model that learns to think (a factor of six); ``shrink`` an answer
that becomes concise under a length penalty; ``stage`` a change of the data, after which responses are twice as long;
``saw`` a growth that collapses and begins anew; ``steady`` no drift. Batches scatter by 4 %, maxima follow the means.

Pools: ``fixed``; ``elastic`` grows in doublings, as quotas are granted; ``spot`` loses nodes after a notice of two
minutes (30 s for a third of them, as the clouds differ) and gets them back; ``failing`` loses nodes without a notice.
Times between losses are exponential.

Machines: ``drift`` lets the efficiency wander by a few percent and drop to 85 % for a while (heat, a noisy neighbour).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nereus.replay.trace import Row, Trace

#: Share of the trace that is over -> mean length, of a job whose responses have 1,147 tokens at its start.
_START, _END = 1147.0, 3722.0
LENGTHS: Mapping[str, Callable[[float], float]] = {
    "growth": lambda x: _START + (_END - _START) * _logistic(x),
    "reasoning": lambda x: _START * 6 ** (x**0.8),
    "shrink": lambda x: _END + (_START - _END) * _logistic(x),
    "stage": lambda x: _START * (2.0 if x > 0.4 else 1.0) * (1 + 0.2 * x),
    "saw": lambda x: _START * (1 + 2.0 * ((3 * x) % 1.0)),
    "steady": lambda x: 1.5 * _START,
}
POOLS = ("fixed", "elastic", "spot", "failing")
_SCATTER = 0.04
#: Longest response of a batch over its mean.
_MOST = (2.5, 4.5)
_NOTICES_S = (120.0, 120.0, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """``losses``: of nodes that are expected over the trace, for spot and failing pools."""

    lengths: str
    pool: str = "fixed"
    drift: bool = False
    steps: int = 100
    losses: float = 3.0
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.lengths}-{self.pool}{'-drift' if self.drift else ''}-{self.steps}-{self.seed}"


def generate(recipe: Recipe, gpus: Sequence[int]) -> Trace:
    """``gpus``: of each node, in the order in which nodes come and go. ValueError for a recipe that is none."""
    if recipe.lengths not in LENGTHS or recipe.pool not in POOLS or recipe.steps < 1:
        raise ValueError(f"no such trace: {recipe}; lengths are {', '.join(LENGTHS)}, pools {', '.join(POOLS)}")
    kinds = " ".join(str(number) for number in dict.fromkeys(gpus))
    dice = random.Random(f"{recipe.name} {len(gpus)} {kinds}")
    pools = _pools(recipe, len(gpus), dice)
    level, dip = 1.0, (0, 0)
    if recipe.drift:
        start = dice.randrange(recipe.steps)
        dip = start, start + recipe.steps // 5
    rows = []
    tail = dice.uniform(*_MOST)
    for step, (nodes, notice_s) in enumerate(pools):
        mean = LENGTHS[recipe.lengths](step / max(1, recipe.steps - 1)) * math.exp(_SCATTER * dice.gauss(0, 1))
        if recipe.drift:
            level = min(1.05, max(0.92, level * math.exp(0.01 * dice.gauss(0, 1))))
        rows.append(
            Row(
                response_mean=round(mean, 1),
                response_max=round(tail * mean, 1),
                gpus=sum(gpus[:nodes]),
                notice_s=notice_s,
                efficiency=round(level * (0.85 if dip[0] <= step < dip[1] else 1.0), 4),
            )
        )
    return Trace(name=recipe.name, rows=tuple(rows))


def _logistic(x: float) -> float:
    def raw(y: float) -> float:
        return 1 / (1 + math.exp(-6 * (y - 0.5)))

    return (raw(x) - raw(0.0)) / (raw(1.0) - raw(0.0))


def _pools(recipe: Recipe, num_nodes: int, dice: random.Random) -> list[tuple[int, float | None]]:
    """Nodes of each step, and the notice where some leave."""
    if recipe.pool == "fixed":
        return [(num_nodes, None)] * recipe.steps
    if recipe.pool == "elastic":
        doublings = int(math.log2(num_nodes))
        return [
            (max(1, num_nodes >> (doublings - step * (doublings + 1) // recipe.steps)), None)
            for step in range(recipe.steps)
        ]
    found: list[tuple[int, float | None]] = [(num_nodes, None)]
    returns: list[int] = []  # steps at which a node is there again
    rate = recipe.losses / recipe.steps
    for step in range(1, recipe.steps):
        nodes = found[-1][0] + sum(1 for due in returns if due <= step)
        returns = [due for due in returns if due > step]
        if nodes > max(1, num_nodes // 2) and dice.random() < 1 - math.exp(-rate):
            back = step + 1 + int(dice.expovariate(1 / (0.15 * recipe.steps)))
            gone = 2 if recipe.pool == "spot" and nodes >= num_nodes // 2 + 2 and dice.random() < 0.3 else 1
            returns += [back] * gone
            found.append((nodes - gone, dice.choice(_NOTICES_S) if recipe.pool == "spot" else None))
        else:
            found.append((nodes, None))
    return found
