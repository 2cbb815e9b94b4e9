"""The forward values of a training graph: sizes, costs, edges, merging, and back."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.instances import INSTANCES, Network
from tests.strategies import graphs

from remat.core.bounds import required_ops
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import schedule_from_order
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.reductions.forward_values import ForwardValues, reduce_to_forward_values


def reduced(graph: TrainingGraph, max_nodes: int = 256) -> ForwardValues:
    values = reduce_to_forward_values(graph, max_nodes=max_nodes)
    assert values is not None
    return values


def random_segmentation(values: ForwardValues, seed: int) -> list[int]:
    """Return segments of nodes that never decrease along edges."""
    rng = random.Random(seed)
    found = [0] * values.graph.node_count
    before: dict[int, list[int]] = {}
    for u, v in values.graph.all_edges:
        before.setdefault(v, []).append(u)
    for v in values.graph.topological_order:
        low = max((found[u] for u in before.get(v, ())), default=0)
        found[v] = low + rng.choice([0, 0, 1])
    return found


def diamond() -> TrainingGraph:
    """Four convolutions' worth of costs, a two-output op, and one that runs once."""
    net = Network("diamond")
    x = net.input("x", 64)
    a = net.one("a", [x], 100, 1000, saves_inputs=True)
    b, mask = net.call("b", [a], [100, 10], 2000, saves_outputs=[1])
    c = net.one("c", [a], 40, 3000, saves_inputs=True)
    state = net.one("state", [], 8, 1, once="it draws")
    d = net.one("d", [b, c, state], 100, 4000, saves_inputs=True)
    assert mask != d
    return net.instance(d).graph


class TestDiamond:
    def test_nodes_are_ops_that_may_run_again(self):
        values = reduced(diamond())
        assert values.graph.names == ("a", "b", "c", "d")
        assert values.members == ((0,), (1,), (2,), (4,))

    def test_edges_are_what_is_read(self):
        assert reduced(diamond()).graph.edges == ((0, 1), (0, 2), (1, 3), (2, 3))

    def test_sizes_are_what_other_nodes_read(self):
        # Of the outputs of b, the mask is for backward only; nobody reads d.
        assert reduced(diamond()).graph.memory_bytes == (100, 100, 40, 0)

    def test_segments_hold_what_backward_reads_and_a_gradient(self):
        # a: backward of a reads x, but b and c save a. d saves b and c.
        assert reduced(diamond()).graph.segment_bytes == (
            100 + 100,
            100 + 10 + 100,
            40 + 40,
            0,
        )

    def test_costs_are_shares_rounded_up(self):
        values = reduce_to_forward_values(diamond(), cost_units=10)
        assert values is not None
        assert values.graph.cost == (1, 2, 3, 4)
        values = reduce_to_forward_values(diamond(), cost_units=3)
        assert values is not None
        assert values.graph.cost == (1, 1, 1, 2)

    def test_what_runs_once_imposes_its_order(self):
        graph = diamond()
        once = Op(
            name="count",
            reads=(graph.ops[2].writes[0],),
            writes=(len(graph.storages),),
            cost_ns=(1,),
            workspace_bytes=(0,),
            phase=Phase.FORWARD,
            non_recomputable="it counts",
        )
        last = graph.ops[4]
        reader = Op(
            name="d",
            reads=(last.reads[0], len(graph.storages)),
            writes=last.writes,
            cost_ns=last.cost_ns,
            workspace_bytes=(0,),
            phase=Phase.FORWARD,
        )
        graph = TrainingGraph(
            name="counted",
            storages=(*graph.storages, Storage(name="count", size_bytes=4)),
            ops=(*graph.ops[:4], once, reader, *graph.ops[5:]),
            forward_outputs=graph.forward_outputs,
            tangents=graph.tangents,
            final_outputs=graph.final_outputs,
        )
        values = reduced(graph)
        assert values.graph.names == ("a", "b", "c", "d")
        assert values.graph.edges == ((0, 1), (0, 2), (1, 3))
        assert values.graph.order_edges == ((2, 3),)
        # It runs as early as what it reads allows.
        assert values.segment_of_ops([0, 0, 1, 2])[4] == 1


@pytest.mark.parametrize("name", ["max_nodes", "cost_units"])
def test_no_nodes_and_no_units_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        reduce_to_forward_values(diamond(), **{name: 0})


def test_a_cheap_value_is_merged_with_its_neighbour():
    net = Network("cheap")
    x = net.input("x", 64)
    a = net.one("a", [x], 100, 1_000_000, saves_inputs=True)
    cast = net.one("cast", [a], 100, 10, saves_inputs=True)
    b = net.one("b", [cast], 100, 1_000_000, saves_inputs=True)
    graph = net.instance(net.one("c", [b], 100, 1_000_000)).graph
    assert reduced(graph).members == ((0, 1), (2,), (3,))


def test_a_cheap_value_stays_where_keeping_it_takes_less():
    net = Network("narrow")
    x = net.input("x", 64)
    a = net.one("a", [x], 1000, 1_000_000, saves_inputs=True)
    narrow = net.one("narrow", [a], 10, 10, saves_inputs=True)
    b = net.one("b", [narrow], 1000, 1_000_000, saves_inputs=True)
    graph = net.instance(net.one("c", [b], 100, 1_000_000)).graph
    # a goes into narrow, which is smaller; narrow does not go into b.
    assert reduced(graph).members == ((0, 1), (2,), (3,))


def test_nodes_are_merged_down_to_the_number_asked_for():
    graph = INSTANCES["transformer"]().graph
    count = reduced(graph).graph.node_count
    fewer = reduced(graph, max_nodes=count // 2)
    assert fewer.graph.node_count == count // 2
    merged = sorted(op for ops in fewer.members for op in ops)
    assert merged == sorted(op for ops in reduced(graph).members for op in ops)


@pytest.mark.parametrize("max_nodes", [256, 12])
@pytest.mark.parametrize("name", INSTANCES)
def test_any_segmentation_is_lifted_to_a_valid_schedule(name: str, max_nodes: int):
    graph = INSTANCES[name]().graph
    values = reduced(graph, max_nodes)
    for seed in range(10):
        segments = values.segment_of_ops(random_segmentation(values, seed))
        order = values.segments.order(segments)
        trace = simulate(graph, single_device(), schedule_from_order(graph, order))
        assert trace.violation is None
        assert all(count <= 2 for count in Counter(order).values())


@given(
    graph=graphs(max_ops=9),
    seed=st.integers(0, 99),
    max_nodes=st.sampled_from([1, 2, 256]),
)
def test_any_graph_is_reduced_and_lifted(
    graph: TrainingGraph, seed: int, max_nodes: int
):
    values = reduce_to_forward_values(graph, max_nodes=max_nodes)
    if values is None:
        required = required_ops(graph)
        assert not any(
            op in required and graph.ops[op].is_recomputable
            for op in range(graph.forward_count)
        )
        return
    segments = values.segment_of_ops(random_segmentation(values, seed))
    order = values.segments.order(segments)
    trace = simulate(graph, single_device(), schedule_from_order(graph, order))
    assert trace.violation is None
