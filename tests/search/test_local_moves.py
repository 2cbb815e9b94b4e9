"""Orders that are changed a little: the judge says the same after every move."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instances import INSTANCES
from tests.search.test_retention import with_repeats
from tests.strategies import graphs

from remat.core.graph import TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.simulator import Trace, simulate
from remat.native import core
from remat.search.local_moves import (
    Aim,
    MoveKind,
    Passes,
    may_change,
    passes_of,
    search_orders,
    weigh_moves,
)
from remat.search.plain_numbers import plain_numbers

needs_core = pytest.mark.skipif(core() is None, reason="there is no native core")


def judged(graph: TrainingGraph, order: Sequence[int]) -> Trace:
    return simulate(graph, single_device(), schedule_from_order(graph, order))


def moved(order: list[int], kind: int, number: int, target: int) -> list[int]:
    """Return an order after a move, whether the judge allows it or not."""
    if kind == MoveKind.PUT:
        return [*order[:number], target, *order[number:]]
    without = [*order[:number], *order[number + 1 :]]
    if kind == MoveKind.MOVE:
        without.insert(target - (number < target), order[number])
    return without


def drawn_moves(
    graph: TrainingGraph, order: list[int], seed: int, count: int
) -> list[tuple[int, int, int]]:
    """Return moves of runs that are there, whichever of those before are made."""
    generator = random.Random(seed)
    least = len(order) - count
    moves: list[tuple[int, int, int]] = []
    for _ in range(count):
        kind = generator.choice(list(MoveKind))
        count_of = len(graph.ops) if kind == MoveKind.PUT else least
        moves.append((kind, generator.randrange(least), generator.randrange(count_of)))
    return moves


@settings(max_examples=120)
@given(graphs(max_ops=9), st.integers(0, 999))
def test_the_judge_says_the_same_after_every_move(
    graph: TrainingGraph, seed: int
) -> None:
    order = with_repeats(graph, seed)
    if judged(graph, order).violation is not None:
        order = store_all_order(graph)
    moves = drawn_moves(graph, order, seed, min(8, len(order) - 1))
    weighed = weigh_moves(plain_numbers(graph), passes_of(graph), order, moves)
    for move, (is_made, cost_ns, peak_bytes) in zip(moves, weighed, strict=True):
        changed = moved(order, *move)
        if is_made:
            order = changed
        elif order[move[1]] >= 0 or move[0] == MoveKind.PUT:
            ops = [
                graph.ops[k]
                for k in (order[move[1]], move[2])
                if k >= 0 and k < len(graph.ops)
            ]
            is_callers = any(op.is_external for op in ops)
            assert is_callers or judged(graph, changed).violation is not None
        trace = judged(graph, order)
        assert trace.violation is None
        assert (cost_ns, peak_bytes) == (trace.serial_ns, trace.peak_bytes[0])


@needs_core
@settings(max_examples=80)
@given(graphs(max_ops=9), st.integers(0, 100), st.integers(0, 99))
def test_what_a_search_finds_is_what_it_says(
    graph: TrainingGraph, percent: int, seed: int
) -> None:
    order = store_all_order(graph)
    numbers, passes = plain_numbers(graph), passes_of(graph)
    before = judged(graph, order)
    budget_bytes = before.peak_bytes[0] * percent // 100
    aim = Aim(budget_bytes, 0, 20_000, seed)
    found = search_orders(numbers, passes, order, aim, 3.0, 0.1, None)
    trace = judged(graph, found.order)
    assert trace.violation is None
    assert (found.cost_ns, found.peak_bytes) == (trace.serial_ns, trace.peak_bytes[0])
    assert found.peak_bytes <= max(budget_bytes, before.peak_bytes[0])
    assert search_orders(numbers, passes, order, aim, 3.0, 0.1, None) == found


@needs_core
@pytest.mark.parametrize("name", ["transformer", "resnet", "unet"])
def test_searches_of_networks_end_with_what_the_judge_says(name: str) -> None:
    graph = INSTANCES[name]().graph
    order = store_all_order(graph)
    before = judged(graph, order)
    budget_bytes = before.peak_bytes[0] * 3 // 4
    aim = Aim(budget_bytes, 0, 300_000, 1)
    found = search_orders(
        plain_numbers(graph), passes_of(graph), order, aim, 100.0, 1.0, None
    )
    trace = judged(graph, found.order)
    assert trace.violation is None
    assert (found.cost_ns, found.peak_bytes) == (trace.serial_ns, trace.peak_bytes[0])
    # From an order that does not fit to one that does.
    assert found.peak_bytes <= budget_bytes
    assert found.cost_ns < 2 * before.serial_ns


@needs_core
def test_a_search_ends_where_it_is_enough() -> None:
    graph = INSTANCES["transformer"]().graph
    numbers, passes, order = (
        plain_numbers(graph),
        passes_of(graph),
        store_all_order(graph),
    )
    trace = judged(graph, order)
    aim = Aim(trace.peak_bytes[0], trace.serial_ns, 2**27, 0)
    found = search_orders(numbers, passes, order, aim, 0.0, 0.0, None)
    assert (found.order, found.effort) == (order, 0)


@needs_core
@pytest.mark.parametrize("order", [[0], [0, -1, -1], [-1, 0], [5, -1], []], ids=str)
def test_orders_that_the_judge_refuses_are_refused(order: list[int]) -> None:
    graph = INSTANCES["mlp"]().graph
    with pytest.raises(ValueError, match=r"order|storage|run|pass"):
        search_orders(
            plain_numbers(graph),
            passes_of(graph),
            order,
            Aim(0, 0, 9, 0),
            0.0,
            0.0,
            None,
        )


def test_what_the_caller_does_is_done_once_and_nothing_runs_too_often() -> None:
    own, callers = 0, 1
    passes = Passes(
        may_rerun=[True, True],
        is_ordered=[False, False],
        is_external=[False, True],
        forward_count=1,
    )
    assert may_change(passes, [own] * 64 + [-1, callers])
    assert not may_change(passes, [own] * 65 + [-1, callers])
    assert not may_change(passes, [own, -1, callers, callers])
