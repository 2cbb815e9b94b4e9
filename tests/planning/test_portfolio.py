"""Planning: what the judge refuses, and how a portfolio chooses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
from tests.garbage import holds_its_callers
from tests.instances import mlp_chain, once_only

from remat.core.bounds import cost_bound_ns
from remat.core.errors import SolverFault, SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import Device, Link, Platform, single_device
from remat.core.problem import Limits, Problem, Proposal, Result, Status, StopReason
from remat.core.schedule import Boundary, Compute, Discard, Schedule
from remat.core.simulator import simulate
from remat.planning.plan import STOP_REASON, plan_settings
from remat.planning.portfolio import judge, solve, solve_portfolio
from remat.solvers import (
    SOLVERS,
    ChenGreedy,
    ChenSqrt,
    GreedyEviction,
    LocalSearch,
    StoreAll,
)
from remat.solvers.base import ProgressCallback, Solver
from remat.testing import store_all_peak_bytes


@dataclass(frozen=True)
class Scripted:
    """A solver that answers what it is told to."""

    schedule_class: ClassVar[str] = "one schedule"
    is_exact: ClassVar[bool] = False

    answer: Callable[[Problem], Proposal]

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        return self.answer(problem)


class Unsuitable(Scripted):
    def __init__(self) -> None:
        super().__init__(self.refuse)

    @staticmethod
    def refuse(_: Problem) -> Proposal:
        raise SolverUnsuitableError("only for chains")


def store_all(graph: TrainingGraph) -> Schedule:
    return schedule_from_order(graph, store_all_order(graph))


def problem(budget_bytes: int | None = None) -> Problem:
    return Problem(graph=mlp_chain().graph, platform=single_device(budget_bytes))


def feasible(schedule: Schedule, bound_ns: int = 0) -> Proposal:
    return Proposal(status=Status.FEASIBLE, schedule=schedule, bound_ns=bound_ns)


def without(schedule: Schedule, index: int) -> Schedule:
    return Schedule(schedule.steps[:index] + schedule.steps[index + 1 :])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: Schedule(()),
        lambda s: without(s, 0),
        lambda s: without(s, s.steps.index(Boundary())),
        lambda s: Schedule((*s.steps, Compute(0, 3))),
        lambda s: Schedule((*s.steps, Discard(0))),
        lambda s: Schedule((*s.steps, Compute(99_999))),
        lambda s: Schedule(s.steps[::-1]),
    ],
)
def test_an_invalid_schedule_is_the_solvers_fault(
    spoil: Callable[[Schedule], Schedule],
):
    asked = problem()
    liar = Scripted(lambda p: feasible(spoil(store_all(p.graph))))
    with pytest.raises(SolverFault, match="solver Scripted returned"):
        solve(asked, liar)


def test_a_schedule_over_the_budget_is_the_solvers_fault():
    budget = store_all_peak_bytes(mlp_chain().graph) - 1
    liar = Scripted(lambda p: feasible(store_all(p.graph)))
    with pytest.raises(SolverFault, match="budget"):
        solve(problem(budget), liar)


def test_a_bound_above_the_own_cost_is_the_solvers_fault():
    liar = Scripted(lambda p: feasible(store_all(p.graph), bound_ns=10**15))
    with pytest.raises(SolverFault, match="claims a bound of 1_000_000_000_000_000 ns"):
        solve(problem(), liar)


def test_running_twice_what_may_run_once_is_the_solvers_fault():
    graph = once_only().graph
    asked = Problem(graph=graph, platform=single_device())
    order = store_all_order(graph)
    liar = Scripted(lambda p: feasible(schedule_from_order(p.graph, [*order, 0])))
    with pytest.raises(SolverFault, match="runs again"):
        solve(asked, liar)


def test_one_byte_decides():
    graph = mlp_chain().graph
    peak = store_all_peak_bytes(graph)
    honest = Scripted(lambda p: feasible(store_all(p.graph)))
    assert solve(problem(peak), honest).status is Status.FEASIBLE
    with pytest.raises(SolverFault):
        solve(problem(peak - 1), honest)


def test_the_result_is_what_the_simulator_says():
    asked = problem()
    result = solve(asked, Scripted(lambda p: feasible(store_all(p.graph))))
    assert result.schedule is not None
    assert result.trace == simulate(asked.graph, asked.platform, result.schedule)
    assert result.trace is not None
    assert result.cost_ns == result.trace.serial_ns
    assert result.bound_ns == cost_bound_ns(asked)
    assert result.elapsed_s >= 0


def test_the_stronger_bound_is_reported():
    asked = problem()
    cost_ns = solve(asked, StoreAll()).cost_ns or 0
    schedule = store_all(asked.graph)
    assert judge(asked, "x", feasible(schedule, cost_ns)).bound_ns == cost_ns
    assert judge(asked, "x", feasible(schedule, 1)).bound_ns == cost_bound_ns(asked)


def test_an_answer_without_a_schedule_passes_with_its_message():
    nothing = Proposal(status=Status.UNKNOWN, message="too hard")
    result = solve(problem(), Scripted(lambda _: nothing))
    assert (result.status, result.message) == (Status.UNKNOWN, "too hard")
    assert (result.cost_ns, result.gap, result.trace) == (None, None, None)


def test_an_improver_starts_from_the_best_when_all_have_run():
    peak = store_all_peak_bytes(mlp_chain().graph)
    asked = problem(peak * 9 // 10)
    solvers = [ChenSqrt(), GreedyEviction()]
    before = solve_portfolio(asked, solvers)
    starts: list[Result] = []

    def improver(best: Result) -> Solver:
        starts.append(best)
        assert best.schedule is not None
        return LocalSearch(starts=(best.schedule,))

    result = solve_portfolio(asked, solvers, improver=improver)
    assert [best.cost_ns for best in starts] == [before.cost_ns]
    assert result.cost_ns is not None
    assert before.cost_ns is not None
    assert result.cost_ns <= before.cost_ns
    assert result.candidates[:2] == before.candidates
    assert result.candidates[2].startswith("LocalSearch: ")


def test_nothing_is_improved_where_nothing_is_found_or_the_best_is_near():
    def improver(_: Result) -> Solver:
        raise AssertionError

    nothing = solve_portfolio(problem(1), [StoreAll()], improver=improver)
    assert nothing.schedule is None
    found = solve_portfolio(problem(), [ChenSqrt(), StoreAll()], improver=improver)
    assert found.cost_ns == cost_bound_ns(problem())
    peak = store_all_peak_bytes(mlp_chain().graph)
    near = solve_portfolio(
        problem(peak * 9 // 10),
        [GreedyEviction()],
        improver=improver,
        is_near=lambda _: True,
    )
    assert near.solver == "GreedyEviction"


def test_an_improver_that_has_nothing_to_do_ends_the_portfolio():
    peak = store_all_peak_bytes(mlp_chain().graph)
    result = solve_portfolio(
        problem(peak * 9 // 10),
        [ChenGreedy()],
        quick=[(GreedyEviction(), 0.9)],
        limits=Limits.after(60.0),
        improver=lambda _: None,
    )
    assert len(result.candidates) == 1


def test_where_time_is_limited_it_improves_before_the_thorough_ones_too():
    peak = store_all_peak_bytes(mlp_chain().graph)
    asked = problem(peak * 9 // 10)
    starts: list[Result] = []

    def improver(best: Result) -> Solver:
        starts.append(best)
        return ChenSqrt()

    solve_portfolio(
        asked,
        [ChenGreedy()],
        quick=[(GreedyEviction(), 0.9)],
        limits=Limits.after(60.0),
        improver=improver,
    )
    assert len(starts) == 2


def test_the_cheapest_schedule_of_a_portfolio_wins():
    peak = store_all_peak_bytes(mlp_chain().graph)
    asked = problem(peak * 9 // 10)
    solvers = [ChenSqrt(), ChenGreedy(), GreedyEviction(), StoreAll()]
    costs = [solve(asked, one).cost_ns for one in solvers]
    result = solve_portfolio(asked, solvers)
    assert result.cost_ns == min(cost for cost in costs if cost is not None)
    assert len(result.candidates) == len(solvers)
    assert "ChenSqrt: feasible" in result.candidates[0]
    assert "StoreAll: infeasible" in result.candidates[-1]


def test_a_portfolio_says_that_one_of_its_searches_was_interrupted():
    graph = mlp_chain().graph
    slow = schedule_from_order(graph, [*store_all_order(graph), 0])
    nothing = Proposal(status=Status.UNKNOWN, stop_reason=StopReason.INTERRUPTED)
    solvers = [Scripted(lambda _: nothing), Scripted(lambda _: feasible(slow))]
    result = solve_portfolio(problem(), solvers)
    assert result.schedule == slow
    assert result.stop_reason is StopReason.INTERRUPTED
    settings = plan_settings(None, "auto", 0, result)
    assert settings[STOP_REASON] == StopReason.INTERRUPTED
    whole = solve_portfolio(problem(), solvers[1:])
    assert STOP_REASON not in plan_settings(None, "auto", 0, whole)


def test_of_equal_costs_the_smaller_peak_wins():
    graph = mlp_chain().graph
    # Freeing nothing costs the same time and more memory.
    wasteful = Schedule(
        tuple(s for s in store_all(graph).steps if not isinstance(s, Discard))
    )
    # A schedule that meets the bound would end the search before the second.
    order = [*store_all_order(graph), 0]
    slow = schedule_from_order(graph, order)
    slow_wasteful = Schedule((*wasteful.steps, Compute(0)))
    solvers = [
        Scripted(lambda _: feasible(slow_wasteful)),
        Scripted(lambda _: feasible(slow)),
    ]
    assert solve_portfolio(problem(), solvers).schedule == slow


def test_a_portfolio_stops_at_a_schedule_that_nothing_can_beat():
    result = solve_portfolio(problem(), [StoreAll(), ChenGreedy()])
    assert len(result.candidates) == 1
    assert result.solver == "StoreAll"


def test_a_portfolio_skips_solvers_that_do_not_suit():
    result = solve_portfolio(problem(), [Unsuitable(), StoreAll()])
    assert result.solver == "StoreAll"
    assert result.candidates[0] == "Unsuitable: unsuitable: only for chains"


def test_solvers_that_do_not_suit_keep_no_value_of_their_callers():
    solvers = [Unsuitable(), StoreAll()]
    assert not holds_its_callers(lambda: solve_portfolio(problem(), solvers))


def test_a_portfolio_of_unsuitable_solvers_says_so():
    with pytest.raises(SolverUnsuitableError, match="only for chains"):
        solve_portfolio(problem(), [Unsuitable()])
    with pytest.raises(SolverUnsuitableError, match="no solver"):
        solve_portfolio(problem(), [])


def test_a_liar_in_a_portfolio_is_found_out():
    liar = Scripted(lambda _: feasible(Schedule(())))
    with pytest.raises(SolverFault):
        solve_portfolio(problem(), [liar, StoreAll()])


def test_a_portfolio_without_a_schedule_is_unknown_or_infeasible():
    result = solve_portfolio(problem(1), [StoreAll(), GreedyEviction()])
    assert result.schedule is None
    assert not result.status.has_schedule


def test_progress_ends_at_one():
    seen: list[tuple[str, float]] = []
    solve_portfolio(
        problem(store_all_peak_bytes(mlp_chain().graph) * 9 // 10),
        [ChenSqrt(), GreedyEviction()],
        on_progress=lambda what, share: seen.append((what, share)),
    )
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert [what for what, _ in seen] == [
        "trying chen-sqrt",
        "trying greedy-eviction",
        "done",
    ]


_FIGURES = ("best so far ", "none below ", "no schedule yet")


@pytest.mark.parametrize("name", SOLVERS)
def test_progress_is_in_words_that_a_user_knows(name: str):
    seen: list[str] = []
    peak_bytes = store_all_peak_bytes(mlp_chain().graph)
    try:
        solve(
            problem(peak_bytes * 9 // 10),
            SOLVERS[name](),
            limits=Limits.after(20),
            on_progress=lambda what, _: seen.append(what),
        )
    except SolverUnsuitableError:
        return
    # What is being done, or figures; never the name of a class.
    for what in seen:
        assert what.startswith(_FIGURES) or what.split()[0].endswith("ing"), what


SEVERAL_DEVICES = {"store-all", "device-search", "xengine", "xengine-published"}


@pytest.mark.parametrize("name", [n for n in SOLVERS if n not in SEVERAL_DEVICES])
def test_one_device_solvers_refuse_storages_elsewhere(name: str):
    graph = mlp_chain().graph
    moved = TrainingGraph(
        name="two homes",
        storages=(
            *graph.storages[:-1],
            type(graph.storages[-1])(name="far", size_bytes=4, home=1),
        ),
        ops=graph.ops,
        forward_outputs=graph.forward_outputs,
        tangents=graph.tangents,
    )
    platform = Platform(
        devices=(Device(), Device(name="other")),
        links=(Link(source=0, target=1, bytes_per_s=1),),
    )
    asked = Problem(graph=moved, platform=platform)
    with pytest.raises(SolverUnsuitableError, match="home device 1"):
        solve(asked, SOLVERS[name]())
