"""Which nodes no plan should count on, by what is wrong with their GPUs, with hysteresis.

A fault (a memory error that was not corrected) makes its node unfit at once. A GPU that is slowed, by heat for one, may
be faster again in a minute: its node is unfit when it was slowed at some boundaries in a row. Either is fit again after
more boundaries at which nothing was wrong, so that a node does not come and go.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """``text``: which GPU, and what is wrong with it. ``slows``: it takes longer, and does nothing else."""

    text: str
    slows: bool


class Health:
    """``sick``: boundaries in a row after which a slowed node is unfit; ``well``: those without a problem after which a
    node is fit again."""

    def __init__(self, *, sick: int, well: int) -> None:
        self._sick, self._well = sick, well
        self._slowed: dict[str, int] = {}  # boundaries in a row
        self._good: dict[str, int] = {}  # boundaries in a row, of those that are unfit
        #: Nodes that had problems at the last boundary.
        self.ill: frozenset[str] = frozenset()
        #: Unfit nodes, and why.
        self.faulty: dict[str, str] = {}
        self.slow: dict[str, str] = {}

    def observe(self, problems: Mapping[str, Collection[Problem]]) -> None:
        """At a boundary; nodes that are not in it have none."""
        found = {node: tuple(of_node) for node, of_node in problems.items() if of_node}
        self.ill = frozenset(found)
        self._slowed = {node: self._slowed.get(node, 0) + 1 for node in found}
        self._good = {node: self._good.get(node, 0) + 1 for node in (*self.faulty, *self.slow) if node not in found}
        for node in [node for node, good in self._good.items() if good >= self._well]:
            self.faulty.pop(node, None)
            self.slow.pop(node, None)
        for node, of_node in found.items():
            text = "; ".join(dict.fromkeys(problem.text for problem in of_node))
            if node in self.faulty or not all(problem.slows for problem in of_node):
                self.faulty[node] = text
                self.slow.pop(node, None)
            elif node in self.slow or self._slowed[node] >= self._sick:
                self.slow[node] = text

    @property
    def unfit(self) -> dict[str, str]:
        return {**self.slow, **self.faulty}
