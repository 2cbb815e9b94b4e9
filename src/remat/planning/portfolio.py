"""Choose and run solvers, judge every answer, return the best."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from remat.core.bounds import cost_bound_ns, peak_bound_bytes
from remat.core.checks import checked_word
from remat.core.errors import SolverFault, SolverUnsuitableError
from remat.core.problem import (
    Limits,
    Objective,
    Problem,
    Proposal,
    Result,
    Status,
    StopReason,
)
from remat.core.simulator import simulate
from remat.core.units import format_bytes, format_ns
from remat.search.device_feasibility import infeasible_reason
from remat.search.device_instance import DeviceInstance
from remat.solvers import solver_name
from remat.solvers.base import (
    ProgressCallback,
    Solver,
    ignore_progress,
    solve_in_time,
)

LEAST_S = 0.7
"""What a quick solver gets in any case, in seconds of the processor.

A solver that is stopped before its first schedule was run for nothing. For 10 000 ops
the quick ones need about half a second each, which a share of a short limit is not."""

_IN_ANY_CASE = 2
"""How many of them, as none is the better one of two on all graphs; those that may take
all the time do not count, as they take next to none."""

_LATE_S = 0.2
"""How late a quick solver may begin; with :data:`LEAST_S` it is less than a second."""

IMPROVING_SHARE = 0.3
"""What the improver may take of the time that is left, before the thorough solvers."""

_SLOWEST = 3.0


class _Stopwatch:
    """Time since it was made: by the clock, and of the processor for this thread.

    Where other programs have the processor, a limit by the clock passes before anything
    was done in it. Quick solvers are held to the processor's time instead.
    """

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._processor_started_s = time.thread_time()

    @property
    def elapsed_s(self) -> float:
        """Seconds by the clock."""
        return time.monotonic() - self._started_s

    @property
    def processor_s(self) -> float:
        """Seconds of the processor."""
        return time.thread_time() - self._processor_started_s

    @property
    def slowdown(self) -> float:
        """How many seconds by the clock one of the processor takes, 1 to 3."""
        used_s = self.processor_s
        return min(max(self.elapsed_s / used_s, 1.0), _SLOWEST) if used_s else 1.0


def judge(problem: Problem, solver_name: str, proposal: Proposal) -> Result:
    """Replay a proposal and return it as a result.

    Raises
    ------
    SolverFault
        If the schedule breaks a rule or the budget, or its cost is below the bound
        that the solver claims to have proved.
    """
    trace = None
    status = proposal.status
    bound_ns = max(proposal.bound_ns, cost_bound_ns(problem))
    if proposal.schedule is not None:
        trace = simulate(problem.graph, problem.platform, proposal.schedule)
        if trace.violation is not None:
            msg = f"solver {solver_name} returned a schedule that fails: {trace.violation}"
            raise SolverFault(msg)
        if trace.serial_ns < bound_ns:
            msg = (
                f"solver {solver_name} claims a bound of {bound_ns:_} ns, but its own "
                f"schedule takes {trace.serial_ns:_} ns"
            )
            raise SolverFault(msg)
    return Result(
        solver=solver_name,
        status=status,
        stop_reason=proposal.stop_reason,
        schedule=proposal.schedule,
        trace=trace,
        bound_ns=bound_ns,
        message=proposal.message,
    )


def solve(
    problem: Problem,
    solver: Solver,
    *,
    limits: Limits | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> Result:
    """Run one solver and judge its answer.

    Raises
    ------
    SolverFault
        If the simulator refutes the answer.
    SolverUnsuitableError
        If the solver cannot treat this kind of graph or platform.
    """
    watch = _Stopwatch()
    proposal = solve_in_time(solver, problem, limits or Limits(), on_progress)
    result = judge(problem, type(solver).__name__, proposal)
    return replace(result, elapsed_s=watch.elapsed_s)


def solve_portfolio(  # noqa: PLR0913 - what, how long, and until when
    problem: Problem,
    solvers: Sequence[Solver],
    *,
    quick: Sequence[tuple[Solver, float]] = (),
    limits: Limits | None = None,
    on_progress: ProgressCallback = ignore_progress,
    objective: Objective = Objective.SERIAL,
    is_near: Callable[[int], bool] | None = None,
    improver: Callable[[Result], Solver | None] | None = None,
) -> Result:
    """Run several solvers and return the best judged answer.

    The schedule of least time by the objective wins, then the smaller peak, then the
    earlier solver. The portfolio stops early when a schedule meets the bound on the
    serial time of every schedule, or is near enough to it, and serial time is what is
    asked for.

    Parameters
    ----------
    problem
        What to solve.
    solvers
        Run in this order. Where time is limited, each gets an equal part of what is
        left when its turn comes, so that what one leaves over goes to those after it.
        As long as nothing has been found, one part more is left for the caller.
    quick
        Run before the others, each with the share of what is left that it may take.
        Until two of less than 1 have found something, each gets :data:`LEAST_S` at
        least: they are held to the limit by the time that they have of the processor,
        and may end after it by less than a second.
    limits, on_progress, objective
        When to stop, whom to tell, and what is to be small.
    is_near
        Says of a serial time in nanoseconds whether no better one need be looked for.
    improver
        Makes a solver that starts from the best result so far, or none if that will do.
        It runs when the others have, and, where time is limited, after the quick ones
        as well, with :data:`IMPROVING_SHARE` of what is left.

    Returns
    -------
    Result
        Without a schedule the status is INFEASIBLE only if no schedule at all fits; a
        single solver's claim about its own class is its own.

    Raises
    ------
    SolverFault
        If the simulator refutes any answer.
    SolverUnsuitableError
        If no solver of the portfolio can treat this graph or platform.
    ValueError
        If the objective is unknown.
    """
    objective = checked_word("objective", objective, Objective)
    watch = _Stopwatch()
    limits = limits or Limits()
    limit_s = limits.remaining_s
    run = _Portfolio(problem, limits, objective, is_near, improver, on_progress)
    turns: list[tuple[Solver, float | None]] = list(quick)
    turns += [(solver, None) for solver in solvers]
    count = len(turns)
    at_once = {type(solver).__name__ for solver, share in quick if share >= 1}
    for index, (solver, own_share) in enumerate(turns):
        if quick and index == len(quick):
            run.improve(IMPROVING_SHARE)
        if run.has_enough:
            break
        name = type(solver).__name__
        on_progress(f"trying {solver_name(solver)}", index / count)
        found = [r.solver for r in run.results if r.schedule is not None]
        is_quick = own_share is not None
        is_late = limits.is_over
        counted = sum(solver not in at_once for solver in found)
        is_owed = is_quick and counted < _IN_ANY_CASE
        if is_owed and limit_s is not None:
            is_late = watch.processor_s >= limit_s + _LATE_S
        if run.results and is_late:
            run.lines.append(f"{name}: not run, as time was over")
            continue
        share = own_share or 1 / (count - index + (not found))
        part = limits.share(share)
        if is_owed:
            part = part.at_least(LEAST_S * watch.slowdown)
        run.ask(solver, part)
    run.improve(1.0)
    if not run.results:
        raise run.unsuitable or SolverUnsuitableError("the portfolio holds no solver")
    on_progress("done", 1.0)
    best = run.best
    if best.schedule is None and count > 1:
        best = _nothing_found(problem, run.results, limits)
    if any(result.stop_reason is StopReason.INTERRUPTED for result in run.results):
        best = replace(best, stop_reason=StopReason.INTERRUPTED)
    return replace(best, candidates=tuple(run.lines), elapsed_s=watch.elapsed_s)


@dataclass(slots=True)
class _Portfolio:
    """Results so far, and whether they are good enough."""

    problem: Problem
    limits: Limits
    objective: Objective
    is_near: Callable[[int], bool] | None
    improver: Callable[[Result], Solver | None] | None
    on_progress: ProgressCallback
    results: list[Result] = field(default_factory=list[Result])
    lines: list[str] = field(default_factory=list[str])
    unsuitable: SolverUnsuitableError | None = None
    has_enough: bool = False

    @property
    def best(self) -> Result:
        return min(self.results, key=partial(_rank, self.objective))

    def ask(self, solver: Solver, limits: Limits) -> None:
        """Run a solver, and take note of what it finds."""
        try:
            result = solve(self.problem, solver, limits=limits)
        except SolverUnsuitableError as error:
            # Its traceback holds the frames of all callers, and with them their values.
            self.unsuitable = error.with_traceback(None)
            self.lines.append(f"{type(solver).__name__}: unsuitable: {error}")
            return
        self.results.append(result)
        self.lines.append(_describe(result))
        if self.objective is Objective.SERIAL and result.cost_ns is not None:
            is_least = result.cost_ns <= cost_bound_ns(self.problem)
            is_near = self.is_near is not None and self.is_near(result.cost_ns)
            self.has_enough = is_least or is_near

    def improve(self, share: float) -> None:
        """Improve the best result in a share of the time that is left."""
        if self.improver is None or self.has_enough or self.limits.is_over:
            return
        if not any(result.schedule is not None for result in self.results):
            return
        solver = self.improver(self.best)
        if solver is None:
            self.has_enough = True
            return
        self.on_progress(f"trying {solver_name(solver)}", 1.0)
        self.ask(solver, self.limits.share(share))


def _nothing_found(
    problem: Problem, results: Sequence[Result], limits: Limits
) -> Result:
    """Return that none of several solvers has found anything, and what is proved."""
    reason: str | None = None
    home, *others = problem.platform.devices
    if others:
        reason = infeasible_reason(DeviceInstance.of(problem))
    else:
        least = peak_bound_bytes(problem.graph, home.kind)
        if problem.budget_bytes is not None and problem.budget_bytes < least:
            reason = f"every schedule needs {format_bytes(least)}"
    return Result(
        solver="auto",
        status=Status.UNKNOWN if reason is None else Status.INFEASIBLE,
        stop_reason=StopReason.TIME_LIMIT if limits.is_over else StopReason.COMPLETED,
        schedule=None,
        trace=None,
        bound_ns=cost_bound_ns(problem),
        message=reason or f"none of {len(results)} solvers has found a schedule",
    )


def _rank(objective: Objective, result: Result) -> tuple[bool, int, int]:
    trace = result.trace
    if trace is None:
        return (True, 0, 0)
    is_serial = objective is Objective.SERIAL
    time_ns = trace.serial_ns if is_serial else trace.overlapped_ns
    return (False, time_ns, trace.peak_bytes[0])


def _describe(result: Result) -> str:
    if result.trace is None:
        return f"{result.solver}: {result.status} ({result.message})"
    return (
        f"{result.solver}: {result.status}, peak "
        f"{format_bytes(result.trace.peak_bytes[0])}, {format_ns(result.trace.serial_ns)}"
    )
