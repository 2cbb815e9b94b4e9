"""What a stage is measured at: options, what they drop, and scratch memory by hand."""

import pytest
from tests.instances import Network

from remat.core.graph import TrainingGraph
from remat.reductions.stage_parts import (
    StagePart,
    scratch_bytes,
    stage_of_part,
    stage_part,
)


def block(costs: tuple[int, int, int]) -> TrainingGraph:
    """Three ops with parameters in a row, all of which save their inputs."""
    net = Network("block")
    y = net.input("x", 64)
    for index, cost in enumerate(costs):
        y = net.one(f"f{index}", [y], 1000, cost, saves_inputs=True, parameter_bytes=8)
    return net.instance(y).graph


def whole(graph: TrainingGraph) -> StagePart:
    forward = range(graph.forward_count)
    (end,) = graph.ops[graph.forward_count - 1].writes
    backward = range(graph.forward_count, len(graph.ops))
    return stage_part(
        graph, forward=forward, backward=backward, ends=(end,), kind_index=0
    )


def names(graph: TrainingGraph, ops: tuple[int, ...]) -> list[str]:
    return [graph.ops[op].name for op in ops]


def test_what_is_cheap_for_its_bytes_may_be_dropped():
    graph = block((5, 30, 65))
    part = whole(graph)
    # The first output takes 5 % of forward to compute again, both take 35 %.
    assert [len(option.kept) for option in part.options] == [2, 1, 0]
    everything, first, both = part.options
    assert names(graph, everything.backward) == [f"f{i} backward" for i in (2, 1, 0)]
    assert names(graph, first.backward) == [
        "f2 backward",
        "f0",
        "f1 backward",
        "f0 backward",
    ]
    # What is computed again on the way stays for those that read it next.
    assert names(graph, both.backward) == [
        "f0",
        "f1",
        "f2 backward",
        "f1 backward",
        "f0 backward",
    ]


def test_what_is_dear_is_kept():
    assert len(whole(block((50, 50, 5))).options) == 1


def test_times_and_sizes_of_options():
    graph = block((5, 30, 65))
    (end,) = graph.forward_outputs
    stage = stage_of_part(graph, whole(graph), (end,), 1000, 0)
    assert stage.forward_ns == 100
    assert stage.output_bytes == stage.gradient_bytes == 1000
    assert [option.saved_bytes for option in stage.options] == [2000, 1000, 0]
    assert [option.forward_ns for option in stage.options] == [100] * 3
    backward = sum(op.cost_ns[0] or 0 for op in graph.ops[graph.forward_count :])
    assert [option.backward_ns for option in stage.options] == [
        backward,
        backward + 5,
        backward + 35,
    ]


@pytest.mark.parametrize(("has_start", "expected"), [(False, 2016), (True, 1016)])
def test_scratch_memory_by_hand(has_start: bool, expected: int):
    graph = block((5, 30, 65))
    backward = list(range(graph.forward_count, len(graph.ops)))
    # Each backward op writes 1000 bytes and 8 for the parameter, which stay; the second
    # has the first's gradient beside its own. What was there before and has gone makes
    # room: of the two saved values, the last is read first.
    first, second = (graph.ops[op].writes[0] for op in (0, 1))
    starts = frozenset({first, second} if has_start else ())
    assert scratch_bytes(graph, backward, 0, starts=starts) == expected
