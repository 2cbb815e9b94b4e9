"""Moves of runs: the native core weighs them as its Python twin does."""

import inspect

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.test_local_moves import drawn_moves, judged
from tests.search.test_retention import with_repeats
from tests.strategies import graphs

from remat.core.graph import TrainingGraph
from remat.core.liveness import store_all_order
from remat.search.local_moves import passes_of, weigh_moves
from remat.search.plain_numbers import plain_numbers


@settings(max_examples=80)
@given(graphs(max_ops=9), st.integers(0, 999))
def test_weigh_moves(graph: TrainingGraph, seed: int) -> None:
    order = with_repeats(graph, seed)
    if judged(graph, order).violation is not None:
        order = store_all_order(graph)
    moves = drawn_moves(graph, order, seed, min(6, len(order) - 1))
    question = (plain_numbers(graph), passes_of(graph), order, moves)
    assert weigh_moves(*question) == inspect.unwrap(weigh_moves)(*question)
