"""Steps that differ from a planned one in sizes only: what is known is used."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.instances import Instance, resnet_like, transformer_like

from remat.core.graph import Role, TrainingGraph
from remat.core.problem import Limits
from remat.core.simulator import simulate
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.plan import Plan
from remat.planning.replanning import (
    TOLERATED_OVERHEAD,
    equal_plan,
    replan,
    with_gradients,
)


def scaled(graph: TrainingGraph, percent: int) -> TrainingGraph:
    """Return the graph of a batch of another size."""
    return replace(
        graph,
        storages=tuple(
            storage
            if storage.is_resident
            else replace(storage, size_bytes=storage.size_bytes * percent // 100)
            for storage in graph.storages
        ),
        ops=tuple(
            replace(
                op,
                cost_ns=tuple(c and c * percent // 100 for c in op.cost_ns),
                workspace_bytes=tuple(w * percent // 100 for w in op.workspace_bytes),
            )
            for op in graph.ops
        ),
    )


def planned(graph: TrainingGraph, percent: int) -> Plan:
    return plan_graph(graph, budget=f"{percent}%", fingerprint="a step")


@pytest.mark.parametrize("make", [resnet_like, transformer_like])
@pytest.mark.parametrize("percent", [30, 60, 90, 110])
def test_other_sizes_are_planned_within_the_budget_and_nearly_as_well(
    make: Callable[[], Instance], percent: int
) -> None:
    graph = make().graph
    known = planned(graph, 60)
    other = scaled(graph, percent)
    assert equal_plan(other, [known]) is known
    budget = known.budget_bytes or 0
    plan = replan(
        other, budget, known, fingerprint="other", limits=Limits(), settings={}
    )
    if plan is None:
        assert percent > 60
        return
    assert plan.graph is other
    assert plan.fingerprint == "other"
    assert plan.peak_bytes <= budget
    assert plan.overhead <= known.overhead + TOLERATED_OVERHEAD
    if plain_peak_bytes(other) <= budget:
        assert plan.overhead == 0
    best = plan_graph(other, budget=budget)
    assert plan.overhead <= max(best.overhead + 0.05, known.overhead)


def test_what_recomputes_much_more_is_planned_by_all_solvers() -> None:
    graph = resnet_like().graph
    known = planned(graph, 90)
    tight = planned(graph, 40).peak_bytes
    assert (
        replan(graph, tight, known, fingerprint="", limits=Limits(), settings={})
        is None
    )


def test_a_graph_with_other_ops_is_not_equal() -> None:
    graph = resnet_like().graph
    known = planned(graph, 60)
    renamed = replace(graph.ops[0], name="another")
    other = replace(graph, ops=(renamed, *graph.ops[1:]))
    assert equal_plan(other, [known]) is None
    assert equal_plan(graph, []) is None


def test_a_plan_with_room_for_gradients_holds_with_them() -> None:
    graph = resnet_like().graph
    known = planned(graph, 60)
    room = (known.budget_bytes or 0) - known.peak_bytes
    found = with_gradients(known, 0, room)
    assert found is not None
    assert found.peak_bytes == known.peak_bytes + room
    assert found.schedule is known.schedule
    assert with_gradients(known, 0, room + 1) is None
    # Replaced, and not added up.
    again = with_gradients(found, room, room)
    assert again is not None
    assert again.peak_bytes == found.peak_bytes
    held = [s for s in again.graph.storages if s.is_resident]
    assert sum(s.role is Role.GRADIENT for s in held) == 1
    trace = simulate(again.graph, again.platform, again.schedule)
    assert trace.violation is None


def test_fewer_gradients_may_allow_a_faster_plan() -> None:
    graph = resnet_like().graph
    known = planned(graph, 60)
    assert known.recomputed_op_count > 0
    assert with_gradients(known, 100, 0) is None
    storing = planned(graph, 100)
    assert with_gradients(storing, 0, 0) is not None
