"""Models by index, solved by every solver that is there; stopping and errors."""

import math
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.interrupts import interrupted

from remat.backends import highs_process, mathopt
from remat.backends.highs_process import last_solution
from remat.backends.mathopt import (
    Incumbent,
    MipSolver,
    Model,
    Outcome,
    Settings,
    Solution,
    solve,
)
from remat.core.errors import MissingDependencyError, SolverFault

INSTALLED = (MipSolver.HIGHS, MipSolver.SCIP, MipSolver.CP_SAT)


def knapsack(items: int, rows: int, seed: int = 1) -> Model:
    """Return a knapsack with several rows; hard from 100 items on."""
    draw = random.Random(seed)
    model = Model()
    for _ in range(items):
        model.add_binary(-draw.randint(10, 60))
    for _ in range(rows):
        terms = [(i, draw.randint(1, 50)) for i in range(items)]
        model.add_row(terms, upper=items * 10)
    return model


def by_enumeration(model: Model) -> float:
    """Return the least objective over all 0/1 values."""
    values = product((0.0, 1.0), repeat=model.variable_count)
    return min(
        sum(c * v for c, v in zip(model.cost, chosen, strict=True))
        for chosen in values
        if model.violation(chosen) <= 0
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("solver", INSTALLED)
def test_optimum_is_that_of_enumeration(solver: MipSolver, seed: int):
    model = knapsack(10, 4, seed)
    found = solve(model, solver, Settings(absolute_gap=0.5))
    assert found.outcome is Outcome.OPTIMAL
    assert found.objective == pytest.approx(by_enumeration(model))
    assert found.bound == pytest.approx(by_enumeration(model), abs=0.6)
    chosen = [found.integer(i) for i in range(10)]
    assert model.violation(chosen) == 0


def test_highs_apart_agrees(monkeypatch: pytest.MonkeyPatch):
    model = knapsack(10, 4)
    monkeypatch.setattr(mathopt, "IN_PROCESS_ROWS", 0)
    told: list[Incumbent] = []
    found = solve(model, settings=Settings(absolute_gap=0.5), on_incumbent=told.append)
    assert found.outcome is Outcome.OPTIMAL
    assert found.objective == pytest.approx(by_enumeration(model))
    assert told[-1].objective == pytest.approx(by_enumeration(model))


@pytest.mark.parametrize("solver", INSTALLED)
def test_infeasible_is_proved(solver: MipSolver):
    model = Model()
    variables = [model.add_binary(1) for _ in range(3)]
    model.add_row([(v, 1) for v in variables], lower=4)
    found = solve(model, solver)
    assert found.outcome is Outcome.INFEASIBLE
    assert found.objective is None
    assert not found.values


def test_relaxation_is_a_lower_bound():
    model = knapsack(10, 4)
    relaxed = solve(model, is_relaxed=True)
    assert relaxed.outcome is Outcome.OPTIMAL
    assert relaxed.objective is not None
    assert relaxed.objective < by_enumeration(model) - 0.1


def test_start_is_used(monkeypatch: pytest.MonkeyPatch):
    model = knapsack(150, 60)
    best = solve(model, MipSolver.SCIP, Settings(time_limit_s=1))
    assert best.objective is not None
    model.start = {i: float(best.integer(i)) for i in range(150)}
    monkeypatch.setattr(mathopt, "IN_PROCESS_ROWS", 0)
    # HiGHS keeps its own limit; its process may take longer than that to start.
    monkeypatch.setattr(highs_process, "_GRACE_S", 1e9)
    told: list[Incumbent] = []
    found = solve(model, settings=Settings(time_limit_s=1), on_incumbent=told.append)
    assert told[0].objective == pytest.approx(best.objective)
    assert found.objective is not None
    assert found.objective <= best.objective + 1e-6
    assert found.is_over_time


@pytest.mark.parametrize("solver", INSTALLED)
def test_solvers_are_silent(solver: MipSolver, capfd: pytest.CaptureFixture[str]):
    told: list[Incumbent] = []
    found = solve(knapsack(10, 4), solver, on_incumbent=told.append)
    assert found.outcome is Outcome.OPTIMAL
    # They did talk, to who listens.
    assert told
    assert capfd.readouterr() == ("", "")


def test_products_are_minimised_by_scip():
    # Of two of three, the pair with the least product.
    model = Model()
    for _ in range(3):
        model.add_binary()
    model.add_row([(i, 1) for i in range(3)], lower=2)
    for pair, cost in (((0, 1), 5), ((1, 2), 2), ((2, 0), 3)):
        model.add_quadratic_cost(*pair, cost)
    found = solve(model, MipSolver.SCIP)
    assert found.objective == pytest.approx(2)
    assert [found.integer(i) for i in range(3)] == [0, 1, 1]


@pytest.mark.parametrize("solver", [MipSolver.HIGHS, MipSolver.CP_SAT])
def test_products_are_declined_where_they_cannot_be_solved(solver: MipSolver):
    model = Model()
    model.add_quadratic_cost(model.add_binary(), model.add_binary(), 1)
    with pytest.raises(ValueError, match="scip and gurobi do"):
        solve(model, solver)


def solve_hard(begun: Callable[[], None], solver: MipSolver) -> Solution:
    """Solve what takes hours, HiGHS apart: in this process it stops for nobody."""

    def tell(incumbent: Incumbent) -> None:
        if incumbent.gap is not None and math.isfinite(incumbent.gap):
            begun()

    with patch.object(mathopt, "IN_PROCESS_ROWS", 0):
        return solve(knapsack(150, 60), solver, on_incumbent=tell)


@pytest.mark.parametrize("solver", INSTALLED)
def test_ctrl_c_returns_the_incumbent(solver: MipSolver):
    found = interrupted(solve_hard, solver)
    assert found.is_interrupted
    assert found.outcome is Outcome.FEASIBLE
    model = knapsack(150, 60)
    assert model.violation([found.integer(i) for i in range(150)]) == 0
    assert found.objective is not None
    assert -math.inf < found.bound <= found.objective


def test_no_time_means_no_answer():
    found = solve(knapsack(10, 4), settings=Settings(time_limit_s=0))
    assert found.outcome is Outcome.UNKNOWN
    assert found.is_over_time
    assert found.bound == -math.inf


def test_missing_gurobi_is_named():
    try:
        found = solve(knapsack(10, 4), MipSolver.GUROBI)
    except MissingDependencyError as error:
        assert "Gurobi cannot be used here" in str(error)  # noqa: PT017 - either is fine
        assert "highs, scip, cp-sat" in str(error)  # noqa: PT017 - either is fine
    else:
        assert found.outcome is Outcome.OPTIMAL


def test_unbounded_model_is_an_error():
    model = Model()
    model.add_variable(-math.inf, math.inf, cost=1)
    assert not model.is_bounded_below
    with pytest.raises(ValueError, match="unbounded"):
        solve(model)


def test_fractional_integer_is_an_error():
    found = Solution(
        outcome=Outcome.FEASIBLE, objective=0.5, bound=0.0, values=(0.99999, 0.5)
    )
    assert found.integer(0) == 1
    with pytest.raises(SolverFault, match=r"variable 1 has the value 0\.5"):
        found.integer(1)


def test_terms_of_one_variable_are_summed():
    model = Model()
    x = model.add_variable(0, 10, cost=1)
    model.add_row([(x, 1), (x, 2)], lower=6)
    assert model.entries == ([0], [0], [3.0])
    assert solve(model).objective == pytest.approx(2)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda m: m.add_variable(2, 1), "bounds 2, 1"),
        (lambda m: m.add_variable(cost=math.nan), "cost nan"),
        (lambda m: m.add_row([(5, 1)]), "variable 5 of 1"),
        (lambda m: m.add_row([(0, math.inf)]), "term inf"),
        (lambda m: m.add_row([(0, 1)], lower=2, upper=1), "row 0 has bounds 2, 1"),
        (lambda m: m.add_quadratic_cost(0, 3, 1), "variables 0 and 3 of 1"),
        (lambda m: m.add_quadratic_cost(0, 0, math.nan), "costs nan"),
    ],
)
def test_wrong_numbers_are_named(action, message: str):
    model = Model()
    model.add_binary()
    with pytest.raises(ValueError, match=message):
        action(model)


def test_last_complete_solution_of_a_file_counts(tmp_path: Path):
    file = tmp_path / "improving.sol"
    assert last_solution(file) == []
    whole = "Objective 3\n# Columns 2\nc0 1\nc1 0.5\n"
    file.write_text(whole + "Objective 2\n# Columns 2\nc0 0\n", encoding="ascii")
    assert last_solution(file) == [1.0, 0.5]


class TestApart:
    """HiGHS in a process of its own, when that goes wrong."""

    @pytest.fixture(autouse=True)
    def _apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mathopt, "IN_PROCESS_ROWS", 0)

    def test_a_missed_time_limit_ends_it(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(highs_process, "_GRACE_S", -1e9)
        found = solve(knapsack(150, 60), settings=Settings(time_limit_s=1e4))
        assert found.outcome is Outcome.UNKNOWN
        assert found.is_over_time

    def test_an_end_without_an_answer_is_a_fault(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ):
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\nexit 3\n", encoding="ascii")
        broken.chmod(0o755)
        monkeypatch.setattr(highs_process.sys, "executable", str(broken))
        with pytest.raises(SolverFault, match="ended with status 3"):
            solve(knapsack(10, 4))

    def test_options_that_highs_refuses_are_a_fault(self):
        with pytest.raises(SolverFault, match="MathOpt refuses the model"):
            solve(knapsack(10, 4), settings=Settings(seed=-1, absolute_gap=-1.0))

    def test_a_start_of_some_variables_is_enough(self):
        model = knapsack(10, 4)
        model.start = {0: 1.0}
        assert solve(model).outcome is Outcome.OPTIMAL
