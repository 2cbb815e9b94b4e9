"""Passes in flight are planned together: judged, within the budget, or refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.instances import INSTANCES
from tests.strategies import graphs

from remat.core.errors import BudgetError, PlanMismatchError
from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.core.in_flight import OTHERS, others_bytes, with_others, with_passes
from remat.core.simulator import simulate
from remat.planning.in_flight import plan_in_flight
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.plan import load_plan
from remat.planning.proofs import at_budget
from remat.planning.replanning import at_sizes, with_gradients

TRANSFORMER = INSTANCES["transformer"]().graph


def test_passes_that_keep_everything_run_plainly() -> None:
    plan = plan_in_flight(TRANSFORMER, 3, budget="100%")
    assert plan.recomputed_op_count == 0
    assert plan.gap == 0
    assert plan.peak_bytes == plan.baseline_peak_bytes == plan.budget_bytes
    assert plan.peak_bytes > plain_peak_bytes(TRANSFORMER)


@pytest.mark.parametrize("in_flight", [2, 5])
@pytest.mark.parametrize("percent", [80, 50])
def test_a_budget_of_several_passes_is_kept(in_flight: int, percent: int) -> None:
    plan = plan_in_flight(TRANSFORMER, in_flight, budget=f"{percent}%")
    assert plan.peak_bytes <= (plan.budget_bytes or 0)
    needed = with_passes(TRANSFORMER, plan.schedule, in_flight)
    assert others_bytes(plan.graph) == others_bytes(needed)
    trace = simulate(needed, plan.platform, plan.schedule)
    assert trace.violation is None
    assert trace.peak_bytes == (plan.peak_bytes,)


def test_a_pass_of_another_size_is_beside_others_of_the_largest() -> None:
    plan = plan_in_flight(TRANSFORMER, 2, budget="80%")
    blocks = [
        each if each.is_resident else replace(each, size_bytes=each.size_bytes // 2)
        for each in TRANSFORMER.storages
    ]
    smaller = at_sizes(plan, replace(TRANSFORMER, storages=tuple(blocks)))
    assert smaller is not None
    assert others_bytes(smaller.graph) == others_bytes(plan.graph)
    assert smaller.peak_bytes < plan.peak_bytes
    blocks = [replace(each, size_bytes=each.size_bytes * 2) for each in blocks]
    larger = [replace(each, size_bytes=each.size_bytes * 2) for each in blocks]
    for found, is_within in ((blocks, True), (larger, False)):
        graph = replace(TRANSFORMER, storages=tuple(found))
        roomier = at_budget(plan, plan.peak_bytes * 3 // 2)
        assert (at_sizes(roomier, graph) is not None) == is_within


def test_more_passes_save_less_each() -> None:
    """A plan for one pass within what is left would keep too much, or too little."""
    budget_bytes = plain_peak_bytes(TRANSFORMER)
    each = [
        others_bytes(plan_in_flight(TRANSFORMER, count, budget=budget_bytes).graph)
        // (count - 1)
        for count in (2, 3, 4)
    ]
    assert each == sorted(each, reverse=True)
    assert each[0] > each[-1]


def test_what_an_error_names_works() -> None:
    with pytest.raises(BudgetError, match="with 3 passes in flight") as caught:
        plan_in_flight(TRANSFORMER, 3, budget=1)
    least_bytes = caught.value.required_bytes
    assert plan_in_flight(TRANSFORMER, 3, budget=least_bytes).peak_bytes <= least_bytes
    with pytest.raises(BudgetError):
        plan_in_flight(TRANSFORMER, 3, budget=least_bytes // 2)


def _activation(name: str, size_bytes: int) -> Storage:
    return Storage(name=name, size_bytes=size_bytes, role=Role.ACTIVATION)


def _op(name: str, cost_ns: int = 0, **fields: Any) -> Op:
    given: dict[str, Any] = {"reads": (), "writes": (), "phase": Phase.FORWARD}
    given["workspace_bytes"] = (0,)
    return Op(name=name, cost_ns=(cost_ns,), **(given | fields))


_CALLERS: dict[str, Any] = {
    "non_recomputable": "it is done by the caller",
    "is_external": True,
}

ONLY_THE_CALLERS = TrainingGraph(
    name="a fork whose backward pass is the caller's alone",
    storages=(_activation("a", 1), _activation("b", 1), _activation("c", 0)),
    ops=(
        _op("first", 1, writes=(0,), is_ordered=True),
        _op("effect", is_ordered=True),
        _op("second", 1, writes=(1, 2), workspace_bytes=(1,)),
        _op("loss", reads=(0, 1), **_CALLERS),
        _op("optimizer", phase=Phase.BACKWARD, **_CALLERS),
    ),
    forward_outputs=(0, 1),
    tangents=(),
    final_outputs=(),
    device_kinds=("cpu",),
)


@settings(max_examples=25)
@example(graph=ONLY_THE_CALLERS, count=1)
@given(graph=graphs(max_ops=6, sizes=st.integers(0, 9)), count=st.integers(1, 3))
def test_any_graph_is_planned_or_refused(graph: TrainingGraph, count: int) -> None:
    try:
        plan = plan_in_flight(graph, count, budget=1)
    except BudgetError as error:
        least_bytes = error.required_bytes
        plan = plan_in_flight(graph, count, budget=least_bytes)
    assert plan.peak_bytes <= (plan.budget_bytes or 0)


def test_a_plan_that_counts_too_little_is_refused(tmp_path: Path) -> None:
    plan = plan_in_flight(TRANSFORMER, 3, budget="60%")
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.in_flight == 3
    assert loaded.peak_bytes == plan.peak_bytes
    assert loaded.baseline_peak_bytes == plan.baseline_peak_bytes
    less = with_others(plan.graph, others_bytes(plan.graph) - 1, 3)
    with pytest.raises(PlanMismatchError, match="other passes in flight"):
        replace(plan, graph=less, _judged=None)
    alone = plan_graph(TRANSFORMER, budget="60%")
    with pytest.raises(PlanMismatchError, match="counts 0 bytes"):
        replace(alone, in_flight=2, _judged=None)


def test_gradients_are_not_added_to_buckets() -> None:
    plan = plan_in_flight(TRANSFORMER, 2, budget="1 TiB")
    in_buckets = with_gradients(plan, 0, 1000, 1000)
    assert in_buckets is not None
    assert others_bytes(in_buckets.graph) == others_bytes(plan.graph)
    roles = {s.role: s.size_bytes for s in in_buckets.graph.storages if s.is_resident}
    assert roles[Role.BUCKET] == 1000
    assert roles[Role.GRADIENT] == 0
    again = with_gradients(in_buckets, 1000, 1600, 1000)
    assert again is not None
    assert again.peak_bytes <= in_buckets.peak_bytes + 600


def test_a_plan_says_how_many_are_in_flight() -> None:
    plan = plan_in_flight(TRANSFORMER, 2, budget="60%")
    assert "2 forward passes" in str(plan)
    assert OTHERS in str(plan)
