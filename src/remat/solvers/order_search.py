"""A search among orders of computations: the cheapest that fits, and what improves it.

For solvers that make many orders and judge each by its true bytes.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

from remat.core.best import Best
from remat.core.bounds import cost_bound_ns, peak_bound_bytes
from remat.core.deadline import TimeIsUpError, in_time
from remat.core.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.core.problem import Limits, Problem, Proposal, Status, StopReason
from remat.core.schedule import Boundary, Compute, Schedule
from remat.core.units import format_bytes
from remat.search.plain_numbers import plain_numbers
from remat.search.retention_table import (
    Answer,
    improve_retention,
    without_unread_runs,
)
from remat.solvers.base import ProgressCallback, single_device_kind_index


@dataclass(frozen=True, slots=True)
class Candidate:
    """An order of computations on one device, with its exact cost and peak."""

    order: list[int]
    cost_ns: int
    peak_bytes: int

    @property
    def rank(self) -> tuple[int, int]:
        """What is compared: the cost, then the peak."""
        return (self.cost_ns, self.peak_bytes)


class OrderSearch:
    """The orders weighed so far, and the cheapest that fits the budget.

    Parameters
    ----------
    problem
        A problem with a budget, for device 0 alone.
    limits
        When to stop.

    Raises
    ------
    SolverUnsuitableError
        If an op cannot run on device 0, or a storage lives elsewhere.
    """

    def __init__(self, problem: Problem, limits: Limits) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.kind_index = single_device_kind_index(problem)
        self.budget_bytes = problem.budget_bytes or 0
        self.numbers = plain_numbers(self.graph, self.kind_index)
        self.floor_bytes = peak_bound_bytes(
            self.graph, problem.platform.devices[0].kind
        )
        self.limits = limits
        self.bound_ns = cost_bound_ns(problem)
        self.candidates: list[Candidate] = []
        self.cheapest = Best[Candidate]()

    @property
    def best(self) -> Candidate | None:
        """The cheapest that fits, if one does."""
        return self.cheapest.answer

    @property
    def is_over(self) -> bool:
        """Whether time is over, or nothing can be better."""
        return self.limits.is_over or (
            self.best is not None and self.best.cost_ns <= self.bound_ns
        )

    @cached_property
    def all_kept(self) -> Candidate:
        """The order that runs everything once, less what nobody reads."""
        return Candidate(
            *without_unread_runs(self.numbers, store_all_order(self.graph))
        )

    def at_once(self) -> Proposal | None:
        """Return the answer if none needs to be searched for: all fits, or nothing."""
        all_kept = self.all_kept
        if self.problem.budget_bytes is None or (
            all_kept.peak_bytes <= self.budget_bytes
        ):
            return self.feasible(all_kept.order, "everything is kept")
        if self.floor_bytes > self.budget_bytes:
            needed = format_bytes(self.floor_bytes)
            return self.unknown(f"every schedule needs {needed}")
        return None

    def weigh(self, order: Sequence[int]) -> Candidate:
        """Return an order less its unread runs; remember it if it is the best."""
        found = Candidate(*without_unread_runs(self.numbers, order))
        self.remember(found)
        return found

    def remember(self, candidate: Candidate) -> None:
        """Take note of an order whose cost and peak are known."""
        self.candidates.append(candidate)
        self.keep(candidate)

    def keep(self, candidate: Candidate) -> bool:
        """Keep an order if it is the best so far; return whether it is."""
        fits = candidate.peak_bytes <= self.budget_bytes
        return fits and self.cheapest.offer(candidate, *candidate.rank)

    def improve(self, order: Sequence[int]) -> Candidate:
        """Return an order less the runs that memory lets it do without; remember it."""
        found = Candidate(*self.improved(order))
        self.remember(found)
        return found

    def improved(self, order: Sequence[int]) -> Answer:
        """Return an order less the runs that memory lets it do without."""
        return improve_retention(
            self.numbers, order, self.budget_bytes, 1.0, self.limits.remaining_s
        )

    def improve_best(self, count: int) -> Iterator[float]:
        """Improve the cheapest that fit and those with most memory left over.

        Yields
        ------
        float
            The share that is done.
        """
        fitting = [c for c in self.candidates if c.peak_bytes <= self.budget_bytes]
        by_cost = sorted(fitting, key=lambda c: c.rank)
        by_peak = sorted(fitting, key=lambda c: (c.peak_bytes, c.cost_ns))
        chosen: list[Candidate] = []
        for pair in zip(by_cost, by_peak, strict=True):
            chosen.extend(c for c in pair if c not in chosen)
        for index, candidate in enumerate(chosen[:count]):
            if self.is_over:
                return
            self.improve(candidate.order)
            yield (index + 1) / count

    def sweep_and_improve(
        self,
        sweep: Iterator[float],
        activity: str,
        improved_count: int,
        on_progress: ProgressCallback,
    ) -> None:
        """Run what weighs orders, then improve the best; say how far it is."""
        with self.in_time():
            for share in sweep:
                on_progress(activity, share / 2)
            for share in self.improve_best(improved_count):
                on_progress("keeping what there is room for", 0.5 + share / 2)

    @contextmanager
    def in_time(self) -> Generator[None]:
        """End the block when time is over; the answer is then the best so far."""
        with suppress(TimeIsUpError), in_time(self.limits.deadline_s):
            yield

    def answer(self, label: str) -> Proposal:
        """Return the best that was found, or that nothing was."""
        stopped = stop_reason(self.limits)
        if self.best is not None:
            return self.feasible(self.best.order, label, stopped)
        peaks = [c.peak_bytes for c in self.candidates]
        least = format_bytes(min(peaks)) if peaks else "not known"
        return self.unknown(f"{label}; the smallest peak is {least}", stopped)

    def feasible(
        self,
        order: Sequence[int],
        message: str,
        stop_reason: StopReason = StopReason.COMPLETED,
    ) -> Proposal:
        """Return an order as a proposal."""
        return Proposal(
            status=Status.FEASIBLE,
            schedule=schedule_from_order(self.graph, order),
            bound_ns=self.bound_ns,
            stop_reason=stop_reason,
            message=message,
        )

    def unknown(
        self, message: str, stop_reason: StopReason = StopReason.COMPLETED
    ) -> Proposal:
        """Return that no schedule was found, and why."""
        return Proposal(
            status=Status.UNKNOWN,
            bound_ns=self.bound_ns,
            stop_reason=stop_reason,
            message=f"{message}; the budget is {format_bytes(self.budget_bytes)}",
        )


def stop_reason(limits: Limits, *, is_interrupted: bool = False) -> StopReason:
    """Return why a search under these limits stopped."""
    if is_interrupted:
        return StopReason.INTERRUPTED
    return StopReason.TIME_LIMIT if limits.is_over else StopReason.COMPLETED


def order_of(schedule: Schedule) -> list[int]:
    """Return the order of computations of a schedule of one device."""
    return [
        step.op if isinstance(step, Compute) else BOUNDARY
        for step in schedule.steps
        if isinstance(step, Compute | Boundary)
    ]


def geometric_budgets(low: int, high: int, count: int) -> list[int]:
    """Return up to ``count`` integers from ``low`` to ``high``, in equal ratios.

    Examples
    --------
    >>> geometric_budgets(100, 1600, 5)
    [100, 200, 400, 800, 1600]
    >>> geometric_budgets(7, 7, 3)
    [7]
    """
    low, high = max(1, low), max(1, low, high)
    if count == 1:
        return [high]
    between = (low * (high / low) ** (k / (count - 1)) for k in range(1, count - 1))
    return sorted({low, high, *(min(high, round(value)) for value in between)})
