"""The formulas: worked by hand, by definition, and executed by the judge."""

import pytest
from tests.algorithms.lower_sets.brute_force import random_graph

from remat.algorithms.lower_sets.canonical import (
    canonical_schedule,
    implied_training_graph,
)
from remat.algorithms.lower_sets.formula import (
    cached_values,
    check_segmentation,
    overhead,
    peak_bytes,
    segment_peaks_bytes,
)
from remat.algorithms.lower_sets.forward_graph import ForwardGraph, Owed
from remat.core.liveness import insert_discards
from remat.core.platform import single_device
from remat.core.schedule import Boundary, Compute, Discard, Schedule, Step
from remat.core.simulator import simulate

DIAMOND = ForwardGraph(
    memory_bytes=(2, 3, 5, 1),
    cost=(1, 10, 10, 1),
    edges=((0, 1), (0, 2), (1, 3), (2, 3)),
    name="diamond",
)


@pytest.mark.parametrize(
    ("segment_of", "charged", "free", "peaks"),
    [
        # {01} {0123}: 0 + 2*5 + gradients of 2 and 3 and value 2, then 5 + 2*6.
        ((0, 0, 1, 1), 11, 0, [21, 17]),
        ((0, 1, 1, 2), 1, 0, [12, 19, 12]),
        ((0, 0, 0, 0), 22, 0, [22]),
    ],
)
def test_worked_example(
    segment_of: tuple[int, ...], charged: int, free: int, peaks: list[int]
) -> None:
    assert segment_peaks_bytes(DIAMOND, segment_of) == peaks
    assert peak_bytes(DIAMOND, segment_of) == max(peaks)
    assert overhead(DIAMOND, segment_of, charge_last=True) == charged
    assert overhead(DIAMOND, segment_of) == free
    graph = implied_training_graph(DIAMOND)
    for charge_last, cost in ((True, charged), (False, free)):
        schedule = canonical_schedule(DIAMOND, segment_of, charge_last=charge_last)
        trace = simulate(graph, single_device(), schedule)
        assert trace.is_valid
        assert trace.peak_bytes == (max(peaks),)
        assert trace.recomputed_ns == cost


def test_cached_values_are_those_read_later() -> None:
    assert cached_values(DIAMOND, (0, 0, 1, 1)) == [0, 1]
    assert cached_values(DIAMOND, (0, 1, 1, 2)) == [0, 1, 2]
    assert cached_values(DIAMOND, (0, 0, 0, 0)) == []


def segmentations(graph: ForwardGraph) -> list[tuple[int, ...]]:
    """One segment; one a value; and consecutive values two by two."""
    position = {v: p for p, v in enumerate(graph.topological_order)}
    nodes = range(graph.node_count)
    return [
        tuple(position[v] // size for v in nodes)
        for size in (graph.node_count, 1, 2, 3)
    ]


def test_the_judge_finds_the_formulas_peak_segment_by_segment() -> None:
    for seed in range(150):
        graph = random_graph(seed)
        training = implied_training_graph(graph)
        for segment_of in segmentations(graph):
            for charge_last in (False, True):
                schedule = canonical_schedule(
                    graph, segment_of, charge_last=charge_last
                )
                trace = simulate(training, single_device(), schedule)
                assert trace.is_valid, trace.violation
                assert trace.peak_bytes == (peak_bytes(graph, segment_of),)
                assert trace.recomputed_ns == overhead(
                    graph, segment_of, charge_last=charge_last
                )
                assert trace.live_after == (
                    frozenset(range(2 * graph.node_count, 3 * graph.node_count)),
                )


def test_each_value_runs_at_most_twice_and_each_backward_once() -> None:
    for seed in range(50):
        graph = random_graph(seed)
        for segment_of in segmentations(graph):
            schedule = canonical_schedule(graph, segment_of, charge_last=True)
            for op in range(2 * graph.node_count):
                runs = schedule.computes.count(op)
                assert runs in ({1, 2} if op < graph.node_count else {1})


def test_liveness_keeps_the_computations_and_lowers_the_peak() -> None:
    lower = 0
    for seed in range(50):
        graph = random_graph(seed)
        training = implied_training_graph(graph)
        for segment_of in segmentations(graph):
            schedule = canonical_schedule(graph, segment_of)
            tighter = insert_discards(training, schedule.steps)
            trace = simulate(training, single_device(), tighter)
            assert trace.is_valid
            assert tighter.computes == schedule.computes
            assert trace.peak_bytes[0] <= peak_bytes(graph, segment_of)
            lower += trace.peak_bytes[0] < peak_bytes(graph, segment_of)
    assert lower > 50


def test_discards_come_at_segment_ends_only() -> None:
    schedule = canonical_schedule(DIAMOND, (0, 1, 1, 2))
    assert isinstance(schedule, Schedule)
    letters: dict[type[Step], str] = {Compute: "c", Discard: "d", Boundary: "|"}
    kinds = "".join(letters[type(step)] for step in schedule.steps)
    # All is kept of {0} and {1, 2}; the backward of each segment runs as a block.
    assert kinds == "cccc|cdccdddcdddd"


def test_the_implied_graph_is_the_papers_alone() -> None:
    for change in (
        ForwardGraph(memory_bytes=(1,), cost=(1,), edges=(), segment_bytes=(1,)),
        ForwardGraph(memory_bytes=(1,), cost=(1,), edges=(), owed=Owed.NOTHING),
    ):
        with pytest.raises(ValueError, match="paper"):
            implied_training_graph(change)
    as_paper = ForwardGraph(memory_bytes=(1,), cost=(1,), edges=(), segment_bytes=(2,))
    assert implied_training_graph(as_paper).forward_count == 1


@pytest.mark.parametrize(
    ("segment_of", "words"),
    [
        ((0, 0, 0), "3 segment indices for 4"),
        ((0, 0, 0, 2), "none empty"),
        ((0, 0, 0, 1.0), "segment of value 3 is 1.0; it must be an integer"),
        ((0, -1, 0, 1), "none empty"),
        ((1, 0, 1, 1), "value 1 in segment 0 follows value 0 in the later segment 1"),
    ],
)
def test_bad_segmentations_are_refused(segment_of: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=r".") as info:
        check_segmentation(DIAMOND, segment_of)
    assert words in str(info.value)
