"""Constraint programs over intervals through OR-tools' CP-SAT, as plain indices.

A :class:`CpModel` has Booleans and integers by index, optional intervals that share a
capacity, and a linear objective to minimise. :func:`solve` runs CP-SAT in a thread, so
that Ctrl-C ends the search and keeps the incumbent.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remat.backends.highs_process import Settings
from remat.backends.library import check_library
from remat.backends.mathopt import (
    NOTHING_IN_TIME,
    Incumbent,
    IncumbentCallback,
    Outcome,
    Solution,
    run_until_interrupted,
)
from remat.core.deadline import check_time
from remat.core.errors import SolverFault


class CpModel:
    """A constraint program, built step by step.

    Variables are indices; :meth:`negated` gives the index of a Boolean's negation.

    Raises
    ------
    MissingDependencyError
        If CP-SAT is not installed.
    """

    def __init__(self) -> None:
        check_library("ortools.sat.python.cp_model")
        from ortools.sat.python import cp_model  # noqa: PLC0415  # keeps imports light

        self._library = cp_model
        self._model = cp_model.CpModel()
        self._variables: list[Any] = []
        self._intervals: list[tuple[Any, int]] = []
        self._objective: list[tuple[int, int]] = []
        self._hints: dict[int, int] = {}

    def _keep(self, variable: Any) -> int:
        check_time()
        self._variables.append(variable)
        return len(self._variables) - 1

    def add_bool(self) -> int:
        """Add a Boolean and return its index."""
        return self._keep(self._model.new_bool_var(""))

    def add_constant(self, value: int) -> int:
        """Add a variable of one value and return its index."""
        return self._keep(self._model.new_constant(value))

    def add_integer(self, lower: int, upper: int) -> int:
        """Add an integer within bounds, both included, and return its index.

        Raises
        ------
        ValueError
            If the bounds are crossed.
        """
        if lower > upper:
            msg = f"variable {len(self._variables)} has bounds {lower}, {upper}"
            raise ValueError(msg)
        return self._keep(self._model.new_int_var(lower, upper, ""))

    def add_choice(self, values: Sequence[int]) -> int:
        """Add an integer that takes one of some values and return its index.

        Raises
        ------
        ValueError
            If there is no value.
        """
        if not values:
            msg = f"variable {len(self._variables)} has no value to take"
            raise ValueError(msg)
        domain = self._library.Domain.from_values(sorted(values))
        return self._keep(self._model.new_int_var_from_domain(domain, ""))

    def add_interval(
        self, start: int, end: int, demand: int, presence: int | None = None
    ) -> None:
        """Add an interval from ``start`` to before ``end``, at least 1 long.

        Parameters
        ----------
        start, end
            Variables.
        demand
            How much of the capacity it takes while it lasts, at least 0.
        presence
            A Boolean, or ``None`` for an interval that is always there.
        """
        first, last = self._variables[start], self._variables[end]
        size = self._model.new_int_var(1, 1 << 40, "")
        if presence is None:
            interval = self._model.new_interval_var(first, size, last, "")
        else:
            interval = self._model.new_optional_interval_var(
                first, size, last, self._variables[presence], ""
            )
        self._intervals.append((interval, demand))

    def add_capacity(self, capacity: int) -> None:
        """Require that present intervals never take more than this together."""
        intervals = [interval for interval, demand in self._intervals if demand]
        demands = [demand for _, demand in self._intervals if demand]
        if intervals:
            self._model.add_cumulative(intervals, demands, capacity)

    def add_precedence(
        self, earlier: int, later: int, distance: int, *, literals: Sequence[int] = ()
    ) -> None:
        """Require ``earlier + distance <= later`` if all these Booleans hold."""
        check_time()
        row = self._model.add(
            self._variables[earlier] + distance <= self._variables[later]
        )
        if literals:
            row.only_enforce_if([self._variables[index] for index in literals])

    def add_implication(self, first: int, second: int) -> None:
        """Require that the second Boolean holds if the first does."""
        self._model.add_implication(self._variables[first], self._variables[second])

    def add_exactly_one(self, choices: Iterable[int], condition: int | None) -> None:
        """Require one of these Booleans if a condition holds, and none otherwise."""
        chosen = [self._variables[index] for index in choices]
        if condition is None:
            self._model.add_exactly_one(chosen)
        else:
            self._model.add(sum(chosen) == self._variables[condition])

    def add_some(self, choices: Iterable[int], condition: int) -> None:
        """Require at least one of these Booleans if a condition holds."""
        self._model.add_bool_or(
            [
                *(self._variables[index] for index in choices),
                self._variables[condition].negated(),
            ]
        )

    def add_cost(self, variable: int, cost: int) -> None:
        """Add ``cost x variable`` to the objective."""
        self._objective.append((variable, cost))

    def hint(self, values: Mapping[int, int]) -> None:
        """Start from these values."""
        self._hints.update(values)

    def solve(
        self, settings: Settings, on_incumbent: IncumbentCallback | None = None
    ) -> Solution:
        """Minimise; Ctrl-C ends the search and keeps the incumbent.

        Parameters
        ----------
        settings
            When to stop. The search interleaves CP-SAT's strategies, so that it is
            the same for any number of threads.
        on_incumbent
            Told, from another thread, of incumbents and bounds.

        Returns
        -------
        Solution
            ``values`` holds one number per variable.

        Raises
        ------
        SolverFault
            If CP-SAT finds the model invalid.
        """
        library, started = self._library, time.monotonic()
        if settings.is_over:
            return NOTHING_IN_TIME
        terms = [cost * self._variables[index] for index, cost in self._objective]
        self._model.minimize(sum(terms) if terms else 0)
        self._model.clear_hints()
        for index, value in self._hints.items():
            self._model.add_hint(self._variables[index], value)
        solver = library.CpSolver()
        settings = settings.after(time.monotonic() - started)
        if settings.is_over:
            return NOTHING_IN_TIME
        solver.parameters.num_workers = settings.threads
        solver.parameters.interleave_search = True
        solver.parameters.random_seed = settings.seed
        solver.parameters.absolute_gap_limit = settings.absolute_gap
        solver.parameters.catch_sigint_signal = False
        if settings.time_limit_s is not None:
            solver.parameters.max_time_in_seconds = settings.time_limit_s
        status, is_interrupted = self._run(solver, started, on_incumbent)
        outcomes = {
            library.OPTIMAL: Outcome.OPTIMAL,
            library.FEASIBLE: Outcome.FEASIBLE,
            library.INFEASIBLE: Outcome.INFEASIBLE,
            library.UNKNOWN: Outcome.UNKNOWN,
        }
        if status not in outcomes:
            msg = f"CP-SAT finds the model invalid: {self._model.validate()}"
            raise SolverFault(msg)
        outcome = outcomes[status]
        has_values = outcome in {Outcome.OPTIMAL, Outcome.FEASIBLE}
        values = [
            float(solver.value(variable)) if has_values else 0.0
            for variable in self._variables
        ]
        return Solution(
            outcome=outcome,
            objective=solver.objective_value if has_values else None,
            bound=-math.inf
            if outcome is Outcome.INFEASIBLE
            else solver.best_objective_bound,
            values=values if has_values else (),
            is_over_time=outcome in {Outcome.FEASIBLE, Outcome.UNKNOWN}
            and not is_interrupted,
            is_interrupted=is_interrupted,
            elapsed_s=time.monotonic() - started,
        )

    def _run(
        self,
        solver: Any,
        started: float,
        on_incumbent: IncumbentCallback | None,
    ) -> tuple[Any, bool]:
        """Solve in a thread; return the status, and whether Ctrl-C ended it."""
        state: list[float | None] = [None, None]

        def tell() -> None:
            if on_incumbent is not None:
                elapsed_s = time.monotonic() - started
                on_incumbent(
                    Incumbent(elapsed_s=elapsed_s, objective=state[0], bound=state[1])
                )

        def take_bound(bound: float) -> None:
            state[1] = bound
            tell()

        class _Listener(self._library.CpSolverSolutionCallback):
            def on_solution_callback(self) -> None:
                state[:] = [self.objective_value, self.best_objective_bound]
                tell()

        solver.best_bound_callback = take_bound
        return run_until_interrupted(
            lambda: solver.solve(self._model, _Listener()),
            solver.stop_search,
            name="remat cp-sat",
        )
