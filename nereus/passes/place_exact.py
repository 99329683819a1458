"""The exact placement of a small stage by CP-SAT: the most bytes that any allowed placement keeps in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ortools.sat.python import cp_model

from nereus.ir.layout import IntArray

#: Deterministic effort limit (CP-SAT's own unit, about a second).
EFFORT = 4.0


def most_saved(
    saved: IntArray, ranks_of_group: IntArray, rows_of_node: Sequence[IntArray], hint: IntArray
) -> tuple[int, IntArray] | None:
    """(bytes saved, row of each rank), or None where the proof does not come within the effort limit."""
    num_ranks = saved.shape[1]
    divisor = max(1, int(np.gcd.reduce(saved, axis=None)))
    model = cp_model.CpModel()
    inside = [[model.new_bool_var(f"g{g}n{n}") for n in range(len(rows_of_node))] for g in range(len(ranks_of_group))]
    at = {(row, rank): model.new_bool_var(f"d{row}r{rank}") for row in range(num_ranks) for rank in range(num_ranks)}
    for group, ranks in enumerate(ranks_of_group.tolist()):
        model.add_exactly_one(inside[group])
        for rank in ranks:
            model.add_exactly_one(at[row, rank] for row in range(num_ranks))
            for node, rows in enumerate(rows_of_node):
                model.add(sum(at[row, rank] for row in rows.tolist()) == inside[group][node])
    for row in range(num_ranks):
        model.add_exactly_one(at[row, rank] for rank in range(num_ranks))
    for rank, row in enumerate(hint.tolist()):
        model.add_hint(at[row, rank], True)
    model.maximize(sum(int(saved[row, rank]) // divisor * var for (row, rank), var in at.items() if saved[row, rank]))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = EFFORT
    if solver.solve(model) != cp_model.OPTIMAL:
        return None
    rows = np.zeros(num_ranks, dtype=np.int64)
    for (row, rank), var in at.items():
        if solver.boolean_value(var):
            rows[rank] = row
    return int(saved[rows, np.arange(num_ranks)].sum()), rows
