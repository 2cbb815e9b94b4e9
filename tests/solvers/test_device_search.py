"""The search for several devices: repeatable, interruptible, complete where easy."""

from dataclasses import replace

import pytest
from tests.instances import resnet_like, transformer_like
from tests.solvers.test_xengine import chain, linked

from remat.backends.mathopt import MipSolver
from remat.core.bounds import peak_bound_bytes, required_ops
from remat.core.errors import MissingDependencyError, SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.problem import Limits, Objective, Problem, Status, StopReason
from remat.planning.portfolio import solve
from remat.search.device_execution import Executor
from remat.solvers import XEngine
from remat.solvers.base import ignore_progress
from remat.solvers.device_search import DeviceSearch
from remat.testing import store_all_peak_bytes

FACTORS = {"gpu": 1, "cpu": 3}


def with_kinds(graph: TrainingGraph, kinds: tuple[str, ...]) -> TrainingGraph:
    """The graph on a fast device and a slow one, or one that only stores."""
    ops = tuple(
        replace(
            op,
            cost_ns=tuple(
                (op.cost_ns[0] or 0) * FACTORS[k] if k in FACTORS else None
                for k in kinds
            ),
            workspace_bytes=op.workspace_bytes * len(kinds),
        )
        for op in graph.ops
    )
    return replace(graph, ops=ops, device_kinds=kinds)


@pytest.mark.parametrize("second", ["cpu", "host"])
@pytest.mark.parametrize("percent", [100, 50, 10])
def test_networks_fit_with_a_second_device(second: str, percent: int):
    for graph in (resnet_like(4).graph, transformer_like(2).graph):
        kinds = ("gpu", second)
        low, high = peak_bound_bytes(graph), store_all_peak_bytes(graph)
        budget = low + (high - low) * percent // 100
        limit = None if second == "host" else budget
        problem = Problem(
            graph=with_kinds(graph, kinds),
            platform=linked(kinds, (budget, limit), 10**10),
        )
        result = solve(problem, DeviceSearch(candidates=40))
        assert result.trace is not None
        assert result.trace.peak_bytes[0] <= budget
        assert result.bound_ns <= result.trace.serial_ns


def overlapped_ns(problem: Problem, objective: Objective, candidates: int) -> int:
    solver = DeviceSearch(objective=objective, candidates=candidates)
    trace = solve(problem, solver).trace
    assert trace is not None
    return trace.overlapped_ns


@pytest.mark.parametrize("candidates", [60, 200])
def test_overlapped_answer_is_no_slower_than_the_serial_one(candidates: int):
    graph = with_kinds(resnet_like(3).graph, ("gpu", "cpu"))
    low, high = peak_bound_bytes(graph), store_all_peak_bytes(graph)
    for percent in range(5, 60, 10):
        budget = low + (high - low) * percent // 100
        platform = linked(("gpu", "cpu"), (budget, budget), 10**10)
        problem = Problem(graph=graph, platform=platform)
        serial_ns = overlapped_ns(problem, Objective.SERIAL, candidates)
        assert overlapped_ns(problem, Objective.OVERLAPPED, candidates) <= serial_ns


def test_same_question_same_answer():
    graph = chain([(2, 3)] * 5, [10, 40, 10, 10, 10], ("a", "b"))
    problem = Problem(graph=graph, platform=linked(("a", "b"), (60, 60)))
    answers = {
        solve(problem, DeviceSearch(candidates=80), limits=Limits(seed=3)).schedule
        for _ in range(2)
    }
    assert len(answers) == 1


def test_interruption_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    execute = Executor.execute

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return execute(*args, **options)

    monkeypatch.setattr(Executor, "execute", interrupted)
    graph = chain([(9, 1)] * 5, [10, 40, 10, 10, 10], ("a", "b"))
    problem = Problem(graph=graph, platform=linked(("a", "b"), (60, 60)))
    result = DeviceSearch().solve(problem, Limits(), ignore_progress)
    assert len(calls) == 5
    assert result.stop_reason is StopReason.INTERRUPTED
    assert result.status is Status.FEASIBLE
    calls.clear()
    exact = XEngine().solve(problem, Limits(), ignore_progress)
    assert exact.stop_reason is StopReason.INTERRUPTED
    assert exact.schedule is not None


def test_progress_tells_incumbent_bound_and_gap():
    told: list[str] = []
    graph = chain([(9, 1)] * 5, [10, 40, 10, 10, 10], ("a", "b"))
    problem = Problem(graph=graph, platform=linked(("a", "b"), (60, 60)))
    DeviceSearch(candidates=30).solve(
        problem, Limits(), lambda activity, _share: told.append(activity)
    )
    assert any("best so far" in t and "none below" in t and "gap" in t for t in told)


def test_missing_solver_library_is_named():
    graph = chain([(9, 1)] * 3, [10, 40, 10], ("a", "b"))
    problem = Problem(graph=graph, platform=linked(("a", "b"), (60, 60)))
    with pytest.raises(MissingDependencyError, match="Gurobi"):
        solve(problem, XEngine(solver=MipSolver.GUROBI))


@pytest.mark.parametrize("solver", [DeviceSearch(), XEngine()])
def test_a_step_in_which_no_op_is_needed(solver: DeviceSearch | XEngine):
    graph = chain([(1, 1), (1, 1)], [2, 2], ("a", "b"))
    ops = tuple(replace(op, is_ordered=False) for op in graph.ops)
    nothing = replace(graph, ops=ops, forward_outputs=(), final_outputs=())
    assert not required_ops(nothing)
    problem = Problem(graph=nothing, platform=linked(("a", "b"), (10, 10)))
    with pytest.raises(SolverUnsuitableError, match=r"no op of graph .* is needed"):
        solve(problem, solver)
