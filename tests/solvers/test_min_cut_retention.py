"""MinCutRetention: its order builder, its cuts, and how good its answers are."""

import random
import time
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instances import (
    densenet_like,
    mlp_chain,
    once_only,
    resnet_like,
    transformer_like,
    unet_like,
)
from tests.oracles import brute_force_best
from tests.strategies import graphs

from remat.backends.max_flow import FlowNetwork, min_cut_source_side
from remat.core.bounds import cost_bound_ns
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Result, Status, StopReason
from remat.core.simulator import Trace, simulate
from remat.planning.portfolio import solve
from remat.search.eviction import evicting_order
from remat.solvers.chen import ChenGreedy
from remat.solvers.min_cut_retention import MinCutRetention
from remat.solvers.recompute_order import (
    KEEP,
    RELEASE,
    TRANSIENT,
    Evaluation,
    UseTables,
    evaluate,
    policies_of_order,
    use_tables,
)
from remat.solvers.retention_cut import RetentionCut
from remat.testing import budgets_between, store_all_peak_bytes


def ask(
    graph: TrainingGraph, budget_bytes: int | None, limits: Limits | None = None
) -> Result:
    problem = Problem(graph=graph, platform=single_device(budget_bytes))
    return solve(problem, MinCutRetention(effort_ops=0), limits=limits)


def replay(graph: TrainingGraph, order: list[int]) -> Trace:
    trace = simulate(graph, single_device(), schedule_from_order(graph, order))
    assert trace.violation is None
    return trace


def check_evaluation(graph: TrainingGraph, found: Evaluation) -> None:
    trace = replay(graph, found.order)
    assert found.cost_ns == trace.serial_ns
    assert found.peak_bytes == trace.peak_bytes[0]
    assert len(found.positions) == len(found.timeline_bytes) == len(found.order)
    assert found.positions == sorted(found.positions)


def some_policies(tables: UseTables, seed: int) -> bytearray:
    source = random.Random(seed)
    weights = [source.random() + 0.01 for _ in range(3)]
    count = len(tables.interval_start)
    return bytearray(source.choices((KEEP, RELEASE, TRANSIENT), weights, k=count))


NETWORKS = {
    "mlp": mlp_chain,
    "resnet": lambda: resnet_like(4),
    "transformer": lambda: transformer_like(2),
    "densenet": lambda: densenet_like(4),
    "unet": lambda: unet_like(2),
    "once-only": once_only,
}


def small_chain() -> TrainingGraph:
    """Two forward ops a -> b; the backward op reads both: costs 10 and 1."""
    return TrainingGraph(
        name="chain",
        storages=tuple(
            Storage(name=n, size_bytes=s) for n, s in zip("abg", (4, 4, 1), strict=True)
        ),
        ops=(
            Op(
                name="A",
                reads=(),
                writes=(0,),
                cost_ns=(10,),
                workspace_bytes=(0,),
                phase=Phase.FORWARD,
            ),
            Op(
                name="B",
                reads=(0,),
                writes=(1,),
                cost_ns=(1,),
                workspace_bytes=(0,),
                phase=Phase.FORWARD,
            ),
            Op(
                name="C",
                reads=(0, 1),
                writes=(2,),
                cost_ns=(5,),
                workspace_bytes=(0,),
                phase=Phase.BACKWARD,
            ),
        ),
        forward_outputs=(1,),
        final_outputs=(2,),
    )


class TestEvaluation:
    @pytest.mark.parametrize("name", NETWORKS)
    def test_keeping_everything_is_storing_all(self, name: str):
        graph = NETWORKS[name]().graph
        tables = use_tables(graph)
        found = evaluate(tables, bytes(len(tables.interval_start)))
        assert found.order == store_all_order(graph)
        check_evaluation(graph, found)

    @pytest.mark.parametrize("name", NETWORKS)
    @pytest.mark.parametrize("seed", range(8))
    def test_evaluation_is_what_the_simulator_says(self, name: str, seed: int):
        graph = NETWORKS[name]().graph
        tables = use_tables(graph)
        check_evaluation(graph, evaluate(tables, some_policies(tables, seed)))

    @settings(max_examples=200)
    @given(graph=graphs(max_ops=9), seed=st.integers(0, 99))
    def test_evaluation_is_exact_on_any_graph(self, graph: TrainingGraph, seed: int):
        tables = use_tables(graph)
        check_evaluation(graph, evaluate(tables, some_policies(tables, seed)))

    def test_released_value_is_recomputed_right_before_its_use(self):
        graph = small_chain()
        tables = use_tables(graph)
        policies = bytearray(len(tables.interval_start))
        # The last use of storage 0 in forward is op 1, at position 1.
        interval = tables.first_interval[0] + 1
        assert tables.interval_start[interval] == 1
        policies[interval] = RELEASE
        found = evaluate(tables, policies)
        assert found.order == [0, 1, BOUNDARY, 0, 2]
        assert found.positions == [0, 1, 2, 3, 3]
        assert found.timeline_bytes == [4, 8, 4, 8, 9]
        assert found.cost_ns == 26

    def test_op_needed_by_backward_alone_waits_without_running_twice(self):
        graph = small_chain()
        graph = TrainingGraph(
            name="delayed",
            storages=graph.storages,
            ops=graph.ops,
            forward_outputs=(0,),
            final_outputs=(2,),
        )
        tables = use_tables(graph)
        policies = bytearray(len(tables.interval_start))
        policies[tables.first_interval[1]] = RELEASE
        found = evaluate(tables, policies)
        assert found.order == [0, BOUNDARY, 1, 2]
        assert found.cost_ns == cost_bound_ns(
            Problem(graph=graph, platform=single_device())
        )

    def test_transient_value_is_recomputed_for_each_reader(self):
        # The loss reads only the last value; both gradients ask for the first.
        graph = mlp_chain(3).graph
        tables = use_tables(graph)
        crossing = RetentionCut(graph, tables).crossing
        lasting = evaluate(
            tables,
            bytes(
                RELEASE if i in crossing.values() else KEEP
                for i in range(len(tables.interval_start))
            ),
        )
        brief = evaluate(
            tables,
            bytes(
                TRANSIENT if i in crossing.values() else KEEP
                for i in range(len(tables.interval_start))
            ),
        )
        assert max(lasting.order.count(op) for op in lasting.order) == 2
        assert max(brief.order.count(op) for op in brief.order) > 2
        assert brief.peak_bytes <= lasting.peak_bytes

    def test_op_that_may_run_once_never_runs_twice(self):
        graph = once_only().graph
        tables = use_tables(graph)
        found = evaluate(tables, bytes([TRANSIENT] * len(tables.interval_start)))
        for index, op in enumerate(graph.ops):
            if not op.is_recomputable:
                assert found.order.count(index) == 1


class TestPoliciesOfOrder:
    @pytest.mark.parametrize("name", NETWORKS)
    @pytest.mark.parametrize("seed", range(4))
    def test_order_of_kept_storages_is_recovered(self, name: str, seed: int):
        graph = NETWORKS[name]().graph
        tables = use_tables(graph)
        cut = RetentionCut(graph, tables)
        source = random.Random(seed)
        kept = frozenset(s for s in cut.storages if source.random() < 0.5)
        first = evaluate(tables, cut.policies(kept))
        again = evaluate(tables, policies_of_order(tables, first.order))
        assert again.cost_ns == first.cost_ns
        assert again.peak_bytes == first.peak_bytes

    def test_order_of_an_execution_is_recovered_closely(self):
        graph = transformer_like(3).graph
        tables = use_tables(graph)
        budget = store_all_peak_bytes(graph) * 6 // 10
        order = evicting_order(graph, budget)
        assert order is not None
        trace = replay(graph, order)
        found = evaluate(tables, policies_of_order(tables, order))
        assert found.peak_bytes <= trace.peak_bytes[0] * 1.05
        assert found.cost_ns <= trace.serial_ns * 1.05


def priced_ns(cut: RetentionCut, kept: frozenset[int], price: float) -> float:
    """Price of the kept bytes and time to recompute the rest, by definition."""
    tables = cut.tables
    total = 0.0
    for storage in kept:
        start = tables.interval_start[cut.crossing[storage]] + 1
        span = max(0, cut.first_need[storage] - start)
        total += price * span * tables.size_bytes[storage]
    wanted = [s for reads in tables.reads_at[tables.boundary + 1 :] for s in reads]
    pending = [s for s in (*wanted, *tables.final_outputs) if s in cut.crossing]
    again: set[int] = set()
    while pending:
        storage = pending.pop()
        op = tables.producer[storage]
        if storage not in kept and op not in again:
            if tables.is_pinned[storage]:
                return float("inf")
            again.add(op)
            total += 0 if cut.is_postponable[op] else tables.cost_ns[op]
            pending.extend(tables.reads[op])
    return total


class TestRetentionCut:
    @pytest.mark.parametrize("price", [0.0, 0.001, 0.03, 0.1, 1.0, 30.0])
    def test_cut_is_the_cheapest_of_all_choices(self, price: float):
        graph = mlp_chain(4).graph
        tables = use_tables(graph)
        cut = RetentionCut(graph, tables)
        kept = cut.kept([price] * len(tables.base))
        best = min(
            priced_ns(cut, frozenset(choice), price)
            for count in range(len(cut.storages) + 1)
            for choice in combinations(cut.storages, count)
        )
        assert priced_ns(cut, kept, price) == pytest.approx(best, rel=1e-6)

    @settings(max_examples=60)
    @given(graph=graphs(max_ops=5), price=st.sampled_from([0.01, 0.3, 1.0, 7.0]))
    def test_cut_is_the_cheapest_on_any_graph(self, graph: TrainingGraph, price: float):
        tables = use_tables(graph)
        cut = RetentionCut(graph, tables)
        found = priced_ns(cut, cut.kept([price] * len(tables.base)), price)
        for count in range(len(cut.storages) + 1):
            for choice in combinations(cut.storages, count):
                best = priced_ns(cut, frozenset(choice), price)
                assert found <= best * (1 + 1e-6) + 1e-3

    @pytest.mark.parametrize("price", [0.7, 1.2, 3.3, 7.0, 9.1])
    def test_what_may_run_once_is_kept_at_any_price(self, price: float):
        # One price makes up all finite capacities, so that rounding shows.
        def op(phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
            return Op(
                name="op",
                reads=reads,
                writes=writes,
                cost_ns=(0,),
                workspace_bytes=(0,),
                phase=phase,
                non_recomputable="it draws random numbers",
            )

        graph = TrainingGraph(
            name="kept",
            storages=(
                Storage(name="input", size_bytes=1, is_resident=True),
                Storage(name="drawn", size_bytes=1),
            ),
            ops=(
                op(Phase.FORWARD, (), (1,)),
                op(Phase.FORWARD, (), ()),
                op(Phase.BACKWARD, (1,), ()),
            ),
            final_outputs=(1,),
        )
        tables = use_tables(graph)
        cut = RetentionCut(graph, tables)
        assert cut.kept([price] * len(tables.base)) == {1}

    def test_free_bytes_are_all_kept(self):
        graph = resnet_like(3).graph
        tables = use_tables(graph)
        cut = RetentionCut(graph, tables)
        kept = cut.kept([0.0] * len(tables.base))
        found = evaluate(tables, cut.policies(kept))
        assert found.order == store_all_order(graph)

    def test_dearer_bytes_are_kept_less(self):
        graph = transformer_like(3).graph
        tables = use_tables(graph)
        cut = RetentionCut(graph, tables)
        sizes = [
            sum(tables.size_bytes[s] for s in cut.kept([price] * len(tables.base)))
            for price in (1e-6, 1e-4, 1e-2, 1.0)
        ]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > sizes[-1]

    def test_separators_make_smaller_segments_need_less_memory(self):
        graph = transformer_like(6).graph
        tables = use_tables(graph)
        cut = RetentionCut(graph, tables)
        total = sum(tables.output_bytes[: tables.boundary])
        peaks = [
            evaluate(tables, cut.policies(cut.separators(total // n))).peak_bytes
            for n in (1, 3, 6)
        ]
        assert peaks == sorted(peaks, reverse=True)
        assert peaks[-1] < peaks[0]

    def test_policies_keep_what_they_were_made_for(self):
        graph = unet_like(2).graph
        cut = RetentionCut(graph, use_tables(graph))
        kept = frozenset(cut.storages[::2])
        assert cut.kept_by(cut.policies(kept)) == kept


class TestMaxFlow:
    def test_smallest_source_side_of_a_diamond(self):
        network = FlowNetwork(tails=(0, 0, 2, 3), heads=(2, 3, 1, 1))
        assert min_cut_source_side(network, [1, 9, 5, 2]) == {0, 3}

    def test_negative_capacity_is_refused(self):
        network = FlowNetwork(tails=(0,), heads=(1,))
        with pytest.raises(ValueError, match="at least 0"):
            min_cut_source_side(network, [-1])


class TestAnswers:
    @pytest.mark.parametrize("name", ["resnet", "transformer", "densenet"])
    def test_cheaper_than_chen(self, name: str):
        graph = NETWORKS[name]().graph
        budget = store_all_peak_bytes(graph) * 6 // 10
        problem = Problem(graph=graph, platform=single_device(budget))
        found, chen = ask(graph, budget), solve(problem, ChenGreedy())
        assert found.trace is not None
        assert found.trace.peak_bytes[0] <= budget
        if chen.cost_ns is not None:
            assert found.trace.serial_ns < chen.cost_ns

    def test_recomputes_little_at_six_tenths_of_the_peak(self):
        # Per-block checkpointing recomputes all of forward, a third of the step.
        graph = transformer_like(6).graph
        found = ask(graph, store_all_peak_bytes(graph) * 6 // 10)
        assert found.trace is not None
        assert found.trace.recomputed_ns < 0.1 * found.trace.serial_ns

    def test_ample_budget_costs_the_bound(self):
        graph = resnet_like(3).graph
        for budget in (None, store_all_peak_bytes(graph)):
            found = ask(graph, budget)
            assert found.status is Status.FEASIBLE
            assert found.cost_ns == found.bound_ns

    def test_budget_below_the_floor_is_unknown(self):
        found = ask(mlp_chain(3).graph, 1)
        assert found.status is Status.UNKNOWN
        assert "every schedule needs" in found.message

    def test_budget_that_nothing_fits_tells_the_smallest_peak(self):
        graph = transformer_like(2).graph
        found = ask(graph, budgets_between(graph, 40)[1])
        assert found.status is Status.UNKNOWN
        assert "the smallest peak is" in found.message

    @settings(max_examples=25)
    @given(graph=graphs(max_ops=5, sizes=st.integers(0, 9)), share=st.integers(0, 3))
    def test_never_beats_and_often_meets_brute_force(
        self, graph: TrainingGraph, share: int
    ):
        budget = max(1, store_all_peak_bytes(graph) * (share + 3) // 6)
        best, found = brute_force_best(graph, budget), ask(graph, budget)
        if best is None:
            assert found.status is Status.UNKNOWN
        elif found.cost_ns is not None:
            assert found.cost_ns >= best

    def test_same_seed_gives_the_same_schedule(self):
        graph = unet_like(2).graph
        budget = store_all_peak_bytes(graph) * 6 // 10
        first, second = (ask(graph, budget, Limits(seed=3)) for _ in range(2))
        assert first.schedule == second.schedule

    def test_deadline_in_the_past_is_kept(self):
        graph = transformer_like(6).graph
        started = time.process_time()
        found = ask(graph, store_all_peak_bytes(graph) // 2, Limits.after(0))
        assert time.process_time() - started < 2
        assert found.stop_reason is StopReason.TIME_LIMIT

    def test_progress_is_between_nothing_and_all(self):
        graph = resnet_like(3).graph
        seen: list[tuple[str, float]] = []
        MinCutRetention(effort_ops=0).solve(
            Problem(
                graph=graph,
                platform=single_device(store_all_peak_bytes(graph) * 6 // 10),
            ),
            Limits(),
            lambda activity, share: seen.append((activity, share)),
        )
        shares = [share for _, share in seen]
        assert shares == sorted(shares)
        assert shares[0] == 0
        assert shares[-1] <= 1
        assert {"choosing what to keep", "trying orders"} <= {
            activity for activity, _ in seen
        }
