"""Rotor and Revolve on training graphs: what they reach, and what they decline."""

import pytest
from tests.instances import INSTANCES, Network

from remat.core.errors import SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Result, Status, StopReason
from remat.planning.portfolio import solve
from remat.solvers.chen import ChenGreedy
from remat.solvers.rockmate import Rockmate
from remat.solvers.rotor import Revolve, Rotor
from remat.testing import store_all_peak_bytes


def solved(
    graph: TrainingGraph,
    budget: int,
    solver: Rotor | Revolve | Rockmate | ChenGreedy,
    limits: Limits | None = None,
) -> Result:
    problem = Problem(graph=graph, platform=single_device(budget))
    return solve(problem, solver, limits=limits)


@pytest.mark.parametrize("solver", [Rotor(), Revolve()], ids=["rotor", "revolve"])
@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_never_dearer_than_chen(name: str, solver: Rotor | Revolve):
    graph = INSTANCES[name]().graph
    budget = store_all_peak_bytes(graph) * 7 // 10
    chen, ours = solved(graph, budget, ChenGreedy()), solved(graph, budget, solver)
    assert chen.cost_ns is not None
    assert ours.cost_ns is not None
    assert ours.cost_ns <= chen.cost_ns
    assert ours.message.endswith(" stages")


def test_a_stage_may_run_more_than_twice():
    net = Network("deep")
    value = net.input("x", 64)
    for layer in range(60):
        value = net.one(
            f"f{layer}", [value], 1000, 100, saves_inputs=True, parameter_bytes=1
        )
    graph = net.instance(value).graph
    # Each op at most twice needs about twice the square root of the chain.
    budget = 10_000
    chen, ours = solved(graph, budget, ChenGreedy()), solved(graph, budget, Rotor())
    assert chen.status is Status.UNKNOWN
    assert ours.status is Status.FEASIBLE
    assert ours.schedule is not None
    assert max(ours.schedule.recompute_counts().values()) >= 2


@pytest.mark.parametrize(
    "solver",
    [Rotor(), Revolve(), Rockmate()],
    ids=["rotor", "revolve", "rockmate"],
)
def test_a_graph_that_is_no_chain_is_declined(solver: Rotor | Revolve | Rockmate):
    net = Network("towers")
    x = net.input("x", 64)
    values = [x, x]
    for layer in range(4):
        values = [
            net.one(
                f"t{tower}.{layer}",
                [value],
                1000,
                100,
                saves_inputs=True,
                parameter_bytes=8,
            )
            for tower, value in enumerate(values)
        ]
    joined = net.one("join", values, 1000, 100, saves_inputs=True, parameter_bytes=8)
    graph = net.instance(joined).graph
    with pytest.raises(SolverUnsuitableError, match=r"is no chain: .*'join'.*'lower-"):
        solved(graph, store_all_peak_bytes(graph) * 9 // 10, solver)


def test_no_time_gives_no_answer():
    graph = INSTANCES["resnet"]().graph
    budget = store_all_peak_bytes(graph) * 6 // 10
    result = solved(graph, budget, Rotor(), Limits.after(0.0))
    assert result.status is Status.UNKNOWN
    assert result.stop_reason is StopReason.TIME_LIMIT
