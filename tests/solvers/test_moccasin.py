"""Moccasin against brute force, Checkmate and the published optima."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.solvers.milp_cases import graph_of, published, unit_linear
from tests.strategies import graphs

from remat.core.errors import SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Result, Status
from remat.planning.portfolio import solve
from remat.solvers import moccasin
from remat.solvers.checkmate import Checkmate
from remat.solvers.moccasin import Moccasin
from remat.testing import budgets_between
from remat.testing.frontier_oracle import FrontierOracle
from remat.testing.small_graphs import all_graphs

NO_ORACLES = pytest.mark.skipif(
    not published(), reason="the published oracles (papers/milp_oracle.json) are absent"
)

ALONE = Checkmate(backward_ops_per_stage=0, starts_from_known=False, improves=False)
"""Without heuristics and improvement, which may leave the class."""


def ask(
    graph: TrainingGraph, budget_bytes: int, computations: int, **options: Any
) -> Result:
    options = {"starts_from_known": False, "improves": False} | options
    return solve(
        Problem(graph=graph, platform=single_device(budget_bytes)),
        Moccasin(computations=computations, **options),
        limits=Limits.after(60),
    )


@NO_ORACLES
@pytest.mark.parametrize("computations", [2, 3])
@pytest.mark.parametrize(
    "oracle",
    [
        case
        for case in published()
        if f"mocc{3}" in case.get("restricted_models", {}) and case["n"] <= 33
    ],
    ids=lambda case: f"{case['name']}-{case['budget']}",
)
def test_published_optimum_of_so_many_computations(
    oracle: dict[str, Any], computations: int
):
    expected = oracle["restricted_models"][f"mocc{computations}"]
    result = ask(graph_of(oracle), oracle["budget"], computations)
    if expected == "INFEASIBLE":
        assert result.status is Status.INFEASIBLE
    else:
        assert result.status is Status.OPTIMAL
        assert result.cost_ns == result.bound_ns == expected


@pytest.mark.parametrize("op_count", [1, 2, 3, 4])
def test_enough_computations_reach_the_optimum_of_every_graph(op_count: int):
    # An op of four can run at most once a stage, so five computations are enough.
    for graph in all_graphs(op_count):
        oracle = FrontierOracle(graph)
        for budget in budgets_between(graph, 2):
            result = ask(graph, budget, 5)
            optimum = oracle.best(budget)
            expected = Status.INFEASIBLE if optimum is None else Status.OPTIMAL
            assert result.status is expected
            assert result.cost_ns == optimum


@settings(max_examples=40)
@given(graph=graphs(max_ops=5), share=st.integers(0, 3))
def test_agrees_with_checkmate(graph: TrainingGraph, share: int):
    # Sizes up to 2^40 and costs up to 10^12: both are exact here.
    low, high = budgets_between(graph, 2)[0], budgets_between(graph, 2)[-1]
    budget = low + (high - low) * share // 4
    optimum = FrontierOracle(graph).best(budget)
    result = ask(graph, budget, 9)
    assert result.cost_ns == optimum
    problem = Problem(graph=graph, platform=single_device(budget))
    other = solve(problem, ALONE)
    if optimum is not None and other.status is Status.OPTIMAL:
        assert other.cost_ns == pytest.approx(optimum, rel=2e-6)


def test_fewer_computations_cost_no_less():
    graph = unit_linear(6)
    for budget in budgets_between(graph, 5):
        costs = [ask(graph, budget, c).cost_ns for c in (1, 2, 3)]
        found = [cost for cost in costs if cost is not None]
        assert costs == [*[None] * (3 - len(found)), *sorted(found, reverse=True)]


def test_one_computation_is_storing_everything():
    graph = unit_linear(4)
    low, high = budgets_between(graph, 2)
    assert ask(graph, high, 1).status is Status.OPTIMAL
    assert ask(graph, low, 1).status is Status.INFEASIBLE


def test_answer_is_that_of_the_heuristics_if_two_computations_are_too_few():
    (oracle,) = [
        unit
        for unit in (unit_linear(8),)
        if ask(unit, 4, 2).status is Status.INFEASIBLE
    ]
    result = ask(oracle, 4, 2, starts_from_known=True)
    assert result.status is Status.FEASIBLE
    assert result.bound_ns <= (result.cost_ns or 0)


def test_no_computation_is_an_error():
    with pytest.raises(ValueError, match="computations of Moccasin is 0; it must"):
        Moccasin(computations=0)


def test_too_many_booleans_are_declined(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moccasin, "LARGEST_LITERALS", 10)
    graph = unit_linear(3)
    with pytest.raises(SolverUnsuitableError, match="at most 10 are tried"):
        ask(graph, budgets_between(graph, 3)[1], 2)


def test_progress_tells_incumbent_bound_and_gap():
    told: list[str] = []
    solve(
        Problem(graph=unit_linear(8), platform=single_device(5)),
        Moccasin(starts_from_known=False),
        on_progress=lambda activity, _: told.append(activity),
    )
    assert any("best so far" in line and "gap" in line for line in told)
