"""A stage alone: equal where stages are alike, limits that hold, and the way back."""

from dataclasses import replace
from itertools import pairwise

import pytest
from tests.instances import Network, resnet_like, transformer_like
from tests.oracles import brute_force_best

from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.core.problem import Limits, Problem
from remat.core.simulator import simulate
from remat.reductions.stage_parts import scratch_bytes
from remat.reductions.stage_problems import StageProblem, stage_problem
from remat.reductions.stages import ChainOfStages, reduce_to_chain
from remat.solvers.stage_programs import solve_stage


def chain_of(graph: TrainingGraph, max_stages: int = 64) -> ChainOfStages:
    chain = reduce_to_chain(graph, max_stages=max_stages)
    assert chain is not None
    return chain


def problems_of(chain: ChainOfStages) -> list[StageProblem | None]:
    return [
        stage_problem(chain.graph, part, end, 0)
        for part, end in zip(chain.parts[:-1], chain.ends, strict=True)
    ]


def three_in_a_row(blocks: int = 2, costs: tuple[int, int, int] = (20, 30, 50)):
    """Blocks of three ops, which save what they read, and a sum around each."""
    net = Network("rows")
    x = net.one("stem", [net.input("x", 8)], 100, 10, saves_inputs=True)
    for block in range(blocks):
        y = x
        for index, cost in enumerate(costs):
            y = net.one(
                f"{block}.{index}",
                [y],
                (80, 60, 100)[index],
                cost,
                saves_inputs=True,
                parameter_bytes=1,
            )
        x = net.add(f"sum{block}", [x, y], 100)
    head = net.one("head", [x], 4, 10, saves_inputs=True, parameter_bytes=1)
    return net.instance(head).graph


def test_layers_that_are_alike_have_equal_graphs():
    chain = chain_of(transformer_like(8).graph)
    graphs = [p.graph for p in problems_of(chain) if p is not None]
    # Embedding aside, each layer is two stages; of the first layer the input has no
    # gradient, and the final norm is a stage of its own.
    assert len(graphs) == 17
    assert len(set(graphs)) == 4
    middle = graphs[1:15]
    assert all(one == other for one, other in zip(middle, middle[2:], strict=False))
    assert all(one != other for one, other in pairwise(middle))


def test_stages_of_other_sizes_or_times_differ():
    graph = resnet_like(8).graph
    names = [stage.name for stage in chain_of(graph).chain.stages]
    problems = dict(zip(names, problems_of(chain_of(graph)), strict=True))
    first, second, smaller = (problems[f"block{block}.relu"] for block in (1, 2, 5))
    assert first is not None
    assert second is not None
    assert smaller is not None
    assert first.graph == second.graph
    assert first.graph != smaller.graph
    slower = replace(
        graph,
        ops=tuple(
            replace(op, cost_ns=((op.cost_ns[0] or 0) + 1,))
            if op.name == "block2.a.conv"
            else op
            for op in graph.ops
        ),
    )
    changed = dict(zip(names, problems_of(chain_of(slower)), strict=True))
    assert changed["block1.relu"] == first
    assert changed["block2.relu"] != second


def test_the_graph_of_a_stage_by_hand():
    chain = chain_of(three_in_a_row())
    problem = problems_of(chain)[1]
    assert problem is not None
    graph = problem.graph
    # Three ops and a sum.
    assert [op.cost_ns[0] for op in graph.ops[:4]] == [20, 30, 50, 100]
    assert graph.forward_count == 4
    assert [graph.storages[s].size_bytes for s in graph.forward_outputs] == [100]
    assert [graph.storages[s].size_bytes for s in graph.tangents] == [100]
    assert problem.given_bytes == 200
    # The gradients of three parameters; that of the input; and the one given, which the
    # stage below adds to it.
    sizes = [graph.storages[s].size_bytes for s in graph.final_outputs]
    assert sorted(sizes) == [1, 1, 1, 100, 100]
    assert set(graph.tangents) < set(graph.final_outputs)
    assert [chain.graph.ops[op].name for op in problem.ops[:4]] == [
        "0.0",
        "0.1",
        "0.2",
        "sum0",
    ]


@pytest.mark.parametrize("saved_bytes", [0, 60, 80, 100, 140, 1000])
@pytest.mark.parametrize("peak_bytes", [400, 450, 520, 1000])
def test_the_program_is_the_optimum_over_all_schedules_of_the_stage(
    saved_bytes: int, peak_bytes: int
):
    problem = problems_of(chain_of(three_in_a_row(costs=(20, 35, 5))))[1]
    assert problem is not None
    asked: Problem = problem.problem(saved_bytes, peak_bytes)
    optimum = brute_force_best(asked.graph, peak_bytes)
    order = solve_stage(asked, Limits()).order
    if order is None:
        assert optimum is None
        return
    trace = simulate(
        asked.graph, asked.platform, schedule_from_order(asked.graph, order)
    )
    assert trace.violation is None
    assert trace.serial_ns == optimum


def test_limits_are_on_what_is_live_at_the_boundary_and_at_any_time():
    problem = problems_of(chain_of(three_in_a_row()))[1]
    assert problem is not None
    plain = store_all_order(problem.graph)
    # What keeps everything saves 80 and 60 bytes.
    for saved_bytes, is_kept in ((139, False), (140, True)):
        asked = problem.problem(saved_bytes, 1000)
        schedule = schedule_from_order(asked.graph, plain)
        assert simulate(asked.graph, asked.platform, schedule).is_valid is is_kept
    alone = problem.problem(10**9, 1000)
    peak = simulate(
        alone.graph, alone.platform, schedule_from_order(alone.graph, plain)
    ).peak_bytes[0]
    assert peak < 1000
    assert peak <= problem.all_bytes


def test_an_order_of_the_stage_is_an_option_of_it_and_back():
    chain = chain_of(three_in_a_row())
    part, end, problem = chain.parts[1], chain.ends[1], problems_of(chain)[1]
    assert problem is not None
    for option in part.options:
        order = problem.order_of(option)
        assert problem.option(chain.graph, part, end, order) == option
    backward = range(4, len(problem.graph.ops))
    again = [0, 1, 2, 3, BOUNDARY, 0, 1, *backward]
    option = problem.option(chain.graph, part, end, again)
    assert option.kept == frozenset()
    # Forward then runs what its output needs.
    assert option.saving == part.again
    richer = chain.with_options(
        [[*p.options, option] if p is part else p.options for p in chain.parts[:-1]]
    )
    found = richer.chain.stages[1].options
    assert found[-1].saved_bytes == 0
    assert found[-1].backward_ns == found[0].backward_ns + 50
    assert richer.chain.stages[0] == chain.chain.stages[0]


def test_what_is_computed_again_makes_room_in_between():
    graph = three_in_a_row()
    chain = chain_of(graph)
    problem = problems_of(chain)[1]
    assert problem is not None
    first, second, third = (problem.ops[i] for i in (0, 1, 2))
    # 80 and 60 bytes, then 100; the first is not there while the third is made ...
    assert scratch_bytes(graph, [first, second, third, first], 0) == 60 + 100
    # ... unless it is read again as it is.
    assert scratch_bytes(graph, [first, second, third, second], 0) == 80 + 60 + 100


def test_a_stage_that_saves_nothing_is_no_problem():
    net = Network("sums")
    x = net.one("stem", [net.input("x", 8)], 100, 10, saves_inputs=True)
    for layer in range(4):
        x = net.one(f"f{layer}", [x], 100, 10, saves_inputs=True, parameter_bytes=1)
    graph = net.instance(net.one("loss", [x], 4, 10, saves_inputs=True)).graph
    assert problems_of(chain_of(graph))[1:] == [None] * 4
