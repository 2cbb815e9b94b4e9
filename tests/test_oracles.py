"""The brute force of the tests, against the judge and by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.bounds import cost_bound_ns, peak_bound_bytes
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Problem
from remat.core.simulator import simulate
from tests.oracles import (
    brute_force_best,
    brute_force_schedule,
    brute_force_smallest_budget,
)
from tests.strategies import graphs


def chain(length: int, size_bytes: int = 10) -> TrainingGraph:
    """Activations a0 .. an; backward op i reads the gradient above and activation i."""
    inner = [Storage(name=f"a{i}", size_bytes=size_bytes) for i in range(length)]
    outer = [Storage(name=f"g{i}", size_bytes=size_bytes) for i in range(length)]
    forward = [
        Op(
            name=f"f{i}",
            reads=(i - 1,) if i else (),
            writes=(i,),
            cost_ns=(1,),
            workspace_bytes=(0,),
            phase=Phase.FORWARD,
        )
        for i in range(length)
    ]
    backward = [
        Op(
            name=f"b{i}",
            reads=(i,) if i == length - 1 else (i, length + i + 1),
            writes=(length + i,),
            cost_ns=(2,),
            workspace_bytes=(0,),
            phase=Phase.BACKWARD,
        )
        for i in reversed(range(length))
    ]
    return TrainingGraph(
        name=f"chain of {length}",
        storages=(*inner, *outer),
        ops=(*forward, *backward),
        final_outputs=(length,),
    )


@pytest.mark.parametrize(
    ("budget_bytes", "cost_ns"),
    [
        (40, 9),  # the first backward op sees a0, a1, a2 and its own gradient
        (39, 10),  # a0 goes before it, and is computed again for the last one
        (30, 10),  # no more is ever needed than an op's own three blocks
        (29, None),
    ],
)
def test_chain_of_three_by_hand(budget_bytes: int, cost_ns: int | None):
    assert brute_force_best(chain(3), budget_bytes) == cost_ns


def test_smallest_budget_of_a_chain_by_hand():
    assert brute_force_smallest_budget(chain(3)) == 30
    assert brute_force_smallest_budget(chain(2)) == 30
    assert brute_force_smallest_budget(chain(1)) == 20


def test_an_op_that_runs_nowhere_leaves_no_schedule():
    graph = chain(1)
    ops = tuple(
        replace(op, cost_ns=(None, 1), workspace_bytes=(0, 0)) for op in graph.ops
    )
    stuck = replace(graph, ops=ops, device_kinds=("cpu", "gpu"))
    assert brute_force_smallest_budget(stuck) is None
    assert brute_force_best(stuck, 10**6) is None


small_graphs = graphs(max_ops=5, sizes=st.integers(0, 6))


@settings(max_examples=100, deadline=None)
@given(small_graphs)
def test_smallest_budget_is_the_least_for_which_a_schedule_exists(graph: TrainingGraph):
    smallest = brute_force_smallest_budget(graph)
    assert smallest is not None
    assert smallest >= peak_bound_bytes(graph)
    assert brute_force_best(graph, smallest) is not None
    assert brute_force_best(graph, smallest - 1) is None


@settings(max_examples=100, deadline=None)
@given(small_graphs, st.integers(0, 20))
def test_what_brute_force_finds_is_what_the_judge_says(
    graph: TrainingGraph, extra_bytes: int
):
    smallest = brute_force_smallest_budget(graph)
    assert smallest is not None
    budget = smallest + extra_bytes
    schedule = brute_force_schedule(graph, budget)
    assert schedule is not None
    problem = Problem(graph=graph, platform=single_device())
    trace = simulate(graph, problem.platform, schedule)
    assert trace.violation is None
    assert trace.peak_bytes[0] <= budget
    assert trace.serial_ns == brute_force_best(graph, budget)
    assert trace.serial_ns >= cost_bound_ns(problem)


@settings(max_examples=100, deadline=None)
@given(small_graphs)
def test_no_schedule_is_cheaper_than_every_needed_op_once(graph: TrainingGraph):
    problem = Problem(graph=graph, platform=single_device())
    schedule = schedule_from_order(graph, store_all_order(graph))
    trace = simulate(graph, problem.platform, schedule)
    assert trace.violation is None
    best = brute_force_best(graph, trace.peak_bytes[0])
    assert best is not None
    assert cost_bound_ns(problem) <= best <= trace.serial_ns
    assert brute_force_best(graph, 2**70) == cost_bound_ns(problem)
