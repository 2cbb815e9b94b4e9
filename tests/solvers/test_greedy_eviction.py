"""GreedyEviction: what eviction does on small graphs, and how well on large ones."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instances import (
    INSTANCES,
    densenet_like,
    mlp_chain,
    once_only,
    resnet_like,
    transformer_like,
    unet_like,
)
from tests.oracles import brute_force_best
from tests.strategies import graphs

from remat.core.bounds import peak_bound_bytes
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Result, Status, StopReason
from remat.core.simulator import Trace, simulate
from remat.planning.portfolio import solve
from remat.search.eviction import EvictionRule, evicting_order
from remat.solvers.chen import ChenGreedy, segment_order
from remat.solvers.greedy_eviction import CANDIDATES, Candidate, GreedyEviction
from remat.testing import budgets_between, store_all_peak_bytes


def ask(graph: TrainingGraph, budget_bytes: int | None, **options: object) -> Result:
    problem = Problem(graph=graph, platform=single_device(budget_bytes))
    return solve(problem, GreedyEviction(), **options)  # pyright: ignore[reportArgumentType]


def replay(graph: TrainingGraph, order: list[int]) -> Trace:
    trace = simulate(graph, single_device(), schedule_from_order(graph, order))
    assert trace.violation is None
    return trace


def per_block(graph: TrainingGraph, starts: tuple[int, ...]) -> Trace:
    """Return what checkpointing each block costs: its input stays, its inside goes."""
    return replay(graph, segment_order(graph, starts))


@pytest.mark.parametrize(
    "instance",
    [
        transformer_like(4),
        transformer_like(12),
        transformer_like(8, dropout=False),
        resnet_like(8),
        resnet_like(16),
        densenet_like(2, 6),
        densenet_like(3, 8),
        unet_like(3),
        unet_like(4),
    ],
    ids=lambda instance: instance.name,
)
def test_at_the_memory_of_checkpointing_each_block_it_costs_no_more(instance):
    reference = per_block(instance.graph, instance.block_starts)
    result = ask(instance.graph, reference.peak_bytes[0])
    assert result.cost_ns is not None
    assert result.cost_ns <= reference.serial_ns
    # The point of choosing freely: far below a second forward pass.
    plain = replay(instance.graph, store_all_order(instance.graph)).serial_ns
    assert (result.cost_ns - plain) <= 0.8 * (reference.serial_ns - plain)


@pytest.mark.parametrize("name", ["resnet", "densenet", "unet", "transformer", "mlp"])
def test_it_is_no_worse_than_the_best_segments(name: str):
    graph = INSTANCES[name]().graph
    for budget in budgets_between(graph, 6):
        problem = Problem(graph=graph, platform=single_device(budget))
        segments = solve(problem, ChenGreedy()).cost_ns
        found = ask(graph, budget).cost_ns
        assert segments is None or (found is not None and found <= segments)


@pytest.mark.parametrize(
    ("name", "percent"),
    [("mlp", 75), ("resnet", 30), ("transformer", 45), ("densenet", 25), ("unet", 40)],
)
def test_it_reaches_budgets_far_below_the_plain_peak(name: str, percent: int):
    graph = INSTANCES[name]().graph
    budget = store_all_peak_bytes(graph) * percent // 100
    result = ask(graph, budget)
    assert result.trace is not None
    assert result.trace.peak_bytes[0] <= budget


@settings(max_examples=60)
@given(graph=graphs(max_ops=6, sizes=st.integers(0, 9)), share=st.integers(0, 4))
def test_on_tiny_graphs_it_is_rarely_far_from_the_optimum(
    graph: TrainingGraph, share: int
):
    low, high = peak_bound_bytes(graph), store_all_peak_bytes(graph)
    budget = max(1, low + (high - low) * share // 4)
    cost_ns = ask(graph, budget).cost_ns
    optimum_ns = brute_force_best(graph, budget)
    if cost_ns is not None:
        assert optimum_ns is not None
        assert cost_ns >= optimum_ns
    if budget == max(1, high):
        assert cost_ns == optimum_ns


@given(
    graph=graphs(),
    share=st.integers(0, 4),
    rule=st.builds(
        EvictionRule,
        size_exponent=st.sampled_from([0.0, 1.0]),
        distance_exponent=st.sampled_from([0.0, 0.5, 1.0]),
        ancestor_share=st.sampled_from([0.0, 1.0]),
    ),
)
def test_an_evicting_order_keeps_to_its_limit(
    graph: TrainingGraph, share: int, rule: EvictionRule
):
    low, high = peak_bound_bytes(graph), store_all_peak_bytes(graph)
    limit = low + (high - low) * share // 4
    order = evicting_order(graph, limit, rule=rule)
    if order is not None:
        assert replay(graph, order).peak_bytes[0] <= limit


@pytest.mark.parametrize("name", ["mlp", "transformer", "unet", "resnet"])
def test_one_byte_less_than_an_order_needs_gives_another_order(name: str):
    graph = INSTANCES[name]().graph
    limit = store_all_peak_bytes(graph) - 1
    seen = 0
    while (order := evicting_order(graph, limit)) is not None:
        peak = replay(graph, order).peak_bytes[0]
        assert peak <= limit
        limit, seen = peak - 1, seen + 1
    assert seen > 2


def test_the_limit_is_kept_to_the_byte():
    graph = TrainingGraph(
        name="one op",
        storages=(
            Storage(name="w", size_bytes=7, is_resident=True),
            Storage(name="y", size_bytes=10),
        ),
        ops=(
            Op(
                name="f",
                reads=(0,),
                writes=(1,),
                cost_ns=(1,),
                workspace_bytes=(3,),
                phase=Phase.FORWARD,
            ),
        ),
        forward_outputs=(1,),
    )
    assert evicting_order(graph, 7 + 10 + 3) == [0, BOUNDARY]
    assert evicting_order(graph, 7 + 10 + 3 - 1) is None


@given(graph=graphs(), count=st.integers(0, 3))
def test_forward_that_saves_only_some_still_computes_everything(
    graph: TrainingGraph, count: int
):
    order = evicting_order(graph, 1 << 60, saved=frozenset(range(count)))
    assert order is not None
    replay(graph, order)


def test_what_may_run_once_runs_once():
    graph = once_only().graph
    peak = store_all_peak_bytes(graph)
    for budget in range(peak * 7 // 10, peak, peak // 40):
        result = ask(graph, budget)
        if result.schedule is not None:
            for op, count in result.schedule.recompute_counts().items():
                assert graph.ops[op].is_recomputable
                assert count > 0


def test_it_does_not_recompute_when_everything_fits():
    graph = transformer_like(4).graph
    result = ask(graph, None)
    assert result.schedule is not None
    assert result.schedule.recompute_counts() == {}
    assert result.gap == 0


def test_below_the_bound_it_says_what_every_schedule_needs():
    graph = mlp_chain().graph
    result = ask(graph, peak_bound_bytes(graph) - 1)
    assert result.status is Status.UNKNOWN
    assert "every schedule needs" in result.message


def test_just_above_the_bound_it_may_give_up_but_not_loop():
    graph = densenet_like(2, 6).graph
    started = time.process_time()
    result = ask(graph, peak_bound_bytes(graph))
    assert result.status in {Status.UNKNOWN, Status.FEASIBLE}
    assert time.process_time() - started < 60


def test_no_time_means_unknown_with_the_reason_why():
    graph = transformer_like(4).graph
    result = ask(graph, store_all_peak_bytes(graph) // 2, limits=Limits.after(0))
    assert result.status is Status.UNKNOWN
    assert result.stop_reason is StopReason.TIME_LIMIT


def test_more_candidates_never_cost_more():
    graph = resnet_like(8).graph
    budget = store_all_peak_bytes(graph) // 2
    problem = Problem(graph=graph, platform=single_device(budget))
    costs: list[int] = []
    for count in range(1, len(CANDIDATES) + 1):
        solver = GreedyEviction(
            candidates=CANDIDATES[:count], starts_from_segments=False
        )
        cost_ns = solve(problem, solver).cost_ns
        assert cost_ns is not None
        costs.append(cost_ns)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]


def test_a_candidate_that_is_given_up_is_skipped():
    graph = mlp_chain().graph
    budget = store_all_peak_bytes(graph) * 9 // 10
    problem = Problem(graph=graph, platform=single_device(budget))
    stuck = GreedyEviction(runs_per_op=0, starts_from_segments=False)
    assert solve(problem, stuck).status is Status.UNKNOWN
    tight = Candidate(rule=EvictionRule(), limit_percent=0)
    both = GreedyEviction(candidates=(tight, *CANDIDATES))
    assert solve(problem, both).cost_ns == ask(graph, budget).cost_ns


def test_two_thousand_ops_take_seconds():
    graph = transformer_like(80, dropout=False).graph
    assert len(graph.ops) > 1_500
    started = time.process_time()
    result = ask(graph, store_all_peak_bytes(graph) // 2)
    assert result.status is Status.FEASIBLE
    # Five on a quiet machine.
    assert time.process_time() - started < 40
