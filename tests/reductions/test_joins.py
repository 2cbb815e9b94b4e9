"""A training graph as a join of stages: the structure, plans of it, and back."""

from dataclasses import replace
from itertools import product

import pytest
from tests.instances import Network, joined_towers, mlp_chain, resnet_like

from remat.algorithms.chains.operations import Backward, Forward, Operation, Turn
from remat.algorithms.chains.rotor import plan_rotor
from remat.algorithms.chains.stage_joins import plan_stage_join
from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order
from remat.core.platform import single_device
from remat.core.simulator import Trace, simulate
from remat.reductions.join_structure import (
    Fork,
    ForwardStructure,
    Leaf,
    Series,
    most_branches,
)
from remat.reductions.joins import JoinOfStages, meet, reduce_to_join
from remat.reductions.segments import SegmentedGraph


def forks(*widths: int) -> TrainingGraph:
    """Forks of layers on one value, one fork after the other."""
    net = Network("forks")
    y = net.input("x", 64)
    for fork, width in enumerate(widths):
        tops = [y] * width
        for tower, layer in product(range(width), range(1 + 12 // width)):
            tops[tower] = net.one(
                f"f{fork}.t{tower}.{layer}",
                [tops[tower]],
                900,
                400,
                saves_inputs=True,
                parameter_bytes=8,
            )
        y = net.one(f"meet{fork}", tops, 1000, 500, saves_inputs=True)
    return net.instance(net.one("loss", [y], 8, 10, saves_inputs=True)).graph


def structure(graph: TrainingGraph) -> Series:
    return ForwardStructure(SegmentedGraph(graph), 0).series


def shape(series: Series) -> list[object]:
    """Return 1 for each stage and a list of shapes for each fork."""
    return [
        1 if isinstance(item, Leaf) else [shape(branch) for branch in item.branches]
        for item in series
    ]


def ops_of(series: Series) -> list[int]:
    found: list[int] = []
    for item in series:
        if isinstance(item, Fork):
            found += [op for branch in item.branches for op in ops_of(branch)]
        else:
            found += item.ops
    return found


def judged(form: JoinOfStages, operations: tuple[Operation, ...]) -> Trace:
    schedule = schedule_from_order(form.graph, form.order(operations))
    trace = simulate(form.graph, single_device(), schedule)
    assert trace.violation is None
    return trace


def swept(form: JoinOfStages) -> list[Trace]:
    """Return what plans of a form come to, from a tight budget to an ample one."""
    is_join = form.is_join
    model = form.join() if is_join else form.chain()
    total = 2 * sum(model.all_sizes)
    found: list[Trace] = []
    for share in (4, 6, 8, 12, 16, 25, 50, 100):
        budget = total * share // 100
        plan = (
            plan_stage_join(form.join(), budget)
            if is_join
            else plan_rotor(form.chain(), budget)
        )
        if plan is not None:
            found.append(judged(form, plan.operations))
    return found


def nested() -> TrainingGraph:
    """Two towers, the first of which is itself two that meet."""
    net = Network("nested")

    def tower(name: str, y: int, count: int) -> int:
        for layer in range(count):
            y = net.one(
                f"{name}{layer}", [y], 1000, 500, saves_inputs=True, parameter_bytes=8
            )
        return y

    left = tower("a", net.input("a", 64), 4)
    right = tower("b", net.input("b", 64), 3)
    met = net.one("inner", [left, right], 1000, 10, saves_inputs=True)
    first = tower("ab", met, 4)
    second = tower("c", net.input("c", 64), 4)
    return net.instance(net.one("outer", [first, second], 8, 10)).graph


def test_a_siamese_network_is_a_fork_and_a_turn():
    series = structure(joined_towers((5, 5)).graph)
    assert shape(series) == [[[1] * 5, [1] * 5], 1]
    assert isinstance(series[-1], Leaf)
    assert series[-1].ends == ()


def test_three_towers_that_meet_pairwise_are_one_fork():
    net = Network("triplet")
    tops: list[int] = []
    for tower in range(3):
        y = net.input(f"x{tower}", 64)
        for layer in range(4):
            y = net.one(f"t{tower}.{layer}", [y], 1000, 500, saves_inputs=True)
        tops.append(y)
    near = net.one("near", tops[:2], 8, 5, saves_inputs=True)
    far = net.one("far", [tops[0], tops[2]], 8, 5, saves_inputs=True)
    graph = net.instance(net.one("loss", [near, far], 4, 5, saves_inputs=True)).graph
    assert shape(structure(graph)) == [[[1] * 4] * 3, 1]


def test_stem_and_trunk_are_stages_before_and_after():
    series = structure(joined_towers((4, 4), stem=3, trunk=3).graph)
    found = shape(series)
    forks = [item for item in found if item != 1]
    assert len(forks) == 1
    assert 0 < found.index(forks[0]) < len(found) - 2


def test_forks_may_lie_within_branches():
    found = shape(structure(nested()))
    assert found == [[[[[1] * 4, [1] * 3], 1, *[1] * 4], [1] * 4], 1]


@pytest.mark.parametrize(
    "graph",
    [mlp_chain(8).graph, resnet_like().graph],
    ids=["chain", "shortcuts"],
)
def test_chains_have_no_fork(graph: TrainingGraph):
    assert all(isinstance(item, Leaf) for item in structure(graph))
    assert reduce_to_join(graph) is None


def test_a_negligible_branch_is_no_branch():
    net = Network("mask")
    y = net.input("x", 64)
    for layer in range(6):
        y = net.one(f"l{layer}", [y], 1000, 1000, saves_inputs=True, parameter_bytes=8)
    mask = net.one("b", [net.one("a", [net.input("m", 64)], 1000, 9)], 1000, 9)
    y = net.one("masked", [y, mask], 1000, 9, saves_inputs=True, constant=[mask])
    assert reduce_to_join(net.instance(y).graph) is None


def test_a_fork_that_is_too_wide_is_a_stage():
    graph = forks(2, 7, 3)
    assert most_branches(SegmentedGraph(graph)) == 7
    forms = reduce_to_join(graph)
    assert forms is not None
    assert forms.series is not None
    names = [stage.name for stage in forms.series.chain().stages]
    assert [name for name in names if name.startswith("fork")] == [
        "fork of 2",
        "fork of 3",
    ]
    traces = swept(forms.series)
    assert traces[0].serial_ns > traces[-1].serial_ns
    assert traces[-1].serial_ns == sum(op.cost_ns[0] or 0 for op in graph.ops)
    assert reduce_to_join(forks(7)) is None
    assert most_branches(SegmentedGraph(forks(7))) == 7
    assert most_branches(SegmentedGraph(mlp_chain(8).graph)) == 0


@pytest.mark.parametrize(
    "graph",
    [
        joined_towers((5, 5)).graph,
        joined_towers((6, 3, 2)).graph,
        joined_towers((4, 4), is_shared=False, trunk=4).graph,
        joined_towers((4, 4), stem=3, trunk=3).graph,
        nested(),
    ],
    ids=["siamese", "triplet", "trunk", "stem", "nested"],
)
def test_plans_are_valid_schedules(graph: TrainingGraph):
    forms = reduce_to_join(graph)
    assert forms is not None
    assert sorted(ops_of(structure(graph))) == list(range(graph.forward_count))
    everything = sum(op.cost_ns[0] or 0 for op in graph.ops)
    for form in (forms.join, forms.series):
        if form is None:
            continue
        traces = swept(form)
        assert len(traces) >= 3
        # Everything fits at last, and tight budgets are worth their time.
        assert traces[-1].serial_ns == everything
        assert traces[0].peak_bytes[0] < traces[-1].peak_bytes[0]
        assert traces[0].serial_ns > everything


def test_predicted_time_is_that_of_the_lifted_order():
    graph = joined_towers((5, 5), is_shared=False).graph
    forms = reduce_to_join(graph)
    assert forms is not None
    assert forms.join is not None
    join = forms.join.join()
    total = sum(join.all_sizes)
    compared = 0
    for share in range(30, 130, 10):
        plan = plan_stage_join(join, total * share // 100)
        if plan is not None:
            compared += 1
            assert judged(forms.join, plan.operations).serial_ns == plan.cost_ns
    assert compared >= 5


def test_only_adding_the_gradients_of_a_stem_is_in_no_stage():
    graph = joined_towers((4, 4), stem=3, is_shared=False).graph
    forms = reduce_to_join(graph)
    assert forms is not None
    (form,) = [form for form in (forms.join, forms.series) if form is not None]
    assert not form.is_join
    chain = form.chain()
    plan = plan_rotor(chain, sum(chain.all_sizes))
    assert plan is not None
    sums_ns = sum(op.cost_ns[0] or 0 for op in graph.ops if op.name.startswith("sum "))
    left_out_ns = judged(form, plan.operations).serial_ns - plan.cost_ns
    # Beside it there is what merges scalars.
    assert sums_ns <= left_out_ns < sums_ns + 10


def test_gradients_of_shared_parameters_are_added_at_once():
    graph = joined_towers((5, 5)).graph
    forms = reduce_to_join(graph)
    assert forms is not None
    assert forms.join is not None
    join = forms.join.join()
    plan = plan_stage_join(join, 2 * sum(join.all_sizes))
    assert plan is not None
    order = forms.join.order(plan.operations)
    sums = [i for i, op in enumerate(graph.ops) if op.name.startswith("sum tower")]
    assert len(sums) == 5
    for op in sums:
        (before,) = (
            graph.producers[s]
            for s in graph.ops[op].reads
            if order.index(graph.producers[s] or 0) == order.index(op) - 1
        )
        assert before is not None


def test_random_numbers_are_drawn_in_the_order_of_the_graph():
    net = Network("noisy")
    tops: list[int] = []
    for tower in range(2):
        y = net.input(f"x{tower}", 64)
        for layer in range(4 - tower):
            state = net.one(f"state{tower}.{layer}", [], 16, 1, once="it draws")
            y = net.one(
                f"t{tower}.{layer}",
                [y, state],
                1000,
                500,
                saves_inputs=True,
                parameter_bytes=8,
                constant=[state],
            )
        tops.append(y)
    graph = net.instance(net.one("loss", tops, 4, 5, saves_inputs=True)).graph
    forms = reduce_to_join(graph)
    assert forms is not None
    assert forms.join is not None
    counts = forms.join.stage_counts
    # The second tower first: the plan's order is not that of the draws.
    operations: list[Operation] = [
        Forward(stage, branch, 0)
        for branch in (1, 0)
        for stage in range(counts[branch])
    ]
    operations.append(Turn())
    operations += [
        Backward(stage, branch, 0)
        for branch in (0, 1)
        for stage in reversed(range(counts[branch]))
    ]
    judged(forms.join, tuple(operations))
    order = forms.join.order(operations)
    assert order[: order.index(BOUNDARY)] == list(range(graph.forward_count))


def test_forward_runs_in_the_order_of_the_plan():
    forms = reduce_to_join(joined_towers((3, 3), is_shared=False).graph)
    assert forms is not None
    assert forms.join is not None
    form = forms.join
    plan = plan_stage_join(form.join(), 10**9)
    assert plan is not None
    # The branches are equal: they may change places.
    flipped = [
        replace(o, branch=1 - o.branch) if isinstance(o, Forward | Backward) else o
        for o in plan.operations
    ]
    firsts = {
        form.graph.ops[form.order(operations)[0]].name
        for operations in (plan.operations, flipped)
    }
    assert firsts == {"tower0.0.linear", "tower1.0.linear"}


def test_the_meeting_place_of_places():
    assert meet((1,), (1,)) == (1,)
    assert meet((2, 0, 4), (2, 1, 0)) == (2,)
    assert meet((2, 0, 4), (3,)) == (2, 0, 4)
    assert meet((2, 0, 1, 0, 5), (2, 0, 1, 1, 2)) == (2, 0, 1)


def test_other_operations_are_refused():
    forms = reduce_to_join(joined_towers((3, 3)).graph)
    assert forms is not None
    assert forms.join is not None
    with pytest.raises(ValueError, match="not an operation of a join"):
        forms.join.order([Turn(), Turn()])
