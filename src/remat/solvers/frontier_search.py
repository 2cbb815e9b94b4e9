"""What the solvers over frontier-advancing stages share: the incumbent and the answer.

The incumbent is an order of computations within the budget, measured on true bytes. It
starts as the best of two heuristics, whose orders need not advance the frontier; an
answer is called optimal only if its cost meets the bound proved for those that do.
"""

from dataclasses import replace

from remat.backends.mathopt import Incumbent, IncumbentCallback
from remat.backends.tolerances import RELATIVE_TOLERANCE
from remat.core.best import Best
from remat.core.problem import Limits, Problem, Proposal, Status, StopReason
from remat.core.units import format_ns
from remat.search.retention_table import weigh_order
from remat.solvers.base import ProgressCallback, solve_in_time
from remat.solvers.frontier import Frontier
from remat.solvers.greedy_eviction import GreedyEviction
from remat.solvers.min_cut_retention import MinCutRetention
from remat.solvers.order_search import Candidate, OrderSearch, order_of

_KNOWN = ((GreedyEviction(), 0.1), (MinCutRetention(effort_ops=1_000_000), 0.15))
"""The heuristics that the search starts from, and the share of the time each gets."""


class FrontierSearch(OrderSearch):
    """The cheapest order found so far, and those that programs may start from.

    Parameters
    ----------
    problem, limits
        As for :class:`~remat.solvers.order_search.OrderSearch`.
    improves
        Whether runs that memory lets an order do without are taken out. This can
        lead out of the class: a first run may go, and a later one be the first.
    """

    def __init__(
        self, problem: Problem, limits: Limits, *, improves: bool = True
    ) -> None:
        super().__init__(problem, limits)
        self.improves = improves
        self.orders: list[list[int]] = []

    def at_once(self) -> Proposal | None:
        """Return the answer if it takes no search: all is kept, or nothing can fit."""
        found = super().at_once()
        if found is None:
            return None
        if found.schedule is None:
            return replace(found, status=Status.INFEASIBLE, bound_ns=0)
        return replace(found, status=Status.OPTIMAL, bound_ns=self.all_kept.cost_ns)

    def adopt(self, order: list[int]) -> bool:
        """Improve an order, if asked to, and remember it if it is the cheapest.

        Returns
        -------
        bool
            Whether the order fits the budget.
        """
        cost_ns, peak_bytes = weigh_order(self.numbers, order)
        if peak_bytes > self.budget_bytes:
            return False
        found = Candidate(order, cost_ns, peak_bytes)
        if self.improves:
            found = Candidate(*self.improved(order))
        self.cheapest.offer(found, found.cost_ns)
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
                self.start_from_order(order_of(found))

    def start_from_order(self, order: list[int]) -> None:
        """Adopt an order, and remember it for starts of the programs."""
        self.orders.append(order)
        self.adopt(order)

    def proved(
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
        bound_ns = max(self.bound_ns, bound_ns or 0)
        if self.best is None:
            status = Status.INFEASIBLE if is_proved_empty else Status.UNKNOWN
            return Proposal(
                status=status,
                bound_ns=bound_ns,
                stop_reason=stop_reason,
                message=message or "no schedule was found",
            )
        cost_ns = self.best.cost_ns
        if cost_ns < bound_ns:
            # Of another class, and cheaper than all of this one.
            message = f"{message}; what is given leaves the class and is cheaper"
            bound_ns = self.bound_ns
        found = self.feasible(self.best.order, message, stop_reason)
        if cost_ns - bound_ns > RELATIVE_TOLERANCE * cost_ns:
            return replace(found, bound_ns=bound_ns)
        return replace(
            found,
            status=Status.OPTIMAL,
            bound_ns=cost_ns,
            stop_reason=StopReason.COMPLETED,
        )


def with_deadline(limits: Limits, time_limit_s: float) -> Limits:
    """Return the limits, with a deadline so many seconds from now if they have none."""
    if limits.deadline_s is not None:
        return limits
    return Limits.after(time_limit_s, limits.seed)


def best_start(search: FrontierSearch, staged: Frontier) -> list[set[int]] | None:
    """Return the cheapest known schedule that the stages can follow, as runs."""
    best = Best[list[set[int]]]()
    found = [] if search.best is None else [search.best.order]
    for order in (*found, *search.orders):
        runs = staged.runs_of_order(order) if order else None
        if runs is None:
            continue
        cost_ns, peak_bytes = staged.measure(staged.order(runs))
        if peak_bytes <= search.budget_bytes:
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
