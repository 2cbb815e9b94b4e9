"""Segments of the forward pass: what is kept, what runs again, and in which order."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.instances import INSTANCES
from tests.strategies import graphs

from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order
from remat.core.platform import single_device
from remat.core.simulator import Trace, simulate
from remat.reductions.segments import SegmentedGraph


def judged(graph: TrainingGraph, order: list[int]) -> Trace:
    trace = simulate(graph, single_device(), schedule_from_order(graph, order))
    assert trace.violation is None
    return trace


def random_segments(segmented: SegmentedGraph, seed: int, count: int) -> dict[int, int]:
    """Return segments that never decrease along what the ops depend on."""
    rng = random.Random(seed)
    found: dict[int, int] = {}
    for op in segmented.forward:
        low = max((found[p] for p in segmented.predecessors[op]), default=0)
        found[op] = min(count - 1, low + rng.choice([0, 0, 0, 1, 2]))
    return found


@pytest.mark.parametrize("reorders_backward", [True, False])
@pytest.mark.parametrize("name", INSTANCES)
def test_every_segmentation_is_a_valid_schedule(name: str, reorders_backward: bool):
    graph = INSTANCES[name]().graph
    segmented = SegmentedGraph(graph)
    for seed in range(20):
        segments = random_segments(segmented, seed, 2 + seed % 7)
        order = segmented.order(segments, reorders_backward=reorders_backward)
        judged(graph, order)
        runs = Counter(order)
        assert all(runs[op] <= 2 for op in segmented.forward)
        assert all(runs[op] == 1 for op in segmented.backward)
        last = max(segments.values())
        for op in segmented.forward:
            if segments[op] == last or not graph.ops[op].is_recomputable:
                assert runs[op] == 1


@given(graph=graphs(max_ops=9), seed=st.integers(0, 99), count=st.integers(1, 4))
def test_any_graph_can_be_cut(graph: TrainingGraph, seed: int, count: int):
    segmented = SegmentedGraph(graph)
    segments = random_segments(segmented, seed, count)
    for reorders_backward in (True, False):
        judged(graph, segmented.order(segments, reorders_backward=reorders_backward))


@pytest.mark.parametrize("name", INSTANCES)
def test_one_segment_computes_nothing_twice(name: str):
    graph = INSTANCES[name]().graph
    segmented = SegmentedGraph(graph)
    order = segmented.order(dict.fromkeys(segmented.forward, 0))
    assert order == [*segmented.forward, BOUNDARY, *segmented.backward]


def two_towers() -> TrainingGraph:
    """Two chains of two ops that a last op joins; backward alternates between them."""
    names = ["a1", "b1", "a2", "b2", "out"]
    storages = [Storage(name=n, size_bytes=8) for n in names]
    reads: list[tuple[int, ...]] = [(), (), (0,), (1,), (2, 3)]
    ops = [
        Op(
            name=n,
            reads=r,
            writes=(i,),
            cost_ns=(1,),
            workspace_bytes=(0,),
            phase=Phase.FORWARD,
        )
        for i, (n, r) in enumerate(zip(names, reads, strict=True))
    ]
    # Gradients: 5 is the tangent; backward of a1 and b1 end the step.
    storages += [Storage(name=f"g{i}", size_bytes=1) for i in range(5)]
    for name, read, write in (
        ("grad b2", (1, 5), 6),
        ("grad a2", (0, 5), 7),
        ("grad b1", (1, 6), 8),
        ("grad a1", (0, 7), 9),
    ):
        ops.append(
            Op(
                name=name,
                reads=read,
                writes=(write,),
                cost_ns=(1,),
                workspace_bytes=(0,),
                phase=Phase.BACKWARD,
            )
        )
    return TrainingGraph(
        name="towers",
        storages=tuple(storages),
        ops=tuple(ops),
        forward_outputs=(4,),
        tangents=(5,),
        final_outputs=(8, 9),
    )


def test_backward_follows_the_segments():
    graph = two_towers()
    segmented = SegmentedGraph(graph)
    # Tower a first, then tower b, then the join: backward of b, then of a.
    order = segmented.order({0: 0, 2: 0, 1: 1, 3: 1, 4: 2})
    assert order == [0, 2, 1, 3, 4, BOUNDARY, 1, 5, 7, 0, 6, 8]
    in_graph_order = segmented.order(
        {0: 0, 2: 0, 1: 1, 3: 1, 4: 2}, reorders_backward=False
    )
    assert in_graph_order == [0, 2, 1, 3, 4, BOUNDARY, 1, 5, 0, 6, 7, 8]
    steps_of_backward = 9
    by_segment, by_graph = (
        max(judged(graph, o).timeline_bytes[0][-steps_of_backward:])
        for o in (order, in_graph_order)
    )
    assert (by_segment, by_graph) == (11, 19)


def ladder() -> TrainingGraph:
    """Four forward ops in a row, the first read by the third and the fourth as well.

    Sizes 16, 8, 4, 2 bytes, gradients 1 byte; backward of an op reads the op before it.
    """

    def op(name: str, reads: tuple[int, ...], write: int, phase: Phase) -> Op:
        return Op(
            name=name,
            reads=reads,
            writes=(write,),
            cost_ns=(1,),
            workspace_bytes=(0,),
            phase=phase,
        )

    sizes = [16, 8, 4, 2, *[1] * 5]
    return TrainingGraph(
        name="ladder",
        storages=tuple(
            Storage(name=f"s{i}", size_bytes=size) for i, size in enumerate(sizes)
        ),
        ops=(
            op("a", (), 0, Phase.FORWARD),
            op("b", (0,), 1, Phase.FORWARD),
            op("c", (0, 1), 2, Phase.FORWARD),
            op("d", (0, 2), 3, Phase.FORWARD),
            # Storage 4 is the tangent.
            op("grad d", (2, 4), 5, Phase.BACKWARD),
            op("grad c", (1, 5), 6, Phase.BACKWARD),
            op("grad b", (0, 6), 7, Phase.BACKWARD),
            op("grad a", (7,), 8, Phase.BACKWARD),
        ),
        forward_outputs=(3,),
        tangents=(4,),
        final_outputs=(8,),
    )


@pytest.mark.parametrize(
    ("segments", "kept", "recomputed", "peak_bytes"),
    [
        # The segment right behind reads each: all are kept, beside the tangent at last.
        ((0, 1, 2, 3), {0, 1, 2, 3}, [], 31),
        ((0, 0, 1, 1), {0, 1, 2, 3}, [], 31),
        ((0, 1, 2, 2), {0, 1, 2, 3}, [], 31),
        # Only its own segment reads b: gone before d, and computed again from a.
        ((0, 1, 1, 2), {0, 2, 3}, [1], 28),
        ((0, 0, 0, 1), {0, 2, 3}, [1], 28),
    ],
)
def test_what_any_later_segment_reads_is_kept(
    segments: tuple[int, ...], kept: set[int], recomputed: list[int], peak_bytes: int
):
    graph = ladder()
    segmented = SegmentedGraph(graph)
    segment_of = dict(enumerate(segments))
    forward_values = {0, 1, 2, 3}
    assert segmented.kept(segment_of) & forward_values == kept
    order = segmented.order(segment_of)
    after = order[order.index(BOUNDARY) :]
    assert [op for op in after if 0 <= op < graph.forward_count] == recomputed
    trace = judged(graph, order)
    assert trace.recomputed_ns == len(recomputed)
    assert trace.peak_bytes == (peak_bytes,)


def test_work_of_the_caller_comes_last():
    graph = two_towers()
    note = Op(
        name="note",
        reads=(0,),
        writes=(),
        cost_ns=(1,),
        workspace_bytes=(0,),
        phase=Phase.BACKWARD,
    )
    optimizer = Op(
        name="optimizer",
        reads=(8,),
        writes=(),
        cost_ns=(1,),
        workspace_bytes=(0,),
        phase=Phase.BACKWARD,
        non_recomputable="it is done by the caller",
        is_external=True,
    )
    graph = TrainingGraph(
        name=graph.name,
        storages=graph.storages,
        ops=(*graph.ops, note, optimizer),
        forward_outputs=graph.forward_outputs,
        tangents=graph.tangents,
        final_outputs=(8,),
    )
    # The gradient of tower b is there before tower a, of which note reads.
    order = SegmentedGraph(graph).order({0: 0, 2: 0, 1: 1, 3: 1, 4: 2})
    assert order[-3:] == [0, 9, 10]
    judged(graph, order)


def test_hidden_state_advances_in_op_order():
    ops = [
        Op(
            name=f"draw{i}",
            reads=(),
            writes=(i,),
            cost_ns=(1,),
            workspace_bytes=(0,),
            phase=Phase.FORWARD,
            is_ordered=True,
        )
        for i in range(3)
    ]
    graph = TrainingGraph(
        name="draws",
        storages=tuple(Storage(name=f"s{i}", size_bytes=1) for i in range(3)),
        ops=tuple(ops),
        forward_outputs=(0, 1, 2),
    )
    assert SegmentedGraph(graph).predecessors == {0: (), 1: (0,), 2: (1,)}
