"""Eviction: the native core executes a graph as its Python twin does, run by run."""

import inspect
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import graphs

import remat.search.eviction
from remat.core.graph import TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.search.eviction import EvictionRule, evicting_order
from remat.search.eviction_run import run_evicting

shares = st.sampled_from([0.0, 0.3, 0.5, 1.0])
rules = st.builds(
    EvictionRule,
    size_exponent=st.sampled_from([0.0, 0.7, 1.0]),
    distance_exponent=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    ancestor_share=shares,
    spare_share=shares,
)


def peak_bytes(graph: TrainingGraph, order: Sequence[int]) -> int:
    platform = single_device(kind=graph.device_kinds[0])
    return simulate(graph, platform, schedule_from_order(graph, order)).peak_bytes[0]


@settings(max_examples=300)
@given(
    graphs(max_ops=12, sizes=st.integers(0, 9)), rules, st.integers(0, 110), st.data()
)
def test_run_evicting(
    graph: TrainingGraph, rule: EvictionRule, percent: int, data: st.DataObject
) -> None:
    limit_bytes = peak_bytes(graph, store_all_order(graph)) * percent // 100
    count = len(graph.storages)
    saved = data.draw(st.none() | st.sets(st.integers(0, count)))
    runs_per_op = data.draw(st.integers(1, 8))
    given_arguments: list[tuple[object, ...]] = []

    def note(*arguments: object) -> list[int] | None:
        given_arguments.append(arguments)
        return run_evicting(*arguments)  # pyright: ignore[reportArgumentType]

    remat.search.eviction.run_evicting, before = (
        note,
        remat.search.eviction.run_evicting,
    )
    try:
        order = evicting_order(
            graph, limit_bytes, rule=rule, runs_per_op=runs_per_op, saved=saved
        )
    finally:
        remat.search.eviction.run_evicting = before
    (arguments,) = given_arguments
    assert order == inspect.unwrap(run_evicting)(*arguments)
    assert order is None or peak_bytes(graph, order) <= limit_bytes
