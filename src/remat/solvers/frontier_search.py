"""What the solvers over frontier-advancing stages share: the incumbent and the answer.

The incumbent is an order of computations within the budget, measured on true bytes. It
starts as the best of two heuristics, whose orders need not advance the frontier; an
answer is called optimal only if its cost meets the bound proved for those that do.
"""

from dataclasses import dataclass, field

from remat.core.best import Best
from remat.core.bounds import cost_bound_ns, peak_bound_bytes
from remat.core.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.core.problem import Limits, Problem, Proposal, Status, StopReason
from remat.core.schedule import Boundary, Compute, Schedule
from remat.core.units import format_bytes, format_ns
from remat.search.retention import RetentionTable, improve_order
from remat.solvers.backends.mathopt import Incumbent, IncumbentCallback
from remat.solvers.backends.tolerances import RELATIVE_TOLERANCE
from remat.solvers.base import (
    ProgressCallback,
    single_device_kind_index,
    solve_in_time,
)
from remat.solvers.frontier import Frontier
from remat.solvers.greedy_eviction import GreedyEviction
from remat.solvers.min_cut_retention import MinCutRetention

_KNOWN = ((GreedyEviction(), 0.1), (MinCutRetention(effort_ops=1_000_000), 0.15))
"""The heuristics that the search starts from, and the share of the time each gets."""


@dataclass(slots=True)
class FrontierSearch:
    """The cheapest order found so far, and how the search ended.

    Parameters
    ----------
    problem
        For device 0 alone.
    limits
        When to stop.
    improves
        Whether runs that memory lets an order do without are taken out. This can
        lead out of the class: a first run may go, and a later one be the first.

    Raises
    ------
    SolverUnsuitableError
        If an op cannot run on device 0, or a storage lives elsewhere.
    """

    problem: Problem
    limits: Limits
    improves: bool = True
    kind_index: int = field(init=False)
    order: list[int] = field(default_factory=list[int], init=False)
    cost_ns: int = field(default=0, init=False)
    orders: list[list[int]] = field(default_factory=list[list[int]], init=False)

    def __post_init__(self) -> None:
        self.kind_index = single_device_kind_index(self.problem)

    @property
    def has_order(self) -> bool:
        """Whether any order within the budget is known."""
        return bool(self.order)

    @property
    def is_over(self) -> bool:
        """Whether time is over, or no schedule at all can be cheaper."""
        is_best = self.has_order and self.cost_ns <= cost_bound_ns(self.problem)
        return is_best or self.limits.is_over

    def at_once(self) -> Proposal | None:
        """Return the answer if it takes no search: all is kept, or nothing can fit."""
        graph, budget = self.problem.graph, self.problem.budget_bytes
        table = RetentionTable(graph, store_all_order(graph), self.kind_index)
        table.drop_unread_runs()
        if budget is None or table.peak_bytes <= budget:
            return Proposal(
                status=Status.OPTIMAL,
                schedule=schedule_from_order(graph, table.order()),
                bound_ns=table.cost_ns,
                message="everything is kept",
            )
        floor = peak_bound_bytes(graph, self.problem.platform.devices[0].kind)
        if floor <= budget:
            return None
        return Proposal(
            status=Status.INFEASIBLE,
            message=(
                f"every schedule needs {format_bytes(floor)}; the budget is "
                f"{format_bytes(budget)}"
            ),
        )

    def adopt(self, order: list[int]) -> bool:
        """Improve an order, if asked to, and remember it if it is the cheapest.

        Returns
        -------
        bool
            Whether the order fits the budget.
        """
        graph, budget = self.problem.graph, self.problem.budget_bytes or 0
        table = RetentionTable(graph, order, self.kind_index)
        if table.peak_bytes > budget:
            return False
        if self.improves:
            order = improve_order(
                graph,
                order,
                budget,
                kind_index=self.kind_index,
                limits=self.limits,
            )
        cost_ns = RetentionTable(graph, order, self.kind_index).cost_ns
        if not self.has_order or cost_ns < self.cost_ns:
            self.order, self.cost_ns = order, cost_ns
        return True

    def start_from_known(self) -> None:
        """Run the heuristics, each within its share of the time."""
        remaining_s = self.limits.remaining_s
        for solver, share in _KNOWN:
            if self.is_over:
                return
            limit_s = None if remaining_s is None else share * remaining_s
            limits = Limits.after(limit_s, self.limits.seed)
            found = solve_in_time(solver, self.problem, limits).schedule
            if found is not None:
                self.start_from_order(_order(found))

    def start_from_order(self, order: list[int]) -> None:
        """Adopt an order, and remember it for starts of the programs."""
        self.orders.append(order)
        self.adopt(order)

    def answer(
        self,
        *,
        bound_ns: int | None,
        stop_reason: StopReason,
        message: str,
        is_proved_empty: bool = False,
    ) -> Proposal:
        """Return the incumbent with what is proved about it.

        Parameters
        ----------
        bound_ns
            Proved for every schedule of the solver's class; ``None`` if nothing is.
        stop_reason, message
            Passed on.
        is_proved_empty
            Whether it is proved that no schedule of the class fits.
        """
        floor_ns = cost_bound_ns(self.problem)
        bound_ns = max(floor_ns, bound_ns or 0)
        if not self.has_order:
            status = Status.INFEASIBLE if is_proved_empty else Status.UNKNOWN
            return Proposal(
                status=status,
                bound_ns=bound_ns,
                stop_reason=stop_reason,
                message=message or "no schedule was found",
            )
        if self.cost_ns < bound_ns:
            # Of another class, and cheaper than all of this one.
            message = f"{message}; what is given leaves the class and is cheaper"
            bound_ns = floor_ns
        if self.cost_ns - bound_ns <= RELATIVE_TOLERANCE * self.cost_ns:
            bound_ns = self.cost_ns
        status = Status.OPTIMAL if self.cost_ns == bound_ns else Status.FEASIBLE
        return Proposal(
            status=status,
            schedule=schedule_from_order(self.problem.graph, self.order),
            bound_ns=bound_ns,
            stop_reason=StopReason.COMPLETED
            if status is Status.OPTIMAL
            else stop_reason,
            message=message,
        )


def _order(schedule: Schedule) -> list[int]:
    return [
        step.op if isinstance(step, Compute) else BOUNDARY
        for step in schedule.steps
        if isinstance(step, Compute | Boundary)
    ]


def with_deadline(limits: Limits, time_limit_s: float) -> Limits:
    """Return the limits, with a deadline so many seconds from now if they have none."""
    if limits.deadline_s is not None:
        return limits
    return Limits.after(time_limit_s, limits.seed)


def stop_reason(limits: Limits, *, is_interrupted: bool) -> StopReason:
    """Return why a search under these limits stopped."""
    if is_interrupted:
        return StopReason.INTERRUPTED
    return StopReason.TIME_LIMIT if limits.is_over else StopReason.COMPLETED


def best_start(search: FrontierSearch, staged: Frontier) -> list[set[int]] | None:
    """Return the cheapest known schedule that the stages can follow, as runs."""
    budget = search.problem.budget_bytes or 0
    best = Best[list[set[int]]]()
    for order in (search.order, *search.orders):
        runs = staged.runs_of_order(order) if order else None
        if runs is None:
            continue
        cost_ns, peak_bytes = staged.measure(staged.order(runs))
        if peak_bytes <= budget:
            best.offer(runs, cost_ns)
    return best.answer


def incumbent_report(
    on_progress: ProgressCallback, fixed_ns: int, unit_ns: float
) -> IncumbentCallback:
    """Return what passes on a solver's progress as times of the whole step.

    Parameters
    ----------
    on_progress
        Told of incumbent, bound and gap; the share is one minus the gap.
    fixed_ns, unit_ns
        Time outside the objective, and time of one unit of it.
    """

    def whole_ns(value: float) -> int:
        return fixed_ns + round(value * unit_ns)

    def report(state: Incumbent) -> None:
        words: list[str] = []
        share = 0.0
        if state.objective is not None:
            words.append(f"best so far {format_ns(whole_ns(state.objective))}")
        if state.bound is not None:
            words.append(f"none below {format_ns(whole_ns(state.bound))}")
        if state.objective is not None and state.bound is not None:
            cost_ns = whole_ns(state.objective)
            gap = 1 - whole_ns(state.bound) / cost_ns if cost_ns else 0.0
            words.append(f"gap {100 * gap:.2f} %")
            share = min(1.0, max(0.0, 1.0 - gap))
        on_progress(", ".join(words or ["no schedule yet"]), share)

    return report
