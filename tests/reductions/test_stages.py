"""A training graph as a chain of stages: the cuts, what stages take, and back."""

from dataclasses import replace

import pytest
from tests.instances import INSTANCES, Network, mlp_chain, transformer_like

from remat.algorithms.chains.conventions import CHECKPOINTS_ONLY
from remat.algorithms.chains.operations import Backward, Forward, Operation, Store, Turn
from remat.algorithms.chains.revolve import plan_chain
from remat.algorithms.chains.rotor import plan_rotor
from remat.core.graph import Op, Phase, TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order
from remat.core.platform import single_device
from remat.core.simulator import Trace, simulate
from remat.reductions.segments import SegmentedGraph
from remat.reductions.stages import ChainOfStages, narrow_crossings, reduce_to_chain


def chain_of(graph: TrainingGraph, max_stages: int = 64) -> ChainOfStages:
    chain = reduce_to_chain(graph, max_stages=max_stages)
    assert chain is not None
    return chain


def judged(chain: ChainOfStages, operations: list[Operation]) -> Trace:
    schedule = schedule_from_order(chain.graph, chain.order(operations))
    trace = simulate(chain.graph, single_device(), schedule)
    assert trace.violation is None
    return trace


def straight(count: int) -> list[Operation]:
    """Return the plan that runs every stage once and keeps everything."""
    return [
        *(Forward(stage, option=0) for stage in range(count)),
        Turn(),
        *(Backward(stage, option=0) for stage in reversed(range(count))),
    ]


def blocks(count: int, *, mask_bytes: int = 0) -> TrainingGraph:
    """Blocks of two convolutions with a skip; a mask, if any, is read by all."""
    net = Network("blocks")
    x = net.input("x", 64)
    mask = [net.one("mask", [], mask_bytes, 10)] if mask_bytes else []
    value = net.one("stem", [x], 1000, 100, saves_inputs=True, parameter_bytes=1)
    for block in range(count):
        inner = net.one(
            f"a{block}",
            [value, *mask],
            1000,
            1000,
            saves_inputs=True,
            parameter_bytes=1,
        )
        inner = net.one(
            f"b{block}", [inner], 1000, 1000, saves_inputs=True, parameter_bytes=1
        )
        value = net.add(f"sum{block}", [value, inner], 1000)
    head = net.one("head", [value], 8, 100, saves_inputs=True, parameter_bytes=1)
    return net.instance(head).graph


def test_forward_is_cut_where_one_value_alone_crosses():
    graph = blocks(3)
    crossing = narrow_crossings(SegmentedGraph(graph))
    names = {graph.ops[op].name: graph.storages[s].name for op, s in crossing.items()}
    assert names == {"a0": "stem", "a1": "sum0", "a2": "sum1", "head": "sum2"}


def test_a_small_value_that_all_read_does_not_count():
    with_mask = narrow_crossings(SegmentedGraph(blocks(12, mask_bytes=100)))
    assert len(with_mask) == len(narrow_crossings(SegmentedGraph(blocks(12)))) == 13
    # A large one does: nowhere does one value alone cross but before it is read.
    assert len(narrow_crossings(SegmentedGraph(blocks(12, mask_bytes=900)))) < 3


def test_stages_have_the_times_and_sizes_of_their_ops():
    graph = blocks(3)
    chain = chain_of(graph).chain
    assert [stage.output_bytes for stage in chain.stages] == [1000] * 4
    assert [stage.forward_ns for stage in chain.stages] == [100, 3000, 3000, 3000]
    block = chain.stages[1]
    assert block.name == "sum0"
    assert block.gradient_bytes == 1000
    option, *cheaper = block.options
    # The sum is not needed for backward; the first convolution's output is.
    assert option.saved_bytes == 1000
    assert not option.needs_output
    assert option.forward_ns == 3000
    assert chain.least_ns == sum(op.cost_ns[0] or 0 for op in graph.ops)
    # The first convolution is a third of the block: within what may be dropped.
    (dropping,) = cheaper
    assert dropping.saved_bytes == 0
    assert dropping.backward_ns == option.backward_ns + 1000


def test_stages_are_merged_down_to_the_number_asked_for():
    chain = chain_of(blocks(12), max_stages=5)
    assert len(chain.chain.stages) == 5
    assert sum(len(part.forward) for part in chain.parts) == 38
    judged(chain, straight(5))


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer", "densenet"])
def test_plans_of_the_chain_are_valid_schedules(name: str):
    graph = INSTANCES[name]().graph
    chain = chain_of(graph)
    count = len(chain.chain.stages)
    plain = judged(chain, straight(count))
    assert plain.recomputed_ns == 0
    total = 2 * sum(chain.chain.all_sizes)
    peaks: list[int] = []
    for share in (100, 25, 15, 10, 8):
        plan = plan_rotor(chain.chain, total * share // 100)
        if plan is not None:
            peaks.append(judged(chain, list(plan.operations)).peak_bytes[0])
    assert len(peaks) >= 2
    assert min(peaks) <= plain.peak_bytes[0]
    for stored in (1, 2, 4):
        unit = plan_chain(count, stored, CHECKPOINTS_ONLY)
        if unit is not None:
            judged(chain, list(unit.operations))


def test_predicted_time_is_that_of_the_lifted_order():
    chain = chain_of(mlp_chain(12).graph)
    total = 2 * sum(chain.chain.all_sizes)
    outside = 0
    compared = 0
    for share in range(5, 60, 5):
        plan = plan_rotor(chain.chain, total * share // 100)
        if plan is not None:
            compared += 1
            assert judged(chain, list(plan.operations)).serial_ns == (
                plan.cost_ns + outside
            )
    assert compared >= 5


def test_backward_from_the_input_alone_runs_the_stage_again():
    chain = chain_of(blocks(1))
    order = chain.order(
        [Forward(0), Forward(1), Turn(), Backward(1), Forward(0), Backward(0)]
    )
    at = order.index(BOUNDARY)
    assert order[: at - 1] == [0, 1, 2, 3]
    # Its first convolution is what backward reads of it.
    assert order.count(1) == 2
    # A stage that has just run is not run again.
    assert order.count(0) <= 2


def test_a_graph_without_cuts_is_no_chain():
    net = Network("towers")
    x = net.input("x", 64)
    ends: list[int] = []
    values = [x, x]
    for layer in range(4):
        values = [
            net.one(f"t{tower}.{layer}", [value], 1000, 100, saves_inputs=True)
            for tower, value in enumerate(values)
        ]
    ends = values
    graph = net.instance(net.one("join", ends, 1000, 100, saves_inputs=True)).graph
    chain = reduce_to_chain(graph)
    assert chain is None or len(chain.chain.stages) < 3


def test_work_of_the_caller_comes_last():
    graph = blocks(3)
    optimizer = Op(
        name="optimizer",
        # Not all that the step makes: what the first stages give is left out.
        reads=graph.final_outputs[:2],
        writes=(),
        cost_ns=(1,),
        workspace_bytes=(0,),
        phase=Phase.BACKWARD,
        non_recomputable="it is done by the caller",
        is_external=True,
    )
    graph = replace(
        graph, ops=(*graph.ops, optimizer), final_outputs=graph.final_outputs[:2]
    )
    chain = chain_of(graph)
    plan = plan_rotor(chain.chain, sum(chain.chain.all_sizes))
    assert plan is not None
    assert chain.order(plan.operations)[-1] == len(graph.ops) - 1
    judged(chain, list(plan.operations))


def test_other_operations_are_refused():
    with pytest.raises(ValueError, match="not an operation of a chain on one device"):
        chain_of(transformer_like().graph).order([Store(0)])
