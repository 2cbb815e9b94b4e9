"""A schedule for the largest of all numbers keeps the budget with each of them."""

import random
from dataclasses import replace

import pytest

from remat.core.errors import BudgetError
from remat.core.graph import TrainingGraph
from remat.core.simulator import simulate
from remat.planning.one_device import plan_graph
from remat.planning.plan import plan_from_json, plan_to_json
from remat.planning.same_plan import (
    amounts_of,
    difference,
    plan_digest,
    structure,
    with_largest,
)
from remat.testing.small_graphs import all_graphs


def varied(graph: TrainingGraph, seed: int) -> TrainingGraph:
    """Return the same step as another process finds it."""
    numbers = random.Random(seed)
    storages = [
        replace(s, size_bytes=s.size_bytes + numbers.randint(0, 3), name=f"of {seed}")
        for s in graph.storages
    ]
    ops = [
        replace(
            op,
            cost_ns=tuple(cost and cost + numbers.randint(0, 5) for cost in op.cost_ns),
            workspace_bytes=tuple(
                w + numbers.randint(0, 2) for w in op.workspace_bytes
            ),
        )
        for op in graph.ops
    ]
    return replace(graph, storages=tuple(storages), ops=tuple(ops))


def test_what_fits_with_the_largest_fits_in_each_process() -> None:
    graphs = list(all_graphs(4))
    for graph in graphs[::7]:
        found = [varied(graph, seed) for seed in range(3)]
        assert len({structure(each) for each in found}) == 1
        largest = with_largest(found[1], [amounts_of(each) for each in found])
        whole = plan_graph(largest, budget=10**6, fingerprint="")
        budget = max(1, whole.peak_bytes - 1)
        try:
            plan = plan_graph(largest, budget=budget, fingerprint="")
        except BudgetError:
            plan = whole
        for each in found:
            trace = simulate(each, plan.platform, plan.schedule)
            assert trace.violation is None
            assert trace.peak_bytes[0] <= plan.peak_bytes
            assert trace.serial_ns <= plan.cost_ns
        # It is the least of such: each number is that of some process.
        for index, storage in enumerate(largest.storages):
            sizes = [each.storages[index].size_bytes for each in found]
            assert storage.size_bytes == max(sizes)


def test_a_plan_that_was_sent_is_the_same_plan() -> None:
    graph = list(all_graphs(4))[-1]
    plan = plan_graph(graph, budget=100, fingerprint="a step")
    sent = plan_from_json(plan_to_json(plan))
    assert plan_digest(sent) == plan_digest(plan)
    assert sent.graph == plan.graph
    other = plan_graph(graph, budget=101, fingerprint="a step")
    assert plan_digest(other) != plan_digest(plan)


def test_other_steps_have_another_structure() -> None:
    assert len({structure(graph) for graph in all_graphs(4)}) == 2**6


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ("aaaa", None),
        ("aaba", (2,)),
        ("baaa", (0,)),
        ("ab", (1,)),
        ("aabb", (2, 3)),
        ("abc", (1, 2)),
    ],
)
def test_who_differs_is_named(values: str, ranks: tuple[int, ...] | None) -> None:
    found = difference([{"same": "x", "letter": value} for value in values])
    assert (found and found.ranks) == ranks
    if found is not None and ranks is not None:
        assert "in letter" in found.text
        assert all(str(rank) in found.text for rank in ranks)
