"""What a forward graph refuses, and in which words."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from remat.algorithms.lower_sets.forward_graph import MOST_TOTAL, ForwardGraph, Owed
from remat.core.errors import InvalidGraphError

DIAMOND = ForwardGraph(
    memory_bytes=(2, 3, 5, 1),
    cost=(1, 10, 10, 1),
    edges=((0, 1), (0, 2), (1, 3), (2, 3)),
    name="diamond",
)


def test_neighbours_and_order() -> None:
    assert DIAMOND.node_count == 4
    assert DIAMOND.predecessors == ((), (0,), (0,), (1, 2))
    assert DIAMOND.successors == ((1, 2), (3,), (3,), ())
    assert DIAMOND.topological_order == (0, 1, 2, 3)
    assert DIAMOND.charged_bytes == (4, 6, 10, 2)
    assert DIAMOND.owed is Owed.CONSUMERS


def test_order_edges_order_without_being_read() -> None:
    graph = replace(DIAMOND, order_edges=((2, 1), (0, 1)))
    assert graph.topological_order == (0, 2, 1, 3)
    assert graph.predecessors == DIAMOND.predecessors
    assert graph.all_predecessors == ((), (0, 2), (0,), (1, 2))
    assert graph.all_successors == ((1, 2), (3,), (1, 3), ())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_bytes": ()}, "at least one"),
        ({"memory_bytes": (2, 3, 5)}, "4 entries for 3"),
        ({"cost": (1,)}, "cost has 1 entries for 4"),
        ({"segment_bytes": (1, 2, 3)}, "segment_bytes has 3 entries for 4"),
        ({"memory_bytes": (2, -3, 5, 1)}, "memory_bytes of value 1 is -3"),
        ({"cost": (1, 10, -1, 1)}, "cost of value 2 is -1"),
        ({"segment_bytes": (1, 2, 3, -4)}, "segment_bytes of value 3 is -4"),
        ({"cost": (1, 10, 1.5, 1)}, "cost of value 2 is 1.5; need an integer"),
        ({"cost": (1, 10, True, 1)}, "cost of value 2 is True; need an integer"),
        ({"memory_bytes": 5}, "memory_bytes is 5; need a list"),
        ({"memory_bytes": "2351"}, "memory_bytes is '2351'; need a list"),
        ({"cost": None}, "cost is None; need a list"),
        ({"segment_bytes": (1, "2", 3, 4)}, "segment_bytes of value 1 is '2'; need an"),
        ({"edges": 3}, "edges is 3; need a list"),
        ({"edges": ((0,),)}, "edges has (0,); need pairs of integers (u, v)"),
        ({"edges": ((0, 1, 2),)}, "edges has (0, 1, 2); need pairs of integers"),
        ({"edges": ((0.0, 1),)}, "edges has (0.0, 1); need pairs of integers (u, v)"),
        ({"edges": ((False, 1),)}, "edges has (False, 1); need pairs of integers"),
        ({"edges": (7,)}, "edges has 7; need pairs of integers (u, v)"),
        ({"edges": ("01",)}, "edges has '01'; need pairs of integers (u, v)"),
        ({"order_edges": ((0, None),)}, "order_edges has (0, None); need pairs"),
        (
            {"owed": "all"},
            "owed is 'all'; it must be one of 'consumers', 'boundary', 'no",
        ),
        ({"memory_bytes": (1, 1.5, 1, 1), "names": ("a",)}, "1 names for 4 values"),
        ({"edges": ((0, 4),)}, "0->4, but the values are 0..3"),
        ({"edges": ((-1, 2),)}, "-1->2, but the values are 0..3"),
        ({"edges": ((2, 2),)}, "joins value 2 to itself"),
        ({"order_edges": ((2, 2),)}, "order_edges joins value 2 to itself"),
        ({"edges": ((0, 1), (0, 1))}, "0->1 twice"),
        ({"edges": ((1, 2), (2, 3), (3, 1))}, "3 values are on or behind a cycle"),
        ({"order_edges": ((3, 0),)}, "4 values are on or behind a cycle"),
        ({"names": ("a",)}, "1 names for 4 values"),
        ({"memory_bytes": (2**60, 1, 1, 1)}, "larger unit"),
        ({"segment_bytes": (2**62, 1, 1, 1)}, "larger unit"),
        ({"cost": (2**60, 2**60, 0, 0)}, f"more than {MOST_TOTAL:_}"),
    ],
)
def test_bad_graphs_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidGraphError, match="diamond: ") as info:
        replace(DIAMOND, **change)
    assert words in str(info.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (([1, 1], [1, 1], [(0,)]), "edges has (0,); need pairs of integers (u, v)"),
        (([1, 1], [1, 1], [(0.0, 1)]), "edges has (0.0, 1); need pairs of integers"),
        (([1, 1], 2, [(0, 1)]), "cost is 2; need a list"),
        (([1, 1.0], [1, 1], [(0, 1)]), "memory_bytes of value 1 is 1.0; need an"),
    ],
)
def test_what_users_give_is_checked_before_it_is_used(
    values: tuple[Any, Any, Any], words: str
) -> None:
    with pytest.raises(InvalidGraphError, match="mine: ") as info:
        ForwardGraph.of_values(*values, name="mine")
    assert words in str(info.value)


def test_integers_of_numpy_are_integers() -> None:
    values: Any = (
        np.array(DIAMOND.memory_bytes),
        np.array(DIAMOND.cost, dtype=np.uint8),
        np.array(DIAMOND.edges, dtype=np.int32),
    )
    graph = ForwardGraph.of_values(*values)
    assert replace(graph, name="diamond") == DIAMOND
    given = (*graph.memory_bytes, *graph.cost, *(end for e in graph.edges for end in e))
    assert {type(number) for number in given} == {int}
    with_charges: Any = {"segment_bytes": np.array([1, 2, 3, 4]), "owed": "nothing"}
    charged = replace(DIAMOND, **with_charges)
    assert charged.charged_bytes == (1, 2, 3, 4)
    assert charged.owed is Owed.NOTHING
    values = ([1], np.array([1.5]), [])
    with pytest.raises(InvalidGraphError, match=r"cost of value 0 is .*1\.5"):
        ForwardGraph.of_values(*values)


def test_values_without_bytes_are_refused_where_users_enter() -> None:
    with pytest.raises(InvalidGraphError, match="value 1 is 0; need 1 or more"):
        ForwardGraph.of_values([1, 0], [1, 1], [(0, 1)])
    with pytest.raises(InvalidGraphError, match="at least one"):
        ForwardGraph.of_values([], [], [])
    inner = ForwardGraph(memory_bytes=(1, 0), cost=(1, 0), edges=((0, 1),))
    assert inner.charged_bytes == (2, 0)


def test_names_appear_in_messages() -> None:
    with pytest.raises(InvalidGraphError, match="value 1 'relu'"):
        ForwardGraph(
            memory_bytes=(1, -1), cost=(1, 1), edges=(), names=("conv", "relu")
        )
