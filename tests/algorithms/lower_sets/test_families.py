"""Families: closed forms and published counts, and what each promises."""

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from studies.forward_graphs import densenet161, resnet50, resnet152, towers
from tests.algorithms.lower_sets.brute_force import lower_sets, random_graph

from remat.algorithms.lower_sets.choice import (
    DEFAULT_CAP,
    approximate_family,
    choose_family,
)
from remat.algorithms.lower_sets.families import (
    Family,
    all_lower_sets,
    ancestor_sets,
    complements_of_descendants,
    contents,
    family_of_masks,
    masks_of_rows,
    members,
    neighbours,
    prefixes,
    rows_of_masks,
)
from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.algorithms.lower_sets.narrowest import narrowest_lower_sets, narrowest_sets
from remat.algorithms.lower_sets.orders import (
    breadth_first,
    by_depth,
    depth_first,
    from_beginning,
    from_end,
    narrow_first,
)

RULES = (breadth_first, depth_first, by_depth, narrow_first)


def of_edges(nodes: int, edges: list[tuple[int, int]]) -> ForwardGraph:
    return ForwardGraph.of_values([1] * nodes, [1] * nodes, edges)


def chain(nodes: int) -> ForwardGraph:
    return of_edges(nodes, list(pairwise(range(nodes))))


def fork_join(*branches: int) -> ForwardGraph:
    """A first value, branches of some values, and a last value."""
    edges: list[tuple[int, int]] = []
    end = sum(branches) + 1
    first = 1
    for length in branches:
        edges += pairwise([0, *range(first, first + length), end])
        first += length
    return of_edges(end + 1, edges)


def beside(*graphs: ForwardGraph) -> ForwardGraph:
    edges: list[tuple[int, int]] = []
    count = 0
    for graph in graphs:
        edges += [(count + u, count + v) for u, v in graph.edges]
        count += graph.node_count
    return of_edges(count, edges)


def in_series(one: ForwardGraph, other: ForwardGraph) -> ForwardGraph:
    edges = list(beside(one, other).edges)
    edges += [
        (u, one.node_count + v)
        for u in range(one.node_count)
        for v in range(other.node_count)
    ]
    return of_edges(one.node_count + other.node_count, edges)


def count(graph: ForwardGraph, cap: int = 100_000) -> int:
    family = all_lower_sets(graph, cap)
    assert family is not None
    assert family.is_complete
    return len(family)


@pytest.mark.parametrize("nodes", [1, 2, 50, 63, 64, 65, 128, 500])
def test_chains_have_one_more(nodes: int) -> None:
    assert count(chain(nodes)) == nodes + 1


def test_fork_join_products() -> None:
    # Two more than the product: without the first value, and with the last.
    assert count(fork_join(2, 4, 4, 3)) == 3 * 5 * 5 * 4 + 2
    assert count(fork_join(1, 1)) == 6
    assert count(towers(8, 3)) == 4**8 + 2 == 65_538


def test_disjoint_parts_multiply_and_series_add() -> None:
    graphs = [random_graph(seed, most_nodes=6) for seed in range(12)]
    for one, other in pairwise(graphs):
        a, b = count(one), count(other)
        assert count(beside(one, other)) == a * b
        assert count(in_series(one, other)) == a + b - 1


def test_published_counts() -> None:
    assert count(resnet50()) == 241
    assert count(resnet152()) == 581
    assert count(densenet161()) == 569


def test_enumeration_is_that_of_all_subsets() -> None:
    for seed in range(80):
        graph = random_graph(seed, is_general=True)
        family = all_lower_sets(graph, 1_000)
        assert family is not None
        found = [frozenset(members(mask)) for mask in family.masks()]
        assert len(set(found)) == len(found)
        assert set(found) == set(lower_sets(graph))
        assert [len(s) for s in found] == sorted(len(s) for s in found)


def test_the_cap_is_exact() -> None:
    graph = fork_join(2, 4, 4, 3)
    assert count(graph, 302) == 302
    assert all_lower_sets(graph, 301) is None
    assert all_lower_sets(graph, 1) is None
    for cap in (0, -3):
        with pytest.raises(ValueError, match="at least 1"):
            all_lower_sets(graph, cap)
        with pytest.raises(ValueError, match="at least 1"):
            choose_family(graph, cap)


@pytest.mark.parametrize("cap", [2.5, 400.0, "400", None, True, np.array([400, 1])])
def test_a_cap_that_is_no_integer_is_refused(cap: Any) -> None:
    graph = fork_join(2, 4, 4, 3)
    for enumerate_sets in (all_lower_sets, choose_family):
        with pytest.raises(ValueError, match=r"cap on lower sets is .* be an integer"):
            enumerate_sets(graph, cap)


def test_any_integer_is_a_cap() -> None:
    graph = fork_join(2, 4, 4, 3)
    cap: Any
    for cap in (np.int64(302), np.uint16(302), 10**30):
        assert choose_family(graph, cap).is_complete
    cap = np.int32(301)
    assert not choose_family(graph, cap).is_complete


def test_beyond_the_cap_another_family_is_chosen() -> None:
    few, many = fork_join(2, 4), towers(6, 4)  # 17 and 15_627 lower sets
    assert choose_family(few).is_complete
    assert not choose_family(few, 16).is_complete
    family = choose_family(many)
    assert not family.is_complete
    assert len(family) < DEFAULT_CAP
    assert "narrowest" in family.label


def closed(graph: ForwardGraph, family: Family) -> bool:
    return all(
        not (mask >> v & 1) or mask >> u & 1
        for mask in family.masks()
        for u, v in graph.all_edges
    )


def test_every_family_holds_lower_sets_only() -> None:
    for seed in range(60):
        graph = random_graph(seed, is_general=True)
        complete = all_lower_sets(graph, 1_000)
        assert complete is not None
        everything = (1 << graph.node_count) - 1
        for family in (
            ancestor_sets(graph),
            complements_of_descendants(graph),
            narrowest_sets(graph),
            approximate_family(graph),
            neighbours(graph, ancestor_sets(graph)),
        ):
            assert closed(graph, family)
            assert set(family.masks()) <= set(complete.masks())
            assert family.masks()[0] == 0
            assert family.masks()[-1] == everything


def test_ancestor_sets_and_their_duals() -> None:
    graph = fork_join(1, 2)
    assert ancestor_sets(graph).masks() == [0, 0b1, 0b11, 0b101, 0b1101, 0b11111]
    duals = complements_of_descendants(graph).masks()
    assert duals == [0, 0b11, 0b111, 0b1101, 0b1111, 0b11111]
    assert len(ancestor_sets(chain(9))) == len(complements_of_descendants(chain(9)))


def test_neighbours_differ_in_one_value() -> None:
    for seed in range(40):
        graph = random_graph(seed, is_general=True)
        chosen = random.Random(seed).choice(lower_sets(graph))
        mask = sum(1 << v for v in chosen)
        family = family_of_masks(graph.node_count, [mask], label="one")
        expected = {
            sum(1 << v for v in other)
            for other in lower_sets(graph)
            for mine in (frozenset(), chosen, frozenset(range(graph.node_count)))
            if len(other ^ mine) == 1
        }
        found = set(neighbours(graph, family).masks())
        ends = {0, (1 << graph.node_count) - 1}
        assert found - ends == expected - ends


def test_narrowest_sets_are_the_least_cuts() -> None:
    for seed in range(120):
        graph = random_graph(seed, is_general=True)
        rows = masks_of_rows(
            narrowest_lower_sets(graph.memory_bytes, graph.edges, graph.order_edges)
        )

        def width(lower: frozenset[int], graph: ForwardGraph = graph) -> int:
            boundary = {u for u, v in graph.edges if u in lower and v not in lower}
            return sum(graph.memory_bytes[u] for u in boundary)

        for v in range(graph.node_count):
            after = set(graph.all_successors[v])
            ending = [s for s in lower_sets(graph) if v in s and not s & after]
            least = min(map(width, ending))
            narrowest = [s for s in ending if width(s) == least]
            smallest = frozenset.intersection(*narrowest)
            largest = frozenset.union(*narrowest)
            assert frozenset(members(rows[2 * v])) == smallest
            assert frozenset(members(rows[2 * v + 1])) == largest
            assert width(smallest) == width(largest) == least


def test_orders_are_topological() -> None:
    for seed in range(60):
        graph = random_graph(seed, is_general=True)
        for rule in RULES:
            # Refused by `prefixes` if they were not.
            assert len(prefixes(graph, rule(from_beginning(graph)))) > 1
            assert len(prefixes(graph, rule(from_end(graph))[::-1])) > 1


def test_rules_of_the_orders() -> None:
    graph = fork_join(2, 2)  # 0; 1 2; 3 4; 5
    forward = from_beginning(graph)
    assert breadth_first(forward) == [0, 1, 3, 2, 4, 5]
    assert depth_first(forward) == [0, 3, 4, 1, 2, 5]
    assert by_depth(forward) == [0, 1, 3, 2, 4, 5]
    wide = ForwardGraph.of_values(
        [1, 9, 1, 1, 1, 1], [1] * 6, graph.edges
    )  # the first branch begins with a large value
    assert narrow_first(from_beginning(wide)) == [0, 3, 4, 1, 2, 5]


def test_orders_that_are_none_are_refused() -> None:
    graph = chain(3)
    with pytest.raises(ValueError, match="value 2 comes before"):
        prefixes(graph, [0, 2, 1])
    with pytest.raises(ValueError, match="need each of 3 once"):
        prefixes(graph, [0, 1])
    with pytest.raises(ValueError, match="need each of 3 once"):
        prefixes(graph, [0, 0, 1, 2])


def test_rows_and_masks_are_one_thing() -> None:
    for nodes in (1, 63, 64, 65, 200):
        masks = [0, 1 << (nodes - 1), (1 << nodes) - 1]
        assert masks_of_rows(rows_of_masks(nodes, masks)) == masks
    family = family_of_masks(3, [0b110, 0b001, 0b110], label="some")
    assert family.masks() == [0, 0b001, 0b110, 0b111]
    assert contents(family).tolist()[2] == [False, True, True]
    assert members(0b1011) == [0, 1, 3]


def test_unions_join_the_same_graph_only() -> None:
    graph = fork_join(1, 2)
    union = ancestor_sets(graph) | complements_of_descendants(graph)
    assert set(union.masks()) == {
        *ancestor_sets(graph).masks(),
        *complements_of_descendants(graph).masks(),
    }
    assert union.label == "ancestor sets, complements of descendants"
    with pytest.raises(ValueError, match="5 and 3 values"):
        _ = ancestor_sets(graph) | ancestor_sets(chain(3))
