"""A time limit is kept: by shares of it, and by what is built within them."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from tests.instances import Instance, joined_towers, mlp_chain, transformer_like

from remat.core.bounds import peak_bound_bytes
from remat.core.deadline import TimeIsUpError, check_time, in_time
from remat.core.errors import BudgetError, SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Proposal, Result, Status, StopReason
from remat.native import core
from remat.planning.curve import trade_off
from remat.planning.one_device import plain_peak_bytes, plan_graph, raise_budget_error
from remat.planning.portfolio import solve, solve_portfolio
from remat.planning.smallest_budget import Floor, smallest_budget
from remat.solvers import SOLVERS, Checkmate, StoreAll, chosen_solvers, registry
from remat.solvers.base import ProgressCallback, solve_in_time
from remat.solvers.registry import AUTO, AUTO_IN_TIME, QUICK

ALLOWED_S = 1.0


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


@dataclass(frozen=True)
class Worker:
    """Notes the time that it gets, and takes some of it."""

    clock: Clock
    notes: list[float]
    takes_s: float
    finds: bool = False
    schedule_class: ClassVar[str] = "none"
    is_exact: ClassVar[bool] = True

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        given_s = limits.remaining_s
        assert given_s is not None
        self.notes.append(round(given_s, 6))
        self.clock.now_s += min(given_s, self.takes_s)
        if self.finds:
            unlimited = replace(problem, platform=single_device())
            return replace(StoreAll().solve(unlimited, limits, on_progress), bound_ns=0)
        return Proposal(status=Status.INFEASIBLE, message="my class is empty")


def half_way(graph: TrainingGraph) -> int:
    return (peak_bound_bytes(graph) + plain_peak_bytes(graph)) // 2


def problem_of(graph: TrainingGraph, budget_bytes: int | None) -> Problem:
    return Problem(graph=graph, platform=single_device(budget_bytes))


# --- shares ---------------------------------------------------------------------------


def test_each_solver_gets_an_equal_part_and_one_is_left_for_the_caller(clock: Clock):
    notes: list[float] = []
    graph = mlp_chain().graph
    workers = [Worker(clock, notes, 100.0) for _ in range(3)]
    result = solve_portfolio(
        problem_of(graph, half_way(graph)), workers, limits=Limits.after(8.0)
    )
    assert notes == [2.0, 2.0, 2.0]
    assert result.schedule is None


def test_what_one_leaves_over_goes_to_those_after_it(clock: Clock):
    notes: list[float] = []
    graph = mlp_chain().graph
    takes = [0.0, 1.0, 100.0]
    workers = [Worker(clock, notes, takes_s) for takes_s in takes]
    solve_portfolio(
        problem_of(graph, half_way(graph)), workers, limits=Limits.after(12.0)
    )
    assert notes == [3.0, 4.0, 5.5]


def test_nothing_is_left_for_the_caller_once_a_schedule_is_found(clock: Clock):
    notes: list[float] = []
    # The bound is not met, so that the search goes on.
    graph = costly_and_needless()
    workers = [
        Worker(clock, notes, 1.0, finds=True),
        Worker(clock, notes, 1.0),
        Worker(clock, notes, 100.0),
    ]
    solve_portfolio(problem_of(graph, None), workers, limits=Limits.after(8.0))
    assert notes == [2.0, 3.5, 6.0]


def costly_and_needless() -> TrainingGraph:
    """Return a graph with an op that no output needs."""
    graph = mlp_chain().graph
    return replace(graph, final_outputs=graph.final_outputs[:1])


def test_quick_solvers_come_first_and_may_take_nearly_all(clock: Clock):
    notes: list[float] = []
    graph = mlp_chain().graph
    solve_portfolio(
        problem_of(graph, half_way(graph)),
        [Worker(clock, notes, 100.0)],
        quick=[(Worker(clock, notes, 2.0), 0.9)],
        limits=Limits.after(10.0),
    )
    assert notes == [9.0, 4.0]


def quick_parts(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, *, slowdown: float, limit_s: float
) -> list[float]:
    """Return what four quick solvers get that find nothing, then two that do, ..."""
    begin_s = clock.now_s
    monkeypatch.setattr(time, "thread_time", lambda: (clock.now_s - begin_s) / slowdown)
    notes: list[float] = []
    workers = [
        (Worker(clock, notes, takes_s * slowdown, finds=finds), 0.5)
        for takes_s, finds in [(0.2, False), (0.5, True), (0.5, True), (0.5, False)]
    ]
    graph = costly_and_needless()
    solve_portfolio(
        problem_of(graph, None), [], quick=workers, limits=Limits.after(limit_s)
    )
    return notes


@pytest.mark.parametrize(
    ("slowdown", "limit_s", "expected"),
    [
        # Half of 1 s, then at least 0.7 s, as long as fewer than two have found any.
        (1.0, 1.0, [0.7, 0.7, 0.7]),
        # By the clock it is all over after the first one; by the processor it is not.
        (2.0, 1.0, [0.7, 1.4, 1.4]),
        # However busy the machine is.
        (8.0, 1.0, [0.7, 2.1, 2.1]),
        (1.0, 10.0, [5.0, 4.9, 4.65, 4.4]),
        # The turn of the third comes too late.
        (1.0, 0.3, [0.7, 0.7]),
    ],
)
def test_quick_solvers_get_what_they_need_for_a_first_schedule(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    slowdown: float,
    limit_s: float,
    expected: list[float],
):
    parts = quick_parts(clock, monkeypatch, slowdown=slowdown, limit_s=limit_s)
    assert parts == pytest.approx(expected)


def test_planning_in_time_asks_the_quick_solvers_too(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    graph = transformer_like(4).graph
    budget = half_way(graph)
    alone = plan_graph(graph, budget=budget, solver="greedy-eviction")
    monkeypatch.setattr(
        registry, "AUTO_IN_TIME", [lambda: Worker(clock, [], takes_s=0.0)] * 2
    )
    plan = plan_graph(graph, budget=budget, time_limit=1.0)
    quick = {type(solver).__name__ for solver, _ in QUICK}
    assert plan.solver in quick | {"LocalSearch"}
    assert plan.recomputed_op_count > 0
    assert plan.cost_ns <= alone.cost_ns


def test_solvers_whose_turn_comes_too_late_are_named_and_not_run(clock: Clock):
    notes: list[float] = []
    graph = mlp_chain().graph

    @dataclass(frozen=True)
    class Slow(Worker):
        def solve(
            self, problem: Problem, limits: Limits, on_progress: ProgressCallback
        ) -> Proposal:
            self.clock.now_s += 100.0
            return Proposal(status=Status.UNKNOWN)

    result = solve_portfolio(
        problem_of(graph, half_way(graph)),
        [Slow(clock, notes, 0.0), Worker(clock, notes, 1.0)],
        limits=Limits.after(10.0),
    )
    assert notes == []
    assert result.candidates[1] == "Worker: not run, as time was over"
    assert result.stop_reason is StopReason.TIME_LIMIT


def test_without_a_limit_the_portfolio_is_as_it_was():
    assert tuple(type(solver) for solver in chosen_solvers("auto")) == AUTO
    timed = tuple(type(solver) for solver in chosen_solvers("auto", is_timed=True))
    assert timed == AUTO_IN_TIME
    assert {*AUTO_IN_TIME, *(type(solver) for solver, _ in QUICK)} == {*AUTO}


# --- what a portfolio proves ----------------------------------------------------------


def test_the_claims_of_classes_are_no_proof_for_a_portfolio(clock: Clock):
    graph = mlp_chain().graph
    workers = [Worker(clock, [], 1.0) for _ in range(2)]
    result = solve_portfolio(
        problem_of(graph, peak_bound_bytes(graph)), workers, limits=Limits.after(9.0)
    )
    assert result.status is Status.UNKNOWN
    assert result.solver == "auto"


def test_below_the_bound_nothing_fits_whoever_is_asked(clock: Clock):
    graph = mlp_chain().graph
    workers = [Worker(clock, [], 1.0) for _ in range(2)]
    result = solve_portfolio(
        problem_of(graph, peak_bound_bytes(graph) - 1), workers, limits=Limits.after(9)
    )
    assert result.status is Status.INFEASIBLE
    assert result.message.startswith("every schedule needs ")


def test_the_claim_of_a_single_solver_is_its_own(clock: Clock):
    graph = mlp_chain().graph
    result = solve_portfolio(
        problem_of(graph, half_way(graph)),
        [Worker(clock, [], 1.0)],
        limits=Limits.after(9.0),
    )
    assert (result.solver, result.status) == ("Worker", Status.INFEASIBLE)


# --- deadlines deep down --------------------------------------------------------------


def test_the_earlier_of_two_deadlines_is_in_force(clock: Clock):
    with in_time(clock.now_s + 5):
        with in_time(clock.now_s + 9):
            clock.now_s += 6
            with pytest.raises(TimeIsUpError):
                check_time()
        with pytest.raises(TimeIsUpError), in_time(None):
            check_time()
    check_time()


@pytest.mark.skipif(core() is None, reason="the native core is not there")
@pytest.mark.parametrize("name", ["rotor", "join", "lower-sets"])
def test_the_native_core_asks_for_the_deadline(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """What is built before a search ends once the clock has moved past the limit."""
    graph = (joined_towers() if name == "join" else transformer_like(4)).graph
    problem = problem_of(graph, half_way(graph))
    ticks = itertools.count()
    start_s = time.monotonic()
    # Each look at the clock takes a tenth of the limit.
    monkeypatch.setattr(time, "monotonic", lambda: start_s + 0.1 * next(ticks))
    proposal = solve_in_time(SOLVERS[name](), problem, Limits(deadline_s=start_s + 1))
    assert proposal.stop_reason is StopReason.TIME_LIMIT
    assert next(ticks) < 1000


@pytest.fixture(scope="module")
def no_garbage_of_others() -> Iterator[None]:
    """Leave out of the collector's walks what the tests before have left behind.

    In a process that has run thousands of tests, a walk takes a second.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("no_garbage_of_others")
@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_with_no_time_at_all_every_solver_ends_at_once(name: str):
    graph = transformer_like(12).graph
    problem = problem_of(graph, half_way(graph))
    started = time.process_time()
    try:
        result = solve(problem, SOLVERS[name](), limits=Limits.after(0.0))
    except SolverUnsuitableError:
        return
    assert result.status is not Status.OPTIMAL or result.schedule is not None
    assert time.process_time() - started < ALLOWED_S + replay_s(problem)


def replay_s(problem: Problem) -> float:
    started = time.process_time()
    solve(problem_of(problem.graph, None), StoreAll())
    return time.process_time() - started


@pytest.mark.usefixtures("no_garbage_of_others")
@pytest.mark.parametrize("solver", ["auto", "greedy-eviction", "rotor", "checkmate"])
@pytest.mark.parametrize(
    "make", [lambda: transformer_like(200), lambda: mlp_chain(900)]
)
def test_planning_takes_the_limit_and_a_second(
    solver: str, make: Callable[[], Instance]
):
    graph = make().graph
    budget = half_way(graph)
    core()
    started = time.process_time()
    with suppress(BudgetError):
        plan_graph(graph, budget=budget, solver=solver, time_limit=0.5)
    used_s = time.process_time() - started
    assert used_s < 0.5 + ALLOWED_S + 2 * replay_s(problem_of(graph, budget))


@pytest.mark.usefixtures("no_garbage_of_others")
def test_the_search_for_the_smallest_budget_of_a_curve_is_limited_too():
    graph = mlp_chain(900).graph
    replays_s = 8 * replay_s(problem_of(graph, None))
    started = time.process_time()
    plans = trade_off(graph, 2, solver="store-all", time_limit=0.2)
    used_s = time.process_time() - started
    # The smallest budget and two more; without a limit it takes 25 s.
    assert used_s < 3 * (0.2 + ALLOWED_S) + replays_s
    assert plans


def test_a_graph_that_cannot_be_prepared_in_time_is_not_known_to_be_infeasible():
    graph = transformer_like(12).graph
    result = solve(
        problem_of(graph, half_way(graph)), Checkmate(), limits=Limits.after(1e-4)
    )
    assert result.status is Status.UNKNOWN
    assert result.stop_reason is StopReason.TIME_LIMIT


# --- what the error says --------------------------------------------------------------


def error_for(budget_bytes: int, floor: Floor) -> str:
    graph = mlp_chain().graph
    result = Result(
        solver="auto",
        status=Status.UNKNOWN,
        stop_reason=StopReason.COMPLETED,
        schedule=None,
        trace=None,
        bound_ns=0,
    )
    with pytest.raises(BudgetError) as caught:
        raise_budget_error(graph, budget_bytes, result, floor)
    return str(caught.value)


def test_smallest_is_said_to_be_known_or_proved_as_it_is():
    floor = smallest_budget(mlp_chain().graph)
    known = replace(floor, bound_bytes=floor.budget_bytes - 10)
    proved = replace(floor, bound_bytes=floor.budget_bytes)
    below = floor.budget_bytes - 1
    assert error_for(below, known).startswith("no schedule was found within ")
    assert "the smallest known budget is " in error_for(below, known)
    assert error_for(below - 10, known).startswith("no schedule fits in ")
    assert "the smallest known budget is " in error_for(below - 10, known)
    assert error_for(below, proved).startswith("no schedule fits in ")
    assert "the smallest possible budget is " in error_for(below, proved)


def test_a_budget_that_another_solver_can_honour_is_not_called_impossible():
    """A join with a trunk: what one solver misses, another one may find."""
    graph = joined_towers().graph
    floor = smallest_budget(graph)
    assert not floor.is_proved
    with pytest.raises(BudgetError, match="no schedule was found within") as caught:
        plan_graph(graph, budget=floor.bound_bytes)
    assert "the smallest known budget is" in str(caught.value)
