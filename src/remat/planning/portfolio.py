"""Choose and run solvers, judge every answer, return the best."""

import time
from collections.abc import Sequence
from dataclasses import replace
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

LEAST_S = 0.6
"""What a quick solver gets in any case, in seconds of the processor.

A solver that is stopped before its first schedule was run for nothing. For 10 000 ops
the quick ones need about half a second each, which a share of a short limit is not."""

_SLOWEST = 10.0


class _Pace:
    """How many seconds by the clock a second of the processor takes at present."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._begin_processor_s = time.process_time()

    def wall_per_processor_s(self) -> float:
        """Return it as it was since the beginning, 1 to 10."""
        wall_s = time.monotonic() - self._begin_s
        used_s = time.process_time() - self._begin_processor_s
        return min(max(wall_s / used_s, 1.0), _SLOWEST) if used_s > 0 else 1.0


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
    started = time.monotonic()
    proposal = solve_in_time(solver, problem, limits or Limits(), on_progress)
    result = judge(problem, type(solver).__name__, proposal)
    return replace(result, elapsed_s=time.monotonic() - started)


def solve_portfolio(
    problem: Problem,
    solvers: Sequence[Solver],
    *,
    quick: Sequence[tuple[Solver, float]] = (),
    limits: Limits | None = None,
    on_progress: ProgressCallback = ignore_progress,
    objective: Objective = Objective.SERIAL,
) -> Result:
    """Run several solvers and return the best judged answer.

    The schedule of least time by the objective wins, then the smaller peak, then the
    earlier solver. The portfolio stops early when a schedule meets the bound on the
    serial time of every schedule and that is what is asked for.

    Parameters
    ----------
    problem
        What to solve.
    solvers
        Run in this order. Where time is limited, each gets an equal part of what is
        left when its turn comes, so that what one leaves over goes to those after it.
        As long as nothing has been found, one part more is left for the caller.
    quick
        Run before the others, each with the share of what is left that it may take. One
        whose turn comes in time gets :data:`LEAST_S` in any case, even if that ends
        after the limit.
    limits, on_progress, objective
        When to stop, whom to tell, and what is to be small.

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
    started, pace = time.monotonic(), _Pace()
    limits = limits or Limits()
    results: list[Result] = []
    lines: list[str] = []
    unsuitable: SolverUnsuitableError | None = None
    bound_ns = cost_bound_ns(problem)
    turns: list[tuple[Solver, float | None]] = list(quick)
    turns += [(solver, None) for solver in solvers]
    count = len(turns)
    for index, (solver, own_share) in enumerate(turns):
        name = type(solver).__name__
        on_progress(f"trying {solver_name(solver)}", index / count)
        has_found = any(result.schedule is not None for result in results)
        if results and limits.is_over:
            lines.append(f"{name}: not run, as time was over")
            continue
        share = own_share or 1 / (count - index + (not has_found))
        part = limits.share(share)
        if own_share is not None:
            part = part.at_least(LEAST_S * pace.wall_per_processor_s())
        try:
            result = solve(problem, solver, limits=part)
        except SolverUnsuitableError as error:
            unsuitable = error
            lines.append(f"{name}: unsuitable: {error}")
            continue
        results.append(result)
        lines.append(_describe(result))
        is_serial = objective is Objective.SERIAL
        if is_serial and result.trace and result.trace.serial_ns <= bound_ns:
            break
    if not results:
        raise unsuitable or SolverUnsuitableError("the portfolio holds no solver")
    on_progress("done", 1.0)
    best = min(results, key=partial(_rank, objective))
    if best.schedule is None and count > 1:
        best = _nothing_found(problem, results, limits)
    return replace(best, candidates=tuple(lines), elapsed_s=time.monotonic() - started)


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
