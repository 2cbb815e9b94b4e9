"""LocalSearch: what it starts from gets better, up to the optimum of small graphs."""

import pytest
from tests.bounds.drawn_graphs import Solved, solved_cases
from tests.instances import INSTANCES

from remat.core.errors import SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Result, Status
from remat.core.simulator import simulate
from remat.native import core
from remat.planning.one_device import plain_peak_bytes
from remat.planning.portfolio import solve
from remat.solvers import LocalSearch, MinCutRetention
from remat.solvers.greedy_eviction import GreedyEviction
from remat.solvers.local_search import lowered_order

pytestmark = pytest.mark.skipif(core() is None, reason="there is no native core")


def problem(graph: TrainingGraph, budget_bytes: int) -> Problem:
    platform = single_device(budget_bytes, graph.device_kinds[0])
    return Problem(graph=graph, platform=platform)


def hard_cases() -> list[Solved]:
    return [case for case in solved_cases(45) if case.must_recompute]


def test_small_graphs_are_solved_to_the_optimum_of_all_schedules() -> None:
    cases = hard_cases()
    found: list[Result] = []
    for case in cases:
        task = problem(case.graph, case.budget_bytes)
        search = LocalSearch(effort=3_000, enough_ns=case.optimum_ns)
        found.append(solve(task, search, limits=Limits.after(5.0)))
    # The judge has seen them all: none is below the optimum, nearly all are there.
    gaps = [
        result.cost_ns is None or result.cost_ns - case.optimum_ns
        for case, result in zip(cases, found, strict=True)
    ]
    assert min(gaps) == 0
    assert gaps.count(0) >= 0.95 * len(cases)
    assert len(cases) > 20


@pytest.mark.parametrize("name", ["transformer", "resnet"])
def test_a_start_gets_better_and_never_worse(name: str) -> None:
    graph = INSTANCES[name]().graph
    task = problem(graph, plain_peak_bytes(graph) * 6 // 10)
    start = solve(task, GreedyEviction())
    assert start.schedule is not None
    assert start.cost_ns is not None
    costs = [start.cost_ns]
    for effort in (0, 300_000):
        search = LocalSearch(starts=(start.schedule,), effort=effort)
        result = solve(task, search)
        assert result.cost_ns is not None
        assert solve(task, search).schedule == result.schedule
        costs.append(result.cost_ns)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]


def test_it_ends_at_a_time_that_is_enough() -> None:
    graph = INSTANCES["transformer"]().graph
    task = problem(graph, plain_peak_bytes(graph) * 6 // 10)
    start = solve(task, GreedyEviction())
    assert start.schedule is not None
    assert start.cost_ns is not None
    search = LocalSearch(starts=(start.schedule,), enough_ns=start.cost_ns)
    # Without an end it would go on until the limit, or five cycles have been in vain.
    result = solve(task, search, limits=Limits.after(600.0))
    assert result.cost_ns == start.cost_ns


def test_below_all_schedules_nothing_is_claimed() -> None:
    graph = INSTANCES["mlp"]().graph
    result = solve(problem(graph, 1), LocalSearch(effort=1_000))
    assert result.status is Status.UNKNOWN


def test_what_does_not_fit_is_made_to_fit() -> None:
    graph = INSTANCES["resnet"]().graph
    budget_bytes = plain_peak_bytes(graph) * 6 // 10
    plain = schedule_from_order(graph, store_all_order(graph))
    result = solve(problem(graph, budget_bytes), LocalSearch(starts=(plain,)))
    assert result.trace is not None
    assert result.trace.peak_bytes[0] <= budget_bytes


@pytest.mark.parametrize("case", solved_cases(12), ids=lambda case: case.graph.name)
def test_the_smallest_peak_of_small_graphs_is_found(case: Solved) -> None:
    order = store_all_order(case.graph)
    for seed in range(3):
        order = lowered_order(case.graph, order, 0, limits=Limits(seed=seed))
    trace = simulate(
        case.graph, single_device(), schedule_from_order(case.graph, order)
    )
    assert trace.violation is None
    assert trace.peak_bytes[0] >= case.smallest_bytes
    assert trace.peak_bytes[0] <= case.smallest_bytes * 1.1


def test_without_a_native_core_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = INSTANCES["mlp"]().graph
    monkeypatch.setattr("remat.solvers.local_search.core", lambda: None)
    with pytest.raises(SolverUnsuitableError, match="native core"):
        solve(problem(graph, plain_peak_bytes(graph) // 2), LocalSearch())


def test_it_is_as_good_as_a_thorough_search_in_no_more_time() -> None:
    graph = INSTANCES["transformer"]().graph
    task = problem(graph, plain_peak_bytes(graph) // 2)
    thorough, local = solve(task, MinCutRetention()), solve(task, LocalSearch())
    assert local.cost_ns is not None
    assert thorough.cost_ns is not None
    assert local.cost_ns <= thorough.cost_ns
