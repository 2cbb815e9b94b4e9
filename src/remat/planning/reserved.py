"""Plans within a budget of reserved bytes, which a caching allocator holds.

An allocator reserves more than is live: blocks of one size do not fill the segments of
another. What it reserves follows from the requests, and these from the plan, so that
plans are replayed on a model of it (:mod:`remat.memory.caching_allocator`) until one
fits. Three things are varied:

- what is primed: a block that is allocated and freed before the first step leaves one
  free segment, which later blocks share (not for expandable segments, which are one);
- how many bytes may be live: less than the budget, so that gaps find room;
- the schedule, which is another one for each such limit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from remat.core.allocator import ENVIRONMENT, MIB, AllocatorSettings
from remat.core.bounds import peak_bound_bytes
from remat.core.errors import BudgetError
from remat.core.graph import TrainingGraph
from remat.core.problem import Limits, Result, Status
from remat.core.units import format_bytes
from remat.memory.requests import AllocatorReplay, ReservedUse
from remat.planning.plan import ADVICE
from remat.planning.smallest_budget import smallest_budget

SolveWithin = Callable[[int], Result]
"""From most live bytes to a judged answer, with or without a schedule."""

_PROBES = 6
_SHARES_PERCENT = (100, 99, 98, 97, 96, 94, 92, 88, 84)
_STEP_BYTES = 2 * MIB
_LEAST_PRIMED_BYTES = 10 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedAnswer:
    """A schedule, and what the allocator makes of it.

    Parameters
    ----------
    result
        The schedule, judged.
    use
        What is reserved.
    live_limit_bytes
        Within how many live bytes the schedule was asked for.
    """

    result: Result
    use: ReservedUse
    live_limit_bytes: int

    @property
    def cost_ns(self) -> int:
        """The serial time of the schedule."""
        assert self.result.cost_ns is not None
        return self.result.cost_ns


def primed_choices(
    plain: ReservedUse, live_bytes: int, target_bytes: int
) -> Iterator[int]:
    """Yield how many bytes to prime so that no more than the target need be reserved.

    Parameters
    ----------
    plain
        What is reserved if nothing is primed.
    live_bytes
        The schedule's peak.
    target_bytes
        Most bytes reserved.
    """
    rest_bytes = (
        target_bytes - plain.resident_reserved_bytes - plain.small_reserved_bytes
    )
    seen: set[int] = set()
    for share in _SHARES_PERCENT:
        primed_bytes = rest_bytes * share // 100 // _STEP_BYTES * _STEP_BYTES
        if _LEAST_PRIMED_BYTES <= primed_bytes <= live_bytes and (
            primed_bytes not in seen
        ):
            seen.add(primed_bytes)
            yield primed_bytes


def least_reserved(
    graph: TrainingGraph,
    result: Result,
    settings: AllocatorSettings,
    *,
    kind: str,
    enough_bytes: int,
    may_prime: bool = True,
) -> ReservedUse:
    """Return how a schedule reserves the least, or enough if that is found first.

    Parameters
    ----------
    graph
        The training step.
    result
        An answer with a schedule.
    settings
        How the allocator is set.
    kind
        The device's kind.
    enough_bytes
        Reserved bytes that will do.
    may_prime
        Whether a block may be primed.

    Notes
    -----
    Replays the schedule about 30 times at most.
    """
    assert result.schedule is not None
    assert result.trace is not None
    replay = AllocatorReplay(graph, result.schedule, settings, kind=kind)
    best = plain = replay.use()
    can_prime = not settings.expandable_segments and settings.max_split_size_mb is None
    if not may_prime or not can_prime or best.reserved_bytes <= enough_bytes:
        return best
    live_bytes = result.trace.peak_bytes[0]
    # Towards what is live from what is enough: each target either holds or does not.
    for over_percent in (None, 0, 1, 2, 3, 4, 6, 8, 12, 16):
        target_bytes = enough_bytes
        if over_percent is not None:
            target_bytes = live_bytes * (100 + over_percent) // 100
            if target_bytes >= best.reserved_bytes:
                break
        for primed_bytes in primed_choices(plain, live_bytes, target_bytes):
            use = replay.use(primed_bytes)
            if use.reserved_bytes < best.reserved_bytes:
                best = use
            if best.reserved_bytes <= max(target_bytes, enough_bytes):
                return best
            if over_percent is not None:
                break
    return best


def fit_reserved(
    graph: TrainingGraph,
    budget_bytes: int,
    settings: AllocatorSettings,
    solve_within: SolveWithin,
    first: Result | None,
    least_bytes: int,
    *,
    kind: str,
    limits: Limits,
) -> tuple[ReservedAnswer | None, ReservedAnswer | None]:
    """Return the quickest answer found that reserves no more than the budget.

    Parameters
    ----------
    graph
        The training step.
    budget_bytes
        Most bytes reserved.
    settings
        How the allocator is set.
    solve_within
        Asked for schedules within fewer live bytes.
    first
        The answer within ``budget_bytes`` live bytes, if there is one.
    least_bytes
        Fewer live bytes are not asked for.
    kind
        The device's kind.
    limits
        When to stop asking.

    Returns
    -------
    ReservedAnswer | None
        The quickest of those that fit, or ``None``.
    ReservedAnswer | None
        That which reserves the least of all that were tried.

    Notes
    -----
    Asks about six times, by bisection between limits that fit and limits that do not.
    """
    best: ReservedAnswer | None = None
    least: ReservedAnswer | None = None
    too_many, fits = budget_bytes + 1, least_bytes - 1
    limit_bytes, result = budget_bytes, first
    for _ in range(_PROBES):
        if result is None or result.schedule is None:
            fits = limit_bytes
        else:
            assert result.trace is not None
            use = least_reserved(
                graph, result, settings, kind=kind, enough_bytes=budget_bytes
            )
            found = ReservedAnswer(result=result, use=use, live_limit_bytes=limit_bytes)
            if least is None or use.reserved_bytes < least.use.reserved_bytes:
                least = found
            if use.reserved_bytes <= budget_bytes:
                if best is None or found.cost_ns < best.cost_ns:
                    best = found
                fits = limit_bytes
            else:
                too_many = min(limit_bytes, result.trace.peak_bytes[0])
        if limits.is_over or too_many - fits <= max(1, budget_bytes // 100):
            break
        limit_bytes = _next_limit(budget_bytes, fits, too_many, least, best)
        result = solve_within(limit_bytes)
    return best, least


def _next_limit(
    budget_bytes: int,
    fits: int,
    too_many: int,
    least: ReservedAnswer | None,
    best: ReservedAnswer | None,
) -> int:
    """Return the live bytes to ask for next, between what fits and what does not."""
    middle = (fits + too_many) // 2
    if best is not None or least is None:
        return middle
    # As much less as was reserved too much.
    trace = least.result.trace
    assert trace is not None
    scaled = trace.peak_bytes[0] * budget_bytes // least.use.reserved_bytes
    return min(max(scaled, fits + 1), too_many - 1)


def answer_reserved(
    graph: TrainingGraph,
    budget_bytes: int,
    settings: AllocatorSettings,
    solve_within: SolveWithin,
    first: Result,
    *,
    limits: Limits,
) -> tuple[ReservedAnswer, dict[str, str]]:
    """Return an answer that reserves no more than the budget, and words about it.

    Arguments are those of :func:`fit_reserved`. The words say what fragmentation costs,
    and which setting of the allocator would reserve less.

    Raises
    ------
    BudgetError
        If none is found; it names the least that is reserved by one that was.
    """
    kind = graph.device_kinds[0]
    least_bytes = peak_bound_bytes(graph, kind)
    best, least = fit_reserved(
        *(graph, budget_bytes, settings, solve_within, first, least_bytes),
        kind=kind,
        limits=limits,
    )
    if best is None:
        floor = smallest_budget(graph, kind=kind, limits=limits)
        result = replace(first, schedule=floor.schedule, trace=floor.trace)
        result = replace(result, solver="smallest_budget", status=Status.FEASIBLE)
        use = least_reserved(
            graph, result, settings, kind=kind, enough_bytes=budget_bytes
        )
        found = ReservedAnswer(
            result=result, use=use, live_limit_bytes=floor.budget_bytes
        )
        if least is None or use.reserved_bytes < least.use.reserved_bytes:
            least = found
        if use.reserved_bytes > budget_bytes:
            raise_reserved_error(graph, budget_bytes, least)
        best = found
    words = _cost_words(best, first)
    if advice := allocator_advice(graph, best, kind=kind):
        words = f"{words}; {advice}" if words else advice
    return best, ({ADVICE: words} if words else {})


def _cost_words(best: ReservedAnswer, first: Result) -> str:
    """Return what is done about fragmentation, and what it costs."""
    words: list[str] = []
    if best.use.primed_bytes:
        words.append(
            f"{format_bytes(best.use.primed_bytes)} are allocated and freed before the "
            "first step, as one segment for all"
        )
    if best.result is not first and first.cost_ns:
        more = best.cost_ns / first.cost_ns - 1
        words.append(
            f"fragmentation costs {more:+.1%} time: live bytes are kept within "
            f"{format_bytes(best.live_limit_bytes)}"
        )
    return "; ".join(words)


def raise_reserved_error(
    graph: TrainingGraph, budget_bytes: int, least: ReservedAnswer
) -> NoReturn:
    """Raise the error that names the least that is known to be reserved.

    Raises
    ------
    BudgetError
        Always.
    """
    use, trace = least.use, least.result.trace
    assert trace is not None
    live_bytes = trace.peak_bytes[0]
    advice = allocator_advice(graph, least, kind=graph.device_kinds[0])
    setting = str(use.settings) or "its default settings"
    msg = (
        f"no plan was found for which the caching allocator ({setting}) reserves at most "
        f"{format_bytes(budget_bytes)} ({budget_bytes:_} bytes): the least known is "
        f"{format_bytes(use.reserved_bytes)} ({use.reserved_bytes:_} bytes), for "
        f"{format_bytes(live_bytes)} of live bytes; raise the budget to at least "
        f"{use.reserved_bytes} bytes, shrink the batch, or count live bytes "
        f"(account='live')" + (f"; {advice}" if advice else "")
    )
    raise BudgetError(msg, budget_bytes=budget_bytes, required_bytes=use.reserved_bytes)


def allocator_advice(graph: TrainingGraph, answer: ReservedAnswer, *, kind: str) -> str:
    """Return which setting of the allocator would reserve less, with its figures.

    Empty where none of those that are tried does.
    """
    use, schedule = answer.use, answer.result.schedule
    if use.settings.expandable_segments or schedule is None:
        return ""
    other = replace(use.settings, expandable_segments=True)
    found = AllocatorReplay(graph, schedule, other, kind=kind).use()
    if found.reserved_bytes >= use.reserved_bytes:
        return ""
    return (
        f"{ENVIRONMENT[0]}={other} would reserve {format_bytes(found.reserved_bytes)} "
        f"for the same schedule instead of {format_bytes(use.reserved_bytes)}"
    )
