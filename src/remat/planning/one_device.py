"""Plan a training graph within a budget, or within several; never imports torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from remat.bounds.time_bound import TimeBounds
from remat.core.allocator import AllocatorSettings
from remat.core.checks import (
    checked_callable,
    checked_flag,
    checked_number,
    checked_record,
    checked_text,
    checked_word,
)
from remat.core.contributors import contributors, largest
from remat.core.device_graph import arrange, home_of, place_graph, place_of
from remat.core.errors import (
    BudgetError,
    InvalidPlatformError,
    UnitError,
)
from remat.core.graph import TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import Platform, single_device
from remat.core.problem import (
    Limits,
    Objective,
    Problem,
    Result,
    Status,
    StopReason,
    check_time_limit,
)
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.core.units import ANY_WHOLE_BYTES, format_bytes, is_percentage, parse_budget
from remat.memory.requests import reserved_use
from remat.native import core
from remat.planning.plan import Account, Plan, loss_hint, plan_settings
from remat.planning.portfolio import solve, solve_portfolio
from remat.planning.proofs import NEGLIGIBLE_GAP, is_near, with_bound
from remat.planning.reserved import (
    ReservedAnswer,
    answer_reserved,
    raise_reserved_error,
    reserved_words,
)
from remat.planning.several_devices import (
    Budget,
    budgets_bytes,
    check_budgets,
    plan_on_devices,
)
from remat.planning.smallest_budget import FLOOR_SOLVERS, Floor, smallest_budget
from remat.solvers.base import ProgressCallback, Solver, ignore_progress
from remat.solvers.local_search import LocalSearch
from remat.solvers.registry import QUICK, chosen_solvers

_PROBE_SHARE = 0.3
"""How much of the time that is left a schedule within fewer live bytes may take."""

_LARGE_OPS = 1500
"""From where on solvers of the whole graph take seconds."""


def plain_peak_bytes(
    graph: TrainingGraph, allocator: AllocatorSettings | None = None
) -> int:
    """Return the peak of the step without rematerialisation: what 100 % means.

    With an allocator it is the peak of what that reserves.
    """
    plain = schedule_from_order(graph, store_all_order(graph))
    if allocator is not None:
        return reserved_use(graph, plain, allocator).reserved_bytes
    return simulate(graph, _platform(graph), plain).peak_bytes[0]


def plan_graph(  # noqa: PLR0913 - every option that a user has
    graph: TrainingGraph,
    *,
    budget: Budget | None,
    platform: Platform | None = None,
    fingerprint: str = "",
    solver: str = "auto",
    objective: Objective = Objective.SERIAL,
    time_limit: float | None = None,
    seed: int = 0,
    progress: ProgressCallback = ignore_progress,
    has_assumed_loss: bool = False,
    settings: Mapping[str, Any] | None = None,
    leading: Solver | None = None,
    gap: float = 0.0,
    account: Account | None = None,
) -> Plan:
    """Solve and judge: return a plan for ``graph`` within the budget.

    Parameters
    ----------
    graph
        A training step.
    budget
        Bytes, a size such as ``"8 GiB"``, or a percentage of the predicted peak
        without rematerialisation (of what is then reserved, where that is counted);
        with several devices a mapping of these by the devices' names.
    platform
        The devices, if there are several, or if one has a caching allocator. Either the
        graph has costs for each of them (:mod:`remat.core.device_graph`), or they
        follow from those that it has.
    fingerprint
        Identifies the traced step that the graph is of; empty for a graph that was
        not captured here. Such a plan cannot be installed on a model.
    solver, objective, time_limit, seed, progress
        As for :func:`remat.fit`.
    has_assumed_loss
        Whether the memory of the caller's loss is a guess, so that describing it may
        help where nothing fits.
    settings
        What else the plan was made with, for people.
    leading
        A solver made for this graph, asked before those of ``"auto"``; where the graph
        is large, its answer will do.
    gap
        As for :func:`remat.fit`.
    account
        Whose bytes the budget counts: ``"reserved"``, those that the caching allocator
        of the one device holds, which is the default where the platform says that it
        has one; or ``"live"``, those of the blocks in use.

    Raises
    ------
    BudgetError
        If no schedule fits; it names the smallest budget with a known schedule.
    InvalidPlatformError
        If reserved bytes are to be counted and the platform is not of one device with a
        caching allocator; if a device has no budget, a budget is for no device, a
        device is out of reach, or an op can run on none.
    SolverUnsuitableError
        If the solver is unknown or cannot treat the graph.
    UnitError
        If the budget is not a positive size.
    ValueError
        If the objective is unknown, the seed no integer or out of range, or an argument
        of another type.
    """
    check_time_limit(time_limit)
    _check_types(graph, fingerprint, progress, settings, platform)
    checked_flag("has_assumed_loss", has_assumed_loss)
    objective = checked_word("objective", objective, Objective)
    checked_number("gap", gap, most=1.0)
    limits = Limits.after(time_limit, seed)
    account = _account_of(account, platform)
    if platform is not None and len(platform.devices) > 1:
        placed, graph = placed_on(graph, platform)
        return plan_on_devices(
            graph,
            placed,
            several_budgets(placed, budget),
            fingerprint=fingerprint,
            solver=solver,
            objective=objective,
            time_limit=time_limit,
            seed=seed,
            progress=progress,
            has_assumed_loss=has_assumed_loss,
            settings=settings,
        )
    _check_runs_alone(graph)
    budget = one_budget(budget, platform, kind=graph.device_kinds[0])
    allocator = None if platform is None else platform.allocator_of(0)
    # What is replayed, too, where its bytes are what the budget counts.
    counted = allocator if account == "reserved" else None
    whole_bytes = (
        plain_peak_bytes(graph, counted) if is_percentage(budget) else ANY_WHOLE_BYTES
    )
    budget_bytes = parse_budget(budget, whole_bytes=whole_bytes)
    solvers = chosen_solvers(
        solver,
        objective=objective,
        is_timed=time_limit is not None,
        op_count=len(graph.ops),
    )
    leading_solvers = [] if leading is None or solver != "auto" else [leading]
    asked = [*leading_solvers, *solvers]
    if leading_solvers and len(graph.ops) > _LARGE_OPS:
        asked = leading_solvers
    bounds = TimeBounds(graph, budget_bytes, limits=limits)
    near = partial(is_near, bounds, gap=gap)
    near_enough = max(gap, NEGLIGIBLE_GAP if time_limit is None else 0.0)
    # A search over all runs would take equal regions apart, and each needs a lowering.
    improver = (
        None if leading_solvers else partial(local_search_from, bounds, gap=near_enough)
    )
    ask = partial(solve_alone, graph, budget_bytes)
    result = ask(asked, limits, progress, near, improver)
    if result.schedule is None and asked is leading_solvers:
        result = ask(solvers, limits, progress, near, improver)
    schedule, trace, floor_bytes = result.schedule, result.trace, None
    if schedule is None:
        progress("looking for the smallest budget", 0.0)
        floor = smallest_budget(
            graph,
            kind=graph.device_kinds[0],
            solvers=[*leading_solvers, *FLOOR_SOLVERS],
            limits=limits,
        )
        floor_bytes = floor.budget_bytes
        if counted is not None and budget_bytes < floor_bytes:
            raise_reserved_error(graph, budget_bytes, counted, floor, result)
        if counted is None and (budget_bytes < floor_bytes or solver != "auto"):
            raise_budget_error(
                graph, budget_bytes, result, floor, has_assumed_loss=has_assumed_loss
            )
        # What an error would have named as possible is not refused.
        result = replace(
            result,
            solver="smallest_budget",
            status=Status.FEASIBLE,
            schedule=floor.schedule,
            trace=floor.trace,
        )
        result = _improved(graph, budget_bytes, result, improver, limits)
        schedule, trace = result.schedule or floor.schedule, result.trace
    made_with, use = plan_settings(settings, solver, seed, result), None
    if counted is not None:
        progress("replaying the caching allocator", 0.0)
        solve_within = partial(
            *(_solve_within, graph, asked), limits=limits, progress=progress, near=near
        )
        answer = answer_reserved(
            graph, budget_bytes, counted, solve_within, result, limits
        )
        made_with |= reserved_words(graph, answer, result)
        schedule, trace, use = answer.schedule, answer.trace, answer.use
        result = _as_for(budget_bytes, answer, result)
    plan = Plan(
        graph=graph,
        platform=_platform(graph, budget_bytes, allocator),
        schedule=schedule,
        solver=result.solver,
        status=result.status,
        bound_ns=result.bound_ns,
        fingerprint=fingerprint,
        smallest_budget_bytes=floor_bytes,
        account=account,
        primed_bytes=() if use is None else use.primed_bytes,
        settings=made_with,
        _judged=trace,
        _reserved=use,
    )
    return with_bound(plan, bounds)


def _check_types(
    graph: object,
    fingerprint: object,
    progress: object,
    settings: object,
    platform: object,
) -> None:
    checked_record("graph", graph, TrainingGraph)
    checked_text("fingerprint", fingerprint)
    checked_callable("progress", progress)
    if settings is not None:
        checked_record("settings", settings, Mapping)
    if platform is not None:
        checked_record("platform", platform, Platform)


def _account_of(account: Account | None, platform: Platform | None) -> Account:
    """Return whose bytes a budget counts on these devices.

    Raises
    ------
    InvalidPlatformError
        If reserved bytes cannot be counted there.
    ValueError
        If there is no such account.
    """
    if account not in {None, "live", "reserved"}:
        msg = (
            f"account is {account!r}; it must be 'reserved', 'live' or left out (None)"
        )
        raise ValueError(msg)
    is_one = platform is not None and len(platform.devices) == 1
    has_allocator = platform is not None and platform.allocator_of(0) is not None
    if account == "reserved" and not (is_one and has_allocator):
        msg = (
            "account='reserved' counts what a caching allocator holds, but the platform "
            + (
                "has several devices, whose budgets count live bytes"
                if has_allocator
                else "says of no device that its memory has one: give platform= with "
                "allocators=(DeviceAllocator(device=...),)"
            )
        )
        raise InvalidPlatformError(msg)
    if account is None:
        return "reserved" if is_one and has_allocator else "live"
    return account


def _as_for(budget_bytes: int, answer: ReservedAnswer, first: Result) -> Result:
    """Return an answer with what is proved of it within all the bytes of a budget.

    What is proved of the schedules within fewer live bytes is not.
    """
    if answer.limit_bytes == budget_bytes or answer.result is first:
        return answer.result
    return replace(answer.result, status=Status.FEASIBLE, bound_ns=0)


def _solve_within(
    graph: TrainingGraph,
    solvers: Sequence[Solver],
    budget_bytes: int,
    *,
    limits: Limits,
    progress: ProgressCallback,
    near: Callable[[int], bool],
) -> Result:
    share = limits.share(_PROBE_SHARE)
    return solve_alone(graph, budget_bytes, solvers, share, progress, near)


def _check_runs_alone(graph: TrainingGraph) -> None:
    for index, storage in enumerate(graph.storages):
        if storage.home:
            msg = (
                f"storage {index} {storage.name!r} is at home on device {storage.home}, "
                "but one device is planned for, device 0; give a platform with all the "
                "devices of the graph, and a budget for each"
            )
            raise InvalidPlatformError(msg)
    for index, op in enumerate(graph.ops):
        if op.cost_ns[0] is None:
            msg = (
                f"op {index} {op.name!r} cannot run on {graph.device_kinds[0]!r}, the one "
                "device that is planned for; give a platform with a device that can run it"
            )
            raise InvalidPlatformError(msg)


def placed_on(
    graph: TrainingGraph, platform: Platform
) -> tuple[Platform, TrainingGraph]:
    """Return an arranged platform, and the graph with costs for its devices.

    A graph that has costs for all its devices already, and the platform, are returned
    as they are. Home is else the device that is called as the graph's first kind, or
    the first of a kind that the graph has costs for.

    Raises
    ------
    InvalidPlatformError
        If there is no such device, or costs of another one do not follow.
    """
    if graph.device_kinds == tuple(device.kind for device in platform.devices):
        return platform, graph
    first = graph.device_kinds[0]
    known = [
        device
        for device in range(len(platform.devices))
        if platform.kind_of(device).computes
        and {platform.devices[device].kind, (place_of(platform, device) or "")}
        & set(graph.device_kinds)
    ]
    # As for a model: the device of that name, or else the first.
    known.sort(key=lambda device: platform.names[device] != first)
    home = known[0] if known else home_of(platform, first)
    _check_homes(graph, platform, home)
    arranged = arrange(platform, home)
    return arranged, place_graph(graph, arranged)


def _check_homes(graph: TrainingGraph, platform: Platform, home: int) -> None:
    """Refuse to reorder devices that the graph refers to by their numbers."""
    if home == 0:
        return
    for index, storage in enumerate(graph.storages):
        if storage.home:
            msg = (
                f"storage {index} {storage.name!r} is at home on device {storage.home}, "
                f"but the platform's first device, {platform.names[0]!r}, is not the one "
                f"that the graph begins with; put {platform.names[home]!r} first"
            )
            raise InvalidPlatformError(msg)


def several_budgets(
    platform: Platform, budget: Budget | None
) -> Mapping[str, int | str | None] | None:
    """Return the budgets of several devices, checked against their platform.

    Raises
    ------
    InvalidPlatformError
        If there is but one budget, one is missing, or one is for an unknown device.
    """
    if isinstance(budget, int | str):
        msg = (
            f"the budget is {budget!r}, but the platform has the devices "
            f"{', '.join(platform.names)}; give one for each, such as "
            f"budget={{{platform.names[0]!r}: {budget!r}, ...}}"
        )
        raise InvalidPlatformError(msg)
    check_budgets(platform, budget)
    return budget


def one_budget(
    budget: Budget | None, platform: Platform | None = None, *, kind: str | None = None
) -> int | str:
    """Return the budget of one device.

    Parameters
    ----------
    budget
        One, or a mapping of one by the device's name.
    platform
        The device; ``None`` where it is not described.
    kind
        Its kind, where that is all that is known of it.

    Raises
    ------
    InvalidPlatformError
        If budgets are for several devices, or for another one than the platform's.
    UnitError
        If there is none.
    """
    if isinstance(budget, Mapping):
        names = list(budgets_bytes(budget, ANY_WHOLE_BYTES))
        if platform is None and len(names) > 1:
            msg = (
                f"budgets are given for {', '.join(names)}; a platform says what these "
                "devices are and how they are linked: give platform="
            )
            raise InvalidPlatformError(msg)
        if platform is not None:
            check_budgets(platform, budget)
        elif kind is not None and names[0].split(":")[0] != kind.split(":")[0]:
            msg = (
                f"a budget is given for {names[0]!r}, but the graph is for {kind!r}; "
                f"give budget={budget[names[0]]!r}, or a platform with {names[0]!r}"
            )
            raise InvalidPlatformError(msg)
        budget = budget[names[0]]
    if budget is None and platform is not None:
        budget = platform.devices[0].budget_bytes
    if budget is None:
        raise UnitError("give a budget, for example budget='8 GiB'")
    return budget


def _platform(
    graph: TrainingGraph,
    budget_bytes: int | None = None,
    allocator: AllocatorSettings | None = None,
) -> Platform:
    return single_device(budget_bytes, graph.device_kinds[0], allocator)


def solve_alone(
    graph: TrainingGraph,
    budget_bytes: int,
    solvers: Sequence[Solver],
    limits: Limits,
    progress: ProgressCallback = ignore_progress,
    is_near: Callable[[int], bool] | None = None,
    improver: Callable[[Result], Solver | None] | None = None,
) -> Result:
    """Ask one solver or a portfolio for a schedule on one device."""
    problem = Problem(graph=graph, platform=_platform(graph, budget_bytes))
    if len(solvers) == 1:
        return solve(problem, solvers[0], limits=limits, on_progress=progress)
    quick = QUICK if limits.deadline_s is not None else ()
    return solve_portfolio(
        problem,
        solvers,
        quick=quick,
        limits=limits,
        on_progress=progress,
        is_near=is_near,
        improver=improver,
    )


def _improved(
    graph: TrainingGraph,
    budget_bytes: int,
    result: Result,
    improver: Callable[[Result], Solver | None] | None,
    limits: Limits,
) -> Result:
    """Return the result of a search from one, if that is better."""
    if improver is None or limits.is_over or core() is None:
        return result
    solver = improver(result)
    if solver is None:
        return result
    problem = Problem(graph=graph, platform=_platform(graph, budget_bytes))
    better = solve(problem, solver, limits=limits)
    if better.cost_ns is None or better.cost_ns >= (result.cost_ns or 0):
        return result
    return replace(better, candidates=result.candidates)


def local_search_from(
    bounds: TimeBounds,
    result: Result,
    *,
    gap: float = 0.0,
    others: Sequence[Schedule] = (),
) -> Solver | None:
    """Return a local search from a result; ``None`` if that is near enough the best.

    Parameters
    ----------
    bounds
        Of the step and the budget; made better as far as that takes.
    result
        The best one so far.
    gap
        The share of its time that the best schedule may be faster by.
    others
        More schedules to start from.
    """
    if result.schedule is None or result.cost_ns is None:
        return None
    if is_near(bounds, result.cost_ns, gap):
        return None
    enough_ns = math.floor(bounds.best_ns / (1 - gap)) if gap < 1 else 0
    return LocalSearch(starts=(result.schedule, *others), enough_ns=enough_ns)


def raise_budget_error(
    graph: TrainingGraph,
    budget_bytes: int,
    result: Result,
    floor: Floor,
    *,
    has_assumed_loss: bool = False,
) -> NoReturn:
    """Raise the error that names the smallest known budget and what it consists of.

    At or above that budget, it is a named solver that finds nothing, and the error says
    so: schedules that fit are known. Below it, the error says what is proved: that
    nothing fits, that nothing smaller is possible, both, or neither.

    Raises
    ------
    BudgetError
        Always.
    """
    floor_bytes = floor.budget_bytes
    asked = f"{format_bytes(budget_bytes)} ({budget_bytes:_} bytes)"
    smallest = f"{format_bytes(floor_bytes)} ({floor_bytes:_} bytes)"
    parts = contributors(graph, floor.schedule, floor.trace.peak_step())
    listing = ", ".join(
        f"{format_bytes(size)} {name}" for name, size in largest(parts, 6)
    )
    hint = ""
    if has_assumed_loss:
        hint = loss_hint(graph, floor.schedule, floor.trace)
    is_late = result.stop_reason is StopReason.TIME_LIMIT
    in_time = " in its time" if is_late else ""
    if budget_bytes < floor_bytes:
        is_proved = budget_bytes < floor.bound_bytes
        found = "no schedule fits in" if is_proved else "no schedule was found within"
        kind = "smallest possible" if floor.is_proved else "smallest known"
        is_open = is_late and not floor.is_proved
        least = f"{format_bytes(floor.bound_bytes)} ({floor.bound_bytes:_} bytes)"
        proved = (
            "" if floor.is_proved else f"; no schedule can fit below {least} (proved)"
        )
        advice = ", or give more time than the time limit" if is_open else ""
        msg = (
            f"{found} {asked}: the {kind} budget is {smallest}, made of {listing}{hint}; "
            f"raise the budget to at least {floor_bytes} bytes, or shrink the "
            f"batch{advice}{proved}"
        )
    else:
        msg = (
            f"solver {result.solver} finds no schedule within {asked}{in_time}: "
            f"{result.message}; a schedule of {smallest} is known (use solver='auto'), made of {listing}"
            f"{hint}"
        )
    raise BudgetError(
        msg,
        budget_bytes=budget_bytes,
        required_bytes=floor_bytes,
        schedule=floor.schedule,
    )
