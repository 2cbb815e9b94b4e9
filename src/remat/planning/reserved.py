"""Plans within a budget of reserved bytes, which a caching allocator holds.

An allocator reserves more than is live: blocks of one size do not fill the segments of
another. What it reserves follows from the requests, and these from the plan, so that
plans are replayed on a model of it (:mod:`remat.memory.caching_allocator`) until one
fits. Three things are varied:

- what is primed: one block, or two, that are allocated and freed before the first step
  leave free segments, which later blocks share (expandable segments are one already);
- how many bytes may be live: less than the budget, so that gaps find room;
- the schedule, which is another one for each such limit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NoReturn

from remat.core.allocator import ENVIRONMENT, MIB, AllocatorSettings
from remat.core.bounds import peak_bound_bytes
from remat.core.errors import BudgetError
from remat.core.graph import TrainingGraph
from remat.core.platform import DeviceAllocator
from remat.core.problem import Limits, Result, Status
from remat.core.schedule import Schedule
from remat.core.simulator import Trace
from remat.core.units import format_bytes
from remat.memory.requests import AllocatorReplay, ReservedUse
from remat.planning.plan import ADVICE, Plan
from remat.planning.smallest_budget import Floor, smallest_budget

SolveWithin = Callable[[int], Result]
"""From most live bytes to a judged answer, with or without a schedule."""

_PROBES = 8
_OVER_LIVE_PERCENTS = (102, 104, 107, 112, 120)

_Choices = Sequence[tuple[int, int]]
"""What to prime, in percent: of all that there is, and of that in the first block."""

_ALL_CHOICES = tuple(product((100, 99, 98, 96, 94), (0, 5, 10, 15, 25, 40)))
_FEW_CHOICES = ((100, 0), (100, 10), (98, 0))
_STEP_BYTES = 2 * MIB
_LEAST_PRIMED_BYTES = 10 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedAnswer:
    """A schedule, and what the allocator makes of it.

    Parameters
    ----------
    result
        What the solver answered.
    schedule, trace
        Its schedule, and the replay of that.
    use
        What is reserved.
    limit_bytes
        Within how many live bytes the schedule was asked for.
    """

    result: Result
    schedule: Schedule
    trace: Trace
    use: ReservedUse
    limit_bytes: int

    @property
    def live_bytes(self) -> int:
        """Most bytes in use."""
        return self.trace.peak_bytes[0]


class ReservedSearch:
    """Looks for the quickest schedule that reserves no more than a budget.

    Parameters
    ----------
    graph
        The training step.
    budget_bytes
        Most bytes reserved.
    settings
        How the allocator is set.
    """

    def __init__(
        self, graph: TrainingGraph, budget_bytes: int, settings: AllocatorSettings
    ) -> None:
        self.graph = graph
        self.budget_bytes = budget_bytes
        self.settings = settings
        self.best: ReservedAnswer | None = None
        """The quickest that fits."""

    def offer(self, result: Result, limit_bytes: int) -> ReservedAnswer | None:
        """Replay an answer, and keep it if it is the best so far.

        Returns what the allocator makes of it, or ``None`` without a schedule.
        """
        if result.schedule is None or result.trace is None:
            return None
        return self.keep(result, result.schedule, result.trace, limit_bytes)

    def keep(
        self, result: Result, schedule: Schedule, trace: Trace, limit_bytes: int
    ) -> ReservedAnswer:
        """Replay the schedule of an answer, and keep it if it is the best so far."""
        found = ReservedAnswer(
            result=result,
            schedule=schedule,
            trace=trace,
            use=self.least_use(schedule, trace.peak_bytes[0]),
            limit_bytes=limit_bytes,
        )
        is_quickest = (
            self.best is None or found.trace.serial_ns < self.best.trace.serial_ns
        )
        if found.use.reserved_bytes <= self.budget_bytes and is_quickest:
            self.best = found
        return found

    def keep_floor(self, floor: Floor, first: Result) -> ReservedAnswer:
        """Replay the schedule of fewest live bytes, and keep it if it is the best."""
        schedule, trace = floor.schedule, floor.trace
        result = replace(
            first,
            solver="smallest_budget",
            status=Status.FEASIBLE,
            schedule=schedule,
            trace=trace,
        )
        return self.keep(result, schedule, trace, floor.budget_bytes)

    def least_use(self, schedule: Schedule, live_bytes: int) -> ReservedUse:
        """Return how a schedule reserves no more than the budget, or the least.

        Replays the schedule up to 50 times.
        """
        kind = self.graph.device_kinds[0]
        replay = AllocatorReplay(self.graph, schedule, self.settings, kind=kind)
        best = plain = replay.use()
        is_one = self.settings.expandable_segments
        if is_one or self.settings.max_split_size_mb is not None:
            return best
        for target_bytes, choices in self._targets(live_bytes):
            if best.reserved_bytes <= target_bytes:
                break
            for primed_bytes in _primed_choices(plain, target_bytes, choices):
                use = replay.use(primed_bytes)
                if use.reserved_bytes < best.reserved_bytes:
                    best = use
                if use.reserved_bytes <= target_bytes:
                    break
        return best

    def _targets(self, live_bytes: int) -> Iterator[tuple[int, _Choices]]:
        """Yield how much might be reserved, and what to try for it.

        First the budget, and then, to know how much is needed, little over live.
        """
        yield self.budget_bytes, _ALL_CHOICES
        for percent in _OVER_LIVE_PERCENTS:
            target_bytes = live_bytes * percent // 100
            if target_bytes > self.budget_bytes:
                yield target_bytes, _FEW_CHOICES

    def run(self, solve_within: SolveWithin, first: Result, limits: Limits) -> None:
        """Ask for schedules within fewer live bytes, by bisection.

        Parameters
        ----------
        solve_within
            Asked at most seven times.
        first
            The answer within as many live bytes as the budget has.
        limits
            When to stop.
        """
        # Limits from ``too_many`` on reserve too much, as far as is known; up to
        # ``enough`` they fit, or there is no schedule.
        enough = peak_bound_bytes(self.graph, self.graph.device_kinds[0]) - 1
        too_many = self.budget_bytes + 1
        limit_bytes, result = self.budget_bytes, first
        for percent in range(100, 100 - _PROBES, -1):
            found = self.offer(result, limit_bytes)
            if found is None or found.use.reserved_bytes <= self.budget_bytes:
                enough = limit_bytes
            else:
                too_many = min(limit_bytes, found.live_bytes)
            if limits.is_over or too_many - enough <= max(1, self.budget_bytes // 100):
                return
            limit_bytes = (enough + too_many) // 2
            if found is not None and self.best is None:
                # As much less as was reserved too much, and each time a little more.
                share = self.budget_bytes * percent // 100 / found.use.reserved_bytes
                scaled = int(found.live_bytes * share)
                limit_bytes = min(max(scaled, enough + 1), too_many - 1)
            result = solve_within(limit_bytes)


def _primed_choices(
    plain: ReservedUse, target_bytes: int, choices: _Choices
) -> Iterator[tuple[int, ...]]:
    """Yield what to prime so that no more than the target need be reserved.

    What is reserved for residents and for small blocks is needed besides.
    """
    rest_bytes = (
        target_bytes - plain.resident_reserved_bytes - plain.small_reserved_bytes
    )
    for percent, first in choices:
        primed_bytes = rest_bytes * percent // 100 // _STEP_BYTES * _STEP_BYTES
        first_bytes = primed_bytes * first // 100 // _STEP_BYTES * _STEP_BYTES
        blocks = (first_bytes, primed_bytes - first_bytes)[not first :]
        if min(blocks) >= _LEAST_PRIMED_BYTES:
            yield blocks


def answer_reserved(
    graph: TrainingGraph,
    budget_bytes: int,
    settings: AllocatorSettings,
    solve_within: SolveWithin,
    first: Result,
    limits: Limits,
) -> ReservedAnswer:
    """Return an answer that reserves no more than the budget.

    Parameters
    ----------
    graph, budget_bytes, settings
        As for :class:`ReservedSearch`.
    solve_within, first, limits
        As for :meth:`ReservedSearch.run`.

    Raises
    ------
    BudgetError
        If none is found; it names a budget that a plan is known for.
    """
    search = ReservedSearch(graph, budget_bytes, settings)
    search.run(solve_within, first, limits)
    if search.best is not None:
        return search.best
    floor = smallest_budget(graph, kind=graph.device_kinds[0], limits=limits)
    found = search.keep_floor(floor, first)
    if found.use.reserved_bytes > budget_bytes:
        raise_reserved_error(graph, budget_bytes, settings, floor, first)
    return found


def reserved_words(
    graph: TrainingGraph, answer: ReservedAnswer, first: Result
) -> dict[str, str]:
    """Return for a plan's settings what fragmentation costs, and what would help.

    Parameters
    ----------
    graph
        The training step.
    answer
        What is planned.
    first
        The answer within as many live bytes as the budget has.
    """
    words: list[str] = []
    if answer.use.primed_bytes:
        primed = " and ".join(map(format_bytes, answer.use.primed_bytes))
        words.append(
            f"{primed} are allocated and freed before the first step, as segments that "
            "all later blocks share"
        )
    if answer.result is not first and first.cost_ns:
        more = answer.trace.serial_ns / first.cost_ns - 1
        words.append(
            f"fragmentation costs {more:+.1%} time: live bytes are kept within "
            f"{format_bytes(answer.limit_bytes)}"
        )
    if advice := allocator_advice(graph, answer):
        words.append(advice)
    return {ADVICE: "; ".join(words)} if words else {}


def raise_reserved_error(
    graph: TrainingGraph,
    budget_bytes: int,
    settings: AllocatorSettings,
    floor: Floor,
    first: Result,
) -> NoReturn:
    """Raise the error that names a budget of reserved bytes that a plan is known for.

    It is that of the schedule with the fewest live bytes that is known.

    Parameters
    ----------
    graph, budget_bytes, settings
        As for :class:`ReservedSearch`.
    floor
        That schedule.
    first
        What the solver answered, with a schedule or without.

    Raises
    ------
    BudgetError
        Always.
    """
    required_bytes = budget_bytes
    while True:
        # Until what is named is found again by who asks for it: with more bytes, other
        # blocks are primed. What is reserved without any is always enough.
        search = ReservedSearch(graph, required_bytes, settings)
        found = search.keep_floor(floor, first)
        if found.use.reserved_bytes <= required_bytes:
            break
        required_bytes = found.use.reserved_bytes
    asked = f"{format_bytes(budget_bytes)} ({budget_bytes:_} bytes)"
    advice = allocator_advice(graph, found)
    msg = (
        f"no plan was found for which the caching allocator with "
        f"{str(settings) or 'its default settings'} reserves at most {asked}: the "
        f"smallest known is {format_bytes(required_bytes)} ({required_bytes:_} bytes), "
        f"for {format_bytes(found.live_bytes)} of live bytes; raise the budget to at "
        f"least {required_bytes} bytes, shrink the batch, or count live bytes with "
        f"account='live'{'; ' if advice else ''}{advice}"
    )
    raise BudgetError(msg, budget_bytes=budget_bytes, required_bytes=required_bytes)


def allocator_advice(graph: TrainingGraph, answer: ReservedAnswer) -> str:
    """Return which setting of the allocator would reserve less, with its figures.

    Empty where none of those that are tried does.
    """
    use, kind = answer.use, graph.device_kinds[0]
    if use.settings.expandable_segments:
        return ""
    other = replace(use.settings, expandable_segments=True)
    found = AllocatorReplay(graph, answer.schedule, other, kind=kind).use()
    if found.reserved_bytes >= use.reserved_bytes:
        return ""
    return (
        f"{ENVIRONMENT[0]}={other} would reserve {format_bytes(found.reserved_bytes)} "
        f"for the same schedule instead of {format_bytes(use.reserved_bytes)}"
    )


def with_allocator(plan: Plan, settings: AllocatorSettings | None) -> Plan:
    """Return a plan whose first device has a caching allocator that is set so.

    ``None`` for none. The budget counts what it counted before.
    """
    if settings is None:
        return plan
    home = plan.platform.devices[0].name
    others = [a for a in plan.platform.allocators if a.device != home]
    allocators = (DeviceAllocator(device=home, settings=settings), *others)
    return replace(
        plan,
        platform=replace(plan.platform, allocators=allocators),
        _judged=plan.trace,
        _proved_ns=plan.proved_ns,
    )
