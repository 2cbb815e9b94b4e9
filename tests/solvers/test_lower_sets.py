"""The lower-set solvers on training graphs: what they beat, and when they fall back."""

import time
from typing import Any

import pytest
from tests.instances import (
    INSTANCES,
    Network,
    joined_towers,
    mlp_chain,
    transformer_like,
    unet_like,
)

from remat.algorithms.lower_sets.choice import approximate_family
from remat.core.errors import BudgetError
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Result, Status, StopReason
from remat.planning.one_device import plan_graph
from remat.planning.portfolio import solve
from remat.reductions.forward_values import reduce_to_forward_values
from remat.solvers.chen import ChenGreedy, ChenLowerSets
from remat.solvers.lower_sets import (
    LowerSets,
    LowerSetsApprox,
    LowerSetsEffort,
)
from remat.testing import budgets_between, store_all_peak_bytes


def solved(
    graph: TrainingGraph,
    budget: int,
    solver: LowerSets | LowerSetsApprox | ChenGreedy | ChenLowerSets,
    limits: Limits | None = None,
) -> Result:
    problem = Problem(graph=graph, platform=single_device(budget))
    return solve(problem, solver, limits=limits)


def towers(count: int, length: int) -> TrainingGraph:
    """Parallel chains that are joined at the end: (length + 1) ** count lower sets."""
    net = Network("towers")
    x = net.input("x", 64)
    ends: list[int] = []
    for tower in range(count):
        value = x
        for layer in range(length):
            value = net.one(
                f"t{tower}.{layer}",
                [value],
                1000,
                50_000,
                saves_inputs=True,
                parameter_bytes=10,
            )
        ends.append(value)
    return net.instance(net.one("join", ends, 1000, 50_000, saves_inputs=True)).graph


def branches() -> TrainingGraph:
    """Branches of several lengths, two of which begin with one value."""
    net = Network("branches")
    x = net.input("x", 64)

    def layer(
        name: str, reads: list[int], size: int, cost_us: int, *, saves_output: bool
    ) -> int:
        return net.one(
            name,
            reads,
            size * 1000,
            cost_us * 1000,
            saves_inputs=not saves_output,
            saves_outputs=[0] if saves_output else [],
            parameter_bytes=10,
        )

    a = layer("a", [x], 1, 10, saves_output=True)
    b = layer("b", [a], 1, 5, saves_output=False)
    c = layer("c", [x], 1, 2, saves_output=True)
    d = layer("d", [x], 1, 1, saves_output=False)
    e = layer("e", [a], 8, 2, saves_output=False)
    f = layer("f", [c], 2, 5, saves_output=False)
    g = layer("g", [e, f], 2, 2, saves_output=True)
    h = layer("h", [d], 1, 10, saves_output=False)
    i = layer("i", [h], 4, 5, saves_output=True)
    return net.instance(layer("join", [b, g, i], 1, 1, saves_output=False)).graph


SEGMENTS_ALONE = LowerSetsEffort(executed_ops=0)
"""As few executions with eviction as there can be, so that they do not stand in."""


@pytest.mark.parametrize("name", ["resnet", "unet"])
@pytest.mark.parametrize(
    "solver", [LowerSets(), LowerSetsApprox()], ids=["all", "some"]
)
def test_never_dearer_than_chen(name: str, solver: LowerSets | LowerSetsApprox):
    graph = INSTANCES[name]().graph
    compared = 0
    for budget in budgets_between(graph, 2):
        chen = solved(graph, budget, ChenGreedy()).cost_ns
        ours = solved(graph, budget, solver).cost_ns
        if chen is not None:
            compared += 1
            assert ours is not None
            assert ours <= chen
    assert compared


def test_exact_family_is_used_where_it_can_be_enumerated():
    graph = unet_like().graph
    result = solved(graph, store_all_peak_bytes(graph) * 7 // 10, LowerSets())
    assert result.status is Status.FEASIBLE
    assert result.message.endswith("all there are")


def test_the_approximate_solver_takes_the_approximate_family():
    graph = branches()
    values = reduce_to_forward_values(graph)
    assert values is not None
    count = len(approximate_family(values.graph))
    exact = solved(graph, 16_386, LowerSets()).message
    approximate = solved(graph, 16_386, LowerSetsApprox()).message
    assert "10 forward values, 69 lower sets: all there are" in exact
    assert count < 69
    expected = f"10 forward values, {count} lower sets: an approximate family"
    assert expected in approximate


# Recomputation in ns; more if the program was asked for the least overhead alone.
@pytest.mark.parametrize(
    ("graph", "budget", "recomputed_ns", "least_overhead_alone_ns"),
    [
        (towers(2, 8), 7_557, 600_000, 650_000),
        (mlp_chain(12).graph, 651_264, 5_242_880, 5_570_560),
    ],
    ids=["towers", "chain"],
)
def test_coarser_segments_than_those_of_least_overhead_may_be_cheaper(
    graph: TrainingGraph,
    budget: int,
    recomputed_ns: int,
    least_overhead_alone_ns: int,
):
    trace = solved(graph, budget, LowerSets(effort=SEGMENTS_ALONE)).trace
    assert trace is not None
    assert trace.recomputed_ns <= recomputed_ns < least_overhead_alone_ns


def test_gradients_owed_across_a_boundary_are_charged():
    # One layer more is recomputed if the program does not know of them.
    trace = solved(mlp_chain().graph, 480_597, LowerSets(effort=SEGMENTS_ALONE)).trace
    assert trace is not None
    layer_ns = 327_680
    assert trace.recomputed_ns <= 5 * layer_ns


@pytest.mark.parametrize("solver", [LowerSets(), LowerSetsApprox()])
@pytest.mark.parametrize("budget", [16_386, 16_992])
def test_backward_in_the_order_of_the_graph_may_be_cheaper(
    solver: LowerSets | LowerSetsApprox, budget: int
):
    # 13_000 with backward segment by segment alone.
    trace = solved(branches(), budget, solver).trace
    assert trace is not None
    assert trace.recomputed_ns <= 12_000


def test_bisection_finds_budgets_of_the_program_between_those_of_the_sweep():
    graph = joined_towers((3, 5), stem=2, trunk=2).graph
    costs = [
        solved(graph, 511_658, LowerSets(effort=effort)).cost_ns
        for effort in (
            LowerSetsEffort(budget_count=2, executed_ops=0),
            LowerSetsEffort(budget_count=2, executed_ops=0, bisection_count=0),
        )
    ]
    with_bisection, without = costs
    assert with_bisection is not None
    assert without is not None
    assert with_bisection < without


def test_segmentations_are_improved_where_memory_is_left_over():
    graph = transformer_like().graph
    costs = [
        solved(graph, 9_206_445, LowerSets(effort=effort)).cost_ns
        for effort in (
            SEGMENTS_ALONE,
            LowerSetsEffort(executed_ops=0, improved_count=0),
        )
    ]
    improved, as_they_are = costs
    assert improved is not None
    assert as_they_are is not None
    assert improved < as_they_are


def test_more_lower_sets_than_the_cap_are_not_enumerated_and_the_answer_says_so():
    graph = towers(8, 6)  # 5.7 million lower sets
    budget = store_all_peak_bytes(graph) // 2
    started = time.process_time()
    result = solved(graph, budget, LowerSets(cap=2000))
    assert time.process_time() - started < 60
    assert result.status is Status.FEASIBLE
    assert (
        "an approximate family, as there are more than 2_000 in all" in result.message
    )
    assert result.trace is not None
    every_op_once_more = 49 * 50_000
    assert result.trace.recomputed_ns < 0.6 * every_op_once_more


def test_the_cap_must_be_positive():
    with pytest.raises(ValueError, match="cap on lower sets is 0"):
        LowerSets(cap=0)
    some: Any = 2.5
    with pytest.raises(ValueError, match=r"cap on lower sets is 2\.5; .* an integer"):
        LowerSets(cap=some)


@pytest.mark.parametrize(
    ("effort", "words"),
    [
        ({"max_nodes": 0}, "max_nodes is 0; it must be an integer of at least 1"),
        ({"budget_count": 0}, "budget_count is 0; it must be an integer of at least 1"),
        (
            {"bisection_count": -1},
            "bisection_count is -1; it must be an integer of at least 0",
        ),
        ({"executed_ops": 1e4}, "executed_ops is 10000.0; it must be an integer"),
    ],
)
def test_impossible_efforts_are_refused(effort: dict[str, int], words: str):
    with pytest.raises(ValueError, match=words):
        LowerSetsEffort(**effort)


def test_values_without_bytes_or_costs_are_planned():
    for size, cost in ((0, 50_000), (1000, 0)):
        net = Network("free")
        value = net.input("x", 64)
        for layer in range(6):
            value = net.one(
                f"{layer}",
                [value],
                size if layer % 2 else 1000,
                cost if layer % 2 else 50_000,
                saves_inputs=True,
                parameter_bytes=10,
            )
        graph = net.instance(value).graph
        budget = store_all_peak_bytes(graph) * 7 // 10
        for solver in (LowerSets(), LowerSetsApprox()):
            assert solved(graph, budget, solver).status is Status.FEASIBLE


def test_budget_below_the_smallest_is_unknown_and_says_what_was_met():
    graph = unet_like().graph
    below, *_ = budgets_between(graph, 12)
    result = solved(graph, below, LowerSets())
    assert result.status is Status.UNKNOWN
    assert "lower sets: all there are; the smallest peak is" in result.message
    with pytest.raises(BudgetError) as caught:
        plan_graph(graph, budget=below - 1, solver="lower-sets")
    assert caught.value.required_bytes > below - 1


def test_no_time_gives_no_answer():
    graph = INSTANCES["transformer"]().graph
    budget = store_all_peak_bytes(graph) * 6 // 10
    result = solved(graph, budget, LowerSets(), Limits.after(0.0))
    assert result.status is Status.UNKNOWN
    assert result.stop_reason is StopReason.TIME_LIMIT


def test_the_least_effort_still_answers():
    graph = INSTANCES["resnet"]().graph
    budget = store_all_peak_bytes(graph) * 8 // 10
    effort = LowerSetsEffort(
        max_nodes=8,
        budget_count=1,
        bisection_count=0,
        improved_count=0,
        executed_ops=1,
    )
    assert solved(graph, budget, LowerSets(effort=effort)).status is Status.FEASIBLE
