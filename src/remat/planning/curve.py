"""Time against memory: plans at several budgets of the first device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from remat.bounds.time_bound import TimeBounds
from remat.core.bounds import cost_bound_ns
from remat.core.checks import checked_integer, checked_record, entries_of
from remat.core.errors import BudgetError, InvalidPlatformError, UnitError
from remat.core.graph import TrainingGraph
from remat.core.platform import Platform, single_device
from remat.core.problem import Limits, Problem, Status, check_time_limit
from remat.core.units import format_bytes, parse_budget
from remat.planning.one_device import (
    local_search_from,
    placed_on,
    plain_peak_bytes,
    solve_alone,
)
from remat.planning.plan import Plan, plan_settings
from remat.planning.proofs import NEGLIGIBLE_GAP, at_budget, with_bound
from remat.planning.several_devices import (
    DeviceBudgets,
    budgets_bytes,
    check_budgets,
    plain_peak_at_home,
    plan_on_devices,
)
from remat.planning.smallest_budget import smallest_budget
from remat.search.paging import smallest_paged
from remat.solvers import chosen_solvers
from remat.solvers.base import ProgressCallback, ignore_progress


def trade_off(  # noqa: PLR0913 - every option that a user has
    graph: TrainingGraph,
    budgets: Sequence[int | str] | int,
    *,
    fingerprint: str = "",
    solver: str = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    progress: ProgressCallback = ignore_progress,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Plan, ...]:
    """Plan a graph at several budgets: time against memory.

    More budget is never slower and less never takes more memory: each budget gets the
    cheapest of all the schedules found that fits, and the search for a larger one
    starts from those for smaller ones as well. Every plan knows the smallest budget.

    Parameters
    ----------
    graph, fingerprint, solver, time_limit, seed, settings
        As for :func:`remat.planning.one_device.plan_graph`; the time limit is for each
        budget, and for the search for the smallest.
    budgets
        The budgets, or how many to spread evenly from the smallest known to the
        peak without rematerialisation (at least 2). The smallest known is always
        added; smaller ones are left out.
    progress
        Called with the budget in turn and the share of budgets that are done.

    Returns
    -------
    tuple of Plan
        One per budget, by increasing budget.

    Raises
    ------
    SolverUnsuitableError
        If the solver is unknown or cannot treat the graph.
    UnitError
        If a budget is not a positive size, or fewer than 2 points are asked for.
    ValueError
        If the seed is no integer or out of range, or an argument of another type.
    """
    check_time_limit(time_limit)
    checked_record("graph", graph, TrainingGraph)
    Limits(seed=seed)
    budgets = asked_budgets(budgets)
    solvers = chosen_solvers(solver)
    kind = graph.device_kinds[0]

    def smallest() -> tuple[Plan, int]:
        limits = Limits.after(time_limit, seed)
        floor = smallest_budget(graph, kind=kind, limits=limits)
        platform = single_device(floor.budget_bytes, kind)
        plan = Plan(
            graph=graph,
            platform=platform,
            schedule=floor.schedule,
            solver="smallest_budget",
            status=Status.FEASIBLE,
            bound_ns=cost_bound_ns(Problem(graph=graph, platform=platform)),
            fingerprint=fingerprint,
            settings=settings or {},
            _judged=floor.trace,
        )
        # A solver may do better than the search for the smallest budget did.
        return with_bound(plan, limits=limits), floor.bound_bytes

    def within(budget_bytes: int, known: Sequence[Plan]) -> Plan | None:
        limits = Limits.after(time_limit, seed)
        bounds = TimeBounds(graph, budget_bytes, kind, limits)
        cheapest = min(known, key=lambda plan: (plan.cost_ns, plan.peak_bytes))
        improver = partial(
            local_search_from, bounds, gap=NEGLIGIBLE_GAP, others=[cheapest.schedule]
        )
        result = solve_alone(graph, budget_bytes, solvers, limits, improver=improver)
        if result.schedule is None:
            return None
        plan = Plan(
            graph=graph,
            platform=single_device(budget_bytes, kind),
            schedule=result.schedule,
            solver=result.solver,
            status=result.status,
            bound_ns=result.bound_ns,
            fingerprint=fingerprint,
            settings=plan_settings(settings, solver, seed, result),
            _judged=result.trace,
        )
        return with_bound(plan, bounds)

    return _curve(budgets, plain_peak_bytes(graph), smallest, within, progress)


def trade_off_on_devices(  # noqa: PLR0913 - every option that a user has
    graph: TrainingGraph,
    platform: Platform,
    budgets: Sequence[int | str] | int,
    *,
    others: DeviceBudgets | None = None,
    fingerprint: str = "",
    solver: str = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    progress: ProgressCallback = ignore_progress,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Plan, ...]:
    """Plan a graph at several budgets of the first device, the others keeping theirs.

    More budget is never slower, one thing at a time, and less never takes more memory
    on the first device: each budget gets the cheapest of all schedules found that fits.

    Parameters
    ----------
    graph, platform
        As for :func:`remat.planning.one_device.plan_graph`. The first device is home:
        where parameters and batch are.
    budgets
        Of the first device: bytes, sizes, percentages of the peak without
        rematerialisation there; or how many to spread evenly from the smallest with a
        known schedule to that peak (at least 2). The smallest is always added; budgets
        for which nothing is found are left out.
    others
        Budgets of the other devices, by name, where the platform has none.
    fingerprint, solver, time_limit, seed, settings
        As for :func:`remat.planning.one_device.plan_graph`; the time limit is for each
        budget, and for the search for the smallest.
    progress
        Called with the budget in turn and the share of budgets that are done.

    Returns
    -------
    tuple of Plan
        One per budget, by increasing budget of the first device.

    Raises
    ------
    InvalidPlatformError
        If some op cannot run on the first device, so that there is no step to compare
        with; if a device but the first has no budget, or the first is given one.
    SolverUnsuitableError
        If the solver is unknown or cannot treat the graph on this platform.
    UnitError
        If a budget is not a positive size, or fewer than 2 points are asked for.
    ValueError
        If the seed is no integer or out of range, or an argument of another type.
    """
    check_time_limit(time_limit)
    checked_record("graph", graph, TrainingGraph)
    checked_record("platform", platform, Platform)
    Limits(seed=seed)
    budgets = asked_budgets(budgets)
    chosen_solvers(solver, has_several_devices=True)
    platform, graph = placed_on(graph, platform)
    home = platform.devices[0]
    platform = _with_others(platform, others)
    _check_runs_at_home(graph, platform)
    staying = {device.name: device.budget_bytes for device in platform.devices}

    def smallest() -> tuple[Plan, int]:
        limits = Limits.after(time_limit, seed)
        plan = _smallest(graph, platform, fingerprint, settings, limits)
        return plan, graph.resident_bytes(0)

    def within(budget_bytes: int, _: Sequence[Plan]) -> Plan | None:
        try:
            return plan_on_devices(
                graph,
                platform,
                {**staying, home.name: budget_bytes},
                fingerprint=fingerprint,
                solver=solver,
                time_limit=time_limit,
                seed=seed,
                settings=settings,
            )
        except BudgetError:
            # What another budget was planned for may fit.
            return None

    whole_bytes = plain_peak_at_home(graph, platform)
    return _curve(budgets, whole_bytes, smallest, within, progress)


def _curve(
    budgets: Sequence[int | str] | int,
    whole_bytes: int,
    smallest: Callable[[], tuple[Plan, int]],
    within: Callable[[int, Sequence[Plan]], Plan | None],
    progress: ProgressCallback,
) -> tuple[Plan, ...]:
    """Plan at several budgets of the first device.

    Parameters
    ----------
    budgets, progress
        As for :func:`trade_off`.
    whole_bytes
        What 100 % means.
    smallest
        Returns the plan of the smallest known budget, and a number of bytes below which
        nothing is possible.
    within
        Returns a plan for a budget, or ``None`` if none is found, from the budget and
        the plans for smaller ones.
    """
    # Wrong sizes are refused before the search begins.
    sizes = (
        spread_budgets(0, whole_bytes, budgets)
        if isinstance(budgets, int)
        else {parse_budget(budget, whole_bytes=whole_bytes) for budget in budgets}
    )
    progress("looking for the smallest budget", 0.0)
    least, bound_bytes = smallest()
    if isinstance(budgets, int):
        sizes = spread_budgets(least.peak_bytes, whole_bytes, budgets)
    possible = {size for size in sizes if size >= bound_bytes}
    ordered = sorted({*possible, least.peak_bytes})
    plans: list[Plan] = []
    for position, size in enumerate(ordered):
        progress(f"planning for {format_bytes(size)}", position / len(ordered))
        plan = within(size, [least, *plans])
        if plan is not None:
            plans.append(plan)
    progress("done", 1.0)
    plans.append(least)
    least_bytes = min(plan.peak_bytes for plan in plans)
    return tuple(
        replace(_best_within(size, plans), smallest_budget_bytes=least_bytes)
        for size in ordered
        if size >= least_bytes
    )


def _with_others(platform: Platform, others: DeviceBudgets | None) -> Platform:
    """Return the platform with the budgets of all devices but the first.

    Raises
    ------
    InvalidPlatformError
        If one is missing, for an unknown device or for the first.
    UnitError
        If one is not a positive size.
    """
    home = platform.devices[0]
    given = dict(others or {})
    if home.name in given:
        msg = (
            f"a budget is given for {home.name!r}, but that is the one that varies: name "
            "its budgets as those of the curve"
        )
        raise InvalidPlatformError(msg)
    check_budgets(platform, {home.name: None, **given})
    return platform.with_budgets(budgets_bytes(given) if given else {})


def _check_runs_at_home(graph: TrainingGraph, platform: Platform) -> None:
    home = platform.devices[0]
    for index, storage in enumerate(graph.storages):
        if storage.home:
            msg = (
                f"a curve compares with the step on {home.name!r} alone, but storage "
                f"{index} {storage.name!r} is at home on device {storage.home}; plan for "
                "one budget at a time"
            )
            raise InvalidPlatformError(msg)
    kind = graph.kind_index(home.kind)
    for index, op in enumerate(graph.ops):
        if op.cost_ns[kind] is None:
            msg = (
                f"a curve compares with the step on {home.name!r} alone, but op {index} "
                f"{op.name!r} cannot run there; plan for one budget at a time"
            )
            raise InvalidPlatformError(msg)


def _smallest(
    graph: TrainingGraph,
    platform: Platform,
    fingerprint: str,
    settings: Mapping[str, Any] | None,
    limits: Limits,
) -> Plan:
    """Return the plan of the smallest budget of the first device that is known."""
    home = platform.devices[0]
    floor = smallest_budget(graph, kind=home.kind, limits=limits)
    schedule, peak_bytes, name = floor.schedule, floor.budget_bytes, "smallest_budget"
    paged = smallest_paged(graph, platform, floor.budget_bytes, limits)
    if paged is not None:
        schedule, peak_bytes, name = paged[0], paged[1].peak_bytes[0], "Paging"
    platform = platform.with_budgets({home.name: peak_bytes})
    return Plan(
        graph=graph,
        platform=platform,
        schedule=schedule,
        solver=name,
        status=Status.FEASIBLE,
        bound_ns=cost_bound_ns(Problem(graph=graph, platform=platform)),
        fingerprint=fingerprint,
        settings=settings or {},
    )


def _best_within(budget_bytes: int, plans: Sequence[Plan]) -> Plan:
    """Return the cheapest plan that fits, as a plan for the budget of device 0."""
    fitting = [plan for plan in plans if plan.peak_bytes <= budget_bytes]
    best = min(fitting, key=lambda p: (p.cost_ns, p.overlapped_ns, p.peak_bytes))
    if best.budget_bytes == budget_bytes:
        return best
    found = replace(at_budget(best, budget_bytes), status=Status.FEASIBLE)
    # What is proved of all schedules within a larger budget holds within this one.
    proofs = [
        plan
        for plan in plans
        if plan.certificate is not None and (plan.budget_bytes or 0) >= budget_bytes
    ]
    if not proofs:
        return found
    proof = max(proofs, key=lambda plan: plan.floor_ns)
    return replace(found, certificate=proof.certificate, bound_ns=proof.floor_ns)


MOST_POINTS = 10_000
"""Most budgets of a curve."""


def asked_budgets(budgets: Sequence[int | str] | int) -> Sequence[int | str] | int:
    """Return the number of budgets that is asked for, or the budgets themselves.

    Raises
    ------
    UnitError
        If it is no integer of at most :data:`MOST_POINTS`, and no list of so many.
    """
    entries = entries_of(budgets)
    if entries is None:
        return checked_integer("budgets", budgets, most=MOST_POINTS, error=UnitError)
    if len(entries) > MOST_POINTS:
        msg = f"there are {len(entries):_} budgets; at most {MOST_POINTS:_} are planned"
        raise UnitError(msg)
    return cast("Sequence[int | str]", entries)


def spread_budgets(low_bytes: int, high_bytes: int, count: int) -> set[int]:
    """Return ``count`` budgets evenly spaced from the lowest to the highest.

    Raises
    ------
    UnitError
        If fewer than 2 are asked for.

    Examples
    --------
    >>> sorted(spread_budgets(10, 40, 4))
    [10, 20, 30, 40]
    """
    if count < 2:
        msg = f"a curve has at least 2 points, from smallest to largest; got {count}"
        raise UnitError(msg)
    span = max(0, high_bytes - low_bytes)
    return {low_bytes + span * i // (count - 1) for i in range(count)}
