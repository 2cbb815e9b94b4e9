"""Retention: the native core takes out the runs that its Python twins take out."""

import inspect
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instances import INSTANCES
from tests.search.test_retention import with_repeats
from tests.strategies import graphs

from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY, store_all_order
from remat.search.plain_numbers import plain_numbers
from remat.search.retention_table import (
    Numbers,
    improve_retention,
    weigh_order,
    without_unread_runs,
)

orders = st.builds(
    lambda graph, seed: (graph, with_repeats(graph, seed)),
    graphs(max_ops=12, sizes=st.integers(0, 9)),
    st.integers(0, 99),
)
exponents = st.sampled_from([0.0, 0.5, 1.0, 1.7])


@settings(max_examples=200)
@given(orders)
def test_weigh_order(case: tuple[TrainingGraph, list[int]]) -> None:
    graph, order = case
    numbers = plain_numbers(graph)
    expected = inspect.unwrap(weigh_order)(numbers, order)
    assert weigh_order(numbers, order) == expected


@settings(max_examples=200)
@given(orders)
def test_without_unread_runs(case: tuple[TrainingGraph, list[int]]) -> None:
    graph, order = case
    numbers = plain_numbers(graph)
    expected = inspect.unwrap(without_unread_runs)(numbers, order)
    assert without_unread_runs(numbers, order) == expected


@settings(max_examples=300)
@given(orders, st.integers(0, 130), exponents)
def test_improve_retention(
    case: tuple[TrainingGraph, list[int]], percent: int, exponent: float
) -> None:
    graph, order = case
    numbers = plain_numbers(graph)
    _, peak_bytes = weigh_order(numbers, order)
    question = (numbers, order, peak_bytes * percent // 100, exponent, None)
    answer = improve_retention(*question)
    assert answer == inspect.unwrap(improve_retention)(*question)
    # Nothing is left that nobody reads, and what it weighs is what it says.
    assert without_unread_runs(numbers, answer[0]) == answer


@pytest.mark.parametrize("name", ["resnet", "transformer", "densenet", "unet"])
@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_improve_retention_of_networks(name: str, exponent: float) -> None:
    graph = INSTANCES[name]().graph
    generator = random.Random(name)
    numbers = plain_numbers(graph)
    again = [op for op in range(graph.forward_count) if graph.ops[op].is_recomputable]
    order: list[int] = []
    for op in store_all_order(graph):
        order.append(op)
        if op == BOUNDARY:
            order += again
        elif op in again and generator.random() < 0.3:
            order.append(op)
    _, least, _ = without_unread_runs(numbers, store_all_order(graph))
    for percent in (60, 80, 100):
        budget = weigh_order(numbers, order)[1] * percent // 100
        question = (numbers, order, budget, exponent, None)
        answer = improve_retention(*question)
        assert answer == inspect.unwrap(improve_retention)(*question)
        assert answer[1] >= least


def test_time_over_means_no_change_but_of_unread_runs() -> None:
    graph = INSTANCES["transformer"]().graph
    numbers, order = plain_numbers(graph), with_repeats(graph, 1)
    assert improve_retention(numbers, order, 1 << 60, 1.0, 0.0) == without_unread_runs(
        numbers, order
    )


def one_op(**changes: object) -> Numbers:
    numbers = Numbers(
        reads=[(), (), ()],
        writes=[(0,), (), ()],
        sizes=[1],
        costs=[1],
        workspaces=[0],
        stays_once=[False],
        resident_bytes=0,
    )
    return numbers._replace(**changes)


def test_what_is_read_before_it_is_written_is_refused() -> None:
    with pytest.raises(KeyError):
        weigh_order(one_op(reads=[(0,), (), ()], writes=[(), (), ()]), [0, BOUNDARY])


@pytest.mark.parametrize("order", [[1], [-3], [BOUNDARY, 7]])
def test_ops_that_do_not_exist_are_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match=r"no such op|does not have"):
        weigh_order(one_op(), order)
