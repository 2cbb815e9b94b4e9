"""Retention: the table agrees with the judge, before and after every change."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.instances import INSTANCES
from tests.strategies import graphs

from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Limits
from remat.core.simulator import Trace, simulate
from remat.search.retention import RetentionTable, improve_order
from remat.solvers.chen import greedy_starts, segment_order


def replay(graph: TrainingGraph, order: list[int]) -> Trace:
    trace = simulate(graph, single_device(), schedule_from_order(graph, order))
    assert trace.violation is None
    return trace


def agrees(graph: TrainingGraph, table: RetentionTable) -> bool:
    trace = replay(graph, table.order())
    return (trace.peak_bytes[0], trace.serial_ns) == (table.peak_bytes, table.cost_ns)


def with_repeats(graph: TrainingGraph, seed: int) -> list[int]:
    """Every op once, and some again right before ops that read what they write."""
    generator = random.Random(seed)
    order: list[int] = []
    for op in store_all_order(graph):
        if op != BOUNDARY:
            for storage in graph.ops[op].reads:
                producer = graph.producers[storage]
                if (
                    producer is not None
                    and graph.ops[producer].is_recomputable
                    and generator.random() < 0.5
                ):
                    order += recomputation(graph, producer, generator)
        order.append(op)
    return order


def recomputation(graph: TrainingGraph, op: int, generator: random.Random) -> list[int]:
    before: list[int] = []
    for storage in graph.ops[op].reads:
        producer = graph.producers[storage]
        if (
            producer is not None
            and graph.ops[producer].is_recomputable
            and generator.random() < 0.3
        ):
            before += recomputation(graph, producer, generator)
    return [*before, op]


@pytest.mark.parametrize("name", INSTANCES)
def test_table_of_store_all_agrees_with_the_judge(name: str):
    graph = INSTANCES[name]().graph
    assert agrees(graph, RetentionTable(graph, store_all_order(graph)))


@given(graph=graphs(), seed=st.integers(0, 99))
def test_table_of_any_order_agrees_with_the_judge(graph: TrainingGraph, seed: int):
    assert agrees(graph, RetentionTable(graph, with_repeats(graph, seed)))


@given(graph=graphs(), seed=st.integers(0, 99))
def test_dropping_unread_runs_keeps_the_order_valid(graph: TrainingGraph, seed: int):
    order = with_repeats(graph, seed)
    table = RetentionTable(graph, order)
    before = table.cost_ns, table.peak_bytes
    table.drop_unread_runs()
    assert agrees(graph, RetentionTable(graph, table.order()))
    assert replay(graph, table.order()).peak_bytes[0] <= before[1]
    assert table.cost_ns <= before[0]


@given(graph=graphs(), seed=st.integers(0, 99), share=st.integers(0, 3))
def test_improving_is_monotone_and_within_the_budget(
    graph: TrainingGraph, seed: int, share: int
):
    order = with_repeats(graph, seed)
    before = replay(graph, order)
    budget = before.peak_bytes[0] * (3 + share) // 3
    improved = improve_order(graph, order, budget)
    after = replay(graph, improved)
    assert after.serial_ns <= before.serial_ns
    assert after.peak_bytes[0] <= budget


@given(graph=graphs(), seed=st.integers(0, 99))
def test_with_room_for_all_nothing_runs_twice(graph: TrainingGraph, seed: int):
    improved = improve_order(graph, with_repeats(graph, seed), 1 << 60)
    assert len(set(improved)) == len(improved)


@pytest.mark.parametrize("name", ["resnet", "transformer", "densenet", "unet"])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_table_agrees_after_many_changes(name: str, exponent: float):
    graph = INSTANCES[name]().graph
    order = segment_order(graph, greedy_starts(graph, 2**19))
    budget = replay(graph, order).peak_bytes[0] * 11 // 10
    table = RetentionTable(graph, order)
    table.drop_unread_runs()
    assert table.keep_instead_of_recompute(budget, Limits(), exponent)
    assert agrees(graph, table)
    assert table.peak_bytes <= budget


def op(name: str, reads: tuple[int, ...], write: int, phase: Phase) -> Op:
    return Op(
        name=name,
        reads=reads,
        writes=(write,),
        cost_ns=(1,),
        workspace_bytes=(0,),
        phase=phase,
    )


def test_one_byte_decides_whether_a_value_is_kept():
    sizes = {"x": 10, "small": 1, "large": 100, "g": 2}
    graph = TrainingGraph(
        name="by hand",
        storages=tuple(Storage(name=n, size_bytes=s) for n, s in sizes.items()),
        ops=(
            op("x", (), 0, Phase.FORWARD),
            op("small", (0,), 1, Phase.FORWARD),
            op("large", (1,), 2, Phase.FORWARD),
            op("g", (0, 1), 3, Phase.BACKWARD),
        ),
        forward_outputs=(2,),
        final_outputs=(3,),
    )
    again = [0, 1, 2, BOUNDARY, 0, 3]
    assert RetentionTable(graph, again).peak_bytes == 1 + 100
    assert improve_order(graph, again, 10 + 1 + 100 - 1) == again
    assert improve_order(graph, again, 10 + 1 + 100) == [0, 1, 2, BOUNDARY, 3]


def test_time_over_means_no_change():
    graph = INSTANCES["transformer"]().graph
    order = segment_order(graph, greedy_starts(graph, 2**19))
    table = RetentionTable(graph, order)
    assert not table.keep_instead_of_recompute(1 << 60, Limits.after(0))
    assert table.order() == order
