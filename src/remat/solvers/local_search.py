"""LocalSearch: change the best schedule a little, again and again.

The order of all runs is what is changed: a run is taken out, so that what it wrote has
to stay from before; a storage is dropped between two uses and made again, with whatever
that needs, right before the second; a run moves, forward and backward ops alike, as far
as the data, the passes and effects allow. Where memory is then too full, more is
dropped, and what there is room for is kept (see :mod:`remat.search.local_moves`). A
change that costs a little more is taken as well, less and less so: simulated annealing,
in cycles, each of which begins with the best order so far.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.core.checks import checked_records, keep_integers
from remat.core.errors import SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.problem import LARGEST_SEED, Limits, Problem, Proposal
from remat.core.schedule import Schedule
from remat.native import core
from remat.search.local_moves import (
    MOST_EFFORT,
    Aim,
    may_change,
    passes_of,
    search_orders,
)
from remat.search.plain_numbers import plain_numbers
from remat.solvers.base import ProgressCallback, ignore_progress
from remat.solvers.greedy_eviction import GreedyEviction
from remat.solvers.min_cut_retention import MinCutRetention
from remat.solvers.order_search import Candidate, OrderSearch, order_of

EFFORT_PER_OP = 8_000
"""What a search takes by default for each op: about a millisecond."""

_SMALLER = 14
"""Graphs of fewer than some 300 ops get the square of their ops over this for each op,
so that the search stays a small part of planning."""

_TIMED_EFFORT_PER_OP = 2_000
"""What it takes at least where time is limited: then it is to be used."""

_MOST_EFFORT = 25_000_000
"""What a cycle takes at most to begin with: a few seconds."""

_LOWERING = 2
"""Part of that effort, as a divisor, which is for a smaller peak."""

_LOWERING_SLICE = 1_500_000
_LOWERING_FRUITLESS = 2
"""It is spent in slices of so much, until so many have lowered the peak by less than a
thousandth."""

_HEATS = (0.5, 2.0, 0.15, 6.0, 0.3)
"""What a change may cost more at first, by cycle: a multiple of an op's mean time."""

_COOLED = 0.02
"""Part of the heat that is left at the end of a cycle."""

_UNTIMED_CYCLES = 2
"""Cycles where time is not limited."""

_FRUITLESS = len(_HEATS)
"""Cycles without a better order after which a search ends although there is time."""

_START_SHARE = 0.3
"""Part of the time that is left which a solver that makes a start may take."""

_SEED_STEP = 1_000_003
"""Between the seeds of cycles."""

_GROWTH = 1.5
"""By which a cycle takes more effort than the one before, if that found nothing."""


@dataclass(frozen=True, slots=True)
class LocalSearch:
    """Change the order of all runs, and what is computed again, a little at a time.

    **Guarantee** never worse than what it starts from; none on how much better. The
    peak is exact. As long as nothing fits, it makes the peak smaller.

    **Complexity** set by the effort: more than 10**5 changes a second, each O(log of
    the runs) for every storage that it touches. Where time is limited, cycles follow
    each other until it is over, the time that is enough is reached, or several have
    found nothing.

    Parameters
    ----------
    starts
        Schedules to start from, the best of them; without any, those of
        :class:`remat.solvers.greedy_eviction.GreedyEviction` and
        :class:`remat.solvers.min_cut_retention.MinCutRetention`.
    enough_ns
        A time that is good enough.
    effort
        Runs to put in, take out and think of in the first cycle; by default in
        proportion to the ops.
    """

    schedule_class: ClassVar[str] = (
        "any op up to 64 times, in any order that the data allow, on one device"
    )
    is_exact: ClassVar[bool] = False

    starts: tuple[Schedule, ...] = ()
    enough_ns: int = 0
    effort: int | None = None

    def __post_init__(self) -> None:
        of = type(self).__name__
        starts = checked_records(f"starts of {of}", self.starts, Schedule)
        object.__setattr__(self, "starts", starts)
        keep_integers(self, "enough_ns", of=of, least=0)
        keep_integers(self, "effort", of=of, least=0, most=MOST_EFFORT, optional=True)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN if none fits.

        Raises
        ------
        SolverUnsuitableError
            If the native core is not installed, or an op cannot run on device 0.
        """
        search = OrderSearch(problem, limits)
        if core() is None:
            msg = (
                "LocalSearch needs remat's native core, which is not installed or is "
                "switched off (REMAT_NATIVE=0)"
            )
            raise SolverUnsuitableError(msg)
        at_once = search.at_once()
        if at_once is not None:
            return at_once
        with search.in_time():
            for order in self._start_orders(search):
                search.weigh(order)
        with search.in_time():
            self._run(search, on_progress)
        return search.answer(f"{len(search.candidates)} orders")

    def _start_orders(self, search: OrderSearch) -> Iterator[Sequence[int]]:
        if self.starts:
            yield from (order_of(schedule) for schedule in self.starts)
            return
        yield search.all_kept.order
        for solver in (GreedyEviction(), MinCutRetention()):
            share = search.limits.share(_START_SHARE)
            found = solver.solve(search.problem, share, ignore_progress)
            if found.schedule is not None:
                yield order_of(found.schedule)

    def _run(self, search: OrderSearch, on_progress: ProgressCallback) -> None:
        """Search in cycles, each from the best order so far."""
        numbers, limits = search.numbers, search.limits
        passes = passes_of(search.graph)
        mean_ns = sum(numbers.costs) / len(numbers.costs)
        effort = self._first_effort(
            len(numbers.costs), is_timed=limits.deadline_s is not None
        )
        enough_ns = max(self.enough_ns, search.bound_ns)

        def rank(candidate: Candidate) -> tuple[int, int, int]:
            excess_bytes = max(0, candidate.peak_bytes - search.budget_bytes)
            return (excess_bytes, *candidate.rank)

        known = [c for c in search.candidates if may_change(passes, c.order)]
        if not known:
            return
        current = min(known, key=rank)
        cycles = fruitless = 0
        is_done = rank(current) <= (0, enough_ns, current.peak_bytes)
        while not is_done and not search.is_over and fruitless < _FRUITLESS:
            on_progress("changing the schedule", fruitless / _FRUITLESS)
            heat = _HEATS[cycles % len(_HEATS)] * mean_ns
            seed = (limits.seed + cycles * _SEED_STEP) % LARGEST_SEED
            aim = Aim(search.budget_bytes, enough_ns, min(effort, MOST_EFFORT), seed)
            found = search_orders(
                numbers,
                passes,
                current.order,
                aim,
                heat,
                heat * _COOLED,
                limits.remaining_s,
            )
            better = search.weigh(found.order)
            cycles += 1
            if rank(better) < rank(current):
                current, fruitless = better, 0
            else:
                fruitless += 1
                effort = int(effort * _GROWTH)
            has_enough = rank(current) <= (0, enough_ns, current.peak_bytes)
            is_last = limits.deadline_s is None and cycles == _UNTIMED_CYCLES
            is_done = has_enough or is_last

    def _first_effort(self, count: int, *, is_timed: bool) -> int:
        if self.effort is not None:
            return self.effort
        least = count * _TIMED_EFFORT_PER_OP if is_timed else 0
        return min(_MOST_EFFORT, max(_effort(count), least))


def lowered_order(
    graph: TrainingGraph,
    order: Sequence[int],
    enough_bytes: int,
    *,
    kind_index: int = 0,
    limits: Limits | None = None,
) -> list[int]:
    """Return an order of runs whose peak is no larger, whatever its time.

    Parameters
    ----------
    graph, order
        A graph, and an order of runs of it that the judge allows.
    enough_bytes
        A peak that is small enough.
    kind_index
        Position of the device's kind in the ops' costs.
    limits
        When to stop, and the seed.

    Raises
    ------
    MissingDependencyError
        If there is no native core.

    Notes
    -----
    A millisecond for each op, or some seconds where there are more than thousands.
    """
    limits = limits or Limits()
    passes = passes_of(graph)
    if not may_change(passes, order):
        return list(order)
    numbers = plain_numbers(graph, kind_index)
    effort = _effort(len(graph.ops)) // _LOWERING
    best, least_bytes = list(order), None
    slices = fruitless = 0
    while effort > 0 and fruitless < _LOWERING_FRUITLESS and not limits.is_over:
        seed = (limits.seed + slices * _SEED_STEP) % LARGEST_SEED
        aim = Aim(enough_bytes, 0, min(effort, _LOWERING_SLICE), seed)
        found = search_orders(numbers, passes, best, aim, 0.0, 0.0, limits.remaining_s)
        is_lower = least_bytes is None or found.peak_bytes < least_bytes * 0.999
        fruitless = 0 if is_lower else fruitless + 1
        best, least_bytes = found.order, found.peak_bytes
        effort -= _LOWERING_SLICE
        slices += 1
        if least_bytes <= enough_bytes:
            break
    return best


def _effort(count: int) -> int:
    """Return what a search takes by default for so many ops."""
    return min(_MOST_EFFORT, count * min(EFFORT_PER_OP, count**2 // _SMALLER))
