"""The native core of the lower-set programs gives the answers of its Python twins."""

import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from studies.forward_graphs import towers
from tests.interrupts import begun_when_working, interrupted

from remat import native
from remat.algorithms.lower_sets.choice import approximate_family
from remat.algorithms.lower_sets.families import (
    Family,
    all_lower_sets,
    ancestor_sets,
    enumerate_lower_sets,
    family_of_masks,
    neighbouring_lower_sets,
)
from remat.algorithms.lower_sets.forward_graph import ForwardGraph, Owed
from remat.algorithms.lower_sets.narrowest import narrowest_lower_sets
from remat.algorithms.lower_sets.recurrences import (
    Found,
    Goal,
    GraphArrays,
    smallest_lower_set_budget,
    solve_lower_sets,
)

LARGE = 2**40
"""Costs of this size are kept in lists, not in rows."""

pytestmark = pytest.mark.skipif(native.core() is None, reason="there is no native core")


@st.composite
def graphs(draw: st.DrawFn, most_nodes: int = 7) -> ForwardGraph:
    nodes = draw(st.integers(1, most_nodes))
    pairs = [(u, v) for v in range(nodes) for u in range(v)]
    names = draw(st.permutations(range(nodes)))
    chosen = draw(
        st.lists(st.sampled_from(pairs), unique=True) if pairs else st.just([])
    )
    is_order = draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
    edges = [(names[u], names[v]) for u, v in chosen]
    sizes = st.lists(
        st.one_of(st.integers(0, 5), st.integers(0, 2**50)),
        min_size=nodes,
        max_size=nodes,
    )
    costs = st.one_of(st.integers(0, 3), st.sampled_from([LARGE, LARGE + 1, 7 * LARGE]))
    return ForwardGraph(
        memory_bytes=tuple(draw(sizes)),
        cost=tuple(draw(st.lists(costs, min_size=nodes, max_size=nodes))),
        edges=tuple(e for e, order in zip(edges, is_order, strict=True) if not order),
        order_edges=tuple(e for e, order in zip(edges, is_order, strict=True) if order),
        segment_bytes=draw(st.none() | sizes.map(tuple)),
        owed=draw(st.sampled_from([*Owed])),
    )


def arrays(graph: ForwardGraph) -> GraphArrays:
    owed = [*Owed].index(graph.owed)
    return graph.memory_bytes, graph.cost, graph.charged_bytes, graph.edges, owed


@st.composite
def families(draw: st.DrawFn, graph: ForwardGraph) -> Family:
    complete = all_lower_sets(graph, 1_000)
    assert complete is not None
    if draw(st.booleans()):
        return complete
    if draw(st.booleans()):
        return ancestor_sets(graph)
    some = draw(st.lists(st.sampled_from(complete.masks())))
    return family_of_masks(graph.node_count, some, label="some")


@settings(deadline=None)
@given(graphs(), st.integers(1, 200))
def test_enumeration(graph: ForwardGraph, cap: int) -> None:
    twin = inspect.unwrap(enumerate_lower_sets)
    expected = twin(graph.node_count, graph.all_edges, cap)
    found = enumerate_lower_sets(graph.node_count, graph.all_edges, cap)
    assert (found is None) is (expected is None)
    if found is not None and expected is not None:
        assert np.array_equal(found, expected)
        assert found.dtype == expected.dtype == np.uint64


@settings(deadline=None)
@given(st.data())
def test_neighbours(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    rows = data.draw(families(graph)).rows
    twin = inspect.unwrap(neighbouring_lower_sets)
    expected = twin(graph.all_edges, rows, graph.node_count)
    found = neighbouring_lower_sets(graph.all_edges, rows, graph.node_count)
    assert np.array_equal(found, expected)


@settings(deadline=None)
@given(graphs())
def test_narrowest(graph: ForwardGraph) -> None:
    twin = inspect.unwrap(narrowest_lower_sets)
    parts = graph.memory_bytes, graph.edges, graph.order_edges
    assert np.array_equal(narrowest_lower_sets(*parts), twin(*parts))


def test_enumeration_of_many_words() -> None:
    twin = inspect.unwrap(enumerate_lower_sets)
    chain = [(v, v + 1) for v in range(99)]
    for edges in (chain, [edge for edge in chain if edge[0] not in {31, 63}]):
        expected = twin(100, edges, 100_000)
        found = enumerate_lower_sets(100, edges, 100_000)
        assert found is not None
        assert expected is not None
        assert np.array_equal(found, expected)


@settings(deadline=None)
@given(st.data())
def test_programs(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    rows = data.draw(families(graph)).rows
    expected = inspect.unwrap(smallest_lower_set_budget)(arrays(graph), rows, [], None)
    least = smallest_lower_set_budget(arrays(graph), rows, [], None)
    assert least[:2] == expected[:2]
    peak = expected[1]
    queries = [
        (max(0, int(peak * factor) - less), int(goal), charge_last)
        for factor, less in data.draw(
            st.lists(
                st.tuples(st.sampled_from([1, 1.1, 1.5, 3]), st.integers(0, 1)),
                min_size=1,
                max_size=2,
            )
        )
        for goal in Goal
        for charge_last in (False, True)
    ]
    known = data.draw(st.sampled_from([[], [least[3]], [[len(rows) - 1], least[3]]]))
    twins = inspect.unwrap(solve_lower_sets)(arrays(graph), rows, queries, known, None)
    found = solve_lower_sets(arrays(graph), rows, queries, known, None)
    for query, one, other in zip(queries, found, twins, strict=True):
        assert one[:3] == other[:3]
        check_sequence(graph, rows, query, one)


@settings(deadline=None)
@given(st.data())
def test_the_plain_program_of_the_studies(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    graph = replace(graph, cost=tuple(min(cost, 9) for cost in graph.cost))
    rows = data.draw(families(graph)).rows
    peak = smallest_lower_set_budget(arrays(graph), rows, [], None)[1]
    budget = int(peak * data.draw(st.sampled_from([0.9, 1, 1.2, 2])))
    queries = [(budget, int(goal), flag) for goal in Goal for flag in (False, True)]
    core = native.core()
    assert core is not None
    found = core.plain_solve_lower_sets(arrays(graph), rows, queries, [], None)
    twins = inspect.unwrap(solve_lower_sets)(arrays(graph), rows, queries, [], None)
    for query, one, other in zip(queries, found, twins, strict=True):
        assert one[:3] == other[:3]
        check_sequence(graph, rows, query, one)


def layered(seed: int) -> ForwardGraph:
    """A random graph of 9 to 30 values, most reading what came shortly before."""
    rng = random.Random(seed)
    nodes, width = rng.randint(9, 30), rng.choice([1, 2, 3])
    edges = {
        (u, v)
        for v in range(1, nodes)
        for u in rng.sample(range(max(0, v - 2 * width), v), min(v, rng.randint(1, 2)))
    }
    return ForwardGraph(
        memory_bytes=tuple(rng.choice([0, 1, 50, 10**6]) for _ in range(nodes)),
        cost=tuple(rng.choice([0, 1, 10, rng.randint(0, 30)]) for _ in range(nodes)),
        edges=tuple(sorted(edges)),
        owed=rng.choice([*Owed]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_larger_graphs_agree_with_the_plain_program(seed: int) -> None:
    graph = layered(seed)
    family = all_lower_sets(graph, 300) or approximate_family(graph)
    least = smallest_lower_set_budget(arrays(graph), family.rows, [], None)
    queries = [
        (int(least[1] * multiple), int(goal), charge_last)
        for multiple in (1, 1.1, 1.6)
        for goal in Goal
        for charge_last in (False, True)
    ]
    core = native.core()
    assert core is not None
    plain = core.plain_solve_lower_sets(arrays(graph), family.rows, queries, [], None)
    for known in ([], [least[3]]):
        found = solve_lower_sets(arrays(graph), family.rows, queries, known, None)
        assert [answer[:3] for answer in found] == [answer[:3] for answer in plain]
    # Long sums of costs are kept in lists, not in rows.
    scaled = replace(graph, cost=tuple(LARGE * cost for cost in graph.cost))
    found = solve_lower_sets(arrays(scaled), family.rows, queries, [], None)
    for one, other in zip(found, plain, strict=True):
        assert one[:3] == (other[0], LARGE * other[1], other[2])


def check_sequence(
    graph: ForwardGraph, rows: Any, query: tuple[int, int, bool], answer: Any
) -> None:
    """The sequence is what the answer says of it."""
    found, overhead, cached, chain = answer
    if found == Found.INFEASIBLE:
        assert chain == []
        return
    twin = inspect.unwrap(solve_lower_sets)
    # Stopped at once, the twin measures the sequence it is given.
    measured = twin(arrays(graph), rows, [query], [chain], 0.0)[0]
    assert measured == (Found.STOPPED_WITH_ANSWER, overhead, cached, chain)


@settings(deadline=None)
@given(graphs())
def test_a_time_limit_of_nothing_is_kept_by_the_twin(graph: ForwardGraph) -> None:
    family = all_lower_sets(graph, 1_000)
    assert family is not None
    query = (2**60, int(Goal.LEAST_OVERHEAD), False)
    twin = inspect.unwrap(solve_lower_sets)
    assert twin(arrays(graph), family.rows, [query], [], 0.0) == [
        (Found.STOPPED, 0, 0, [])
    ]
    found, peak, _, chain = inspect.unwrap(smallest_lower_set_budget)(
        arrays(graph), family.rows, [], 0.0
    )
    assert (found, chain) == (Found.STOPPED_WITH_ANSWER, [len(family) - 1])
    assert peak == sum(graph.charged_bytes)


def complete_towers() -> tuple[ForwardGraph, Family]:
    graph = towers(6, 3)  # 4_098 lower sets
    family = all_lower_sets(graph, 5_000)
    assert family is not None
    return graph, family


def test_a_time_limit_stops_the_core() -> None:
    graph, family = complete_towers()
    query = (30 << 20, int(Goal.LEAST_OVERHEAD), False)
    (stopped,) = solve_lower_sets(arrays(graph), family.rows, [query], [], 0.0)
    assert stopped[0] in {Found.STOPPED, Found.STOPPED_WITH_ANSWER}
    known = smallest_lower_set_budget(arrays(graph), family.rows, [], 0.0)
    assert known[0] == Found.STOPPED_WITH_ANSWER
    assert known[3] == [len(family) - 1]
    (given,) = solve_lower_sets(
        arrays(graph), family.rows, [(2**40, 0, False)], [known[3]], 0.0
    )
    assert given[0] == Found.STOPPED_WITH_ANSWER


def ask_without_end(begun: Callable[[], None]) -> None:
    graph, family = complete_towers()
    queries = [(30 << 20, int(Goal.LEAST_OVERHEAD), True)] * 100_000
    begun_when_working(begun)
    solve_lower_sets(arrays(graph), family.rows, queries, [], None)


def test_an_interrupt_stops_the_core() -> None:
    assert isinstance(interrupted(ask_without_end), KeyboardInterrupt)


ROWS = np.array([[0], [1], [3]], dtype=np.uint64)
GRAPH: GraphArrays = ((1, 1), (1, 1), (2, 2), ((0, 1),), 0)

THREE: GraphArrays = ((1, 1, 1), (1, 1, 1), (2, 2, 2), (), 0)


@pytest.mark.parametrize(
    ("graph", "rows", "words"),
    [
        (((), (), (), (), 0), ROWS, "one entry a value"),
        (((1, 1), (1,), (2, 2), (), 0), ROWS, "one entry a value"),
        (((1, -1), (1, 1), (2, 2), (), 0), ROWS, "negative"),
        (((2**60, 1), (1, 1), (2, 2), (), 0), ROWS, "more than"),
        (((2**59, 1), (1, 1), (2**60, 0), (), 0), ROWS, "more than"),
        (((1, 1), (2**60, 1), (2, 2), (), 0), ROWS, "costs are negative, or"),
        (((1, 1), (1, 1), (2, 2), ((0, 2),), 0), ROWS, "does not exist"),
        (((1, 1), (1, 1), (2, 2), ((-1, 0),), 0), ROWS, "does not exist"),
        (((1, 1), (1, 1), (2, 2), (), 3), ROWS, "0, 1 or 2"),
        (GRAPH, ROWS[:1], "two or more"),
        (GRAPH, np.zeros((3, 2), np.uint64), "bit sets of the values"),
        (THREE, np.array([[0], [3], [1], [7]], np.uint64), "smaller sets first"),
        (GRAPH, ROWS[1:].copy(), "first row must be empty"),
        (GRAPH, ROWS[:2].copy(), "last one full"),
        (GRAPH, np.array([[0], [5], [3]], np.uint64), "values only"),
        (GRAPH, np.array([[0], [2], [3]], np.uint64), "without what it reads"),
    ],
)
def test_the_core_refuses_what_does_not_fit(graph: Any, rows: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        smallest_lower_set_budget(graph, rows, [], None)


@pytest.mark.parametrize("chain", [[0, 2], [2, 1], [1], [1, 1, 2], [3], []])
def test_the_core_refuses_sequences_that_do_not_increase(chain: list[int]) -> None:
    with pytest.raises(ValueError, match="known sequence"):
        solve_lower_sets(GRAPH, ROWS, [(9, 0, False)], [chain], None)
    with pytest.raises(ValueError, match="known sequence"):
        smallest_lower_set_budget(GRAPH, ROWS, [chain], None)


def test_the_core_refuses_unknown_goals_and_values() -> None:
    with pytest.raises(ValueError, match="goal"):
        solve_lower_sets(GRAPH, ROWS, [(9, 3, False)], [], None)
    with pytest.raises(ValueError, match="does not exist"):
        enumerate_lower_sets(2, [(0, 2)], 10)
    with pytest.raises(ValueError, match="does not exist"):
        narrowest_lower_sets([1, 1], [(0, 1)], [(5, 1)])
    with pytest.raises(ValueError, match="bit sets"):
        neighbouring_lower_sets([], ROWS, 65)
