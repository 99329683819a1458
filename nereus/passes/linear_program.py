"""A linear programme built in blocks of columns and rows, reduced, and solved by OR-Tools' GLOP.

Most of what a transition moves has one way to go. ``solve`` takes such columns out before the solver sees them (an
equation in one column fixes it; a row without free columns says nothing; of rows that bound one column alone the
tightest stays), since filling and reading a model costs more than solving it. Columns and rows may bear labels; a
merged programme has one column, and the sum of the rows, for each label.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nereus.ir.layout import BoolArray, IntArray

FloatArray = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]
Triplets = tuple[IntArray, IntArray, FloatArray]
TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    value: float
    columns: FloatArray
    duals: FloatArray  # of the rows; 0 for those that were taken out


@dataclass(slots=True)
class LinearProgram:
    """min the sum of some columns  s.t.  lower <= A x <= upper, x >= 0."""

    num_columns: int = 0
    num_rows: int = 0
    _objective: list[int] = field(default_factory=list)
    _lower: list[FloatArray] = field(default_factory=list)
    _upper: list[FloatArray] = field(default_factory=list)
    _rows: list[IntArray] = field(default_factory=list)
    _columns: list[IntArray] = field(default_factory=list)
    _values: list[FloatArray] = field(default_factory=list)
    _row_labels: list[Hashes] = field(default_factory=list)
    _column_labels: list[Hashes] = field(default_factory=list)

    def add_columns(self, labels: Hashes) -> IntArray:
        first, num = self.num_columns, len(labels)
        self.num_columns += num
        self._column_labels.append(labels)
        return np.arange(first, first + num, dtype=np.int64)

    def add_rows(self, lower: FloatArray, upper: FloatArray, labels: Hashes) -> IntArray:
        first = self.num_rows
        self.num_rows += len(lower)
        self._lower.append(lower)
        self._upper.append(upper)
        self._row_labels.append(labels)
        return np.arange(first, first + len(lower), dtype=np.int64)

    def add_terms(self, rows: IntArray, columns: IntArray, values: FloatArray | float) -> None:
        """Coefficients of one (row, column) add up."""
        self._rows.append(rows)
        self._columns.append(columns)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), rows.shape))

    def minimise(self, column: int) -> None:
        self._objective.append(column)

    def solve(self, *, merge: bool = False) -> Solution:
        """``merge``: one value for all columns of a label, and only the sum of the rows of a label must hold; duals are
        those of the sums. Raises RuntimeError where there is no solution or GLOP gives up."""
        rows, columns, values = self._matrix()
        lower, upper = np.concatenate(self._lower), np.concatenate(self._upper)
        fixed = np.full(self.num_columns, np.nan)
        while True:
            free = np.isnan(fixed)[columns]
            done = np.bincount(rows[~free], weights=(values * fixed[columns])[~free], minlength=self.num_rows)
            lower, upper = lower - done, upper - done
            rows, columns, values = rows[free], columns[free], values[free]
            count = np.bincount(rows, minlength=self.num_rows)
            single = ((count == 1) & (lower == upper))[rows]
            if not single.any():
                break
            fixed[columns[single]] = lower[rows[single]] / values[single]
        empty = count == 0
        if bool((lower[empty] > TOLERANCE).any()) or bool((upper[empty] < -TOLERANCE).any()):
            raise RuntimeError("the flow programme has no solution")
        kept_rows = np.flatnonzero(~empty & ~_slack(rows, columns, values, lower, upper, count))
        kept_columns = np.flatnonzero(np.isnan(fixed))
        row_group, column_group = np.arange(len(kept_rows)), np.arange(len(kept_columns))
        if merge:
            row_group = np.unique(np.concatenate(self._row_labels)[kept_rows], return_inverse=True)[1]
            column_group = np.unique(np.concatenate(self._column_labels)[kept_columns], return_inverse=True)[1]
        renumbered = np.full(self.num_rows, -1)
        renumbered[kept_rows] = row_group
        kept = renumbered[rows] >= 0
        numbers = renumbered[rows[kept]], column_group[np.searchsorted(kept_columns, columns[kept])]
        wanted = np.isin(kept_columns, self._objective)
        value, found, dual = _glop(
            _sum(*numbers, values[kept], num_columns=len(kept_columns)),
            (_totals(row_group, lower[kept_rows]), _totals(row_group, upper[kept_rows])),
            _totals(column_group, wanted) > 0,
        )
        fixed[kept_columns] = found[column_group]
        duals = np.zeros(self.num_rows)
        duals[kept_rows] = dual[row_group]
        return Solution(value=value, columns=fixed, duals=duals)

    def _matrix(self) -> tuple[IntArray, IntArray, FloatArray]:
        rows, columns, values = (
            np.concatenate(self._rows),
            np.concatenate(self._columns),
            np.concatenate(self._values),
        )
        return _sum(rows, columns, values, num_columns=self.num_columns)


def _sum(rows: IntArray, columns: IntArray, values: FloatArray, *, num_columns: int) -> Triplets:
    """Triplets by row, coefficients of one place added."""
    key, inverse = np.unique(rows * num_columns + columns, return_inverse=True)
    return key // num_columns, key % num_columns, _totals(inverse, values)


def _totals(group: IntArray, values: npt.NDArray[Any]) -> FloatArray:
    return np.bincount(group, weights=values).astype(np.float64)


def _slack(
    rows: IntArray, columns: IntArray, values: FloatArray, lower: FloatArray, upper: FloatArray, count: IntArray
) -> BoolArray:
    """Rows that bound one column from below, less tightly than another such row or than zero."""
    slack = np.zeros(len(count), dtype=bool)
    alone = (count == 1)[rows] & np.where(values > 0, np.isinf(upper[rows]), np.isinf(lower[rows]))
    row, column = rows[alone], columns[alone]
    least = np.where(values[alone] > 0, lower[row], upper[row]) / values[alone]
    slack[row] = True
    order = np.lexsort((-least, column))
    first = np.ones(len(order), dtype=bool)
    first[1:] = column[order][1:] != column[order][:-1]
    tightest = order[first]
    slack[row[tightest[least[tightest] > 0]]] = False
    return slack


def _glop(
    matrix: Triplets, bounds: tuple[FloatArray, FloatArray], objective: BoolArray
) -> tuple[float, FloatArray, FloatArray]:
    """(value, columns, duals)."""
    from ortools.linear_solver import linear_solver_pb2, pywraplp

    model = linear_solver_pb2.MPModelProto()
    for weight in objective.tolist():
        model.variable.add(lower_bound=0.0, objective_coefficient=float(weight))
    cuts = np.searchsorted(matrix[0], np.arange(len(bounds[0]) + 1)).tolist()
    columns, values = matrix[1].tolist(), matrix[2].tolist()
    for row, (least, most) in enumerate(zip(bounds[0].tolist(), bounds[1].tolist(), strict=True)):
        part = slice(cuts[row], cuts[row + 1])
        model.constraint.add(lower_bound=least, upper_bound=most, var_index=columns[part], coefficient=values[part])
    solver = pywraplp.Solver("flow", pywraplp.Solver.GLOP_LINEAR_PROGRAMMING)
    solver.LoadModelFromProto(model)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise RuntimeError("GLOP found no optimum of the flow programme")
    return (
        float(solver.Objective().Value()),
        np.array([v.solution_value() for v in solver.variables()]),
        np.array([c.dual_value() for c in solver.constraints()]),
    )
