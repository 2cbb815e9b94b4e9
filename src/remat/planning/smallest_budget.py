"""The smallest budget for which a schedule is known.

Between what every schedule needs (:mod:`remat.bounds.memory_bound`) and what
storing everything takes lies the smallest budget that the solvers at hand can honour.
It is found by bisection. Solvers are heuristics at that end, so a budget that one fails
need not be impossible: the answer is a budget that works, with the schedule that proves
it, and not a proof that nothing smaller does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from remat.bounds.memory_bound import least_budget_bytes
from remat.core.bounds import peak_bound_bytes
from remat.core.errors import SolverFault
from remat.core.graph import TrainingGraph
from remat.core.liveness import schedule_from_order
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Result
from remat.core.schedule import Schedule
from remat.core.simulator import Trace, simulate
from remat.native import core
from remat.planning.portfolio import solve
from remat.solvers.base import Solver
from remat.solvers.chen import ChenSqrt
from remat.solvers.greedy_eviction import CANDIDATES, GreedyEviction
from remat.solvers.local_search import lowered_order
from remat.solvers.min_cut_retention import MinCutRetention
from remat.solvers.order_search import order_of
from remat.solvers.store_all import StoreAll

FLOOR_SOLVERS: tuple[Solver, ...] = (
    GreedyEviction(candidates=CANDIDATES[1:2], starts_from_segments=False),
    GreedyEviction(candidates=CANDIDATES[4:5], starts_from_segments=False),
    GreedyEviction(candidates=CANDIDATES[2:3], starts_from_segments=False),
)
"""Cheap solvers that get by with little memory, each for when those before fail."""

REFINING_SOLVERS: tuple[Solver, ...] = (MinCutRetention(effort_ops=1_500_000),)
"""Thorough solvers that may go below where the cheap ones stop."""

_REFINING_PERCENTS = (94, 98)

_GUESS_SHARE = 0.25
"""How much of the time that is left a single budget may take, where it is limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The smallest budget for which a schedule is known, with the proof that it works.

    Parameters
    ----------
    budget_bytes
        The peak of ``schedule``, resident bytes included.
    schedule, trace
        The schedule and its replay.
    bound_bytes
        Proved: no schedule on one device gets by with less.
    """

    budget_bytes: int
    schedule: Schedule
    trace: Trace
    bound_bytes: int

    @property
    def is_proved(self) -> bool:
        """Whether it is proved that no schedule gets by with less."""
        return self.budget_bytes <= self.bound_bytes


def smallest_budget(
    graph: TrainingGraph,
    *,
    kind: str = "cpu",
    solvers: Sequence[Solver] = FLOOR_SOLVERS,
    refining_solvers: Sequence[Solver] = REFINING_SOLVERS,
    limits: Limits | None = None,
    tolerance_percent: int = 1,
) -> Floor:
    """Return the smallest budget that bisection finds a schedule for.

    Parameters
    ----------
    graph
        The graph to train on one device.
    kind
        The device's kind.
    solvers
        Asked in turn at each budget, until one answers with a schedule.
    refining_solvers
        Asked at budgets 6 % apart from there downwards, until none answers, then at
        budgets 2 % apart; of what is not always there.
    limits
        When to stop; the best found by then is returned.
    tolerance_percent
        Stop once the budgets that worked and that failed are this close, in percent
        of the smaller without what is always there, at least 0.

    Raises
    ------
    SolverFault
        If the simulator refutes an answer.
    SolverUnsuitableError
        If a solver cannot treat this graph.

    Notes
    -----
    Asks the cheap solvers about log2(100 / tolerance_percent) times, plus twice. A
    local search then makes the peak of what they found smaller.
    """
    limits = limits or Limits()
    one_op_bytes = peak_bound_bytes(graph, kind)
    bound_bytes = max(one_op_bytes, least_budget_bytes(graph, kind))
    best = _answer(graph, kind, None, [StoreAll()], Limits())
    if best is None:
        msg = f"StoreAll found no schedule for graph {graph.name!r} without a budget"
        raise SolverFault(msg)
    if limits.deadline_s is not None:
        # In linear time, so that there is something however short the time is.
        halves = _answer(graph, kind, None, [ChenSqrt()], Limits())
        if halves is not None and halves[1].peak_bytes[0] < best[1].peak_bytes[0]:
            best = halves
    # What is always there is searched beside: more of it changes no schedule.
    always_bytes = graph.resident_bytes()
    # Up to ``failed_bytes`` everything counts as impossible; so far that is proved.
    failed_bytes = one_op_bytes - 1
    guess_bytes = max(1, one_op_bytes)
    while not limits.is_over:
        found = None
        if guess_bytes >= bound_bytes:
            share = limits.share(_GUESS_SHARE)
            found = _answer(graph, kind, guess_bytes, solvers, share)
        if found is None:
            failed_bytes = guess_bytes
        else:
            best = found
        if best[1].peak_bytes[0] - failed_bytes <= max(
            1, (failed_bytes - always_bytes) * tolerance_percent // 100
        ):
            break
        guess_bytes = max(1, (failed_bytes + best[1].peak_bytes[0]) // 2)
    for percent in _REFINING_PERCENTS:
        while not limits.is_over and best[1].peak_bytes[0] > bound_bytes:
            moving_bytes = best[1].peak_bytes[0] - always_bytes
            guess_bytes = max(bound_bytes, always_bytes + moving_bytes * percent // 100)
            share = limits.share(_GUESS_SHARE)
            found = _answer(graph, kind, guess_bytes, refining_solvers, share)
            if found is None:
                break
            best = found
    schedule, trace = _lowered(graph, kind, best, bound_bytes, limits)
    return Floor(
        budget_bytes=trace.peak_bytes[0],
        schedule=schedule,
        trace=trace,
        bound_bytes=bound_bytes,
    )


def _lowered(
    graph: TrainingGraph,
    kind: str,
    best: tuple[Schedule, Trace],
    bound_bytes: int,
    limits: Limits,
) -> tuple[Schedule, Trace]:
    """Return a schedule whose peak a local search has made smaller, if it could."""
    schedule, trace = best
    if core() is None or limits.is_over or trace.peak_bytes[0] <= bound_bytes:
        return best
    order = lowered_order(
        graph,
        order_of(schedule),
        bound_bytes,
        kind_index=graph.kind_index(kind),
        limits=limits,
    )
    schedule = schedule_from_order(graph, order)
    found = simulate(graph, single_device(None, kind), schedule)
    if found.violation is not None:
        msg = f"the search for a smaller peak breaks a rule: {found.violation}"
        raise SolverFault(msg)
    return min(best, (schedule, found), key=lambda pair: pair[1].peak_bytes)


def _answer(
    graph: TrainingGraph,
    kind: str,
    budget_bytes: int | None,
    solvers: Sequence[Solver],
    limits: Limits,
) -> tuple[Schedule, Trace] | None:
    problem = Problem(graph=graph, platform=single_device(budget_bytes, kind))
    for left, solver in zip(range(len(solvers), 0, -1), solvers, strict=True):
        result: Result = solve(problem, solver, limits=limits.share(1 / left))
        if result.schedule is not None and result.trace is not None:
            return result.schedule, result.trace
    return None
