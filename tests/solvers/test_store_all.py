"""StoreAll: every op once, OPTIMAL or proved not to fit."""

import pytest
from tests.instances import INSTANCES

from remat.core.bounds import cost_bound_ns, required_ops
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Problem, Status
from remat.planning.portfolio import solve
from remat.solvers.store_all import StoreAll
from remat.solvers.xengine import XEngine
from remat.testing import store_all_peak_bytes


@pytest.mark.parametrize("name", INSTANCES)
def test_every_op_runs_once_in_graph_order(name: str):
    graph = INSTANCES[name]().graph
    result = solve(Problem(graph=graph, platform=single_device()), StoreAll())
    assert result.schedule is not None
    assert result.schedule.computes == tuple(range(len(graph.ops)))
    is_needed = len(required_ops(graph)) == len(graph.ops)
    assert is_needed or name.startswith("awkward")
    assert result.status is (Status.OPTIMAL if is_needed else Status.FEASIBLE)
    assert (result.gap == 0) == is_needed


@pytest.mark.parametrize("name", INSTANCES)
def test_its_peak_is_the_smallest_budget_that_fits(name: str):
    graph = INSTANCES[name]().graph
    peak = store_all_peak_bytes(graph)
    fits = Problem(graph=graph, platform=single_device(peak))
    too_small = Problem(graph=graph, platform=single_device(peak - 1))
    assert solve(fits, StoreAll()).schedule is not None
    refused = solve(too_small, StoreAll())
    assert refused.status is Status.INFEASIBLE
    assert f"{peak - 1:_}"[:3] in refused.message or refused.message
    assert refused.bound_ns == cost_bound_ns(too_small)


def test_two_ops_by_hand():
    graph = TrainingGraph(
        name="two",
        storages=(
            Storage(name="w", size_bytes=10, is_resident=True),
            Storage(name="y", size_bytes=4),
            Storage(name="t", size_bytes=2),
            Storage(name="g", size_bytes=10),
        ),
        ops=(
            Op(
                name="f",
                reads=(0,),
                writes=(1,),
                cost_ns=(5,),
                workspace_bytes=(3,),
                phase=Phase.FORWARD,
            ),
            Op(
                name="b",
                reads=(1, 2),
                writes=(3,),
                cost_ns=(7,),
                workspace_bytes=(0,),
                phase=Phase.BACKWARD,
            ),
        ),
        forward_outputs=(1,),
        tangents=(2,),
        final_outputs=(3,),
    )
    result = solve(Problem(graph=graph, platform=single_device()), StoreAll())
    assert result.trace is not None
    assert result.cost_ns == 5 + 7
    assert result.trace.timeline_bytes[0][:2] == (10 + 4 + 3, 10 + 4 + 2)
    assert result.trace.peak_bytes == (10 + 4 + 2 + 10,)


def test_an_op_that_nobody_needs_is_run_but_nothing_is_proved_of_it():
    graph = TrainingGraph(
        name="dead",
        storages=(Storage(name="u", size_bytes=1), Storage(name="d", size_bytes=1)),
        ops=tuple(
            Op(
                name=name,
                reads=(),
                writes=(storage,),
                cost_ns=(cost_ns,),
                workspace_bytes=(0,),
                phase=Phase.BACKWARD,
            )
            for name, storage, cost_ns in (("dead", 1, 100), ("useful", 0, 1))
        ),
        final_outputs=(0,),
    )
    problem = Problem(graph=graph, platform=single_device(10))
    for solver in (StoreAll(), XEngine()):
        result = solve(problem, solver)
        assert (result.status, result.cost_ns, result.bound_ns) == (
            Status.FEASIBLE,
            101,
            1,
        )
