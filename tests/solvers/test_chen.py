"""Chen's segments: the formula on chains, what is saved, and the search for b."""

from itertools import pairwise
from math import isqrt

import pytest
from tests.instances import INSTANCES, Network, transformer_like

from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Status, StopReason
from remat.core.simulator import Trace, simulate
from remat.planning.portfolio import solve
from remat.solvers.chen import (
    ChenGreedy,
    ChenLowerSets,
    ChenSqrt,
    crossing_bytes,
    greedy_starts,
    narrow_cuts,
    saved_at,
    segment_order,
    sqrt_starts,
)
from remat.testing import budgets_between, store_all_peak_bytes


def chain(length: int, *, size_bytes: int = 1) -> TrainingGraph:
    """A chain whose op i reads x[i-1]; backward op i reads x[i] and the gradient."""
    storages = [Storage(name="x0", size_bytes=0, is_resident=True)]
    storages += [
        Storage(name=f"x{i}", size_bytes=size_bytes) for i in range(1, length + 1)
    ]
    tangent = len(storages)
    storages += [
        Storage(name=f"g{i}", size_bytes=size_bytes) for i in range(length, -1, -1)
    ]

    def op(name: str, reads: tuple[int, ...], write: int, phase: Phase) -> Op:
        return Op(
            name=name,
            reads=reads,
            writes=(write,),
            cost_ns=(1,),
            workspace_bytes=(0,),
            phase=phase,
        )

    forward = [op(f"f{i}", (i - 1,), i, Phase.FORWARD) for i in range(1, length + 1)]
    backward = [
        op(f"b{i}", (i, tangent + length - i), tangent + length - i + 1, Phase.BACKWARD)
        for i in range(length, 0, -1)
    ]
    return TrainingGraph(
        name=f"chain-{length}",
        storages=tuple(storages),
        ops=(*forward, *backward),
        forward_outputs=(length,),
        tangents=(tangent,),
        final_outputs=(tangent + length,),
    )


def replay(graph: TrainingGraph, order: list[int]) -> Trace:
    trace = simulate(graph, single_device(), schedule_from_order(graph, order))
    assert trace.violation is None
    return trace


@pytest.mark.parametrize("root", [2, 3, 5, 10])
def test_on_a_chain_of_squares_memory_is_twice_the_root(root: int):
    # n = root^2 layers in root segments. When a segment is recomputed there are live:
    # the borders before it (at most root - 1), its inside (root), and two gradients.
    graph = chain(root * root)
    trace = replay(graph, segment_order(graph, sqrt_starts(graph)))
    assert trace.peak_bytes[0] <= 2 * root + 1
    assert store_all_peak_bytes(graph) >= root * root


@pytest.mark.parametrize("root", [2, 3, 5, 10])
def test_on_a_chain_all_but_the_borders_and_the_last_segment_run_twice(root: int):
    graph = chain(root * root)
    trace = replay(graph, segment_order(graph, sqrt_starts(graph)))
    assert trace.recomputed_ns == (root - 1) * (root - 1)


def test_segments_are_recomputed_when_backward_reaches_them():
    graph = chain(4)
    assert segment_order(graph, [0, 2]) == [0, 1, 2, 3, BOUNDARY, 4, 5, 6, 0, 7]


def test_one_segment_stores_everything():
    graph = chain(5)
    assert segment_order(graph, []) == [0, 1, 2, 3, 4, BOUNDARY, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("length", [1, 2, 7, 16, 17, 99])
def test_sqrt_segments_are_about_the_root_long(length: int):
    starts = sqrt_starts(chain(length))
    assert starts[0] == 0
    lengths = {b - a for a, b in pairwise(starts)}
    assert all(isqrt(length) <= one <= isqrt(length) + 1 for one in lengths)


def test_greedy_segments_end_when_they_exceed_their_bytes():
    graph = chain(7, size_bytes=10)
    assert greedy_starts(graph, 0) == [0, 1, 2, 3, 4, 5, 6]
    assert greedy_starts(graph, 9) == [0, 1, 2, 3, 4, 5, 6]
    assert greedy_starts(graph, 10) == [0, 2, 4, 6]
    assert greedy_starts(graph, 29) == [0, 3, 6]
    assert greedy_starts(graph, 1_000) == [0]


@pytest.mark.parametrize("name", INSTANCES)
def test_every_segmentation_is_a_valid_schedule(name: str):
    graph = INSTANCES[name]().graph
    for segment_bytes in (0, 2**12, 2**17, 2**20):
        starts = greedy_starts(graph, segment_bytes)
        order = segment_order(graph, starts)
        replay(graph, order)
        assert max(order.count(op) for op in set(order)) <= 2


@pytest.mark.parametrize("solver", [ChenSqrt(), ChenGreedy(), ChenLowerSets()])
def test_what_does_not_fit_is_unknown_and_says_what_was_needed(
    solver: ChenSqrt | ChenGreedy | ChenLowerSets,
):
    graph = chain(16, size_bytes=1_000)
    result = solve(Problem(graph=graph, platform=single_device(3_500)), solver)
    assert result.status is Status.UNKNOWN
    assert "or more; the budget is" in result.message


def test_greedy_finds_the_cheapest_of_its_grid_and_better():
    graph = INSTANCES["resnet"]().graph
    for budget in budgets_between(graph, 5):
        problem = Problem(graph=graph, platform=single_device(budget))
        found = solve(problem, ChenGreedy()).cost_ns
        root = solve(problem, ChenSqrt()).cost_ns
        assert root is None or (found is not None and found <= root)
        for segment_bytes in ChenGreedy().grid(graph):
            order = segment_order(graph, greedy_starts(graph, segment_bytes))
            trace = simulate(graph, problem.platform, schedule_from_order(graph, order))
            assert not trace.is_valid or (found or 0) <= trace.serial_ns


def test_greedy_stops_at_the_deadline():
    graph = chain(16)
    problem = Problem(graph=graph, platform=single_device(100))
    result = solve(problem, ChenGreedy(), limits=Limits.after(0))
    assert result.stop_reason is StopReason.TIME_LIMIT
    assert result.status is Status.UNKNOWN


def test_lower_sets_of_a_chain_are_cut_at_the_next_multiple_of_a_part():
    # Nine values, of which the last is read by nobody: 8 bytes, 10 candidates, so parts
    # of 8 // 3 = 2 bytes. Truncation leaves the last value a segment of its own.
    order = ChenLowerSets().order(chain(9))
    assert order[:10] == [0, 1, 2, 3, 4, 5, 6, 7, 8, BOUNDARY]
    assert order[10:] == [9, 10, 6, 11, 12, 4, 13, 14, 2, 15, 16, 0, 17]


def test_lower_sets_are_not_cut_where_branches_run_side_by_side():
    net = Network("branches")

    def layer(name: str, *reads: int) -> int:
        return net.one(
            name, list(reads), 1000, 50_000, saves_inputs=True, parameter_bytes=10
        )

    stem = layer("stem 2", layer("stem 1", net.input("x", 64)))
    left = layer("left 2", layer("left 1", stem))
    right = layer("right 2", layer("right 1", stem))
    join = layer("join", left, right)
    graph = net.instance(layer("head", join)).graph
    names = [graph.ops[op].name for op in range(graph.forward_count)]
    # Candidates, in values: 0, 1, 2, 7, 8. The first of at least half the bytes is the
    # one that ends with the join; backward of the head reads it.
    order = ChenLowerSets().order(graph)
    again = [op for op in order[graph.forward_count + 1 :] if op < graph.forward_count]
    trace = replay(graph, order)
    assert trace.recomputed_ns == 6 * 50_000
    assert {names[op] for op in again} == {*names} - {"join", "head"}


@pytest.mark.parametrize("name", INSTANCES)
def test_every_segmentation_at_lower_sets_is_a_valid_schedule(name: str):
    graph = INSTANCES[name]().graph
    order = ChenLowerSets().order(graph)
    replay(graph, order)
    assert max(order.count(op) for op in set(order)) <= 2


def test_values_cannot_be_merged_into_none():
    with pytest.raises(ValueError, match="max_nodes of ChenLowerSets is 0"):
        ChenLowerSets(max_nodes=0)


def test_lower_sets_where_nothing_may_run_again_keep_everything():
    net = Network("once")
    value = net.one("draw", [net.input("x", 64)], 100, 1000, once="it draws")
    graph = net.instance(value).graph
    trace = replay(graph, ChenLowerSets().order(graph))
    assert trace.recomputed_ns == 0


def test_crossing_bytes_count_what_is_read_later():
    # Before op i of a chain, exactly x[i-1] crosses; x0 is resident.
    assert crossing_bytes(chain(4, size_bytes=10)) == [0, 10, 10, 10]


def test_narrow_cuts_find_the_blocks():
    instance = transformer_like(6)
    graph = instance.graph
    written = sum(
        graph.storages[s].size_bytes
        for op in graph.ops[: graph.forward_count]
        for s in op.writes
    )
    cuts = narrow_cuts(graph, written // 6)
    crossing = crossing_bytes(graph)
    least = min(crossing[start] for start in instance.block_starts[1:])
    assert cuts
    assert all(crossing[cut] <= least + 16 for cut in cuts)


def test_saved_at_a_cut_is_what_crosses_it():
    graph = chain(6)
    assert saved_at(graph, [2, 4]) == {2, 4}
