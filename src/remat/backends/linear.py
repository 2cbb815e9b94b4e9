"""Linear programs by OR-tools' simplex GLOP, for the multipliers of their rows alone.

Whoever asks checks in exact arithmetic what the multipliers prove, so nothing here is
rounded and no tolerance matters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from remat.backends.library import check_library


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProgram:
    """Minimise ``cost x`` with ``A x >= right`` and ``lower <= x <= 1``.

    Parameters
    ----------
    cost, lower
        Per variable.
    rows, columns, coefficients
        The entries of A, row after row, in each row by ascending column.
    right
        Per row.
    """

    cost: Sequence[float]
    lower: Sequence[float]
    rows: Sequence[int]
    columns: Sequence[int]
    coefficients: Sequence[float]
    right: Sequence[float]


def row_multipliers(
    program: LinearProgram, *, effort: float, time_limit_s: float | None = None
) -> list[float] | None:
    """Return the dual value of each row, or ``None`` if the solver comes to none.

    Parameters
    ----------
    program
        What to solve, best with numbers near 1.
    effort
        When to stop, in the library's measure of work: about seconds, but the same in
        every run and on every machine.
    time_limit_s
        When to stop by the clock, or ``None``.

    Raises
    ------
    MissingDependencyError
        If OR-tools is not installed.
    """
    check_library("ortools.math_opt.python.mathopt")
    from ortools.math_opt import model_pb2  # noqa: PLC0415  # keeps imports light
    from ortools.math_opt.python import mathopt  # noqa: PLC0415

    proto = model_pb2.ModelProto()
    count, row_count = len(program.cost), len(program.right)
    proto.variables.ids.extend(range(count))
    proto.variables.lower_bounds.extend(program.lower)
    proto.variables.upper_bounds.extend([1.0] * count)
    proto.variables.integers.extend([False] * count)
    priced = [v for v in range(count) if program.cost[v]]
    proto.objective.linear_coefficients.ids.extend(priced)
    proto.objective.linear_coefficients.values.extend(program.cost[v] for v in priced)
    proto.linear_constraints.ids.extend(range(row_count))
    proto.linear_constraints.lower_bounds.extend(program.right)
    proto.linear_constraints.upper_bounds.extend([math.inf] * row_count)
    proto.linear_constraint_matrix.row_ids.extend(program.rows)
    proto.linear_constraint_matrix.column_ids.extend(program.columns)
    proto.linear_constraint_matrix.coefficients.extend(program.coefficients)
    parameters = mathopt.SolveParameters(
        time_limit=None if time_limit_s is None else timedelta(seconds=time_limit_s),
        threads=1,
    )
    parameters.glop.use_dual_simplex = True
    parameters.glop.max_deterministic_time = effort
    nothing = mathopt.VariableFilter(filtered_items=())
    result = mathopt.solve(
        mathopt.Model.from_model_proto(proto),
        mathopt.SolverType.GLOP,
        params=parameters,
        # What is not asked for takes as long to read as the program to be solved.
        model_params=mathopt.ModelSolveParameters(
            variable_values_filter=nothing, reduced_costs_filter=nothing
        ),
    )
    found = next((s.dual_solution for s in result.solutions if s.dual_solution), None)
    if found is None:
        return None
    values = [0.0] * row_count
    for row, value in found.dual_values.items():
        values[row.id] = value
    return values
