"""The smallest budget: below the bound nothing fits, whatever the schedule."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bounds.drawn_graphs import solved_cases
from tests.instances import INSTANCES
from tests.oracles import brute_force_smallest_budget
from tests.strategies import graphs

from remat.bounds.memory_bound import least_budget_bytes
from remat.core.bounds import peak_bound_bytes
from remat.core.errors import BudgetError
from remat.core.graph import TrainingGraph
from remat.core.units import format_bytes
from remat.planning.one_device import plan_graph
from remat.planning.smallest_budget import smallest_budget


def test_drawn_graphs_need_what_is_proved_and_nearly_always_no_more():
    smallest = {case.graph: case.smallest_bytes for case in solved_cases(100)}
    found = {graph: least_budget_bytes(graph, starts=99) for graph in smallest}
    assert all(found[graph] <= least for graph, least in smallest.items())
    met = sum(found[graph] == least for graph, least in smallest.items())
    alone = sum(peak_bound_bytes(graph) == least for graph, least in smallest.items())
    assert met == len(smallest)
    assert alone < len(smallest) * 9 // 10


@settings(max_examples=60, deadline=None)
@given(graph=graphs(max_ops=5, sizes=st.integers(0, 9), holds_outputs=True))
def test_no_bound_is_above_the_smallest_budget(graph: TrainingGraph):
    least = brute_force_smallest_budget(graph)
    if least is not None:
        assert peak_bound_bytes(graph) <= least_budget_bytes(graph) <= least


@pytest.mark.parametrize("name", ["mlp", "transformer", "once-only"])
def test_more_search_is_never_worse_and_all_of_it_is_below_a_known_budget(name: str):
    graph = INSTANCES[name]().graph
    found = [least_budget_bytes(graph, expansions=n) for n in (0, 1, 10, 100)]
    assert found == sorted(found)
    assert found[0] >= peak_bound_bytes(graph)
    assert found[-1] <= smallest_budget(graph).budget_bytes


def test_large_steps_are_searched_less():
    # A thousand gradients at the end: each of them may have come last.
    graph = INSTANCES["mlp"](300).graph
    assert least_budget_bytes(graph, starts=1) == least_budget_bytes(graph, starts=1)


def test_an_error_says_below_what_nothing_fits():
    graph = INSTANCES["resnet"]().graph
    bound_bytes = least_budget_bytes(graph)
    assert peak_bound_bytes(graph) < bound_bytes
    words = f"no schedule can fit below {format_bytes(bound_bytes)} "
    with pytest.raises(BudgetError, match=words) as caught:
        plan_graph(graph, budget=bound_bytes - 1)
    assert "no schedule fits in" in str(caught.value)
    assert caught.value.required_bytes >= bound_bytes
